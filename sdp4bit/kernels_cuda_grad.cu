// First and last gradient kernels on GPUs: quantization before the first hop, and sum and inverse
// transform after the last one. Bit-identical to kernels_cpu.c. Called by tlq_hs.c. Matrices are
// processed in tiles (kernels_cuda.cuh), tails with one thread per element.
#include "sdp4bit/kernels_cuda_grad.cuh"

// --- quantize -----------------------------------------------------------------------------------

// Calls launch(Shape) with the shape for fp32 inputs. If a warp holds whole groups, runs of 16 need
// half as many shuffles as runs of 8, and a thread has only one group.
template <Codec CODEC, class Launch> static void with_value_shape(int group, Launch launch) {
    if constexpr (!CodecRow<CODEC>::GROUPED) launch(PlainShape());
    else if constexpr (CodecRow<CODEC>::EDEN) launch(Shape<1, 2 * PACKED, 16>());
    else with_lanes<1, 2 * PACKED, 2, 32>(group, launch, [&] { with_wide_shape(group, launch); });
}

// Launch bounds that keep enough warps resident to saturate the memory. AHEAD: the next tile is
// loaded while this one is processed.
template <class S, Codec CODEC> struct QuantizeBlocks {
    static constexpr bool AHEAD = S::WARP_TILES && S::RUNS * S::RUN <= 2 * PACKED;
    static constexpr int PER_MULTIPROCESSOR = CodecRow<CODEC>::EDEN            ? 3
                                              : AHEAD                          ? 4
                                              : S::RUNS * S::RUN <= 2 * PACKED ? 5
                                                                               : 2;
};

// Loads this thread's values of a tile; missing values are left unchanged. from: this thread's
// first value. rest: elements from the tile's start to the end of the range.
template <class S>
DEV_FN void load_values(float (&x)[S::RUNS][S::RUN], const float *from, const Tiles &t, int64_t rest) {
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
template <class S, Codec CODEC, bool ROTATE>
__global__ void __launch_bounds__(CODEC_THREADS, QuantizeBlocks<S, CODEC>::PER_MULTIPROCESSOR)
    quantize_kernel(const __grid_constant__ QuantizePartitions a, const __grid_constant__ Tiles t,
                    const __grid_constant__ RoundingSchedule schedule,
                    const __grid_constant__ RoundingSchedule rotation) {
    __shared__ BlockMaxima maxima;
    int partition = blockIdx.y;
    MessageSections to = message_sections(&a.message, partition / a.slots);
    uint8_t *message = partition_message(a, partition), *codes = message + to.codes;
    float *scales = reinterpret_cast<float *>(message + to.scales);
    int64_t begin = partition * a.bucket.matrix_per_rank + a.lo, tile = worker_start<S>(t);
    int64_t position = partition_position(&a, partition) + a.lo;
    TileWriter writer = make_writer<S, CODEC>(codes, scales, a.rounding, position, t, tile);
    const float *grads = a.grads + begin + tile + thread_start<S>();
    SegmentCursor segment = no_segment();
    clear_maxima<S>(&maxima);
    float next[S::RUNS][S::RUN] = {};
    if constexpr (QuantizeBlocks<S, CODEC>::AHEAD) load_values<S>(next, grads, t, t.n - tile);
    for (int turn = 0; turn < t.per_worker && tile < t.n; turn++) {
        const int elements = tile_elements<S>(t, t.n - tile);
        float x[S::RUNS][S::RUN] = {};
        if constexpr (!QuantizeBlocks<S, CODEC>::AHEAD) load_values<S>(x, grads, t, t.n - tile);
#pragma unroll
        for (int v = 0; v < S::RUNS; v++) {
#pragma unroll
            for (int e = 0; e < S::RUN; e++) {
                float value = QuantizeBlocks<S, CODEC>::AHEAD ? next[v][e] : x[v][e];
                x[v][e] = S::PLAIN ? scale_plain(value, a.scale) : f32_mul(value, a.scale);
            }
        }
        if constexpr (QuantizeBlocks<S, CODEC>::AHEAD)
            load_values<S>(next, grads + tile_size<S>(t), t,
                           turn + 1 < t.per_worker ? t.n - tile - tile_size<S>(t) : 0);
#pragma unroll
        for (int v = 0; v < S::RUNS; v++) {
            transform_run<ROTATE>(x[v], a, writer.position + v * S::SPAN, segment, rotation);
        }
        if constexpr (S::PLAIN) store_plain_tile<S, CODEC>(codes, x, tile, elements);
        else if constexpr (CodecRow<CODEC>::EDEN) write_eden_tile<S, CODEC>(writer, x, elements);
        else write_tile<S, CODEC>(writer, x, elements, t, segment, a.table, schedule, &maxima, turn);
        next_tile<S, CODEC>(writer, t);
        grads += tile_size<S>(t);
        tile += tile_size<S>(t);
    }
}

// blockIdx.y: the partition. One tail element per thread.
template <Codec TAIL>
__global__ void __launch_bounds__(CODEC_THREADS)
    quantize_tail_kernel(const __grid_constant__ QuantizePartitions a) {
    int partition = blockIdx.y;
    int64_t at = (int64_t)blockIdx.x * CODEC_THREADS + threadIdx.x;
    if (at >= a.message.tail_elements) return;
    uint8_t *tail = partition_message(a, partition) + message_sections(&a.message, partition / a.slots).tail;
    float grad = a.grads[a.bucket.matrix_elements + partition * a.bucket.tail_per_rank + at];
    store_plain_value<TAIL>(tail, at, scale_plain(grad, a.scale));
}

template <class S, Codec CODEC, bool ROTATE>
static void launch_quantize(Stream *s, const QuantizePartitions *a, int partitions) {
    Tiles t = make_tiles<S>(stream_device(s), a->hi - a->lo, partitions, a->group);
    quantize_kernel<S, CODEC, ROTATE>
        <<<tile_grid<S>(t, partitions), CODEC_THREADS, 0, stream_handle(s)>>>(*a, t,
                                                                              rounding_schedule(a->key),
                                                                              rounding_schedule(a->rotation));
}

void kernel_quantize_partitions(Stream *s, const QuantizePartitions *a) {
    int partitions = a->slots * a->message.partitions;
    if (a->hi > a->lo) {
        with_any_codec(a->codec, [&](auto codec) {
            constexpr Codec CODEC = decltype(codec)::VALUE;
            with_value_shape<CODEC>(a->group, [&](auto shape) {
                using S = decltype(shape);
                if (a->transform == TRANSFORM_ROTATION) launch_quantize<S, CODEC, true>(s, a, partitions);
                else launch_quantize<S, CODEC, false>(s, a, partitions);
            });
        });
        check_launch(s, "quantize partitions");
    }
    if (a->message.tail_elements > 0) {
        with_plain_codec(a->tail_codec, [&](auto tail) {
            dim3 grid = tail_grid(a->message.tail_elements, partitions);
            quantize_tail_kernel<decltype(tail)::VALUE><<<grid, CODEC_THREADS, 0, stream_handle(s)>>>(*a);
        });
        check_launch(s, "quantize the tail");
    }
}

// --- final sum ----------------------------------------------------------------------------------

typedef PlainShape FinalShape;

// Stores a vector of sums in the shard, or adds it. Returns the stored values in x.
DEV_FN void store_sums(const SumFinal &a, float *to, float x[PACKED]) {
    if (a.add) {
        float old[PACKED];
        load_floats(to, old);
#pragma unroll
        for (int e = 0; e < PACKED; e++) x[e] = f32_add(old[e], x[e]);
    }
    store_floats(to, x);
}

template <Codec CODEC, bool ROTATE>
__global__ void __launch_bounds__(CODEC_THREADS, CodecRow<CODEC>::GROUPED && !CodecRow<CODEC>::EDEN ? 4 : 3)
    final_kernel(const __grid_constant__ SumFinal a, const __grid_constant__ Tiles t, GroupIndex index,
                 const __grid_constant__ RoundingSchedule rotation) {
    typedef FinalShape S;
    Received received = partition_received(a.received, a.in, a.sources, index, 0);
    // Position of the chunk's first element in the bucket
    int64_t position = a.rank * a.bucket.matrix_per_rank + a.lo;
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
            if (ROTATE || a.transform == TRANSFORM_HADAMARD) {
                hadamard_lanes<ROTATE ? ROTATION_ORDER : HADAMARD_ORDER>(x[v]);
#pragma unroll
                for (int e = 0; e < PACKED; e++)
                    x[v][e] = f32_mul(x[v][e], ROTATE ? ROTATION_INVERSE : HADAMARD_INVERSE);
            }
            if (live) {
                seek_segment(segment, a.table, position + offset);
                if (ROTATE) flip_signs(x[v], rotation, position + offset + segment.shift);
                int64_t beyond = segment.end - (position + offset);  // padding starts here
                if (beyond < PACKED) {
#pragma unroll
                    for (int e = 0; e < PACKED; e++) x[v][e] = e < beyond ? x[v][e] : 0.0f;
                }
            }
            if (live) store_sums(a, a.own.matrix + a.lo + offset, x[v]);
            float partial = square_partial_lanes(x[v]);
            if (live && threadIdx.x % 4 == 0) a.matrix_partials[(a.lo + offset) / HADAMARD_ORDER] = partial;
        }
    }
}

// One lane per element, one warp per partial sum.
template <Codec TAIL>
__global__ void __launch_bounds__(CODEC_THREADS) final_tail_kernel(const __grid_constant__ SumFinal a) {
    int64_t at = (int64_t)blockIdx.x * CODEC_THREADS + threadIdx.x;
    bool live = at < a.in.tail_elements;
    float sum = 0.0f;
    if (live) {
        sum = sum_tail<TAIL>(a.received + message_sections(&a.in, 0).tail, a.in.bytes, a.sources, at);
        if (a.add) sum = f32_add(a.own.tail[at], sum);
        a.own.tail[at] = sum;
    }
    float partial = f32_mul(sum, sum);
    for (int stride = 1; stride < WARP; stride *= 2)
        partial = f32_add(partial, __shfl_xor_sync(ALL_LANES, partial, stride));
    if (live && at % HADAMARD_ORDER == 0) a.tail_partials[at / HADAMARD_ORDER] = partial;
}

void kernel_sum_final(Stream *s, const SumFinal *a) {
    if (a->hi > a->lo) {
        Tiles t = make_tiles<FinalShape>(stream_device(s), a->hi - a->lo, 1, 0);
        with_any_codec(a->codec, [&](auto codec) {
            constexpr Codec CODEC = decltype(codec)::VALUE;
            auto kernel = a->transform == TRANSFORM_ROTATION ? final_kernel<CODEC, true>
                                                             : final_kernel<CODEC, false>;
            kernel<<<tile_grid<FinalShape>(t, 1), CODEC_THREADS, 0, stream_handle(s)>>>(
                *a, t, group_index(a->group), rounding_schedule(a->rotation));
        });
        check_launch(s, "final sum");
    }
    if (a->in.tail_elements > 0) {
        with_plain_codec(a->tail_codec, [&](auto tail) {
            dim3 grid = tail_grid(a->in.tail_elements, 1);
            final_tail_kernel<decltype(tail)::VALUE><<<grid, CODEC_THREADS, 0, stream_handle(s)>>>(*a);
        });
        check_launch(s, "final sum of the tail");
    }
}
