// The CUDA backend of ops.h: LayerNorm forward, fused with the residual sum and dropout before it, and backward. Each reads its inputs once and writes
// its outputs once: a row stays in registers between its statistics and its result. Called by train_gpt.cu through ops.h.
//
// A row is handled by W warps, each lane holding V vectors of 8 elements; a block has one row, or 8 where a warp is enough for one and none waits. Sums run in a fixed
// order: per lane, butterfly over the warp, then warp by warp; the parameters' gradients per block in registers, then over the blocks.
#include "llmc/cuda/common.cuh"
#include "llmc/cuda/scratch.h"

// --- how a row is spread over threads --------------------------------------------------------------------------------------------

template <int W>
struct RowGroup {
    static constexpr int LANES = W * WARP;  // threads of one row
    static constexpr int ROWS = W == 1 ? 8 : 1;  // of a block, at a time: rows that shared a barrier would wait for each other
    static constexpr int THREADS = ROWS * LANES;  // of a block
};

// The sum of (a, b) over the threads of a row, the same bits in each. shared: (32) pairs that no thread still reads. A barrier when W > 1.
template <int W>
static __device__ __forceinline__ float2 row_sum(float a, float b, float2 *shared) {
    a = warp_sum(a), b = warp_sum(b);
    if (W == 1) return make_float2(a, b);
    int warp = threadIdx.x / WARP;
    if (threadIdx.x % WARP == 0) shared[warp] = make_float2(a, b);
    __syncthreads();
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < W; i++) {
        float2 part = shared[warp / W * W + i];
        sum.x += part.x, sum.y += part.y;
    }
    return sum;
}

// Vectors in a row.
static int row_vectors(Stream *s, int C) {
    if (C % PACKED) fatal(stream_site(s), EXIT_USAGE, "hidden size %d is not a multiple of %d, which the GPU's LayerNorm needs; choose one that is", C, (int)PACKED);
    if (C > 16384) fatal(stream_site(s), EXIT_USAGE, "hidden size %d is larger than 16384, the most that the GPU's LayerNorm handles; use a smaller one", C);
    return C / PACKED;
}

// Forward calls LaunchForward<W, V>::run with the fewest threads per row that hold a row of C elements in at most 3 vectors per lane.
template <template <int, int> class Launch, class Arguments>
static void launch_forward(Stream *s, const Arguments &arguments, int C) {
    int vectors = row_vectors(s, C);
    if (vectors <= 32) return Launch<1, 1>::run(s, arguments);
    if (vectors <= 64) return Launch<1, 2>::run(s, arguments);
    if (vectors <= 96) return Launch<1, 3>::run(s, arguments);
    if (vectors <= 128) return Launch<2, 2>::run(s, arguments);
    if (vectors <= 192) return Launch<2, 3>::run(s, arguments);
    if (vectors <= 256) return Launch<4, 2>::run(s, arguments);
    if (vectors <= 384) return Launch<4, 3>::run(s, arguments);
    if (vectors <= 512) return Launch<8, 2>::run(s, arguments);
    if (vectors <= 768) return Launch<8, 3>::run(s, arguments);
    if (vectors <= 1024) return Launch<16, 2>::run(s, arguments);
    if (vectors <= 1536) return Launch<16, 3>::run(s, arguments);
    Launch<32, 2>::run(s, arguments);
}

// Backward takes two vectors per lane where registers hold their sums: what a row costs beside its elements, the exchange of its sums above all, is shared by
// more of them. Three spill.
template <template <int, int> class Launch, class Arguments>
static void launch_backward(Stream *s, const Arguments &arguments, int C) {
    int vectors = row_vectors(s, C);
    if (vectors <= 32) return Launch<1, 1>::run(s, arguments);
    if (vectors <= 64) return Launch<1, 2>::run(s, arguments);
    if (vectors <= 96) return Launch<3, 1>::run(s, arguments);
    if (vectors <= 128) return Launch<2, 2>::run(s, arguments);
    if (vectors <= 192) return Launch<3, 2>::run(s, arguments);
    if (vectors <= 256) return Launch<4, 2>::run(s, arguments);
    if (vectors <= 384) return Launch<6, 2>::run(s, arguments);
    if (vectors <= 512) return Launch<8, 2>::run(s, arguments);
    if (vectors <= 768) return Launch<12, 2>::run(s, arguments);
    if (vectors <= 1024) return Launch<16, 2>::run(s, arguments);
    Launch<32, 2>::run(s, arguments);
}

// --- forward ---------------------------------------------------------------------------------------------------------------------

struct NormForward {
    floatX *residual_out;                // (N, C) out, with branch only
    floatX *y;                           // (N, C) out, or NULL: only the sum
    float *mean, *rstd;                  // (N) out
    const floatX *residual, *branch;     // (N, C); branch NULL: no sum, LayerNorm of residual
    const floatX *gamma, *beta;          // (C)
    int64_t N;
    int T, C;
    float epsilon;
    Dropout dropout;                     // of branch
};

// residual + dropout(branch), 8 elements from (row, c), rounded. The products and sums are the CPU backend's, bit for bit.
static __device__ __forceinline__ Packed128 residual_sum(const NormForward &a, Packed128 residual, Packed128 branch, int64_t row, int c) {
    float sum[PACKED], x[PACKED];
    unpack(residual, sum);
    unpack(branch, x);
    if (a.dropout.p > 0.0f) {
        float keep[PACKED];
        dropout_multipliers(keep, a.dropout, a.dropout.first_sample + row / a.T, (uint64_t)(row % a.T * a.C + c) / PACKED);
#pragma unroll
        for (int e = 0; e < PACKED; e++) x[e] = __fmul_rn(x[e], keep[e]);
    }
#pragma unroll
    for (int e = 0; e < PACKED; e++) sum[e] = __fadd_rn(sum[e], x[e]);
    return pack(sum);
}

// Statistics of the row whose vectors are x; variance from differences, in which digits survive a large mean.
template <int W, int V>
static __device__ __forceinline__ void row_statistics(const Packed128 x[V], const NormForward &a, int lane, float2 (*shared)[32], float *mean, float *rstd) {
    float sum = 0.0f, squares = 0.0f, value[PACKED];
#pragma unroll
    for (int v = 0; v < V; v++) {
        unpack(x[v], value);  // zeros beyond the row
#pragma unroll
        for (int e = 0; e < PACKED; e++) sum += value[e];
    }
    *mean = row_sum<W>(sum, 0.0f, shared[0]).x / (float)a.C;
#pragma unroll
    for (int v = 0; v < V; v++) {
        if ((v * RowGroup<W>::LANES + lane) * PACKED >= a.C) continue;
        unpack(x[v], value);
#pragma unroll
        for (int e = 0; e < PACKED; e++) squares += (value[e] - *mean) * (value[e] - *mean);
    }
    *rstd = 1.0f / sqrtf(row_sum<W>(squares, 0.0f, shared[1]).x / (float)a.C + a.epsilon);
}

template <int W, int V>
__global__ void __launch_bounds__(RowGroup<W>::THREADS) norm_forward_kernel(NormForward a) {
    __shared__ float2 shared[2][32];
    const int lane = threadIdx.x % RowGroup<W>::LANES;
    const int64_t row = (int64_t)blockIdx.x * RowGroup<W>::ROWS + threadIdx.x / RowGroup<W>::LANES;
    Packed128 x[V], branch[V];
    bool here[V];  // this lane's v-th vector lies inside the row; threads without a row still meet the barriers
#pragma unroll
    for (int v = 0; v < V; v++) {
        int c = (v * RowGroup<W>::LANES + lane) * PACKED;
        here[v] = row < a.N && c < a.C;
        x[v].words = branch[v].words = make_uint4(0, 0, 0, 0);
        if (here[v]) x[v] = load_packed(a.residual + row * a.C + c);
        if (here[v] && a.branch) branch[v] = load_packed_streaming(a.branch + row * a.C + c);
    }
#pragma unroll
    for (int v = 0; v < V; v++) {
        int c = (v * RowGroup<W>::LANES + lane) * PACKED;
        if (!here[v] || !a.branch) continue;
        x[v] = residual_sum(a, x[v], branch[v], row, c);
        store_packed(a.residual_out + row * a.C + c, x[v]);
    }
    if (!a.y) return;
    float mean, rstd;
    row_statistics<W, V>(x, a, lane, shared, &mean, &rstd);
#pragma unroll
    for (int v = 0; v < V; v++) {
        if (!here[v]) continue;
        int c = (v * RowGroup<W>::LANES + lane) * PACKED;
        float value[PACKED], gamma[PACKED], beta[PACKED];
        unpack(x[v], value);
        unpack(load_packed(a.gamma + c), gamma);
        unpack(load_packed(a.beta + c), beta);
#pragma unroll
        for (int e = 0; e < PACKED; e++) value[e] = (value[e] - mean) * rstd * gamma[e] + beta[e];
        store_packed(a.y + row * a.C + c, pack(value));
    }
    if (lane == 0 && row < a.N) {
        a.mean[row] = mean;
        a.rstd[row] = rstd;
    }
}

template <int W, int V>
struct LaunchForward {
    static void run(Stream *s, const NormForward &a) {
        int64_t blocks = ceil_div64(a.N, RowGroup<W>::ROWS);
        norm_forward_kernel<W, V><<<(unsigned)blocks, RowGroup<W>::THREADS, 0, stream_handle(s)>>>(a);
        check_launch(s, "LayerNorm forward");
    }
};

void op_layernorm_forward(Stream *s, floatX *y, float *mean, float *rstd, const floatX *x, const floatX *gamma, const floatX *beta, int64_t N, int C,
                          float epsilon) {
    if (N == 0) return;
    NormForward a = {NULL, y, mean, rstd, x, NULL, gamma, beta, N, 1, C, epsilon, {0.0f, 0, 0, 0}};
    launch_forward<LaunchForward>(s, a, C);
}

void op_residual_layernorm_forward(Stream *s, floatX *residual_out, floatX *y, float *mean, float *rstd, const floatX *residual, const floatX *branch,
                                   const floatX *gamma, const floatX *beta, int B, int T, int C, float epsilon, Dropout dropout) {
    NormForward a = {residual_out, y, mean, rstd, residual, branch, gamma, beta, (int64_t)B * T, T, C, epsilon, dropout};
    if (a.N == 0) return;
    launch_forward<LaunchForward>(s, a, C);
}

// --- backward --------------------------------------------------------------------------------------------------------------------

struct NormBackward {
    floatX *dresidual;          // (N, C) in and out
    floatX *dbranch;            // (N, C) out or NULL
    float *dgamma, *dbeta;      // (C) accumulate
    float *dbias;               // (C) accumulates, or NULL: of the branch's linear layer
    float *partials;            // (blocks, 3, C): each block's sums for dgamma, dbeta and dbias
    const floatX *dy, *x;       // (N, C)
    const floatX *gamma;        // (C)
    const float *mean, *rstd;   // (N)
    int64_t N;
    int T, C;
    Dropout dropout;            // of the branch
};

// This lane's sums over the rows of its group, for the columns it holds.
enum { PARAMETERS = 3 };  // gamma, beta, the branch's bias
enum { INPUTS = 3 };      // dy, x, dresidual
template <int V>
struct ColumnSums {
    float of[PARAMETERS][V][PACKED];
};

// One row's gradient, from the vectors in registers: dresidual += the gradient of x, and dbranch; dbias: this lane's sums. mean_g, mean_g_xhat: means
// over the row of g = dy gamma and of g xhat.
static __device__ __forceinline__ void store_gradient(const NormBackward &a, int64_t row, int c, Packed128 dy_packed, Packed128 x_packed,
                                                      Packed128 dresidual_packed, float mean, float rstd, float mean_g, float mean_g_xhat, float dbias[PACKED]) {
    float dy[PACKED], x[PACKED], gamma[PACKED], total[PACKED];
    unpack(dy_packed, dy);
    unpack(x_packed, x);
    unpack(load_packed(a.gamma + c), gamma);
    unpack(dresidual_packed, total);
#pragma unroll
    for (int e = 0; e < PACKED; e++) {
        float xhat = (x[e] - mean) * rstd;
        total[e] += (dy[e] * gamma[e] - mean_g - xhat * mean_g_xhat) * rstd;
    }
    Packed128 rounded = pack(total);
    store_packed(a.dresidual + row * a.C + c, rounded);
    unpack(rounded, total);  // the branch gets the gradient as it is stored
    if (a.dbranch && a.dropout.p > 0.0f) {
        float keep[PACKED];
        dropout_multipliers(keep, a.dropout, a.dropout.first_sample + row / a.T, (uint64_t)(row % a.T * a.C + c) / PACKED);
#pragma unroll
        for (int e = 0; e < PACKED; e++) total[e] *= keep[e];
        rounded = pack(total);
        unpack(rounded, total);
    }
    if (a.dbranch) store_packed(a.dbranch + row * a.C + c, rounded);
#pragma unroll
    for (int e = 0; e < PACKED; e++) dbias[e] += total[e];
}

// The block's sums go to its row of partials: group after group through shared memory, or straight when the block is one group.
template <int W, int V>
static __device__ __forceinline__ void store_partials(const NormBackward &a, const ColumnSums<V> &sums, int lane, float *columns) {
    constexpr int GROUPS = RowGroup<W>::ROWS;
    const int group = threadIdx.x / RowGroup<W>::LANES;
    float *out = a.partials + (int64_t)blockIdx.x * PARAMETERS * a.C;
    float *target = GROUPS == 1 ? out : columns;
    for (int g = 0; g < GROUPS; g++) {
#pragma unroll
        for (int v = 0; v < V; v++) {
            int c = (v * RowGroup<W>::LANES + lane) * PACKED;
            if (group != g || c >= a.C) continue;
#pragma unroll
            for (int i = 0; i < PARAMETERS; i++) {
#pragma unroll
                for (int e = 0; e < PACKED; e++) target[i * a.C + c + e] = sums.of[i][v][e] + (g ? target[i * a.C + c + e] : 0.0f);
            }
        }
        if constexpr (GROUPS > 1) __syncthreads();
    }
    if constexpr (GROUPS > 1) {
        for (int i = threadIdx.x; i < PARAMETERS * a.C; i += blockDim.x) out[i] = columns[i];
    }
}

// Blocks that a multiprocessor runs side by side: what 128 registers a thread allow. Rows on their way while one is computed: up to 3, as many as shared
// memory holds on every GPU.
template <int W, int V>
struct BackwardShape {
    static constexpr int THREADS = RowGroup<W>::THREADS;
    static constexpr int FIT = 65536 / (THREADS * 128);
    static constexpr int BLOCKS = FIT > 0 ? FIT : 1;
    static constexpr size_t STAGE_BYTES = (size_t)INPUTS * V * THREADS * sizeof(uint4), FITTING = 98304 / STAGE_BYTES;
    static constexpr int STAGES = FITTING < 4 ? (int)FITTING : 4;
};

// One thread's slots of the stages, (STAGES, INPUTS, V, THREADS): a thread reads only what it copied there, so no barrier is needed.
template <int W, int V>
static __device__ __forceinline__ uint4 *input_slot(uint4 *stages, int stage, int input, int v) {
    return stages + ((stage * INPUTS + input) * V + v) * BackwardShape<W, V>::THREADS + threadIdx.x;
}

static __device__ __forceinline__ void copy_async(uint4 *shared, const void *global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(shared)), "l"(global) : "memory");
}

// Starts the copies of a row's vectors of dy, x and dresidual, and ends the batch, which is empty beyond the last row.
template <int W, int V>
static __device__ __forceinline__ void fetch_row(const NormBackward &a, uint4 *stages, int stage, int64_t row, int lane) {
#pragma unroll
    for (int v = 0; v < V; v++) {
        int c = (v * RowGroup<W>::LANES + lane) * PACKED;
        if (row >= a.N || c >= a.C) continue;
        const floatX *inputs[INPUTS] = {a.dy, a.x, a.dresidual};
#pragma unroll
        for (int i = 0; i < INPUTS; i++) copy_async(input_slot<W, V>(stages, stage, i, v), inputs[i] + row * a.C + c);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// A fixed number of blocks share the rows, so that each block's sums for the parameters stay in registers until the end.
template <int W, int V>
__global__ void __launch_bounds__(RowGroup<W>::THREADS, BackwardShape<W, V>::BLOCKS) norm_backward_kernel(NormBackward a) {
    using Shape = BackwardShape<W, V>;
    extern __shared__ uint4 stages[];  // Shape::STAGES of STAGE_BYTES; at the end (3, C) floats when the block has several groups
    __shared__ float2 shared[2][32];
    const int lane = threadIdx.x % RowGroup<W>::LANES, group = threadIdx.x / RowGroup<W>::LANES;
    const int64_t stride = (int64_t)gridDim.x * RowGroup<W>::ROWS;
    ColumnSums<V> sums = {};
    int64_t first = (int64_t)blockIdx.x * RowGroup<W>::ROWS, row = first + group;
#pragma unroll
    for (int i = 0; i < Shape::STAGES - 1; i++) fetch_row<W, V>(a, stages, i, row + i * stride, lane);
    int turn = 0, stage = 0;  // turn: the pairs that the row's threads exchange alternate between two buffers, so that one barrier per row is enough
    for (; first < a.N; first += stride, row += stride, turn ^= 1, stage = stage + 1 == Shape::STAGES ? 0 : stage + 1) {
        fetch_row<W, V>(a, stages, (stage + Shape::STAGES - 1) % Shape::STAGES, row + (Shape::STAGES - 1) * stride, lane);
        const float mean = row < a.N ? a.mean[row] : 0.0f, rstd = row < a.N ? a.rstd[row] : 0.0f;
        asm volatile("cp.async.wait_group %0;" ::"n"(Shape::STAGES - 1) : "memory");
        float sum_g = 0.0f, sum_g_xhat = 0.0f;
#pragma unroll
        for (int v = 0; v < V; v++) {
            int c = (v * RowGroup<W>::LANES + lane) * PACKED;
            if (row >= a.N || c >= a.C) continue;  // threads without a row still meet the barriers
            float dy_value[PACKED], x_value[PACKED], gamma_value[PACKED];
            unpack(Packed128{*input_slot<W, V>(stages, stage, 0, v)}, dy_value);
            unpack(Packed128{*input_slot<W, V>(stages, stage, 1, v)}, x_value);
            unpack(load_packed(a.gamma + c), gamma_value);  // from the L1: registers are what this kernel is short of
#pragma unroll
            for (int e = 0; e < PACKED; e++) {
                float xhat = (x_value[e] - mean) * rstd, g = dy_value[e] * gamma_value[e];
                sum_g += g;
                sum_g_xhat += g * xhat;
                sums.of[0][v][e] += dy_value[e] * xhat;
                sums.of[1][v][e] += dy_value[e];
            }
        }
        float2 sum = row_sum<W>(sum_g, sum_g_xhat, shared[turn]);
#pragma unroll
        for (int v = 0; v < V; v++) {
            int c = (v * RowGroup<W>::LANES + lane) * PACKED;
            if (row >= a.N || c >= a.C) continue;
            Packed128 dy = {*input_slot<W, V>(stages, stage, 0, v)}, x = {*input_slot<W, V>(stages, stage, 1, v)};
            store_gradient(a, row, c, dy, x, Packed128{*input_slot<W, V>(stages, stage, 2, v)}, mean, rstd, sum.x / (float)a.C, sum.y / (float)a.C, sums.of[2][v]);
        }
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();  // the stages become the block's columns
    store_partials<W, V>(a, sums, lane, reinterpret_cast<float *>(stages));
}

// Adds the blocks' partials: 32 columns a block, 32 slices of the partials side by side, then the slices in order.
enum { SLICES = 32 };
__global__ void __launch_bounds__(WARP * SLICES) norm_partials_kernel(NormBackward a, int blocks) {
    __shared__ float slices[SLICES][WARP];
    const int column = blockIdx.x * WARP + threadIdx.x % WARP, slice = threadIdx.x / WARP;
    float sum = 0.0f;
    for (int b = slice; b < blocks && column < PARAMETERS * a.C; b += SLICES) sum += a.partials[(int64_t)b * PARAMETERS * a.C + column];
    slices[slice][threadIdx.x % WARP] = sum;
    __syncthreads();
    if (slice > 0 || column >= PARAMETERS * a.C) return;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < SLICES; i++) total += slices[i][threadIdx.x];
    float *target = column < a.C ? a.dgamma : column < 2 * a.C ? a.dbeta : a.dbias;
    if (target) target[column % a.C] += total;
}

template <int W, int V>
struct LaunchBackward {
    static void run(Stream *s, const NormBackward &arguments) {
        NormBackward a = arguments;
        int64_t wanted = ceil_div64(a.N, RowGroup<W>::ROWS);
        int64_t resident = (int64_t)stream_device(s)->multiprocessors * BackwardShape<W, V>::BLOCKS;
        int blocks = (int)(wanted < resident ? wanted : resident);
        size_t columns = RowGroup<W>::ROWS > 1 ? PARAMETERS * (size_t)a.C * sizeof(float) : 0, shared = BackwardShape<W, V>::STAGES * BackwardShape<W, V>::STAGE_BYTES;
        if (shared < columns) shared = columns;
        cuda_check(stream_site(s), cudaFuncSetAttribute(norm_backward_kernel<W, V>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared),
                   "asking for shared memory for LayerNorm's backward");
        a.partials = (float *)op_scratch(s, (size_t)blocks * PARAMETERS * (size_t)a.C * sizeof(float), "LayerNorm backward");
        norm_backward_kernel<W, V><<<blocks, RowGroup<W>::THREADS, shared, stream_handle(s)>>>(a);
        check_launch(s, "LayerNorm backward");
        norm_partials_kernel<<<(unsigned)ceil_div64(PARAMETERS * (int64_t)a.C, WARP), WARP * SLICES, 0, stream_handle(s)>>>(a, blocks);
        check_launch(s, "LayerNorm backward, sums over blocks");
    }
};

void op_layernorm_backward(Stream *s, floatX *dresidual, floatX *dbranch, float *dgamma, float *dbeta, float *dbias, const floatX *dy, const floatX *x, const floatX *gamma,
                           const float *mean, const float *rstd, int B, int T, int C, Dropout dropout) {
    NormBackward a = {dresidual, dbranch, dgamma, dbeta, dbias, NULL, dy, x, gamma, mean, rstd, (int64_t)B * T, T, C, dropout};
    if (a.N == 0) return;
    launch_backward<LaunchBackward>(s, a, C);
}
