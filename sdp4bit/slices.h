// Writes messages on the host: looks up tensors, quantizes groups and stores plain values.
// Reference for the GPU kernels. Included by kernels_cpu.c and update_host.c.
#pragma once
#include <string.h>

#include "sdp4bit/kernels.h"
LLMC_BEGIN

enum { BLOCK = HADAMARD_ORDER };
static_assert(BLOCK % ROUNDING_BLOCK == 0, "pack_codes packs ROUNDING_BLOCK codes");

// Returns the tensor at position `at` of a matrix part; padding belongs to the tensor before it.
static inline const Segment *segment_of(SegmentTable table, int64_t at) {
    int lo = 0, hi = table.count - 1;
    while (lo < hi) {
        int middle = (lo + hi + 1) / 2;
        if (table.segment[middle].start <= at) lo = middle;
        else hi = middle - 1;
    }
    return table.segment + lo;
}

static inline uint32_t largest_bits(const float *x, int n) {
    uint32_t largest = 0;
    for (int i = 0; i < n; i++) {
        uint32_t bits = f32_bits(x[i]) & 0x7FFFFFFFu;
        if (bits > largest) largest = bits;
    }
    return largest;
}

// Destination and format of one shard range. Groups are counted from its first element.
typedef struct SliceWriter {
    uint8_t *codes;
    float *scales;
    Codec codec;
    int group;
    Rounding rounding;
    RoundingKey key;
} SliceWriter;

// Stores n values of a plain codec.
static inline void store_values(uint8_t *to, Codec codec, const float *x, int64_t n) {
    if (codec_info(codec).bits == 32) {
        memcpy(to, x, (size_t)n * sizeof(float));
    } else {
        uint16_t *half = (uint16_t *)(void *)to;
        for (int64_t i = 0; i < n; i++) half[i] = bf16_from_float(x[i]);
    }
}

// Quantizes one group. logical: offset of x[0] for the rounding bits. bits, levels: properties of
// the codec; callers pass constants, so that compilers unroll the loops.
static inline void quantize_group(const SliceWriter *w, const float *x, int64_t logical, uint8_t *codes,
                                  float *scale, int bits, int levels) {
    GroupScale g = group_scale(largest_bits(x, w->group), levels);
    *scale = g.scale;
    for (int i = 0; i < w->group; i += ROUNDING_BLOCK, codes += bits) {
        int q[ROUNDING_BLOCK];
        if (w->rounding == ROUND_STOCHASTIC) {
            Philox4 random = rounding_bits(w->key, (uint64_t)(logical + i) / ROUNDING_BLOCK);
            for (int e = 0; e < ROUNDING_BLOCK; e++) {
                q[e] = code_stochastic(group_scaled(x[i + e], g), levels, philox_half(random, e));
            }
        } else {
            for (int e = 0; e < ROUNDING_BLOCK; e++) q[e] = code_nearest(group_scaled(x[i + e], g), levels);
        }
        uint64_t stream = pack_codes(q, bits);
        memcpy(codes, &stream, (size_t)bits);
    }
}

// Quantizes one group of rotated values with an EDEN codec. bits: callers pass a constant.
static inline void eden_group(const float *x, uint8_t *codes, float *scale, int bits) {
    float squares[EDEN_GROUP], products[EDEN_GROUP], size[EDEN_GROUP];
    int code[EDEN_GROUP];
    uint32_t largest = largest_bits(x, EDEN_GROUP);
    EdenLift e = eden_lift(largest);
    *scale = e.scale;
    memset(codes, 0, (size_t)(EDEN_GROUP * bits / 8));
    if (!e.coded) return;
    for (int i = 0; i < EDEN_GROUP; i++) {
        size[i] = f32_mul(fabsf(x[i]), e.lift);
        squares[i] = f32_mul(size[i], size[i]);
    }
    float sum = tree_sum(squares, EDEN_GROUP);
    float inverse = eden_inverse(sum, f32_mul(f32_from_bits(largest), e.lift));
    for (int i = 0; i < EDEN_GROUP; i++) {
        code[i] = eden_code(f32_mul(size[i], inverse), f32_bits(x[i]) >> 31, bits);
        products[i] = f32_mul(size[i], fabsf(eden_value(code[i], bits)));
    }
    *scale = eden_scale(sum, tree_sum(products, EDEN_GROUP), e.unlift);
    if (*scale != *scale) return;
    for (int i = 0; i < EDEN_GROUP; i += ROUNDING_BLOCK, codes += bits) {
        uint64_t stream = pack_codes(code + i, bits);
        memcpy(codes, &stream, (size_t)bits);
    }
}

// Writes n elements at `offset` of the range. n: one group, or any number for plain codecs.
static inline void write_slice(const SliceWriter *w, int64_t offset, const float *x, int n, int64_t logical) {
    uint8_t *codes = w->codes + codec_bytes(w->codec, offset);
#define WRITE_VALUES(ID, NAME, BITS, LEVELS) \
    case CODEC_##ID: \
        store_values(codes, w->codec, x, n); \
        return;
#define WRITE_GROUP(ID, NAME, BITS, LEVELS) \
    case CODEC_##ID: \
        quantize_group(w, x, logical, codes, w->scales + offset / w->group, BITS, LEVELS); \
        return;
#define WRITE_EDEN(ID, NAME, BITS, LEVELS) \
    case CODEC_##ID: eden_group(x, codes, w->scales + offset / EDEN_GROUP, BITS); return;
    switch (w->codec) { PLAIN_CODECS(WRITE_VALUES) UNIFORM_CODECS(WRITE_GROUP) EDEN_CODECS(WRITE_EDEN) }
}

// Number of elements per write_slice: one group, or a block for plain codecs.
static inline int piece_size(Codec codec, int group) { return codec_grouped(codec) ? group : BLOCK; }

LLMC_END
