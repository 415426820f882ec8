// Norms of queries and keys on GPUs: see ops.h. L lanes of a warp process a vector in registers, 8
// columns each. Backward recomputes the statistics, because it reads the vectors anyway.
#include <assert.h>

#include "llmc/cuda/common.cuh"
#include "llmc/cuda/partials.cuh"

enum { THREADS = 256, WARPS = THREADS / WARP };
enum { SUMS = 4 };  // dgamma and dbeta of queries, then of keys

struct HeadVectors : HeadNorm {
    int64_t vectors;  // number of queries and keys
    float *partials;  // (blocks, SUMS, HD) sums of each block, in backward
};

// Position of a lane's columns.
struct HeadPlace {
    bool here;  // false past the last vector or column
    bool key;
    int column;
    int64_t x, before;  // offsets in the tensors of these names
};
template <int L>
static __device__ __forceinline__ HeadPlace head_place(const HeadVectors &a, int64_t vector) {
    HeadPlace p;
    p.column = threadIdx.x % L * PACKED;
    p.here = vector < a.vectors && p.column < a.HD;
    p.key = vector % (a.queries + 1) == a.queries;
    p.before = vector * a.HD + p.column;
    p.x = p.before + vector / (a.queries + 1) * a.HD;  // in x a value follows each key
    return p;
}

// Replaces x with (x - mean) / deviation and returns 1 / deviation. Computes the variance from
// differences from the mean, which is accurate even if the mean is large.
template <int L>
static __device__ __forceinline__ float normalize(const HeadVectors &a, bool here, float x[PACKED]) {
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int e = 0; e < PACKED; e++) sum += x[e];
    const float mean = a.rms ? 0.0f : lanes_sum<L>(sum) / (float)a.HD;
#pragma unroll
    for (int e = 0; e < PACKED; e++) {
        x[e] = here ? x[e] - mean : 0.0f;
        squares += x[e] * x[e];
    }
    const float rstd = 1.0f / sqrtf(lanes_sum<L>(squares) / (float)a.HD + a.epsilon);
#pragma unroll
    for (int e = 0; e < PACKED; e++) x[e] *= rstd;
    return rstd;
}

template <int L> static __global__ void __launch_bounds__(THREADS) head_norm_forward_kernel(HeadVectors a) {
    const HeadPlace p = head_place<L>(a, ((int64_t)blockIdx.x * THREADS + threadIdx.x) / L);
    float x[PACKED] = {}, gamma[PACKED], beta[PACKED] = {};
    Packed128 packed = {};
    if (p.here) packed = load_packed(a.x + p.x);
    unpack(packed, x);
    normalize<L>(a, p.here, x);
    if (!p.here) return;
    store_packed_streaming(a.before + p.before, packed);
    unpack(load_packed(a.gamma[p.key] + p.column), gamma);
    if (a.beta[p.key]) unpack(load_packed(a.beta[p.key] + p.column), beta);
#pragma unroll
    for (int e = 0; e < PACKED; e++) x[e] = x[e] * gamma[e] + beta[e];
    store_packed(a.x + p.x, pack(x));
}

// Backward pass of one vector. Adds to the parameter gradients of this lane's columns.
template <int L>
static __device__ __forceinline__ void vector_backward(const HeadVectors &a, const HeadPlace &p,
                                                       float sums[SUMS][PACKED]) {
    float x[PACKED] = {}, dy[PACKED] = {}, gamma[PACKED] = {};
    if (p.here) {
        unpack(load_packed_streaming(a.before + p.before), x);
        unpack(load_packed(a.x + p.x), dy);
        unpack(load_packed(a.gamma[p.key] + p.column), gamma);
    }
    const float rstd = normalize<L>(a, p.here, x);
    float sum_g = 0.0f, sum_g_x = 0.0f;
#pragma unroll
    for (int e = 0; e < PACKED; e++) {
        sum_g += dy[e] * gamma[e];
        sum_g_x += dy[e] * gamma[e] * x[e];
    }
    const float mean_g = a.rms ? 0.0f : lanes_sum<L>(sum_g) / (float)a.HD;
    const float mean_g_x = lanes_sum<L>(sum_g_x) / (float)a.HD;
#pragma unroll
    for (int e = 0; e < PACKED; e++) {
        sums[0][e] += p.key ? 0.0f : dy[e] * x[e];
        sums[1][e] += p.key ? 0.0f : dy[e];
        sums[2][e] += p.key ? dy[e] * x[e] : 0.0f;
        sums[3][e] += p.key ? dy[e] : 0.0f;
        dy[e] = (dy[e] * gamma[e] - mean_g - x[e] * mean_g_x) * rstd;
    }
    if (p.here) store_packed(a.x + p.x, pack(dy));
}

// Each block loops over many vectors and keeps the parameter gradients in registers until the end.
template <int L> static __global__ void __launch_bounds__(THREADS) head_norm_backward_kernel(HeadVectors a) {
    constexpr int VECTORS = THREADS / L, COLUMNS = L * PACKED;
    __shared__ float warps[WARPS][SUMS][COLUMNS];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    float sums[SUMS][PACKED] = {};
    for (int64_t first = (int64_t)blockIdx.x * VECTORS; first < a.vectors;
         first += (int64_t)gridDim.x * VECTORS)
        vector_backward<L>(a, head_place<L>(a, first + threadIdx.x / L), sums);
#pragma unroll
    for (int i = 0; i < SUMS * PACKED; i++) {
        float sum = sums[i / PACKED][i % PACKED];
#pragma unroll
        for (int stride = L; stride < WARP; stride *= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, stride);
        if (lane < L) warps[warp][i / PACKED][lane * PACKED + i % PACKED] = sum;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < SUMS * a.HD; i += THREADS) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += warps[w][i / a.HD][i % a.HD];
        a.partials[(int64_t)blockIdx.x * SUMS * a.HD + i] = sum;
    }
}

static __global__ void __launch_bounds__(PARTIALS_THREADS)
    head_norm_partials_kernel(HeadVectors a, int blocks) {
    const int columns = SUMS * a.HD, column = blockIdx.x * WARP + threadIdx.x % WARP;
    const float total = partials_total(a.partials, blocks, columns, column);
    if (threadIdx.x >= WARP || column >= columns) return;
    const int sum = column / a.HD, c = column % a.HD, key = sum / 2;
    float *gradient = sum % 2 ? a.dbeta[key] : a.dgamma[key];
    if (gradient) gradient[c] += total;
}

static HeadVectors head_vectors(const HeadNorm *a) {
    assert(a->HD % PACKED == 0 && a->HD <= WARP * PACKED);
    HeadVectors v = {*a, a->N * a->groups * (a->queries + 1), NULL};
    return v;
}

template <int L> static void launch_forward(Stream *s, const HeadVectors &a) {
    const unsigned blocks = (unsigned)ceil_div64(a.vectors * L, THREADS);
    head_norm_forward_kernel<L><<<blocks, THREADS, 0, stream_handle(s)>>>(a);
    check_launch(s, "norms of queries and keys");
}

template <int L> static void launch_backward(Stream *s, HeadVectors a) {
    enum { BLOCKS_PER_MULTIPROCESSOR = 4 };
    const int64_t wanted = ceil_div64(a.vectors * L, THREADS);
    const int64_t most = (int64_t)stream_device(s)->multiprocessors * BLOCKS_PER_MULTIPROCESSOR;
    const int blocks = (int)(wanted < most ? wanted : most), columns = SUMS * a.HD;
    a.partials = (float *)op_scratch(s, (size_t)blocks * (size_t)columns * sizeof(float),
                                     "the norms of queries and keys");
    head_norm_backward_kernel<L><<<blocks, THREADS, 0, stream_handle(s)>>>(a);
    check_launch(s, "backward of the norms of queries and keys");
    head_norm_partials_kernel<<<(unsigned)ceil_div64(columns, WARP), PARTIALS_THREADS, 0, stream_handle(s)>>>(
        a, blocks);
    check_launch(s, "backward of the norms of queries and keys, sums over blocks");
}

void op_head_norm_forward(Stream *s, const HeadNorm *op) {
    const HeadVectors a = head_vectors(op);
    if (a.vectors == 0) return;
    if (a.HD <= 64) launch_forward<8>(s, a);
    else if (a.HD <= 128) launch_forward<16>(s, a);
    else launch_forward<32>(s, a);
}

void op_head_norm_backward(Stream *s, const HeadNorm *op) {
    const HeadVectors a = head_vectors(op);
    if (a.vectors == 0) return;
    if (a.HD <= 64) launch_backward<8>(s, a);
    else if (a.HD <= 128) launch_backward<16>(s, a);
    else launch_backward<32>(s, a);
}
