// Newton-Schulz iteration on CPUs: see ops.h.
#include <assert.h>

#include "llmc/cpu/ops_internal.h"

// fp32 buffers of an iteration. Every matrix holds values that have been rounded to floatX.
typedef struct Buffers {
    float *x, *next;  // (rows, columns)
    float *gram;      // (m, m) A
    float *mix;       // (m, m) b A + c A A
} Buffers;

size_t op_newton_schulz_bytes(int64_t rows, int64_t columns) {
    int64_t m = min64(rows, columns);
    return (size_t)(2 * slice_floats(rows * columns) + 2 * slice_floats(m * m)) * sizeof(float);
}

static void round_values(float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] = floatX_to_float(floatX_from_float(x[i]));
}

// d (m, n) = scale a b + beta c, rounded, with a (m, k) and b (k, n). c is not rounded first.
static void scaled_product(int64_t m, int64_t n, int64_t k, float scale, const float *a, const float *b,
                           float beta, const float *c, float *d) {
    memcpy(d, c, (size_t)(m * n) * sizeof(float));
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)m, (int)n, (int)k, scale, a, (int)k, b,
                (int)n, beta, d, (int)n);
    round_values(d, m * n);
}

static void iterate(const NewtonSchulz *a, NewtonSchulzStep step, Buffers *buffer) {
    int64_t rows = a->rows, columns = a->columns, m = min64(rows, columns);
    bool wide = rows <= columns;
    if (wide) matmul_nt(m, m, columns, 1.0f, buffer->x, buffer->x, 0.0f, buffer->gram);
    else matmul_tn(m, m, rows, 1.0f, buffer->x, buffer->x, 0.0f, buffer->gram);
    round_values(buffer->gram, m * m);
    const float *mix = buffer->gram;
    float scale = step.b;
    if (step.c != 0.0f) {
        scaled_product(m, m, m, step.c, buffer->gram, buffer->gram, step.b, buffer->gram, buffer->mix);
        mix = buffer->mix;
        scale = 1.0f;
    }
    scaled_product(rows, columns, m, scale, wide ? mix : buffer->x, wide ? buffer->x : mix, step.a, buffer->x,
                   buffer->next);
    float *result = buffer->next;
    buffer->next = buffer->x;
    buffer->x = result;
}

const floatX *op_newton_schulz(Stream *s, const NewtonSchulz *a) {
    assert(a->rows >= 1 && a->columns >= 1 && a->steps >= 0);
    int64_t n = a->rows * a->columns, m = min64(a->rows, a->columns);
    float *cursor = (float *)a->workspace;
    Buffers buffer;
    buffer.x = take_slice(&cursor, n);
    buffer.next = take_slice(&cursor, n);
    buffer.gram = take_slice(&cursor, m * m);
    buffer.mix = take_slice(&cursor, m * m);
    for (int64_t i = 0; i < n; i++) buffer.x[i] = floatX_to_float(a->x[i]);
    for (int i = 0; i < a->steps; i++) {
        iterate(a, a->step[i], &buffer);
        show_progress(s);
    }
    narrow(a->x, buffer.x, n);
    return a->x;
}
