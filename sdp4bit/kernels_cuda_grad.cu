// The gradient half of the exact regime on GPUs: quantise for the first hop, sum and requantise between the hops, sum and invert after the last. The bits
// are kernels_cpu.c's. Called by tlq_hs.c. Matrices go through tiles (kernels_cuda.cuh); the short tails through one element per thread.
#include "sdp4bit/kernels_cuda.cuh"

// --- messages ----------------------------------------------------------------------------------------------------------------------

static __device__ __forceinline__ float *message_scales(uint8_t *message, const MessageLayout &m, int64_t i) {
    return reinterpret_cast<float *>(message + m.scales + i * m.scales_stride);
}

// Calls launch(Shape) with the shape in which fp32 values, or codes of a plain codec, become codes. A warp has a group of 2048 to itself: its loads alone keep
// the memory busy, and no barrier stops them.
template <class Launch>
static void with_shape(int codec, int group, Launch launch);
// The same for fp32 values that may go through the Hadamard transform: runs of 16, so that two lanes hold a block of it, half as many shuffles as four, and a thread
// works for one group.
template <class Launch>
static void with_value_shape(int codec, int group, Launch launch) {
    if (!codec_info(codec).levels) launch(PlainShape());
    else if (group == 32) launch(Shape<1, 2 * PACKED, 2>());
    else if (group == 64) launch(Shape<1, 2 * PACKED, 4>());
    else if (group == 128) launch(Shape<1, 2 * PACKED, 8>());
    else if (group == 256) launch(Shape<1, 2 * PACKED, 16>());
    else if (group == 512) launch(Shape<1, 2 * PACKED, 32>());
    else if (group == 2048) launch(Shape<4, 2 * PACKED, 128>());
    else with_shape(codec, group, launch);
}
template <class Launch>
static void with_shape(int codec, int group, Launch launch) {
    if (!codec_info(codec).levels) launch(PlainShape());
    else if (group == 2048) launch(Shape<8, PACKED, 256>());
    else with_group(group, launch);
}

// --- quantise ------------------------------------------------------------------------------------------------------------------------

static __device__ __forceinline__ uint8_t *partition_message(const QuantizePartitions &a, int partition) {
    int slot = partition % a.slots;
    return slot == a.self ? a.self_slot : a.send + slot * a.message.bytes;
}

// Registers per thread are bounded so that enough warps run at once to keep the memory busy.
template <class S>
struct QuantizeBlocks {
    static constexpr bool AHEAD = S::WARP_TILES && S::RUNS * S::RUN <= 2 * PACKED;  // the next tile's values are loaded while this one is worked on
    static constexpr int PER_MULTIPROCESSOR = AHEAD ? 4 : S::RUNS * S::RUN <= 2 * PACKED ? 5 : 2;
};

// x = this thread's values of the tile at `from`, its own first element, before which `rest` elements are left of the slice. Values that do not exist stay as they are.
template <class S>
static __device__ __forceinline__ void load_values(float (&x)[S::RUNS][S::RUN], const float *from, const Tiles &t, int64_t rest) {
    const int elements = rest > 0 ? tile_elements<S>(t, rest) : 0;
#pragma unroll
    for (int v = 0; v < S::RUNS; v++) {
        const bool live = elements > 0 && run_live<S>(elements, v);
#pragma unroll
        for (int i = 0; i < S::RUN; i += PACKED) {
            if (live) load_read_only(from + v * S::SPAN + i, x[v] + i);
        }
    }
}

// blockIdx.y: the partition, i * slots + slot.
template <class S>
__global__ void __launch_bounds__(CODEC_THREADS, QuantizeBlocks<S>::PER_MULTIPROCESSOR)
    quantize_kernel(const __grid_constant__ QuantizePartitions a, const __grid_constant__ Tiles t, const __grid_constant__ RoundingSchedule schedule) {
    __shared__ BlockMaxima maxima;
    int partition = blockIdx.y, i = partition / a.slots;
    uint8_t *message = partition_message(a, partition), *codes = message + i * a.message.codes_stride;
    int64_t position = partition * a.bucket.matrix_shard + a.lo, tile = worker_start<S>(t);
    TileWriter writer = make_writer<S>(codes, message_scales(message, a.message, i), a.codec, a.rounding, position, t, tile);
    const float *grads = a.grads + position + tile + thread_start<S>();
    SegmentCursor segment = no_segment();
    clear_maxima<S>(&maxima);
    float next[S::RUNS][S::RUN] = {};
    if constexpr (QuantizeBlocks<S>::AHEAD) load_values<S>(next, grads, t, t.n - tile);
    for (int turn = 0; turn < t.per_worker && tile < t.n; turn++) {
        const int elements = tile_elements<S>(t, t.n - tile);
        float x[S::RUNS][S::RUN] = {};
        if constexpr (!QuantizeBlocks<S>::AHEAD) load_values<S>(x, grads, t, t.n - tile);
#pragma unroll
        for (int v = 0; v < S::RUNS; v++) {
#pragma unroll
            for (int e = 0; e < S::RUN; e++) {
                float value = QuantizeBlocks<S>::AHEAD ? next[v][e] : x[v][e];
                x[v][e] = S::PLAIN ? scale_plain(value, a.scale) : f32_mul(value, a.scale);
            }
        }
        if constexpr (QuantizeBlocks<S>::AHEAD) load_values<S>(next, grads + tile_size<S>(t), t, turn + 1 < t.per_worker ? t.n - tile - tile_size<S>(t) : 0);
#pragma unroll
        for (int v = 0; v < S::RUNS; v++) {
            if (a.hadamard) hadamard_lanes(x[v]);
        }
        if constexpr (S::PLAIN) store_plain_tile<S>(codes, a.codec, x, tile, elements);
        else write_tile<S>(writer, x, elements, t, segment, a.table, schedule, &maxima, turn);
        next_tile<S>(writer, t);
        grads += tile_size<S>(t);
        tile += tile_size<S>(t);
    }
}

// blockIdx.y: the partition. One tail element per thread.
__global__ void __launch_bounds__(CODEC_THREADS) quantize_tail_kernel(const __grid_constant__ QuantizePartitions a) {
    int partition = blockIdx.y, i = partition / a.slots;
    int64_t at = (int64_t)blockIdx.x * CODEC_THREADS + threadIdx.x;
    if (at >= a.message.tail_elements) return;
    uint8_t *tail = partition_message(a, partition) + a.message.tail + i * a.message.tail_stride;
    float grad = a.grads[a.bucket.matrix + partition * a.bucket.tail_shard + at];
    store_plain_value(tail, a.tail_codec, at, scale_plain(grad, a.scale));
}

static dim3 tail_grid(int64_t elements, int slices) { return dim3((unsigned)ceil_div64(elements, CODEC_THREADS), (unsigned)slices); }

void kernel_quantize_partitions(Stream *s, const QuantizePartitions *a) {
    int partitions = a->slots * a->message.partitions;
    if (a->hi > a->lo) {
        with_value_shape(a->codec, a->group, [&](auto shape) {
            using S = decltype(shape);
            Tiles t = make_tiles<S>(stream_device(s), a->hi - a->lo, partitions, a->group);
            quantize_kernel<S><<<tile_grid<S>(t, partitions), CODEC_THREADS, 0, stream_handle(s)>>>(*a, t, rounding_schedule(a->key));
        });
        check_launch(s, "quantise partitions");
    }
    if (a->message.tail_elements > 0) {
        quantize_tail_kernel<<<tail_grid(a->message.tail_elements, partitions), CODEC_THREADS, 0, stream_handle(s)>>>(*a);
        check_launch(s, "quantise the tail");
    }
}

// --- sums over the sources -------------------------------------------------------------------------------------------------------------

// The received messages of one partition: source k's codes and scales are k * stride bytes further on.
struct Received {
    const uint8_t *codes;
    const uint8_t *scales;
    int64_t stride;
    int sources;
    GroupIndex index;
};

// Where this thread's runs of a tile lie in the next source's message.
template <int RUNS>
struct SourceCursor {
    const uint8_t *codes[RUNS], *scales[RUNS];
};

// x = the values of one source. SMALL: the scale is below SMALL_SCALE.
template <int CODEC, bool SMALL, int N>
static __device__ __forceinline__ void source_values(float (&x)[N], const Raw<CODEC, N> &raw, float scale) {
    if constexpr (SMALL) {
        float biased[N];
        decode_biased(biased, raw);
        scale_biased<CODEC>(x, biased, scale);
    } else {
        decode_raw(x, raw);
#pragma unroll
        for (int e = 0; e < N && Raw<CODEC, N>::QUANTISED; e++) x[e] = f32_mul(x[e], scale);
    }
}

// Adds BATCH loaded sources to acc in order. FIRST: the first of them starts the sum; -0 leaves a plain value as it is, but makes a NaN quiet.
template <class S, int CODEC, int BATCH, bool FIRST, bool SMALL>
static __device__ __forceinline__ void add_values(float (&acc)[S::RUNS][S::RUN], const Raw<CODEC, S::RUN> (&raw)[BATCH][S::RUNS], const float (&scale)[BATCH][S::RUNS]) {
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
#pragma unroll
        for (int v = 0; v < S::RUNS; v++) {
            float x[S::RUN];
            source_values<CODEC, SMALL>(x, raw[b][v], scale[b][v]);
#pragma unroll
            for (int e = 0; e < S::RUN; e++) {
                bool first = FIRST && b == 0;
                if (!Raw<CODEC>::QUANTISED) acc[v][e] = add_plain(first ? -0.0f : acc[v][e], x[e]);
                else acc[v][e] = first ? x[e] : f32_add(acc[v][e], x[e]);
            }
        }
    }
}

// Sources' codes and scales as they travel, in registers.
template <class S, int CODEC, int BATCH>
struct Loaded {
    Raw<CODEC, S::RUN> raw[BATCH][S::RUNS];
    float scale[BATCH][S::RUNS];
};
// Loads the next BATCH sources, all at once.
template <class S, int CODEC, int BATCH>
static __device__ __forceinline__ void load_sources(Loaded<S, CODEC, BATCH> &l, SourceCursor<S::RUNS> &at, int64_t stride) {
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
#pragma unroll
        for (int v = 0; v < S::RUNS; v++) {
            l.raw[b][v] = load_raw<CODEC, S::RUN>(at.codes[v]);
            at.codes[v] += stride;
            if constexpr (Raw<CODEC>::QUANTISED) {
                l.scale[b][v] = __ldg(reinterpret_cast<const float *>(at.scales[v]));
                at.scales[v] += stride;
            } else {
                l.scale[b][v] = 0.0f;
            }
        }
    }
}
// Adds them to acc, in order. The whole warp calls.
template <class S, int CODEC, int BATCH, bool FIRST>
static __device__ __forceinline__ void add_loaded(float (&acc)[S::RUNS][S::RUN], const Loaded<S, CODEC, BATCH> &l) {
    bool small = true;
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
#pragma unroll
        for (int v = 0; v < S::RUNS; v++) small = small && l.scale[b][v] < SMALL_SCALE;
    }
    if constexpr (!Raw<CODEC>::QUANTISED) add_values<S, CODEC, BATCH, FIRST, false>(acc, l.raw, l.scale);
    else if (__all_sync(ALL_LANES, small)) add_values<S, CODEC, BATCH, FIRST, true>(acc, l.raw, l.scale);
    else add_values<S, CODEC, BATCH, FIRST, false>(acc, l.raw, l.scale);
}
// Both; returns how many sources they are.
template <class S, int CODEC, int BATCH, bool FIRST>
static __device__ __forceinline__ int add_sources(float (&acc)[S::RUNS][S::RUN], SourceCursor<S::RUNS> &at, int64_t stride) {
    Loaded<S, CODEC, BATCH> l;
    load_sources(l, at, stride);
    add_loaded<S, CODEC, BATCH, FIRST>(acc, l);
    return BATCH;
}

// How many sources' loads are in flight at a time: about 16 words per thread, more where one source alone has more.
template <class S, int CODEC>
struct SumBatch {
    static constexpr int WORDS = S::RUNS * Raw<CODEC, S::RUN>::WORDS;
    static constexpr int SOURCES = WORDS <= 4 && S::RUNS <= 2 ? 4 : WORDS <= 8 ? 2 : 1;
};

// acc = the values of the sources from `at` on, added in source order. The whole warp calls.
template <class S, int CODEC>
static __device__ __forceinline__ void sum_sources(float (&acc)[S::RUNS][S::RUN], SourceCursor<S::RUNS> at, int64_t stride, int left) {
    constexpr int BATCH = SumBatch<S, CODEC>::SOURCES, HALF = BATCH > 2 ? 2 : 1;
    if (left >= BATCH) left -= add_sources<S, CODEC, BATCH, true>(acc, at, stride);
    else if (BATCH > 2 && left >= 2) left -= add_sources<S, CODEC, HALF, true>(acc, at, stride);
    else left -= add_sources<S, CODEC, 1, true>(acc, at, stride);
    while (left >= BATCH) left -= add_sources<S, CODEC, BATCH, false>(acc, at, stride);
    while (BATCH > 1 && left > 0) left -= add_sources<S, CODEC, 1, false>(acc, at, stride);
}

// acc = the sums of a tile. Runs that do not exist read the tile's first run, so that nothing branches. In a block's tile they are 0 then;
// in a warp's tile they share a group only with each other, and nobody looks at them.
template <class S, int CODEC>
static __device__ __forceinline__ void sum_tile(float (&acc)[S::RUNS][S::RUN], const Received &r, int64_t tile, int elements) {
    SourceCursor<S::RUNS> at;
#pragma unroll
    for (int v = 0; v < S::RUNS; v++) {
        int64_t offset = tile + (run_live<S>(elements, v) ? thread_start<S>() + v * S::SPAN : 0);
        at.codes[v] = r.codes + offset * Raw<CODEC>::BITS / 8;
        at.scales[v] = r.scales + (Raw<CODEC>::QUANTISED ? (int64_t)group_of(r.index, offset) * (int64_t)sizeof(float) : 0);
    }
    sum_sources<S, CODEC>(acc, at, r.stride, r.sources);
    if constexpr (!S::WARP_TILES) {
#pragma unroll
        for (int v = 0; v < S::RUNS; v++) {
#pragma unroll
            for (int e = 0; e < S::RUN; e++) acc[v][e] = run_live<S>(elements, v) ? acc[v][e] : 0.0f;
        }
    }
}

static __device__ __forceinline__ float sum_tail(const uint8_t *tail, int64_t stride, int sources, int codec, int64_t at) {
    float acc = -0.0f;
    for (int source = 0; source < sources; source++) acc = add_plain(acc, load_plain_value(tail + source * stride, codec, at));
    return acc;
}

static __device__ __forceinline__ Received partition_received(const uint8_t *received, const MessageLayout &in, int sources, GroupIndex index, int64_t i) {
    return Received{received + i * in.codes_stride, received + in.scales + i * in.scales_stride, in.bytes, sources, index};
}

// Calls launch(std::integral_constant) with the codec as a compile-time value.
template <int CODEC>
struct CodecValue {
    static constexpr int VALUE = CODEC;
};
template <class Launch>
static void with_codec(int codec, Launch launch) {
    if (codec == CODEC_INT4) launch(CodecValue<CODEC_INT4>());
    else if (codec == CODEC_INT8) launch(CodecValue<CODEC_INT8>());
    else if (codec == CODEC_BF16) launch(CodecValue<CODEC_BF16>());
    else launch(CodecValue<CODEC_FP32>());
}

// --- sum and requantise ------------------------------------------------------------------------------------------------------------------

template <class S>
struct RequantizeBlocks {
    static constexpr int PER_MULTIPROCESSOR = S::RUNS <= 2 ? 3 : S::RUNS <= 4 ? 2 : 1;
};

// blockIdx.y: the destination node, whose partial shards are partition `node` of every source's message.
template <class S, int CODEC>
__global__ void __launch_bounds__(CODEC_THREADS, RequantizeBlocks<S>::PER_MULTIPROCESSOR)
    requantize_kernel(const __grid_constant__ SumRequantize a, const __grid_constant__ Tiles t, const __grid_constant__ RoundingSchedule schedule, GroupIndex in_index) {
    __shared__ BlockMaxima maxima;
    int node = blockIdx.y;
    uint8_t *message = node == a.self ? a.self_slot : a.send + node * a.out.bytes;
    int64_t position = ((int64_t)node * a.per_node + a.local) * a.bucket.matrix_shard + a.lo, tile = worker_start<S>(t);
    TileWriter writer = make_writer<S>(message, message_scales(message, a.out, 0), a.codec, a.rounding, position, t, tile);
    Received received = partition_received(a.received, a.in, a.sources, in_index, node);
    SegmentCursor segment = no_segment();
    clear_maxima<S>(&maxima);
    for (int turn = 0; turn < t.per_worker && tile < t.n; turn++) {
        const int elements = tile_elements<S>(t, t.n - tile);
        float x[S::RUNS][S::RUN];
        sum_tile<S, CODEC>(x, received, tile, elements);
        if constexpr (S::PLAIN) store_plain_tile<S>(message, a.codec, x, tile, elements);
        else write_tile<S>(writer, x, elements, t, segment, a.table, schedule, &maxima, turn);
        next_tile<S>(writer, t);
        tile += tile_size<S>(t);
    }
}

__global__ void __launch_bounds__(CODEC_THREADS) requantize_tail_kernel(const __grid_constant__ SumRequantize a) {
    int node = blockIdx.y;
    int64_t at = (int64_t)blockIdx.x * CODEC_THREADS + threadIdx.x;
    if (at >= a.out.tail_elements) return;
    uint8_t *message = node == a.self ? a.self_slot : a.send + node * a.out.bytes;
    float sum = sum_tail(a.received + a.in.tail + node * a.in.tail_stride, a.in.bytes, a.sources, a.tail_codec, at);
    store_plain_value(message + a.out.tail, a.tail_codec, at, sum);
}

// Calls launch(Shape) with the shape in which codes become codes: runs of 32 where a warp has whole groups.
template <class Launch>
static void with_code_shape(int codec, int group, Launch launch) {
    if (!codec_info(codec).levels) launch(PlainShape());
    else if (group == 32) launch(Shape<1, HADAMARD_ORDER, 1>());
    else if (group == 64) launch(Shape<1, HADAMARD_ORDER, 2>());
    else if (group == 128) launch(Shape<1, HADAMARD_ORDER, 4>());
    else if (group == 256) launch(Shape<1, HADAMARD_ORDER, 8>());
    else if (group == 512) launch(Shape<1, HADAMARD_ORDER, 16>());
    else if (group == 1024) launch(Shape<1, HADAMARD_ORDER, 32>());
    else with_shape(codec, group, launch);
}

// How the tiles of a slice are dealt out where codes become codes: one wave of blocks, each with one span of neighbouring tiles, of `per` tiles and for the first
// `extra` blocks one more; its warps take them in turn. Nothing is left over for a second wave, and a warp comes to another tensor rarely.
struct Spans {
    uint32_t runs;        // of a slice
    uint32_t per, extra;  // tiles
};
template <class S>
struct RecodeBlocks {
    static constexpr int PER_MULTIPROCESSOR = 3;
};
template <class S>
static Spans make_spans(const Device *device, int64_t n, int slices, unsigned *blocks) {
    int64_t tiles = ceil_div64(n, S::SPAN), most = ceil_div64(tiles, CODEC_WARPS), wave = (int64_t)device->multiprocessors * RecodeBlocks<S>::PER_MULTIPROCESSOR / slices;
    if (wave < 1) wave = 1;
    *blocks = (unsigned)(wave < most ? wave : most);
    return Spans{(uint32_t)(n / S::RUN), (uint32_t)(tiles / *blocks), (uint32_t)(tiles % *blocks)};
}

// Returns what x is multiplied with to be coded; *sent: the group's scale, for its first lane. Where *lift is not 1, x is multiplied with it before.
template <class S>
static __device__ __forceinline__ float recode_scale(const float (&x)[1][S::RUN], float levels, float *sent, float *lift) {
    uint32_t largest[1];
    group_maxima<S>(largest, x, Tiles(), nullptr, 0);
    *lift = 1.0f;
    if (S::LANES > 1 && __all_sync(ALL_LANES, largest[0] - 0x0D800000u < 0x7F800000u - 0x0D800000u)) {  // from 2^-100 up and finite: group_scales without its exceptions
        bool odd = threadIdx.x & 1;
        float m = f32_from_bits(largest[0]);
        *sent = f32_div(odd ? levels : m, odd ? m : levels);
        return __shfl_sync(ALL_LANES, *sent, threadIdx.x % WARP | 1);
    }
    GroupScale scale[1];
    if constexpr (S::LANES == 1) group_scale_alone(scale[0], largest[0], (int)levels);
    else group_scales(scale, largest, (int)levels);
    *sent = scale[0].scale;
    *lift = scale[0].lift;
    return scale[0].inverse;
}

// What all threads of a block have in common, of its slice: kept in shared memory, where it is read tile by tile, because the compiler would work it out again
// tile by tile.
struct Recode {
    const uint8_t *codes, *scales;
    uint8_t *message;
    float *sent;
};
static __device__ __forceinline__ Recode recode_slice(const SumRequantize &a, int node) {
    Recode r;
    r.codes = a.received + node * a.in.codes_stride;
    r.scales = a.received + a.in.scales + node * a.in.scales_stride;
    r.message = node == a.self ? a.self_slot : a.send + node * a.out.bytes;
    r.sent = message_scales(r.message, a.out, 0);
    return r;
}

// Random numbers of the runs of a slice: run i below `next` begins with block `first` + i * RUN / 8.
struct RunBlocks {
    uint32_t next;
    uint64_t first;
};
template <int RUN>
static __device__ __forceinline__ void seek_blocks(RunBlocks &r, const SegmentTable &table, int64_t position, uint32_t run) {
    if (run < r.next) return;
    SegmentCursor c = no_segment();
    seek_segment(c, table, position + (int64_t)run * RUN);
    r.first = (uint64_t)((position + c.shift) >> 3);
    r.next = c.next - position > (int64_t)RUN * UINT32_MAX ? UINT32_MAX : (uint32_t)((c.next - position + RUN - 1) / RUN);
}

template <class S, int CODEC>
static __device__ __forceinline__ SourceCursor<1> recode_source(const uint8_t *codes, const uint8_t *scales, GroupIndex in_index, uint32_t run) {
    SourceCursor<1> source;
    source.codes[0] = codes + (uint64_t)run * (S::RUN * Raw<CODEC>::BITS / 8);
    source.scales[0] = scales + (uint64_t)group_of(in_index, (int64_t)run * S::RUN) * sizeof(float);
    return source;
}

// requantize_kernel for groups that one run of each of LANES neighbouring lanes makes up. A lane beyond the slice's last run sums that run and writes nothing; it
// shares its group with no lane inside.
template <class S, int CODEC, bool INT4, bool STOCHASTIC>
__global__ void __launch_bounds__(CODEC_THREADS, RecodeBlocks<S>::PER_MULTIPROCESSOR)
    recode_kernel(const __grid_constant__ SumRequantize a, const __grid_constant__ Spans spans, const __grid_constant__ RoundingSchedule schedule, GroupIndex in_index) {
    __shared__ volatile Recode slice;
    if (threadIdx.x == 0) {
        Recode r = recode_slice(a, blockIdx.y);
        slice.codes = r.codes, slice.scales = r.scales, slice.message = r.message, slice.sent = r.sent;
    }
    __syncthreads();
    RunBlocks blocks = {0, 0};
    const uint32_t first = blockIdx.x * spans.per + min(blockIdx.x, spans.extra), end = (first + spans.per + (blockIdx.x < spans.extra)) * WARP;
    // The first two sources of the next tile are loaded while this one is coded; the second one is the first again where there is no other.
    const int64_t second = a.sources > 1 ? a.in.bytes : 0;
    Loaded<S, CODEC, 2> ahead;
    if (first * WARP + threadIdx.x < end) {
        SourceCursor<1> source = recode_source<S, CODEC>(slice.codes, slice.scales, in_index, min(first * WARP + threadIdx.x, spans.runs - 1));
        load_sources(ahead, source, second);
    }
    for (uint32_t run = first * WARP + threadIdx.x; run < end; run += CODEC_THREADS) {
        float x[1][S::RUN], sent, lift;
        if (second) add_loaded<S, CODEC, 2, true>(x, ahead);
        else add_loaded<S, CODEC, 1, true>(x, Loaded<S, CODEC, 1>{{{ahead.raw[0][0]}}, {{ahead.scale[0][0]}}});
        if (a.sources > 2) {
            SourceCursor<1> source = recode_source<S, CODEC>(slice.codes + 2 * a.in.bytes, slice.scales + 2 * a.in.bytes, in_index, min(run, spans.runs - 1));
            int left = a.sources - 2;
            while (left >= 2) left -= add_sources<S, CODEC, 2, false>(x, source, a.in.bytes);
            if (left) add_sources<S, CODEC, 1, false>(x, source, a.in.bytes);
        }
        float inverse = recode_scale<S>(x, INT4 ? 7.0f : 127.0f, &sent, &lift);
        if (__any_sync(ALL_LANES, lift != 1.0f)) {
#pragma unroll
            for (int e = 0; e < S::RUN; e++) x[0][e] = lift == 0.0f ? 0.0f : f32_mul(x[0][e], lift);
        }
        const uint32_t at = min(run, spans.runs - 1);
        const bool live = run < spans.runs;
        if constexpr (STOCHASTIC) seek_blocks<S::RUN>(blocks, a.table, ((int64_t)blockIdx.y * a.per_node + a.local) * a.bucket.matrix_shard + a.lo, at);
        if (live && run % S::LANES == 0) slice.sent[run / S::LANES] = sent;
        code_values<INT4, STOCHASTIC>(slice.message + (uint64_t)at * (S::RUN * (INT4 ? 4 : 8) / 8), x[0], inverse, blocks.first + (uint64_t)at * (S::RUN / PACKED), schedule, live, [&] {
            SourceCursor<1> source = recode_source<S, CODEC>(slice.codes, slice.scales, in_index, min(run + CODEC_THREADS, spans.runs - 1));
            load_sources(ahead, source, second);
        });
    }
}

template <class S, int CODEC, bool INT4, bool STOCHASTIC>
static void launch_recode(Stream *s, const SumRequantize *a) {
    unsigned blocks;
    int nodes = a->in.partitions;
    Spans spans = make_spans<S>(stream_device(s), a->hi - a->lo, nodes, &blocks);
    recode_kernel<S, CODEC, INT4, STOCHASTIC><<<dim3(blocks, (unsigned)nodes), CODEC_THREADS, 0, stream_handle(s)>>>(*a, spans, rounding_schedule(a->key), group_index(a->in_group));
}

template <class S, int CODEC>
static void launch_requantize(Stream *s, const SumRequantize *a) {
    if constexpr (Raw<CODEC>::QUANTISED && S::RUN > PACKED) {
        bool stochastic = a->rounding == ROUND_STOCHASTIC;
        if (a->codec == CODEC_INT4 && stochastic) launch_recode<S, CODEC, true, true>(s, a);
        else if (a->codec == CODEC_INT4) launch_recode<S, CODEC, true, false>(s, a);
        else if (stochastic) launch_recode<S, CODEC, false, true>(s, a);
        else launch_recode<S, CODEC, false, false>(s, a);
    } else {
        int nodes = a->in.partitions;
        Tiles t = make_tiles<S>(stream_device(s), a->hi - a->lo, nodes, a->group);
        requantize_kernel<S, CODEC><<<tile_grid<S>(t, nodes), CODEC_THREADS, 0, stream_handle(s)>>>(*a, t, rounding_schedule(a->key), group_index(a->in_group));
    }
}

void kernel_sum_requantize(Stream *s, const SumRequantize *a) {
    int nodes = a->in.partitions;
    if (a->hi > a->lo) {
        with_codec(a->in_codec, [&](auto codec) {
            constexpr int CODEC = decltype(codec)::VALUE;
            auto launch = [&](auto shape) { launch_requantize<decltype(shape), CODEC>(s, a); };
            if constexpr (Raw<CODEC>::QUANTISED) with_code_shape(a->codec, a->group, launch);
            else with_shape(a->codec, a->group, launch);
        });
        check_launch(s, "sum and requantise");
    }
    if (a->out.tail_elements > 0) {
        requantize_tail_kernel<<<tail_grid(a->out.tail_elements, nodes), CODEC_THREADS, 0, stream_handle(s)>>>(*a);
        check_launch(s, "sum and requantise the tail");
    }
}

// --- final sum -----------------------------------------------------------------------------------------------------------------------------

// Codes of 4 bits are so short that a thread needs four runs of them to have as much in flight as others with two.
template <int CODEC>
using FinalShape = Shape<CODEC == CODEC_INT4 ? 4 : 2, PACKED, 4, true>;

template <int CODEC>
__global__ void __launch_bounds__(CODEC_THREADS, Raw<CODEC>::QUANTISED && FinalShape<CODEC>::RUNS == 2 ? 4 : 3) final_kernel(const __grid_constant__ SumFinal a, const __grid_constant__ Tiles t, GroupIndex index) {
    typedef FinalShape<CODEC> S;
    Received received = partition_received(a.received, a.in, a.sources, index, 0);
    int64_t position = a.rank * a.bucket.matrix_shard + a.lo;  // of the chunk's first element in the bucket
    SegmentCursor segment = no_segment();
    int64_t tile = worker_start<S>(t);
    for (int turn = 0; turn < t.per_worker && tile < t.n; turn++, tile += tile_size<S>(t)) {
        const int elements = tile_elements<S>(t, t.n - tile);
        float x[S::RUNS][PACKED];
        sum_tile<S, CODEC>(x, received, tile, elements);
#pragma unroll
        for (int v = 0; v < S::RUNS; v++) {
            bool live = run_live<S>(elements, v);
            int64_t offset = tile + thread_start<S>() + v * S::SPAN;
            if (a.hadamard) {
                hadamard_lanes(x[v]);
#pragma unroll
                for (int e = 0; e < PACKED; e++) x[v][e] = f32_mul(x[v][e], HADAMARD_INVERSE);
            }
            if (live) {
                seek_segment(segment, a.table, position + offset);
                int64_t beyond = segment.end - (position + offset);  // elements from here on are pads
                if (beyond < PACKED) {
#pragma unroll
                    for (int e = 0; e < PACKED; e++) x[v][e] = e < beyond ? x[v][e] : 0.0f;
                }
            }
            if (live) store_floats(a.grads + position + offset, x[v]);
            float leaf = square_leaf_lanes(x[v]);
            if (live && threadIdx.x % 4 == 0) a.matrix_leaves[(a.lo + offset) / HADAMARD_ORDER] = leaf;
        }
    }
}

// A warp per leaf, a lane per element.
__global__ void __launch_bounds__(CODEC_THREADS) final_tail_kernel(const __grid_constant__ SumFinal a) {
    int64_t at = (int64_t)blockIdx.x * CODEC_THREADS + threadIdx.x;
    bool live = at < a.in.tail_elements;
    float sum = 0.0f;
    if (live) {
        sum = sum_tail(a.received + a.in.tail, a.in.bytes, a.sources, a.tail_codec, at);
        a.grads[a.bucket.matrix + a.rank * a.bucket.tail_shard + at] = sum;
    }
    float leaf = f32_mul(sum, sum);
    for (int stride = 1; stride < WARP; stride *= 2) leaf = f32_add(leaf, __shfl_xor_sync(ALL_LANES, leaf, stride));
    if (live && at % HADAMARD_ORDER == 0) a.tail_leaves[at / HADAMARD_ORDER] = leaf;
}

void kernel_sum_final(Stream *s, const SumFinal *a) {
    if (a->hi > a->lo) {
        with_codec(a->codec, [&](auto codec) {
            constexpr int CODEC = decltype(codec)::VALUE;
            Tiles t = make_tiles<FinalShape<CODEC>>(stream_device(s), a->hi - a->lo, 1, 0);
            final_kernel<CODEC><<<tile_grid<FinalShape<CODEC>>(t, 1), CODEC_THREADS, 0, stream_handle(s)>>>(*a, t, group_index(a->group));
        });
        check_launch(s, "final sum");
    }
    if (a->in.tail_elements > 0) {
        final_tail_kernel<<<tail_grid(a->in.tail_elements, 1), CODEC_THREADS, 0, stream_handle(s)>>>(*a);
        check_launch(s, "final sum of the tail");
    }
}
