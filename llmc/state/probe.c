// Figures on what quantization does: see probe.h.
#include "llmc/state/probe.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "llmc/base/append.h"
#include "llmc/ranks/peers.h"
#include "llmc/state/zero_inside.h"

// The exact reduction goes in pieces, so that its fp32 messages stay small. Any number gives the
// same sums.
enum { EXACT_CHUNKS = 8 };

static bool errors_due(const Zero *zero) {
    return due(zero->step, zero->config->log_quantization_error_interval);
}
static bool histograms_due(const Zero *zero) {
    return due(zero->step, zero->config->dump_distributions_interval);
}
bool probe_due(const Zero *zero) { return errors_due(zero) || histograms_due(zero); }

bool probe_folder(const Config *config, Error *err) {
    const char *folder = config->dump_distributions;
    if (!folder) return true;
    if (!append_make_folders(folder, err)) return false;
    if (access(folder, W_OK | X_OK) == 0) return true;
    return error_set(err, EXIT_ENVIRONMENT,
                     "cannot write to %s: %s; give another folder to --dump-distributions", folder,
                     strerror(errno));
}

// Every hop in fp32: the mean of the local gradients, but for the rounding of fp32 sums.
static GradWire exact_wire(void) {
    GradWire wire = {0};
    wire.intra_codec = wire.inter_codec = wire.tail_codec = CODEC_FP32;
    wire.intra_group = wire.inter_group = HADAMARD_ORDER;
    wire.chunks = EXACT_CHUNKS;
    return wire;
}

void probe_reserve(Zero *zero, MemoryPlan *memory_plan) {
    if (!zero->config->log_quantization_error_interval || zero->plan.dp == 1) return;
    Probe *probe = &zero->probe;
    GradWire wire = exact_wire();
    TlqWorkspace *w = &probe->workspace;
    tlq_workspace(w, &zero->plan, &wire);
    const char *group = "quantization error";
    memory_plan_reserve(memory_plan, group, "gradients reduced exactly, own shard",
                        (size_t)zero->plan.shard_elements * sizeof(float), (void **)&probe->exact);
    tlq_reserve(memory_plan, group, w, zero_grain(zero));
}

void probe_free(Probe *probe) {
    free(probe->histograms);
    probe->histograms = NULL;
}

Traffic probe_traffic(const Zero *zero) {
    const Mesh *mesh = zero->mesh;
    Traffic exact = zero->probe.exact_traffic;
    Traffic traffic = {comm_sent(&mesh->node) + comm_sent(&mesh->shards) - exact.node,
                       comm_sent(&mesh->rail) + comm_sent(&mesh->shard_rail) +
                           comm_sent(&mesh->replica_groups) - exact.rail,
                       comm_sent(&mesh->tp) + comm_sent(&mesh->pp) + comm_sent(&mesh->embedding)};
    return traffic;
}

// --- in the step ---------------------------------------------------------------------------------

// n device values as floats on the host, in the order of the lane `last`, with zeros behind them up
// to `room`.
static float *fetch(Zero *zero, const float *values, int64_t n, int64_t room) {
    float *host = (float *)xcalloc((size_t)room + 1, sizeof(float), "figures on quantization");
    copy_to_host(zero->lanes->last, host, values, (size_t)n * sizeof(float));
    stream_synchronize(zero->lanes->last);
    return host;
}

static float *fetch_masters(Zero *zero, const Piece *piece) {
    int64_t n = piece->hi - piece->lo;
    float *host = (float *)xmalloc((size_t)n * sizeof(float) + 1, "figures on quantization");
    zero_read_masters(zero, zero->lanes->last, piece->state_at, n, host);
    return host;
}

static float *fetch_weights(Zero *zero, const floatX *values, int64_t n) {
    floatX *narrow = (floatX *)xmalloc((size_t)n * sizeof(floatX) + 1, "figures on quantization");
    float *host = (float *)xmalloc((size_t)n * sizeof(float) + 1, "figures on quantization");
    copy_to_host(zero->lanes->last, narrow, values, (size_t)n * sizeof(floatX));
    stream_synchronize(zero->lanes->last);
    for (int64_t i = 0; i < n; i++) host[i] = floatX_to_float(narrow[i]);
    free(narrow);
    return host;
}

static Histogram *histogram_of(Zero *zero, int tensor, enum ProbeKind kind) {
    Probe *probe = &zero->probe;
    if (!probe->histograms)
        probe->histograms = (Histogram *)xcalloc((size_t)zero->plan.tensors * PROBE_KINDS, sizeof(Histogram),
                                                 "histograms");
    return &probe->histograms[tensor * PROBE_KINDS + (int)kind];
}

// Is the piece one of a matrix in this bucket, and counted here? (1-D tensors are never quantized.)
static bool is_matrix_of(const Zero *zero, const Piece *piece, const Bucket *bucket) {
    return zero->tensors[piece->tensor].counted && piece->arena_at >= bucket->arena_start &&
           piece->arena_at < bucket->arena_start + bucket->matrix_elements;
}

// Where the rounding bits of a piece of bucket b are counted from.
static int64_t logical_of(const Zero *zero, const Piece *piece, const Bucket *bucket) {
    int64_t at = piece->arena_at - bucket->arena_start;
    const Segment *segment = zero->plan.segments + bucket->first_segment;
    while (at >= segment->start + segment->numel) segment++;
    return segment->logical + at - segment->start;
}

// The gradient as the first level of the reduction takes it, 1/dp of the local one, and what the
// transform makes of it: the rotation where that is applied, else Hadamard, even where it is not.
// The transform is scaled to be orthonormal, so that both have the same norm. Blocks begin where
// tensors and shards do. A tensor's last block is filled with zeros before the transform; the
// histogram after it counts them too. Gradients that are reduced in every micro-batch are counted
// in every micro-batch.
static void gradient_histograms(Zero *zero, const TlqStep *step, int b) {
    const float *grads = zero_bucket_grads(zero, b);
    const Bucket *bucket = &zero->plan.bucket[b];
    bool rotated = step->grad_wire.transform == TRANSFORM_ROTATION;
    Transform transform = rotated ? TRANSFORM_ROTATION : TRANSFORM_HADAMARD;
    int order = transform_order(transform);
    RoundingKey key = tlq_rotation(step);
    float scale = 1.0f / (float)zero->plan.dp, orthonormal = 1.0f / sqrtf((float)order);
    for (int i = 0; i < zero->piece_count; i++) {
        const Piece *piece = &zero->pieces[i];
        if (!is_matrix_of(zero, piece, bucket)) continue;
        int64_t n = piece->hi - piece->lo, whole = round_up64(n, order);
        int64_t logical = logical_of(zero, piece, bucket);
        float *x = fetch(zero, grads + piece->arena_at - bucket->arena_start, n, whole);
        for (int64_t j = 0; j < whole; j++) x[j] *= scale;
        histogram_add(histogram_of(zero, piece->tensor, PROBE_GRADIENT), x, n);
        for (int64_t j = 0; j < whole; j += order) transform_block(x + j, transform, key, logical + j);
        for (int64_t j = 0; j < whole; j++) x[j] *= orthonormal;
        histogram_add(histogram_of(zero, piece->tensor, rotated ? PROBE_ROTATION : PROBE_HADAMARD), x, whole);
        free(x);
    }
}

static Windows exact_windows(const Zero *zero, int b) {
    const Bucket *bucket = &zero->plan.bucket[b];
    float *matrix = zero->probe.exact + bucket->state_start;
    Windows own = {matrix, matrix + bucket->matrix_per_rank};
    return own;
}

void probe_gradients(Zero *zero, const TlqStep *step, int b) {
    Probe *probe = &zero->probe;
    const Bucket *bucket = &zero->plan.bucket[b];
    if (histograms_due(zero)) gradient_histograms(zero, step, b);
    if (!errors_due(zero) || zero->plan.dp == 1) return;
    TlqStep exact = *step;
    exact.grad_wire = exact_wire();
    exact.error_feedback = false;
    exact.workspace = probe->workspace;
    float *leaves = zero->leaves + zero->leaf_start[b];  // overwritten by the reduction that counts
    Traffic before = probe_traffic(zero);
    tlq_reduce_bucket(&exact, b, zero_bucket_grads(zero, b), exact_windows(zero, b), leaves,
                      leaves + bucket->matrix_per_rank / HADAMARD_ORDER, zero->lanes);
    Traffic after = probe_traffic(zero);
    probe->exact_traffic.node += after.node - before.node;
    probe->exact_traffic.rail += after.rail - before.rail;
}

// Adds the squares of reduced - exact and of exact over the first n values of a window.
static void compare_window(Zero *zero, const float *window, const float *exact_window, int64_t n) {
    float *reduced = fetch(zero, window, n, n), *exact = fetch(zero, exact_window, n, n);
    for (int64_t i = 0; i < n; i++) {
        double error = (double)reduced[i] - exact[i];
        zero->probe.error_squares += error * error;
        zero->probe.exact_squares += (double)exact[i] * exact[i];
    }
    free(reduced);
    free(exact);
}

void probe_reduced(Zero *zero, int b) {
    if (!errors_due(zero) || zero->plan.dp == 1) return;
    const Bucket *bucket = &zero->plan.bucket[b];
    int64_t rank = zero->mesh->dp.rank;
    Windows own = zero_own_grads(zero, b), exact = exact_windows(zero, b);
    compare_window(zero, own.matrix, exact.matrix, plan_counted(bucket, true, rank));
    compare_window(zero, own.tail, exact.tail, plan_counted(bucket, false, rank));
}

void probe_updated(Zero *zero, int b) {
    if (!histograms_due(zero)) return;
    for (int i = 0; i < zero->piece_count; i++) {
        const Piece *piece = &zero->pieces[i];
        if (!is_matrix_of(zero, piece, &zero->plan.bucket[b])) continue;
        int64_t n = piece->hi - piece->lo;
        float *master = fetch_masters(zero, piece);
        histogram_add(histogram_of(zero, piece->tensor, PROBE_WEIGHT), master, n);
        if (zero->plan.dp > 1) {  // one rank sends nothing: its replica is new already
            float *replica = fetch_weights(zero, zero_piece_weights(zero, piece), n);
            for (int64_t j = 0; j < n; j++) replica[j] = master[j] - replica[j];
            histogram_add(histogram_of(zero, piece->tensor, PROBE_DIFFERENCE), replica, n);
            free(replica);
        }
        free(master);
    }
}

// --- after the step ------------------------------------------------------------------------------

// Squares of replica - master and of bf16(master) - master over what the own shard counts.
static void replica_squares(Zero *zero, double squares[2]) {
    for (int i = 0; i < zero->piece_count; i++) {
        const Piece *piece = &zero->pieces[i];
        int64_t n = piece->hi - piece->lo;
        if (!zero->tensors[piece->tensor].counted) continue;
        float *master = fetch_masters(zero, piece),
              *replica = fetch_weights(zero, zero_piece_weights(zero, piece), n);
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

// sqrt(a / b); `none` where both are 0.
static double root_ratio(double a, double b, double none) {
    return a == 0.0 && b == 0.0 ? none : sqrt(a / b);
}

static void report_errors(Zero *zero, Log *log, Peers world) {
    Probe *probe = &zero->probe;
    double squares[4] = {probe->error_squares, probe->exact_squares, 0.0, 0.0};
    replica_squares(zero, squares + 2);
    probe->error_squares = probe->exact_squares = 0.0;
    peers_all_reduce(world, squares, 4, MPI_DOUBLE, MPI_SUM);
    double gradient = root_ratio(squares[0], squares[1], 0.0), norm = sqrt(squares[1]),
           replica = root_ratio(squares[2], squares[3], 1.0);
    log_line(log,
             " quantization error at iteration %lld | reduced gradient: %.3E | replica over bf16 rounding: "
             "%.4f |",
             (long long)zero->step, gradient, replica);
    log_scalar(log, "quantization-error gradient", zero->step, gradient);
    log_scalar(log, "quantization-error replica over bf16", zero->step, replica);
    Text json = json_begin("quantization_error");
    json_integer(&json, "iteration", zero->step);
    json_number(&json, "gradient_error", gradient);
    if (zero->plan.dp > 1) json_number(&json, "exact_gradient_norm", norm);
    json_number(&json, "replica_error", replica);
    log_json(log, &json);
}

// One file's text: what the bins are, then a line per tensor and kind that has values in this
// shard.
static void write_histograms(const Zero *zero, FILE *out) {
    static const char *const kinds[PROBE_KINDS] = {"weight", "difference", "gradient", "gradient_hadamard",
                                                   "gradient_rotation"};
    fprintf(out, "{\"kind\":\"bins\",\"iteration\":%lld,\"rank\":%d,\"ranks\":%d,\"bins\":%d,\"shift\":%d}\n",
            (long long)zero->step, zero->mesh->world.rank, zero->mesh->world.size, HISTOGRAM_BINS,
            HISTOGRAM_SHIFT);
    for (int t = 0; zero->probe.histograms && t < zero->plan.tensors; t++) {
        for (int k = 0; k < PROBE_KINDS; k++) {
            const Histogram *h = &zero->probe.histograms[t * PROBE_KINDS + k];
            if (!h->count) continue;
            fprintf(out, "{\"kind\":\"%s\",\"tensor\":\"%s\",", kinds[k], zero->tensors[t].name);
            histogram_write(h, out);
            fprintf(out, "}\n");
        }
    }
}

// Whole or not at all, by renaming. A file of an earlier run of the same iteration is replaced.
static bool save_text(const char *folder, const char *path, const char *text, size_t bytes, Error *err) {
    char part[4200];
    Append file = {.fd = -1};
    snprintf(part, sizeof part, "%s.part", path);
    unlink(part);
    if (!append_make_folders(folder, err) || !append_open(&file, part, true, err)) return false;
    bool written = append_record(&file, text, bytes);  // says itself what went wrong
    append_close(&file);
    if (written && rename(part, path)) return error_set(err, EXIT_ENVIRONMENT, "cannot rename %s", part);
    return true;
}

static void histogram_path(const Zero *zero, int rank, char *path, size_t bytes) {
    snprintf(path, bytes, "%s/iter_%07lld.rank_%03d.jsonl", zero->config->dump_distributions,
             (long long)zero->step, rank);
}

// Every rank writes a file, also one whose shard has no matrix: readers count the files.
static void dump_histograms(Zero *zero) {
    const char *folder = zero->config->dump_distributions;
    char path[4096], *text = NULL;
    size_t bytes = 0;
    Error err;
    FILE *out = open_memstream(&text, &bytes);
    if (!out) return;
    write_histograms(zero, out);
    fclose(out);
    // A run that was resumed on fewer ranks may find files of this iteration by ranks that it no
    // longer has. Readers would add them to this run's.
    for (int rank = zero->mesh->world.size; zero->mesh->world.rank == 0; rank++) {
        histogram_path(zero, rank, path, sizeof path);
        if (unlink(path)) break;
    }
    histogram_path(zero, zero->mesh->world.rank, path, sizeof path);
    if (!save_text(folder, path, text, bytes, &err))
        warning_print(device_site(zero->device), "%.900s; training goes on without these distributions",
                      err.what);
    free(text);
}

void probe_report(Zero *zero, Log *log, Peers world) {
    zero_weights_wait_all(zero);
    if (errors_due(zero)) report_errors(zero, log, world);
    if (histograms_due(zero)) dump_histograms(zero);
    probe_free(&zero->probe);
}
