// Forward pass of LayerNorm and RMSNorm for a row in registers. Included by layernorm.cu and
// peer_norm.cu, whose results must be bitwise identical.
//
// W warps process a row, V vectors of 8 elements per lane. Sums have a fixed order: first per lane,
// then a butterfly over the warp, then warp by warp.
#pragma once
#include "llmc/cuda/common.cuh"

// Threads of a row, as a tag for with_row_shape.
template <int WARPS, int VECTORS> struct RowShape { static constexpr int W = WARPS, V = VECTORS; };

// Calls f with the shape for rows of `vectors` vectors: the fewest threads for which a lane has at
// most 3 vectors.
template <class F> static inline auto with_row_shape(int vectors, F f) {
    if (vectors <= 32) return f(RowShape<1, 1>{});
    if (vectors <= 64) return f(RowShape<1, 2>{});
    if (vectors <= 96) return f(RowShape<1, 3>{});
    if (vectors <= 128) return f(RowShape<2, 2>{});
    if (vectors <= 192) return f(RowShape<2, 3>{});
    if (vectors <= 256) return f(RowShape<4, 2>{});
    if (vectors <= 384) return f(RowShape<4, 3>{});
    if (vectors <= 512) return f(RowShape<8, 2>{});
    if (vectors <= 768) return f(RowShape<8, 3>{});
    if (vectors <= 1024) return f(RowShape<16, 2>{});
    if (vectors <= 1536) return f(RowShape<16, 3>{});
    return f(RowShape<32, 2>{});
}

// Returns the first column of a lane's v-th vector, which may be past the end of the row.
template <int W> static __device__ __forceinline__ int row_column(int v, int lane) {
    return (v * W * WARP + lane) * PACKED;
}

// Returns residual + x for 8 elements, rounded. Bitwise identical to the CPU backend.
static __device__ __forceinline__ Packed128 add_rounded(Packed128 residual, const float x[PACKED]) {
    float sum[PACKED];
    unpack(residual, sum);
#pragma unroll
    for (int e = 0; e < PACKED; e++) sum[e] = __fadd_rn(sum[e], x[e]);
    return pack(sum);
}

// Returns the sums of a and b over the threads of a row, to all of them. shared: (32) pairs that no
// thread is reading. Contains a barrier if W > 1.
template <int W> static __device__ __forceinline__ float2 row_sum(float a, float b, float2 *shared) {
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

// Computes the statistics of a row from this lane's vectors x. Computes the variance from
// differences from the mean, which is accurate even if the mean is large.
template <int W, int V>
static __device__ __forceinline__ void row_statistics(const Packed128 x[V], const LayerNorm &a, int lane,
                                                      float2 (*shared)[32], float *mean, float *rstd) {
    float sum = 0.0f, squares = 0.0f, value[PACKED];
#pragma unroll
    for (int v = 0; v < V; v++) {
        unpack(x[v], value);  // 0 past the end of the row
#pragma unroll
        for (int e = 0; e < PACKED; e++) sum += value[e];
    }
    *mean = row_sum<W>(sum, 0.0f, shared[0]).x / (float)a.C;
    if (a.rms) *mean = 0.0f;
#pragma unroll
    for (int v = 0; v < V; v++) {
        if (row_column<W>(v, lane) >= a.C) continue;
        unpack(x[v], value);
#pragma unroll
        for (int e = 0; e < PACKED; e++) squares += (value[e] - *mean) * (value[e] - *mean);
    }
    *rstd = 1.0f / sqrtf(row_sum<W>(squares, 0.0f, shared[1]).x / (float)a.C + a.epsilon);
}

// Normalizes a row and saves its statistics. x: this lane's vectors, 0 past the end of the row.
// store(at, y) writes 8 elements of the result, at = row * C + column. With a.absmax, raises
// *largest. shared: see row_statistics. Threads without a row (row >= N) must call it too.
template <int W, int V, class Store>
static __device__ __forceinline__ void normalize_row(const Packed128 x[V], const LayerNorm &a, int64_t row,
                                                     int64_t N, int lane, float2 (*shared)[32],
                                                     uint32_t *largest, Store store) {
    float mean, rstd;
    row_statistics<W, V>(x, a, lane, shared, &mean, &rstd);
#pragma unroll
    for (int v = 0; v < V; v++) {
        int c = row_column<W>(v, lane);
        if (row >= N || c >= a.C) continue;
        float value[PACKED], gamma[PACKED], beta[PACKED] = {};
        unpack(x[v], value);
        unpack(load_packed(a.gamma + c), gamma);
        if (a.beta) unpack(load_packed(a.beta + c), beta);
#pragma unroll
        for (int e = 0; e < PACKED; e++) value[e] = (value[e] - mean) * rstd * gamma[e] + beta[e];
        Packed128 y = pack(value);
        store(row * a.C + c, y);
        if (a.absmax) *largest = packed_absolute(*largest, y);
    }
    if (lane == 0 && row < N) {
        a.mean[row] = mean;
        a.rstd[row] = rstd;
    }
}
