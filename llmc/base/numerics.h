// Machine-independent numerics: explicit IEEE arithmetic, bf16 conversion, and the counter-based
// random bits of Philox. Inline for host and device, so that CPU ranks and GPUs compute bitwise
// identical results.
//
// Every operation is an IEEE-754 operation, rounded to nearest even, never contracted into an FMA,
// with denormals kept. Host code is built with -ffp-contract=off; device code uses explicit
// rounding intrinsics.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// Marks a function for host and device. One of the four places where a preprocessor conditional is
// allowed.
#ifdef __CUDACC__
#define HD_FN static __host__ __device__ __forceinline__
#else
#define HD_FN static inline
#endif

// --- IEEE arithmetic that no compiler flag can change -------------------------------------------

#ifdef __CUDA_ARCH__
// Ends the program in an unreachable case.
HD_FN void stop_here(void) { __trap(); }
HD_FN float f32_mul(float a, float b) { return __fmul_rn(a, b); }
HD_FN float f32_add(float a, float b) { return __fadd_rn(a, b); }
HD_FN float f32_sub(float a, float b) { return __fsub_rn(a, b); }
HD_FN float f32_div(float a, float b) { return __fdiv_rn(a, b); }
HD_FN float f32_sqrt(float a) { return __fsqrt_rn(a); }
HD_FN double f64_mul(double a, double b) { return __dmul_rn(a, b); }
HD_FN double f64_add(double a, double b) { return __dadd_rn(a, b); }
HD_FN double f64_sub(double a, double b) { return __dsub_rn(a, b); }
HD_FN double f64_div(double a, double b) { return __ddiv_rn(a, b); }
HD_FN double f64_sqrt(double a) { return __dsqrt_rn(a); }
HD_FN uint64_t f64_bits(double x) { return (uint64_t)__double_as_longlong(x); }
HD_FN double f64_from_bits(uint64_t u) { return __longlong_as_double((long long)u); }
HD_FN uint32_t f32_bits(float x) { return __float_as_uint(x); }
HD_FN float f32_from_bits(uint32_t u) { return __uint_as_float(u); }
HD_FN uint32_t mul_hi32(uint32_t a, uint32_t b) { return __umulhi(a, b); }
#else
HD_FN void stop_here(void) { abort(); }
HD_FN float f32_mul(float a, float b) { return a * b; }
HD_FN float f32_add(float a, float b) { return a + b; }
HD_FN float f32_sub(float a, float b) { return a - b; }
HD_FN float f32_div(float a, float b) { return a / b; }
HD_FN float f32_sqrt(float a) { return sqrtf(a); }
HD_FN double f64_mul(double a, double b) { return a * b; }
HD_FN double f64_add(double a, double b) { return a + b; }
HD_FN double f64_sub(double a, double b) { return a - b; }
HD_FN double f64_div(double a, double b) { return a / b; }
HD_FN double f64_sqrt(double a) { return sqrt(a); }
HD_FN uint64_t f64_bits(double x) {
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}
HD_FN double f64_from_bits(uint64_t u) {
    double x;
    memcpy(&x, &u, sizeof x);
    return x;
}
HD_FN uint32_t f32_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}
HD_FN float f32_from_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}
HD_FN uint32_t mul_hi32(uint32_t a, uint32_t b) { return (uint32_t)(((uint64_t)a * b) >> 32); }
#endif

// Converts to bfloat16, rounding to nearest even. Every NaN becomes the quiet NaN 0x7FC0 with its
// sign.
HD_FN uint16_t bf16_from_float(float x) {
    uint32_t u = f32_bits(x);
    uint32_t nan = (u & 0x7FFFFFFFu) > 0x7F800000u;
    uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
    return (uint16_t)(nan ? ((u >> 16) & 0x8000u) | 0x7FC0u : rounded);
}
HD_FN float bf16_to_float(uint16_t h) { return f32_from_bits((uint32_t)h << 16); }

// --- random bits: Philox4x32 (Salmon et al., SC'11) ---------------------------------------------

typedef struct Philox4 {
    uint32_t v[4];
} Philox4;

// Multipliers of the rounds, and the key's increments (Weyl sequence).
#define PHILOX_M0 0xD2511F53u
#define PHILOX_M1 0xCD9E8D57u
#define PHILOX_W0 0x9E3779B9u
#define PHILOX_W1 0xBB67AE85u

HD_FN Philox4 philox4x32(int rounds, uint32_t key0, uint32_t key1, uint32_t c0, uint32_t c1, uint32_t c2,
                         uint32_t c3) {
    for (int round = 0; round < rounds; round++) {
        uint32_t hi0 = mul_hi32(PHILOX_M0, c0), lo0 = PHILOX_M0 * c0;
        uint32_t hi1 = mul_hi32(PHILOX_M1, c2), lo1 = PHILOX_M1 * c2;
        c0 = hi1 ^ c1 ^ key0;
        c1 = lo1;
        c2 = hi0 ^ c3 ^ key1;
        c3 = lo0;
        key0 += PHILOX_W0;
        key1 += PHILOX_W1;
    }
    Philox4 out = {{c0, c1, c2, c3}};
    return out;
}

HD_FN Philox4 philox4x32_10(uint32_t key0, uint32_t key1, uint32_t c0, uint32_t c1, uint32_t c2,
                            uint32_t c3) {
    return philox4x32(10, key0, key1, c0, c1, c2, c3);
}

// Returns 16 of the 128 bits: word e / 2, its low half if e is even, else its high half. e in 0..7.
HD_FN uint32_t philox_half(Philox4 bits, int e) { return (bits.v[e >> 1] >> (16 * (e & 1))) & 0xFFFFu; }

// Uses of random bits. The purpose is part of Philox's key, so no two uses share bits.
enum {
    PURPOSE_GRAD_LEVEL1 = 1,
    PURPOSE_GRAD_LEVEL2 = 2,
    PURPOSE_WEIGHT = 3,
    PURPOSE_DROPOUT = 4,
    PURPOSE_INIT = 5,
    PURPOSE_SAMPLE = 6,
    PURPOSE_ROTATION = 7,
    PURPOSE_ACTIVATION = 8,           // hidden states sent between pipeline stages
    PURPOSE_ACTIVATION_GRADIENT = 9,  // their gradients, sent back
    PURPOSE_OUTER = 16,               // pseudo-gradients sent between replica groups
    PURPOSE_OUTER_MEAN = 17,          // mean of the pseudo-gradients, sent back
    PURPOSE_OUTER_ROTATION = 18,      // rotations of both
    PURPOSE_OUTER_MEAN_ROTATION = 19
};
