// Token and position embedding on GPUs: see ops.h. Forward uses a warp per row.
//
// Backward uses no atomics, so that sums have a fixed order. Rows are sorted by token with a stable
// sort and divided into equal chunks. One kernel sums runs of equal tokens within the chunks, in
// row order; a second kernel adds the parts of runs that cross chunks. Gradients of position
// embeddings are computed in the same way.
#include <assert.h>
#include <cub/device/device_radix_sort.cuh>

#include "llmc/cuda/common.cuh"
#include "llmc/cuda/limits.h"

enum { BLOCK_WARPS = 8 };

// Applies dropout to the 8 elements x at column c of row `row` = b * T + t.
static __device__ __forceinline__ void drop(float x[PACKED], const Embedding &a, int64_t row, int c) {
    if (!(a.dropout.p > 0.0f)) return;
    float keep[PACKED];
    row_multipliers(keep, a.dropout, a.T, a.C, row, c);
#pragma unroll
    for (int e = 0; e < PACKED; e++) x[e] = __fmul_rn(x[e], keep[e]);
}

// --- forward -------------------------------------------------------------------------------------

// Computes N rows of x, starting at row a.x_rows.first of the micro-batch.
__global__ void __launch_bounds__(WARP *BLOCK_WARPS) embedding_forward_kernel(Embedding a, int64_t N) {
    const int64_t i = (int64_t)blockIdx.x * BLOCK_WARPS + threadIdx.x / WARP, row = a.x_rows.first + i;
    if (i >= N) return;
    floatX *x = a.x + i * a.C;
    const int32_t token = a.wte ? a.tokens[row] - a.first_row : 0;
    const bool held = a.wte && token >= 0 && token < a.rows;
    const floatX *word = held ? a.wte + (int64_t)token * a.C : x;
    const floatX *position = a.wpe && !a.part ? a.wpe + (int64_t)a.positions[row] * a.C : NULL;
    for (int c = threadIdx.x % WARP * PACKED; c < a.C; c += WARP * PACKED) {
        float sum[PACKED] = {}, second[PACKED];
        if (held || !a.wte) unpack(load_packed(word + c), sum);
        if (position) {
            unpack(load_packed(position + c), second);
#pragma unroll
            for (int e = 0; e < PACKED; e++) sum[e] = __fadd_rn(sum[e], second[e]);
        }
        if (!a.part) drop(sum, a, row, c);
        store_packed(x + c, pack(sum));
    }
}

void op_embedding_forward(Stream *s, const Embedding *op) {
    Embedding a = *op;
    assert(a.C % PACKED == 0);
    if (a.wte) a.x_rows = Rows{0, 0};
    int64_t N = rows_held(a.x_rows, a.B, a.T);
    if (N == 0) return;
    unsigned blocks = (unsigned)ceil_div64(N, BLOCK_WARPS);
    embedding_forward_kernel<<<blocks, WARP * BLOCK_WARPS, 0, stream_handle(s)>>>(a, N);
    check_launch(s, "embedding forward");
}

// --- backward ------------------------------------------------------------------------------------

// Sum of rows of dx into a table: for each i in order, adds row rows[i] of dx, times its dropout
// mask, to row keys[i] - first_key of the table. keys are sorted; rows with equal keys are
// ascending. Keys outside the table are ignored.
struct RowSums {
    Embedding op;
    float *table;  // (table_rows, C) accumulates
    int32_t first_key, table_rows;
    const int32_t *keys, *rows;  // (N)
    // (chunks, 2, C): sums of the chunk's part of a run that started in an earlier chunk, and of a
    // run that starts in this chunk and continues in the next one.
    float *partials;
    int N, chunk;  // chunk: number of sorted rows per chunk
};
enum { SLAB = WARP * PACKED };  // columns per warp
// Number of rows, and of parts of a run, that are loaded at once to hide latency.
enum { BATCH = 4, JOIN_BATCH = 8 };

static __device__ __forceinline__ float *partial(const RowSums &a, int64_t chunk, int which, int c) {
    return a.partials + (2 * chunk + which) * a.op.C + c;
}

// Adds x to 8 columns of table row `key`, starting at column c.
static __device__ __forceinline__ void accumulate_row(const RowSums &a, int32_t key, int c,
                                                      const float x[PACKED]) {
    const int32_t row = key - a.first_key;
    if (row < 0 || row >= a.table_rows) return;
    float sum[PACKED], *to = a.table + (int64_t)row * a.op.C + c;
    load_floats(to, sum);
#pragma unroll
    for (int e = 0; e < PACKED; e++) sum[e] += x[e];
    store_floats(to, sum);
}

// Each warp sums 256 columns of a chunk of sorted rows. It adds runs that are completely within the
// chunk to the table.
__global__ void __launch_bounds__(WARP *BLOCK_WARPS) sum_chunks_kernel(RowSums a) {
    const int64_t chunk = (int64_t)blockIdx.x * BLOCK_WARPS + threadIdx.x / WARP, first = chunk * a.chunk;
    const int c = blockIdx.y * SLAB + threadIdx.x % WARP * PACKED;
    if (first >= a.N || c >= a.op.C) return;
    const int begin = (int)first, end = first + a.chunk < a.N ? begin + a.chunk : a.N;
    bool began_before = begin > 0 && a.keys[begin - 1] == a.keys[begin];
    float sum[PACKED] = {};
    for (int base = begin; base < end; base += BATCH) {
        Packed128 dx[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            if (base + j < end) dx[j] = load_packed(a.op.dx + (int64_t)a.rows[base + j] * a.op.C + c);
        }
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            const int i = base + j;
            if (i >= end) break;
            float x[PACKED];
            unpack(dx[j], x);
            drop(x, a.op, a.rows[i], c);
#pragma unroll
            for (int e = 0; e < PACKED; e++) sum[e] += x[e];
            const bool continues = i + 1 < a.N && a.keys[i + 1] == a.keys[i];
            if (continues && i + 1 < end) continue;
            if (began_before) store_floats(partial(a, chunk, 0, c), sum);
            else if (continues) store_floats(partial(a, chunk, 1, c), sum);
            else accumulate_row(a, a.keys[i], c, sum);
            began_before = false;
#pragma unroll
            for (int e = 0; e < PACKED; e++) sum[e] = 0.0f;
        }
    }
}

// Adds the parts of each run that crosses chunks, in order. The warp of the run's first chunk does
// this.
__global__ void __launch_bounds__(WARP *BLOCK_WARPS) join_chunks_kernel(RowSums a) {
    const int64_t chunk = (int64_t)blockIdx.x * BLOCK_WARPS + threadIdx.x / WARP, first = chunk * a.chunk,
                  next = first + a.chunk;
    const int c = blockIdx.y * SLAB + threadIdx.x % WARP * PACKED;
    if (next >= a.N || c >= a.op.C) return;
    const int32_t key = a.keys[next - 1];
    const bool continues = a.keys[next] == key;
    const bool began_before = first > 0 && a.keys[first] == key && a.keys[first - 1] == key;
    if (!continues || began_before) return;
    float sum[PACKED];
    load_floats(partial(a, chunk, 1, c), sum);
    bool more = true;
    for (int64_t base = chunk + 1; more; base += JOIN_BATCH) {
        float part[JOIN_BATCH][PACKED] = {};  // 0 past the end of the run
#pragma unroll
        for (int j = 0; j < JOIN_BATCH; j++) {
            more = (base + j) * a.chunk < a.N && a.keys[(base + j) * a.chunk] == key;
            if (more) load_floats(partial(a, base + j, 0, c), part[j]);
        }
#pragma unroll
        for (int j = 0; j < JOIN_BATCH; j++) {
#pragma unroll
            for (int e = 0; e < PACKED; e++) sum[e] += part[j][e];
        }
    }
    accumulate_row(a, key, c, sum);
}

__global__ void __launch_bounds__(256) number_rows_kernel(int32_t *rows, int N) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < N) rows[i] = i;
}

// Scratch memory of one call, with each part 256-byte aligned. limits.h computes the sizes.
struct SortScratch {
    int32_t *sorted_keys, *rows, *sorted_rows;  // (N)
    void *sort;
    size_t sort_bytes;
    float *partials;
    int chunk;
};

static SortScratch plan_scratch(Stream *s, int N, int C) {
    SortScratch scratch = {};
    int32_t *none = NULL;
    cuda_check(stream_site(s),
               cub::DeviceRadixSort::SortPairs(NULL, scratch.sort_bytes, none, none, none, none, N, 0, 32,
                                               stream_handle(s)),
               "planning a sort");
    size_t ids = scratch_ids_bytes(N), used = 3 * ids + scratch_aligned(scratch.sort_bytes);
    int64_t chunks = scratch_chunks(N, C, scratch.sort_bytes);
    scratch.chunk = (int)ceil_div64(N, chunks);
    uint8_t *memory = (uint8_t *)op_scratch(s, used + (size_t)chunks * scratch_chunk_bytes(C),
                                            "embedding backward");
    scratch.sorted_keys = (int32_t *)memory;
    scratch.rows = (int32_t *)(memory + ids);
    scratch.sorted_rows = (int32_t *)(memory + 2 * ids);
    scratch.sort = memory + 3 * ids;
    scratch.partials = (float *)(memory + used);
    return scratch;
}

// Adds row i of dx, times its dropout mask, to row keys[i] - first_key of sums.table, for all i.
// Rows with equal keys are added in order of i.
static void accumulate_by_key(Stream *s, RowSums sums, const int32_t *keys) {
    cudaStream_t stream = stream_handle(s);
    const int N = sums.N;
    SortScratch scratch = plan_scratch(s, N, sums.op.C);
    number_rows_kernel<<<(unsigned)ceil_div64(N, 256), 256, 0, stream>>>(scratch.rows, N);
    check_launch(s, "embedding backward, row numbers");
    cuda_check(stream_site(s),
               cub::DeviceRadixSort::SortPairs(scratch.sort, scratch.sort_bytes, keys, scratch.sorted_keys,
                                               scratch.rows, scratch.sorted_rows, N, 0, 32, stream),
               "sorting rows by token");
    sums.keys = scratch.sorted_keys;
    sums.rows = scratch.sorted_rows;
    sums.partials = scratch.partials;
    sums.chunk = scratch.chunk;
    int64_t chunks = ceil_div64(N, sums.chunk);
    dim3 grid((unsigned)ceil_div64(chunks, BLOCK_WARPS), (unsigned)ceil_div64(sums.op.C, SLAB));
    sum_chunks_kernel<<<grid, WARP * BLOCK_WARPS, 0, stream>>>(sums);
    check_launch(s, "embedding backward, sums");
    join_chunks_kernel<<<grid, WARP * BLOCK_WARPS, 0, stream>>>(sums);
    check_launch(s, "embedding backward, joins");
}

void op_embedding_backward(Stream *s, const Embedding *a) {
    assert(a->C % PACKED == 0);
    int64_t N = (int64_t)a->B * a->T;  // at most INT_MAX (op_check_model)
    if (N == 0) return;
    RowSums words = {*a, a->dwte, a->first_row, a->rows}, positions = {*a, a->dwpe, 0, INT32_MAX};
    words.N = positions.N = (int)N;
    if (a->dwte) accumulate_by_key(s, words, a->tokens);
    if (a->dwpe) accumulate_by_key(s, positions, a->positions);
}
