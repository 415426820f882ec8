// FP8 numbers: the formats E4M3 and E5M2, and the scale that maps a tensor into their range.
// Inline for host and device, so that CPU ranks and GPUs compute bitwise identical codes.
//
// Formats: Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv 2209.05433). E4M3 has no
// infinity. A code encodes x * scale, and x is about code * inverse.
#pragma once
#include <float.h>

#include "llmc/base/numerics.h"

typedef enum Fp8Type { FP8_E4M3, FP8_E5M2 } Fp8Type;

HD_FN float fp8_largest(Fp8Type type) { return type == FP8_E4M3 ? 448.0f : 57344.0f; }

// Returns the bits of |x|. Comparing them as integers orders finite values by size, and infinity
// and NaN above them.
HD_FN uint32_t fp8_absolute(float x) { return f32_bits(x) & 0x7FFFFFFFu; }

// Rounds to nearest even. Finite values beyond the range become the largest finite value. NaN and
// infinities become NaN, so that a product with them is NaN and the step is skipped. Straight-line
// code, so that loops vectorize.
HD_FN uint8_t fp8_encode(float x, Fp8Type type) {
    const int mantissa = type == FP8_E4M3 ? 3 : 2, bias = type == FP8_E4M3 ? 7 : 15;
    const int shift = 23 - mantissa;
    const uint32_t largest = f32_bits(fp8_largest(type)), smallest_normal = (uint32_t)(128 - bias) << 23;
    uint32_t bits = f32_bits(x), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7FFFFFFFu;
    uint32_t in_range = magnitude < largest ? magnitude : largest;
    // The last place of `unit` is the last place of the code, so the addition rounds, and the sum's
    // mantissa counts last places: 0 .. 2^(mantissa + 1).
    uint32_t exponent = in_range & 0x7F800000u,
             base = exponent > smallest_normal ? exponent : smallest_normal;
    uint32_t unit = base + ((uint32_t)shift << 23);
    uint32_t count = f32_bits(f32_add(f32_from_bits(in_range), f32_from_bits(unit))) - unit;
    uint32_t code = ((base - smallest_normal) >> shift) + count;
    uint32_t not_finite = (magnitude + 0x800000u) >> 31;  // 1 or 0; a mask, which needs no branch
    return (uint8_t)(sign | code | ((0u - not_finite) & 0x7Fu));
}

// Returns the code of x * scale. A stale scale (delayed scaling) can make the product of a finite x
// overflow fp32; it then becomes the largest finite value.
HD_FN uint8_t fp8_encode_scaled(float x, float scale, Fp8Type type) {
    const uint32_t infinity = 0x7F800000u;
    uint32_t bits = f32_bits(f32_mul(x, scale));
    uint32_t overflow = fp8_absolute(x) < infinity && (bits & 0x7FFFFFFFu) == infinity;
    return fp8_encode(f32_from_bits(bits - overflow), type);
}

HD_FN float fp8_decode(uint8_t code, Fp8Type type) {
    const int mantissa = type == FP8_E4M3 ? 3 : 2, bias = type == FP8_E4M3 ? 7 : 15;
    const uint32_t infinity = type == FP8_E4M3 ? 0x80u : 0x7Cu, first_nan = type == FP8_E4M3 ? 0x7Fu : 0x7Du;
    uint32_t sign = (uint32_t)(code & 0x80u) << 24, magnitude = code & 0x7Fu;
    // Shifted into fp32's fields, the exponent is too small by 127 - bias. The multiplication also
    // normalizes subnormals.
    float scaled = f32_from_bits(magnitude << (23 - mantissa));
    float power = f32_from_bits((uint32_t)(254 - bias) << 23);  // 2^(127 - bias)
    uint32_t bits = f32_bits(f32_mul(scaled, power));
    bits = magnitude == infinity ? 0x7F800000u : bits;
    bits = magnitude >= first_nan ? 0x7FC00000u : bits;
    return f32_from_bits(bits | sign);
}

// Scale of a tensor, or of one block of it. In device memory, 16-byte aligned: cuBLASLt reads
// `inverse` there.
typedef struct Fp8Scale {
    float inverse;    // multiplies the codes
    float scale;      // multiplies the tensor before it is encoded
    uint32_t absmax;  // largest |x| accumulated so far, as the bits of an fp32 number
    uint32_t unused;
} Fp8Scale;

// Returns the scale that maps absmax (bits of an fp32 number) to the largest value of `type`, or to
// 2^-margin of it. absmax 0, infinite or NaN: `otherwise`. As Transformer Engine computes it, but
// at least FLT_MIN, so that the inverse is finite.
HD_FN float fp8_scale(uint32_t absmax, Fp8Type type, int margin, float otherwise) {
    if (absmax == 0 || absmax >= 0x7F800000u) return otherwise;
    float target = f32_mul(fp8_largest(type), f32_from_bits((uint32_t)(127 - margin) << 23));
    float scale = f32_div(target, f32_from_bits(absmax));
    return scale > FLT_MAX ? FLT_MAX : scale < FLT_MIN ? FLT_MIN : scale;
}

// Returns the scale of a block: fp8_scale rounded down to a power of 2, so that its inverse is
// exact. absmax 0, infinite or NaN: 1.
HD_FN float fp8_block_scale(uint32_t absmax, Fp8Type type) {
    return f32_from_bits(f32_bits(fp8_scale(absmax, type, 0, 1.0f)) & 0xFF800000u);
}
