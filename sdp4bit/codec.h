// SDP4Bit's numbers: the table of codecs, quantise, dequantise, the Hadamard transform, the
// rounding bits, the summation tree of the norm. Inline for host and device, so that CPU ranks and
// GPUs compute the same bits. Everything on the wire follows from this file and plan.h. README.md
// explains it with a worked example. Included by plan.h, spikes.h and the tests, and through them
// by every kernel.
//
// Exact regime: every operation is an IEEE-754 operation, nearly always fp32, as numerics.h spells
// it.
#pragma once
#include <assert.h>
#include <stdbool.h>

#include "llmc/base/dtype.h"

// --- rounding bits ------------------------------------------------------------------------------

// Names one stream of rounding bits. source: the dp rank at level 1, the node at level 2, 0 for
// weights. Without it the ranks' rounding errors would be equal and would not average out.
typedef struct RoundingKey {
    uint32_t seed, step, purpose, source;
} RoundingKey;
static_assert(sizeof(RoundingKey) == 16, "Philox takes these four words");

// 16-bit random numbers of the 8 elements at logical offsets 8*block .. 8*block+7. Element e uses
// half e&1 (the low half first) of word e>>1. 7 rounds are the fewest that pass BigCrush.
// Initialisation and dropout take the customary 10; here the third saved is time on the wire's
// path.
enum { ROUNDING_ROUNDS = 7, ROUNDING_BLOCK = 8 };
HD_FN Philox4 rounding_bits(RoundingKey key, uint64_t block) {
    uint32_t low = (uint32_t)block, high = (uint32_t)(block >> 32);
    return philox4x32(ROUNDING_ROUNDS, key.seed, key.purpose, low, high, key.step, key.source);
}

// --- Hadamard transform of order 32 (paper section 3.3) -----------------------------------------

// Unnormalised Sylvester transform of 32 values in place: stages 1, 2, 4, 8, 16, the difference in
// the upper lane. Applied twice it multiplies by 32. The receiver multiplies by HADAMARD_INVERSE
// once.
#define HADAMARD_ORDER 32
#define HADAMARD_INVERSE 0.03125f
HD_FN void hadamard32(float *x) {
    for (int stride = 1; stride < HADAMARD_ORDER; stride *= 2) {
        for (int i = 0; i < HADAMARD_ORDER; i++) {
            if (i & stride) continue;
            float lower = x[i], upper = x[i + stride];
            x[i] = f32_add(lower, upper);
            x[i + stride] = f32_sub(lower, upper);
        }
    }
}

// --- the table of codecs ------------------------------------------------------------------------

// What travels for one element: ROW(ID, name, bits per element, L), one row per codec. A plain
// codec (L = 0) sends the values themselves, as floats of so many bits. A grouped codec sends codes
// -L..L, and one fp32 scale for each group of elements. Its codes are a stream of bits: element i's
// code lies at bits [i * bits, (i + 1) * bits), in two's complement, and bit k of the stream is bit
// k % 8 of byte k / 8. README.md, "Adding a codec", tells what else a row needs.
#define PLAIN_CODECS(ROW)    \
    ROW(FP32, "fp32", 32, 0) \
    ROW(BF16, "bf16", 16, 0)
#define GROUPED_CODECS(ROW) \
    ROW(INT4, "int4", 4, 7) \
    ROW(INT8, "int8", 8, 127)
#define ALL_CODECS(ROW) PLAIN_CODECS(ROW) GROUPED_CODECS(ROW)

#define CODEC_ID(ID, NAME, BITS, LEVELS) CODEC_##ID,
typedef enum Codec { ALL_CODECS(CODEC_ID) } Codec;
#define CODEC_COUNT(ID, NAME, BITS, LEVELS) +1
enum { CODECS = 0 ALL_CODECS(CODEC_COUNT) };

// The codec of weights as they are.
#define FLOATX_CODEC (sizeof(floatX) == sizeof(uint16_t) ? CODEC_BF16 : CODEC_FP32)
// "4|8": the bits of the grouped codecs, for the table of flags.
#define CODEC_BITS_CHOICE(ID, NAME, BITS, LEVELS) "|" #BITS
#define CODEC_BITS_CHOICES (&(GROUPED_CODECS(CODEC_BITS_CHOICE))[1])

// Values per scale: of weights; of gradients, also of both hops' common multiple.
enum { LARGEST_GROUP = 16384, LARGEST_GRAD_GROUP = 4096 };
typedef enum Rounding { ROUND_NEAREST = 0, ROUND_STOCHASTIC = 1 } Rounding;

// What the rest of this folder takes for granted: values are fp32 or bf16; codes fit into their
// bits and a byte; a block of 32 elements is whole words; code_stochastic knows up to 127 levels.
#define CHECK_PLAIN(ID, NAME, BITS, LEVELS) \
    static_assert(((BITS) == 32 || (BITS) == 16) && (LEVELS) == 0, NAME ": a plain codec");
#define CHECK_GROUPED(ID, NAME, BITS, LEVELS)                                                        \
    static_assert((BITS) >= 2 && (BITS) <= 8 && (LEVELS) > 0 && (LEVELS) < 1 << ((BITS) - 1) &&     \
                      HADAMARD_ORDER * (BITS) % 32 == 0,                                             \
                  NAME ": a grouped codec");
PLAIN_CODECS(CHECK_PLAIN)
GROUPED_CODECS(CHECK_GROUPED)
static_assert(CODEC_FP32 == 0, "what is not set travels as it is");
static_assert(LARGEST_GROUP % HADAMARD_ORDER == 0 && LARGEST_GRAD_GROUP % HADAMARD_ORDER == 0,
              "groups are whole blocks");

typedef struct CodecInfo {
    const char *name;
    int bits;    // per element
    int levels;  // L; 0: plain
} CodecInfo;

// The codec's row. Only an enumerator has one: anything else ends the program.
HD_FN CodecInfo codec_info(Codec codec) {
    CodecInfo none = {0};
#define CODEC_ROW(ID, NAME, BITS, LEVELS)      \
    case CODEC_##ID: {                         \
        CodecInfo row = {NAME, BITS, LEVELS};  \
        return row;                            \
    }
    switch (codec) { ALL_CODECS(CODEC_ROW) }
    stop_here();
    return none;
}
HD_FN bool codec_grouped(Codec codec) { return codec_info(codec).levels > 0; }

// Bytes of so many elements' codes or values; elements is a multiple of 8, or the codec is plain.
HD_FN int64_t codec_bytes(Codec codec, int64_t elements) {
    return elements * codec_info(codec).bits / 8;
}

// The grouped codec with so many bits. No other number gets here: the options know the table.
HD_FN Codec codec_of_bits(int bits) {
#define CODEC_OF_BITS(ID, NAME, BITS, LEVELS) \
    if (bits == (BITS)) return CODEC_##ID;
    GROUPED_CODECS(CODEC_OF_BITS)
    stop_here();
    return CODEC_FP32;
}

// --- one group ----------------------------------------------------------------------------------

// Symmetric absmax quantiser of one group (paper section 2.2; fp32 scale m/L). `largest` is the
// group's max |x| as bits: the unsigned maximum of f32_bits(x) & 0x7FFFFFFF, which orders finite
// values, infinities and NaNs correctly.
#define LIFT_BELOW 0x0D800000u  // the bits of 2^-100
#define LIFT 16777216.0f        // 2^24
typedef struct GroupScale {
    float scale;    // sent: m / L. Below the normal range 0. With a value that is not finite NaN
    float lift;     // v = (x * lift) * inverse lies in [-L, L]. 1, or 2^24 where L / m would overflow
    float inverse;  // 0 where scale is 0 or NaN: every code is then 0
} GroupScale;

HD_FN GroupScale group_scale(uint32_t largest, int levels) {
    GroupScale g = {0.0f, 1.0f, 0.0f};
    if (largest >= 0x7F800000u) {
        g.scale = f32_from_bits(0x7FC00000u);
        return g;
    }
    if (largest < 0x00800000u) return g;
    float m = f32_from_bits(largest);
    g.scale = f32_div(m, (float)levels);
    if (largest < LIFT_BELOW) g.lift = LIFT;
    g.inverse = f32_div((float)levels, f32_mul(m, g.lift));
    return g;
}

// The value to be rounded; 0 for groups that send zero codes, whatever x is.
HD_FN float group_scaled(float x, GroupScale g) {
    return g.inverse == 0.0f ? 0.0f : f32_mul(f32_mul(x, g.lift), g.inverse);
}

HD_FN int clamp_code(int q, int levels) { return q > levels ? levels : (q < -levels ? -levels : q); }

// Round to nearest, ties to even.
HD_FN int code_nearest(float v, int levels) { return clamp_code((int)rintf(v), levels); }

// Stochastic: floor(v + u), u uniform in [0, 1) from 16 random bits. An offset keeps v + u inside
// one power of two, so that the addition rounds v to the same grid as u, whatever its sign. The
// grid is 2^-16 for up to 63 levels; above, it is 2^-15, and u has 15 bits. The float offset + u is
// spelled by its bits, not computed.
#define STOCHASTIC_FINE 0x43400000u    // 192, in [128, 256)
#define STOCHASTIC_COARSE 0x43C00000u  // 384, in [256, 512)
HD_FN bool stochastic_is_fine(int levels) { return levels < 64; }
HD_FN int code_stochastic(float v, int levels, uint32_t random16) {
    bool fine = stochastic_is_fine(levels);
    uint32_t lifted_u = fine ? STOCHASTIC_FINE | random16 : STOCHASTIC_COARSE | (random16 & 0x7FFFu);
    int lifted = (int)floorf(f32_add(v, f32_from_bits(lifted_u)));
    return clamp_code(lifted - (fine ? 192 : 384), levels);
}

HD_FN float code_value(int q, float scale) { return f32_mul((float)q, scale); }

// Eight codes as a number whose low 8 * bits bits are what travels; and back.
HD_FN uint64_t pack_codes(const int q[8], int bits) {
    uint64_t mask = (1ull << bits) - 1, stream = 0;
    for (int e = 0; e < 8; e++) stream |= ((uint64_t)(int64_t)q[e] & mask) << (e * bits);
    return stream;
}
HD_FN int unpack_code(uint64_t stream, int e, int bits) {
    int half = 1 << (bits - 1), raw = (int)(stream >> (e * bits)) & (2 * half - 1);
    return (raw ^ half) - half;
}

// --- the norm's summation tree ------------------------------------------------------------------

// Sums 32 values as a perfect binary tree over adjacent pairs. Where there are fewer, the caller
// fills up with 0. It is the lowest part of the norm's tree (kernel_tree_sum). A GPU adds in a
// thread, across lanes, then across blocks, and gets the same bits at any granularity. Destroys x.
HD_FN float tree_sum32(float *x) {
    for (int stride = 1; stride < 32; stride *= 2) {
        for (int i = 0; i < 32; i += 2 * stride) x[i] = f32_add(x[i], x[i + stride]);
    }
    return x[0];
}

// --- replica hash -------------------------------------------------------------------------------

// 64-bit mix of one weight's bits and its position in the arena. A replica's hash is the sum modulo
// 2^64 over all weights, so any order and any split of the work gives the same number. Finaliser of
// splitmix64 (Steele, Lea, Flood 2014).
HD_FN uint64_t replica_mix(uint64_t position, uint32_t bits) {
    uint64_t z = (position + 1) * 0x9E3779B97F4A7C15ull + bits;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}
