// This program's own causal attention, in tiles of queries and keys on tensor cores. Used for
// document starts, for shapes without a cuDNN plan, and in tests to check cuDNN. It uses no
// atomics, so all sums have a fixed order. Called by attention.cu.
//
// Forward reads the keys twice: first for the log-sum-exp of each query, then for out = P v with
// normalized P, which needs no rescaling. Backward recomputes P from the log-sum-exp, per tile of
// queries for dq and per tile of keys for dk and dv. Matrix products have bf16 inputs and fp32
// sums, so P and the gradient of the scores are rounded to bf16 first.
#include <math.h>
#include <mma.h>

#include "llmc/cuda/attention.h"
#include "llmc/cuda/common.cuh"

using namespace nvcuda;

// --- tiles ---------------------------------------------------------------------------------------

// A tile has ROWS queries and ROWS keys. Heads are padded with zeros to HDP columns. In elementwise
// operations, a warp processes 8 rows of the scores. In a matrix product with HDP columns, it
// computes 16 rows (its row group) and every second fragment of 16 columns. Strides are padded to
// avoid bank conflicts.
template <int HDP> struct Tile {
    static constexpr int ROWS = HDP <= 64 ? 64 : 32;
    static constexpr int WARPS = ROWS / 8, THREADS = WARPS * WARP;
    static constexpr int GROUPS = ROWS / 16;
    static constexpr int FRAGMENTS = HDP / 32;  // per warp
    static constexpr int LD = HDP + 8;          // stride of a tile of q, k, v: (ROWS, HDP) bf16
    static constexpr int LD_SCORES = ROWS + 4;  // stride of the scores: (ROWS, ROWS) fp32
    static constexpr int LD_PROBS = ROWS + 8;   // stride of the rounded scores: (ROWS, ROWS) bf16
};
enum { WARP_ROWS = 8 };  // rows of the scores per warp

// Data of each query of a tile: first visible key (INT_MAX if t >= T), log-sum-exp, sum(dout out).
template <int ROWS> struct QueryRows {
    int first_key[ROWS];
    float lse[ROWS], delta[ROWS];
};

template <int HDP> struct ForwardShared {
    alignas(128) __nv_bfloat16 q[Tile<HDP>::ROWS * Tile<HDP>::LD];
    alignas(128) __nv_bfloat16 kv[Tile<HDP>::ROWS * Tile<HDP>::LD];  // keys, later values
    alignas(128) float scores[Tile<HDP>::ROWS * Tile<HDP>::LD_SCORES];
    alignas(128) __nv_bfloat16 probs[Tile<HDP>::ROWS * Tile<HDP>::LD_PROBS];
    QueryRows<Tile<HDP>::ROWS> rows;
};
template <int HDP> struct BackwardShared {
    alignas(128) __nv_bfloat16 q[Tile<HDP>::ROWS * Tile<HDP>::LD];
    alignas(128) __nv_bfloat16 dout[Tile<HDP>::ROWS * Tile<HDP>::LD];
    alignas(128) __nv_bfloat16 k[Tile<HDP>::ROWS * Tile<HDP>::LD];
    alignas(128) __nv_bfloat16 v[Tile<HDP>::ROWS * Tile<HDP>::LD];
    alignas(128) float scores[Tile<HDP>::ROWS * Tile<HDP>::LD_SCORES];
    alignas(128) float dprobs[Tile<HDP>::ROWS * Tile<HDP>::LD_SCORES];
    alignas(128) __nv_bfloat16 probs[Tile<HDP>::ROWS * Tile<HDP>::LD_PROBS];    // after dropout
    alignas(128) __nv_bfloat16 dscores[Tile<HDP>::ROWS * Tile<HDP>::LD_PROBS];  // includes `scale`
    QueryRows<Tile<HDP>::ROWS> rows;
};

struct Call : Attention {
    float scale;
    float *lse;    // (B, NH, T) log-sum-exp of the scaled scores, in Attention.saved
    float *delta;  // (B, NH, T) sum(dout out), in backward
    int tiles;     // number of tiles per head
    int sharers;   // number of heads that share keys and values
};

// Position of a block in the 1-D grid (gridDim.y is limited to 65535). Each (sample, head), or each
// (sample, group), has `tiles` blocks. heads: number of heads or groups.
struct Place {
    int tile, head, b;
};
static __device__ __forceinline__ Place place_of(const Call &a, int heads) {
    const unsigned head = blockIdx.x / (unsigned)a.tiles;
    return Place{(int)(blockIdx.x % (unsigned)a.tiles), (int)(head % (unsigned)heads),
                 (int)(head / (unsigned)heads)};
}

// Pointers of one (sample, head). row: row stride of qkv and dqkv. C: row stride of out and dout.
struct HeadView {
    const floatX *q, *k, *v;
    int64_t row, C;
    const int32_t *doc_start;  // (T) document starts of the sample, or NULL
    int64_t sample;            // global index of the sample, for dropout
};
static __device__ __forceinline__ HeadView head_view(const Call &a, int b, int head) {
    HeadView h;
    h.C = (int64_t)a.NH * a.HD;
    h.row = h.C + 2 * (int64_t)a.groups * a.HD;
    const GroupColumns columns = attention_columns(&a, head / a.sharers);
    const floatX *first = a.qkv + (int64_t)b * a.T * h.row;
    h.q = first + columns.q + (int64_t)(head % a.sharers) * a.HD;
    h.k = first + columns.k;
    h.v = first + columns.v;
    h.doc_start = a.doc_start ? a.doc_start + (int64_t)b * a.T : NULL;
    h.sample = a.dropout.first_sample + b;
    return h;
}
static __device__ __forceinline__ int64_t head_offset(const Call &a, int b, int head) {
    return ((int64_t)b * a.T * a.NH + head) * a.HD;
}

// Loads rows first .. first + ROWS - 1 of a (T, HD) matrix to shared memory, with zeros past T and
// HD.
template <int HDP>
static __device__ __forceinline__ void load_tile(__nv_bfloat16 *tile, const floatX *from, int64_t stride,
                                                 int first, const Call &a) {
    constexpr int VECTORS = HDP / PACKED;
    for (int i = threadIdx.x; i < Tile<HDP>::ROWS * VECTORS; i += Tile<HDP>::THREADS) {
        int r = i / VECTORS, d = i % VECTORS * PACKED;
        Packed128 x = {make_uint4(0, 0, 0, 0)};
        if (first + r < a.T && d < a.HD) x = load_packed(from + (first + r) * stride + d);
        *reinterpret_cast<uint4 *>(tile + r * Tile<HDP>::LD + d) = x.words;
    }
}

template <int ROWS>
static __device__ __forceinline__ void load_rows(QueryRows<ROWS> *rows, const Call &a, const HeadView &h,
                                                 const float *lse, const float *delta, int first) {
    for (int r = threadIdx.x; r < ROWS; r += blockDim.x) {
        int t = first + r;
        rows->first_key[r] = t >= a.T ? INT_MAX
                                      : attention_first_key(a.window, h.doc_start ? h.doc_start[t] : 0, t);
        if (lse) rows->lse[r] = t < a.T ? lse[t] : 0.0f;
        if (delta) rows->delta[r] = t < a.T ? delta[t] : 0.0f;
    }
}

// Returns the first key that is visible to any query of the tile.
template <int ROWS>
static __device__ __forceinline__ int first_key_of_tile(const Call &a, const HeadView &h, int first) {
    if (!h.doc_start) return attention_first_key(a.window, 0, first);
    int least = INT_MAX;
    for (int r = threadIdx.x % WARP; r < ROWS && first + r < a.T; r += WARP)
        least = min(least, attention_first_key(a.window, h.doc_start[first + r], first + r));
    return __reduce_min_sync(0xFFFFFFFFu, least);
}

// --- matrix products -----------------------------------------------------------------------------

typedef wmma::fragment<wmma::accumulator, 16, 16, 16, float> Accumulator;
typedef wmma::fragment<wmma::matrix_a, 16, 16, 16, __nv_bfloat16, wmma::row_major> LeftRows;
typedef wmma::fragment<wmma::matrix_a, 16, 16, 16, __nv_bfloat16, wmma::col_major> LeftColumns;
typedef wmma::fragment<wmma::matrix_b, 16, 16, 16, __nv_bfloat16, wmma::row_major> RightRows;
typedef wmma::fragment<wmma::matrix_b, 16, 16, 16, __nv_bfloat16, wmma::col_major> RightColumns;

// Computes scores (ROWS, ROWS) = x y^T for tiles x and y (ROWS, HDP).
template <int HDP>
static __device__ __forceinline__ void tile_scores(float *scores, const __nv_bfloat16 *x,
                                                   const __nv_bfloat16 *y) {
    constexpr int GROUPS = Tile<HDP>::GROUPS, LD = Tile<HDP>::LD, LD_SCORES = Tile<HDP>::LD_SCORES;
    for (int f = threadIdx.x / WARP; f < GROUPS * GROUPS; f += Tile<HDP>::WARPS) {
        int i = f / GROUPS * 16, j = f % GROUPS * 16;
        Accumulator sum;
        wmma::fill_fragment(sum, 0.0f);
#pragma unroll
        for (int d = 0; d < HDP; d += 16) {
            LeftRows left;
            RightColumns right;
            wmma::load_matrix_sync(left, x + i * LD + d, LD);
            wmma::load_matrix_sync(right, y + j * LD + d, LD);
            wmma::mma_sync(sum, left, right, sum);
        }
        wmma::store_matrix_sync(scores + i * LD_SCORES + j, sum, LD_SCORES, wmma::mem_row_major);
    }
}

// One warp's part of a (ROWS, HDP) result: row group warp / 2, and every second column fragment,
// starting at warp % 2.
template <int HDP> struct Result { Accumulator part[Tile<HDP>::FRAGMENTS]; };
template <int HDP> static __device__ __forceinline__ void clear(Result<HDP> &result) {
#pragma unroll
    for (int f = 0; f < Tile<HDP>::FRAGMENTS; f++) wmma::fill_fragment(result.part[f], 0.0f);
}

// Computes result += w y, or w^T y, with w (ROWS, ROWS) of stride LD_PROBS and a tile y (ROWS,
// HDP).
template <int HDP, bool TRANSPOSE>
static __device__ __forceinline__ void accumulate_product(Result<HDP> &result, const __nv_bfloat16 *w,
                                                          const __nv_bfloat16 *y) {
    constexpr int LD = Tile<HDP>::LD, LD_PROBS = Tile<HDP>::LD_PROBS;
    const int warp = threadIdx.x / WARP, i = warp / 2 * 16;
#pragma unroll
    for (int k = 0; k < Tile<HDP>::ROWS; k += 16) {
        LeftRows left;
        LeftColumns left_transposed;
        if constexpr (TRANSPOSE) wmma::load_matrix_sync(left_transposed, w + k * LD_PROBS + i, LD_PROBS);
        else wmma::load_matrix_sync(left, w + i * LD_PROBS + k, LD_PROBS);
#pragma unroll
        for (int f = 0; f < Tile<HDP>::FRAGMENTS; f++) {
            RightRows right;
            wmma::load_matrix_sync(right, y + k * LD + (warp % 2 + 2 * f) * 16, LD);
            if constexpr (TRANSPOSE) wmma::mma_sync(result.part[f], left_transposed, right, result.part[f]);
            else wmma::mma_sync(result.part[f], left, right, result.part[f]);
        }
    }
}

// Rounds a result and stores it in a (T, HD) matrix, starting at row `first`. patches: 256 floats
// of scratch per warp.
template <int HDP>
static __device__ __forceinline__ void store_result(floatX *to, int64_t stride, Result<HDP> &result,
                                                    int first, const Call &a, float *patches) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    float *patch = patches + warp * 256;  // (16, 16)
    const int t = first + warp / 2 * 16 + lane / 2;
#pragma unroll
    for (int f = 0; f < Tile<HDP>::FRAGMENTS; f++) {
        const int d = (warp % 2 + 2 * f) * 16 + lane % 2 * PACKED;
        wmma::store_matrix_sync(patch, result.part[f], 16, wmma::mem_row_major);
        __syncwarp();
        if (t < a.T && d < a.HD) store_packed(to + t * stride + d, pack(patch + lane * PACKED));
        __syncwarp();
    }
}

// --- elements of the scores ----------------------------------------------------------------------

// Returns the dropout multiplier of a probability (see Attention in ops.h). head: index among this
// rank's heads.
static __device__ __forceinline__ float keep_multiplier(const Call &a, const HeadView &h, int head, int t,
                                                        int key) {
    if (!(a.dropout.p > 0.0f)) return 1.0f;
    uint64_t row = (uint64_t)(a.first_head + head) * (uint64_t)a.T + (uint64_t)t;
    uint64_t element = row * (uint64_t)a.T + (uint64_t)key;
    Philox4 bits = dropout_bits(a.dropout, h.sample, element / 8);
    // No array index here, because an array indexed at run time would not stay in registers.
    uint32_t low = element & 2 ? bits.v[1] : bits.v[0], high = element & 2 ? bits.v[3] : bits.v[2];
    uint32_t word = element & 4 ? high : low, random16 = element & 1 ? word >> 16 : word & 0xFFFFu;
    uint32_t threshold = (uint32_t)rintf(a.dropout.p * 65536.0f);
    return random16 >= threshold ? f32_div(1.0f, f32_sub(1.0f, a.dropout.p)) : 0.0f;
}

// Returns true if the query in row r of the tile at query_first attends to `key`.
template <int ROWS>
static __device__ __forceinline__ bool sees(const QueryRows<ROWS> &rows, int query_first, int r, int key) {
    return key <= query_first + r && key >= rows.first_key[r];
}

// --- forward -------------------------------------------------------------------------------------

// Pass 1 of forward: computes the log-sum-exp of the tile's queries, in shared memory and in lse
// (T). Each lane keeps the maximum and sum of its columns; they are combined at the end.
template <int HDP>
static __device__ void forward_lse(ForwardShared<HDP> &m, const Call &a, const HeadView &h, float *lse,
                                   int first, int key_begin) {
    constexpr int ROWS = Tile<HDP>::ROWS;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    float max[WARP_ROWS], sum[WARP_ROWS];
#pragma unroll
    for (int i = 0; i < WARP_ROWS; i++) max[i] = -INFINITY, sum[i] = 0.0f;
    for (int key_first = key_begin; key_first <= first; key_first += ROWS) {
        __syncthreads();
        load_tile<HDP>(m.kv, h.k, h.row, key_first, a);
        __syncthreads();
        tile_scores<HDP>(m.scores, m.q, m.kv);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < WARP_ROWS; i++) {
            const int r = warp * WARP_ROWS + i;
            for (int c = lane; c < ROWS; c += WARP) {
                if (!sees(m.rows, first, r, key_first + c)) continue;
                float score = a.scale * m.scores[r * Tile<HDP>::LD_SCORES + c];
                float largest = fmaxf(max[i], score);
                sum[i] = sum[i] * __expf(max[i] - largest) + __expf(score - largest);
                max[i] = largest;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < WARP_ROWS; i++) {
        const int r = warp * WARP_ROWS + i;
        float largest = warp_max(max[i]);
        // Skips lanes without keys, because -inf - -inf is NaN.
        float total = warp_sum(sum[i] > 0.0f ? sum[i] * __expf(max[i] - largest) : 0.0f);
        if (lane > 0) continue;
        m.rows.lse[r] = total > 0.0f ? largest + logf(total) : 0.0f;
        if (first + r < a.T) lse[first + r] = m.rows.lse[r];
    }
}

template <int HDP> __global__ void __launch_bounds__(Tile<HDP>::THREADS) attention_forward_kernel(Call a) {
    constexpr int ROWS = Tile<HDP>::ROWS;
    extern __shared__ __align__(128) uint8_t memory[];
    ForwardShared<HDP> &m = *reinterpret_cast<ForwardShared<HDP> *>(memory);
    const Place place = place_of(a, a.NH);
    // The tiles with the most keys start first.
    const int first = (a.tiles - 1 - place.tile) * ROWS, head = place.head, b = place.b;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const HeadView h = head_view(a, b, head);
    load_tile<HDP>(m.q, h.q, h.row, first, a);
    load_rows<ROWS>(&m.rows, a, h, NULL, NULL, first);
    const int key_begin = first_key_of_tile<ROWS>(a, h, first) / ROWS * ROWS;
    forward_lse<HDP>(m, a, h, a.lse + ((int64_t)b * a.NH + head) * a.T, first, key_begin);
    Result<HDP> result;
    clear(result);
    for (int key_first = key_begin; key_first <= first; key_first += ROWS) {
        __syncthreads();
        load_tile<HDP>(m.kv, h.k, h.row, key_first, a);
        __syncthreads();
        tile_scores<HDP>(m.scores, m.q, m.kv);
        __syncthreads();
        load_tile<HDP>(m.kv, h.v, h.row, key_first, a);
        for (int r = warp * WARP_ROWS; r < (warp + 1) * WARP_ROWS; r++) {
            for (int c = lane; c < ROWS; c += WARP) {
                float p = 0.0f;
                if (sees(m.rows, first, r, key_first + c)) {
                    p = __expf(a.scale * m.scores[r * Tile<HDP>::LD_SCORES + c] - m.rows.lse[r]) *
                        keep_multiplier(a, h, head, first + r, key_first + c);
                }
                m.probs[r * Tile<HDP>::LD_PROBS + c] = __float2bfloat16_rn(p);
            }
        }
        __syncthreads();
        accumulate_product<HDP, false>(result, m.probs, m.kv);
    }
    __syncthreads();  // the memory of the scores is reused as patches
    store_result<HDP>(a.out + head_offset(a, b, head), h.C, result, first, a, m.scores);
}

// --- backward ------------------------------------------------------------------------------------

// Computes delta (B, NH, T), the sum of dout * out over a head's columns, which equals the sum of p
// dp over keys. One warp per query.
__global__ void __launch_bounds__(256) attention_delta_kernel(Call a) {
    const int64_t query = (int64_t)blockIdx.x * (256 / WARP) + threadIdx.x / WARP;  // (B, T, NH)
    if (query >= (int64_t)a.B * a.T * a.NH) return;
    const int d = threadIdx.x % WARP * PACKED;
    float sum = 0.0f;
    if (d < a.HD) {
        float x[PACKED], y[PACKED];
        unpack(load_packed(a.dout + query * a.HD + d), x);
        unpack(load_packed(a.out + query * a.HD + d), y);
#pragma unroll
        for (int e = 0; e < PACKED; e++) sum += x[e] * y[e];
    }
    sum = warp_sum(sum);
    const int64_t head = query % a.NH, row = query / a.NH, b = row / a.T, t = row % a.T;
    if (threadIdx.x % WARP == 0) a.delta[(b * a.NH + head) * a.T + t] = sum;
}

// Processes a tile of queries and keys in backward: computes the probabilities after dropout and
// the gradient of the scores, both rounded, from q, dout, k and v in shared memory. Call after a
// barrier; ends with a barrier.
template <int HDP>
static __device__ __forceinline__ void backward_tile(BackwardShared<HDP> &m, const Call &a, const HeadView &h,
                                                     int head, int query_first, int key_first) {
    constexpr int ROWS = Tile<HDP>::ROWS, LD_SCORES = Tile<HDP>::LD_SCORES, LD_PROBS = Tile<HDP>::LD_PROBS;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    tile_scores<HDP>(m.scores, m.q, m.k);
    tile_scores<HDP>(m.dprobs, m.dout, m.v);
    __syncthreads();
    for (int r = warp * WARP_ROWS; r < (warp + 1) * WARP_ROWS; r++) {
        for (int c = lane; c < ROWS; c += WARP) {
            float p = 0.0f, dscore = 0.0f, keep = 0.0f;
            if (sees(m.rows, query_first, r, key_first + c)) {
                keep = keep_multiplier(a, h, head, query_first + r, key_first + c);
                p = __expf(a.scale * m.scores[r * LD_SCORES + c] - m.rows.lse[r]);
                dscore = a.scale * p * (m.dprobs[r * LD_SCORES + c] * keep - m.rows.delta[r]);
            }
            m.probs[r * LD_PROBS + c] = __float2bfloat16_rn(p * keep);
            m.dscores[r * LD_PROBS + c] = __float2bfloat16_rn(dscore);
        }
    }
    __syncthreads();
}

// Computes dq of one tile of queries.
template <int HDP> __global__ void __launch_bounds__(Tile<HDP>::THREADS) attention_dq_kernel(Call a) {
    constexpr int ROWS = Tile<HDP>::ROWS;
    extern __shared__ __align__(128) uint8_t memory[];
    BackwardShared<HDP> &m = *reinterpret_cast<BackwardShared<HDP> *>(memory);
    const Place place = place_of(a, a.NH);
    const int first = (a.tiles - 1 - place.tile) * ROWS, head = place.head, b = place.b;
    const HeadView h = head_view(a, b, head);
    const int64_t statistics = ((int64_t)b * a.NH + head) * a.T;
    load_tile<HDP>(m.q, h.q, h.row, first, a);
    load_tile<HDP>(m.dout, a.dout + head_offset(a, b, head), h.C, first, a);
    load_rows<ROWS>(&m.rows, a, h, a.lse + statistics, a.delta + statistics, first);
    Result<HDP> dq;
    clear(dq);
    for (int key_first = first_key_of_tile<ROWS>(a, h, first) / ROWS * ROWS; key_first <= first;
         key_first += ROWS) {
        __syncthreads();
        load_tile<HDP>(m.k, h.k, h.row, key_first, a);
        load_tile<HDP>(m.v, h.v, h.row, key_first, a);
        __syncthreads();
        backward_tile<HDP>(m, a, h, head, first, key_first);
        accumulate_product<HDP, false>(dq, m.dscores, m.k);
    }
    __syncthreads();
    store_result<HDP>(a.dqkv + (h.q - a.qkv), h.row, dq, first, a, m.scores);
}

// Computes dk and dv of one tile of keys, from all heads of a group.
template <int HDP> __global__ void __launch_bounds__(Tile<HDP>::THREADS) attention_dkv_kernel(Call a) {
    constexpr int ROWS = Tile<HDP>::ROWS;
    extern __shared__ __align__(128) uint8_t memory[];
    BackwardShared<HDP> &m = *reinterpret_cast<BackwardShared<HDP> *>(memory);
    const Place place = place_of(a, a.groups);
    // The first keys have the most queries, so they start first.
    const int key_first = place.tile * ROWS, b = place.b;
    HeadView h = head_view(a, b, place.head * a.sharers);
    load_tile<HDP>(m.k, h.k, h.row, key_first, a);
    load_tile<HDP>(m.v, h.v, h.row, key_first, a);
    Result<HDP> dk, dv;
    clear(dk);
    clear(dv);
    for (int i = 0; i < a.sharers; i++, h.q += a.HD) {
        const int head = place.head * a.sharers + i;
        const int64_t statistics = ((int64_t)b * a.NH + head) * a.T;
        for (int first = key_first; first < a.T; first += ROWS) {
            if (first_key_of_tile<ROWS>(a, h, first) >= key_first + ROWS) continue;  // out of sight
            __syncthreads();
            load_tile<HDP>(m.q, h.q, h.row, first, a);
            load_tile<HDP>(m.dout, a.dout + head_offset(a, b, head), h.C, first, a);
            load_rows<ROWS>(&m.rows, a, h, a.lse + statistics, a.delta + statistics, first);
            __syncthreads();
            backward_tile<HDP>(m, a, h, head, first, key_first);
            accumulate_product<HDP, true>(dv, m.probs, m.dout);
            accumulate_product<HDP, true>(dk, m.dscores, m.q);
        }
    }
    __syncthreads();
    store_result<HDP>(a.dqkv + (h.k - a.qkv), h.row, dk, key_first, a, m.scores);
    store_result<HDP>(a.dqkv + (h.v - a.qkv), h.row, dv, key_first, a, m.scores);
}

// --- launches ------------------------------------------------------------------------------------

template <int HDP> static unsigned blocks_of(Call *a) {
    a->tiles = (int)ceil_div64(a->T, Tile<HDP>::ROWS);
    return (unsigned)((int64_t)a->B * a->NH * a->tiles);
}

template <int HDP> static void launch_forward(Stream *s, Call a) {
    const unsigned blocks = blocks_of<HDP>(&a);
    allow_shared(s, attention_forward_kernel<HDP>, sizeof(ForwardShared<HDP>), "shared memory for attention");
    attention_forward_kernel<HDP>
        <<<blocks, Tile<HDP>::THREADS, sizeof(ForwardShared<HDP>), stream_handle(s)>>>(a);
    check_launch(s, "attention forward");
}

template <int HDP> static void launch_backward(Stream *s, Call a) {
    const size_t shared = sizeof(BackwardShared<HDP>);
    const unsigned blocks = blocks_of<HDP>(&a), key_blocks = blocks / (unsigned)a.sharers;
    const int64_t queries = (int64_t)a.B * a.T * a.NH;
    attention_delta_kernel<<<(unsigned)ceil_div64(queries, 256 / WARP), 256, 0, stream_handle(s)>>>(a);
    check_launch(s, "attention backward, sums over heads");
    allow_shared(s, attention_dq_kernel<HDP>, shared, "shared memory for attention");
    attention_dq_kernel<HDP><<<blocks, Tile<HDP>::THREADS, shared, stream_handle(s)>>>(a);
    check_launch(s, "attention backward, queries");
    allow_shared(s, attention_dkv_kernel<HDP>, shared, "shared memory for attention");
    attention_dkv_kernel<HDP><<<key_blocks, Tile<HDP>::THREADS, shared, stream_handle(s)>>>(a);
    check_launch(s, "attention backward, keys and values");
}

size_t attention_plain_workspace_bytes(int B, int T, int NH, int HD) {
    return (size_t)B * (size_t)NH * (size_t)T * sizeof(float);
}

static Call call_of(const Attention *a) {
    Call call = {*a, attention_scale(a), (float *)a->saved, (float *)a->workspace, 0, 1};
    call.groups = attention_groups(a);
    call.sharers = a->NH / call.groups;
    return call;
}

void attention_plain_forward(Stream *s, const Attention *a) {
    if (a->HD <= 64) return launch_forward<64>(s, call_of(a));
    if (a->HD <= 96) return launch_forward<96>(s, call_of(a));
    if (a->HD <= 128) return launch_forward<128>(s, call_of(a));
    launch_forward<256>(s, call_of(a));
}

void attention_plain_backward(Stream *s, const Attention *a) {
    if (a->HD <= 64) return launch_backward<64>(s, call_of(a));
    if (a->HD <= 96) return launch_backward<96>(s, call_of(a));
    if (a->HD <= 128) return launch_backward<128>(s, call_of(a));
    launch_backward<256>(s, call_of(a));
}

__global__ void store_seed_kernel(int64_t *seed_and_offset, int64_t seed, int64_t offset) {
    seed_and_offset[0] = seed;
    seed_and_offset[1] = offset;
}
void attention_store_seed(Stream *s, int64_t *seed_and_offset, int64_t seed, int64_t offset) {
    store_seed_kernel<<<1, 1, 0, stream_handle(s)>>>(seed_and_offset, seed, offset);
    check_launch(s, "attention dropout's seed");
}
