// Uniform and normal numbers from the counter RNG, inline for host and device, so that CPU ranks
// and GPUs draw bitwise identical weights. C libraries differ in the last bit of log, sin and cos,
// so these are built from IEEE double operations, which round identically everywhere. Branch-free,
// so that compilers vectorize it.
#pragma once
#include "llmc/base/numerics.h"

// Returns the index-th block of 128 random bits of a stream. A seed has separate streams for each
// purpose (PURPOSE_*).
HD_FN Philox4 counter_bits(uint64_t seed, uint32_t purpose, uint32_t stream, uint64_t index) {
    uint32_t key1 = (uint32_t)(seed >> 32) ^ purpose;
    return philox4x32_10((uint32_t)seed, key1, (uint32_t)index, (uint32_t)(index >> 32), stream, 0);
}

// Converts an integer below 2^52 to double exactly: puts it into the mantissa of 2^52 and subtracts
// 2^52.
HD_FN double f64_from_integer(uint64_t i) { return f64_sub(f64_from_bits(0x4330000000000000u | i), 0x1p52); }

// Returns a uniform number in [0, 1), an exact multiple of 2^-53.
HD_FN double uniform53(uint32_t high, uint32_t low) {
    double upper = f64_mul(f64_from_integer(high), 0x1p-32);
    return f64_add(upper, f64_mul(f64_from_integer(low >> 11), 0x1p-53));
}

// Returns the natural logarithm of x, 2^-64 < x <= 1, with relative error 4e-16. x = 2^-e m with m
// in [sqrt(1/2), sqrt(2)), and ln m = 2 atanh(s) with s = (m - 1) / (m + 1), |s| < 0.172. atanh is
// the series of s^(2k+1) / (2k+1); the first omitted term is below 1e-18 of the sum. m - 1 is
// exact, which preserves accuracy near x = 1.
HD_FN double log_unit(double x) {
    const uint64_t sqrt_half = 0x3FE6A09E667F3BCDu, offset = 64;
    // the exponent field now holds offset - e
    uint64_t shifted = f64_bits(x) - sqrt_half + (offset << 52);
    double exponent = f64_sub(f64_from_integer(shifted >> 52), (double)offset);
    double f = f64_sub(f64_from_bits((shifted & 0x000FFFFFFFFFFFFFu) + sqrt_half), 1.0);
    double s = f64_div(f, f64_add(f, 2.0)), z = f64_mul(s, s);
    double p = 2.0 / 21;
    p = f64_add(f64_mul(p, z), 2.0 / 19);
    p = f64_add(f64_mul(p, z), 2.0 / 17);
    p = f64_add(f64_mul(p, z), 2.0 / 15);
    p = f64_add(f64_mul(p, z), 2.0 / 13);
    p = f64_add(f64_mul(p, z), 2.0 / 11);
    p = f64_add(f64_mul(p, z), 2.0 / 9);
    p = f64_add(f64_mul(p, z), 2.0 / 7);
    p = f64_add(f64_mul(p, z), 2.0 / 5);
    p = f64_add(f64_mul(p, z), 2.0 / 3);
    double mantissa = f64_add(f64_mul(2.0, s), f64_mul(f64_mul(p, z), s));
    return f64_add(f64_mul(exponent, 0.69314718055994530942), mantissa);
}

// Computes the cosine and sine of u turns, u in [0, 1] a multiple of 2^-53, with relative error
// 4e-16. Subtracts the nearest quarter turn exactly. The remainder, at most an eighth of a turn,
// uses the Taylor series up to the 17th power, with an error below 1e-17.
HD_FN void circle(double u, double *cosine, double *sine) {
    // adding 1.5 x 2^52 rounds to an integer, held in the low mantissa bits
    double shifted = f64_add(f64_mul(u, 4.0), 0x1.8p52);
    uint64_t quarter = f64_bits(shifted);
    double r = f64_sub(u, f64_mul(f64_sub(shifted, 0x1.8p52), 0.25));
    double a = f64_mul(r, 6.2831853071795864769), z = f64_mul(a, a);
    double s = 1.0 / 355687428096000;  // 17!
    s = f64_add(f64_mul(s, z), -1.0 / 1307674368000);
    s = f64_add(f64_mul(s, z), 1.0 / 6227020800);
    s = f64_add(f64_mul(s, z), -1.0 / 39916800);
    s = f64_add(f64_mul(s, z), 1.0 / 362880);
    s = f64_add(f64_mul(s, z), -1.0 / 5040);
    s = f64_add(f64_mul(s, z), 1.0 / 120);
    s = f64_add(f64_mul(s, z), -1.0 / 6);
    s = f64_add(f64_mul(f64_mul(s, z), a), a);
    double c = 1.0 / 20922789888000;  // 16!
    c = f64_add(f64_mul(c, z), -1.0 / 87178291200);
    c = f64_add(f64_mul(c, z), 1.0 / 479001600);
    c = f64_add(f64_mul(c, z), -1.0 / 3628800);
    c = f64_add(f64_mul(c, z), 1.0 / 40320);
    c = f64_add(f64_mul(c, z), -1.0 / 720);
    c = f64_add(f64_mul(c, z), 1.0 / 24);
    c = f64_add(f64_mul(c, z), -1.0 / 2);
    c = f64_add(f64_mul(c, z), 1.0);
    // Quarter turns 0, 1, 2, 3 map (cos, sin) = (c, s) to (c, s), (-s, c), (-c, -s), (s, -c).
    uint64_t swapped = 0 - (quarter & 1), differ = (f64_bits(c) ^ f64_bits(s)) & swapped;
    *cosine = f64_from_bits((f64_bits(c) ^ differ) ^ ((quarter + 1) >> 1 & 1) << 63);
    *sine = f64_from_bits((f64_bits(s) ^ differ) ^ (quarter >> 1 & 1) << 63);
}

// Computes two independent normal(0, 1) numbers from 128 random bits (Box and Muller 1958).
HD_FN void normal_pair(Philox4 bits, double normal[2]) {
    double unit = f64_sub(1.0, uniform53(bits.v[0], bits.v[1]));
    double radius = f64_sqrt(f64_mul(-2.0, log_unit(unit)));
    double cosine, sine;
    circle(uniform53(bits.v[2], bits.v[3]), &cosine, &sine);
    normal[0] = f64_mul(radius, cosine);
    normal[1] = f64_mul(radius, sine);
}

// Computes two independent uniform numbers in [-1, 1) from 128 random bits.
HD_FN void symmetric_pair(Philox4 bits, double drawn[2]) {
    for (int i = 0; i < 2; i++)
        drawn[i] = f64_sub(f64_mul(2.0, uniform53(bits.v[2 * i], bits.v[2 * i + 1])), 1.0);
}
