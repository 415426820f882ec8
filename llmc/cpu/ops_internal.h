// Helpers of the CPU ops: conversion to fp32, a vectorizable exp, GELU, dropout multipliers, GEMM
// and workspace slices. Included only by llmc/cpu/ops*.c and their tests.
#pragma once
#include <cblas.h>

#include "llmc/base/base.h"
#include "llmc/base/dtype.h"
#include "llmc/base/fp8.h"
#include "llmc/ranks/heartbeat.h"
#include "llmc/ops.h"
LLMC_BEGIN

// --- slices of a workspace -----------------------------------------------------------------------

// Ops take consecutive fp32 buffers from the caller's workspace, aligned to cache lines.
enum { SLICE_FLOATS = 16 };
static inline int64_t slice_floats(int64_t count) { return round_up64(count, SLICE_FLOATS); }
static inline float *take_slice(float **cursor, int64_t count) {
    float *slice = *cursor;
    *cursor += slice_floats(count);
    return slice;
}

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

// Reports progress to the watchdog, because GEMMs of large models take minutes. s is NULL in tests.
static inline void show_progress(Stream *s) {
    if (s) heartbeat_waiting(stream_site(s), false);
}

// --- floatX <-> fp32 -----------------------------------------------------------------------------

// Returns n values as fp32: converted to buffer, or x itself if floatX is fp32.
static inline const float *widen(const floatX *x, int64_t n, float *buffer) {
    if (sizeof(floatX) == sizeof(float)) return (const float *)(const void *)x;
    for (int64_t i = 0; i < n; i++) buffer[i] = floatX_to_float(x[i]);
    return buffer;
}
// Copies n values to fp32.
static inline void widen_copy(float *y, const floatX *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = floatX_to_float(x[i]);
}
static inline void narrow(floatX *y, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = floatX_from_float(x[i]);
}

// Raises *absmax (bits of an fp32 number) to the absolute maximum of n values. absmax may be NULL.
static inline void raise_absmax(uint32_t *absmax, const floatX *x, int64_t n) {
    if (!absmax) return;
    uint32_t max = *absmax;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = fp8_absolute(floatX_to_float(x[i]));
        max = bits > max ? bits : max;
    }
    *absmax = max;
}

// --- sums and maxima in a fixed order ------------------------------------------------------------

// Reductions keep LANES partial results, with element i in lane i % LANES, and combine them in a
// tree. The compiler can vectorize this order, and results are the same on every CPU.
enum { LANES = 16 };

// Runs the statement for i = 0 .. n - 1 with l = i % LANES.
#define EACH_LANE(n, ...) \
    do { \
        const int64_t count_ = (n), whole_ = count_ / LANES * LANES; \
        for (int64_t from_ = 0; from_ < whole_; from_ += LANES) { \
            for (int l = 0; l < LANES; l++) { \
                const int64_t i = from_ + l; \
                __VA_ARGS__; \
            } \
        } \
        for (int64_t i = whole_; i < count_; i++) { \
            const int l = (int)(i - whole_); \
            __VA_ARGS__; \
        } \
    } while (0)

static inline float join_lanes(float *lane) {
    for (int stride = LANES / 2; stride > 0; stride /= 2) {
        for (int l = 0; l < stride; l++) lane[l] += lane[l + stride];
    }
    return lane[0];
}
static inline float max_of_lanes(const float *lane) {
    float max = lane[0];
    for (int l = 1; l < LANES; l++) max = lane[l] > max ? lane[l] : max;
    return max;
}

// --- functions -----------------------------------------------------------------------------------

// Returns e^x to about 1 ulp, in straight-line code that vectorizes. Splits x = n ln 2 + r with |r|
// <= ln 2 / 2, computes e^r by a Taylor polynomial and adds n to the exponent bits. x below -87.3
// gives e^-87.3 = 1.2e-38, x above 88.4 gives infinity, and NaN gives NaN.
static inline float exp_approx(float x) {
    x = x < -87.3f ? -87.3f : x;
    x = x > 88.5f ? 88.5f : x;
    // Adding the shifter rounds to an integer, which is then in the low mantissa bits.
    const float shifter = 0x1.8p23f;
    float shifted = x * 1.44269504f + shifter;
    float n = shifted - shifter;
    // ln 2 is split into two constants. n times the first is exact.
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
// Returns the factor of x in tanh-GELU, 0.5 (1 + tanh u) = 1 / (1 + e^-2u), where u is GELU's inner
// polynomial of x.
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
// y = silu(gate) * up for n values.
static inline void swiglu(floatX *y, const floatX *gate, const floatX *up, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        float g = floatX_to_float(gate[i]);
        y[i] = floatX_from_float(g * logistic(g) * floatX_to_float(up[i]));
    }
}

// Computes the dropout multipliers, 0 or 1 / (1 - p), of elements first .. first + n - 1 of a
// sample.
void dropout_multipliers(float *multiplier, Dropout dropout, int64_t sample, int64_t first, int64_t n);

// --- GEMM, row-major -----------------------------------------------------------------------------

enum { LINEAR_ROWS = 512 };  // rows per GEMM; bounds the workspace and keeps the result in the cache

// For y = x w^T and q k^T: c (m, n) = alpha a b^T + beta c, with a (m, k) and b (n, k).
static inline void matmul_nt(int64_t m, int64_t n, int64_t k, float alpha, const float *a, const float *b,
                             float beta, float *c) {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)m, (int)n, (int)k, alpha, a, (int)k, b, (int)k,
                beta, c, (int)n);
}
// For dx = dy w and p v: c (m, n) = alpha a b + beta c, with a (m, k) and b (k, n).
static inline void matmul_nn(int64_t m, int64_t n, int64_t k, float alpha, const float *a, const float *b,
                             float beta, float *c) {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)m, (int)n, (int)k, alpha, a, (int)k, b,
                (int)n, beta, c, (int)n);
}
// For dw += dy^T x: c (m, n) = alpha a^T b + beta c, with a (k, m) and b (k, n).
static inline void matmul_tn(int64_t m, int64_t n, int64_t k, float alpha, const float *a, const float *b,
                             float beta, float *c) {
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)m, (int)n, (int)k, alpha, a, (int)m, b, (int)n,
                beta, c, (int)n);
}

LLMC_END
