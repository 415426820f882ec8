// Device code that the CUDA kernels of the exact regime share: how groups lie on threads, the Hadamard transform across lanes, coding and decoding of
// 8 elements, segment lookup. Included by the kernels_cuda files; the numbers are codec.h's, to the bit.
//
// A thread holds runs of consecutive elements, each within one group and one tensor: runs of 8, a vector, or of 16 where fp32 values come from memory, so that 4
// or 2 lanes hold a Hadamard block and a warp's loads touch whole sectors; one run of 32 where codes come, so that what groups, tensors and addresses cost is paid
// once in 32 elements. One call of Philox serves 8. A tile is what one worker treats at a time: a warp where the group size is a power of two, not too large, a block
// for any other multiple of 32. Everything is measured in multiples of 32 elements: the lanes of such a block are live together and may exchange freely.
#pragma once
#include "llmc/cuda/common.cuh"
#include "sdp4bit/kernels.h"

enum { CODEC_THREADS = 256, CODEC_WARPS = CODEC_THREADS / WARP };
enum { WARP_SPAN = WARP * PACKED, BLOCK_SPAN = CODEC_THREADS * PACKED };  // elements between a thread's vectors: 256, 2048
enum { TILE_GROUPS = BLOCK_SPAN / HADAMARD_ORDER };                      // groups of a block's tile, at most: 64
static const uint32_t ALL_LANES = 0xFFFFFFFFu;

// Blocks of a grid that strides through work for so many threads: enough to fill the device several times over.
static inline unsigned stride_blocks(const Stream *s, int64_t threads) {
    int64_t blocks = ceil_div64(threads, CODEC_THREADS), most = (int64_t)s->device->multiprocessors * 16;
    return (unsigned)(blocks < most ? blocks : most);
}

// --- codecs at compile time --------------------------------------------------------------------------

// The table's rows as constants. There is no general case, so nothing without a row compiles.
template <Codec CODEC>
struct CodecRow;
#define CUDA_CODEC_ROW(ID, NAME, BITS_, LEVELS_)                                      \
    template <>                                                                       \
    struct CodecRow<CODEC_##ID> {                                                     \
        static constexpr int BITS = BITS_, LEVELS = LEVELS_;                          \
        static constexpr uint32_t SIGN = LEVELS_ ? 1u << (BITS_ - 1) : 0;             \
        static constexpr bool GROUPED = LEVELS > 0, FINE = LEVELS < 64;               \
    };
ALL_CODECS(CUDA_CODEC_ROW)

// A codec as an argument: launch(CodecValue<CODEC>()) tells a lambda its codec at compile time.
template <Codec CODEC>
struct CodecValue {
    static constexpr Codec VALUE = CODEC;
};
#define CUDA_CODEC_CASE(ID, NAME, BITS, LEVELS) \
    case CODEC_##ID: launch(CodecValue<CODEC_##ID>()); return;
// Calls launch with the codec, which for with_plain_codec is a plain one.
template <class Launch>
static void with_codec(Codec codec, Launch launch) {
    switch (codec) { ALL_CODECS(CUDA_CODEC_CASE) }
    stop_here();
}
template <class Launch>
static void with_plain_codec(Codec codec, Launch launch) {
    with_codec(codec, [&](auto value) {
        if constexpr (!CodecRow<decltype(value)::VALUE>::GROUPED) launch(value);
        else stop_here();
    });
}

// --- which element is whose --------------------------------------------------------------------------

// How a group lies on the threads. RUNS: of a thread, SPAN elements apart. RUN: elements of a run, 8, 16 or 32. LANES: neighbouring threads of a warp that share a
// group: 1 to 32 within each run; above 32 the group spans all RUNS of the whole warp; 0 means that the worker is a block. PLAIN: a codec without groups.
template <int RUNS_, int RUN_, int LANES_, bool PLAIN_ = false>
struct Shape {
    static constexpr int RUNS = RUNS_, RUN = RUN_, LANES = LANES_;
    static constexpr bool PLAIN = PLAIN_, WARP_TILES = LANES > 0;
    static constexpr int SPAN = (WARP_TILES ? (int)WARP : (int)CODEC_THREADS) * RUN;
    static constexpr int GROUPS = LANES > 0 && LANES <= WARP ? RUNS : 1;  // different groups among a thread's runs: 1 or 2
};
typedef Shape<2, PACKED, 4, true> PlainShape;

// offset / group for offsets below 2^36 that lie in 32-element steps, by multiplication: with d = group / 32 and 2^bits the power of two from d up,
// magic = ceil(2^(31+bits) / d) is below 2^32, and its error times n is below 2^(31+bits) for n < 2^31, so the quotient is exact.
struct GroupIndex {
    uint32_t magic;
    int bits;
};
static inline GroupIndex group_index(int group) {
    uint64_t d = group >= HADAMARD_ORDER ? (uint64_t)group / HADAMARD_ORDER : 1;
    GroupIndex g = {0, 0};
    while ((1ull << g.bits) < d) g.bits++;
    g.magic = (uint32_t)(((1ull << (31 + g.bits)) + d - 1) / d);
    return g;
}
static __device__ __forceinline__ uint32_t group_of(GroupIndex g, int64_t offset) { return __umulhi((uint32_t)(offset >> 5) << 1, g.magic) >> g.bits; }

// The work of one kernel on slices of n elements: worker w treats the tiles [w * per_worker, (w + 1) * per_worker).
struct Tiles {
    int64_t n;
    int tile;            // elements
    int per_worker;
    int group, groups;   // the group size; groups of a tile
    GroupIndex index;
    bool warp_in_group;  // every warp's elements of a block tile belong to one group
};

// group: ignored by plain codecs. slices: gridDim.y. First come blocks to fill the device several times over; then a worker keeps neighbouring tiles, which spares lookups.
template <class S>
static Tiles make_tiles(const Device *device, int64_t n, int slices, int group) {
    Tiles t;
    t.n = n;
    if (S::PLAIN) group = HADAMARD_ORDER;
    t.group = group;
    t.tile = S::WARP_TILES ? S::RUNS * S::SPAN : group > BLOCK_SPAN ? group : BLOCK_SPAN / group * group;
    t.groups = t.tile / group;
    t.index = group_index(group);
    t.warp_in_group = group % WARP_SPAN == 0;
    int64_t per_block = (int64_t)t.tile * (S::WARP_TILES ? CODEC_WARPS : 1);
    int64_t blocks = ceil_div64(n, per_block) * slices, wanted = (int64_t)device->multiprocessors * 16;
    int64_t most = 8 * BLOCK_SPAN / per_block > 1 ? 8 * BLOCK_SPAN / per_block : 1;
    t.per_worker = (int)(blocks / wanted < 1 ? 1 : blocks / wanted > most ? most : blocks / wanted);
    return t;
}
template <class S>
static dim3 tile_grid(Tiles t, int slices) {
    int64_t per_block = (int64_t)t.tile * t.per_worker * (S::WARP_TILES ? CODEC_WARPS : 1);
    return dim3((unsigned)ceil_div64(t.n, per_block), (unsigned)slices);
}

// First element of this thread's worker; of this thread inside a tile.
template <class S>
static __device__ __forceinline__ int64_t worker_start(const Tiles &t) {
    int64_t worker = S::WARP_TILES ? (int64_t)blockIdx.x * CODEC_WARPS + threadIdx.x / WARP : blockIdx.x;
    return worker * t.per_worker * t.tile;
}
template <class S>
static __device__ __forceinline__ int thread_start(void) {
    return (int)(S::WARP_TILES ? threadIdx.x % WARP : threadIdx.x) * S::RUN;
}
// t.tile and t.groups, known at compile time for a warp's tiles.
template <class S>
static __device__ __forceinline__ int tile_size(const Tiles &t) {
    if constexpr (S::WARP_TILES) return S::RUNS * S::SPAN;
    else return t.tile;
}
template <class S>
static __device__ __forceinline__ int tile_groups(const Tiles &t) {
    if constexpr (S::WARP_TILES) return S::RUNS * S::SPAN / (S::LANES * S::RUN);
    else return t.groups;
}
// Elements of a tile before which `rest` are left of the slice.
template <class S>
static __device__ __forceinline__ int tile_elements(const Tiles &t, int64_t rest) { return rest < tile_size<S>(t) ? (int)rest : tile_size<S>(t); }
// Does run v of this thread exist in a tile of that many elements? Always where a tile is one group of a warp, since slices are whole groups.
template <class S>
static __device__ __forceinline__ bool run_live(int elements, int v) {
    if constexpr (S::LANES > WARP) return true;
    return thread_start<S>() + v * S::SPAN < elements;
}

// Calls launch(Shape) with the shape that serves a group of 1024, of more, or of another size than a power of two; sizes above LARGEST_GROUP are refused by the options.
template <class Launch>
static void with_wide_group(int group, Launch launch) {
    if (group == 1024) launch(Shape<4, PACKED, 128>());
    else if (group <= BLOCK_SPAN) launch(Shape<1, PACKED, 0>());
    else if (group <= 2 * BLOCK_SPAN) launch(Shape<2, PACKED, 0>());
    else if (group <= 4 * BLOCK_SPAN) launch(Shape<4, PACKED, 0>());
    else launch(Shape<8, PACKED, 0>());
}
// The same for every group size, in runs of 8.
template <class Launch>
static void with_group(int group, Launch launch) {
    if (group == 32) launch(Shape<2, PACKED, 4>());
    else if (group == 64) launch(Shape<2, PACKED, 8>());
    else if (group == 128) launch(Shape<2, PACKED, 16>());
    else if (group == 256) launch(Shape<2, PACKED, 32>());
    else if (group == 512) launch(Shape<2, PACKED, 64>());
    else with_wide_group(group, launch);
}

// --- 8 floats per lane, whole sectors per access -----------------------------------------------------------------------------------

// A lane's 32 bytes are a sector of memory. Two lanes swap halves, so that each 16-byte access of the pair covers a sector, not two halves of
// sectors. The whole warp calls; dead lanes touch no memory.
static __device__ __forceinline__ float4 swap_with_neighbour(float4 mine) {
    return make_float4(__shfl_xor_sync(ALL_LANES, mine.x, 1), __shfl_xor_sync(ALL_LANES, mine.y, 1), __shfl_xor_sync(ALL_LANES, mine.z, 1),
                       __shfl_xor_sync(ALL_LANES, mine.w, 1));
}
static __device__ __forceinline__ void store_pairwise(float *p, const float x[PACKED], bool live) {
    bool odd = threadIdx.x & 1;
    float4 *pair = reinterpret_cast<float4 *>(odd ? p - PACKED : p) + odd;
    float4 low = make_float4(x[0], x[1], x[2], x[3]), high = make_float4(x[4], x[5], x[6], x[7]);
    float4 got = swap_with_neighbour(odd ? low : high);
    if (!live) return;
    pair[0] = odd ? got : low;
    pair[2] = odd ? high : got;
}
// Read-only data of this kernel, through the texture path; the two halves of a sector meet in the L1. x: 8 elements.
static __device__ __forceinline__ void load_read_only(const float *p, float x[PACKED]) {
    float4 low = __ldg(reinterpret_cast<const float4 *>(p)), high = __ldg(reinterpret_cast<const float4 *>(p) + 1);
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w, x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

// --- NaN as CPUs pass it on --------------------------------------------------------------------------------------------------------

// IEEE 754 leaves a NaN's sign and payload open, and GPUs answer 0x7FFFFFFF. Values that travel unquantised are compared byte for byte with the CPU's,
// where a NaN operand passes through, made quiet, and inf - inf is 0xFFC00000.
static __device__ __forceinline__ float quiet_nan_of(float x) { return f32_from_bits(f32_bits(x) | 0x00400000u); }
static __device__ __forceinline__ float scale_plain(float x, float scale) { return x != x ? quiet_nan_of(x) : f32_mul(x, scale); }
static __device__ __forceinline__ float add_plain(float a, float b) {
    float sum = f32_add(a, b);
    if (sum != sum) sum = a != a ? quiet_nan_of(a) : b != b ? quiet_nan_of(b) : f32_from_bits(0xFFC00000u);
    return sum;
}

// --- the Hadamard transform ----------------------------------------------------------------------------------------------------------

// hadamard32 on neighbouring lanes of RUN elements each: for runs of 8 strides 1, 2, 4 inside the thread, 8 and 16 across lanes; for runs of 16 only 16 across
// lanes. In the lanes' stages own * 1 or own * -1 is exact, so the fused operation rounds once, just as the sum or difference does.
template <int RUN>
static __device__ __forceinline__ void hadamard_lanes(float (&x)[RUN]) {
#pragma unroll
    for (int stride = 1; stride < RUN; stride *= 2) {
#pragma unroll
        for (int i = 0; i < RUN; i++) {
            if (i & stride) continue;
            float lower = x[i], upper = x[i + stride];
            x[i] = f32_add(lower, upper);
            x[i + stride] = f32_sub(lower, upper);
        }
    }
#pragma unroll
    for (int lanes = 1; lanes * RUN < HADAMARD_ORDER; lanes *= 2) {
        float sign = threadIdx.x & lanes ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < RUN; i++) x[i] = __fmaf_rn(x[i], sign, __shfl_xor_sync(ALL_LANES, x[i], lanes));
    }
}

// tree_sum32 of the squares of 4 neighbouring lanes; every one of them gets it.
static __device__ __forceinline__ float square_leaf_lanes(const float x[PACKED]) {
    float sum[PACKED];
#pragma unroll
    for (int i = 0; i < PACKED; i++) sum[i] = f32_mul(x[i], x[i]);
#pragma unroll
    for (int stride = 1; stride < PACKED; stride *= 2) {
#pragma unroll
        for (int i = 0; i < PACKED; i += 2 * stride) sum[i] = f32_add(sum[i], sum[i + stride]);
    }
    sum[0] = f32_add(sum[0], __shfl_xor_sync(ALL_LANES, sum[0], 1));
    return f32_add(sum[0], __shfl_xor_sync(ALL_LANES, sum[0], 2));
}

// --- the largest magnitude of each group ---------------------------------------------------------------------------------------------

// max |x| with NaN winning, so its bits order like f32_bits(x) & 0x7FFFFFFF as far as group_scale can tell.
static __device__ __forceinline__ float max_magnitude(float a, float b) {
    float m;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(fabsf(a)), "f"(fabsf(b)));
    return m;
}

// The maxima of a block's groups: three sets in turn, so that one barrier per tile is enough: set turn + 2 is cleared after the barrier of `turn`, which
// every reader of its last use has passed, and used after the barrier of turn + 1.
struct BlockMaxima {
    uint32_t set[3][TILE_GROUPS];
};
template <class S>
static __device__ __forceinline__ void clear_maxima(BlockMaxima *shared) {
    if constexpr (!S::WARP_TILES) {
        for (int i = threadIdx.x; i < 3 * TILE_GROUPS; i += CODEC_THREADS) shared->set[i / TILE_GROUPS][i % TILE_GROUPS] = 0;
        __syncthreads();
    }
}

// largest[i]: of the i-th group among this thread's runs. Elements that do not exist are 0 in a block's tile. turn: 0, 1, ... tile by tile. The whole worker calls.
template <class S>
static __device__ __forceinline__ void group_maxima(uint32_t (&largest)[S::GROUPS], const float (&x)[S::RUNS][S::RUN], const Tiles &t, BlockMaxima *shared,
                                                    int turn) {
    float m[S::GROUPS];
#pragma unroll
    for (int v = 0; v < S::RUNS; v++) {
        float run = max_magnitude(x[v][0], x[v][1]);
#pragma unroll
        for (int i = 2; i < S::RUN; i++) run = max_magnitude(run, x[v][i]);
        int g = S::GROUPS == 1 ? 0 : v;
        m[g] = v > g ? max_magnitude(m[g], run) : run;
    }
#pragma unroll
    for (int g = 0; g < S::GROUPS; g++) largest[g] = f32_bits(m[g]);
    if constexpr (S::LANES >= WARP) {
#pragma unroll
        for (int g = 0; g < S::GROUPS; g++) largest[g] = __reduce_max_sync(ALL_LANES, largest[g]);
    } else if constexpr (S::LANES > 0) {
#pragma unroll
        for (int g = 0; g < S::GROUPS; g++) {
#pragma unroll
            for (int lanes = 1; lanes < S::LANES; lanes *= 2) largest[g] = max(largest[g], __shfl_xor_sync(ALL_LANES, largest[g], lanes));
        }
    } else {
        int group = S::RUNS == 1 ? (int)group_of(t.index, thread_start<S>()) : 0;
        if (t.warp_in_group) {
            largest[0] = __reduce_max_sync(ALL_LANES, largest[0]);
            if (threadIdx.x % WARP == 0) atomicMax(&shared->set[turn % 3][group], largest[0]);
        } else {
            largest[0] = max(largest[0], __shfl_xor_sync(ALL_LANES, largest[0], 1));
            largest[0] = max(largest[0], __shfl_xor_sync(ALL_LANES, largest[0], 2));
            if (threadIdx.x % 4 == 0) atomicMax(&shared->set[turn % 3][group], largest[0]);
        }
        __syncthreads();
        largest[0] = shared->set[turn % 3][group];
        if (threadIdx.x < TILE_GROUPS) shared->set[(turn + 2) % 3][threadIdx.x] = 0;
    }
}

// group_scale of GROUPS groups with one division instead of 2 * GROUPS: even lanes divide for a scale, odd ones for its inverse, and with two groups a
// lane's second bit names the group. 2 * GROUPS neighbouring lanes always share their groups. scale.lift is 0 for a group with a non-finite value: zero codes.
template <int GROUPS>
static __device__ __forceinline__ void group_scales(GroupScale (&scale)[GROUPS], const uint32_t (&largest)[GROUPS], int levels) {
    static_assert(GROUPS <= 2, "4 lanes divide for two groups");
    int first = threadIdx.x % WARP / (2 * GROUPS) * (2 * GROUPS);  // lane
    bool odd = threadIdx.x & 1;
    uint32_t mine = threadIdx.x & 2 ? largest[GROUPS - 1] : largest[0];
    float m = mine - 0x00800000u < 0x7F000000u ? f32_from_bits(mine) : 1.0f;  // neither below the normal range nor infinite or NaN
    float lifted = mine < LIFT_BELOW ? f32_mul(m, LIFT) : m;
    float quotient = f32_div(odd ? (float)levels : m, odd ? lifted : (float)levels);
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        float sent = __shfl_sync(ALL_LANES, quotient, first + 2 * g), inverse = __shfl_sync(ALL_LANES, quotient, first + 2 * g + 1);
        bool finite = largest[g] < 0x7F800000u, normal = finite && largest[g] >= 0x00800000u;
        scale[g].scale = normal ? sent : finite ? 0.0f : f32_from_bits(0x7FC00000u);
        scale[g].inverse = normal ? inverse : 0.0f;
        scale[g].lift = largest[g] >= LIFT_BELOW ? finite ? 1.0f : 0.0f : normal ? LIFT : 1.0f;
    }
}
// The same for a lane that shares its group with no other.
static __device__ __forceinline__ void group_scale_alone(GroupScale &scale, uint32_t largest, int levels) {
    scale = group_scale(largest, levels);
    if (largest >= 0x7F800000u) scale.lift = 0.0f;
}

// --- codes -----------------------------------------------------------------------------------------------------------------------------

// Adding a number near 1.5 * 2^23 to |v| < 2^22 leaves v, rounded as the addition rounds, in the low mantissa bits: rintf and floorf without the slow
// conversion unit. A code leaves code_nearest and code_stochastic as CODE_BITS + q.
#define CODE_BITS 0x4B400000u
#define CODE_SHIFT 12582912.0f

// Clamping to -L..L is left out because it never acts: |v| <= L or one step of fp32 above it (|x| <= m, and L / m is off by at most 2^-24 of itself),
// where rint gives L, and v + u rounds to the grid of u, below L + 1. test/unit/sdp4bit/test_codec_bounds.c tries every mantissa.
static __device__ __forceinline__ void code_vector_nearest(uint32_t code[PACKED], const float v[PACKED]) {
#pragma unroll
    for (int i = 0; i < PACKED; i++) code[i] = f32_bits(f32_add(v[i], CODE_SHIFT));
}
// A byte permutation puts an element's 16 bits below the upper half of the offset's float; the sum v + u then keeps its whole part just above 16 bits of
// fraction (FINE: the codec has at most 63 levels) or 15. FINE needs no floor: byte 2 of the sum is 64 + its code.
template <bool FINE>
static __device__ __forceinline__ void code_vector_stochastic(uint32_t code[PACKED], const float v[PACKED], Philox4 bits) {
    const uint32_t lift = FINE ? STOCHASTIC_FINE : STOCHASTIC_COARSE;
#pragma unroll
    for (int i = 0; i < PACKED; i++) {
        uint32_t word = FINE ? bits.v[i / 2] : bits.v[i / 2] & 0x7FFF7FFFu;
        float sum = f32_add(v[i], f32_from_bits(__byte_perm(word, lift, i & 1 ? 0x7632 : 0x7610)));
        code[i] = f32_bits(FINE ? sum : __fadd_rd(sum, CODE_SHIFT - 384.0f));
    }
}

// Byte BYTE of four words.
template <int BYTE>
static __device__ __forceinline__ uint32_t pick_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    const uint32_t pair = BYTE | (4 + BYTE) << 4;
    return __byte_perm(__byte_perm(a, b, pair), __byte_perm(c, d, pair), 0x5410);
}
// The low nibbles of byte BYTE of eight words: codes of either sign plus a multiple of 16.
template <int BYTE>
static __device__ __forceinline__ uint32_t pick_nibbles(const uint32_t code[PACKED]) {
    uint32_t even = pick_bytes<BYTE>(code[0], code[2], code[4], code[6]), odd = pick_bytes<BYTE>(code[1], code[3], code[5], code[7]);
    return (even & 0x0F0F0F0Fu) | (odd << 4 & 0xF0F0F0F0u);
}

// Stores the first BYTES of the words in the widest accesses that their number allows. `to` is aligned
// to such an access, because slices begin on whole blocks of 32 elements.
template <int BYTES, int WORDS>
static __device__ __forceinline__ void store_words(uint8_t *to, const uint32_t (&word)[WORDS]) {
    static_assert(BYTES <= 4 * WORDS && BYTES % 2 == 0, "codes of 8 elements are whole half words");
    if constexpr (BYTES % 16 == 0) {
#pragma unroll
        for (int i = 0; i < BYTES / 16; i++) {
            const uint32_t *w = word + 4 * i;
            reinterpret_cast<uint4 *>(to)[i] = make_uint4(w[0], w[1], w[2], w[3]);
        }
    } else if constexpr (BYTES % 8 == 0) {
#pragma unroll
        for (int i = 0; i < BYTES / 8; i++) {
            reinterpret_cast<uint2 *>(to)[i] = make_uint2(word[2 * i], word[2 * i + 1]);
        }
    } else if constexpr (BYTES % 4 == 0) {
#pragma unroll
        for (int i = 0; i < BYTES / 4; i++) reinterpret_cast<uint32_t *>(to)[i] = word[i];
    } else {
#pragma unroll
        for (int i = 0; i < BYTES / 2; i++) {
            reinterpret_cast<uint16_t *>(to)[i] = (uint16_t)(word[i / 2] >> (16 * (i & 1)));
        }
    }
}

// 8 values of a plain codec. The whole warp calls.
template <Codec CODEC>
static __device__ __forceinline__ void store_plain_vector(uint8_t *to, int64_t offset, const float x[PACKED], bool live) {
    static_assert(!CodecRow<CODEC>::GROUPED, "a plain codec");
    if constexpr (CodecRow<CODEC>::BITS == 32) {
        store_pairwise(reinterpret_cast<float *>(to) + offset, x, live);
    } else if (live) {
        uint32_t word[4];
#pragma unroll
        for (int i = 0; i < 4; i++) word[i] = (uint32_t)bf16_from_float(x[2 * i]) | (uint32_t)bf16_from_float(x[2 * i + 1]) << 16;
        *reinterpret_cast<uint4 *>(reinterpret_cast<uint16_t *>(to) + offset) = make_uint4(word[0], word[1], word[2], word[3]);
    }
}
// One value of a plain codec, for the tails.
template <Codec CODEC>
static __device__ __forceinline__ void store_plain_value(uint8_t *to, int64_t at, float x) {
    static_assert(!CodecRow<CODEC>::GROUPED, "a plain codec");
    if constexpr (CodecRow<CODEC>::BITS == 32) reinterpret_cast<float *>(to)[at] = x;
    else reinterpret_cast<uint16_t *>(to)[at] = bf16_from_float(x);
}
template <Codec CODEC>
static __device__ __forceinline__ float load_plain_value(const uint8_t *from, int64_t at) {
    static_assert(!CodecRow<CODEC>::GROUPED, "a plain codec");
    if constexpr (CodecRow<CODEC>::BITS == 32) return __ldg(reinterpret_cast<const float *>(from) + at);
    else return bf16_to_float(__ldg(reinterpret_cast<const uint16_t *>(from) + at));
}

// --- decoding ----------------------------------------------------------------------------------------------------------------------------

// The bits of N elements, a multiple of 8, as they travel.
template <Codec CODEC, int N = PACKED>
struct Raw {
    static constexpr int BYTES = N * CodecRow<CODEC>::BITS / 8, WORDS = (BYTES + 3) / 4;
    uint32_t word[WORDS];
};
// codes: of the first element, aligned as store_words has it.
template <Codec CODEC, int N = PACKED>
static __device__ __forceinline__ Raw<CODEC, N> load_raw(const uint8_t *codes) {
    constexpr int BYTES = Raw<CODEC, N>::BYTES;
    Raw<CODEC, N> r;
    if constexpr (BYTES % 16 == 0) {
#pragma unroll
        for (int i = 0; i < BYTES / 16; i++) {
            uint4 w = __ldg(reinterpret_cast<const uint4 *>(codes) + i);
            r.word[4 * i] = w.x, r.word[4 * i + 1] = w.y, r.word[4 * i + 2] = w.z, r.word[4 * i + 3] = w.w;
        }
    } else if constexpr (BYTES % 8 == 0) {
#pragma unroll
        for (int i = 0; i < BYTES / 8; i++) {
            uint2 w = __ldg(reinterpret_cast<const uint2 *>(codes) + i);
            r.word[2 * i] = w.x, r.word[2 * i + 1] = w.y;
        }
    } else if constexpr (BYTES % 4 == 0) {
#pragma unroll
        for (int i = 0; i < BYTES / 4; i++) r.word[i] = __ldg(reinterpret_cast<const uint32_t *>(codes) + i);
    } else {
#pragma unroll
        for (int i = 0; i < BYTES / 2; i++) {
            uint32_t half = __ldg(reinterpret_cast<const uint16_t *>(codes) + i);
            r.word[i / 2] = i & 1 ? r.word[i / 2] | half << 16 : half;
        }
    }
    return r;
}
// Code i with its sign bit flipped, which is the code + SIGN; for codes that may cross words.
template <Codec CODEC, int N>
static __device__ __forceinline__ uint32_t flipped_code(const Raw<CODEC, N> &r, int i) {
    constexpr int BITS = CodecRow<CODEC>::BITS;
    const int low = i * BITS % 32;
    uint32_t code = r.word[i * BITS / 32] >> low;
    if (low + BITS > 32) code |= r.word[i * BITS / 32 + 1] << (32 - low);
    return (code & (2 * CodecRow<CODEC>::SIGN - 1)) ^ CodecRow<CODEC>::SIGN;
}

// x = (float)code, or the value itself. A code with its sign bit flipped is the code + SIGN. Put into
// the mantissa of a power of two it makes an exact float, from which one exact subtraction leaves the
// code. Codes of 4 and of 8 bits have ways of their own, with fewer instructions.
template <Codec CODEC, int N>
static __device__ __forceinline__ void decode_raw(float (&x)[N], const Raw<CODEC, N> &r) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        constexpr int BITS = CodecRow<CODEC>::BITS;
        if constexpr (BITS == 4) {
            // Nibble i % 4 of a half at bits 4k .. 4k+3 of a float whose last bit is worth 16^-k.
            const int k = i % 4;
            const uint32_t power = (uint32_t)(127 + 23 - 4 * k) << 23;
            uint32_t flipped = (r.word[i / 8] ^ 0x88888888u) >> (16 * (i / 4 % 2));
            x[i] = f32_sub(f32_from_bits((flipped & (0xFu << (4 * k))) | power), f32_from_bits(power) + 8.0f);
        } else if constexpr (BITS == 8) {
            uint32_t flipped = r.word[i / 4] ^ 0x80808080u;
            x[i] = f32_sub(f32_from_bits(__byte_perm(flipped, 0x4B000000u, 0x7640 + i % 4)), 8388608.0f + 128.0f);
        } else if constexpr (CodecRow<CODEC>::GROUPED) {
            x[i] = f32_sub(f32_from_bits(flipped_code(r, i) | 0x4B000000u), 8388608.0f + (float)CodecRow<CODEC>::SIGN);
        } else if constexpr (BITS == 16) {
            x[i] = f32_from_bits(i & 1 ? r.word[i / 2] & 0xFFFF0000u : r.word[i / 2] << 16);
        } else {
            x[i] = f32_from_bits(r.word[i]);
        }
    }
}

// u = code + SIGN as a multiple of 2^-133: its bits at 16 and up of a float without exponent, whose last
// bit is worth 2^-149. Nibbles in the upper half of a byte come out 16 times as large. Then
// u * (scale * 2^133) - SIGN * scale, in one operation, rounds code * scale once, as a multiplication of
// the code would, and needs no subtraction before. It is exact for every scale below 2^-5, denormal ones
// too. Only -0 would be 0, but a scale of 0 has no codes but 0.
#define SMALL_SCALE 0.03125f
// word ^ mask, which the compiler cannot move behind the shifts and masks of every code.
static __device__ __forceinline__ uint32_t flip_once(uint32_t word, uint32_t mask) {
    uint32_t flipped;
    asm("xor.b32 %0, %1, %2;" : "=r"(flipped) : "r"(word), "r"(mask));
    return flipped;
}
template <Codec CODEC, int N>
static __device__ __forceinline__ void decode_biased(float (&u)[N], const Raw<CODEC, N> &r) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        if constexpr (CodecRow<CODEC>::BITS == 4) {
            uint32_t flipped = flip_once(r.word[i / 8], 0x88888888u);
            const int byte = i % 8 / 2;
            uint32_t placed = byte < 2 ? flipped << (16 - 8 * byte) : flipped >> (8 * byte - 16);
            u[i] = f32_from_bits(placed & (i & 1 ? 0x00F00000u : 0x000F0000u));
        } else if constexpr (CodecRow<CODEC>::BITS == 8) {
            u[i] = f32_from_bits(__byte_perm(r.word[i / 4] ^ 0x80808080u, 0, 0x4044 | (i % 4) << 8));
        } else {
            u[i] = f32_from_bits(flipped_code(r, i) << 16);
        }
    }
}
// x = code * scale from those.
template <Codec CODEC, int N>
static __device__ __forceinline__ void scale_biased(float (&x)[N], const float (&u)[N], float scale) {
    const float lift = 0x1p127f, offset = f32_mul(scale, -(float)CodecRow<CODEC>::SIGN);
    float even = f32_mul(f32_mul(scale, lift), 64.0f);
    float odd = CodecRow<CODEC>::BITS == 4 ? f32_mul(f32_mul(scale, lift), 4.0f) : even;
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = __fmaf_rn(u[i], i & 1 ? odd : even, offset);
}

// --- random bits -----------------------------------------------------------------------------------------------------------------------------

// rounding_bits with everything that the elements have in common worked out on the host: the key schedule, and round 1 of the half of the counter
// that holds the step. As a kernel parameter it is read from the constant bank as an operand, at no cost.
struct RoundingSchedule {
    uint32_t first0, first1, first2;  // round 1: high half of the step's product with key 0, its low half, the source with key 1
    uint32_t key0[ROUNDING_ROUNDS - 1], key1[ROUNDING_ROUNDS - 1];  // of the other rounds
};
static inline RoundingSchedule rounding_schedule(RoundingKey key) {
    RoundingSchedule r;
    r.first0 = mul_hi32(PHILOX_M1, key.step) ^ key.seed;
    r.first1 = PHILOX_M1 * key.step;
    r.first2 = key.source ^ key.purpose;
    for (uint32_t round = 1; round < ROUNDING_ROUNDS; round++) {
        r.key0[round - 1] = key.seed + round * PHILOX_W0;
        r.key1[round - 1] = key.purpose + round * PHILOX_W1;
    }
    return r;
}
static __device__ __forceinline__ Philox4 scheduled_bits(const RoundingSchedule &r, uint64_t block) {
    uint64_t product = (uint64_t)PHILOX_M0 * (uint32_t)block;
    uint32_t c0 = r.first0 ^ (uint32_t)(block >> 32), c1 = r.first1, c2 = (uint32_t)(product >> 32) ^ r.first2, c3 = (uint32_t)product;
#pragma unroll
    for (int round = 0; round < ROUNDING_ROUNDS - 1; round++) {
        uint64_t product0 = (uint64_t)PHILOX_M0 * c0, product1 = (uint64_t)PHILOX_M1 * c2;
        c0 = (uint32_t)(product1 >> 32) ^ c1 ^ r.key0[round];
        c1 = (uint32_t)product1;
        c2 = (uint32_t)(product0 >> 32) ^ c3 ^ r.key1[round];
        c3 = (uint32_t)product0;
    }
    return Philox4{{c0, c1, c2, c3}};
}

// --- segments ------------------------------------------------------------------------------------------------------------------------------

// The tensor that owns a position of a matrix part, kept from one lookup to the next: positions of a thread go up, and tensors are long.
struct SegmentCursor {
    int64_t next;         // the first position that is another tensor's; pads belong to the tensor before them
    int64_t end;          // of its elements, before the pads
    int64_t shift;        // a position's logical offset minus the position
};
static __device__ __forceinline__ SegmentCursor no_segment(void) { return SegmentCursor{0, 0, 0}; }
static __device__ __forceinline__ void seek_segment(SegmentCursor &c, const SegmentTable &table, int64_t position) {
    if (position < c.next) return;
    int lo = 0, hi = table.count - 1;
    while (lo < hi) {
        int middle = (lo + hi + 1) / 2;
        if (__ldg(&table.segment[middle].start) <= position) lo = middle;
        else hi = middle - 1;
    }
    int64_t start = __ldg(&table.segment[lo].start);
    c.end = start + __ldg(&table.segment[lo].numel);
    c.shift = __ldg(&table.segment[lo].logical) - start;
    c.next = lo + 1 < table.count ? __ldg(&table.segment[lo + 1].start) : INT64_MAX;
}

// --- what a worker writes --------------------------------------------------------------------------------------------------------------------

// What a thread needs to code its runs of the current tile; all of it moves on from tile to tile, so that no address is worked out twice.
struct TileWriter {
    uint8_t *codes;     // of its first run
    float *scales;      // of that run's group
    int64_t position;   // of its first element, in the bucket's matrix part
    bool leads;         // it is the first thread of a group, which stores the scale
    bool stochastic;
};

// codes, scales: of a slice whose first element has that position. tile: the first one, as an offset in the slice.
template <class S, Codec CODEC>
static __device__ __forceinline__ TileWriter make_writer(uint8_t *codes, float *scales, Rounding rounding, int64_t position,
                                                         const Tiles &t, int64_t tile) {
    int start = thread_start<S>(), group = S::WARP_TILES ? start / (S::LANES * S::RUN) : (int)group_of(t.index, start);
    int64_t first = tile + start;
    TileWriter w;
    w.stochastic = rounding == ROUND_STOCHASTIC;
    w.codes = codes + first * CodecRow<CODEC>::BITS / 8;
    w.scales = scales + tile / t.group + group;
    w.position = position + first;
    w.leads = S::WARP_TILES ? start % (S::LANES * S::RUN) == 0 : group * t.group == start;
    return w;
}
template <class S, Codec CODEC>
static __device__ __forceinline__ void next_tile(TileWriter &w, const Tiles &t) {
    w.codes += tile_size<S>(t) / PACKED * CodecRow<CODEC>::BITS;
    w.scales += tile_groups<S>(t);
    w.position += tile_size<S>(t);
}

// Puts a vector's codes, as code_vector_nearest and code_vector_stochastic leave them, into the words of a
// run as its i-th vector. Codes of 4 and of 8 bits have ways of their own.
template <Codec CODEC, bool STOCHASTIC, int WORDS>
static __device__ __forceinline__ void put_codes(uint32_t (&word)[WORDS], int i, const uint32_t (&code)[PACKED]) {
    constexpr int BITS = CodecRow<CODEC>::BITS;
    constexpr bool ABOVE = STOCHASTIC && CodecRow<CODEC>::FINE;  // byte 2 is 64 + the code
    if constexpr (BITS == 4) {
        word[i] = pick_nibbles<ABOVE ? 2 : 0>(code);
    } else if constexpr (BITS == 8 && !ABOVE) {
        word[2 * i] = pick_bytes<0>(code[0], code[1], code[2], code[3]);
        word[2 * i + 1] = pick_bytes<0>(code[4], code[5], code[6], code[7]);
    } else {
#pragma unroll
        for (int e = 0; e < PACKED; e++) {
            const int at = (i * PACKED + e) * BITS, low = at % 32;
            uint32_t q = (ABOVE ? (code[e] >> 16) - 64 : code[e]) & (2 * CodecRow<CODEC>::SIGN - 1);
            word[at / 32] |= q << low;
            if (low + BITS > 32) word[at / 32 + 1] |= q >> (32 - low);
        }
    }
}

// The codes of one run: v = x * inverse, rounded, eight at a time. block: of the run's first eight random numbers; a run of 16 or 32 starts at a multiple of 2 or 4.
// halfway() is called when half of x is no longer needed.
template <Codec CODEC, bool STOCHASTIC, int RUN, class Halfway>
static __device__ __forceinline__ void code_values(uint8_t *to, const float (&x)[RUN], float inverse, uint64_t block,
                                                   const RoundingSchedule &schedule, bool live, Halfway halfway) {
    constexpr int BYTES = RUN * CodecRow<CODEC>::BITS / 8;
    uint32_t word[(BYTES + 3) / 4] = {};
#pragma unroll
    for (int i = 0; i < RUN / PACKED; i++) {
        float v[PACKED];
        uint32_t code[PACKED];
        if (i == RUN / PACKED / 2) halfway();
#pragma unroll
        for (int e = 0; e < PACKED; e++) v[e] = f32_mul(x[i * PACKED + e], inverse);
        if constexpr (STOCHASTIC) code_vector_stochastic<CodecRow<CODEC>::FINE>(code, v, scheduled_bits(schedule, block | i));
        else code_vector_nearest(code, v);
        put_codes<CODEC, STOCHASTIC>(word, i, code);
    }
    if (live) store_words<BYTES>(to, word);
}
// The same for a run whose first element lies at `position`.
template <Codec CODEC, bool STOCHASTIC, int RUN>
static __device__ __forceinline__ void code_run(uint8_t *to, const float (&x)[RUN], float inverse, int64_t position, SegmentCursor &segment, const SegmentTable &table,
                                                const RoundingSchedule &schedule) {
    uint64_t block = 0;
    if constexpr (STOCHASTIC) {
        seek_segment(segment, table, position);
        block = (uint64_t)(position + segment.shift) / PACKED;
    }
    code_values<CODEC, STOCHASTIC>(to, x, inverse, block, schedule, true, [] {});
}

// The runs of a tile with their groups' scales.
template <class S, Codec CODEC, bool STOCHASTIC>
static __device__ __forceinline__ void code_tile(const TileWriter &w, const float (&x)[S::RUNS][S::RUN], const GroupScale (&scale)[S::GROUPS], int elements,
                                                 SegmentCursor &segment, const SegmentTable &table, const RoundingSchedule &schedule) {
#pragma unroll
    for (int v = 0; v < S::RUNS; v++) {
        if (!run_live<S>(elements, v)) continue;
        const GroupScale &g = scale[S::GROUPS == 1 ? 0 : v];
        uint8_t *codes = w.codes + v * S::SPAN / PACKED * CodecRow<CODEC>::BITS;
        code_run<CODEC, STOCHASTIC>(codes, x[v], g.inverse, w.position + v * S::SPAN, segment, table, schedule);
        if (w.leads && v < S::GROUPS) w.scales[S::WARP_TILES ? v * S::SPAN / (S::LANES * S::RUN) : 0] = g.scale;
    }
}

// Codes one tile; in a block's, elements x that do not exist are 0. The whole worker calls; turn: 0, 1, ... tile by tile.
template <class S, Codec CODEC>
static __device__ __forceinline__ void write_tile(const TileWriter &w, float (&x)[S::RUNS][S::RUN], int elements, const Tiles &t, SegmentCursor &segment,
                                                  const SegmentTable &table, const RoundingSchedule &schedule, BlockMaxima *shared, int turn) {
    uint32_t largest[S::GROUPS];
    GroupScale scale[S::GROUPS];
    group_maxima<S>(largest, x, t, shared, turn);
    group_scales(scale, largest, CodecRow<CODEC>::LEVELS);
    // Groups of tiny values, or with a value that is not finite, are rare: all others are spared the multiplication and the mask.
    if (__any_sync(ALL_LANES, scale[0].lift != 1.0f || scale[S::GROUPS - 1].lift != 1.0f)) {
#pragma unroll
        for (int v = 0; v < S::RUNS; v++) {
            float lift = scale[S::GROUPS == 1 ? 0 : v].lift;
#pragma unroll
            for (int e = 0; e < S::RUN; e++) x[v][e] = lift == 0.0f ? 0.0f : f32_mul(x[v][e], lift);
        }
    }
    if (w.stochastic) code_tile<S, CODEC, true>(w, x, scale, elements, segment, table, schedule);
    else code_tile<S, CODEC, false>(w, x, scale, elements, segment, table, schedule);
}

// The same for a plain codec.
template <class S, Codec CODEC>
static __device__ __forceinline__ void store_plain_tile(uint8_t *to, const float (&x)[S::RUNS][PACKED], int64_t tile, int elements) {
#pragma unroll
    for (int v = 0; v < S::RUNS; v++) {
        int64_t offset = tile + thread_start<S>() + v * S::SPAN;
        store_plain_vector<CODEC>(to, offset, x[v], run_live<S>(elements, v));
    }
}
