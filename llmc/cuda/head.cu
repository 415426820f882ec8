// LM head and loss on GPUs, in chunks of rows: see ops.h. A GEMM computes the logits of a chunk. A
// kernel computes the losses and replaces the logits with their gradient. Two GEMMs compute dx and
// dwte.
#include <assert.h>

#include "llmc/cuda/common.cuh"

// --- workspace: [ cuBLASLt's | logits of one chunk ] ---------------------------------------------

// Maximum size of a chunk's logits. Every chunk accumulates into the whole fp32 gradient dwte, so a
// few large chunks are faster than many small ones.
#define CHUNK_BYTES ((int64_t)1 << 30)
enum { CHUNK_ROW_ALIGN = 256 };  // number of rows of the largest GEMM tile

int64_t op_head_chunk_rows(int64_t N, int rows) {
    int64_t row_bytes = (int64_t)rows * (int64_t)sizeof(floatX);
    int64_t most = CHUNK_BYTES / row_bytes / CHUNK_ROW_ALIGN * CHUNK_ROW_ALIGN;
    if (most < CHUNK_ROW_ALIGN) most = CHUNK_ROW_ALIGN;
    if (N <= most) return N;
    return round_up64(ceil_div64(N, ceil_div64(N, most)), CHUNK_ROW_ALIGN);  // nearly equal chunks
}

size_t op_head_workspace_bytes(int64_t N, int C, int rows) {
    return GEMM_WORKSPACE_BYTES + (size_t)op_head_chunk_rows(N, rows) * (size_t)rows * sizeof(floatX);
}

// --- cross-entropy -------------------------------------------------------------------------------

static __device__ __forceinline__ float row_weight(const Head &a, int64_t row) {
    return a.loss_mask ? a.loss_mask[row] * a.loss_scale : a.loss_scale;
}

// Maximum of the values x so far, and sum of e^(x - maximum).
struct OnlineSum {
    float max, sum;
};
static __device__ __forceinline__ OnlineSum join(OnlineSum a, OnlineSum b) {
    float max = fmaxf(a.max, b.max);
    float from_a = a.max == max ? a.sum : a.sum * fast_exp2(LOG2_E * (a.max - max));
    float from_b = b.max == max ? b.sum : b.sum * fast_exp2(LOG2_E * (b.max - max));
    return OnlineSum{max, from_a + from_b};
}
static __device__ __forceinline__ OnlineSum add_values(OnlineSum s, const float x[PACKED]) {
    float max = x[0];
#pragma unroll
    for (int e = 1; e < PACKED; e++) max = fmaxf(max, x[e]);
    if (max > s.max) {
        s.sum *= fast_exp2(LOG2_E * (s.max - max));  // the first time this multiplies by e^-inf = 0
        s.max = max;
    }
#pragma unroll
    for (int e = 0; e < PACKED; e++) s.sum += fast_exp2(fmaf(x[e], LOG2_E, -LOG2_E * s.max));
    return s;
}

enum { ROW_THREADS = 512 };

static __device__ __forceinline__ OnlineSum of_lane_above(OnlineSum own, int stride) {
    return OnlineSum{__shfl_down_sync(0xFFFFFFFFu, own.max, stride),
                     __shfl_down_sync(0xFFFFFFFFu, own.sum, stride)};
}

// Combines the values of all threads (OnlineSum or another T) in a fixed order and returns the
// result to all threads.
template <class T> static __device__ __forceinline__ T block_join(T own) {
    __shared__ T warps[ROW_THREADS / WARP];
#pragma unroll
    for (int stride = WARP / 2; stride > 0; stride /= 2) own = join(own, of_lane_above(own, stride));
    if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = own;
    __syncthreads();
    T row = warps[0];
    for (int w = 1; w < ROW_THREADS / WARP; w++) row = join(row, warps[w]);
    return row;
}

// A chunk, rows row .. row + rows - 1 of op.
struct Chunk {
    Head op;
    int64_t row, rows;
    floatX *logits;  // (rows, op.rows) in; if gradients are computed, replaced by dlogits
};

// Returns the column of the target on this rank, which is outside 0 .. op.rows - 1 if another rank
// holds it.
static __device__ __forceinline__ int target_column(const Chunk &a) {
    return a.op.targets[a.row + blockIdx.x] - a.op.first_row;
}

static __device__ __forceinline__ float target_logit(const Chunk &a, const floatX *logits) {
    const int column = target_column(a);
    return column >= 0 && column < a.op.rows ? floatX_to_float(logits[column]) : 0.0f;
}

// First half of the loss: sums a row over this rank's columns. KEEP: keeps the row in shared memory
// for the second half.
template <bool KEEP>
static __device__ __forceinline__ OnlineSum sum_columns(const floatX *row, int vectors, uint4 *kept) {
    OnlineSum own = {-INFINITY, 0.0f};
#pragma unroll 4
    for (int v = threadIdx.x; v < vectors; v += ROW_THREADS) {
        Packed128 packed = KEEP ? load_packed_streaming(row + (int64_t)v * PACKED)
                                : load_packed(row + (int64_t)v * PACKED);
        float x[PACKED];
        unpack(packed, x);
        if (KEEP) kept[v] = packed.words;
        own = add_values(own, x);
    }
    return block_join(own);
}

// Second half: replaces logits with dlogits, using the sum over the columns of all ranks.
template <bool KEEP>
static __device__ __forceinline__ void write_gradient(const Chunk &a, floatX *row, int vectors, OnlineSum sum,
                                                      const uint4 *kept) {
    const int target = target_column(a);
    const float weight = row_weight(a.op, a.row + blockIdx.x), scale = weight / sum.sum;
#pragma unroll 4
    for (int v = threadIdx.x; v < vectors; v += ROW_THREADS) {
        Packed128 packed = KEEP ? Packed128{kept[v]} : load_packed(row + (int64_t)v * PACKED);
        float x[PACKED];
        unpack(packed, x);
#pragma unroll
        for (int e = 0; e < PACKED; e++) x[e] = fast_exp2(fmaf(x[e], LOG2_E, -LOG2_E * sum.max)) * scale;
        if (target >= v * PACKED && target < (v + 1) * PACKED) {
#pragma unroll
            for (int e = 0; e < PACKED; e++) x[e] -= e == target - v * PACKED ? weight : 0.0f;
        }
        store_packed(row + (int64_t)v * PACKED, pack(x));  // read next by two GEMMs
    }
}

// Both halves in one kernel with one block per row, for ranks with the whole vocabulary. Without
// KEEP the second half reads the row again, usually from L2. If a row takes less than half of the
// shared memory, two blocks share an SM, and the loads of one overlap with the stores of the other.
template <bool KEEP> __global__ void __launch_bounds__(ROW_THREADS) cross_entropy_kernel(Chunk a) {
    extern __shared__ uint4 kept[];  // (vocabulary rows / 8)
    floatX *row = a.logits + (int64_t)blockIdx.x * a.op.rows;
    const int vectors = a.op.rows / PACKED;
    const float target = target_logit(a, row);
    // The barrier in sum_columns also ensures that target is read before the first store.
    const OnlineSum sum = sum_columns<KEEP>(row, vectors, kept);
    if (threadIdx.x == 0) a.op.losses[a.row + blockIdx.x] = logf(sum.sum) + (sum.max - target);
    if (a.op.dx || a.op.dwte) write_gradient<KEEP>(a, row, vectors, sum, kept);
}

__global__ void __launch_bounds__(ROW_THREADS) statistics_kernel(Chunk a) {
    const floatX *row = a.logits + (int64_t)blockIdx.x * a.op.rows;
    const float target = target_logit(a, row);
    const OnlineSum sum = sum_columns<false>(row, a.op.rows / PACKED, NULL);
    if (threadIdx.x == 0) a.op.own[blockIdx.x] = HeadStatistics{sum.max, sum.sum, target};
}

__global__ void __launch_bounds__(ROW_THREADS) gradient_kernel(Chunk a) {
    const HeadStatistics *all = a.op.all + blockIdx.x;
    OnlineSum sum = {all->max, all->sum};
    float target = all->target;
    for (int r = 1; r < a.op.ranks; r++) {
        sum = join(sum, OnlineSum{all[r * a.rows].max, all[r * a.rows].sum});
        target += all[r * a.rows].target;
    }
    if (threadIdx.x == 0) a.op.losses[a.row + blockIdx.x] = logf(sum.sum) + (sum.max - target);
    if (a.op.dx || a.op.dwte)
        write_gradient<false>(a, a.logits + (int64_t)blockIdx.x * a.op.rows, a.op.rows / PACKED, sum, NULL);
}

static void cross_entropy(Stream *s, const Chunk &a) {
    size_t row_bytes = (size_t)a.op.rows * sizeof(floatX);
    if (row_bytes + 1024 <= stream_device(s)->shared_bytes_block) {
        allow_shared(s, cross_entropy_kernel<true>, row_bytes, "shared memory for the cross-entropy");
        cross_entropy_kernel<true><<<(unsigned)a.rows, ROW_THREADS, row_bytes, stream_handle(s)>>>(a);
    } else {
        cross_entropy_kernel<false><<<(unsigned)a.rows, ROW_THREADS, 0, stream_handle(s)>>>(a);
    }
    check_launch(s, "cross-entropy");
}

// --- likelihoods without a loss ------------------------------------------------------------------

// Largest logit so far, and the first column that has it.
struct Best {
    float max;
    int column;
};
static __device__ __forceinline__ Best join(Best a, Best b) {
    return b.max > a.max || (b.max == a.max && b.column < a.column) ? b : a;
}
static __device__ __forceinline__ Best of_lane_above(Best own, int stride) {
    return Best{__shfl_down_sync(0xFFFFFFFFu, own.max, stride),
                __shfl_down_sync(0xFFFFFFFFu, own.column, stride)};
}

// One block per row. Ignores vocabulary padding.
__global__ void __launch_bounds__(ROW_THREADS) scores_kernel(Chunk a) {
    const floatX *row = a.logits + (int64_t)blockIdx.x * a.op.rows;
    const int columns = a.op.columns, target = target_column(a);
    if (a.op.targets[a.row + blockIdx.x] < 0) {
        if (threadIdx.x == 0) a.op.scores[blockIdx.x] = HeadScore{0.0f, 0.0f, 0.0f, 0};
        return;
    }
    OnlineSum own = {-INFINITY, 0.0f};
    Best best = {-INFINITY, INT32_MAX};
    for (int v = threadIdx.x; v * PACKED < columns; v += ROW_THREADS) {
        float x[PACKED];
        unpack(load_packed(row + (int64_t)v * PACKED), x);
#pragma unroll
        for (int e = 0; e < PACKED; e++) {
            const int column = v * PACKED + e;
            if (column >= columns) x[e] = -INFINITY;
            else best = join(best, Best{x[e], column});
        }
        own = add_values(own, x);
    }
    own = block_join(own);
    best = block_join(best);
    if (threadIdx.x > 0) return;
    const float logit = target >= 0 && target < columns ? floatX_to_float(row[target]) : 0.0f;
    a.op.scores[blockIdx.x] = HeadScore{own.max, own.sum, logit,
                                        best.column == INT32_MAX ? INT32_MAX : a.op.first_row + best.column};
}

// --- the op --------------------------------------------------------------------------------------

// Adds the weighted losses to *loss_sum. Thread t adds rows t, t + 1024, ... in order, then the
// threads' sums are added in a fixed tree. Deterministic, but in another order than on CPUs.
__global__ void __launch_bounds__(1024) loss_sum_kernel(Head a) {
    __shared__ float shared[32];
    float sum = 0.0f;
    for (int64_t n = threadIdx.x; n < a.N; n += 1024) sum += a.losses[n] * row_weight(a, n);
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) *a.loss_sum += sum;
}

void op_loss_sum(Stream *s, const Head *a) {
    if (a->N == 0) return;
    Head report = *a;
    if (a->report_scale > 0) report.loss_scale = a->report_scale;
    loss_sum_kernel<<<1, 1024, 0, stream_handle(s)>>>(report);
    check_launch(s, "loss sum");
}

static Chunk chunk_of(const Head *a, int64_t row, int64_t rows) {
    return Chunk{*a, row, rows, (floatX *)((uint8_t *)a->workspace + GEMM_WORKSPACE_BYTES)};
}

static void logits(Stream *s, const Chunk &c) {
    const Head &a = c.op;
    assert(a.rows % PACKED == 0 && a.C % PACKED == 0);
    matmul_nt(s, c.logits, a.x + c.row * a.C, a.wte, c.rows, a.rows, a.C, a.workspace);
}

// Computes dx and dwte from dlogits, which have replaced the logits.
static void backward(Stream *s, const Chunk &c) {
    const Head &a = c.op;
    if (a.dwte)
        matmul_tn(s, a.dwte, c.logits, a.x + c.row * a.C, a.rows, a.C, c.rows, a.overwrite && c.row == 0,
                  a.workspace);
    if (a.dx) matmul_nn(s, a.dx + c.row * a.C, c.logits, a.wte, c.rows, a.C, a.rows, a.workspace);
}

void op_head_logits(Stream *s, const Head *a, int64_t row, int64_t rows) {
    Chunk c = chunk_of(a, row, rows);
    logits(s, c);
    statistics_kernel<<<(unsigned)rows, ROW_THREADS, 0, stream_handle(s)>>>(c);
    check_launch(s, "cross-entropy, statistics");
}

void op_head_gradients(Stream *s, const Head *a, int64_t row, int64_t rows) {
    Chunk c = chunk_of(a, row, rows);
    gradient_kernel<<<(unsigned)rows, ROW_THREADS, 0, stream_handle(s)>>>(c);
    check_launch(s, "cross-entropy, gradients");
    backward(s, c);
}

void op_head_scores(Stream *s, const Head *a, int64_t row, int64_t rows) {
    Chunk c = chunk_of(a, row, rows);
    logits(s, c);
    scores_kernel<<<(unsigned)rows, ROW_THREADS, 0, stream_handle(s)>>>(c);
    check_launch(s, "likelihoods of targets");
}

// Uses one kernel for both halves: two kernels would read the logits twice and take a third longer.
void op_head(Stream *s, const Head *a) {
    int64_t chunk = op_head_chunk_rows(a->N, a->rows);
    for (int64_t row = 0; row < a->N; row += chunk) {
        Chunk c = chunk_of(a, row, a->N - row < chunk ? a->N - row : chunk);
        logits(s, c);
        cross_entropy(s, c);
        backward(s, c);
    }
    op_loss_sum(s, a);
}
