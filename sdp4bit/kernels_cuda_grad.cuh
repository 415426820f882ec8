// Device code shared by the gradient kernels: transforms, and sums of received messages. Included
// by kernels_cuda_grad.cu, kernels_cuda_requantize.cu and kernels_cuda_feedback.cu.
#pragma once
#include "sdp4bit/kernels_cuda.cuh"

// --- messages -----------------------------------------------------------------------------------

DEV_FN uint8_t *partition_message(const QuantizePartitions &a, int partition) {
    return outgoing_message(a.send, a.self_slot, a.self, partition % a.slots, &a.message);
}

// with_wide_group for gradients: a single warp holds a group of 2048. Its loads saturate the
// memory, and it needs no barriers.
template <class Launch> static void with_wide_shape(int group, Launch launch) {
    if (group == 2048) launch(Shape<8, PACKED, 256>());
    else with_wide_group(group, launch);
}

// Grid with one thread per tail element. slices: gridDim.y.
static inline dim3 tail_grid(int64_t elements, int slices) {
    return dim3((unsigned)ceil_div64(elements, CODEC_THREADS), (unsigned)slices);
}

// --- the transform ------------------------------------------------------------------------------

// Transforms one run that starts at `position`. ROTATE: use the rotation. Neighboring lanes must
// hold neighboring runs, and a warp whole blocks of the transform.
template <bool ROTATE, int RUN>
DEV_FN void transform_run(float (&x)[RUN], const QuantizePartitions &a, int64_t position,
                          SegmentCursor &segment, const RoundingSchedule &rotation) {
    if constexpr (ROTATE) {
        seek_segment(segment, a.table, position);
        flip_signs(x, rotation, position + segment.shift);
        hadamard_lanes<ROTATION_ORDER>(x);
    } else if (a.transform == TRANSFORM_HADAMARD) {
        hadamard_lanes(x);
    }
}

// --- sums over the sources ----------------------------------------------------------------------

// Received messages of one partition. Source k's codes and scales are at offset k * stride.
struct Received {
    const uint8_t *codes;
    const uint8_t *scales;
    int64_t stride;
    int sources;
    GroupIndex index;
};

// Addresses of this thread's runs in the next source's message.
template <int RUNS> struct SourceCursor { const uint8_t *codes[RUNS], *scales[RUNS]; };

// Decodes N values of one source. SMALL: the scale is below SMALL_SCALE.
template <Codec CODEC, bool SMALL, int N>
DEV_FN void source_values(float (&x)[N], const Raw<CODEC, N> &raw, float scale) {
    if constexpr (CodecRow<CODEC>::EDEN) {
        decode_eden(x, raw);
#pragma unroll
        for (int e = 0; e < N; e++) x[e] = f32_mul(x[e], scale);
    } else if constexpr (SMALL) {
        float biased[N];
        decode_biased(biased, raw);
        scale_biased<CODEC>(x, biased, scale);
    } else {
        decode_raw(x, raw);
#pragma unroll
        for (int e = 0; e < N && CodecRow<CODEC>::GROUPED; e++) x[e] = f32_mul(x[e], scale);
    }
}

// Adds BATCH loaded sources to acc in order. FIRST: the sum starts with the first of them. Plain
// values are added to -0, which makes a NaN quiet and preserves all other values.
template <class S, Codec CODEC, int BATCH, bool FIRST, bool SMALL>
DEV_FN void add_values(float (&acc)[S::RUNS][S::RUN], const Raw<CODEC, S::RUN> (&raw)[BATCH][S::RUNS],
                       const float (&scale)[BATCH][S::RUNS]) {
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
#pragma unroll
        for (int v = 0; v < S::RUNS; v++) {
            float x[S::RUN];
            source_values<CODEC, SMALL>(x, raw[b][v], scale[b][v]);
#pragma unroll
            for (int e = 0; e < S::RUN; e++) {
                bool first = FIRST && b == 0;
                if (!CodecRow<CODEC>::GROUPED) acc[v][e] = add_plain(first ? -0.0f : acc[v][e], x[e]);
                else acc[v][e] = first ? x[e] : f32_add(acc[v][e], x[e]);
            }
        }
    }
}

// Packed codes and scales of BATCH sources, in registers.
template <class S, Codec CODEC, int BATCH> struct Loaded {
    Raw<CODEC, S::RUN> raw[BATCH][S::RUNS];
    float scale[BATCH][S::RUNS];
};
// Issues the loads of the next BATCH sources together.
template <class S, Codec CODEC, int BATCH>
DEV_FN void load_sources(Loaded<S, CODEC, BATCH> &l, SourceCursor<S::RUNS> &at, int64_t stride) {
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
#pragma unroll
        for (int v = 0; v < S::RUNS; v++) {
            l.raw[b][v] = load_raw<CODEC, S::RUN>(at.codes[v]);
            at.codes[v] += stride;
            if constexpr (CodecRow<CODEC>::GROUPED) {
                l.scale[b][v] = __ldg(reinterpret_cast<const float *>(at.scales[v]));
                at.scales[v] += stride;
            } else {
                l.scale[b][v] = 0.0f;
            }
        }
    }
}
// Adds the loaded sources to acc in order. Called by the whole warp.
template <class S, Codec CODEC, int BATCH, bool FIRST>
DEV_FN void add_loaded(float (&acc)[S::RUNS][S::RUN], const Loaded<S, CODEC, BATCH> &l) {
    bool small = true;
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
#pragma unroll
        for (int v = 0; v < S::RUNS; v++) small = small && l.scale[b][v] < SMALL_SCALE;
    }
    constexpr bool ONE_WAY = !CodecRow<CODEC>::GROUPED || CodecRow<CODEC>::EDEN;
    if constexpr (ONE_WAY) add_values<S, CODEC, BATCH, FIRST, false>(acc, l.raw, l.scale);
    else if (__all_sync(ALL_LANES, small)) add_values<S, CODEC, BATCH, FIRST, true>(acc, l.raw, l.scale);
    else add_values<S, CODEC, BATCH, FIRST, false>(acc, l.raw, l.scale);
}
// Loads and adds BATCH sources; returns BATCH.
template <class S, Codec CODEC, int BATCH, bool FIRST>
DEV_FN int add_sources(float (&acc)[S::RUNS][S::RUN], SourceCursor<S::RUNS> &at, int64_t stride) {
    Loaded<S, CODEC, BATCH> l;
    load_sources(l, at, stride);
    add_loaded<S, CODEC, BATCH, FIRST>(acc, l);
    return BATCH;
}

// Number of sources that a thread loads at once: about 16 words, or one source if it is larger.
template <class S, Codec CODEC> struct SumBatch {
    static constexpr int WORDS = S::RUNS * Raw<CODEC, S::RUN>::WORDS;
    static constexpr int SOURCES = WORDS <= 4 ? 4 : WORDS <= 8 ? 2 : 1;
};

// Sums `left` sources from `at` in source order. Called by the whole warp.
template <class S, Codec CODEC>
DEV_FN void sum_sources(float (&acc)[S::RUNS][S::RUN], SourceCursor<S::RUNS> at, int64_t stride, int left) {
    constexpr int BATCH = SumBatch<S, CODEC>::SOURCES, HALF = BATCH > 2 ? 2 : 1;
    if (left >= BATCH) left -= add_sources<S, CODEC, BATCH, true>(acc, at, stride);
    else if (BATCH > 2 && left >= 2) left -= add_sources<S, CODEC, HALF, true>(acc, at, stride);
    else left -= add_sources<S, CODEC, 1, true>(acc, at, stride);
    while (left >= BATCH) left -= add_sources<S, CODEC, BATCH, false>(acc, at, stride);
    while (BATCH > 1 && left > 0) left -= add_sources<S, CODEC, 1, false>(acc, at, stride);
}

// Sums a tile. To avoid branches, runs past its last element read its first run. Block tiles then
// set them to 0; warp tiles need not, because these values never reach another group.
template <class S, Codec CODEC>
DEV_FN void sum_tile(float (&acc)[S::RUNS][S::RUN], const Received &r, int64_t tile, int elements) {
    SourceCursor<S::RUNS> at;
#pragma unroll
    for (int v = 0; v < S::RUNS; v++) {
        int64_t offset = tile + (run_live<S>(elements, v) ? thread_start<S>() + v * S::SPAN : 0);
        at.codes[v] = r.codes + offset * CodecRow<CODEC>::BITS / 8;
        at.scales[v] = r.scales + (CodecRow<CODEC>::GROUPED
                                       ? (int64_t)group_of(r.index, offset) * (int64_t)sizeof(float)
                                       : 0);
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

template <Codec TAIL> DEV_FN float sum_tail(const uint8_t *tail, int64_t stride, int sources, int64_t at) {
    float acc = -0.0f;
    for (int source = 0; source < sources; source++) {
        acc = add_plain(acc, load_plain_value<TAIL>(tail + source * stride, at));
    }
    return acc;
}

DEV_FN Received partition_received(const uint8_t *received, const MessageLayout &in, int sources,
                                   GroupIndex index, int64_t i) {
    MessageSections at = message_sections(&in, i);
    return Received{received + at.codes, received + at.scales, in.bytes, sources, index};
}
