// Arithmetic of SDP4Bit: the codec table, quantization, transforms, rounding bits, and the
// summation tree of the norm. Inline for host and device, so CPU ranks and GPUs compute bitwise
// identical results. This file and layout.h define the wire format; README.md has a worked example.
//
// Exact regime: every operation is a single IEEE-754 operation, nearly always fp32, written with
// the functions of numerics.h.
#pragma once
#include <assert.h>
#include <stdbool.h>

#include "llmc/base/dtype.h"

// --- rounding bits ------------------------------------------------------------------------------

// Selects a stream of rounding bits. source: the dp rank at level 1, the node at level 2, 0 for
// weights. Different sources have different bits, so that their rounding errors average out.
typedef struct RoundingKey {
    uint32_t seed, step, purpose, source;
} RoundingKey;
static_assert(sizeof(RoundingKey) == 16, "the key is four Philox words");

// Returns 16-bit random numbers for the 8 elements at logical offsets 8*block .. 8*block+7. Element
// e uses word e>>1: the low half if e is even, else the high half. Uses 7 Philox rounds, the fewest
// that pass BigCrush, for speed; initialization and dropout use the usual 10.
enum { ROUNDING_ROUNDS = 7, ROUNDING_BLOCK = 8 };
HD_FN Philox4 rounding_bits(RoundingKey key, uint64_t block) {
    uint32_t low = (uint32_t)block, high = (uint32_t)(block >> 32);
    return philox4x32(ROUNDING_ROUNDS, key.seed, key.purpose, low, high, key.step, key.source);
}

// --- transforms before gradients are quantized --------------------------------------------------

// Hadamard: order 32 without random signs, as in the paper (section 3.3). Rotation: random signs,
// then Hadamard of order 256, which makes any group nearly Gaussian, as EDEN assumes.
typedef enum Transform { TRANSFORM_NONE, TRANSFORM_HADAMARD, TRANSFORM_ROTATION } Transform;

// Transforms `order` values in place by the unnormalized Sylvester-Hadamard matrix. order: a power
// of two. Stages have strides 1, 2, 4, ...; the upper element of a pair gets the difference.
// Applying the transform twice multiplies by the order, so the receiver divides by the order.
#define HADAMARD_ORDER 32
#define HADAMARD_INVERSE 0.03125f
#define ROTATION_ORDER 256
#define ROTATION_INVERSE 0.00390625f
HD_FN void hadamard(float *x, int order) {
    for (int stride = 1; stride < order; stride *= 2) {
        for (int i = 0; i < order; i++) {
            if (i & stride) continue;
            float lower = x[i], upper = x[i + stride];
            x[i] = f32_add(lower, upper);
            x[i + stride] = f32_sub(lower, upper);
        }
    }
}

// Returns the sign bits of the 32 elements at logical offsets 32*word .. 32*word+31: bit i flips
// the sign of element i. All ranks must use the same key, because their values are summed before
// the rotation is inverted.
HD_FN uint32_t rotation_signs(RoundingKey key, uint64_t word) {
    return rounding_bits(key, word / 4).v[word % 4];
}
// Returns -x if bit `i` of the signs is set, else x.
HD_FN float with_sign(float x, uint32_t signs, int i) {
    return f32_from_bits(f32_bits(x) ^ (signs >> i & 1u) << 31);
}

// Flips the signs of one block of ROTATION_ORDER elements. logical: offset of the first element.
HD_FN void rotation_flip(float *x, RoundingKey key, int64_t logical) {
    for (int i = 0; i < ROTATION_ORDER; i += 32) {
        uint32_t signs = rotation_signs(key, (uint64_t)(logical + i) / 32);
        for (int k = 0; k < 32; k++) x[i + k] = with_sign(x[i + k], signs, k);
    }
}

HD_FN int transform_order(Transform transform) {
    return transform == TRANSFORM_ROTATION ? ROTATION_ORDER : HADAMARD_ORDER;
}
// Transforms one block of transform_order elements. logical: offset of the first element. key:
// selects the rotation's signs.
HD_FN void transform_block(float *x, Transform transform, RoundingKey key, int64_t logical) {
    if (transform == TRANSFORM_NONE) return;
    if (transform == TRANSFORM_ROTATION) rotation_flip(x, key, logical);
    hadamard(x, transform_order(transform));
}

// --- the table of codecs ------------------------------------------------------------------------

// One row per codec: ROW(ID, name, bits per element, L).
//   plain    L = 0: the values themselves, as floats of that many bits
//   uniform  codes -L..L in two's complement, and one fp32 scale per group
//   EDEN     codes with the sign in the top bit and the index of one of L levels below it, and one
//            fp32 scale per EDEN_GROUP elements
// Codes form a bit stream: element i's code is bits [i * bits, (i + 1) * bits), and bit k of the
// stream is bit k % 8 of byte k / 8. README.md, "Adding a codec", lists what else a row needs.
#define PLAIN_CODECS(ROW) \
    ROW(FP32, "fp32", 32, 0) \
    ROW(BF16, "bf16", 16, 0)
#define UNIFORM_CODECS(ROW) \
    ROW(INT4, "int4", 4, 7) \
    ROW(INT8, "int8", 8, 127)
#define EDEN_CODECS(ROW) \
    ROW(EDEN4, "eden4", 4, 8) \
    ROW(EDEN3, "eden3", 3, 4) \
    ROW(EDEN2, "eden2", 2, 2)
#define ALL_CODECS(ROW) PLAIN_CODECS(ROW) UNIFORM_CODECS(ROW) EDEN_CODECS(ROW)

#define CODEC_ID(ID, NAME, BITS, LEVELS) CODEC_##ID,
typedef enum Codec { ALL_CODECS(CODEC_ID) } Codec;
#define CODEC_COUNT(ID, NAME, BITS, LEVELS) +1
enum { CODECS = 0 ALL_CODECS(CODEC_COUNT) };

// The codec of unquantized weights.
#define FLOATX_CODEC (sizeof(floatX) == sizeof(uint16_t) ? CODEC_BF16 : CODEC_FP32)
// Bits accepted by the command-line options: "4|8" for uniform codecs, "4|3|2" for EDEN.
#define CODEC_BITS_CHOICE(ID, NAME, BITS, LEVELS) "|" #BITS
#define CODEC_BITS_CHOICES (&(UNIFORM_CODECS(CODEC_BITS_CHOICE))[1])
#define EDEN_BITS_CHOICES (&(EDEN_CODECS(CODEC_BITS_CHOICE))[1])

// LARGEST_GROUP limits the group size of weights. LARGEST_GRAD_GROUP limits the group sizes of
// gradients at both levels, and their lcm. EDEN groups are the blocks of the rotation, because
// EDEN's scale is unbiased only for elements mixed by the same rotation.
enum { LARGEST_GROUP = 16384, LARGEST_GRAD_GROUP = 4096, EDEN_GROUP = ROTATION_ORDER };
typedef enum Rounding { ROUND_NEAREST = 0, ROUND_STOCHASTIC = 1 } Rounding;

// Assumptions of other files: plain values are fp32 or bf16; codes fit into their bits and into a
// byte; 32 codes fill whole 32-bit words; code_stochastic supports up to 127 levels.
#define CHECK_PLAIN(ID, NAME, BITS, LEVELS) \
    static_assert(((BITS) == 32 || (BITS) == 16) && (LEVELS) == 0, NAME ": a plain codec");
#define CHECK_UNIFORM(ID, NAME, BITS, LEVELS) \
    static_assert((BITS) >= 2 && (BITS) <= 8 && (LEVELS) > 0 && (LEVELS) < 1 << ((BITS)-1) && \
                      HADAMARD_ORDER * (BITS) % 32 == 0, \
                  NAME ": a uniform codec");
#define CHECK_EDEN(ID, NAME, BITS, LEVELS) \
    static_assert((BITS) >= 2 && (BITS) <= 4 && (LEVELS) == 1 << ((BITS)-1), NAME ": an EDEN codec");
PLAIN_CODECS(CHECK_PLAIN)
UNIFORM_CODECS(CHECK_UNIFORM)
EDEN_CODECS(CHECK_EDEN)
static_assert(CODEC_FP32 == 0, "a zeroed format means unquantized");
static_assert(LARGEST_GROUP % HADAMARD_ORDER == 0 && LARGEST_GRAD_GROUP % HADAMARD_ORDER == 0,
              "groups are whole blocks");

typedef struct CodecInfo {
    const char *name;
    int bits;    // per element
    int levels;  // L of a uniform codec; number of positive levels of EDEN; 0 for plain codecs
} CodecInfo;

// Returns the codec's row; a value outside the enum ends the program.
HD_FN CodecInfo codec_info(Codec codec) {
    CodecInfo none = {0};
#define CODEC_ROW(ID, NAME, BITS, LEVELS) \
    case CODEC_##ID: { \
        CodecInfo row = {NAME, BITS, LEVELS}; \
        return row; \
    }
    switch (codec) { ALL_CODECS(CODEC_ROW) }
    stop_here();
    return none;
}
// Returns true if the codec sends codes and group scales.
HD_FN bool codec_grouped(Codec codec) { return codec_info(codec).levels > 0; }
HD_FN bool codec_eden(Codec codec) {
#define CODEC_IS(ID, NAME, BITS, LEVELS) || codec == CODEC_##ID
    return false EDEN_CODECS(CODEC_IS);
}

// Returns the bytes of the codes or plain values. elements: a multiple of 8 unless plain.
HD_FN int64_t codec_bytes(Codec codec, int64_t elements) { return elements * codec_info(codec).bits / 8; }

// Return the uniform or EDEN codec with this many bits; command-line options allow no other value.
#define CODEC_OF_BITS(ID, NAME, BITS, LEVELS) \
    if (bits == (BITS)) return CODEC_##ID;
HD_FN Codec codec_of_bits(int bits) {
    UNIFORM_CODECS(CODEC_OF_BITS)
    stop_here();
    return CODEC_FP32;
}
HD_FN Codec eden_of_bits(int bits) {
    EDEN_CODECS(CODEC_OF_BITS)
    stop_here();
    return CODEC_FP32;
}

// --- one group of a uniform codec ---------------------------------------------------------------

// Scale of the symmetric absmax quantizer (paper section 2.2). largest: the group's max |x| as
// bits, which is the unsigned maximum of f32_bits(x) & 0x7FFFFFFF. As integers, infinities and NaNs
// exceed all finite values.
#define LIFT_BELOW 0x0D800000u  // the bits of 2^-100
#define LIFT 16777216.0f        // 2^24
typedef struct GroupScale {
    float scale;    // sent: m / L; 0 if m is subnormal; NaN if any value is not finite
    float lift;     // v = (x * lift) * inverse is in [-L, L]. 1, or 2^24 if L / m would overflow
    float inverse;  // 0 if scale is 0 or NaN: every code is then 0
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

// Returns the value to round; 0 in groups whose codes are all zero, whatever x is.
HD_FN float group_scaled(float x, GroupScale g) {
    return g.inverse == 0.0f ? 0.0f : f32_mul(f32_mul(x, g.lift), g.inverse);
}

HD_FN int clamp_code(int q, int levels) { return q > levels ? levels : (q < -levels ? -levels : q); }

// Rounds to nearest, ties to even.
HD_FN int code_nearest(float v, int levels) { return clamp_code((int)rintf(v), levels); }

// Rounds stochastically: floor(v + u) with u uniform in [0, 1) from 16 random bits. An added offset
// keeps the sum in one binade, so the addition rounds v to the grid of u, whatever the sign of v.
// The grid is 2^-16 for up to 63 levels, else 2^-15 with 15-bit u. The float offset + u is
// assembled from its bits.
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

// Packs eight codes into the low 8 * bits bits.
HD_FN uint64_t pack_codes(const int q[8], int bits) {
    uint64_t mask = (1ull << bits) - 1, stream = 0;
    for (int e = 0; e < 8; e++) stream |= ((uint64_t)(int64_t)q[e] & mask) << (e * bits);
    return stream;
}
HD_FN int unpack_code(uint64_t stream, int e, int bits) {
    int half = 1 << (bits - 1), raw = (int)(stream >> (e * bits)) & (2 * half - 1);
    return (raw ^ half) - half;
}

// --- one group of EDEN --------------------------------------------------------------------------

// EDEN (Vargaftik et al., ICML 2022) for a rotated group z. Each element is coded as the level
// nearest to |z| / unit, and its sign.
//   scale   |z|^2 / <z, levels>. Then <z, decoded> = |z|^2, and the mean of the decoded vectors
//           over all rotations is z
//   levels  Lloyd-Max levels for a Gaussian of variance 1
//   unit    mean of the root mean square and a third of the largest magnitude. At 4 bits the error
//           is 4 % smaller than with the root mean square alone
#define EDEN4_LEVELS \
    0.128395036f, 0.388048291f, 0.656759143f, 0.942340434f, 1.25623119f, 1.6180464f, 2.06901717f, 2.73258948f
#define EDEN3_LEVELS 0.24509418f, 0.756005287f, 1.34390926f, 2.15194559f
#define EDEN2_LEVELS 0.452780038f, 1.51041758f
#define EDEN_UNIT_RMS 0.5f
#define EDEN_UNIT_LARGEST 0.166666672f

// Returns level k of the EDEN codec with this many bits.
HD_FN float eden_level(int bits, int k) {
    const float four[] = {EDEN4_LEVELS}, three[] = {EDEN3_LEVELS}, two[] = {EDEN2_LEVELS};
    return bits == 4 ? four[k] : bits == 3 ? three[k] : two[k];
}
// Returns the threshold between levels k and k + 1.
HD_FN float eden_threshold(int bits, int k) {
    return f32_mul(0.5f, f32_add(eden_level(bits, k), eden_level(bits, k + 1)));
}

// Scaling that keeps the sums over a group in range. largest: as for group_scale.
#define EDEN_TINY 0x2B800000u  // the bits of 2^-40
#define EDEN_HUGE 0x58800000u  // 2^50
#define EDEN_LIFT 0x1p80f      // and its inverse
typedef struct EdenLift {
    float lift;    // z = x * lift: 1, or a power of two that keeps the sum of squares in range
    float unlift;  // 1 / lift
    float scale;   // scale of an uncoded group: 0 if all values are subnormal, NaN if one is not finite
    bool coded;    // false: all codes are 0; true: eden_scale computes the scale
} EdenLift;
HD_FN EdenLift eden_lift(uint32_t largest) {
    EdenLift e = {1.0f, 1.0f, 0.0f, true};
    if (largest >= 0x7F800000u) e.scale = f32_from_bits(0x7FC00000u);
    e.coded = largest >= 0x00800000u && largest < 0x7F800000u;
    if (largest < EDEN_TINY) e.lift = EDEN_LIFT, e.unlift = 0x1p-80f;
    if (largest >= EDEN_HUGE) e.lift = 0x1p-80f, e.unlift = EDEN_LIFT;
    return e;
}
// Returns 1 / unit of a coded group. squares: sum of z * z; largest: largest |z|.
HD_FN float eden_inverse(float squares, float largest) {
    float rms = f32_mul(f32_sqrt(squares), 0.0625f);
    return f32_div(1.0f, f32_add(f32_mul(rms, EDEN_UNIT_RMS), f32_mul(largest, EDEN_UNIT_LARGEST)));
}
static_assert(EDEN_GROUP == 256, "0.0625 is the square root of 1 / EDEN_GROUP");

// Returns the code of an element. v: |z| / unit; negative: the sign bit of z.
HD_FN int eden_code(float v, uint32_t negative, int bits) {
    int level = 0, levels = 1 << (bits - 1);
    for (int k = 0; k + 1 < levels; k++) level += v > eden_threshold(bits, k);
    return level + (negative ? levels : 0);
}
// Inverse of eden_code: the level with its sign.
HD_FN float eden_value(int code, int bits) {
    int levels = 1 << (bits - 1);
    return with_sign(eden_level(bits, code & (levels - 1)), (uint32_t)code, bits - 1);
}
// Returns the scale of a coded group. squares, product: sums of z * z and of |z| * level. A scale
// that is not finite is sent as NaN, with zero codes.
HD_FN float eden_scale(float squares, float product, float unlift) {
    float scale = f32_mul(f32_div(squares, product), unlift);
    return (f32_bits(scale) & 0x7FFFFFFFu) < 0x7F800000u ? scale : f32_from_bits(0x7FC00000u);
}

// --- summation trees ----------------------------------------------------------------------------

// Sums n values as a perfect binary tree over adjacent pairs. Destroys x. n: a power of two. GPUs
// use the same tree: within threads, across lanes, then across blocks.
HD_FN float tree_sum(float *x, int n) {
    for (int stride = 1; stride < n; stride *= 2) {
        for (int i = 0; i < n; i += 2 * stride) x[i] = f32_add(x[i], x[i + stride]);
    }
    return x[0];
}
// The lowest level of the norm's tree (kernel_tree_sum). Callers pad missing values with 0.
HD_FN float tree_sum32(float *x) { return tree_sum(x, 32); }

// --- replica hash -------------------------------------------------------------------------------

// Mixes a weight's bits with its position in the arena (finalizer of splitmix64; Steele, Lea, Flood
// 2014). The replica hash is the sum over all weights modulo 2^64, so threads may sum in any order.
HD_FN uint64_t replica_mix(uint64_t position, uint32_t bits) {
    uint64_t z = (position + 1) * 0x9E3779B97F4A7C15ull + bits;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}
