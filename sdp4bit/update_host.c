// AdamW on the host: see kernels.h.
#include "sdp4bit/kernels.h"

#include <assert.h>
#include <stdatomic.h>
#include <string.h>

#include "llmc/ranks/heartbeat.h"
#include "llmc/ranks/parallel.h"
#include "sdp4bit/adamw.h"
#include "sdp4bit/slices.h"

enum { PIECE = 1 << 16 };  // approximate number of elements per task: 1.5 MB of memory

// Sets the fault unless another thread did.
static void mark_refused(const UpdateShard *a) {
    uint64_t nothing = 0;
    atomic_compare_exchange_strong((_Atomic uint64_t *)a->fault, &nothing, a->code);
}

// Updates n elements, starting at element `at` of the memory. Works in blocks on copies, so that
// the loop vectorizes; only a block with a refused element is updated element by element.
enum { ADAMW_BLOCK = 1024 };
static void adamw(const UpdateShard *a, AdamScalars scalars, int64_t at, const float *grads, int64_t n) {
    if (!a->control->applied) return;
    for (int64_t first = 0; first < n; first += ADAMW_BLOCK) {
        float *master = a->master + at + first, *exp_avg = a->exp_avg + at + first;
        float *exp_avg_sq = a->exp_avg_sq + at + first, p[ADAMW_BLOCK], m[ADAMW_BLOCK], v[ADAMW_BLOCK];
        int count = n - first < ADAMW_BLOCK ? (int)(n - first) : ADAMW_BLOCK, refused = 0;
        size_t bytes = (size_t)count * sizeof(float);
        memcpy(p, master, bytes);
        memcpy(m, exp_avg, bytes);
        memcpy(v, exp_avg_sq, bytes);
        for (int j = 0; j < count; j++) {
            refused |= !adamw_step(&p[j], &m[j], &v[j], grads[first + j], scalars);
        }
        if (refused) {
            for (int j = 0; j < count; j++) {
                adamw_element(&master[j], &exp_avg[j], &exp_avg_sq[j], grads[first + j], scalars);
            }
            mark_refused(a);
            continue;
        }
        memcpy(master, p, bytes);
        memcpy(exp_avg, m, bytes);
        memcpy(exp_avg_sq, v, bytes);
    }
}

// Writes the codes of n elements from element `at` of the shard on. master: (n)
static void write_group(const UpdateShard *a, int64_t at, const float *master, int n) {
    SliceWriter w = {a->codes, a->scales, a->codec, a->group, a->rounding, a->key};
    int64_t position = a->rank * a->bucket.matrix_per_rank + at;
    float x[LARGEST_GROUP];
    bool grouped = codec_grouped(a->codec);
    if (!a->control->applied) {
        if (!grouped) return;
        memset(x, 0, (size_t)n * sizeof *x);
    } else if (grouped && a->difference) {
        const floatX *replica = a->matrix_weights + at;
        for (int j = 0; j < n; j++) x[j] = f32_sub(master[j], floatX_to_float(replica[j]));
    } else {
        memcpy(x, master, (size_t)n * sizeof *x);
    }
    const Segment *segment = segment_of(a->table, position);
    write_slice(&w, at, x, n, segment->logical + position - segment->start);
}

// Arguments of update_matrices. first: element of the shard at master[0].
typedef struct Update {
    const UpdateShard *shard;
    int64_t first;
    const Site *site;
} Update;

// Updates elements [lo, hi) of the matrix shard, which are whole groups, and writes their codes.
static void update_matrices(void *context, int64_t lo, int64_t hi) {
    const Update *update = (const Update *)context;
    const UpdateShard *a = update->shard;
    int n = piece_size(a->codec, a->group);
    int64_t at = lo - update->first;
    if (a->matrix_grads) adamw(a, adam_scalars(a, a->weight_decay), at, a->matrix_grads + lo, hi - lo);
    for (int64_t i = lo; i < hi; i += n) write_group(a, i, a->master + (i - update->first), n);
    heartbeat_progress(update->site);
}

void update_range_host(const UpdateShard *a, int64_t lo, int64_t hi, int threads, const Site *site) {
    int64_t matrices = a->bucket.matrix_per_rank;
    int group = piece_size(a->codec, a->group);
    assert(threads >= 1 && lo >= 0 && lo <= hi && hi <= matrices + a->bucket.tail_per_rank);
    assert(lo >= matrices || lo % group == 0);
    Update update = {a, lo, site};
    parallel_ranges(threads, lo, hi < matrices ? hi : matrices, round_up64(PIECE, group), update_matrices,
                    &update);
    // Tails are short: biases and norms.
    int64_t at = lo > matrices ? lo : matrices, in_tail = at - matrices;
    if (hi <= at) return;
    UpdateShard tail = *a;
    tail.master += at - lo;
    if (!a->momentum_bf16) tail.exp_avg += at - lo;
    if (a->matrix_grads || lo > matrices) tail.exp_avg_sq += at - lo;
    adamw(&tail, adam_scalars(a, 0.0f), 0, a->tail_grads + in_tail, hi - at);
    if (a->control->applied)
        store_values(a->tail + in_tail * (int64_t)sizeof(floatX), FLOATX_CODEC, tail.master, hi - at);
}

void update_shard_host(const UpdateShard *a, int threads, const Site *site) {
    update_range_host(a, 0, a->bucket.matrix_per_rank + a->bucket.tail_per_rank, threads, site);
}
