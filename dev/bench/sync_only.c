// Measures the communication and the update of a training step without a model, for several presets
// in one process: reduces random gradients, updates the weights with AdamW and gathers them. Also
// measures the bandwidth of plain collectives. Started by dev/bench/comm.sh.
//
//   mpirun -np N build/dev/bench/sync_only [--out FILE] [--repetitions 5] [--plain-mb 256]
//       COMMON FLAGS --preset NAME FLAGS --preset NAME FLAGS ...
//
// Flags are trainer flags. Writes one JSON line per preset to FILE (default: standard output), with
// memory by purpose, bytes sent per bucket, and times. Times are in ms, of the slowest rank,
// medians over the repetitions:
//   gradients   from the start, when all gradients are ready, until the step status is known.
//               Buckets are reduced in backward order
//   weights     from the step status until the weights of all buckets are applied, minus adamw
//   adamw       AdamW and quantization alone, measured in an update without communication
//   apply       the rest of this update: dequantization and sum into the model weights
// The first line of a call has the bandwidth of plain collectives in GB/s per rank. --repetitions 0
// measures no times. If a rank hangs, the run ends with an error after the
// --distributed-timeout-minutes of the first preset.
#include <math.h>
#include <stdio.h>

#include "dev/bench/presets.h"
#include "llmc/ranks/devices.h"
#include "llmc/ranks/watchdog.h"
#include "llmc/base/json_line.h"
#include "llmc/base/memory_plan.h"
#include "llmc/base/version.h"
#include "llmc/plan/traffic.h"
#include "llmc/state/zero_parts.h"
#include "llmc/model/gpt.h"

enum { MOST_REPETITIONS = 100, PATTERN = 1 << 22 };
typedef enum Figure { GRADIENTS, AFTER_STATUS, ADAMW, FIGURES } Figure;

typedef struct Bench {
    Launch launch;
    Site site;
    Error error;
    FILE *out;  // rank 0
    int repetitions;
    int64_t plain_bytes;
    Device *device;
    Stream *compute, *traffic;  // traffic: for plain collectives
    float *pattern;             // (PATTERN) on the device: random gradients
    bool plain_done;
    bool watched;  // the watchdog has been opened
    double limit;  // timeout of waits for other ranks in seconds; 0: none, before `watched`
} Bench;

// Training state of a preset, with its memory.
typedef struct Lab {
    bool alone;  // only this rank's part of the update, without communication
    Mesh mesh;   // not opened if `alone` is set, which makes gathers no-ops
    Lanes lanes;
    Zero *zero;
    MemoryPlan memory_plan;
    Timers *timers;
} Lab;

// Placement of the ranks, and this rank's device.
typedef struct Place {
    Mesh mesh;
    OwnDevice own;
} Place;

// Returns the world with its timeout.
static Peers everyone(const Bench *bench) {
    Peers peers = {bench->launch.world, bench->limit, &bench->site};
    return peers;
}

static bool agreed(Bench *bench, bool ok) {
    int who = 0;
    if (peers_agree(everyone(bench), ok, &bench->error, &who)) return true;
    if (bench->launch.rank == who) error_print(&bench->site, bench->error.what);
    return false;
}

// Replaces each of ms (count) with its maximum over the ranks.
static void slowest(const Bench *bench, double *ms, int count) {
    peers_all_reduce(everyone(bench), ms, count, MPI_DOUBLE, MPI_MAX);
}

// Opens the watchdog with the first preset's --distributed-timeout-minutes. As in the trainer,
// higher ranks wait a little longer, so that one rank reports first.
static void watch_ranks(Bench *bench, const Config *config, const Place *place) {
    double limit = 60.0 * config->distributed_timeout_minutes;
    if (bench->watched) return;
    bench->watched = true;
    bench->site.node = place->mesh.world.rank / place->mesh.per_node;
    bench->site.gpu = place->own.index;
    bench->limit = limit + fmin(2.0 * bench->launch.rank, 60.0);
    watchdog_open(&bench->site, bench->launch.host, bench->launch.size, limit);
}

// --- the device and its gradients ----------------------------------------------------------------

static bool open_device(Bench *bench, const OwnDevice *own) {
    if (bench->device) return true;
    bench->device = device_open(own->index, &bench->site, &bench->error);
    if (!bench->device) return false;
    bench->compute = stream_create(bench->device, "compute");
    bench->traffic = stream_create(bench->device, "communication");
    bench->pattern = (float *)device_alloc(bench->device, PATTERN * sizeof(float), "random gradients",
                                           &bench->error);
    if (!bench->pattern) return false;
    float *host = (float *)xmalloc(PATTERN * sizeof(float), "random gradients");
    uint32_t seed = 12345u + (uint32_t)bench->launch.rank;
    for (int i = 0; i < PATTERN; i++) {
        float sum = 0.0f;  // sum of four uniform numbers, which is approximately normal
        for (int k = 0; k < 4; k++) {
            seed = seed * 1664525u + 1013904223u;
            sum += (float)(seed >> 8) * 0x1p-24f - 0.5f;
        }
        host[i] = 1e-3f * sum;
    }
    copy_to_device(bench->compute, bench->pattern, host, PATTERN * sizeof(float));
    stream_synchronize(bench->compute);
    free(host);
    return true;
}

static void close_device(Bench *bench) {
    if (!bench->device) return;
    if (bench->pattern) device_free(bench->device, bench->pattern);
    stream_destroy(bench->compute);
    stream_destroy(bench->traffic);
    device_close(bench->device);
}

static void fill(const Bench *bench, float *grads, int64_t elements) {
    for (int64_t at = 0; at < elements; at += PATTERN) {
        int64_t left = elements - at;
        copy_on_device(bench->compute, grads + at, bench->pattern,
                       (size_t)(left < PATTERN ? left : PATTERN) * sizeof(float));
    }
}

static void fill_gradients(const Bench *bench, Zero *zero) {
    const Grads *g = &zero->grads;
    fill(bench, g->whole, g->whole_elements);
    for (int slot = 0; slot < GRAD_SLOTS; slot++) fill(bench, g->slot[slot], g->slot_elements);
}

// --- one step ------------------------------------------------------------------------------------

// Waits until the devices of all ranks are idle.
static void synchronize(const Bench *bench, const Lanes *lanes) {
    stream_synchronize(bench->compute);
    stream_synchronize(bench->traffic);
    if (lanes) lanes_synchronize(lanes);
    peers_barrier(everyone(bench));
}

typedef struct Marks {
    Event *start, *reduced, *status_known, *applied;
} Marks;

// Runs a step and measures its times. On CPU ranks all calls are synchronous and zero_update
// computes the step status, so there the gradient time ends with the reductions.
static void step_once(const Bench *bench, Lab *lab, int64_t step, const Marks *marks, double ms[FIGURES]) {
    Zero *zero = lab->zero;
    fill_gradients(bench, zero);
    synchronize(bench, &lab->lanes);
    timer_take_seconds(lab->timers, TIMER_OPTIMIZER_INNER_STEP);
    event_record(marks->start, bench->compute);
    for (int unit = zero->base.layout.units - 1; unit >= 0 && !lab->alone; unit--) {
        zero_grads_begin(zero, unit);
        zero_reduce_unit(zero, unit, true);
    }
    event_record(marks->reduced, bench->compute);
    zero_update(zero, 1e-4, 1e-4, 0.1);  // makes the compute stream wait for the step status
    event_record(marks->status_known, bench->compute);
    zero_step_begins(zero, step + 1);
    zero_weights_wait_all(zero);
    event_record(marks->applied, bench->compute);
    event_synchronize(marks->applied);
    const Event *known = device_kind()->asynchronous ? marks->status_known : marks->reduced;
    ms[GRADIENTS] = event_elapsed_ms(marks->start, (Event *)known);
    ms[AFTER_STATUS] = event_elapsed_ms((Event *)known, marks->applied);
    ms[ADAMW] = 1e3 * timer_take_seconds(lab->timers, TIMER_OPTIMIZER_INNER_STEP);
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// Computes the median times of the slowest rank, without the first step, which is a warm-up.
// Returns false if a step was skipped, because its time would be meaningless.
static bool time_steps(Bench *bench, Lab *lab, double median[FIGURES]) {
    double ms[FIGURES][MOST_REPETITIONS], one[FIGURES];
    Marks marks = {event_create_timed(bench->device), event_create_timed(bench->device),
                   event_create_timed(bench->device), event_create_timed(bench->device)};
    bool applied = true;
    zero_step_begins(lab->zero, 1);
    for (int i = -1; i < bench->repetitions; i++) {
        step_once(bench, lab, i + 2, &marks, one);
        applied = applied && zero_step_status(lab->zero, 1).applied;
        slowest(bench, one, FIGURES);
        for (int f = 0; f < FIGURES && i >= 0; f++) ms[f][i] = one[f];
    }
    for (int f = 0; f < FIGURES; f++) {
        qsort(ms[f], (size_t)bench->repetitions, sizeof(double), ascending);
        median[f] = ms[f][bench->repetitions / 2];
    }
    event_destroy(marks.start);
    event_destroy(marks.reduced);
    event_destroy(marks.status_known);
    event_destroy(marks.applied);
    return applied || error_set(&bench->error, EXIT_DIVERGED,
                                "a step on random gradients was skipped; this "
                                "is a bug, please report it");
}

// --- a preset ------------------------------------------------------------------------------------

static bool plan_preset(const Bench *bench, Config *config, Place *place, const Preset *preset, Error *err) {
    memset(config, 0, sizeof *config);
    if (!config_parse(config, preset->argc, preset->argv, NULL, 0, err)) return false;
    config->timing_log_level = 2;
    const Launch *launch = &bench->launch;
    if (!mesh_build(&place->mesh, launch->rank, launch->size, launch->host_of_rank, config->gpus_per_node, 1,
                    1, err)) {
        return false;
    }
    Peers host = {bench->launch.host, 0, NULL};
    place->own = devices_choose(host, &place->mesh, config->emulate_nodes);
    return config_finish(config, bench->launch.size, 0, 0, err);
}

static bool open_lab(Bench *bench, Lab *lab, const Config *config, const Mesh *mesh) {
    GPT gpt;
    lab->mesh = *mesh;
    if (config->local_steps > 1 && !mesh_make_replica_groups(&lab->mesh, &bench->error)) return false;
    gpt_describe(&gpt, config, &lab->mesh);
    lab->zero = zero_plan(config, &lab->mesh, gpt.tensor, gpt.tensors, &lab->memory_plan, &bench->error);
    gpt_free(&gpt);
    return lab->zero != NULL;
}

static bool start_lab(Bench *bench, Lab *lab, int sharers) {
    const Config *config = lab->zero->base.config;
    bool ok = lab->alone || mesh_open(&lab->mesh, everyone(bench), &bench->error);
    ok = ok && memory_plan_allocate(&lab->memory_plan, bench->device, sharers, &bench->error);
    if (!agreed(bench, ok)) return false;
    if (!lab->alone) comm_open(&lab->mesh, bench->device, bench->limit);
    lab->timers = timers_create(bench->device, 2);
    // If `alone` is set, nothing overlaps, so that AdamW can be timed.
    bool overlap = !lab->alone && lab->mesh.dp.size > 1 && !config->no_overlap;
    lanes_open(&lab->lanes, bench->device, overlap);
    zero_start(lab->zero, bench->device, bench->compute, &lab->lanes, lab->timers);
    bool shared = !lab->zero->not_shared.code;
    bool as_asked = lab->alone || shared || config->node_exchange != NODE_EXCHANGE_COPIES;
    if (!as_asked) bench->error = lab->zero->not_shared;
    return agreed(bench, as_asked);
}

static void close_lab(Bench *bench, Lab *lab) {
    zero_stop(lab->zero);
    memory_plan_free(&lab->memory_plan, bench->device);
    zero_free(lab->zero);
    lanes_close(&lab->lanes);
    if (lab->timers) timers_destroy(lab->timers);
    comm_close(&lab->mesh);
    mesh_close(&lab->mesh);
}

static bool measure(Bench *bench, const Config *config, const Place *place, bool alone,
                    double median[FIGURES]) {
    Lab lab;
    memset(&lab, 0, sizeof lab);
    lab.alone = alone;
    bool ok = agreed(bench, open_lab(bench, &lab, config, &place->mesh));
    if (alone) lab.zero->base.checks->sealed = false;  // there are no messages to verify
    int sharers = devices_memory_sharers(&place->own);
    ok = ok && start_lab(bench, &lab, sharers);
    if (ok) ok = agreed(bench, time_steps(bench, &lab, median));
    close_lab(bench, &lab);
    return ok;
}

// --- output --------------------------------------------------------------------------------------

// Ends and flushes a line, because the process may be killed during a later preset.
static void write_line(Bench *bench, Text *json) {
    text_add(json, "}\n");
    fputs(json->data, bench->out);
    fflush(bench->out);
    text_free(json);
}

static void add_memory(Text *json, const MemoryPlan *memory_plan) {
    const MemoryPlanEntry *entry = memory_plan->entries;
    json_open(json, "memory");
    for (int i = 0; i < memory_plan->count; i++) {
        size_t bytes = 0;
        bool seen = false;
        for (int k = 0; k < memory_plan->count; k++) {
            if (entry[k].place != ON_DEVICE || strcmp(entry[k].group, entry[i].group)) continue;
            seen = seen || k < i;
            bytes += entry[k].bytes;
        }
        if (!seen && bytes) json_integer(json, entry[i].group, (int64_t)bytes);
    }
    json_close(json);
}

// Adds the bytes of one gather during forward or backward, with sharded weights.
static void add_gather(Text *json, const char *rail, const char *node, const WireBytes *bytes) {
    if (bytes->weight_inter + bytes->weight_intra == 0) return;
    json_integer(json, rail, bytes->weight_inter);
    json_integer(json, node, bytes->weight_intra);
}

// Adds the bytes of one reduction, one update and one gather of each kind. comm_bound.py computes
// step times from them.
static void add_buckets(Text *json, const Lab *lab) {
    const Zero *zero = lab->zero;
    const BucketLayout *plan = &zero->base.layout;
    StepTraffic traffic = traffic_make(zero->base.config, &lab->mesh, zero);
    json_name(json, "buckets");
    text_add(json, "[");
    for (int b = 0; b < plan->buckets; b++) {
        const Bucket *bucket = &plan->bucket[b];
        WireBytes bytes = traffic_of_update(&traffic, b, &zero->base.grad_format, &zero->base.weight_format);
        WireBytes forward = traffic_of_gather(&traffic, b, false, &zero->base.weight_format);
        WireBytes backward = traffic_of_gather(&traffic, b, true, &zero->base.weight_format);
        text_add(json, b ? ",{" : "{");
        json_integer(json, "first", bucket->first_unit);
        json_integer(json, "end", bucket->end_unit);
        json_integer(json, "elements", bucket_elements(bucket));
        json_integer(json, "grad_node", bytes.grad_intra);
        json_integer(json, "grad_rail", bytes.grad_inter);
        json_integer(json, "weight_rail", bytes.weight_inter);
        json_integer(json, "weight_node", bytes.weight_intra);
        json_integer(json, "exchange", zero_exchange_bytes(zero, b, &zero->base.grad_format));
        json_integer(json, "reductions", traffic.trips[b].reductions);
        add_gather(json, "forward_rail", "forward_node", &forward);
        add_gather(json, "backward_rail", "backward_node", &backward);
        text_add(json, "}");
    }
    text_add(json, "]");
    traffic_free(&traffic);
}

// Writes the line of a preset. all: times of steps of all ranks. alone: times of the update alone.
static void write_preset(Bench *bench, const Lab *lab, const char *name, const double all[FIGURES],
                         const double alone[FIGURES]) {
    if (!bench->out) return;
    const Zero *zero = lab->zero;
    Text json = json_begin("arm");
    json_text(&json, "arm", name);
    json_integer(&json, "nodes", lab->mesh.rail.size);
    json_integer(&json, "per_node", lab->mesh.node.size);
    json_integer(&json, "layers", zero->base.config->num_layers);
    json_integer(&json, "parameters", zero->base.layout.parameters);
    if (bench->repetitions) {
        json_number(&json, "gradients_ms", all[GRADIENTS]);
        json_number(&json, "weights_ms", all[AFTER_STATUS] - alone[ADAMW]);
        json_number(&json, "adamw_ms", alone[ADAMW]);
        json_number(&json, "apply_ms", alone[AFTER_STATUS] - alone[ADAMW]);
    }
    add_memory(&json, &lab->memory_plan);
    add_buckets(&json, lab);
    write_line(bench, &json);
}

// --- plain collectives ---------------------------------------------------------------------------

// Returns the GB/s that each rank sends, from the median time of the slowest rank; 0 in a group of
// one.
static double plain_rate(Bench *bench, const Group *group, bool gather, void *send, void *receive) {
    enum { RUNS = 5 };
    int size = group->size;
    size_t slot = (size_t)(bench->plain_bytes / size) / 256 * 256;
    double ms[RUNS] = {0};
    Event *start = event_create_timed(bench->device), *stop = event_create_timed(bench->device);
    for (int i = -1; i < RUNS; i++) {
        synchronize(bench, NULL);
        event_record(start, bench->traffic);
        if (gather) comm_all_gather(group, receive, slot, bench->traffic);
        else comm_all_to_all(group, send, receive, slot, bench->traffic);
        event_record(stop, bench->traffic);
        event_synchronize(stop);
        double one = event_elapsed_ms(start, stop);
        slowest(bench, &one, 1);
        if (i >= 0) ms[i] = one;
    }
    event_destroy(start);
    event_destroy(stop);
    qsort(ms, RUNS, sizeof(double), ascending);
    return size > 1 ? 1e-6 * (double)slot * (size - 1) / ms[RUNS / 2] : 0.0;
}

// Measures all-to-all and all-gather inside a node and between nodes. copies: also measures copy
// engines inside a node, unless the first preset's --node-exchange excludes them. Reports the
// higher rate; node_by names its transport.
static bool measure_plain(Bench *bench, Mesh mesh, bool copies) {
    if (!agreed(bench, mesh_open(&mesh, everyone(bench), &bench->error))) return false;
    comm_open(&mesh, bench->device, bench->limit);
    size_t bytes = (size_t)bench->plain_bytes;
    void *send = device_alloc(bench->device, bytes, "messages", &bench->error);
    void *receive = send ? device_alloc(bench->device, bytes, "messages", &bench->error) : NULL;
    void *flags = receive ? device_alloc(bench->device, COMM_FLAG_BYTES, "flags", &bench->error) : NULL;
    bool ok = agreed(bench, flags != NULL);
    if (ok) comm_connect(&mesh, send);
    double rate[4] = {0, 0, 0, 0};
    for (int i = 0; ok && i < 4; i++) {
        rate[i] = plain_rate(bench, i % 2 ? &mesh.rail : &mesh.node, i >= 2, send, receive);
    }
    CommPiece piece[] = {{send, bytes}, {receive, bytes}};
    bool shared = ok && copies && comm_share(&mesh.node, flags, piece, 2, &bench->error);
    double through_nccl = rate[0];
    for (int i = 0; shared && i < 4; i += 2) {
        rate[i] = fmax(rate[i], plain_rate(bench, &mesh.node, i >= 2, send, receive));
    }
    if (shared) comm_unshare(&mesh.node);
    if (ok && bench->out) {
        static const char *const names[] = {"all_to_all_node", "all_to_all_rail", "all_gather_node",
                                            "all_gather_rail"};
        Text json = json_begin("plain");
        json_text(&json, "commit", version_commit());
        json_text(&json, "device", device_name(bench->device));
        json_integer(&json, "nodes", mesh.rail.size);
        json_integer(&json, "per_node", mesh.node.size);
        json_integer(&json, "bytes", bench->plain_bytes);
        json_text(&json, "node_by", rate[0] > through_nccl ? "copies" : "messages");
        for (int i = 0; i < 4; i++) json_number(&json, names[i], rate[i]);
        write_line(bench, &json);
    }
    if (send) device_free(bench->device, send);
    if (receive) device_free(bench->device, receive);
    if (flags) device_free(bench->device, flags);
    comm_close(&mesh);
    mesh_close(&mesh);
    return ok;
}

// --- main ----------------------------------------------------------------------------------------

static bool run_preset(Bench *bench, const Preset *preset) {
    Config config;
    Place place;
    double all[FIGURES] = {0, 0, 0}, alone[FIGURES] = {0, 0, 0};
    if (!agreed(bench, plan_preset(bench, &config, &place, preset, &bench->error))) return false;
    bench->site.phase = preset->name;
    watch_ranks(bench, &config, &place);
    if (config.emulate_nodes) devices_emulate_nodes(&place.own, &place.mesh, &bench->launch);
    bool ok = agreed(bench, open_device(bench, &place.own));
    bool copies = config.node_exchange != NODE_EXCHANGE_NCCL;
    if (ok && !bench->plain_done) ok = measure_plain(bench, place.mesh, copies);
    bench->plain_done = true;
    if (bench->repetitions) {
        ok = ok && measure(bench, &config, &place, false, all);
        ok = ok && measure(bench, &config, &place, true, alone);
    }
    Lab lab;
    memset(&lab, 0, sizeof lab);
    ok = ok && agreed(bench, open_lab(bench, &lab, &config, &place.mesh));
    if (ok) write_preset(bench, &lab, preset->name, all, alone);
    close_lab(bench, &lab);
    config_free(&config);
    return ok;
}

static bool read_options(Bench *bench, int argc, char **argv, int *first) {
    const char *path = NULL;
    int64_t megabytes = 256;
    bench->repetitions = 5;
    for (*first = 1; *first + 1 < argc; *first += 2) {
        const char *name = argv[*first], *value = argv[*first + 1];
        if (!strcmp(name, "--out")) path = value;
        else if (!strcmp(name, "--repetitions")) bench->repetitions = atoi(value);
        else if (!strcmp(name, "--plain-mb")) megabytes = atoll(value);
        else break;
    }
    bool times = bench->repetitions >= 0 && bench->repetitions <= MOST_REPETITIONS;
    if (!times || megabytes < 1 || megabytes > 65536) {
        return usage_error(&bench->error,
                           "--repetitions must be 0 to %d and --plain-mb 1 to 65536; correct the flag",
                           MOST_REPETITIONS);
    }
    bench->plain_bytes = megabytes << 20;
    if (bench->launch.rank != 0) return true;
    bench->out = path ? fopen(path, "a") : stdout;  // keep lines of earlier calls
    if (!bench->out) return system_error(&bench->error, "cannot write %s", path);
    // End an incomplete line, which an earlier call may have left if it was killed.
    if (path && !fseek(bench->out, 0, SEEK_END) && ftell(bench->out) > 0) fprintf(bench->out, "\n");
    return true;
}

int main(int argc, char **argv) {
    Bench bench;
    Presets presets;
    int first = 1;
    memset(&bench, 0, sizeof bench);
    memset(&presets, 0, sizeof presets);
    bench.site.phase = "benchmark";
    launch_init(&bench.launch, &argc, &argv);
    bench.site.rank = bench.launch.rank;
    bool ok = read_options(&bench, argc, argv, &first) &&
              presets_read(&presets, first, argc, argv, &bench.error);
    ok = agreed(&bench, ok);
    for (int i = 0; ok && i < presets.count; i++) ok = run_preset(&bench, &presets.preset[i]);
    close_device(&bench);
    watchdog_close(&bench.site);
    presets_free(&presets);
    if (bench.out && bench.out != stdout && fclose(bench.out)) {
        ok = system_error(&bench.error, "cannot write the results; check whether the disk is full");
    }
    launch_finalize(&bench.launch);
    return ok ? EXIT_DONE : bench.error.code;
}
