// What the files of the CPU ops share: widening to fp32, a vectorizable exp, GELU, dropout
// multipliers, GEMM, workspace slices. Included by ops.c, ops_attention.c, ops_head.c, ops_init.c,
// test_ops.c and test_ops_head.c only.
#pragma once
#include <cblas.h>

#include "llmc/base/base.h"
#include "llmc/base/dtype.h"
#include "llmc/ranks/heartbeat.h"
#include "llmc/ops.h"
LLMC_BEGIN

// --- slices of a workspace -----------------------------------------------------------------------

// Ops cut their fp32 buffers from the caller's workspace one after the other, each on a cache line.
enum { SLICE_FLOATS = 16 };
static inline int64_t slice_floats(int64_t count) { return round_up64(count, SLICE_FLOATS); }
static inline float *take_slice(float **cursor, int64_t count) {
    float *slice = *cursor;
    *cursor += slice_floats(count);
    return slice;
}

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

// Products of large models take minutes: to the watchdog each part of one is progress. s may be
// NULL, in tests.
static inline void show_progress(Stream *s) {
    if (s) heartbeat_waiting(stream_site(s), false);
}

// --- floatX <-> fp32 -----------------------------------------------------------------------------

// n values as fp32: written to buffer, or x itself where floatX is already fp32 (one of the two
// branches is compiled away).
static inline const float *widen(const floatX *x, int64_t n, float *buffer) {
    if (sizeof(floatX) == sizeof(float)) return (const float *)(const void *)x;
    for (int64_t i = 0; i < n; i++) buffer[i] = floatX_to_float(x[i]);
    return buffer;
}
static inline void narrow(floatX *y, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = floatX_from_float(x[i]);
}

// --- sums and maxima in a fixed order ------------------------------------------------------------

// A reduction keeps LANES partial results and joins them as a tree. Element i goes to lane i %
// LANES. So the order is the same on every CPU, and the compiler can vectorize it without
// reordering sums.
enum { LANES = 16 };
static inline float join_lanes(float *lane) {
    for (int stride = LANES / 2; stride > 0; stride /= 2) {
        for (int l = 0; l < stride; l++) lane[l] += lane[l + stride];
    }
    return lane[0];
}

// --- functions -----------------------------------------------------------------------------------

// e^x to about 1 ulp, in straight-line code that vectorizes. x = n ln 2 + r with |r| <= ln 2 / 2. A
// Taylor polynomial makes e^r, and n goes into the exponent bits. Below -87.3 the result stays at
// e^-87.3 = 1.2e-38. Above 88.4 it is infinity. NaN stays NaN.
static inline float exp_approx(float x) {
    x = x < -87.3f ? -87.3f : x;
    x = x > 88.5f ? 88.5f : x;
    // Adding it rounds to an integer, which is then in the low mantissa bits.
    const float shifter = 0x1.8p23f;
    float shifted = x * 1.44269504f + shifter;
    float n = shifted - shifter;
    // Ln 2 in two parts, the first exact in the product.
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.0f / 5040.0f;
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    float power_of_2 = f32_from_bits((f32_bits(shifted) - f32_bits(shifter) + 127u) << 23);
    return p * power_of_2;
}

static inline float logistic(float x) { return 1.0f / (1.0f + exp_approx(-x)); }
// The logistic function of 2u, where u is the inner polynomial of tanh-GELU. It needs no tanh: 0.5
// (1 + tanh u) = 1 / (1 + e^-2u).
static inline float gelu_gate(float x) {
    float u = 0.79788456f * x * (1.0f + 0.044715f * x * x);
    return 1.0f / (1.0f + exp_approx(-2.0f * u));
}
static inline float gelu(float x) { return x * gelu_gate(x); }
static inline float gelu_derivative(float x) {
    float gate = gelu_gate(x);
    float du = 0.79788456f * (1.0f + 3.0f * 0.044715f * x * x);
    return gate + x * gate * (1.0f - gate) * 2.0f * du;
}

// What dropout multiplies n consecutive elements of one sample with: 0 or 1 / (1 - p). All are 1
// when p is 0. first: the first element's index inside the sample.
void dropout_multipliers(float *multiplier, Dropout dropout, int64_t sample, int64_t first, int64_t n);

// --- GEMM, row-major -----------------------------------------------------------------------------

// c (m, n) = alpha a b^T + beta c, a being (m, k), b (n, k): y = x w^T, q k^T.
static inline void matmul_nt(int64_t m, int64_t n, int64_t k, float alpha, const float *a, const float *b,
                             float beta, float *c) {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)m, (int)n, (int)k, alpha, a, (int)k, b, (int)k,
                beta, c, (int)n);
}
// c (m, n) = a b + beta c, a being (m, k), b (k, n): dx = dy w, p v.
static inline void matmul_nn(int64_t m, int64_t n, int64_t k, const float *a, const float *b, float beta,
                             float *c) {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)m, (int)n, (int)k, 1.0f, a, (int)k, b, (int)n,
                beta, c, (int)n);
}
// c (m, n) = a^T b + beta c, a being (k, m), b (k, n): dw += dy^T x.
static inline void matmul_tn(int64_t m, int64_t n, int64_t k, const float *a, const float *b, float beta,
                             float *c) {
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)m, (int)n, (int)k, 1.0f, a, (int)m, b, (int)n,
                beta, c, (int)n);
}

LLMC_END
