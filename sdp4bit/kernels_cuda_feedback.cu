// Error feedback on GPUs: adds the quantization error of earlier messages between nodes to the next
// one. Bit-identical to kernels_cpu.c. Called by tlq_hs.c. A thread holds vectors of 8 elements, so
// four lanes hold a Hadamard block and a warp holds a block of the rotation.
#include "sdp4bit/kernels_cuda_grad.cuh"

typedef PlainShape FeedShape;

// Returns false if the residual is treated as 0 because the previous step was skipped.
DEV_FN bool residual_counts(const Residual &r) { return !r.control || r.control->applied; }

// Adds y to a vector of the residual.
DEV_FN void feed_run(float *values, const float (&y)[PACKED], bool keep) {
    float x[PACKED];
    load_floats(values, x);
#pragma unroll
    for (int e = 0; e < PACKED; e++) x[e] = f32_add(keep ? x[e] : 0.0f, y[e]);
    store_floats(values, x);
}

// blockIdx.y: the node.
template <Codec CODEC>
__global__ void __launch_bounds__(CODEC_THREADS)
    feed_sums_kernel(const __grid_constant__ SumRequantize a, const __grid_constant__ Residual r,
                     const __grid_constant__ Tiles t, GroupIndex index) {
    typedef FeedShape S;
    if (r.frozen) return;
    Received received = partition_received(a.received, a.in, a.sources, index, blockIdx.y);
    float *values = r.values + blockIdx.y * a.out.bucket.matrix_per_rank + a.out.lo;
    const bool keep = residual_counts(r);
    int64_t tile = worker_start<S>(t);
    for (int turn = 0; turn < t.per_worker && tile < t.n; turn++, tile += tile_size<S>(t)) {
        const int elements = tile_elements<S>(t, t.n - tile);
        float y[S::RUNS][PACKED];
        sum_tile<S, CODEC>(y, received, tile, elements);
#pragma unroll
        for (int v = 0; v < S::RUNS; v++) {
            float *own = values + tile + thread_start<S>() + v * S::SPAN;
            if (run_live<S>(elements, v)) feed_run(own, y[v], keep);
        }
    }
}

void kernel_feed_sums(Stream *s, const SumRequantize *a, const Residual *r) {
    if (a->out.hi == a->out.lo) return;
    int nodes = a->in.partitions;
    Tiles t = make_tiles<FeedShape>(stream_device(s), a->out.hi - a->out.lo, nodes, 0);
    with_codec(a->in_codec, [&](auto codec) {
        feed_sums_kernel<decltype(codec)::VALUE>
            <<<tile_grid<FeedShape>(t, nodes), CODEC_THREADS, 0, stream_handle(s)>>>(*a, *r, t,
                                                                                     group_index(
                                                                                         a->in_group));
    });
    check_launch(s, "feed sums");
}

// blockIdx.y: the partition. ROTATE: the transform is the rotation.
template <bool ROTATE>
__global__ void __launch_bounds__(CODEC_THREADS)
    feed_grads_kernel(const __grid_constant__ QuantizePartitions a, const __grid_constant__ Residual r,
                      const __grid_constant__ Tiles t, const __grid_constant__ RoundingSchedule rotation) {
    typedef FeedShape S;
    if (r.frozen) return;
    const int64_t begin = blockIdx.y * a.bucket.matrix_per_rank + a.lo;
    const int64_t position = partition_position(&a, blockIdx.y) + a.lo;
    const bool keep = residual_counts(r);
    SegmentCursor segment = no_segment();
    int64_t tile = worker_start<S>(t);
    for (int turn = 0; turn < t.per_worker && tile < t.n; turn++, tile += tile_size<S>(t)) {
        const int elements = tile_elements<S>(t, t.n - tile);
#pragma unroll
        for (int v = 0; v < S::RUNS; v++) {
            const int64_t at = tile + thread_start<S>() + v * S::SPAN;
            const bool live = run_live<S>(elements, v);
            float y[PACKED] = {};
            if (live) load_floats(a.grads + begin + at, y);
#pragma unroll
            for (int e = 0; e < PACKED; e++) y[e] = f32_mul(y[e], a.scale);
            transform_run<ROTATE>(y, a, position + (live ? at : tile), segment, rotation);
            if (live) feed_run(r.values + begin + at, y, keep);
        }
    }
}

void kernel_feed_grads(Stream *s, const QuantizePartitions *a, const Residual *r) {
    if (a->hi == a->lo) return;
    Tiles t = make_tiles<FeedShape>(stream_device(s), a->hi - a->lo, a->slots, 0);
    auto kernel = a->transform == TRANSFORM_ROTATION ? feed_grads_kernel<true> : feed_grads_kernel<false>;
    kernel<<<tile_grid<FeedShape>(t, a->slots), CODEC_THREADS, 0, stream_handle(s)>>>(*a, *r, t,
                                                                                      rounding_schedule(
                                                                                          a->rotation));
    check_launch(s, "feed gradients");
}

// blockIdx.y: the partition.
template <Codec CODEC>
__global__ void __launch_bounds__(CODEC_THREADS)
    keep_residual_kernel(const __grid_constant__ QuantizePartitions a, const __grid_constant__ Residual r,
                         const __grid_constant__ Tiles t, GroupIndex index) {
    typedef FeedShape S;
    if (r.frozen) return;
    const uint8_t *message = outgoing_message(a.send, a.self_slot, a.self, blockIdx.y, &a.message);
    Received sent = partition_received(message, a.message, 1, index, 0);
    float *values = r.values + blockIdx.y * a.bucket.matrix_per_rank + a.lo;
    const int64_t position = partition_position(&a, blockIdx.y) + a.lo;
    SegmentCursor segment = no_segment();
    int64_t tile = worker_start<S>(t);
    for (int turn = 0; turn < t.per_worker && tile < t.n; turn++, tile += tile_size<S>(t)) {
        const int elements = tile_elements<S>(t, t.n - tile);
        float y[S::RUNS][PACKED];
        sum_tile<S, CODEC>(y, sent, tile, elements);
#pragma unroll
        for (int v = 0; v < S::RUNS; v++) {
            if (!run_live<S>(elements, v)) continue;
            const int64_t at = tile + thread_start<S>() + v * S::SPAN;
            float x[PACKED];
            seek_segment(segment, a.table, position + at);
            load_floats(values + at, x);
#pragma unroll
            for (int e = 0; e < PACKED; e++)
                x[e] = residual_rest(x[e], y[v][e], position + at + e >= segment.end);
            store_floats(values + at, x);
        }
    }
}

void kernel_keep_residual(Stream *s, const QuantizePartitions *a, const Residual *r) {
    if (a->hi == a->lo) return;
    Tiles t = make_tiles<FeedShape>(stream_device(s), a->hi - a->lo, a->slots, 0);
    with_any_codec(a->codec, [&](auto codec) {
        keep_residual_kernel<decltype(codec)::VALUE>
            <<<tile_grid<FeedShape>(t, a->slots), CODEC_THREADS, 0, stream_handle(s)>>>(*a, *r, t,
                                                                                        group_index(
                                                                                            a->group));
    });
    check_launch(s, "keep the residual");
}
