// Log lines, JSON lines, TensorBoard: see log.h.
#include "llmc/log/log.h"

#include <assert.h>
#include <cjson/cJSON.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "llmc/base/append.h"
#include "llmc/ranks/heartbeat.h"
#include "llmc/log/tensorboard.h"
#include "llmc/base/version.h"

struct Log {
    const Config *config;
    int world_size;
    bool active;
    const Site *site;  // may be NULL
    bool has_json;
    Append json;
    Tensorboard *tensorboard;  // NULL: off
    int64_t skipped, epoch;    // skipped steps; latest epoch printed
};

// ---- plain lines and JSON lines -----------------------------------------------------------------

// Reports to the watchdog that this rank writes to standard output, which may block. begins false:
// the write has ended, and the rank's previous phase continues.
static void report_write(const Log *log, bool begins) {
    if (!log->site) return;
    Site here = *log->site;
    if (begins) here.phase = PHASE_WRITE_LOG;
    heartbeat_waiting(&here, false);
}

// Prints the text and a newline in one write, so that lines of several processes do not interleave.
// Frees the text.
static void print_text(const Log *log, Text *text) {
    text_add(text, "\n");
    report_write(log, true);
    fwrite(text->data, 1, text->length, stdout);
    fflush(stdout);
    report_write(log, false);
    text_free(text);
}

void log_json(Log *log, Text *json) {
    if (log->active && log->has_json) {
        text_add(json, "}\n");
        append_record(&log->json, json->data, json->length);
    }
    text_free(json);
}

void log_text(Log *log, const char *tag, int64_t step, const char *text) {
    if (log->active && log->tensorboard) tensorboard_text(log->tensorboard, tag, step, text);
}

void log_scalar(Log *log, const char *tag, int64_t step, double value) {
    if (log->active && log->tensorboard) tensorboard_scalar(log->tensorboard, tag, step, value);
}

void log_scalar_twice(Log *log, const char *tag, int64_t iteration, int64_t samples, double value) {
    char versus[192];
    snprintf(versus, sizeof versus, "%s vs samples", tag);
    log_scalar(log, tag, iteration, value);
    log_scalar(log, versus, samples, value);
}

// ---- opening and plain lines --------------------------------------------------------------------

static bool open_json(Log *log, const char *path, Error *err) {
    char *folder = xstrdup(path), *slash = strrchr(folder, '/');
    bool made = true;
    if (slash && slash != folder) {
        *slash = 0;
        made = append_make_folders(folder, err);
    }
    free(folder);
    if (!made || !append_open(&log->json, path, 0, err)) return false;
    append_end_line(&log->json);  // ends a partial line that a killed run may have left
    log->has_json = true;
    return true;
}

Log *log_open(const Config *config, int world_size, bool active, const Site *site, Error *err) {
    assert(config && world_size > 0);
    Log *log = xcalloc(1, sizeof *log, "log");
    *log =
        (Log){.config = config, .world_size = world_size, .active = active, .site = site, .json = {.fd = -1}};
    if (!active) return log;
    bool opened = !config->log_jsonl || open_json(log, config->log_jsonl, err);
    if (opened && config->tensorboard_dir) {
        log->tensorboard = tensorboard_open(config->tensorboard_dir, err);
        opened = log->tensorboard != NULL;
    }
    if (opened) return log;
    log_close(log);
    return NULL;
}

void log_close(Log *log) {
    if (!log) return;
    append_close(&log->json);
    tensorboard_close(log->tensorboard);
    free(log);
}

void log_line(Log *log, const char *format, ...) {
    if (!log->active) return;
    va_list args;
    va_start(args, format);
    report_write(log, true);
    vfprintf(stdout, format, args);
    fputc('\n', stdout);
    fflush(stdout);
    report_write(log, false);
    va_end(args);
}

void log_framed(Log *log, const char *lines, size_t columns) {
    assert(lines);
    Text frame = {0};
    while (frame.length < columns) text_add(&frame, "-");
    log_line(log, "%s\n%s\n%s", frame.data, lines, frame.data);
    text_free(&frame);
}

static void local_datetime(char *text, size_t bytes) {
    time_t now = time(NULL);
    struct tm parts;
    localtime_r(&now, &parts);
    strftime(text, bytes, "%Y-%m-%d %H:%M:%S", &parts);
}

void log_datetime(Log *log, const char *format, ...) {
    if (!log->active) return;
    char what[512], when[32];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    local_datetime(when, sizeof when);
    log_line(log, "[%s] datetime: %s ", what, when);
}

void log_memory(Log *log, int64_t iterations, double bytes) {
    assert(iterations >= 0);
    double mb = bytes / 0x1p20;
    log_line(log,
             "[Rank 0] (after %lld iterations) memory (MB) | allocated: %f | max allocated: %f | reserved: "
             "%f | max reserved: %f",
             (long long)iterations, mb, mb, mb, mb);
}

// ---- start --------------------------------------------------------------------------------------

static void write_arguments_to_tensorboard(Log *log, const char *arguments) {
    cJSON *all = cJSON_Parse(arguments);
    for (const cJSON *item = all ? all->child : NULL; item; item = item->next) {
        char tag[256];
        char *value = cJSON_IsString(item) ? xstrdup(item->valuestring) : cJSON_PrintUnformatted(item);
        snprintf(tag, sizeof tag, "%s/text_summary", item->string);  // suffix that the Text tab expects
        tensorboard_text(log->tensorboard, tag, 0, value ? value : "");
        free(value);
    }
    cJSON_Delete(all);
}

static void write_start_json(Log *log, int64_t parameters, int nodes, const char *device,
                             const char *arguments) {
    char host_libraries[512], device_libs[512], libraries[1028], when[32], host[256] = "";
    version_libraries(host_libraries, sizeof host_libraries);
    device_libraries(device_libs, sizeof device_libs);
    snprintf(libraries, sizeof libraries, "%s, %s", host_libraries, device_libs);
    local_datetime(when, sizeof when);
    gethostname(host, sizeof host - 1);
    Text json = json_begin("start");
    json_text(&json, "version", version_number());
    json_text(&json, "commit", version_commit());
    json_text(&json, "libraries", libraries);
    json_text(&json, "device", device);
    json_integer(&json, "world_size", log->world_size);
    json_integer(&json, "nodes", nodes);
    json_integer(&json, "parameters", parameters);
    json_name(&json, "arguments");
    text_add(&json, "%s", arguments);
    json_open(&json, "timing");
    json_text(&json, "datetime", when);
    json_integer(&json, "unix_s", (int64_t)time(NULL));
    json_text(&json, "host", host);
    json_integer(&json, "pid", (int64_t)getpid());
    json_close(&json);
    log_json(log, &json);
}

// Warns of flags that have no effect with this number of nodes and ranks.
static void warn_of_flags(Log *log, int nodes) {
    const Config *c = log->config;
    int ranks = log->world_size;
    // Replica groups exchange messages in the format of the hop between nodes.
    if (!c->quantized_gradients || ranks == 1 || !log->active || c->replica_group) return;
    if (nodes == 1)
        log_line(log,
                 "WARNING: one node: all gradients use %d bits, so --gradient-quantization-bits-inter has no "
                 "effect",
                 c->gradient_quantization_bits_intra);
    if (nodes == 1 && c->error_feedback)
        log_line(log,
                 "WARNING: one node: no gradients are sent between nodes, so --error-feedback has no effect");
    if (nodes == ranks && c->local_steps > 1)
        log_line(log,
                 "WARNING: one rank per node: no gradients are sent, only pseudo-gradients in %d bits, so "
                 "--gradient-quantization-bits-intra has no effect",
                 c->gradient_quantization_bits_inter);
    else if (nodes == ranks)
        log_line(log,
                 "WARNING: one rank per node: all gradients use %d bits, so "
                 "--gradient-quantization-bits-intra has no effect",
                 c->gradient_quantization_bits_inter);
}

void log_start(Log *log, int64_t parameters, int nodes, const char *device) {
    warn_of_flags(log, nodes);
    if (!log->active || (!log->has_json && !log->tensorboard)) return;
    char *arguments = config_to_json(log->config);
    for (char *c = arguments; *c; c++) {  // puts all on one line; line breaks in strings are escaped
        if (*c == '\n' || *c == '\t' || *c == '\r') *c = ' ';
    }
    if (log->has_json) write_start_json(log, parameters, nodes, device, arguments);
    if (log->tensorboard) write_arguments_to_tensorboard(log, arguments);
    free(arguments);
}

// ---- the iteration line -------------------------------------------------------------------------

// Adds Megatron-LM's fields in its order and formats, for tools that parse them.
static void add_megatron_fields(Text *line, const Config *config, const IntervalReport *r) {
    text_add(line, " iteration %8lld/%8lld |", (long long)r->last.iteration, (long long)r->train_iters);
    text_add(line, " consumed samples: %12lld |", (long long)r->last.consumed_samples);
    text_add_figure(line, "elapsed time per iteration (ms)", "%.1f", r->elapsed_ms);
    if (config->log_throughput)
        text_add_figure(line, "throughput per GPU (TFLOP/s/GPU)", "%.1f", r->tflops_per_gpu);
    text_add_figure(line, "learning rate", "%.3E", r->last.learning_rate);
    text_add(line, " global batch size: %5d |", r->last.global_batch_size);
    if (report_has_loss(r)) text_add_figure(line, "lm loss", "%.6E", r->lm_loss);
    text_add_figure(line, "loss scale", "%.1f", 1.0);  // bf16 has no loss scale, but parsers expect the field
    if (!(r->last.grad_norm < 0)) text_add_figure(line, "grad norm", "%.3f", r->last.grad_norm);
    if (config->log_num_zeros_in_grad && !(r->last.num_zeros < 0))
        text_add_figure(line, "num zeros", "%.1f", r->last.num_zeros);
    if (config->log_params_norm && !(r->last.params_norm < 0))
        text_add_figure(line, "params norm", "%.3f", r->last.params_norm);
    text_add(line, " number of skipped iterations: %3lld |", (long long)r->skipped);
    text_add(line, " number of nan iterations: %3lld |", (long long)r->nan);
}

static void add_own_fields(Text *line, const IntervalReport *r) {
    char left[32];
    if (r->tokens_per_second > 0) text_add_figure(line, "tokens/s", "%.0f", r->tokens_per_second);
    if (r->mfu > 0) text_add_figure(line, "MFU", "%.1f%%", 100 * r->mfu);
    text_add_figure(line, "inter-node MB/step", "%.3f", r->inter_node_bytes / 1e6);
    text_add_figure(line, "intra-node MB/step", "%.3f", r->intra_node_bytes / 1e6);
    if (r->model_bytes > 0) text_add_figure(line, "model-parallel MB/step", "%.3f", r->model_bytes / 1e6);
    if (r->exposed_comm_ms >= 0) text_add_figure(line, "exposed comm (ms)", "%.1f", r->exposed_comm_ms);
    short_duration(left, sizeof left, r->seconds_left);
    if (*left) text_add(line, " ETA: %s |", left);
    if (r->epoch >= 0) text_add_figure(line, "epoch", "%.3f", r->epoch);
}

static void write_interval_json(Log *log, const IntervalReport *r) {
    Text json = json_begin("interval");
    json_integer(&json, "iteration", r->last.iteration);
    json_integer(&json, "iterations", r->iterations);
    json_integer(&json, "consumed_samples", r->last.consumed_samples);
    if (report_has_loss(r)) json_number(&json, "loss", r->lm_loss);
    if (!(r->last.grad_norm < 0)) json_number(&json, "grad_norm", r->last.grad_norm);
    json_number(&json, "lr", r->last.learning_rate);
    json_integer(&json, "global_batch_size", r->last.global_batch_size);
    json_integer(&json, "skipped", r->skipped);
    json_integer(&json, "nan", r->nan);
    json_number(&json, "inter_node_bytes", r->inter_node_bytes);
    json_number(&json, "intra_node_bytes", r->intra_node_bytes);
    if (r->model_bytes > 0) json_number(&json, "model_parallel_bytes", r->model_bytes);
    if (r->epoch >= 0) json_number(&json, "epoch", r->epoch);
    json_open(&json, "timing");
    json_number(&json, "elapsed_ms", r->elapsed_ms);
    json_number(&json, "tokens_per_second", r->tokens_per_second);
    json_number(&json, "tflops_per_gpu", r->tflops_per_gpu);
    if (r->mfu > 0) json_number(&json, "mfu", r->mfu);
    if (r->exposed_comm_ms >= 0) {
        json_number(&json, "exposed_comm_ms", r->exposed_comm_ms);
        json_number(&json, "exposed_gradients_ms", r->exposed_gradients_ms);
        json_number(&json, "exposed_weights_ms", r->exposed_weights_ms);
        json_number(&json, "exposed_most_ms", r->exposed_most_ms);
    }
    if (r->seconds_left >= 0) json_number(&json, "seconds_left", r->seconds_left);
    json_close(&json);
    log_json(log, &json);
}

static void write_interval_scalars(Log *log, const IntervalReport *r) {
    Tensorboard *tb = log->tensorboard;
    if (log->config->log_timers_to_tensorboard) {
        tensorboard_scalar(tb, "iteration-time", r->last.iteration, r->elapsed_ms / 1e3);
        if (log->config->log_throughput)
            tensorboard_scalar(tb, "throughput", r->last.iteration, r->tflops_per_gpu);
    }
    if (r->tokens_per_second > 0)
        tensorboard_scalar(tb, "tokens-per-second", r->last.iteration, r->tokens_per_second);
    if (r->mfu > 0) tensorboard_scalar(tb, "mfu", r->last.iteration, r->mfu);
    tensorboard_scalar(tb, "inter-node-bytes-per-step", r->last.iteration, r->inter_node_bytes);
    tensorboard_scalar(tb, "intra-node-bytes-per-step", r->last.iteration, r->intra_node_bytes);
    if (r->exposed_comm_ms >= 0)
        tensorboard_scalar(tb, "exposed-comm-ms", r->last.iteration, r->exposed_comm_ms);
    if (r->epoch >= 0) tensorboard_scalar(tb, "epoch", r->last.iteration, r->epoch);
}

void log_iteration(Log *log, const IntervalReport *report) {
    assert(log && report);
    if (!log->active) return;
    Text line = {0};
    if (log->config->log_line == LINE_SHORT) {
        short_line(&line, report);
    } else {
        add_megatron_fields(&line, log->config, report);
        add_own_fields(&line, report);
    }
    print_text(log, &line);
    if (report->epoch >= 1 && (int64_t)report->epoch > log->epoch) {
        log->epoch = (int64_t)report->epoch;
        log_line(log, "NOTE: all training data has been seen; epoch %lld begins", (long long)log->epoch);
    }
    if (log->has_json) write_interval_json(log, report);
    if (log->tensorboard) write_interval_scalars(log, report);
}

// ---- a single iteration -------------------------------------------------------------------------

static void write_step_scalars(Log *log, const StepReport *r) {
    const Config *config = log->config;
    int64_t i = r->iteration, samples = r->consumed_samples;
    log_scalar_twice(log, "learning-rate", i, samples, r->learning_rate);
    if (config->log_batch_size_to_tensorboard)
        log_scalar_twice(log, "batch-size", i, samples, r->global_batch_size);
    log_scalar_twice(log, "lm loss", i, samples, r->loss);
    log_scalar_twice(log, "loss-scale", i, samples, 1.0);
    if (config->log_world_size_to_tensorboard)
        log_scalar_twice(log, "world-size", i, samples, log->world_size);
    if (!(r->grad_norm < 0)) log_scalar_twice(log, "grad-norm", i, samples, r->grad_norm);
    if (config->log_num_zeros_in_grad && !(r->num_zeros < 0))
        log_scalar_twice(log, "num-zeros", i, samples, r->num_zeros);
    if (config->log_params_norm && !(r->params_norm < 0))
        log_scalar_twice(log, "params-norm", i, samples, r->params_norm);
    if (config->log_memory_to_tensorboard && r->reserved_bytes > 0) {
        tensorboard_scalar(log->tensorboard, "mem-reserved-bytes", r->iteration, r->reserved_bytes);
        tensorboard_scalar(log->tensorboard, "mem-allocated-bytes", r->iteration, r->allocated_bytes);
    }
}

static void write_train_json(Log *log, const StepReport *r) {
    Text json = json_begin("train");
    json_integer(&json, "iteration", r->iteration);
    json_integer(&json, "consumed_samples", r->consumed_samples);
    json_number(&json, "loss", r->loss);
    if (!(r->grad_norm < 0)) json_number(&json, "grad_norm", r->grad_norm);
    json_number(&json, "lr", r->learning_rate);
    json_integer(&json, "global_batch_size", r->global_batch_size);
    json_bool(&json, "skipped", r->skipped);
    log_json(log, &json);
}

// Warns if a step was skipped because of a loss or norm that is not finite. The anomaly guard
// reports other skipped steps.
static void warn_of_step(Log *log, const StepReport *r) {
    if (!r->skipped || (isfinite(r->loss) && isfinite(r->grad_norm))) return;
    log->skipped++;
    if (log->skipped & (log->skipped - 1)) return;  // warns only of the 1st, 2nd, 4th, 8th, ...
    log_line(
        log,
        "WARNING: iteration %lld was skipped: loss or gradient norm is not finite (%lld skipped since the "
        "start of this job)",
        (long long)r->iteration, (long long)log->skipped);
}

void log_step_scalars(Log *log, const StepReport *report) {
    assert(log && report);
    if (!log->active) return;
    warn_of_step(log, report);
    if (log->has_json) write_train_json(log, report);
    int64_t every = log->config->tensorboard_log_interval;
    if (log->tensorboard && (every <= 1 || report->iteration % every == 0)) write_step_scalars(log, report);
}

// ---- timers -------------------------------------------------------------------------------------

// Appends a name, padded with dots to 48 characters: "    forward-backward ..............:"
static void add_timer_label(Text *table, const char *name) {
    int dots = 47 - (int)strlen(name);
    text_add(table, "\n    %s ", name);
    while (dots-- > 0) text_add(table, ".");
    text_add(table, ":");
}

static void add_timer(Text *table, TimingLogOption option, const char *name, const TimerStats *stats,
                      int world) {
    if (option == TIMING_MAX) {
        add_timer_label(table, name);
        text_add(table, " %.2f", stats->max_ms);
    } else if (option == TIMING_MINMAX) {
        add_timer_label(table, name);
        text_add(table, " (%.2f, %.2f)", stats->min_ms, stats->max_ms);
    } else {
        text_add(table, "\n  %s:", name);
        for (int rank = 0; rank < world; rank++) {
            if (stats->rank_ms[rank] > 0)
                text_add(table, "\n     rank %2d: %.2f", rank, stats->rank_ms[rank]);
        }
    }
}

// Consecutive timers that form one table and one JSON line.
typedef struct TimerTable {
    const char *kind;   // kind of the JSON line
    int64_t iteration;  // < 0: outside the training loop
    Timer first;
    int count;
    double divisor;  // divides the times
} TimerTable;

// Prints the timers that ran on some rank, and writes their JSON line.
static void print_timers(Log *log, const TimerTable *t, const TimerStats *stats, int world) {
    TimingLogOption option = log->config->timing_log_option;
    Text table = {0}, json = json_begin(t->kind);
    bool any = false;
    text_add(&table, "%s",
             option == TIMING_ALL ? "times across ranks (ms):" : "(min, max) time across ranks (ms):");
    if (t->iteration >= 0) json_integer(&json, "iteration", t->iteration);
    json_open(&json, "timing");
    for (int i = 0; i < t->count; i++) {
        const char *name = timer_name((Timer)(t->first + i));
        if (!stats[i].recorded) continue;
        any = true;
        add_timer(&table, option, name, &stats[i], world);
        json_name(&json, name);
        text_add(&json, "[");
        json_value(&json, stats[i].min_ms);
        text_add(&json, ",");
        json_value(&json, stats[i].max_ms);
        text_add(&json, "]");
    }
    json_close(&json);
    if (any) {
        print_text(log, &table);
        log_json(log, &json);
    }
    text_free(&table);
    text_free(&json);
}

static void collect_and_print(Log *log, Timers *timers, const TimerTable *t, Peers peers, TimerStats *stats) {
    int world = peers_size(peers);
    double *rank_ms = xmalloc((size_t)t->count * (size_t)world * sizeof *rank_ms, "timer values");
    timers_collect(timers, t->first, t->count, t->divisor, peers, stats, rank_ms);
    if (log->active) print_timers(log, t, stats, world);
    free(rank_ms);
}

void log_timers(Log *log, Timers *timers, int64_t iteration, int64_t iterations, Peers peers) {
    enum { FIRST = TIMER_FORWARD_BACKWARD, COUNT = TIMER_OPTIMIZER + 1 - FIRST };
    TimerStats stats[COUNT];
    const TimerTable table = {"timers", iteration, (Timer)FIRST, COUNT,
                              (double)(iterations > 0 ? iterations : 1)};
    collect_and_print(log, timers, &table, peers, stats);
    for (int i = 0; i < COUNT && log->config->log_timers_to_tensorboard; i++) {
        char tag[64];
        if (!stats[i].recorded) continue;
        snprintf(tag, sizeof tag, "%s-time", timer_name((Timer)(FIRST + i)));
        log_scalar(log, tag, iteration, stats[i].max_ms / 1e3);
    }
}

void log_phase_timers(Log *log, Timers *timers, Timer first, int count, Peers peers) {
    assert(log && count > 0 && (int)first + count <= TIMERS);
    TimerStats stats[TIMERS];
    const TimerTable table = {"phases", -1, first, count, 1.0};
    collect_and_print(log, timers, &table, peers, stats);
}

// ---- validation ---------------------------------------------------------------------------------

double log_perplexity(double loss) { return isnan(loss) ? loss : exp(loss < 20 ? loss : 20); }

static void write_validation_scalars(Log *log, int64_t iteration, int64_t samples, bool test, double loss) {
    log_scalar_twice(log, test ? "lm loss test" : "lm loss validation", iteration, samples, loss);
    if (!log->config->log_validation_ppl_to_tensorboard) return;
    log_scalar_twice(log, test ? "lm loss test ppl" : "lm loss validation ppl", iteration, samples,
                     log_perplexity(loss));
}

static void write_validation_json(Log *log, int64_t iteration, int64_t samples, bool test, const char *where,
                                  double loss) {
    Text json = json_begin("valid");
    json_integer(&json, "iteration", iteration);
    json_integer(&json, "consumed_samples", samples);
    json_text(&json, "split", test ? "test" : "valid");
    json_text(&json, "where", where);
    json_number(&json, "loss", loss);
    json_number(&json, "ppl", log_perplexity(loss));
    log_json(log, &json);
}

void log_validation(Log *log, const char *where, int64_t iteration, int64_t consumed_samples, double loss) {
    assert(log && where);
    if (!log->active) return;
    bool test = strstr(where, "test set") != NULL;
    Text line = {0};
    text_add(&line, " validation loss at %s |", where);
    text_add_figure(&line, "lm loss value", "%.6E", loss);
    text_add_figure(&line, "lm loss PPL", "%.6E", log_perplexity(loss));
    text_add(&line, " ");
    log_framed(log, line.data, line.length + 1);
    text_free(&line);
    if (log->has_json) write_validation_json(log, iteration, consumed_samples, test, where, loss);
    if (log->tensorboard) write_validation_scalars(log, iteration, consumed_samples, test, loss);
}
