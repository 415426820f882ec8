// Pseudo-random inputs of the kernels with special values. For kernels_dump.c and dump_outer.h.
#pragma once
#include "sdp4bit/codec.h"
#include "test/gpu/dump.h"

// Kinds of 512-value blocks. The kind of a block and its infinities and NaNs depend only on the
// position, so sums over ranks add NaN to NaN, and infinities of equal or different sign.
enum { BLOCK = 512 };
typedef enum BlockKind {
    ZEROS,
    DENORMAL,
    NEAR_NORMAL,
    NEAR_LIFT,
    HUGE_VALUES,
    WITH_INFINITY,
    WITH_NAN,
    SPARSE,
    ORDINARY
} BlockKind;

static inline BlockKind block_kind(int64_t block) {
    uint32_t draw = rounding_bits((RoundingKey){SEED, 0, PURPOSE_DATA, 1}, (uint64_t)block).v[0] % 64;
    return draw < ORDINARY ? (BlockKind)draw : ORDINARY;
}

// Returns a float with random sign and mantissa and a biased exponent from lo to hi (0: denormal).
static inline float with_exponent(uint32_t bits, uint32_t lo, uint32_t hi) {
    return f32_from_bits((bits & 0x807FFFFFu) | (lo + (bits >> 23) % (hi - lo + 1)) << 23);
}

static inline float special(BlockKind kind, uint32_t bits, bool not_finite) {
    switch (kind) {
        case ZEROS: return bits & 1 ? -0.0f : 0.0f;
        case DENORMAL: return with_exponent(bits, 0, 0);
        case NEAR_NORMAL: return with_exponent(bits, 0, 3);
        case NEAR_LIFT: return with_exponent(bits, 20, 31);  // 2^-107 to 2^-96
        case HUGE_VALUES: return with_exponent(bits, 250, 254);
        case WITH_INFINITY:
            return not_finite ? f32_from_bits((bits & 0x80000000u) | 0x7F800000u)
                              : with_exponent(bits, 110, 128);
        case WITH_NAN: return not_finite ? f32_from_bits(0x7FC00000u) : with_exponent(bits, 110, 128);
        case SPARSE: return bits % 64 ? 0.0f : with_exponent(bits, 118, 124);
        default: return with_exponent(bits, 112, 122);
    }
}

// Fills x with n values from random stream `source`. Magnitudes vary between blocks, as in
// gradients. ordinary: no special blocks.
static inline void fill(float *x, int64_t n, uint32_t source, bool ordinary) {
    for (int64_t at = 0; at < n; at += 4) {
        Philox4 bits = rounding_bits((RoundingKey){SEED, source, PURPOSE_DATA, 0}, (uint64_t)at);
        BlockKind kind = ordinary ? ORDINARY : block_kind(at / BLOCK);
        uint32_t size = (uint32_t)(at / BLOCK * 7 % 23);
        for (int e = 0; e < 4 && at + e < n; e++) {
            float value = kind == ORDINARY ? with_exponent(bits.v[e], 100 + size, 106 + size)
                                           : special(kind, bits.v[e], (at + e) % 193 == 7);
            x[at + e] = value;
        }
    }
}

static inline float *uploaded_values(Dump *d, int64_t n, uint32_t source, bool ordinary) {
    float *host = (float *)xmalloc((size_t)(n + 4) * sizeof *host, "test data");
    fill(host, n, source, ordinary);
    float *memory = (float *)upload(d, host, n * (int64_t)sizeof *host);
    stream_synchronize(d->stream);
    free(host);
    return memory;
}
