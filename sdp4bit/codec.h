// THE definition of SDP4Bit's numbers: quantise, dequantise, the Hadamard transform, the random bits, the summation tree of the norm.
// Inline for host and device, so that CPU ranks and GPUs compute the same bits. Everything on the wire follows from this file and
// plan.h; sdp4bit/README.md explains it with a worked example. Included by plan.h, spikes.h and the tests,
// through the former by every kernel.
//
// Exact regime: every operation below is an IEEE-754 operation, nearly always fp32, rounded to nearest even, never contracted into an FMA, with
// denormals kept. Host code is built with -ffp-contract=off; device code spells the rounding (f32_mul and its kin).
#pragma once
#include "llmc/base/dtype.h"

// Names one stream of rounding bits. source: the dp rank at level 1, the node at level 2, 0 for weights. Without the source the
// ranks' rounding errors would correlate and not average out.
typedef struct RoundingKey {
    uint32_t seed, step, purpose, source;
} RoundingKey;

// The 16-bit random numbers of the 8 elements logical offset 8*block .. 8*block+7: element e uses half e&1 (low half first) of word e>>1. 7 rounds are the
// fewest that pass BigCrush; initialisation and dropout take the customary 10, but here a third fewer multiplications is time on the wire's path.
enum { ROUNDING_ROUNDS = 7 };
HD_FN Philox4 rounding_bits(RoundingKey key, uint64_t block) {
    return philox4x32(ROUNDING_ROUNDS, key.seed, key.purpose, (uint32_t)block, (uint32_t)(block >> 32), key.step, key.source);
}
HD_FN uint32_t rounding_bits_element(Philox4 bits, int e) { return (bits.v[e >> 1] >> (16 * (e & 1))) & 0xFFFFu; }

// --- Hadamard transform of order 32 (paper section 3.3) --------------------------------------------------------------------------

// Unnormalised Sylvester transform of 32 values in place: stages 1, 2, 4, 8, 16, the difference in the upper lane. Applying it twice
// multiplies by 32; the receiver's last stage multiplies by HADAMARD_INVERSE once.
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

// --- codecs ----------------------------------------------------------------------------------------------------------------------

// What travels for one element. FP32 and BF16 have no groups and no scales. A further codec is a row here and in codec_info, its store and decode
// in kernels_cpu.c and in the kernels of the GPU (all that names CODEC_INT4), and its flag's values in config_table.c.
typedef enum Codec { CODEC_FP32 = 0, CODEC_BF16 = 1, CODEC_INT8 = 2, CODEC_INT4 = 3, CODECS = 4 } Codec;
enum { LARGEST_GROUP = 16384, LARGEST_GRAD_GROUP = 4096 };  // values per scale: of weights; of gradients, also of both hops' common multiple
#define FLOATX_CODEC (sizeof(floatX) == sizeof(uint16_t) ? CODEC_BF16 : CODEC_FP32)  // of weights as they are
typedef enum Rounding { ROUND_NEAREST = 0, ROUND_STOCHASTIC = 1 } Rounding;

typedef struct CodecInfo {
    const char *name;
    int bits;    // per element
    int levels;  // largest code L: codes are -L..L; 0 for a codec without groups
} CodecInfo;

HD_FN CodecInfo codec_info(int codec) {
    CodecInfo row = {"fp32", 32, 0};
    if (codec == CODEC_BF16) { row.name = "bf16"; row.bits = 16; }
    if (codec == CODEC_INT8) { row.name = "int8"; row.bits = 8; row.levels = 127; }
    if (codec == CODEC_INT4) { row.name = "int4"; row.bits = 4; row.levels = 7; }
    return row;
}

// Symmetric absmax quantiser of one group (paper section 2.2; fp32 scale m/L). `largest` is the group's max |x| as bits:
// the unsigned maximum of f32_bits(x) & 0x7FFFFFFF, which orders finite values, infinities and NaNs correctly.
#define LIFT_BELOW 0x0D800000u  // the bits of 2^-100
#define LIFT 16777216.0f         // 2^24
typedef struct GroupScale {
    float scale;   // sent: m / L; 0 for a group below the normal range; NaN (0x7FC00000) for a group with a non-finite value
    float lift;    // v = (x * lift) * inverse lies in [-L, L]; lift is 1, or 2^24 where L / m would overflow
    float inverse; // 0 where scale is 0 or NaN: every code is then 0
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
HD_FN float group_scaled(float x, GroupScale g) { return g.inverse == 0.0f ? 0.0f : f32_mul(f32_mul(x, g.lift), g.inverse); }

HD_FN int clamp_code(int q, int levels) { return q > levels ? levels : (q < -levels ? -levels : q); }

// Round to nearest, ties to even.
HD_FN int code_nearest(float v, int levels) { return clamp_code((int)rintf(v), levels); }

// Stochastic: floor(v + u), u uniform in [0, 1) from 16 random bits. An offset keeps v + u inside one power of two, so that the addition rounds v to the
// same grid as u whatever its sign, 2^-16 for codes up to 63 and 2^-15 (u of 15 bits) above, and the float of offset + u is spelled, not computed.
#define STOCHASTIC_FINE 0x43400000u    // 192, in [128, 256)
#define STOCHASTIC_COARSE 0x43C00000u  // 384, in [256, 512)
HD_FN int code_stochastic(float v, int levels, uint32_t random16) {
    uint32_t lifted_u = levels < 64 ? STOCHASTIC_FINE | random16 : STOCHASTIC_COARSE | (random16 & 0x7FFFu);
    return clamp_code((int)floorf(f32_add(v, f32_from_bits(lifted_u))) - (levels < 64 ? 192 : 384), levels);
}

HD_FN float code_value(int q, float scale) { return f32_mul((float)q, scale); }

// int4: two codes a byte, two's complement nibbles, the even-index element in bits 3..0, the odd one in bits 7..4.
HD_FN uint8_t int4_pack(int even, int odd) { return (uint8_t)((even & 0xF) | ((odd & 0xF) << 4)); }
HD_FN int int4_even(uint8_t byte) { return (int)(byte & 0xF) - ((byte & 0x8) << 1); }
HD_FN int int4_odd(uint8_t byte) { return (int)(byte >> 4) - ((byte & 0x80) >> 3); }

// --- the norm's summation tree ---------------------------------------------------------------------------------------------------

// Sums 32 values as a perfect binary tree over adjacent pairs; where there are fewer, the caller fills up with 0. It is the lowest part of the norm's tree
// (kernel_tree_sum), which a GPU computes by adding in a thread, across lanes, then across blocks, whatever the granularity. Destroys x.
HD_FN float tree_sum32(float *x) {
    for (int stride = 1; stride < 32; stride *= 2) {
        for (int i = 0; i < 32; i += 2 * stride) x[i] = f32_add(x[i], x[i + stride]);
    }
    return x[0];
}

// --- replica hash ----------------------------------------------------------------------------------------------------------------

// 64-bit mix of one weight's bits and its position in the arena; a replica's hash is the sum modulo 2^64 over all weights, so any
// order and any split of the work gives the same number. Finaliser of splitmix64 (Steele, Lea, Flood 2014).
HD_FN uint64_t replica_mix(uint64_t position, uint32_t bits) {
    uint64_t z = (position + 1) * 0x9E3779B97F4A7C15ull + bits;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}
