// Newton-Schulz iteration on GPUs: see ops.h. Every product is a cuBLASLt GEMM (linear.cu).
#include <assert.h>

#include "llmc/cuda/common.cuh"
#include "llmc/ops.h"

enum { MATRIX_ALIGN = 256 };  // bytes

static size_t matrix_bytes(int64_t elements) {
    return (size_t)round_up64(elements * (int64_t)sizeof(floatX), MATRIX_ALIGN);
}

// The workspace has cuBLASLt's workspace, then a matrix like x, then A and b A + c A A.
size_t op_newton_schulz_bytes(int64_t rows, int64_t columns) {
    int64_t m = rows < columns ? rows : columns;
    return GEMM_WORKSPACE_BYTES + matrix_bytes(rows * columns) + 2 * matrix_bytes(m * m);
}

const floatX *op_newton_schulz(Stream *s, const NewtonSchulz *a) {
    assert(a->rows % 8 == 0 && a->columns % 8 == 0 && a->steps >= 0);
    bool wide = a->rows <= a->columns;
    int64_t m = wide ? a->rows : a->columns, n = wide ? a->columns : a->rows;
    uint8_t *at = (uint8_t *)a->workspace + GEMM_WORKSPACE_BYTES;
    floatX *x = a->x, *next = (floatX *)at, *gram = (floatX *)(at + matrix_bytes(a->rows * a->columns));
    floatX *mix = (floatX *)((uint8_t *)gram + matrix_bytes(m * m));
    for (int i = 0; i < a->steps; i++) {
        NewtonSchulzStep step = a->step[i];
        bool cubic = step.c == 0.0f;
        Gemm g = {};
        g.workspace = a->workspace;
        g.d = gram, g.a = x, g.b = x, g.m = g.n = m, g.k = n;
        g.transpose_b = wide, g.transpose_a = !wide;
        gemm(s, &g);
        g.transpose_a = g.transpose_b = false;
        if (!cubic) {
            g.d = mix, g.a = gram, g.b = gram, g.k = m;
            g.add = gram, g.scale = step.c, g.add_scale = step.b;
            gemm(s, &g);
        }
        const floatX *factor = cubic ? gram : mix;
        g.d = next, g.a = wide ? factor : x, g.b = wide ? x : factor;
        g.m = a->rows, g.n = a->columns, g.k = m;
        g.add = x, g.scale = cubic ? step.b : 1.0f, g.add_scale = step.a;
        gemm(s, &g);
        floatX *result = next;
        next = x;
        x = result;
    }
    return x;
}
