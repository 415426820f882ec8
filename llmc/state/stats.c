// Quantization statistics: see stats.h.
#include "llmc/state/stats.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "llmc/base/append.h"
#include "llmc/ranks/peers.h"

// Chunks of the exact reduction, for smaller buffers; the sums do not depend on them.
enum { EXACT_CHUNKS = 8 };

static bool errors_due(const Base *base) {
    return due(base->step, base->config->log_quantization_error_interval);
}
static bool histograms_due(const Base *base) {
    return due(base->step, base->config->dump_distributions_interval);
}
bool stats_due(const Base *base) { return errors_due(base) || histograms_due(base); }

bool stats_folder(const Config *config, Error *err) {
    const char *folder = config->dump_distributions;
    if (!folder) return true;
    if (!append_make_folders(folder, err)) return false;
    if (access(folder, W_OK | X_OK) == 0) return true;
    return system_error(err, "cannot write to %s: %s; set --dump-distributions to another folder", folder,
                        strerror(errno));
}

// Returns the format of the exact reduction: fp32 on every hop.
static GradFormat exact_wire(void) {
    GradFormat format = {0};
    format.intra_codec = format.inter_codec = format.tail_codec = CODEC_FP32;
    format.intra_group = format.inter_group = HADAMARD_ORDER;
    format.chunks = EXACT_CHUNKS;
    return format;
}

void stats_reserve(const Base *base, Stats *stats, MemoryPlan *memory_plan) {
    if (!base->config->log_quantization_error_interval || base->layout.dp == 1) return;
    GradFormat format = exact_wire();
    TlqWorkspace *w = &stats->workspace;
    tlq_workspace(w, &base->layout, &format);
    const char *group = "quantization error";
    memory_plan_reserve(memory_plan, group, "gradients reduced exactly, own shard",
                        (size_t)base->layout.shard_elements * sizeof(float), (void **)&stats->exact);
    tlq_reserve(memory_plan, group, w, base_alignment(base));
}

void stats_free(Stats *stats) {
    free(stats->histograms);
    stats->histograms = NULL;
}

Traffic stats_traffic(const Base *base, const Stats *stats) {
    const Mesh *mesh = base->mesh;
    Traffic exact = stats->exact_traffic;
    Traffic traffic = {comm_sent(&mesh->node) + comm_sent(&mesh->shards) - exact.node,
                       comm_sent(&mesh->rail) + comm_sent(&mesh->shard_rail) +
                           comm_sent(&mesh->replica_groups) - exact.rail,
                       comm_sent(&mesh->tp) + comm_sent(&mesh->pp) + comm_sent(&mesh->embedding)};
    return traffic;
}

// Returns true if the range belongs to a matrix of the bucket and this rank counts the tensor.
static bool counts_matrix(const Base *base, const Range *range, const Bucket *bucket) {
    return base->tensors[range->tensor].counted && range->arena_at >= bucket->arena_start &&
           range->arena_at < bucket->arena_start + bucket->matrix_elements;
}

// --- in the step ---------------------------------------------------------------------------------

// Copies n values to the host after earlier work on lanes->last, zero-padded to `room` values.
static float *fetch(const Base *base, const float *values, int64_t n, int64_t room) {
    float *host = xcalloc((size_t)room + 1, sizeof(float), "the quantization statistics");
    copy_to_host(base->lanes->last, host, values, (size_t)n * sizeof(float));
    stream_synchronize(base->lanes->last);
    return host;
}

static float *fetch_master(const Base *base, const Optimizer *optimizer, const Range *range) {
    int64_t n = range->hi - range->lo;
    float *host = xmalloc((size_t)n * sizeof(float) + 1, "the quantization statistics");
    optimizer->store->read(optimizer, base->lanes->last, host, STATE_MASTER, range->state_at, n);
    return host;
}

static float *fetch_weights(const Base *base, const floatX *values, int64_t n) {
    floatX *narrow = xmalloc((size_t)n * sizeof(floatX) + 1, "the quantization statistics");
    float *host = xmalloc((size_t)n * sizeof(float) + 1, "the quantization statistics");
    copy_to_host(base->lanes->last, narrow, values, (size_t)n * sizeof(floatX));
    stream_synchronize(base->lanes->last);
    for (int64_t i = 0; i < n; i++) host[i] = floatX_to_float(narrow[i]);
    free(narrow);
    return host;
}

static Histogram *histogram_of(const Base *base, Stats *stats, int tensor, enum StatsKind kind) {
    if (!stats->histograms)
        stats->histograms = xcalloc((size_t)base->layout.tensors * STATS_KINDS, sizeof(Histogram),
                                    "histograms");
    return &stats->histograms[tensor * STATS_KINDS + (int)kind];
}

// Returns the logical offset (layout.h) of the range's first element.
static int64_t logical_of(const Base *base, const Range *range, const Bucket *bucket) {
    int64_t at = range->arena_at - bucket->arena_start;
    const Segment *segment = base->layout.segments + bucket->first_segment;
    while (at >= segment->start + segment->numel) segment++;
    return segment->logical + at - segment->start;
}

// Adds the input of the first reduction level (the local gradient times 1/dp) to the histograms,
// before and after an orthonormal transform. The transform is the rotation if the run uses it, else
// Hadamard. The last block of a range is padded with zeros, which count in the histogram after the
// transform. With ZeRO-2 and 3 every micro-batch is added.
static void gradient_histograms(const Base *base, Stats *stats, const TlqStep *step, int b,
                                const float *grads) {
    const Bucket *bucket = &base->layout.bucket[b];
    bool rotated = step->grad_format.transform == TRANSFORM_ROTATION;
    Transform transform = rotated ? TRANSFORM_ROTATION : TRANSFORM_HADAMARD;
    int order = transform_order(transform);
    RoundingKey key = tlq_rotation(step);
    float scale = 1.0f / (float)base->layout.dp, orthonormal = 1.0f / sqrtf((float)order);
    for (int i = 0; i < base->range_count; i++) {
        const Range *range = &base->ranges[i];
        if (!counts_matrix(base, range, bucket)) continue;
        int64_t n = range->hi - range->lo, whole = round_up64(n, order);
        int64_t logical = logical_of(base, range, bucket);
        float *x = fetch(base, grads + range->arena_at - bucket->arena_start, n, whole);
        for (int64_t j = 0; j < whole; j++) x[j] *= scale;
        histogram_add(histogram_of(base, stats, range->tensor, STATS_GRADIENT), x, n);
        for (int64_t j = 0; j < whole; j += order) transform_block(x + j, transform, key, logical + j);
        for (int64_t j = 0; j < whole; j++) x[j] *= orthonormal;
        histogram_add(histogram_of(base, stats, range->tensor, rotated ? STATS_ROTATION : STATS_HADAMARD), x,
                      whole);
        free(x);
    }
}

static GradShard exact_shard(const Base *base, const Stats *stats, int b) {
    const Bucket *bucket = &base->layout.bucket[b];
    float *matrix = stats->exact + bucket->state_start;
    GradShard own = {matrix, matrix + bucket->matrix_per_rank};
    return own;
}

void stats_before_reduction(const Base *base, Stats *stats, const TlqStep *step, int b, const float *grads) {
    assert(b >= 0 && b < base->layout.buckets);
    const Bucket *bucket = &base->layout.bucket[b];
    if (histograms_due(base)) gradient_histograms(base, stats, step, b, grads);
    if (!errors_due(base) || base->layout.dp == 1) return;
    TlqStep exact = *step;
    exact.grad_format = exact_wire();
    exact.error_feedback = false;
    exact.workspace = stats->workspace;
    float *sums = base->partial_sums + base->partial_start[b];  // the quantized reduction overwrites them
    Traffic before = stats_traffic(base, stats);
    tlq_reduce_bucket(&exact, b, (ChunkRange){0, EXACT_CHUNKS}, grads, exact_shard(base, stats, b), sums,
                      sums + bucket->matrix_per_rank / HADAMARD_ORDER, base->lanes);
    Traffic after = stats_traffic(base, stats);
    stats->exact_traffic.node += after.node - before.node;
    stats->exact_traffic.rail += after.rail - before.rail;
}

// Adds the squares of (reduced - exact) and of exact for the first n values of a shard.
static void compare_shard(const Base *base, Stats *stats, const float *window, const float *exact_window,
                          int64_t n) {
    float *reduced = fetch(base, window, n, n), *exact = fetch(base, exact_window, n, n);
    for (int64_t i = 0; i < n; i++) {
        double error = (double)reduced[i] - exact[i];
        stats->error_squares += error * error;
        stats->exact_squares += (double)exact[i] * exact[i];
    }
    free(reduced);
    free(exact);
}

void stats_after_reduction(const Base *base, Stats *stats, int b, GradShard own) {
    assert(b >= 0 && b < base->layout.buckets);
    if (!errors_due(base) || base->layout.dp == 1) return;
    const Bucket *bucket = &base->layout.bucket[b];
    int64_t rank = base->mesh->dp.rank;
    GradShard exact = exact_shard(base, stats, b);
    compare_shard(base, stats, own.matrix, exact.matrix, layout_counted(bucket, true, rank));
    compare_shard(base, stats, own.tail, exact.tail, layout_counted(bucket, false, rank));
}

void stats_after_update(const Base *base, Stats *stats, const Optimizer *optimizer, const Weights *weights,
                        int b) {
    assert(b >= 0 && b < base->layout.buckets);
    if (!histograms_due(base)) return;
    for (int i = 0; i < base->range_count; i++) {
        const Range *range = &base->ranges[i];
        if (!counts_matrix(base, range, &base->layout.bucket[b])) continue;
        int64_t n = range->hi - range->lo;
        float *master = fetch_master(base, optimizer, range);
        histogram_add(histogram_of(base, stats, range->tensor, STATS_WEIGHT), master, n);
        if (base->state->dp > 1) {  // else the update has already overwritten the old weights
            float *replica = fetch_weights(base, weights_of_range(base, weights, range), n);
            for (int64_t j = 0; j < n; j++) replica[j] = master[j] - replica[j];
            histogram_add(histogram_of(base, stats, range->tensor, STATS_DIFFERENCE), replica, n);
            free(replica);
        }
        free(master);
    }
}

// --- after the step ------------------------------------------------------------------------------

// Sums the squares of (replica - master) and of (bf16(master) - master) over this rank's ranges,
// except ranges of tensors that another rank counts.
static void replica_squares(const Base *base, const Optimizer *optimizer, const Weights *weights,
                            double squares[2]) {
    for (int i = 0; i < base->range_count; i++) {
        const Range *range = &base->ranges[i];
        int64_t n = range->hi - range->lo;
        if (!base->tensors[range->tensor].counted) continue;
        float *master = fetch_master(base, optimizer, range),
              *replica = fetch_weights(base, weights_of_range(base, weights, range), n);
        for (int64_t j = 0; j < n; j++) {
            double error = (double)replica[j] - master[j],
                   rounding = (double)floatX_to_float(floatX_from_float(master[j])) - master[j];
            squares[0] += error * error;
            squares[1] += rounding * rounding;
        }
        free(master);
        free(replica);
    }
}

// Returns sqrt(a / b), or `none` if both are 0.
static double root_ratio(double a, double b, double none) {
    return a == 0.0 && b == 0.0 ? none : sqrt(a / b);
}

static void report_errors(const Base *base, Stats *stats, const Optimizer *optimizer, const Weights *weights,
                          Log *log, Peers world) {
    double squares[4] = {stats->error_squares, stats->exact_squares, 0.0, 0.0};
    replica_squares(base, optimizer, weights, squares + 2);
    stats->error_squares = stats->exact_squares = 0.0;
    peers_all_reduce(world, squares, 4, MPI_DOUBLE, MPI_SUM);
    double gradient = root_ratio(squares[0], squares[1], 0.0), norm = sqrt(squares[1]),
           replica = root_ratio(squares[2], squares[3], 1.0);
    log_line(log,
             " quantization error at iteration %lld | reduced gradient: %.3E | replica over bf16 rounding: "
             "%.4f |",
             (long long)base->step, gradient, replica);
    log_scalar(log, "quantization-error gradient", base->step, gradient);
    log_scalar(log, "quantization-error replica over bf16", base->step, replica);
    Text json = json_begin("quantization_error");
    json_integer(&json, "iteration", base->step);
    json_number(&json, "gradient_error", gradient);
    if (base->layout.dp > 1) json_number(&json, "exact_gradient_norm", norm);
    json_number(&json, "replica_error", replica);
    log_json(log, &json);
}

// Writes a line that describes the bins, then a line for each nonempty histogram.
static void write_histograms(const Base *base, const Stats *stats, FILE *out) {
    static const char *const kinds[STATS_KINDS] = {"weight", "difference", "gradient", "gradient_hadamard",
                                                   "gradient_rotation"};
    fprintf(out, "{\"kind\":\"bins\",\"iteration\":%lld,\"rank\":%d,\"ranks\":%d,\"bins\":%d,\"shift\":%d}\n",
            (long long)base->step, base->mesh->world.rank, base->mesh->world.size, HISTOGRAM_BINS,
            HISTOGRAM_SHIFT);
    for (int t = 0; stats->histograms && t < base->layout.tensors; t++) {
        for (int k = 0; k < STATS_KINDS; k++) {
            const Histogram *h = &stats->histograms[t * STATS_KINDS + k];
            if (!h->count) continue;
            fprintf(out, "{\"kind\":\"%s\",\"tensor\":\"%s\",", kinds[k], base->tensors[t].name);
            histogram_write(h, out);
            fprintf(out, "}\n");
        }
    }
}

// Writes a file atomically, by renaming it. Replaces an existing file.
static bool save_text(const char *folder, const char *path, const char *text, size_t bytes, Error *err) {
    char part[4200];
    Append file = {.fd = -1};
    snprintf(part, sizeof part, "%s.part", path);
    unlink(part);
    if (!append_make_folders(folder, err) || !append_open(&file, part, O_EXCL, err)) return false;
    bool written = append_record(&file, text, bytes);  // warns on failure
    append_close(&file);
    if (written && rename(part, path)) return system_error(err, "cannot rename %s", part);
    return true;
}

static void histogram_path(const Base *base, int rank, char *path, size_t bytes) {
    snprintf(path, bytes, "%s/iter_%07lld.rank_%03d.jsonl", base->config->dump_distributions,
             (long long)base->step, rank);
}

// Every rank writes a file, even if its shard has no matrices, because readers count the files.
static void dump_histograms(const Base *base, const Stats *stats) {
    const char *folder = base->config->dump_distributions;
    char path[4096], *text = NULL;
    size_t bytes = 0;
    Error err;
    FILE *out = open_memstream(&text, &bytes);
    if (!out) return;
    write_histograms(base, stats, out);
    fclose(out);
    // Remove files of an earlier run with more ranks, because readers would include them.
    for (int rank = base->mesh->world.size; base->mesh->world.rank == 0; rank++) {
        histogram_path(base, rank, path, sizeof path);
        if (unlink(path)) break;
    }
    histogram_path(base, base->mesh->world.rank, path, sizeof path);
    if (!save_text(folder, path, text, bytes, &err))
        warning_print(device_site(base->device), "%.900s; training continues without these histograms",
                      err.what);
    free(text);
}

void stats_report(const Base *base, Stats *stats, const Optimizer *optimizer, Weights *weights, Log *log,
                  Peers world) {
    weights_wait_all(base, weights);
    if (errors_due(base)) report_errors(base, stats, optimizer, weights, log, world);
    if (histograms_due(base)) dump_histograms(base, stats);
    stats_free(stats);
}
