// Weight kernels of the exact regime on GPUs: AdamW fused with quantization, application of
// gathered messages, replica hash, initial master weights. Bit-identical to kernels_cpu.c. Called
// by qwd.c and llmc/state.
#include "sdp4bit/adamw.h"
#include "sdp4bit/kernels_cuda.cuh"

// --- update -------------------------------------------------------------------------------------

// Sets the fault unless one is set. Atomic, because other updates and checks may run concurrently.
DEV_FN void mark_refused(const UpdateShard &a) {
    atomicCAS(reinterpret_cast<unsigned long long *>(a.fault), 0ull, (unsigned long long)a.code);
}

// Updates a vector that has refused elements. Reloads it, so that the common path need not keep the
// old values in registers.
DEV_FN void refuse_elements(const UpdateShard &a, const AdamScalars &scalars, const float *grads,
                            int64_t at) {
#pragma unroll 1
    for (int64_t i = at; i < at + PACKED; i++) {
        adamw_element(&a.master[i], &a.exp_avg[i], &a.exp_avg_sq[i], grads[i], scalars);
    }
    mark_refused(a);
}

// Updates the vector at `at` and returns its master weights. Lanes do not swap loads to cover whole
// sectors, because the extra instructions cost more than the traffic they save.
DEV_FN void update_vector(float master[PACKED], const UpdateShard &a, const AdamScalars &scalars,
                          const float *grads, int64_t at, bool live) {
    float grad[PACKED], m[PACKED], v[PACKED];
    bool sound = true;
    if (!live) return;
    load_floats(a.master + at, master);
    if (!grads) return;
    load_read_only(grads + at, grad);
    load_floats(a.exp_avg + at, m);
    load_floats(a.exp_avg_sq + at, v);
#pragma unroll
    for (int e = 0; e < PACKED; e++) sound &= adamw_step(&master[e], &m[e], &v[e], grad[e], scalars);
    if (sound) {
        store_floats(a.master + at, master);
        store_floats(a.exp_avg + at, m);
        store_floats(a.exp_avg_sq + at, v);
    } else {
        refuse_elements(a, scalars, grads, at);
        load_floats(a.master + at, master);
    }
}

// Returns the values to code: master weights or their difference from model weights; 0 if !live.
DEV_FN void coded_values(float x[PACKED], const float master[PACKED], const floatX *weights, bool difference,
                         bool live) {
    float replica[PACKED];
    if (live && difference) unpack(load_packed(weights), replica);
#pragma unroll
    for (int e = 0; e < PACKED; e++)
        x[e] = !live ? 0.0f : difference ? f32_sub(master[e], replica[e]) : master[e];
}

// Calls launch(Shape) for the group size. If a warp holds whole groups, a thread has one vector:
// two would need too many registers, and AdamW needs many threads in flight.
template <class Launch> static void with_update_shape(int group, Launch launch) {
    with_lanes<1, PACKED, 4, 32>(group, launch, [&] { with_group(group, launch); });
}

template <class S> struct UpdateBlocks {
    static constexpr int PER_MULTIPROCESSOR = S::RUNS == 1 ? 4 : S::RUNS == 2 ? 2 : 1;
};

template <class S, Codec CODEC>
__global__ void __launch_bounds__(CODEC_THREADS, UpdateBlocks<S>::PER_MULTIPROCESSOR)
    update_kernel(const __grid_constant__ UpdateShard a, const __grid_constant__ Tiles t,
                  const __grid_constant__ RoundingSchedule schedule) {
    __shared__ BlockMaxima maxima;
    bool applied = a.control->applied != 0, difference = a.difference;
    int64_t position = a.rank * a.bucket.matrix_per_rank, tile = worker_start<S>(t);
    TileWriter writer = make_writer<S, CODEC>(a.codes, a.scales, a.rounding, position, t, tile);
    AdamScalars scalars = adam_scalars(&a, a.weight_decay);
    SegmentCursor segment = no_segment();
    clear_maxima<S>(&maxima);
    for (int turn = 0; turn < t.per_worker && tile < t.n; turn++) {
        const int elements = tile_elements<S>(t, t.n - tile);
        float x[S::RUNS][PACKED] = {};
        if (applied) {
#pragma unroll
            for (int v = 0; v < S::RUNS; v++) {
                int64_t at = tile + thread_start<S>() + v * S::SPAN;
                bool live = run_live<S>(elements, v);
                float master[PACKED];
                update_vector(master, a, scalars, a.matrix_grads, at, live);
                coded_values(x[v], master, a.matrix_weights + at, difference, live);
            }
        }
        write_tile<S, CODEC>(writer, x, elements, t, segment, a.table, schedule, &maxima, turn);
        next_tile<S, CODEC>(writer, t);
        tile += tile_size<S>(t);
    }
}

// Updates the four elements at `at`, whose master weights are p, and returns them.
DEV_FN float4 adamw_vector(const UpdateShard &a, float4 p, int64_t at) {
    float4 grad = __ldcs(reinterpret_cast<const float4 *>(a.matrix_grads + at)),
           m = *reinterpret_cast<const float4 *>(a.exp_avg + at);
    float4 v = *reinterpret_cast<const float4 *>(a.exp_avg_sq + at);
    AdamScalars scalars = adam_scalars(&a, a.weight_decay);
    bool sound = adamw_element(&p.x, &m.x, &v.x, grad.x, scalars);
    sound &= adamw_element(&p.y, &m.y, &v.y, grad.y, scalars);
    sound &= adamw_element(&p.z, &m.z, &v.z, grad.z, scalars);
    sound &= adamw_element(&p.w, &m.w, &v.w, grad.w, scalars);
    if (!sound) mark_refused(a);
    *reinterpret_cast<float4 *>(a.master + at) = p;
    *reinterpret_cast<float4 *>(a.exp_avg + at) = m;
    *reinterpret_cast<float4 *>(a.exp_avg_sq + at) = v;
    return p;
}

// Plain codecs: sends rounded master weights. With only four elements per thread, enough threads
// are in flight to hide the divisions.
enum { PLAIN_VALUES = 4, PLAIN_BLOCKS = 5 };
template <Codec CODEC>
__global__ void __launch_bounds__(CODEC_THREADS, PLAIN_BLOCKS)
    update_plain_kernel(const __grid_constant__ UpdateShard a) {
    // A shard is a multiple of 32 elements
    int64_t at = ((int64_t)blockIdx.x * CODEC_THREADS + threadIdx.x) * PLAIN_VALUES;
    if (at >= a.bucket.matrix_per_rank || !a.control->applied) return;
    float4 p = *reinterpret_cast<const float4 *>(a.master + at);
    if (a.matrix_grads) p = adamw_vector(a, p, at);
    if constexpr (CodecRow<CODEC>::BITS == 32) {
        *reinterpret_cast<float4 *>(reinterpret_cast<float *>(a.codes) + at) = p;
    } else {
        uint32_t low = (uint32_t)bf16_from_float(p.x) | (uint32_t)bf16_from_float(p.y) << 16,
                 high = (uint32_t)bf16_from_float(p.z) | (uint32_t)bf16_from_float(p.w) << 16;
        *reinterpret_cast<uint2 *>(reinterpret_cast<uint16_t *>(a.codes) + at) = make_uint2(low, high);
    }
}

// One tail element per thread.
__global__ void __launch_bounds__(CODEC_THREADS) update_tail_kernel(const __grid_constant__ UpdateShard a) {
    int64_t i = (int64_t)blockIdx.x * CODEC_THREADS + threadIdx.x;
    if (i >= a.bucket.tail_per_rank || !a.control->applied) return;
    int64_t at = a.bucket.matrix_per_rank + i;
    int64_t averages = update_tail_averages(&a) + i, squares = update_tail_squares(&a) + i;
    float grad = a.tail_grads[i];
    float master = a.master[at], m = a.exp_avg[averages], v = a.exp_avg_sq[squares];
    if (!adamw_element(&master, &m, &v, grad, adam_scalars(&a, 0.0f))) mark_refused(a);
    a.master[at] = master;
    a.exp_avg[averages] = m;
    a.exp_avg_sq[squares] = v;
    reinterpret_cast<floatX *>(a.tail)[i] = floatX_from_float(master);
}

void kernel_update_shard(Stream *s, const UpdateShard *a) {
    int64_t matrix = a->bucket.matrix_per_rank;
    if (matrix > 0) {
        with_codec(a->codec, [&](auto codec) {
            constexpr Codec CODEC = decltype(codec)::VALUE;
            if constexpr (CodecRow<CODEC>::GROUPED) {
                with_update_shape(a->group, [&](auto shape) {
                    using S = decltype(shape);
                    Tiles t = make_tiles<S>(stream_device(s), matrix, 1, a->group);
                    update_kernel<S, CODEC><<<tile_grid<S>(t, 1), CODEC_THREADS, 0, stream_handle(s)>>>(
                        *a, t, rounding_schedule(a->key));
                });
            } else {
                unsigned blocks = (unsigned)ceil_div64(matrix, CODEC_THREADS * PLAIN_VALUES);
                update_plain_kernel<CODEC><<<blocks, CODEC_THREADS, 0, stream_handle(s)>>>(*a);
            }
        });
        check_launch(s, "update");
    }
    if (a->bucket.tail_per_rank > 0) {
        update_tail_kernel<<<(unsigned)ceil_div64(a->bucket.tail_per_rank, CODEC_THREADS), CODEC_THREADS, 0,
                             stream_handle(s)>>>(*a);
        check_launch(s, "update the tail");
    }
}

// --- apply --------------------------------------------------------------------------------------

enum { APPLY_VECTORS = 4, APPLY_SPAN = APPLY_VECTORS * BLOCK_SPAN };

// Returns message `slot`, and the rank whose shard it holds.
DEV_FN const uint8_t *gathered_message(const ApplyWeights &a, int slot, int64_t *rank) {
    *rank = gather_rank(a.nodes, a.per_node, slot);
    return a.messages + slot * a.message.bytes;
}

// blockIdx.y: the message.
template <Codec CODEC>
__global__ void __launch_bounds__(CODEC_THREADS)
    apply_kernel(const __grid_constant__ ApplyWeights a, GroupIndex index) {
    if (!a.control->applied) return;
    int64_t rank;
    const uint8_t *message = gathered_message(a, blockIdx.y, &rank);
    const MessageSections from = message_sections(&a.message, 0);
    const float *scales = reinterpret_cast<const float *>(message + from.scales);
    floatX *weights = a.weights + rank * a.bucket.matrix_per_rank;
    const bool add = a.difference && CodecRow<CODEC>::GROUPED;
    const int64_t first = (int64_t)blockIdx.x * APPLY_SPAN + threadIdx.x * PACKED;
    Raw<CODEC> raw[APPLY_VECTORS];
    float scale[APPLY_VECTORS];
    Packed128 replica[APPLY_VECTORS];
#pragma unroll
    for (int v = 0; v < APPLY_VECTORS; v++) {
        int64_t at = first + v * BLOCK_SPAN;
        if (at >= a.bucket.matrix_per_rank) continue;
        raw[v] = load_raw<CODEC>(message + from.codes + at * CodecRow<CODEC>::BITS / 8);
        if (CodecRow<CODEC>::GROUPED) scale[v] = __ldg(scales + group_of(index, at));
        if (add) replica[v] = load_packed(weights + at);
    }
#pragma unroll
    for (int v = 0; v < APPLY_VECTORS; v++) {
        int64_t at = first + v * BLOCK_SPAN;
        if (at >= a.bucket.matrix_per_rank) continue;
        float x[PACKED], w[PACKED];
        uint32_t word[PACKED / 2];
        decode_raw(x, raw[v]);
        if (add) unpack(replica[v], w);
#pragma unroll
        for (int e = 0; e < PACKED; e++) {
            if (CodecRow<CODEC>::GROUPED) x[e] = f32_mul(x[e], scale[v]);
            if (add) x[e] = f32_add(w[e], x[e]);
        }
#pragma unroll
        for (int i = 0; i < PACKED / 2; i++)
            word[i] = (uint32_t)floatX_from_float(x[2 * i]) | (uint32_t)floatX_from_float(x[2 * i + 1]) << 16;
        store_packed(weights + at, Packed128{make_uint4(word[0], word[1], word[2], word[3])});
    }
}

// blockIdx.y: the message. Converts weights to fp32 and back, which makes NaNs the same as on CPUs.
__global__ void __launch_bounds__(CODEC_THREADS) apply_tail_kernel(const __grid_constant__ ApplyWeights a) {
    int64_t i = (int64_t)blockIdx.x * CODEC_THREADS + threadIdx.x;
    if (i >= a.bucket.tail_per_rank || !a.control->applied) return;
    int64_t rank;
    const uint8_t *message = gathered_message(a, blockIdx.y, &rank);
    floatX weight = __ldg(reinterpret_cast<const floatX *>(message + message_sections(&a.message, 0).tail) +
                          i);
    a.weights[a.bucket.matrix_elements + rank * a.bucket.tail_per_rank + i] = floatX_from_float(
        floatX_to_float(weight));
}

template <Codec CODEC> static void launch_apply(Stream *s, const ApplyWeights *a) {
    dim3 grid((unsigned)ceil_div64(a->bucket.matrix_per_rank, APPLY_SPAN),
              (unsigned)(a->nodes * a->per_node));
    apply_kernel<CODEC><<<grid, CODEC_THREADS, 0, stream_handle(s)>>>(*a, group_index(a->group));
}

void kernel_apply_weights(Stream *s, const ApplyWeights *a) {
    if (a->bucket.matrix_per_rank > 0) {
        with_codec(a->codec, [&](auto codec) { launch_apply<decltype(codec)::VALUE>(s, a); });
        check_launch(s, "apply weights");
    }
    if (a->bucket.tail_per_rank > 0) {
        dim3 grid((unsigned)ceil_div64(a->bucket.tail_per_rank, CODEC_THREADS),
                  (unsigned)(a->nodes * a->per_node));
        apply_tail_kernel<<<grid, CODEC_THREADS, 0, stream_handle(s)>>>(*a);
        check_launch(s, "apply the tail's weights");
    }
}

__global__ void __launch_bounds__(CODEC_THREADS)
    keep_kernel(const StepStatus *control, uint4 *to, const uint4 *from, int64_t n) {
    int64_t i = (int64_t)blockIdx.x * CODEC_THREADS + threadIdx.x;
    if (i < n && control->applied) to[i] = from[i];
}

void kernel_keep_message(Stream *s, const StepStatus *control, uint8_t *to, const uint8_t *from, int64_t n) {
    int64_t words = n / (int64_t)sizeof(uint4);
    if (words == 0) return;
    keep_kernel<<<(unsigned)ceil_div64(words, CODEC_THREADS), CODEC_THREADS, 0, stream_handle(s)>>>(
        control, reinterpret_cast<uint4 *>(to), reinterpret_cast<const uint4 *>(from), words);
    check_launch(s, "keep a message");
}

// --- replicas -----------------------------------------------------------------------------------

__global__ void __launch_bounds__(CODEC_THREADS)
    replica_hash_kernel(unsigned long long *hash, const floatX *weights, int64_t first, int64_t n) {
    unsigned long long sum = 0;
    for_own_elements(n, [&](int64_t i) { sum += replica_mix((uint64_t)(first + i), weights[i]); });
    add_warp_sum(hash, sum);
}

void kernel_replica_hash(Stream *s, uint64_t *hash, const floatX *weights, int64_t first, int64_t n) {
    if (n <= 0) return;
    replica_hash_kernel<<<stride_blocks(s, n), CODEC_THREADS, 0, stream_handle(s)>>>(
        reinterpret_cast<unsigned long long *>(hash), weights, first, n);
    check_launch(s, "replica hash");
}

__global__ void __launch_bounds__(CODEC_THREADS)
    widen_kernel(float *master, const floatX *weights, int64_t n) {
    for_own_elements(n, [=](int64_t i) { master[i] = floatX_to_float(weights[i]); });
}

void kernel_widen(Stream *s, float *master, const floatX *weights, int64_t n) {
    if (n <= 0) return;
    widen_kernel<<<stride_blocks(s, n), CODEC_THREADS, 0, stream_handle(s)>>>(master, weights, n);
    check_launch(s, "widen");
}
