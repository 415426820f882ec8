// Device code shared by the CUDA kernels of the exact regime: distribution of groups over threads,
// Hadamard transform across lanes, group scales, tensor lookup, writing of codes. Included by the
// kernels_cuda files. Bit-identical to codec.h.
// A thread holds runs of consecutive elements. A run is within one group and one tensor:
//   8 elements    a vector: four lanes hold a Hadamard block, and one Philox call serves the run
//   16 elements   for fp32 inputs: two lanes hold a Hadamard block, and a warp loads whole sectors
//   32 elements   for coded inputs: address, group and tensor are computed once per run
// A tile is what a worker processes at a time. The worker is a warp if the group size is a power of
// two and small enough, else a block. Tiles are multiples of 32 elements. The lanes that hold the
// same 32 elements are all active or all inactive, so they may exchange data.
#pragma once
#include "sdp4bit/kernels_cuda_codec.cuh"

enum { CODEC_THREADS = 256, CODEC_WARPS = CODEC_THREADS / WARP };
// Distance in elements between the vectors of a thread: 256, 2048.
enum { WARP_SPAN = WARP * PACKED, BLOCK_SPAN = CODEC_THREADS * PACKED };
// Maximum number of groups in the tile of a block: 64.
enum { TILE_GROUPS = BLOCK_SPAN / HADAMARD_ORDER };

// Returns the number of blocks for a grid-stride loop, at most 16 per multiprocessor.
static inline unsigned stride_blocks(const Stream *s, int64_t threads) {
    int64_t blocks = ceil_div64(threads, CODEC_THREADS), most = (int64_t)s->device->multiprocessors * 16;
    return (unsigned)(blocks < most ? blocks : most);
}

// Calls work(i) for this thread's share of n elements, in a grid-stride loop.
template <typename Work> DEV_FN void for_own_elements(int64_t n, Work work) {
    int64_t stride = (int64_t)gridDim.x * CODEC_THREADS;
    for (int64_t i = (int64_t)blockIdx.x * CODEC_THREADS + threadIdx.x; i < n; i += stride) work(i);
}
// Adds the sum of a warp's values to *total. Called by the whole warp.
DEV_FN void add_warp_sum(unsigned long long *total, unsigned long long value) {
    for (int stride = 1; stride < WARP; stride *= 2) value += __shfl_xor_sync(ALL_LANES, value, stride);
    if (threadIdx.x % WARP == 0) atomicAdd(total, value);
}

// --- distribution of elements over threads ------------------------------------------------------

// Distribution of a group over threads.
//   RUNS    runs per thread, SPAN elements apart
//   RUN     elements per run: 8, 16 or 32
//   LANES   1 to 32: this many neighboring lanes share a group within each run
//           above 32: a group spans all RUNS of the whole warp
//           0: the worker is a block
//   PLAIN   plain codec, no groups
template <int RUNS_, int RUN_, int LANES_, bool PLAIN_ = false> struct Shape {
    static constexpr int RUNS = RUNS_, RUN = RUN_, LANES = LANES_;
    static constexpr bool PLAIN = PLAIN_, WARP_TILES = LANES > 0;
    static constexpr int SPAN = (WARP_TILES ? (int)WARP : (int)CODEC_THREADS) * RUN;
    // Number of different groups among the runs of a thread: 1 or 2
    static constexpr int GROUPS = LANES > 0 && LANES <= WARP ? RUNS : 1;
};
typedef Shape<2, PACKED, 4, true> PlainShape;

// Divides offsets by the group size by multiplication. Offsets are multiples of 32 below 2^36. With
// d = group / 32 and 2^bits the smallest power of two >= d, magic = ceil(2^(31+bits) / d) < 2^32.
// Its error times n is below 2^(31+bits) for n < 2^31, so the quotient is exact.
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
DEV_FN uint32_t group_of(GroupIndex g, int64_t offset) {
    return __umulhi((uint32_t)(offset >> 5) << 1, g.magic) >> g.bits;
}

// Division of n elements into tiles. Worker w gets tiles [w * per_worker, (w + 1) * per_worker).
struct Tiles {
    int64_t n;
    int tile;  // elements
    int per_worker;
    int group, groups;  // group size; groups per tile
    GroupIndex index;
    bool warp_in_group;  // in a block's tile, all elements of a warp belong to one group
};

// group: ignored by plain codecs. slices: gridDim.y. Once the blocks fill the device several times,
// workers get several consecutive tiles, which saves tensor lookups.
template <class S> static Tiles make_tiles(const Device *device, int64_t n, int slices, int group) {
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
template <class S> static dim3 tile_grid(Tiles t, int slices) {
    int64_t per_block = (int64_t)t.tile * t.per_worker * (S::WARP_TILES ? CODEC_WARPS : 1);
    return dim3((unsigned)ceil_div64(t.n, per_block), (unsigned)slices);
}

// Return the first element of this worker, and the first element of this thread within a tile.
template <class S> DEV_FN int64_t worker_start(const Tiles &t) {
    int64_t worker = S::WARP_TILES ? (int64_t)blockIdx.x * CODEC_WARPS + threadIdx.x / WARP : blockIdx.x;
    return worker * t.per_worker * t.tile;
}
template <class S> DEV_FN int thread_start(void) {
    return (int)(S::WARP_TILES ? threadIdx.x % WARP : threadIdx.x) * S::RUN;
}
// Return t.tile and t.groups, which are compile-time constants for tiles of warps.
template <class S> DEV_FN int tile_size(const Tiles &t) {
    if constexpr (S::WARP_TILES) return S::RUNS * S::SPAN;
    else return t.tile;
}
template <class S> DEV_FN int tile_groups(const Tiles &t) {
    if constexpr (S::WARP_TILES) return S::RUNS * S::SPAN / (S::LANES * S::RUN);
    else return t.groups;
}
// Returns the number of elements of a tile if `rest` elements are left from its start.
template <class S> DEV_FN int tile_elements(const Tiles &t, int64_t rest) {
    return rest < tile_size<S>(t) ? (int)rest : tile_size<S>(t);
}
// Returns true if run v of this thread is inside a tile of this many elements. Always true if a
// group takes the whole warp, because ranges consist of whole groups.
template <class S> DEV_FN bool run_live(int elements, int v) {
    if constexpr (S::LANES > WARP) return true;
    return thread_start<S>() + v * S::SPAN < elements;
}

// Calls launch(Shape) if a group of this size is one run on each of LANES, 2 * LANES, ... or MOST
// lanes; else calls rest().
template <int RUNS, int RUN, int LANES, int MOST, class Launch, class Rest>
static void with_lanes(int group, Launch launch, Rest rest) {
    if (group == LANES * RUN) launch(Shape<RUNS, RUN, LANES>());
    else if constexpr (LANES < MOST) with_lanes<RUNS, RUN, 2 * LANES, MOST>(group, launch, rest);
    else rest();
}
// Calls launch(Shape) for group sizes above 512 and sizes that are not powers of two.
template <class Launch> static void with_wide_group(int group, Launch launch) {
    if (group == 1024) launch(Shape<4, PACKED, 128>());
    else if (group <= BLOCK_SPAN) launch(Shape<1, PACKED, 0>());
    else if (group <= 2 * BLOCK_SPAN) launch(Shape<2, PACKED, 0>());
    else if (group <= 4 * BLOCK_SPAN) launch(Shape<4, PACKED, 0>());
    else launch(Shape<8, PACKED, 0>());
}
// Calls launch(Shape) for any group size, with runs of 8.
template <class Launch> static void with_group(int group, Launch launch) {
    with_lanes<2, PACKED, 4, 64>(group, launch, [&] { with_wide_group(group, launch); });
}

// --- NaN as on CPUs -----------------------------------------------------------------------------

// IEEE 754 does not define a NaN's sign and payload: GPUs return 0x7FFFFFFF; CPUs return a NaN
// operand, made quiet, and 0xFFC00000 for inf - inf. Unquantized values must match byte for byte,
// so these functions return what CPUs do.
DEV_FN float quiet_nan_of(float x) { return f32_from_bits(f32_bits(x) | 0x00400000u); }
DEV_FN float scale_plain(float x, float scale) { return x != x ? quiet_nan_of(x) : f32_mul(x, scale); }
DEV_FN float add_plain(float a, float b) {
    float sum = f32_add(a, b);
    if (sum != sum) sum = a != a ? quiet_nan_of(a) : b != b ? quiet_nan_of(b) : f32_from_bits(0xFFC00000u);
    return sum;
}

// --- the Hadamard transform ---------------------------------------------------------------------

// hadamard() on neighboring lanes with RUN elements each: strides below RUN within the thread, the
// others across lanes. The fused multiply-add rounds once, because multiplying by 1 or -1 is exact.
template <int ORDER = HADAMARD_ORDER, int RUN> DEV_FN void hadamard_lanes(float (&x)[RUN]) {
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
    for (int lanes = 1; lanes * RUN < ORDER; lanes *= 2) {
        float sign = threadIdx.x & lanes ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < RUN; i++) x[i] = __fmaf_rn(x[i], sign, __shfl_xor_sync(ALL_LANES, x[i], lanes));
    }
}

// Returns tree_sum32 of the squares held by 4 neighboring lanes, on all of them.
DEV_FN float square_partial_lanes(const float x[PACKED]) {
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

// --- the largest magnitude of each group --------------------------------------------------------

// Returns the larger magnitude, or NaN if either is NaN, like the unsigned maximum in group_scale.
DEV_FN float max_magnitude(float a, float b) {
    float m;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(fabsf(a)), "f"(fabsf(b)));
    return m;
}

// Group maxima of a block's tile, in three rotating sets, so one barrier per tile is enough. The
// set of tile turn + 2 is cleared after the barrier of tile `turn`, when its last readers are done,
// and written after the barrier of tile turn + 1.
struct BlockMaxima {
    uint32_t set[3][TILE_GROUPS];
};
template <class S> DEV_FN void clear_maxima(BlockMaxima *shared) {
    if constexpr (!S::WARP_TILES) {
        for (int i = threadIdx.x; i < 3 * TILE_GROUPS; i += CODEC_THREADS)
            shared->set[i / TILE_GROUPS][i % TILE_GROUPS] = 0;
        __syncthreads();
    }
}

// Sets largest[i] to the largest magnitude of the i-th group among this thread's runs, as bits.
// Missing elements of a block's tile must be 0. turn: tile index. Called by the whole worker.
template <class S>
DEV_FN void group_maxima(uint32_t (&largest)[S::GROUPS], const float (&x)[S::RUNS][S::RUN], const Tiles &t,
                         BlockMaxima *shared, int turn) {
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
            for (int lanes = 1; lanes < S::LANES; lanes *= 2)
                largest[g] = max(largest[g], __shfl_xor_sync(ALL_LANES, largest[g], lanes));
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

// group_scale of GROUPS groups with one division per lane instead of 2 * GROUPS. Even lanes compute
// the scale, odd lanes the inverse; with two groups, bit 1 of the lane selects the group. 2 *
// GROUPS neighboring lanes always share their groups. Sets lift to 0 if a group has non-finite
// values, so that its codes are 0.
template <int GROUPS>
DEV_FN void group_scales(GroupScale (&scale)[GROUPS], const uint32_t (&largest)[GROUPS], int levels) {
    static_assert(GROUPS <= 2, "4 lanes divide for two groups");
    int first = threadIdx.x % WARP / (2 * GROUPS) * (2 * GROUPS);  // lane
    bool odd = threadIdx.x & 1;
    uint32_t mine = threadIdx.x & 2 ? largest[GROUPS - 1] : largest[0];
    // Excludes subnormals, infinities and NaNs
    float m = mine - 0x00800000u < 0x7F000000u ? f32_from_bits(mine) : 1.0f;
    float lifted = mine < LIFT_BELOW ? f32_mul(m, LIFT) : m;
    float quotient = f32_div(odd ? (float)levels : m, odd ? lifted : (float)levels);
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        float sent = __shfl_sync(ALL_LANES, quotient, first + 2 * g),
              inverse = __shfl_sync(ALL_LANES, quotient, first + 2 * g + 1);
        bool finite = largest[g] < 0x7F800000u, normal = finite && largest[g] >= 0x00800000u;
        scale[g].scale = normal ? sent : finite ? 0.0f : f32_from_bits(0x7FC00000u);
        scale[g].inverse = normal ? inverse : 0.0f;
        scale[g].lift = largest[g] >= LIFT_BELOW ? finite ? 1.0f : 0.0f : normal ? LIFT : 1.0f;
    }
}
// The same for a lane that holds a whole group.
DEV_FN void group_scale_alone(GroupScale &scale, uint32_t largest, int levels) {
    scale = group_scale(largest, levels);
    if (largest >= 0x7F800000u) scale.lift = 0.0f;
}

// --- random bits --------------------------------------------------------------------------------

// The part of rounding_bits that is the same for all elements of a kernel: the key schedule, and
// half of round 1. Computed on the host; a kernel parameter is free to read.
struct RoundingSchedule {
    // Round 1: high half of step * M1, xor key 0; its low half; source, xor key 1
    uint32_t first0, first1, first2;
    uint32_t key0[ROUNDING_ROUNDS - 1], key1[ROUNDING_ROUNDS - 1];  // keys of rounds 2 and up
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
DEV_FN Philox4 scheduled_bits(const RoundingSchedule &r, uint64_t block) {
    uint64_t product = (uint64_t)PHILOX_M0 * (uint32_t)block;
    uint32_t c0 = r.first0 ^ (uint32_t)(block >> 32), c1 = r.first1,
             c2 = (uint32_t)(product >> 32) ^ r.first2, c3 = (uint32_t)product;
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

// Applies the rotation's signs to RUN elements. logical: offset of the first, a multiple of RUN.
template <int RUN>
DEV_FN void flip_signs(float (&x)[RUN], const RoundingSchedule &rotation, int64_t logical) {
    uint64_t word = (uint64_t)logical / 32;
    Philox4 bits = scheduled_bits(rotation, word / 4);
    uint32_t low = word & 1 ? bits.v[1] : bits.v[0], high = word & 1 ? bits.v[3] : bits.v[2];
    uint32_t signs = (word & 2 ? high : low) >> (logical % 32);
#pragma unroll
    for (int e = 0; e < RUN; e++) x[e] = with_sign(x[e], signs, e);
}

// --- segments -----------------------------------------------------------------------------------

// The tensor at a position of a matrix part, cached because consecutive positions rarely leave it.
struct SegmentCursor {
    int64_t next;   // first position of the next tensor; padding belongs to the tensor before it
    int64_t end;    // end of the tensor's elements, before the padding
    int64_t shift;  // logical offset minus position
};
DEV_FN SegmentCursor no_segment(void) { return SegmentCursor{0, 0, 0}; }
DEV_FN void seek_segment(SegmentCursor &c, const SegmentTable &table, int64_t position) {
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

// --- writing tiles ------------------------------------------------------------------------------

// Destination of a thread's runs in the current tile. next_tile advances it.
struct TileWriter {
    uint8_t *codes;    // codes of the first run
    float *scales;     // scale of the first run's group
    int64_t position;  // position of the first element in the bucket's matrix part
    bool leads;        // first thread of a group, which stores the scale
    bool stochastic;
};

// codes, scales: sections of a range that starts at `position`. tile: offset of the first tile.
template <class S, Codec CODEC>
DEV_FN TileWriter make_writer(uint8_t *codes, float *scales, Rounding rounding, int64_t position,
                              const Tiles &t, int64_t tile) {
    int start = thread_start<S>(),
        group = S::WARP_TILES ? start / (S::LANES * S::RUN) : (int)group_of(t.index, start);
    int64_t first = tile + start;
    TileWriter w;
    w.stochastic = rounding == ROUND_STOCHASTIC;
    w.codes = codes + first * CodecRow<CODEC>::BITS / 8;
    w.scales = scales + tile / t.group + group;
    w.position = position + first;
    w.leads = S::WARP_TILES ? start % (S::LANES * S::RUN) == 0 : group * t.group == start;
    return w;
}
template <class S, Codec CODEC> DEV_FN void next_tile(TileWriter &w, const Tiles &t) {
    w.codes += tile_size<S>(t) / PACKED * CodecRow<CODEC>::BITS;
    w.scales += tile_groups<S>(t);
    w.position += tile_size<S>(t);
}

// Codes one run, eight elements at a time: v = x * inverse, rounded. block: index of the first
// Philox block, a multiple of RUN / 8. Calls halfway() after half of x is coded.
template <Codec CODEC, bool STOCHASTIC, int RUN, class Halfway>
DEV_FN void code_values(uint8_t *to, const float (&x)[RUN], float inverse, uint64_t block,
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
        if constexpr (STOCHASTIC)
            code_vector_stochastic<CodecRow<CODEC>::FINE>(code, v, scheduled_bits(schedule, block | i));
        else code_vector_nearest(code, v);
        put_codes<CODEC, STOCHASTIC>(word, i, code);
    }
    if (live) store_words<BYTES>(to, word);
}
// The same for a run that starts at `position`.
template <Codec CODEC, bool STOCHASTIC, int RUN>
DEV_FN void code_run(uint8_t *to, const float (&x)[RUN], float inverse, int64_t position,
                     SegmentCursor &segment, const SegmentTable &table, const RoundingSchedule &schedule) {
    uint64_t block = 0;
    if constexpr (STOCHASTIC) {
        seek_segment(segment, table, position);
        block = (uint64_t)(position + segment.shift) / PACKED;
    }
    code_values<CODEC, STOCHASTIC>(to, x, inverse, block, schedule, true, [] {});
}

// Codes the runs of a tile with their groups' scales.
template <class S, Codec CODEC, bool STOCHASTIC>
DEV_FN void code_tile(const TileWriter &w, const float (&x)[S::RUNS][S::RUN],
                      const GroupScale (&scale)[S::GROUPS], int elements, SegmentCursor &segment,
                      const SegmentTable &table, const RoundingSchedule &schedule) {
#pragma unroll
    for (int v = 0; v < S::RUNS; v++) {
        if (!run_live<S>(elements, v)) continue;
        const GroupScale &g = scale[S::GROUPS == 1 ? 0 : v];
        uint8_t *codes = w.codes + v * S::SPAN / PACKED * CodecRow<CODEC>::BITS;
        code_run<CODEC, STOCHASTIC>(codes, x[v], g.inverse, w.position + v * S::SPAN, segment, table,
                                    schedule);
        if (w.leads && v < S::GROUPS)
            w.scales[S::WARP_TILES ? v * S::SPAN / (S::LANES * S::RUN) : 0] = g.scale;
    }
}

// Codes one tile. Parameters as for group_maxima. Called by the whole worker.
template <class S, Codec CODEC>
DEV_FN void write_tile(const TileWriter &w, float (&x)[S::RUNS][S::RUN], int elements, const Tiles &t,
                       SegmentCursor &segment, const SegmentTable &table, const RoundingSchedule &schedule,
                       BlockMaxima *shared, int turn) {
    uint32_t largest[S::GROUPS];
    GroupScale scale[S::GROUPS];
    group_maxima<S>(largest, x, t, shared, turn);
    group_scales(scale, largest, CodecRow<CODEC>::LEVELS);
    // Skip the multiplication in the usual case without tiny or non-finite values.
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

// --- EDEN ---------------------------------------------------------------------------------------

// Sums N terms on each of LANES neighboring lanes as a perfect binary tree; all lanes get the
// result. Destroys the terms.
template <int LANES, int N> DEV_FN float tree_lanes(float (&term)[N]) {
#pragma unroll
    for (int stride = 1; stride < N; stride *= 2) {
#pragma unroll
        for (int i = 0; i < N; i += 2 * stride) term[i] = f32_add(term[i], term[i + stride]);
    }
    float sum = term[0];
#pragma unroll
    for (int lanes = 1; lanes < LANES; lanes *= 2) {
        sum = f32_add(sum, __shfl_xor_sync(ALL_LANES, sum, lanes));
    }
    return sum;
}
template <int LANES, int N> DEV_FN uint32_t largest_lanes(const float (&x)[N]) {
    float m = fabsf(x[0]);
#pragma unroll
    for (int i = 1; i < N; i++) m = max_magnitude(m, x[i]);
    uint32_t largest = f32_bits(m);
#pragma unroll
    for (int lanes = 1; lanes < LANES; lanes *= 2) {
        largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, lanes));
    }
    return largest;
}

// Codes a rotated group held by EDEN_GROUP / RUN neighboring lanes and returns its scale. Called by
// the whole warp; only live lanes store.
template <Codec CODEC, int RUN> DEV_FN float code_eden(uint8_t *to, const float (&x)[RUN], bool live) {
    typedef CodecRow<CODEC> Row;
    constexpr int LANES = EDEN_GROUP / RUN, BYTES = RUN * Row::BITS / 8;
    const uint32_t largest = largest_lanes<LANES>(x);
    const float lane_level = eden_lane_level<CODEC>();
    EdenLift e = eden_lift(largest);
    float term[RUN];
#pragma unroll
    for (int i = 0; i < RUN; i++) {
        float size = f32_mul(fabsf(x[i]), e.lift);
        term[i] = f32_mul(size, size);
    }
    float squares = tree_lanes<LANES>(term);
    float inverse = eden_inverse(squares, f32_mul(f32_from_bits(largest), e.lift));
    uint32_t word[(BYTES + 3) / 4] = {};
#pragma unroll
    for (int i = 0; i < RUN; i++) {
        const int low = i * Row::BITS % 32;
        float size = f32_mul(fabsf(x[i]), e.lift), v = f32_mul(size, inverse);
        // eden_code, unrolled
        uint32_t code = f32_bits(x[i]) >> 31 << (Row::BITS - 1);
#pragma unroll
        for (int k = 0; k + 1 < Row::LEVELS; k++) code += v > eden_threshold(Row::BITS, k);
        term[i] = f32_mul(size, eden_level_of<CODEC>(lane_level, code));
        word[i * Row::BITS / 32] |= code << low;
        if (low + Row::BITS > 32) word[i * Row::BITS / 32 + 1] |= code >> (32 - low);
    }
    float product = tree_lanes<LANES>(term);
    float scale = e.coded ? eden_scale(squares, product, e.unlift) : e.scale;
    if (!e.coded || scale != scale) {
#pragma unroll
        for (uint32_t &w : word) w = 0;
    }
    if (live) store_words<BYTES>(to, word);
    return scale;
}

// Codes one tile of an EDEN codec. Called by the whole warp.
template <class S, Codec CODEC>
DEV_FN void write_eden_tile(const TileWriter &w, const float (&x)[S::RUNS][S::RUN], int elements) {
    static_assert(S::LANES * S::RUN == EDEN_GROUP, "LANES lanes share a group");
#pragma unroll
    for (int v = 0; v < S::RUNS; v++) {
        const bool live = run_live<S>(elements, v);
        uint8_t *codes = w.codes + v * S::SPAN / PACKED * CodecRow<CODEC>::BITS;
        float scale = code_eden<CODEC>(codes, x[v], live);
        if (live && w.leads) w.scales[v * S::SPAN / EDEN_GROUP] = scale;
    }
}

// --- plain codecs -------------------------------------------------------------------------------

// Stores one tile of a plain codec. Called by the whole warp.
template <class S, Codec CODEC>
DEV_FN void store_plain_tile(uint8_t *to, const float (&x)[S::RUNS][PACKED], int64_t tile, int elements) {
#pragma unroll
    for (int v = 0; v < S::RUNS; v++) {
        int64_t offset = tile + thread_start<S>() + v * S::SPAN;
        store_plain_vector<CODEC>(to, offset, x[v], run_live<S>(elements, v));
    }
}
