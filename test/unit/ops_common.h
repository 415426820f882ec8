// Helpers of the tests of ops: random tensors, buffers of exact size, conversion to double,
// comparisons. Included by test_ops.c, test_ops_head.c, test_ops_llama.c, test_ops_gradients.c,
// test_ops_generate.c, test_ops_fp8.c and test_ops_muon.c only.
#pragma once
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdlib.h>

#include "llmc/base/base.h"
#include "llmc/ops.h"
#include "test/random.h"

static const Dropout NO_DROPOUT = {0};

// --- buffers of exact size, so that a sanitizer detects any access past the end -----------------

static inline floatX *random_floatX(Random *rng, int64_t n, double mean, double deviation) {
    floatX *x = xmalloc((size_t)n * sizeof(floatX), "a test tensor");
    for (int64_t i = 0; i < n; i++) x[i] = floatX_from_float((float)(mean + deviation * random_normal(rng)));
    return x;
}
static inline float *random_floats(Random *rng, int64_t n, double deviation) {
    float *x = xmalloc((size_t)n * sizeof(float), "a test tensor");
    for (int64_t i = 0; i < n; i++) x[i] = (float)(deviation * random_normal(rng));
    return x;
}
static inline int32_t *random_ids(Random *rng, int64_t n, int limit) {
    int32_t *x = xmalloc((size_t)n * sizeof(int32_t), "test ids");
    for (int64_t i = 0; i < n; i++) x[i] = (int32_t)(random_u64(rng) % (uint64_t)limit);
    return x;
}
// Returns a buffer filled with 0xFF (NaN in both precisions), which reveals elements that an op
// does not write or reads before writing.
static inline void *poisoned(size_t bytes) {
    return memset(xmalloc(bytes ? bytes : 1, "a test buffer"), 0xFF, bytes);
}
static inline floatX *poisoned_floatX(int64_t n) { return poisoned((size_t)n * sizeof(floatX)); }
static inline float *poisoned_floats(int64_t n) { return poisoned((size_t)n * sizeof(float)); }
static inline double *zero_doubles(int64_t n) { return xcalloc((size_t)n, sizeof(double), "a reference"); }

static inline double *doubles_of(const floatX *x, int64_t n) {
    double *d = zero_doubles(n);
    for (int64_t i = 0; i < n; i++) d[i] = (double)floatX_to_float(x[i]);
    return d;
}
static inline void *copy_of(const void *x, size_t bytes) {
    return memcpy(xmalloc(bytes, "a copy"), x, bytes);
}

// Frees a NULL-terminated list of buffers.
static inline void free_all(void *first, ...) {
    va_list list;
    va_start(list, first);
    for (void *p = first; p; p = va_arg(list, void *)) free(p);
    va_end(list);
}

// --- document starts: random, never decreasing ---------------------------------------------------

static inline int32_t *random_doc_start(Random *rng, int B, int T) {
    int32_t *start = xmalloc((size_t)B * (size_t)T * sizeof(int32_t), "document starts");
    for (int b = 0; b < B; b++) {
        int32_t current = 0;
        for (int t = 0; t < T; t++) {
            if (t > 0 && random_u64(rng) % 7 == 0) current = t;
            start[b * T + t] = current;
        }
    }
    return start;
}

// --- comparisons ---------------------------------------------------------------------------------

// Unit roundoff of floatX: 2^-8 for bf16, 2^-24 for fp32.
static inline double floatX_unit_roundoff(void) { return sizeof(floatX) == 2 ? 0x1p-8 : 0x1p-24; }

// Requires |got - expected| <= relative |expected| + absolute for every element. NaN fails.
static inline void check_close(const char *what, double got, double expected, double relative,
                               double absolute, int64_t at) {
    double allowed = relative * fabs(expected) + absolute;
    if (fabs(got - expected) <= allowed) return;
    fail_msg("%s[%lld]: got %.9g, expected %.9g, allowed difference %.3g", what, (long long)at, got, expected,
             allowed);
}
// Compares a floatX tensor. Allows one rounding, plus `absolute` for errors of fp32 arithmetic
// before it.
static inline void check_floatX(const char *what, const floatX *got, const double *expected, int64_t n,
                                double absolute) {
    for (int64_t i = 0; i < n; i++)
        check_close(what, (double)floatX_to_float(got[i]), expected[i], floatX_unit_roundoff(), absolute, i);
}
static inline void check_floats(const char *what, const float *got, const double *expected, int64_t n,
                                double absolute) {
    for (int64_t i = 0; i < n; i++) check_close(what, (double)got[i], expected[i], 1e-6, absolute, i);
}
