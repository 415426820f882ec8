// Gradients between the hops on GPUs: sums the messages of a node and quantizes the sums for other
// nodes. Bit-identical to kernels_cpu.c. Called by tlq_hs.c. recode_kernel handles group sizes that
// are powers of two up to 1024, requantize_kernel all others. Tails use one thread per element.
#include "sdp4bit/kernels_cuda_grad.cuh"

// --- tiles --------------------------------------------------------------------------------------

template <class S, Codec OUT> struct RequantizeBlocks {
    static constexpr bool FEW = CodecRow<OUT>::EDEN && S::RUN > 2 * PACKED;
    static constexpr int PER_MULTIPROCESSOR = FEW ? 2 : S::RUNS <= 2 ? 3 : S::RUNS <= 4 ? 2 : 1;
};

// blockIdx.y: the destination node; every received message has its values as partition `node`.
template <class S, Codec CODEC, Codec OUT>
__global__ void __launch_bounds__(CODEC_THREADS, RequantizeBlocks<S, OUT>::PER_MULTIPROCESSOR)
    requantize_kernel(const __grid_constant__ SumRequantize a, const __grid_constant__ Tiles t,
                      const __grid_constant__ RoundingSchedule schedule, GroupIndex in_index) {
    __shared__ BlockMaxima maxima;
    int node = blockIdx.y;
    MessageSections to = message_sections(&a.out.message, 0);
    uint8_t *message = partition_message(a.out, node), *codes = message + to.codes;
    float *scales = reinterpret_cast<float *>(message + to.scales);
    int64_t position = partition_position(&a.out, node) + a.out.lo, tile = worker_start<S>(t);
    TileWriter writer = make_writer<S, OUT>(codes, scales, a.out.rounding, position, t, tile);
    Received received = partition_received(a.received, a.in, a.sources, in_index, node);
    SegmentCursor segment = no_segment();
    clear_maxima<S>(&maxima);
    for (int turn = 0; turn < t.per_worker && tile < t.n; turn++) {
        const int elements = tile_elements<S>(t, t.n - tile);
        float x[S::RUNS][S::RUN];
        sum_tile<S, CODEC>(x, received, tile, elements);
        if constexpr (S::PLAIN) store_plain_tile<S, OUT>(codes, x, tile, elements);
        else if constexpr (CodecRow<OUT>::EDEN) write_eden_tile<S, OUT>(writer, x, elements);
        else write_tile<S, OUT>(writer, x, elements, t, segment, a.out.table, schedule, &maxima, turn);
        next_tile<S, OUT>(writer, t);
        tile += tile_size<S>(t);
    }
}

template <Codec TAIL>
__global__ void __launch_bounds__(CODEC_THREADS)
    requantize_tail_kernel(const __grid_constant__ SumRequantize a) {
    int node = blockIdx.y;
    int64_t at = (int64_t)blockIdx.x * CODEC_THREADS + threadIdx.x;
    if (at >= a.out.message.tail_elements) return;
    const uint8_t *received = a.received + message_sections(&a.in, node).tail;
    uint8_t *tail = partition_message(a.out, node) + message_sections(&a.out.message, 0).tail;
    store_plain_value<TAIL>(tail, at, sum_tail<TAIL>(received, a.in.bytes, a.sources, at));
}

// Calls launch(Shape) with the shape for plain inputs.
template <Codec OUT, class Launch> static void with_plain_source_shape(int group, Launch launch) {
    if constexpr (!CodecRow<OUT>::GROUPED) launch(PlainShape());
    else if constexpr (CodecRow<OUT>::EDEN) launch(Shape<1, 2 * PACKED, 16>());
    else if (group == 2048) with_wide_shape(group, launch);
    else with_group(group, launch);
}

// --- groups of a few lanes ----------------------------------------------------------------------

// Calls launch(Shape) with the shape for coded inputs: runs of 32 if a warp holds whole groups.
template <Codec OUT, class Launch> static void with_code_shape(int group, Launch launch) {
    if constexpr (!CodecRow<OUT>::GROUPED) launch(PlainShape());
    else if constexpr (CodecRow<OUT>::EDEN) launch(Shape<1, HADAMARD_ORDER, 8>());
    else with_lanes<1, HADAMARD_ORDER, 1, 32>(group, launch, [&] { with_wide_shape(group, launch); });
}

// Division of a range for recode_kernel: a single wave of blocks, so that there is no partial
// second wave. Each block has `per` consecutive tiles, the first `extra` blocks one more.
struct Spans {
    uint32_t runs;        // runs in the range
    uint32_t per, extra;  // tiles
};
enum { RECODE_BLOCKS = 3 };  // resident per multiprocessor
template <class S> static Spans make_spans(const Device *device, int64_t n, int slices, unsigned *blocks) {
    int64_t tiles = ceil_div64(n, S::SPAN), most = ceil_div64(tiles, CODEC_WARPS),
            wave = (int64_t)device->multiprocessors * RECODE_BLOCKS / slices;
    if (wave < 1) wave = 1;
    *blocks = (unsigned)(wave < most ? wave : most);
    return Spans{(uint32_t)(n / S::RUN), (uint32_t)(tiles / *blocks), (uint32_t)(tiles % *blocks)};
}

// Returns the factor that converts x to codes. *sent: the group's scale, valid on its first lane.
// If *lift is not 1, the caller must first multiply x by *lift. Has a fast path for the usual case
// that all groups of the warp are finite and have a maximum of at least 2^-100.
template <class S>
DEV_FN float recode_scale(const float (&x)[1][S::RUN], float levels, float *sent, float *lift) {
    uint32_t largest[1];
    group_maxima<S>(largest, x, Tiles(), nullptr, 0);
    *lift = 1.0f;
    if (S::LANES > 1 && __all_sync(ALL_LANES, largest[0] - LIFT_BELOW < 0x7F800000u - LIFT_BELOW)) {
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

// Addresses common to a block, in shared memory so that the compiler does not recompute them.
struct Recode {
    const uint8_t *codes, *scales;  // received
    uint8_t *to;                    // codes and scales to be sent
    float *sent;
};
DEV_FN Recode recode_slice(const SumRequantize &a, int node) {
    MessageSections from = message_sections(&a.in, node), to = message_sections(&a.out.message, 0);
    uint8_t *message = partition_message(a.out, node);
    return Recode{a.received + from.codes, a.received + from.scales, message + to.codes,
                  reinterpret_cast<float *>(message + to.scales)};
}

// Philox blocks of the current tensor: run i < next starts at block first + i * RUN / 8.
struct RunBlocks {
    uint32_t next;
    uint64_t first;
};
template <int RUN>
DEV_FN void seek_blocks(RunBlocks &r, const SegmentTable &table, int64_t position, uint32_t run) {
    if (run < r.next) return;
    SegmentCursor c = no_segment();
    seek_segment(c, table, position + (int64_t)run * RUN);
    r.first = (uint64_t)((position + c.shift) >> 3);
    r.next = c.next - position > (int64_t)RUN * UINT32_MAX ? UINT32_MAX
                                                           : (uint32_t)((c.next - position + RUN - 1) / RUN);
}

template <class S, Codec CODEC>
DEV_FN SourceCursor<1> recode_source(const uint8_t *codes, const uint8_t *scales, GroupIndex in_index,
                                     uint32_t run) {
    SourceCursor<1> source;
    source.codes[0] = codes + (uint64_t)run * (S::RUN * CodecRow<CODEC>::BITS / 8);
    source.scales[0] = scales + (uint64_t)group_of(in_index, (int64_t)run * S::RUN) * sizeof(float);
    return source;
}

// requantize_kernel for groups with one run on each of LANES neighboring lanes. Lanes beyond the
// last run repeat its sum but write nothing; they form whole groups.
template <class S, Codec CODEC, Codec OUT, bool STOCHASTIC>
__global__ void __launch_bounds__(CODEC_THREADS, RECODE_BLOCKS)
    recode_kernel(const __grid_constant__ SumRequantize a, const __grid_constant__ Spans spans,
                  const __grid_constant__ RoundingSchedule schedule, GroupIndex in_index) {
    __shared__ volatile Recode slice;
    if (threadIdx.x == 0) {
        Recode r = recode_slice(a, blockIdx.y);
        slice.codes = r.codes, slice.scales = r.scales, slice.to = r.to, slice.sent = r.sent;
    }
    __syncthreads();
    RunBlocks blocks = {0, 0};
    const uint32_t first = blockIdx.x * spans.per + min(blockIdx.x, spans.extra),
                   end = (first + spans.per + (blockIdx.x < spans.extra)) * WARP;
    // The first two sources of the next tile are loaded while this one is coded. If there is only
    // one source, it is loaded twice.
    const int64_t second = a.sources > 1 ? a.in.bytes : 0;
    Loaded<S, CODEC, 2> ahead;
    if (first * WARP + threadIdx.x < end) {
        SourceCursor<1> source = recode_source<S, CODEC>(slice.codes, slice.scales, in_index,
                                                         min(first * WARP + threadIdx.x, spans.runs - 1));
        load_sources(ahead, source, second);
    }
    for (uint32_t run = first * WARP + threadIdx.x; run < end; run += CODEC_THREADS) {
        float x[1][S::RUN], sent, lift;
        if (second) add_loaded<S, CODEC, 2, true>(x, ahead);
        else
            add_loaded<S, CODEC, 1, true>(x, Loaded<S, CODEC, 1>{{{ahead.raw[0][0]}}, {{ahead.scale[0][0]}}});
        if (a.sources > 2) {
            SourceCursor<1> source = recode_source<S, CODEC>(slice.codes + 2 * a.in.bytes,
                                                             slice.scales + 2 * a.in.bytes, in_index,
                                                             min(run, spans.runs - 1));
            int left = a.sources - 2;
            while (left >= 2) left -= add_sources<S, CODEC, 2, false>(x, source, a.in.bytes);
            if (left) add_sources<S, CODEC, 1, false>(x, source, a.in.bytes);
        }
        float inverse = recode_scale<S>(x, (float)CodecRow<OUT>::LEVELS, &sent, &lift);
        if (__any_sync(ALL_LANES, lift != 1.0f)) {
#pragma unroll
            for (int e = 0; e < S::RUN; e++) x[0][e] = lift == 0.0f ? 0.0f : f32_mul(x[0][e], lift);
        }
        const uint32_t at = min(run, spans.runs - 1);
        const bool live = run < spans.runs;
        if constexpr (STOCHASTIC)
            seek_blocks<S::RUN>(blocks, a.out.table, partition_position(&a.out, blockIdx.y) + a.out.lo, at);
        if (live && run % S::LANES == 0) slice.sent[run / S::LANES] = sent;
        uint8_t *codes = slice.to + (uint64_t)at * (S::RUN * CodecRow<OUT>::BITS / 8);
        code_values<OUT, STOCHASTIC>(
            codes, x[0], inverse, blocks.first + (uint64_t)at * (S::RUN / PACKED), schedule, live, [&] {
                SourceCursor<1> source = recode_source<S, CODEC>(slice.codes, slice.scales, in_index,
                                                                 min(run + CODEC_THREADS, spans.runs - 1));
                load_sources(ahead, source, second);
            });
    }
}

template <class S, Codec CODEC, Codec OUT, bool STOCHASTIC>
static void launch_recode(Stream *s, const SumRequantize *a) {
    unsigned blocks;
    int nodes = a->in.partitions;
    Spans spans = make_spans<S>(stream_device(s), a->out.hi - a->out.lo, nodes, &blocks);
    dim3 grid(blocks, (unsigned)nodes);
    recode_kernel<S, CODEC, OUT, STOCHASTIC>
        <<<grid, CODEC_THREADS, 0, stream_handle(s)>>>(*a, spans, rounding_schedule(a->out.key),
                                                       group_index(a->in_group));
}

template <class S, Codec CODEC, Codec OUT> static void launch_requantize(Stream *s, const SumRequantize *a) {
    if constexpr (CodecRow<CODEC>::GROUPED && S::RUN > PACKED && !CodecRow<OUT>::EDEN) {
        if (a->out.rounding == ROUND_STOCHASTIC) launch_recode<S, CODEC, OUT, true>(s, a);
        else launch_recode<S, CODEC, OUT, false>(s, a);
    } else {
        int nodes = a->in.partitions;
        Tiles t = make_tiles<S>(stream_device(s), a->out.hi - a->out.lo, nodes, a->out.group);
        requantize_kernel<S, CODEC, OUT>
            <<<tile_grid<S>(t, nodes), CODEC_THREADS, 0, stream_handle(s)>>>(*a, t,
                                                                             rounding_schedule(a->out.key),
                                                                             group_index(a->in_group));
    }
}

template <Codec CODEC, Codec OUT> static void requantize_matrices(Stream *s, const SumRequantize *a) {
    auto launch = [&](auto shape) { launch_requantize<decltype(shape), CODEC, OUT>(s, a); };
    if constexpr (CodecRow<CODEC>::GROUPED) with_code_shape<OUT>(a->out.group, launch);
    else with_plain_source_shape<OUT>(a->out.group, launch);
}

void kernel_sum_requantize(Stream *s, const SumRequantize *a) {
    int nodes = a->in.partitions;
    if (a->out.hi > a->out.lo) {
        with_codec(a->in_codec, [&](auto in) {
            with_any_codec(a->out.codec, [&](auto out) {
                requantize_matrices<decltype(in)::VALUE, decltype(out)::VALUE>(s, a);
            });
        });
        check_launch(s, "sum and requantize");
    }
    if (a->out.message.tail_elements > 0) {
        with_plain_codec(a->out.tail_codec, [&](auto tail) {
            dim3 grid = tail_grid(a->out.message.tail_elements, nodes);
            requantize_tail_kernel<decltype(tail)::VALUE><<<grid, CODEC_THREADS, 0, stream_handle(s)>>>(*a);
        });
        check_launch(s, "sum and requantize the tail");
    }
}
