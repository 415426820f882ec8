// LayerNorm and RMSNorm on GPUs, fused with the preceding residual addition and dropout: see ops.h.
// Forward and backward read their inputs once and write their outputs once. In between, forward
// keeps a row in registers, and backward keeps it in shared memory.
//
// In forward, W warps process a row, V vectors of 8 elements per lane (row_norm.cuh). Backward sums
// parameter gradients per block in registers, then over the blocks.
//
// At the end of a pipeline stage no norm follows the residual addition, which then has its own
// elementwise kernels.
#include <assert.h>

#include "llmc/cuda/common.cuh"
#include "llmc/cuda/limits.h"
#include "llmc/cuda/partials.cuh"
#include "llmc/cuda/row_norm.cuh"

// --- rows and threads ----------------------------------------------------------------------------

enum { ELEMENT_THREADS = 256 };  // block size of elementwise kernels

static int row_vectors(int C) {
    assert(C % LIMIT_MULTIPLE == 0 && C <= LIMIT_HIDDEN);
    return C / PACKED;
}

// Computes the dropout multipliers of 8 elements at (row, c) of the branch. row 0 is this rank's
// first row. p must not be 0.
static __device__ __forceinline__ void branch_multipliers(float keep[PACKED], const LayerNorm &a, int64_t row,
                                                          int c) {
    row_multipliers(keep, a.dropout, a.T, a.C, a.rows.first + row, c);
}

// --- forward -------------------------------------------------------------------------------------

// Returns residual + dropout(branch) for 8 elements at (row, c), rounded. Bitwise identical to the
// CPU backend.
static __device__ __forceinline__ Packed128 residual_sum(const LayerNorm &a, Packed128 residual,
                                                         Packed128 branch, int64_t row, int c) {
    float x[PACKED];
    unpack(branch, x);
    if (a.dropout.p > 0.0f) {
        float keep[PACKED];
        branch_multipliers(keep, a, row, c);
#pragma unroll
        for (int e = 0; e < PACKED; e++) x[e] = __fmul_rn(x[e], keep[e]);
    }
    return add_rounded(residual, x);
}

// A block has one row, or 8 rows if a row has one warp.
template <int W> struct RowGroup {
    static constexpr int LANES = W * WARP;
    static constexpr int ROWS = W == 1 ? 8 : 1;  // 1 if a row needs barriers
    static constexpr int THREADS = ROWS * LANES;
};

template <int W, int V>
__global__ void __launch_bounds__(RowGroup<W>::THREADS) norm_forward_kernel(LayerNorm a, int64_t N) {
    __shared__ float2 shared[2][32];
    const int lane = threadIdx.x % RowGroup<W>::LANES;
    const int64_t row = (int64_t)blockIdx.x * RowGroup<W>::ROWS + threadIdx.x / RowGroup<W>::LANES;
    Packed128 x[V], branch[V];
#pragma unroll
    for (int v = 0; v < V; v++) {
        int c = row_column<W>(v, lane);
        x[v].words = branch[v].words = make_uint4(0, 0, 0, 0);
        if (row >= N || c >= a.C) continue;
        x[v] = load_packed((a.branch ? a.residual : a.x) + row * a.C + c);
        if (a.branch) branch[v] = load_packed_streaming(a.branch + row * a.C + c);
    }
#pragma unroll
    for (int v = 0; v < V; v++) {
        int c = row_column<W>(v, lane);
        if (row >= N || c >= a.C || !a.branch) continue;
        x[v] = residual_sum(a, x[v], branch[v], row, c);
        store_packed(a.x + row * a.C + c, x[v]);
    }
    uint32_t largest = 0;
    normalize_row<W, V>(x, a, row, N, lane, shared, &largest,
                        [&](int64_t at, Packed128 y) { store_packed(a.y + at, y); });
    if (a.absmax) block_absolute(a.absmax, largest);
}

template <int W, int V> static void run_forward(Stream *s, const LayerNorm &a) {
    int64_t N = rows_held(a.rows, a.B, a.T), blocks = ceil_div64(N, RowGroup<W>::ROWS);
    norm_forward_kernel<W, V><<<(unsigned)blocks, RowGroup<W>::THREADS, 0, stream_handle(s)>>>(a, N);
    check_launch(s, "LayerNorm forward");
}

static void launch_forward(Stream *s, const LayerNorm &a) {
    with_row_shape(row_vectors(a.C), [&](auto shape) { run_forward<shape.W, shape.V>(s, a); });
}

// The residual addition without a norm, 8 elements per thread.
__global__ void __launch_bounds__(ELEMENT_THREADS) residual_sum_kernel(LayerNorm a, int64_t vectors) {
    const int64_t i = (int64_t)blockIdx.x * ELEMENT_THREADS + threadIdx.x, at = i * PACKED, row = at / a.C;
    if (i >= vectors) return;
    Packed128 residual = load_packed(a.residual + at), branch = load_packed_streaming(a.branch + at);
    store_packed(a.x + at, residual_sum(a, residual, branch, row, (int)(at - row * a.C)));
}

static void launch_sum(Stream *s, const LayerNorm &a) {
    int64_t vectors = rows_held(a.rows, a.B, a.T) * row_vectors(a.C);
    unsigned blocks = (unsigned)ceil_div64(vectors, ELEMENT_THREADS);
    residual_sum_kernel<<<blocks, ELEMENT_THREADS, 0, stream_handle(s)>>>(a, vectors);
    check_launch(s, "residual sum");
}

void op_layernorm_forward(Stream *s, const LayerNorm *a) {
    if (rows_held(a->rows, a->B, a->T) == 0) return;
    if (a->gamma) launch_forward(s, *a);
    else if (a->branch) launch_sum(s, *a);
}

// --- backward ------------------------------------------------------------------------------------

struct NormBackward : LayerNorm {
    float *partials;  // (blocks, sums, C) sums of each block for dgamma, dbeta and branch_sum
    int sums;         // PARAMETERS, or 1 for branch_sum only
    int64_t N;
};

enum { PARAMETERS = 3 };  // gamma, beta, and the bias of the branch's last linear
enum { INPUTS = 3 };      // dy, x, dresidual

// A tile of rows is copied to shared memory while the previous tile is processed. It is then read
// twice: by warps along rows, for the two means of each row, and by threads along columns, so that
// a thread needs registers only for the parameter gradients of its columns.
struct BackwardTiles {
    int vectors;  // per row
    int threads;
    int groups;         // threads / vectors, at least 1; each group processes every groups-th row
    int rows;           // per tile
    int warps_per_row;  // number of warps that compute the means of a row
    int stages;         // number of tiles in shared memory
    size_t stage_bytes;
};

// Computes 8 elements of the branch's gradient from the stored gradient of the residual stream and
// adds them to `sum`. DROPS: the branch has dropout. MAXIMUM: raises *largest.
template <bool DROPS, bool MAXIMUM>
static __device__ __forceinline__ void branch_gradient(const NormBackward &a, int64_t row, int c,
                                                       Packed128 gradient, float sum[PACKED],
                                                       uint32_t *largest) {
    float x[PACKED];
    unpack(gradient, x);
    if constexpr (DROPS) {
        float keep[PACKED];
        branch_multipliers(keep, a, row, c);
#pragma unroll
        for (int e = 0; e < PACKED; e++) x[e] *= keep[e];
        gradient = pack(x);
        unpack(gradient, x);
    }
    if (a.dbranch) store_packed(a.dbranch + row * a.C + c, gradient);
    if constexpr (MAXIMUM) *largest = packed_absolute(*largest, gradient);
#pragma unroll
    for (int e = 0; e < PACKED; e++) sum[e] += x[e];
}

struct ColumnSums {
    float of[PARAMETERS][PACKED];
};
// Computes 8 columns of a row: adds the gradient of x to dresidual, writes dbranch, and adds to the
// parameter gradients.
template <bool DROPS, bool MAXIMUM>
static __device__ __forceinline__ void column_gradient(const NormBackward &a, int64_t row, int c,
                                                       const uint4 *inputs, int64_t stride,
                                                       Packed128 gamma_packed, float mean, float rstd,
                                                       float mean_g, float mean_g_xhat, ColumnSums *sums,
                                                       uint32_t *largest) {
    float dy[PACKED], x[PACKED], gamma[PACKED], total[PACKED];
    unpack(Packed128{inputs[0]}, dy);
    unpack(Packed128{inputs[stride]}, x);
    unpack(Packed128{inputs[2 * stride]}, total);
    unpack(gamma_packed, gamma);
#pragma unroll
    for (int e = 0; e < PACKED; e++) {
        float xhat = (x[e] - mean) * rstd;
        total[e] += (dy[e] * gamma[e] - mean_g - xhat * mean_g_xhat) * rstd;
        sums->of[0][e] += dy[e] * xhat;
        sums->of[1][e] += dy[e];
    }
    Packed128 rounded = pack(total);
    store_packed(a.dresidual + row * a.C + c, rounded);
    branch_gradient<DROPS, MAXIMUM>(a, row, c, rounded, sums->of[2], largest);
}

template <int BYTES> static __device__ __forceinline__ void copy_async(void *shared, const void *global) {
    unsigned to = (unsigned)__cvta_generic_to_shared(shared);
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(global) : "memory");
}

// Starts the asynchronous copies of a tile and commits them as a group, which is empty past the
// last row. statistics: (2, WARP) mean and rstd.
static __device__ __forceinline__ void fetch_tile(const NormBackward &a, const BackwardTiles &t, uint4 *stage,
                                                  float *statistics, int64_t tile) {
    const int64_t first = tile * t.rows;
    const int rows = (int)(a.N - first < t.rows ? a.N - first : t.rows);
    const floatX *const inputs[INPUTS] = {a.dy, a.x, a.dresidual};
#pragma unroll
    for (int i = 0; i < INPUTS; i++) {
        for (int v = threadIdx.x; v < rows * t.vectors; v += t.threads)
            copy_async<16>(stage + i * t.rows * t.vectors + v, inputs[i] + first * a.C + (int64_t)v * PACKED);
    }
    if ((int)threadIdx.x < rows) {
        copy_async<4>(statistics + threadIdx.x, a.mean + first + threadIdx.x);
        copy_async<4>(statistics + WARP + threadIdx.x, a.rstd + first + threadIdx.x);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Adds g = dy gamma and g xhat over this warp's part of its row.
static __device__ __forceinline__ void add_row(const NormBackward &a, const BackwardTiles &t,
                                               const uint4 *stage, const float *statistics, float2 *parts) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, row = warp / t.warps_per_row;
    if (row >= t.rows) return;
    const uint4 *dy_row = stage + row * t.vectors, *x_row = dy_row + t.rows * t.vectors;
    const float mean = statistics[row], rstd = statistics[WARP + row];
    float sum_g = 0.0f, sum_g_xhat = 0.0f;
    for (int v = warp % t.warps_per_row * WARP + lane; v < t.vectors; v += t.warps_per_row * WARP) {
        float dy[PACKED], x[PACKED], gamma[PACKED];
        unpack(Packed128{dy_row[v]}, dy);
        unpack(Packed128{x_row[v]}, x);
        unpack(load_packed(a.gamma + v * PACKED), gamma);
#pragma unroll
        for (int e = 0; e < PACKED; e++) {
            float g = dy[e] * gamma[e];
            sum_g += g;
            sum_g_xhat += g * ((x[e] - mean) * rstd);
        }
    }
    sum_g = warp_sum(sum_g), sum_g_xhat = warp_sum(sum_g_xhat);
    if (lane == 0) parts[warp] = make_float2(sum_g, sum_g_xhat);
}

// Stores the block's sums in its row of partials. Several groups are first added in shared memory.
template <int V>
static __device__ __forceinline__ void store_partials(const NormBackward &a, const BackwardTiles &t,
                                                      const ColumnSums sums[V], float *columns) {
    float *out = a.partials + (int64_t)blockIdx.x * PARAMETERS * a.C;
    float *target = t.groups == 1 ? out : columns;
    for (int g = 0; g < t.groups; g++) {
#pragma unroll
        for (int v = 0; v < V; v++) {
            int at = v * t.threads + threadIdx.x - g * t.vectors;
            if (at < 0 || at >= t.vectors) continue;
#pragma unroll
            for (int i = 0; i < PARAMETERS; i++) {
#pragma unroll
                for (int e = 0; e < PACKED; e++) {
                    float *column = &target[i * a.C + at * PACKED + e];
                    *column = sums[v].of[i][e] + (g ? *column : 0.0f);
                }
            }
        }
        if (t.groups > 1) __syncthreads();
    }
    for (int i = threadIdx.x; t.groups > 1 && i < PARAMETERS * a.C; i += t.threads) out[i] = columns[i];
}

// Each block loops over many tiles and keeps the parameter gradients in registers until the end. V:
// vectors of columns per thread.
template <int THREADS, int V, bool DROPS, bool MAXIMUM>
__global__ void __launch_bounds__(THREADS, THREADS > 256 ? 1
                                           : DROPS       ? 2
                                                         : 3)
    norm_backward_kernel(NormBackward a, BackwardTiles t) {
    // (stages, INPUTS, rows, vectors); at the end (3, C) floats to add the groups' sums
    extern __shared__ uint4 tiles[];
    __shared__ float statistics[2][2 * WARP];
    __shared__ float2 parts[WARP];
    const int group = V == 1 ? threadIdx.x / t.vectors : 0, stage_vectors = INPUTS * t.rows * t.vectors;
    const int64_t count = (a.N + t.rows - 1) / t.rows;
    Packed128 gamma[V];
    ColumnSums sums[V] = {};
    uint32_t largest = 0;
#pragma unroll
    for (int v = 0; v < V; v++) {
        int at = v * t.threads + threadIdx.x - group * t.vectors;
        gamma[v] = at < t.vectors ? load_packed(a.gamma + at * PACKED) : Packed128{make_uint4(0, 0, 0, 0)};
    }
    if (t.stages == 2) fetch_tile(a, t, tiles, statistics[0], blockIdx.x);
    int stage = 0;
    for (int64_t tile = blockIdx.x; tile < count; tile += gridDim.x, stage = t.stages - 1 - stage) {
        if (t.stages == 1) fetch_tile(a, t, tiles, statistics[0], tile);
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads();  // this tile has arrived, and no thread still reads the previous one
        if (t.stages == 2)
            fetch_tile(a, t, tiles + (1 - stage) * stage_vectors, statistics[1 - stage], tile + gridDim.x);
        const uint4 *here = tiles + stage * stage_vectors;
        add_row(a, t, here, statistics[stage], parts);
        __syncthreads();
        for (int r = group; group < t.groups && r < t.rows && tile * t.rows + r < a.N; r += t.groups) {
            float2 sum = make_float2(0.0f, 0.0f);
            for (int i = 0; i < t.warps_per_row; i++) {
                float2 part = parts[r * t.warps_per_row + i];
                sum.x += part.x, sum.y += part.y;
            }
#pragma unroll
            for (int v = 0; v < V; v++) {
                int at = v * t.threads + threadIdx.x - group * t.vectors;
                if (at >= t.vectors) continue;
                column_gradient<DROPS, MAXIMUM>(a, tile * t.rows + r, at * PACKED, here + r * t.vectors + at,
                                                (int64_t)t.rows * t.vectors, gamma[v], statistics[stage][r],
                                                statistics[stage][WARP + r],
                                                a.rms ? 0.0f : sum.x / (float)a.C, sum.y / (float)a.C,
                                                &sums[v], &largest);
            }
        }
        if (t.stages == 1) __syncthreads();
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();  // store_partials overwrites the tiles
    if constexpr (MAXIMUM) block_absolute(a.absmax, largest);
    store_partials<V>(a, t, sums, reinterpret_cast<float *>(tiles));
}

// Adds the blocks' partial sums to the gradients.
__global__ void __launch_bounds__(PARTIALS_THREADS) norm_partials_kernel(NormBackward a, int blocks) {
    const int column = blockIdx.x * WARP + threadIdx.x % WARP, columns = a.sums * a.C;
    const float total = partials_total(a.partials, blocks, columns, column);
    if (threadIdx.x >= WARP || column >= columns) return;
    const int parameter = PARAMETERS - a.sums + column / a.C, c = column % a.C;
    if (parameter == 0 && a.dgamma) a.dgamma[c] += total;
    else if (parameter == 1 && a.dbeta) a.dbeta[c] += total;
    else if (parameter == 2 && a.branch_sum) a.branch_sum[c] = total;
}

// Sets a->partials. Returns the number of blocks: `wanted`, or fewer if the scratch memory is too
// small.
static int reserve_partials(Stream *s, NormBackward *a, int64_t wanted) {
    size_t block_bytes = (size_t)a->sums * (size_t)a->C * sizeof(float);
    int64_t fits = (int64_t)(SCRATCH_LEAST / block_bytes);
    int blocks = (int)(wanted < fits ? wanted : fits);
    a->partials = (float *)op_scratch(s, (size_t)blocks * block_bytes, "LayerNorm backward");
    return blocks;
}

static void join_partials(Stream *s, const NormBackward &a, int blocks) {
    unsigned joins = (unsigned)ceil_div64((int64_t)a.sums * a.C, WARP);
    norm_partials_kernel<<<joins, PARTIALS_THREADS, 0, stream_handle(s)>>>(a, blocks);
    check_launch(s, "LayerNorm backward, sums over blocks");
}

// Chooses tiles of at most 56 KiB (but at least one row), so that several blocks fit on an SM.
static BackwardTiles backward_tiles(Stream *s, int C) {
    BackwardTiles t = {};
    t.vectors = row_vectors(C);
    t.groups = t.vectors < 256 ? 256 / t.vectors : 1;
    int columns = t.vectors > 1024 ? (t.vectors + 1) / 2 : t.vectors;  // threads per row
    t.threads = (int)ceil_div64((int64_t)t.groups * columns, WARP) * WARP;
    int warps = t.threads / WARP, fitting = 57344 / (INPUTS * C * (int)sizeof(floatX));
    t.rows = fitting < 1 ? 1 : fitting < warps ? fitting : warps;
    t.warps_per_row = warps / t.rows;
    t.stage_bytes = (size_t)INPUTS * (size_t)t.rows * (size_t)C * sizeof(floatX);
    t.stages = 2 * t.stage_bytes + 2048 <= stream_device(s)->shared_bytes_block ? 2 : 1;
    return t;
}

template <int THREADS, int V, bool DROPS, bool MAXIMUM>
static void launch_backward(Stream *s, NormBackward a, BackwardTiles t) {
    size_t columns = t.groups > 1 ? PARAMETERS * (size_t)a.C * sizeof(float) : 0;
    size_t shared = (size_t)t.stages * t.stage_bytes;
    if (shared < columns) shared = columns;
    int resident = 0;
    const auto kernel = norm_backward_kernel<THREADS, V, DROPS, MAXIMUM>;
    allow_shared(s, kernel, shared, "shared memory for LayerNorm's backward");
    cuda_check(stream_site(s),
               cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, t.threads, shared),
               "occupancy of LayerNorm's backward");
    int64_t wanted = ceil_div64(a.N, t.rows);
    int64_t most = (int64_t)stream_device(s)->multiprocessors * (resident > 1 ? resident : 1);
    int blocks = reserve_partials(s, &a, wanted < most ? wanted : most);
    kernel<<<blocks, t.threads, shared, stream_handle(s)>>>(a, t);
    check_launch(s, "LayerNorm backward");
    join_partials(s, a, blocks);
}

// --- backward of a residual addition without a norm ----------------------------------------------

// Each block processes SLAB columns of every gridDim.x-th group of SUM_WARPS rows, one row per warp
// at a time, and combines the sums of its warps in shared memory.
enum { SUM_WARPS = 8, SLAB = WARP * PACKED, SUM_ROWS = 64 };

template <bool DROPS, bool MAXIMUM>
__global__ void __launch_bounds__(WARP *SUM_WARPS) sum_backward_kernel(NormBackward a) {
    __shared__ float columns[SUM_WARPS][SLAB];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, slab = blockIdx.y * SLAB;
    const int c = slab + lane * PACKED;
    float sum[PACKED] = {};
    uint32_t largest = 0;
    for (int64_t row = (int64_t)blockIdx.x * SUM_WARPS + warp; row < a.N && c < a.C;
         row += (int64_t)gridDim.x * SUM_WARPS)
        branch_gradient<DROPS, MAXIMUM>(a, row, c, load_packed(a.dresidual + row * a.C + c), sum, &largest);
    if constexpr (MAXIMUM) block_absolute(a.absmax, largest);
#pragma unroll
    for (int e = 0; e < PACKED; e++) columns[warp][lane * PACKED + e] = sum[e];
    __syncthreads();
    const int column = slab + threadIdx.x;
    if (column >= a.C) return;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < SUM_WARPS; w++) total += columns[w][threadIdx.x];
    a.partials[(int64_t)blockIdx.x * a.C + column] = total;
}
static_assert(SLAB == WARP * SUM_WARPS, "each thread adds one column");

template <bool DROPS, bool MAXIMUM> static void launch_sum_backward(Stream *s, NormBackward a) {
    unsigned slabs = (unsigned)ceil_div64((int64_t)row_vectors(a.C) * PACKED, SLAB);
    int64_t wanted = ceil_div64(a.N, SUM_ROWS), most = (int64_t)stream_device(s)->multiprocessors * 8;
    int blocks = reserve_partials(s, &a, wanted < most ? wanted : most);
    dim3 grid((unsigned)blocks, slabs);
    sum_backward_kernel<DROPS, MAXIMUM><<<grid, WARP * SUM_WARPS, 0, stream_handle(s)>>>(a);
    check_launch(s, "backward of the residual sum");
    if (a.branch_sum) join_partials(s, a, blocks);
}

// --- backward: the choice ------------------------------------------------------------------------

template <bool DROPS, bool MAXIMUM> static void choose_backward(Stream *s, const NormBackward &a) {
    if (!a.gamma) return launch_sum_backward<DROPS, MAXIMUM>(s, a);
    BackwardTiles t = backward_tiles(s, a.C);
    if (t.threads <= 256) launch_backward<256, 1, DROPS, MAXIMUM>(s, a, t);
    else if (t.vectors <= 1024) launch_backward<1024, 1, DROPS, MAXIMUM>(s, a, t);
    else launch_backward<1024, 2, DROPS, MAXIMUM>(s, a, t);
}

void op_layernorm_backward(Stream *s, const LayerNorm *op) {
    NormBackward a = {*op, NULL, op->gamma ? PARAMETERS : 1, rows_held(op->rows, op->B, op->T)};
    if (a.N == 0 || !(a.gamma || a.dbranch || a.branch_sum || a.absmax)) return;
    const bool drops = a.dbranch && a.dropout.p > 0.0f;
    if (a.absmax) drops ? choose_backward<true, true>(s, a) : choose_backward<false, true>(s, a);
    else drops ? choose_backward<true, false>(s, a) : choose_backward<false, false>(s, a);
}
