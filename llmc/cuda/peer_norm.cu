// Sums the ranks' partial results, adds bias and residual, and normalizes in one kernel: see
// comm_norm_direct in llmc/comm.h.
//
// Replaces an all-reduce and a norm, or a reduce-scatter, a norm and an all-gather. Sums are
// rounded as peer_reduce.cu rounds them, and row_norm.cuh does the rest, so results are bitwise
// identical to the separate kernels.
//
// The kernel has two barriers (peer_barrier.cuh). After the first one, the other ranks' partial
// results are complete, and the memory for gathered rows may be overwritten on all ranks. After the
// second one, the other ranks have read this rank's partial results and written its gathered rows,
// so the next GEMM may overwrite the former and read the latter. In between, partial results are
// only read, and no output may overlap them. x may be the residual: a thread loads its elements of
// a row before it stores them, and no other thread accesses these elements.
//
// W warps process a row (row_norm.cuh), and a block one or more rows at a time. All warps of a
// block run the same number of iterations, because normalize_row contains barriers of the block.
//
// With two ranks, a thread loads its next row before it processes the current one, to hide the
// latency of loads from the other GPU. With more ranks a row already has enough loads in flight,
// and two rows would not fit into registers.
//
// No GEMM runs at the same time, so this kernel may use up to half of the SMs (COMM_WITHOUT_GEMM).
#include <assert.h>

#include "llmc/cuda/limits.h"
#include "llmc/cuda/peer_barrier.cuh"
#include "llmc/cuda/peer_norm.h"
#include "llmc/cuda/row_norm.cuh"

template <int W> struct NormBlock {
    static constexpr int LANES = W * WARP;  // threads of a row
    static constexpr int THREADS = LANES > PEER_THREADS ? LANES : PEER_THREADS;
    static constexpr int ROWS = THREADS / LANES;
};

// This lane's elements of a row: the residual and each rank's partial results.
template <int V, int RANKS> struct RowInput { Packed128 residual[V], part[V][RANKS]; };

template <int W, int V, int RANKS>
static __device__ __forceinline__ void load_row(const PeerNorm &a, int64_t row, int lane,
                                                RowInput<V, RANKS> *in) {
#pragma unroll
    for (int v = 0; v < V; v++) {
        const int c = row_column<W>(v, lane);
        const int64_t at = row * a.norm.C + c;
        if (row >= a.rows || c >= a.norm.C) continue;
#pragma unroll
        for (int r = 0; r < RANKS; r++)
            if (r < a.barrier.size) in->part[v][r] = load_packed_streaming(a.part[r] + at);
        in->residual[v] = load_packed(a.norm.residual + at);
    }
}

// Sums 8 elements in rank order, adds the bias of columns c .. c + 7 and rounds once, as
// peer_sum_kernel and op_sum_parts do. Then adds the residual and rounds, as a norm does.
template <int RANKS>
static __device__ __forceinline__ Packed128 residual_of(const PeerNorm &a, const Packed128 part[RANKS],
                                                        Packed128 residual, int c) {
    float sum[PACKED], x[PACKED];
    unpack(part[0], sum);
#pragma unroll
    for (int r = 1; r < RANKS; r++) {
        if (r >= a.barrier.size) continue;
        unpack(part[r], x);
#pragma unroll
        for (int e = 0; e < PACKED; e++) sum[e] = __fadd_rn(sum[e], x[e]);
    }
    if (a.bias) {
        unpack(load_packed(a.bias + c), x);
#pragma unroll
        for (int e = 0; e < PACKED; e++) sum[e] = __fadd_rn(sum[e], x[e]);
    }
    unpack(pack(sum), x);
    return add_rounded(residual, x);
}

// Processes a row. All threads of a block must call it; threads without a row pass row >= a.rows.
template <int W, int V, int RANKS>
static __device__ __forceinline__ void process_row(const PeerNorm &a, int64_t row, int lane,
                                                   const RowInput<V, RANKS> &in, float2 (*shared)[32],
                                                   uint32_t *largest) {
    Packed128 x[V];
#pragma unroll
    for (int v = 0; v < V; v++) {
        const int c = row_column<W>(v, lane);
        x[v].words = make_uint4(0, 0, 0, 0);
        if (row >= a.rows || c >= a.norm.C) continue;
        x[v] = residual_of<RANKS>(a, in.part[v], in.residual[v], c);
        store_packed(a.norm.x + row * a.norm.C + c, x[v]);
    }
    normalize_row<W, V>(x, a.norm, row, a.rows, lane, shared, largest, [&](int64_t at, Packed128 y) {
        store_packed(a.norm.y + at, y);
#pragma unroll
        for (int d = 0; d < RANKS; d++)
            if (d < a.destinations) store_packed(a.to[d] + at, y);
    });
}

template <int W, int V, int RANKS>
__global__ void __launch_bounds__(NormBlock<W>::THREADS, 1)
    peer_norm_kernel(const __grid_constant__ PeerNorm a) {
    __shared__ float2 shared[2][32];
    const int lane = threadIdx.x % NormBlock<W>::LANES, group = threadIdx.x / NormBlock<W>::LANES;
    const int64_t stride = (int64_t)gridDim.x * NormBlock<W>::ROWS;
    const int64_t begin = (int64_t)blockIdx.x * NormBlock<W>::ROWS;
    constexpr bool AHEAD = RANKS == 2;
    uint32_t largest = 0;
    RowInput<V, RANKS> next = {};
    if (!wait_for_ranks(a.barrier, a.barrier.number)) return;
    load_row<W, V, RANKS>(a, begin + group, lane, &next);
    for (int64_t first = begin; first < a.rows; first += stride) {
        RowInput<V, RANKS> in = next;
        if (AHEAD) load_row<W, V, RANKS>(a, first + stride + group, lane, &next);
        process_row<W, V, RANKS>(a, first + group, lane, in, shared, &largest);
        if (!AHEAD) load_row<W, V, RANKS>(a, first + stride + group, lane, &next);
    }
    if (a.norm.absmax) block_absolute(a.norm.absmax, largest);
    wait_for_ranks(a.barrier, a.barrier.number + 1);
}

PeerNormShape peer_norm_shape(int C, int ranks) {
    assert(C % LIMIT_MULTIPLE == 0 && C <= LIMIT_HIDDEN);
    return with_row_shape(C / PACKED, [&](auto shape) {
        typedef NormBlock<shape.W> Block;
        return PeerNormShape{ranks == 2   ? peer_norm_kernel<shape.W, shape.V, 2>
                             : ranks <= 4 ? peer_norm_kernel<shape.W, shape.V, 4>
                                          : peer_norm_kernel<shape.W, shape.V, PEER_RANKS>,
                             Block::THREADS, Block::ROWS};
    });
}
