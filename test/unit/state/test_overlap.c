// Stream ordering. CPU ranks cannot reveal missing synchronization, because all their streams run
// on the calling thread. Here device, collectives and kernels are replaced at link time by
// functions that record the memory that they read and write on each stream (recording.h).
// llmc/state/zero.c runs steps like train_gpt.c, in several shapes. The tests check that:
//   - events order any two uses of the same memory of which at least one is a write
//   - omitting any single wait is detected as a race, unless other waits imply it
//   - operations that should overlap are not ordered
//
// One rank is simulated. Collectives write its receive buffers when they run on its streams.
#include <mpi.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "llmc/ranks/parallel.h"
#include "llmc/checkpoint/zero_slices.h"
#include "llmc/state/zero_parts.h"
#include "test/leaks.h"
#include "test/unit/state/recording.h"

// --- a run ---------------------------------------------------------------------------------------

enum { UNITS = 5, PER_UNIT = 2, TENSORS = UNITS * PER_UNIT, STEPS = 6, SAVES = 3 };

// Features of a shape.
enum {
    QUANTIZED = 1,
    NO_OVERLAP = 2,
    OFFLOAD = 4,
    SHARD_GRADS = 8,
    SHARD_WEIGHTS = 16,  // also shards gradients
    OVER_ALL = 32,
    SECOND = 64,
    FEEDBACK = 128,
    LOSSLESS = 256,
    LOCAL = 512,
    ENDS = 1024,  // a resumed run that ends at its sixth step
    TLQ = 2048,   // gradients quantized, weights not
    REPLICATED = 4096,
    DISK = 8192,
    MUON = 16384,
    TENSOR = 32768,  // of two tensor-parallel ranks, with whole matrices
    MERGED = 65536,  // one bucket of all layers with Muon: two layers per shard on two ranks
};

typedef struct Shape {
    int nodes, per_node, chunks;
    unsigned how;  // flags of the enum above
} Shape;

typedef struct Recording {
    Shape shape;
    Device device;
    Config config;
    Mesh mesh;
    Tensor tensors[TENSORS];
    MemoryPlan memory_plan;
    Lanes lanes;
    Stream *compute;
    Timers *timers;
    Comm comm[MOST_GROUPS];
    Zero *zero;
    const int *order;  // (UNITS) of the backward pass
} Recording;

static const int descending[UNITS] = {4, 3, 2, 1, 0};

static void parse_flags(Recording *r) {
    char chunks[8], batch[8];
    int T = r->shape.how & TENSOR ? 2 : 1, ranks = r->shape.nodes * r->shape.per_node;
    const char *flags[96] = {"test",
                             "--bf16",
                             "--use-distributed-optimizer",
                             "--mock-data",
                             "--lr",
                             "1e-3",
                             "--train-iters",
                             "10",
                             "--tokenizer-type",
                             "NullTokenizer",
                             "--make-vocab-size-divisible-by",
                             "1",
                             "--vocab-size",
                             "31",
                             "--num-layers",
                             "4",
                             "--hidden-size",
                             "32",
                             "--num-attention-heads",
                             "4",
                             "--seq-length",
                             "32",
                             "--max-position-embeddings",
                             "32",
                             "--micro-batch-size",
                             "1",
                             "--ddp-bucket-size",
                             "1",
                             "--save",
                             "nowhere",
                             "--save-interval",
                             "5",
                             "--async-save",
                             "--log-num-zeros-in-grad",
                             "--log-quantization-error-interval",
                             "3",
                             "--verify-wire",
                             "--dump-distributions",
                             "nowhere",
                             "--dump-distributions-interval",
                             "4",
                             "--gradient-alltoall-pipeline",
                             chunks,
                             "--global-batch-size",
                             batch};
    int count = 45;
    snprintf(chunks, sizeof chunks, "%d", r->shape.chunks);
    snprintf(batch, sizeof batch, "%d", 2 * ranks);
    static const struct {
        unsigned how;
        const char *words[8];
    } choices[] = {{QUANTIZED,
                    {"--quantized-weights", "--wq-group-size", "32", "--quantized-gradients",
                     "--gq-group-size-inter", "32", "--gq-group-size-intra", "32"}},
                   {LOCAL, {"--local-steps", "2"}},
                   {LOCAL, {"--local-steps-delay", "1"}},
                   {LOCAL, {"--train-iters", "5"}},  // the run ends at this step
                   // Only the first bucket's sync slot is in the step before the last one.
                   {ENDS, {"--local-steps", "20"}},
                   {ENDS, {"--train-iters", "21"}},
                   {LOSSLESS, {"--quantized-weights", "--weight-quantization-method", "lossless"}},
                   {NO_OVERLAP, {"--no-overlap"}},
                   {OFFLOAD, {"--optimizer-cpu-offload"}},
                   {DISK, {"--optimizer-disk-offload", "nowhere"}},
                   {SHARD_GRADS, {"--data-parallel-sharding-strategy", "optim_grads"}},
                   {SHARD_WEIGHTS, {"--data-parallel-sharding-strategy", "optim_grads_params"}},
                   {REPLICATED, {"--data-parallel-sharding-strategy", "no_shard"}},
                   {TLQ,
                    {"--quantized-gradients", "--gq-group-size-inter", "32", "--gq-group-size-intra", "32"}},
                   {OVER_ALL, {"--shard-params-over", "world", "--weight-quantization-method", "direct"}},
                   {SECOND, {"--secondary-partition"}},
                   {FEEDBACK, {"--error-feedback"}},
                   {MUON, {"--optimizer", "muon"}},
                   {MERGED, {"--ddp-bucket-size", "1000000"}},
                   {TENSOR, {"--tensor-model-parallel-size", "2", "--vocab-size", "30"}}};
    for (size_t i = 0; i < sizeof choices / sizeof *choices; i++)
        for (int k = 0; (r->shape.how & choices[i].how) && k < 8 && choices[i].words[k]; k++)
            flags[count++] = choices[i].words[k];
    Error err = {0};
    int hosts[64] = {0};
    bool ok = config_parse(&r->config, count, (char **)flags, NULL, 0, &err) &&
              mesh_build(&r->mesh, T * ranks - 1, T * ranks, hosts, T * r->shape.per_node, T, 1, &err) &&
              config_finish(&r->config, T * ranks, 32, 31, &err);
    if (!ok) fail_msg("%s", err.what);
    if (r->shape.how & LOCAL) assert_true(mesh_make_replica_groups(&r->mesh, NULL));
    if (r->shape.how & SHARD_WEIGHTS) mesh_shard_weights(&r->mesh, r->shape.how & OVER_ALL);
    r->mesh.world.mpi = MPI_COMM_SELF;
}

static void open_recording(Recording *r, Shape shape, int dropped_stream, int dropped_event) {
    memset(r, 0, sizeof *r);
    r->shape = shape;
    r->order = descending;
    r->device.dropped_stream = dropped_stream;
    r->device.dropped_event = dropped_event;
    parse_flags(r);
    Error err = {0};
    for (int u = 0; u < UNITS; u++) {
        int columns = 300 + 7 * u, split = shape.how & TENSOR ? 0 : -1;
        MuonShape muon = {.columns = columns, .groups = 1, .part = {100}, .duplicated = true};
        r->tensors[PER_UNIT * u] = tensor_row("matrix", 100, columns, split, u, 0);
        if (u > 0 && shape.how & MUON) r->tensors[PER_UNIT * u].muon = muon;
        r->tensors[PER_UNIT * u + 1] = tensor_row("tail", 100 + u, 0, -1, u, 0);
        for (int i = 0; u == 0 && i < PER_UNIT; i++) r->tensors[i].chunk = ANY_CHUNK;
    }
    tensors_number(r->tensors, TENSORS, r->mesh.tp.size);
    for (int i = 0; i < TENSORS; i++)
        r->tensors[i] = tensor_part(&r->tensors[i], r->mesh.tp.rank, r->mesh.tp.size);
    r->zero = zero_plan(&r->config, &r->mesh, r->tensors, TENSORS, &r->memory_plan, &err);
    if (!r->zero) fail_msg("%s", err.what);
    assert_true(shape.how & MUON || r->zero->base.layout.buckets == UNITS);
    r->compute = stream_create(&r->device, "compute");
    lanes_open(&r->lanes, &r->device, r->mesh.dp.size > 1 && !(shape.how & NO_OVERLAP));
    r->timers = timers_create(&r->device, 0);
    connect_groups(&r->mesh, r->comm);
    assert_true(memory_plan_allocate(&r->memory_plan, &r->device, 1, &err));
    DiskState *disk = r->zero->optimizer.disk;
    if (disk)
        disk->bounce = xcalloc((size_t)disk->layout->shard_elements, STATE_PARTS * sizeof(float), "the file");
    zero_start(r->zero, &r->device, r->compute, &r->lanes, r->timers);
    for (int i = 0; i < TENSORS; i++) {
        size_t bytes = (size_t)tensor_elements(&r->tensors[i]) * X;
        copy_to_device(r->compute, zero_weight(r->zero, i), NULL, bytes);
        zero_keep_weights(r->zero, i);
    }
    // The step status has no value here, so payloads are declared valid.
    r->zero->weights.messages_valid = r->zero->weights.message != NULL;
    zero_init_master_weights(r->zero);
}

static void close_recording(Recording *r) {
    memory_plan_free(&r->memory_plan, &r->device);
    if (r->zero->optimizer.disk) free(r->zero->optimizer.disk->bounce);
    zero_free(r->zero);
    lanes_close(&r->lanes);
    timers_destroy(r->timers);
    stream_destroy(r->compute);
    free(r->device.ops);
    free(r->device.uses);
    config_free(&r->config);
}

// Reads and writes the tensors of a unit, like train_gpt.c. Tensor-parallel ranks gather output.
static void layer(Recording *r, int unit, const char *name, bool backward) {
    begin_on(r->compute, name);
    for (int i = PER_UNIT * unit; i < PER_UNIT * (unit + 1); i++) {
        reads(r->compute, zero_weight(r->zero, i), X * tensor_elements(&r->tensors[i]));
        if (backward) writes(r->compute, zero_grad(r->zero, i), 4 * tensor_elements(&r->tensors[i]));
    }
    static float output[2];
    if (r->shape.how & TENSOR) comm_all_gather(&r->mesh.tp, output, sizeof *output, r->compute);
}

static void forward(Recording *r, const char *name) {
    for (int u = 0; u < UNITS; u++) {
        zero_weights_wait(r->zero, u, u + 1 < UNITS ? u + 1 : -1, false);
        layer(r, u, name, false);
    }
}

static void micro_batch(Recording *r, bool last) {
    forward(r, "forward");
    layer(r, 0, "head", true);  // tied to the embedding
    writes(r->compute, r->zero->loss_sum, 4);
    for (int i = 0; i < UNITS; i++) {
        int u = r->order[i];
        zero_weights_wait(r->zero, u, u - 1, true);
        zero_grads_begin(r->zero, u);
        layer(r, u, "backward", true);
        if (last || !zero_grads_accumulate(r->zero, u)) zero_reduce_unit(r->zero, u, last);
    }
}

static void read_status(Recording *r, int which) {
    zero_step_status(r->zero, which);
    begin(&r->device, HOST, "the host reads the step status");
    use(&r->device, READ, &r->zero->optimizer.landed[(r->zero->base.step - which) % 2], sizeof(StepStatus));
}

// Starts a background checkpoint. The host waits for its copies one step later.
static int stage(Recording *r) {
    ZeroSlices slices = zero_slices(r->zero, true);
    size_t at = 0;
    for (int i = 0; i < slices.count; i++) {
        if (slices.slices[i].lo == slices.slices[i].hi) continue;  // saved by another replica group
        zero_stage_slice(r->zero, i, (uint8_t *)r->zero->slices.staging + at);
        at += (size_t)(slices.slices[i].hi - slices.slices[i].lo) *
              (size_t)slice_kind_bytes(slices.slices[i].kind);
    }
    free(slices.slices);
    return (int)at;
}

// Runs steps of 1 or 2 micro-batches.
static void run_steps_of(Recording *r, int micro_batches) {
    Zero *zero = r->zero;
    Error err = {0};
    Peers alone = {MPI_COMM_SELF, 0, NULL};
    int staged = 0, earlier = r->shape.how & ENDS ? 15 : 0;
    for (int step = 1; step <= STEPS; step++) {
        zero_step_begins(zero, earlier + step);
        if (micro_batches == 2) micro_batch(r, false);
        if (step < STEPS) zero_copy_staged(zero);  // otherwise the update starts the copies
        micro_batch(r, true);
        zero_update(zero, 1e-3, 1e-3, 0.1);
        if (step > 1) read_status(r, 1);
        if (staged) {
            zero_staged(zero);
            begin(&r->device, HOST, "the host writes the checkpoint");
            use(&r->device, READ, zero->slices.staging, staged);
            staged = 0;
        }
        // Hashes the outer weights directly after an update, like replicas.c.
        if (step == 3 && zero->outer.stream) {
            outer_finish(&zero->base, &zero->outer, &zero->optimizer);
            outer_hash(&zero->base, &zero->outer, zero->hash);
        }
        // Background copies start at the end of steps 2 and 4. Step 4 also runs all operations that
        // read weights or wait.
        if (step == 2 || step == 4) staged = stage(r);
        if (step == 4) {
            zero_params_norm(zero, alone);
            zero_use_outer(zero, true);
            forward(r, "evaluation");
            zero_use_outer(zero, false);
            assert_true(zero_sound(zero, alone, &err));
            zero_zeros(zero, alone);
            zero_weights_wait_all(zero);
            for (int b = 0; b < zero->base.layout.buckets; b++) {
                int64_t elements;
                const floatX *weights = weights_kept(&zero->base, &zero->weights, b, &elements);
                kernel_replica_hash(zero->base.compute, zero->hash + b, weights, 0, elements);
            }
        }
    }
    // A run may end with a save, without another step.
    staged = stage(r);
    zero_staged(zero);
    begin(&r->device, HOST, "the host writes the last checkpoint");
    use(&r->device, WRITE, zero->slices.staging, staged);
    zero_synchronize(zero);
    begin(&r->device, HOST, "the memory is freed");
    for (int b = 0; b < zero->base.layout.buckets; b++) {
        int64_t elements;
        const floatX *weights = weights_kept(&zero->base, &zero->weights, b, &elements);
        use(&r->device, WRITE, weights, elements * X);
    }
    for (int i = 0; zero->weights.layers->gathers && i < 2; i++)
        use(&r->device, WRITE, zero->weights.slot[i], X);
    const Grads *g = &zero->grads;
    use(&r->device, WRITE, g->whole, g->whole_elements * 4);
    use(&r->device, WRITE, g->shard, g->shard_elements * 4);
    for (int slot = 0; slot < GRAD_SLOTS; slot++) use(&r->device, WRITE, g->slot[slot], g->slot_elements * 4);
    for (int slot = 0; slot < LANE_SLOTS; slot++) {
        use(&r->device, WRITE, zero->weights.gather[slot], zero->weights.gather[slot] ? 1 : 0);
    }
}

static void run_steps(Recording *r) { run_steps_of(r, 2); }

// --- the tests -----------------------------------------------------------------------------------

static const Shape shapes[] = {
    {1, 1, 1, QUANTIZED},
    {1, 2, 1, QUANTIZED},
    {1, 4, 3, QUANTIZED},
    {2, 1, 1, QUANTIZED},
    {4, 1, 4, QUANTIZED},
    {2, 2, 1, QUANTIZED},
    {2, 2, 2, 0},
    {2, 2, 3, 0},
    {2, 2, 4, QUANTIZED},
    {2, 4, 1, 0},
    {2, 4, 3, QUANTIZED},
    {2, 4, 50, QUANTIZED},
    {4, 2, 2, 0},
    {2, 2, 3, QUANTIZED | NO_OVERLAP},
    {1, 1, 1, QUANTIZED | OFFLOAD},
    {1, 1, 1, QUANTIZED | DISK},
    {2, 2, 3, QUANTIZED | DISK},
    {2, 2, 3, QUANTIZED | DISK | SHARD_GRADS},
    {2, 2, 2, DISK | NO_OVERLAP | SHARD_WEIGHTS},
    {1, 2, 1, QUANTIZED | OFFLOAD},
    {2, 2, 3, QUANTIZED | OFFLOAD},
    {2, 2, 2, OFFLOAD},
    {4, 1, 1, QUANTIZED | OFFLOAD},
    {2, 2, 3, QUANTIZED | NO_OVERLAP | OFFLOAD},
    {1, 1, 1, QUANTIZED | SHARD_GRADS},
    {1, 2, 1, QUANTIZED | SHARD_GRADS},
    {2, 1, 3, QUANTIZED | SHARD_GRADS},
    {2, 2, 3, QUANTIZED | SHARD_GRADS},
    {2, 2, 2, SHARD_GRADS},
    {2, 2, 3, QUANTIZED | OFFLOAD | SHARD_GRADS},
    {1, 2, 1, QUANTIZED | OFFLOAD | SHARD_GRADS},
    {2, 2, 2, OFFLOAD | SHARD_GRADS},
    {2, 2, 3, QUANTIZED | NO_OVERLAP | OFFLOAD | SHARD_GRADS},
    {2, 2, 3, QUANTIZED | NO_OVERLAP | SHARD_GRADS},
    {1, 2, 1, QUANTIZED | SHARD_WEIGHTS},
    {2, 1, 1, QUANTIZED | SHARD_WEIGHTS},
    {2, 2, 3, QUANTIZED | SHARD_WEIGHTS},
    {2, 2, 2, SHARD_WEIGHTS},
    {2, 4, 1, QUANTIZED | OFFLOAD | SHARD_WEIGHTS},
    {2, 2, 3, QUANTIZED | OFFLOAD | SHARD_WEIGHTS | OVER_ALL},
    {2, 2, 3, QUANTIZED | NO_OVERLAP | SHARD_WEIGHTS},
    {2, 2, 3, QUANTIZED | SHARD_WEIGHTS | OVER_ALL},
    {2, 2, 2, SHARD_WEIGHTS | OVER_ALL | SECOND},
    {2, 2, 3, QUANTIZED | SHARD_WEIGHTS | OVER_ALL | SECOND},
    {2, 1, 1, QUANTIZED | SHARD_WEIGHTS | OVER_ALL},
    {2, 2, 3, REPLICATED},
    {2, 1, 1, REPLICATED},
    {1, 4, 1, REPLICATED},
    {2, 2, 2, TLQ | REPLICATED | FEEDBACK},
    {2, 2, 3, TLQ | REPLICATED | OFFLOAD},
    {2, 2, 1, TLQ | REPLICATED | OFFLOAD | NO_OVERLAP},
    {2, 2, 3, QUANTIZED | FEEDBACK},
    {2, 1, 2, QUANTIZED | SHARD_GRADS | FEEDBACK},
    {2, 2, 2, QUANTIZED | NO_OVERLAP | SHARD_WEIGHTS | FEEDBACK},
    {2, 2, 2, LOSSLESS},
    {1, 2, 1, LOSSLESS | OFFLOAD},
    {2, 1, 1, QUANTIZED | LOSSLESS | SHARD_GRADS},
    {2, 2, 3, LOSSLESS | SHARD_WEIGHTS},
    {2, 2, 1, LOSSLESS | NO_OVERLAP},
    {2, 4, 1, LOSSLESS | OFFLOAD},
    {2, 2, 1, QUANTIZED | LOCAL},
    {3, 1, 1, QUANTIZED | LOCAL},
    {2, 2, 2, LOCAL | SHARD_GRADS},
    {2, 2, 1, QUANTIZED | LOCAL | SHARD_WEIGHTS},
    {2, 2, 1, QUANTIZED | LOCAL | NO_OVERLAP},
    {2, 2, 2, QUANTIZED | LOCAL | LOSSLESS},
    {2, 2, 1, QUANTIZED | LOCAL | ENDS},
    {2, 2, 1, QUANTIZED | LOCAL | FEEDBACK},
    {1, 1, 1, MUON},
    {1, 2, 1, QUANTIZED | MUON},
    {2, 2, 3, QUANTIZED | MUON},
    {2, 2, 2, LOSSLESS | SHARD_GRADS | MUON},
    {2, 2, 2, QUANTIZED | SHARD_WEIGHTS | MUON},
    {2, 1, 1, REPLICATED | MUON},
    {2, 2, 1, QUANTIZED | LOCAL | MUON},
    {2, 1, 1, QUANTIZED | LOCAL | MUON},
    {4, 1, 1, QUANTIZED | LOCAL | MUON | ENDS},
    {3, 1, 1, QUANTIZED | LOCAL | MUON | FEEDBACK},
    {1, 1, 1, MUON | OFFLOAD},
    {2, 2, 3, QUANTIZED | MUON | OFFLOAD},
    {1, 2, 1, LOSSLESS | MUON | OFFLOAD | NO_OVERLAP},
    {2, 2, 2, QUANTIZED | MUON | DISK},
    {2, 1, 1, MUON | DISK | SHARD_WEIGHTS},
    {1, 1, 1, MUON | TENSOR},
    {2, 2, 1, QUANTIZED | MUON | TENSOR},
    {2, 2, 2, LOSSLESS | SHARD_WEIGHTS | MUON | TENSOR},
    {2, 1, 1, MUON | TENSOR | OFFLOAD},
    {2, 2, 1, MUON | TENSOR | DISK | NO_OVERLAP},
    {2, 2, 1, QUANTIZED | LOCAL | MUON | TENSOR},
    {1, 2, 4, QUANTIZED | MUON | MERGED},
    {2, 1, 7, MUON | MERGED},
    {2, 1, 4, QUANTIZED | MUON | MERGED | FEEDBACK},
    {2, 1, 4, QUANTIZED | MUON | MERGED | NO_OVERLAP},
    {2, 1, 4, REPLICATED | MUON | MERGED},
    {1, 2, 4, QUANTIZED | MUON | MERGED | OFFLOAD},
    {2, 1, 4, QUANTIZED | MUON | MERGED | SHARD_GRADS},
    {2, 1, 4, QUANTIZED | MUON | MERGED | SHARD_GRADS | FEEDBACK},
    {2, 1, 4, LOSSLESS | MUON | MERGED | SHARD_GRADS | OFFLOAD},
    {1, 2, 4, QUANTIZED | MUON | MERGED | SHARD_WEIGHTS},
    {2, 1, 4, QUANTIZED | MUON | MERGED | SHARD_WEIGHTS | DISK},
    {2, 2, 4, QUANTIZED | MUON | MERGED | LOCAL | SHARD_GRADS},
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

static void conflicting_uses_are_ordered(void **state) {
    for (int i = 0; i < 2 * SHAPES; i++) {
        Recording r;
        open_recording(&r, shapes[i % SHAPES], -1, -1);
        run_steps_of(&r, 1 + i / SHAPES);
        if (r.device.races) {
            fail_msg("%d x %d, %d chunks: %s", r.mesh.rail.size, r.mesh.node.size, shapes[i % SHAPES].chunks,
                     r.device.first_race);
        }
        assert_int_equal(r.device.misplaced, 0);
        assert_true(r.device.all_uses > 500);
        close_recording(&r);
    }
}

static const char *lane_event_names[LANE_EVENTS] = {"quantized",   "node arrived",  "node free",
                                                    "requantized", "rail arrived",  "rail free",
                                                    "updated",     "rail gathered", "node gathered",
                                                    "applied"};

static void event_name(const Recording *r, int id, char *name, size_t bytes) {
    snprintf(name, bytes, "event %d", id);
    for (int e = 0; r->lanes.apart && e < LANE_EVENTS; e++) {
        for (int slot = 0; slot < LANE_SLOTS; slot++) {
            if (r->lanes.event[e][slot]->id == id) snprintf(name, bytes, "%s", lane_event_names[e]);
        }
    }
    if (r->lanes.apart && r->lanes.joint->id == id) snprintf(name, bytes, "joint");
    for (int b = 0; b < r->zero->base.layout.buckets; b++) {
        if (r->zero->grads.bucket[b].ready->id == id) snprintf(name, bytes, "ready");
        if (r->zero->weights.bucket[b].done->id == id) snprintf(name, bytes, "done");
    }
    for (int i = 0; r->zero->weights.layers->gathers && i < 2; i++) {
        if (r->zero->weights.gathered[i]->id == id) snprintf(name, bytes, "gathered");
        if (r->zero->weights.used->id == id) snprintf(name, bytes, "used");
    }
    if (r->zero->computed->id == id) snprintf(name, bytes, "computed");
    if (r->zero->status_known->id == id) snprintf(name, bytes, "judged");
    for (int slot = 0; slot < GRAD_SLOTS; slot++) {
        if (r->zero->grads.slot_read[slot]->id == id) snprintf(name, bytes, "slot read");
    }
    const Outer *local = &r->zero->outer;
    for (int b = 0; local->stream && b < r->zero->base.layout.buckets; b++) {
        if (local->bucket[b].exchanged->id == id)
            snprintf(name, bytes, "%s", b ? "exchanged" : "first exchanged");
        if (local->taken->id == id) snprintf(name, bytes, "taken");
        if (local->finished->id == id) snprintf(name, bytes, "finished");
        if (local->slot_free[b % OUTER_SLOTS]->id == id) snprintf(name, bytes, "pseudo-gradient free");
    }
    const Optimizer *offload = &r->zero->optimizer;
    for (int slot = 0; offload->host.stream && slot < LANE_SLOTS; slot++) {
        if (offload->reduced->id == id) snprintf(name, bytes, "reduced");
        if (offload->window_free[slot]->id == id) snprintf(name, bytes, "window free");
        if (offload->status->id == id) snprintf(name, bytes, "judged for the host");
        if (offload->host.made[slot]->id == id) snprintf(name, bytes, "made");
        if (offload->host.sent[slot]->id == id) snprintf(name, bytes, "sent");
    }
}

// Returns true if other waits imply this one, so omitting it is not a race.
static bool implied(const char *stream, const char *event, unsigned how) {
    // The requantization stream waits for the shard directly, because it has a timer. If the hops
    // already imply this order, or if an update sends nothing, this wait and the wait for the
    // shard's event imply each other. The gradients that "computed" announces are complete after
    // the loss.
    bool shard = !strcmp(event, "joint") || !strcmp(event, "updated");
    // In a save with residuals, the host waits for the compute stream, which has waited for all
    // earlier work. The waits for outer syncs of later buckets imply the wait for the first one.
    bool saved = !strcmp(event, "done") ? !strcmp(stream, "sums and update")
                                        : !strcmp(event, "joint") && !strcmp(stream, "checkpoint copies");
    return (!strcmp(stream, "requantization") && shard) || !strcmp(event, "computed") ||
           ((how & FEEDBACK) && saved) || !strcmp(event, "first exchanged");
}

// Omits each wait once and checks that a race is detected.
static void every_wait_is_needed(void **state) {
    int tried = 0, surprises = 0;
    for (int i = 0; i < SHAPES; i++) {
        const Shape *shape = &shapes[i];
        Recording whole;
        // The other shapes have the same waits, and with Muon too few buckets to reuse every slot.
        bool local = shape->how & LOCAL;
        if (shape->how & MUON || shape->chunks > 4 || !(shape->how & QUANTIZED) ||
            (local && shape->how != (QUANTIZED | LOCAL)) || (local && shape->per_node == 1))
            continue;
        open_recording(&whole, *shape, -1, -1);
        run_steps(&whole);
        for (int s = 1; whole.lanes.apart && s <= whole.device.streams; s++) {
            for (int e = 0; e < whole.device.events; e++) {
                if (!whole.device.waits[s][e]) continue;
                char name[40];
                Recording r;
                event_name(&whole, e, name, sizeof name);
                open_recording(&r, *shape, s, e);
                run_steps(&r);
                bool expected = !implied(whole.device.stream[s]->name, name, shape->how);
                if ((r.device.races > 0) != expected) {
                    print_message("%d x %d, %d chunks: %s without its wait for %s (%d): %s\n", shape->nodes,
                                  shape->per_node, shape->chunks, whole.device.stream[s]->name, name, e,
                                  r.device.races ? r.device.first_race : "nothing is found");
                    surprises++;
                }
                tried++;
                close_recording(&r);
            }
        }
        close_recording(&whole);
    }
    assert_int_equal(surprises, 0);
    print_message("%d waits omitted\n", tried);
    assert_true(tried > 100);
}

// Returns the n-th operation with this name that the host has started.
static const Op *find(const Recording *r, const char *name, int n) {
    for (int i = 0; i < r->device.op_count; i++) {
        if (!strcmp(r->device.ops[i].name, name) && n-- == 0) return &r->device.ops[i];
    }
    return NULL;
}

static void overlaps(const Recording *r, const char *first, int i, const char *second, int j) {
    const Op *a = find(r, first, i), *b = find(r, second, j);
    assert_non_null(a);
    assert_non_null(b);
    if (before(a, b) || before(b, a)) fail_msg("%s %d and %s %d cannot overlap", first, i, second, j);
}

// Chunk k + 1 is quantized while chunk k is sent inside the node and chunk k - 1 between nodes,
// even across buckets, and backward overlaps with these messages. AdamW, gathers, apply and the
// next forward overlap too. The same holds for sharded gradients, which use two slots.
static void stages_overlap_in(unsigned how, int micro_batches) {
    Shape shape = {2, 2, 3, QUANTIZED | how};
    Recording r;
    open_recording(&r, shape, -1, -1);
    run_steps_of(&r, micro_batches);
    int chunks = UNITS * shape.chunks;  // chunks of the first step
    for (int k = 0; k + 2 < chunks; k++) {
        overlaps(&r, "quantize", k + 1, "exchange inside the node", k);
        overlaps(&r, "exchange inside the node", k + 1, "exchange between nodes", k);
        overlaps(&r, "quantize", k + 2, "exchange between nodes", k);
        overlaps(&r, "exchange between nodes", k + 1, "final sum", k);
    }
    int backward = (micro_batches - 1) * UNITS + 1, forward = micro_batches * UNITS;  // in the next step
    for (int u = 0; u + 1 < UNITS; u++) {
        overlaps(&r, "backward", backward + u, "exchange between nodes", shape.chunks * u);
    }
    for (int b = 0; b + 1 < UNITS; b++) {
        overlaps(&r, "AdamW", b + 1, "gather between nodes", b);
        overlaps(&r, "gather between nodes", b + 1, "gather inside the node", b);
        overlaps(&r, "gather inside the node", b + 1, "apply", b);
        overlaps(&r, "forward", forward + b, "gather between nodes", b + 1);
    }
    close_recording(&r);
}

static void stages_overlap(void **state) {
    stages_overlap_in(0, 2);
    stages_overlap_in(SHARD_GRADS, 1);
}

// With Muon, two ranks own two layers each, the later ones at the end of their shards. The last two
// of four chunks are reduced while backward computes the first layers of the bucket.
static void chunks_overlap_layers_of_their_bucket(void **state) {
    static const unsigned how[] = {0, SHARD_GRADS, SHARD_WEIGHTS, SHARD_GRADS | OFFLOAD};
    for (int i = 0; i < 4; i++) {
        Recording r;
        open_recording(&r, (Shape){2, 1, 4, QUANTIZED | MUON | MERGED | how[i]}, -1, -1);
        run_steps_of(&r, 1);
        assert_int_equal(r.zero->base.layout.buckets, 2);
        for (int chunk = 0; chunk < 4; chunk++) {  // in the order of reduction
            int needed = chunk < 2 ? 3 : 1;        // the first of its layers
            for (int u = UNITS - 1; u >= 0; u--) {
                int at = UNITS - 1 - u;
                if (u < needed) overlaps(&r, "backward", at, "quantize", chunk);
                else assert_true(before(find(&r, "backward", at), find(&r, "quantize", chunk)));
            }
        }
        close_recording(&r);
    }
}

// With several model chunks of a pipeline, layers may complete in another order.
static void any_order_of_layers(void **state) {
    static const int orders[][UNITS] = {{1, 2, 3, 4, 0}, {4, 2, 3, 1, 0}, {3, 0, 1, 4, 2}};
    for (int i = 0; i < 3; i++) {
        Recording r;
        int sums = 0;
        open_recording(&r, (Shape){2, 1, 4, QUANTIZED | MUON | MERGED}, -1, -1);
        r.order = orders[i];
        run_steps(&r);
        if (r.device.races) fail_msg("order %d: %s", i, r.device.first_race);
        while (find(&r, "final sum", sums)) sums++;
        // 2 buckets of 4 chunks; two steps also reduce them exactly, in 8 chunks.
        assert_int_equal(sums, 2 * (4 * STEPS + 2 * 8));
        close_recording(&r);
    }
}

// In forward and backward, the next layer's weights are gathered while a layer computes.
static void gathers_overlap_layers(void **state) {
    static const unsigned how[] = {0, OVER_ALL, OVER_ALL | SECOND};
    for (int i = 0; i < 3; i++) {
        Recording r;
        open_recording(&r, (Shape){2, 2, 3, QUANTIZED | SHARD_WEIGHTS | how[i]}, -1, -1);
        run_steps(&r);
        // A gather of checksums follows each gather inside the node.
        int per_gather = how[i] & OVER_ALL ? 1 : 2, backward = how[i] == OVER_ALL ? 1 : 2;
        for (int u = 1; u + 1 < UNITS; u++) {
            overlaps(&r, "forward", u, "gather of weights in the node", per_gather * u);
            assert_true(before(find(&r, "gather of weights in the node", per_gather * u),
                               find(&r, "forward", u + 1)));
        }
        // Units 4 and 3 are still in their slots. Unit 2 is gathered while unit 3 runs backward.
        overlaps(&r, "backward", 1, "gather of weights in the node", per_gather * (UNITS - 1));
        overlaps(&r, "backward", 2, "gather of weights in the node", per_gather * (UNITS - 1) + backward);
        close_recording(&r);
    }
}

// The host reads the step status while AdamW runs. The next step does not wait for this, because
// the compute stream has waited for the status at the end of the step.
static void status_read_overlaps_the_update(void **state) {
    Recording r;
    open_recording(&r, (Shape){2, 2, 3, QUANTIZED}, -1, -1);
    run_steps(&r);
    const Op *judged = find(&r, "judge", 0), *read = find(&r, "download", 0),
             *next = find(&r, "forward", 2 * UNITS);
    assert_true(before(judged, read));
    overlaps(&r, "download", 0, "AdamW", 0);
    assert_true(before(read, next));
    close_recording(&r);
}

// Checkpoint copies delay only the update of the next step, not its layers or reductions.
static void save_overlaps_the_next_step(void **state) {
    for (int i = 0; i < SHAPES; i++) {
        Shape shape = shapes[i];
        Recording r;
        if ((shape.how & (NO_OVERLAP | LOCAL | MUON)) || shape.nodes * shape.per_node == 1) continue;
        open_recording(&r, shape, -1, -1);
        run_steps(&r);
        int copies = 0, sums = 0, updates = 0;
        while (find(&r, "checkpoint copy", copies)) copies++;
        while (find(&r, "final sum", sums)) sums++;
        while (find(&r, "AdamW", updates)) updates++;
        assert_int_equal(updates, STEPS * UNITS);
        ZeroSlices slices = zero_slices(r.zero, true);
        int residuals;  // copied immediately
        zero_ranges(r.zero, SLICE_RESIDUAL, &residuals);
        assert_int_equal(copies, SAVES * (slices.count - residuals));
        copies = slices.count - residuals;
        assert_true(copies > UNITS);
        free(slices.slices);
        int third = 2 * sums / STEPS;  // the save follows the second step
        for (int k = 0; k < copies; k += copies - 1) {
            for (int u = 0; u < 2 * UNITS; u++) {
                overlaps(&r, "checkpoint copy", k, "forward", 4 * UNITS + u);
                overlaps(&r, "checkpoint copy", k, "backward", 4 * UNITS + u);
            }
            for (int s = third; s < third + sums / STEPS; s++) {
                overlaps(&r, "checkpoint copy", k, "final sum", s);
            }
            overlaps(&r, "checkpoint copy", k, "judge", 2);
            assert_true(before(find(&r, "AdamW", 2 * UNITS - 1), find(&r, "checkpoint copy", k)));
            assert_true(before(find(&r, "checkpoint copy", k), find(&r, "AdamW", 2 * UNITS)));
            assert_true(before(find(&r, "AdamW", 4 * UNITS - 1), find(&r, "checkpoint copy", copies + k)));
            assert_true(before(find(&r, "checkpoint copy", copies + k), find(&r, "AdamW", 4 * UNITS)));
        }
        close_recording(&r);
    }
}

// With offload, gradients are copied to the host during backward and later reductions. AdamW of a
// bucket overlaps with upload and gather of the bucket before it, and with the next forward.
static void host_work_overlaps(void **state) {
    Shape shape = {2, 2, 1, QUANTIZED | OFFLOAD};
    Recording r;
    open_recording(&r, shape, -1, -1);
    run_steps(&r);
    for (int u = 0; u + 1 < UNITS; u++) {
        enum { DOWN = 3 };  // downloads per bucket: two ranges of gradients, one of weights
        overlaps(&r, "copy down", DOWN * u, "backward", UNITS + u + 1);
        overlaps(&r, "copy down", DOWN * u, "exchange between nodes", u + 1);
        overlaps(&r, "copy down", DOWN * u, "final sum", u + 1);
        overlaps(&r, "AdamW", u + 1, "copy up", u);
        overlaps(&r, "AdamW", u + 1, "gather between nodes", u);
        overlaps(&r, "AdamW", u + 1, "forward", 2 * UNITS + u);  // forward of the next step
    }
    close_recording(&r);
}

// With --no-overlap all operations run in the order in which the host started them.
static void no_overlap_is_serial(void **state) {
    Shape shape = {2, 2, 3, QUANTIZED | NO_OVERLAP};
    Recording r;
    open_recording(&r, shape, -1, -1);
    run_steps(&r);
    const Op *a = find(&r, "quantize", 1), *b = find(&r, "exchange between nodes", 0);
    assert_true(before(b, a) && !before(a, b));
    assert_int_equal(r.device.streams, 2);
    close_recording(&r);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(conflicting_uses_are_ordered),
        cmocka_unit_test(every_wait_is_needed),
        cmocka_unit_test(stages_overlap),
        cmocka_unit_test(chunks_overlap_layers_of_their_bucket),
        cmocka_unit_test(any_order_of_layers),
        cmocka_unit_test(gathers_overlap_layers),
        cmocka_unit_test(status_read_overlaps_the_update),
        cmocka_unit_test(save_overlaps_the_next_step),
        cmocka_unit_test(host_work_overlaps),
        cmocka_unit_test(no_overlap_is_serial),
    };
    Launch launch;
    leaks_launch(&launch, &argc, &argv);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    failed += leaks_found();
    launch_finalize(&launch);
    return failed;
}
