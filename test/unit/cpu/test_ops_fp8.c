// The CPU backend's FP8 ops: quantization against the definitions in llmc/ops_fp8.h, products
// against double-precision products of the decoded codes, and the rules of delayed scaling.
// test/unit/base/test_fp8.c tests the number formats. Runs in both precisions of
// llmc/base/dtype.h.
#include "test/unit/ops_common.h"

#include "llmc/ops_fp8.h"

// --- quantization --------------------------------------------------------------------------------

// An Fp8Quantize whose outputs have exact sizes and are poisoned.
static Fp8Quantize quantization(const floatX *x, int64_t N, int C, Fp8Source source, Fp8Type type,
                                Fp8Blocks blocks) {
    Fp8Quantize q = {.N = N, .C = C, .x = x, .source = source, .type = type, .blocks = blocks};
    q.codes = poisoned((size_t)(N * C));
    q.transposed = poisoned((size_t)(N * C));
    q.scale = xcalloc(1, sizeof(Fp8Scale), "a scale");
    if (blocks != FP8_WHOLE) {
        q.block_scales = poisoned_floats(fp8_block_scales(blocks, N, C));
        q.transposed_block_scales = poisoned_floats(fp8_block_scales(blocks, C, N));
    }
    return q;
}
static void quantization_free(const Fp8Quantize *q) {
    free(q->codes);
    free(q->transposed);
    free(q->scale);
    free(q->block_scales);
    free(q->transposed_block_scales);
}

// Returns the values that q encodes, as separate ops compute them.
static floatX *source_of(const Fp8Quantize *q) {
    int64_t n = q->N * q->C;
    floatX *x = poisoned_floatX(n);
    Swiglu swiglu = {.N = q->N, .F = q->C, .pre = q->x, .y = x};
    switch (q->source) {
        case FP8_OF_X: memcpy(x, q->x, (size_t)n * sizeof(floatX)); break;
        case FP8_OF_GELU: op_gelu_forward(NULL, x, q->x, n); break;
        case FP8_OF_SWIGLU: op_swiglu_forward(NULL, &swiglu); break;
    }
    return x;
}

static uint32_t absmax_of(const floatX *x, int64_t rows, int64_t columns, int64_t stride) {
    uint32_t max = 0;
    for (int64_t i = 0; i < rows * columns; i++) {
        uint32_t bits = fp8_absolute(floatX_to_float(x[i / columns * stride + i % columns]));
        max = bits > max ? bits : max;
    }
    return max;
}

// Requires that the codes of x (N, C) with one scale are `codes` and, transposed, `transposed`.
static void check_codes(const Fp8Quantize *q, const floatX *x, float scale) {
    for (int64_t i = 0; i < q->N * q->C; i++) {
        int expected = fp8_encode(floatX_to_float(x[i]) * scale, q->type);
        int got = q->codes[i], transposed = q->transposed[i % q->C * q->N + i / q->C];
        if (got != expected || transposed != expected)
            fail_msg("element %lld: 0x%02x and transposed 0x%02x, expected 0x%02x", (long long)i, got,
                     transposed, expected);
    }
}

// Absolute maximum, scale and codes of the whole tensor, then each output alone.
static void check_whole(int64_t N, int C, Fp8Source source, Fp8Type type) {
    Random rng = {7};
    floatX *stored = random_floatX(&rng, N * C * (source == FP8_OF_SWIGLU ? 2 : 1), 0.3, 2);
    Fp8Quantize q = quantization(stored, N, C, source, type, FP8_WHOLE);
    floatX *x = source_of(&q);
    uint32_t max = absmax_of(x, 1, N * C, 0);
    op_fp8_absmax(NULL, &q);
    assert_int_equal(q.scale->absmax, max);
    op_fp8_scale(NULL, q.scale, type, NULL, 0, 0);
    float scale = fp8_largest(type) / f32_from_bits(max);
    assert_true(q.scale->scale == scale && q.scale->inverse == 1.0f / scale && q.scale->absmax == 0);
    op_fp8_quantize(NULL, &q);
    check_codes(&q, x, scale);
    assert_int_equal(q.scale->absmax, 0);

    Fp8Quantize again = quantization(stored, N, C, source, type, FP8_WHOLE);
    *again.scale = *q.scale;
    Fp8Quantize codes = again, transposed = again;
    codes.transposed = NULL;
    transposed.codes = NULL, transposed.accumulate = true;
    op_fp8_quantize(NULL, &codes);
    op_fp8_quantize(NULL, &transposed);
    check_codes(&again, x, scale);
    assert_int_equal(again.scale->absmax, max);
    memset(again.transposed, 0xFF, (size_t)(N * C));
    op_fp8_transpose(NULL, again.transposed, q.codes, N, C);
    assert_memory_equal(again.transposed, q.transposed, (size_t)(N * C));
    quantization_free(&q);
    quantization_free(&again);
    free_all(stored, x, NULL);
}

static void whole_tensors_are_quantized(void **state) {
    static const int sizes[][2] = {{16, 16}, {48, 80}, {272, 144}, {128, 256}, {16, 400}};
    for (int i = 0; i < 5; i++) {
        for (int source = FP8_OF_X; source <= FP8_OF_SWIGLU; source++) {
            check_whole(sizes[i][0], sizes[i][1], (Fp8Source)source, FP8_E4M3);
            check_whole(sizes[i][0], sizes[i][1], (Fp8Source)source, FP8_E5M2);
        }
    }
}

// Several calls accumulate one maximum, which grows only.
static void absolute_maxima_accumulate(void **state) {
    enum { N = 16, C = 32 };
    floatX x[N * C];
    for (int i = 0; i < N * C; i++) x[i] = floatX_from_float(0.25f);
    Fp8Quantize q = quantization(x, N, C, FP8_OF_X, FP8_E4M3, FP8_WHOLE);
    op_fp8_absmax(NULL, &q);
    x[N * C - 1] = floatX_from_float(-8.0f);
    q.accumulate = true, q.scale->scale = 2.0f;
    op_fp8_quantize(NULL, &q);
    assert_int_equal(q.scale->absmax, f32_bits(8.0f));
    assert_int_equal(q.codes[N * C - 1], fp8_encode(-16.0f, FP8_E4M3));
    x[N * C - 1] = floatX_from_float(1.0f);
    op_fp8_absmax(NULL, &q);
    op_fp8_quantize(NULL, &q);
    assert_int_equal(q.scale->absmax, f32_bits(8.0f));
    x[5] = floatX_from_float(NAN);
    op_fp8_quantize(NULL, &q);
    assert_true(q.scale->absmax > 0x7F800000u);
    assert_int_equal(q.codes[5] & 0x7F, 0x7F);
    op_fp8_scale(NULL, q.scale, FP8_E4M3, NULL, 0, 0);
    assert_true(q.scale->scale == 1.0f && q.scale->inverse == 1.0f && q.scale->absmax == 0);
    quantization_free(&q);
}

static void scales_of_several_ranks(void **state) {
    Fp8Scale scale = {0, 0, f32_bits(1000.0f), 0};
    const uint32_t maxima[] = {f32_bits(1.0f), f32_bits(7.0f), 0, f32_bits(3.0f)};
    op_fp8_scale(NULL, &scale, FP8_E4M3, maxima, 4, 0);
    assert_true(scale.scale == 64.0f && scale.inverse == 1.0f / 64.0f && scale.absmax == 0);
    const uint32_t bad[] = {f32_bits(1.0f), f32_bits(INFINITY)}, zero[] = {0, 0};
    op_fp8_scale(NULL, &scale, FP8_E5M2, bad, 2, 0);
    assert_true(scale.scale == 1.0f && scale.inverse == 1.0f);
    scale.scale = 5.0f;
    op_fp8_scale(NULL, &scale, FP8_E5M2, zero, 2, 0);
    assert_true(scale.scale == 1.0f && scale.inverse == 1.0f);
    const uint32_t tiny[] = {1};
    op_fp8_scale(NULL, &scale, FP8_E4M3, tiny, 1, 0);
    assert_true(scale.scale == FLT_MAX && scale.inverse == 1.0f / FLT_MAX && scale.inverse > 0);
    assert_true(op_check_fp8(NULL, FP8_WHOLE, NULL) && op_check_fp8(NULL, FP8_ROWS, NULL));
}

// --- block scales --------------------------------------------------------------------------------

// Returns the largest power of 2 that maps the maximum into the format's range.
static float power_scale(uint32_t max, Fp8Type type) {
    if (max == 0 || max >= 0x7F800000u) return 1.0f;
    return (float)exp2(floor(log2((double)(fp8_largest(type) / f32_from_bits(max)))));
}

// Checks element (r, c) of codes (N, C), whose block starts at x and has this size.
static void check_block_code(const uint8_t *codes, float inverse, const floatX *block, int64_t rows,
                             int64_t columns, const floatX *x, const Fp8Quantize *q) {
    float scale = power_scale(absmax_of(block, rows, columns, q->C), q->type);
    assert_true(inverse == 1.0f / scale);
    assert_int_equal(*codes, fp8_encode(floatX_to_float(*x) * scale, q->type));
}

// Every element of `codes` and `transposed` that a block contains; each block is checked at three
// of its elements.
static void check_blocks(const Fp8Quantize *q, const floatX *x) {
    int64_t N = q->N, C = q->C, square = q->blocks == FP8_SQUARES ? FP8_BLOCK : 1;
    for (int64_t i = 0; i < N * C; i += 41) {
        int64_t row = i / C, column = i % C, k = column / FP8_BLOCK, kt = row / FP8_BLOCK;
        int64_t first_row = row / FP8_BLOCK * FP8_BLOCK, first_column = k * FP8_BLOCK;
        bool rows = q->blocks == FP8_ROWS;
        float inverse = q->block_scales[rows ? k * N + row : kt * fp8_squares_stride(C) + k];
        const floatX *block = x + (rows ? row : first_row) * C + first_column;
        check_block_code(q->codes + i, inverse, block, square, FP8_BLOCK, x + i, q);
        inverse = q->transposed_block_scales[rows ? kt * C + column : k * fp8_squares_stride(N) + kt];
        block = x + first_row * C + (rows ? column : first_column);
        check_block_code(q->transposed + column * N + row, inverse, block, FP8_BLOCK, square, x + i, q);
    }
}

// Blocks of very different sizes, and blocks with only zeros, one NaN, one infinity, and tiny
// values.
static floatX *tensor_with_special_blocks(int64_t N, int64_t C) {
    Random rng = {11};
    floatX *x = random_floatX(&rng, N * C, 0, 1);
    for (int64_t i = 0; i < N * C; i++) {
        int block = (int)(i / C / FP8_BLOCK * 3 + i % C / FP8_BLOCK);
        x[i] = floatX_from_float(floatX_to_float(x[i]) * ldexpf(1.0f, 9 * block - 20));
        if (block == 1) x[i] = floatX_from_float(0.0f);
        if (block == 4) x[i] = floatX_from_float(floatX_to_float(x[i]) * 0x1p-120f);
    }
    x[FP8_BLOCK * C + 2 * FP8_BLOCK + 3] = floatX_from_float(NAN);
    x[FP8_BLOCK + C * 5] = floatX_from_float(INFINITY);
    return x;
}

static void blocks_are_quantized(void **state) {
    enum { N = 256, C = 384 };
    floatX *x = tensor_with_special_blocks(N, C);
    for (int type = FP8_E4M3; type <= FP8_E5M2; type++) {
        for (int blocks = FP8_ROWS; blocks <= FP8_SQUARES; blocks++) {
            Fp8Quantize q = quantization(x, N, C, FP8_OF_X, (Fp8Type)type, (Fp8Blocks)blocks);
            op_fp8_quantize(NULL, &q);
            check_blocks(&q, x);
            Fp8Quantize one = quantization(x, N, C, FP8_OF_X, (Fp8Type)type, (Fp8Blocks)blocks);
            Fp8Quantize codes = one, transposed = one;
            codes.transposed = NULL, codes.transposed_block_scales = NULL;
            transposed.codes = NULL, transposed.block_scales = NULL;
            op_fp8_quantize(NULL, &codes);
            op_fp8_quantize(NULL, &transposed);
            check_blocks(&one, x);
            quantization_free(&q);
            quantization_free(&one);
        }
    }
    free(x);
}

// The fused functions give the codes of the separate op's result.
static void blocks_of_functions(void **state) {
    enum { N = 128, C = 256 };
    Random rng = {13};
    floatX *stored = random_floatX(&rng, N * C * 2, 0.3, 2);
    for (int source = FP8_OF_GELU; source <= FP8_OF_SWIGLU; source++) {
        for (int blocks = FP8_ROWS; blocks <= FP8_SQUARES; blocks++) {
            Fp8Quantize q = quantization(stored, N, C, (Fp8Source)source, FP8_E4M3, (Fp8Blocks)blocks);
            floatX *x = source_of(&q);
            op_fp8_quantize(NULL, &q);
            check_blocks(&q, x);
            quantization_free(&q);
            free(x);
        }
    }
    free(stored);
}

// --- products ------------------------------------------------------------------------------------

// A random quantized matrix (rows, k), and the exact values of its codes times its scales.
typedef struct Operand {
    floatX *x;
    Fp8Quantize q;
    Fp8Matrix matrix;
    double *exact;
} Operand;

static Operand operand(Random *rng, int64_t rows, int64_t k, Fp8Type type, Fp8Blocks blocks) {
    Operand o = {.x = random_floatX(rng, rows * k, 0, 1), .exact = zero_doubles(rows * k)};
    for (int64_t i = 0; i < rows * k; i++) {  // blocks have different scales
        int power = (int)((i / k / 128 + i % k / 128 * 3) % 5);
        o.x[i] = floatX_from_float(ldexpf(floatX_to_float(o.x[i]), power));
    }
    o.q = quantization(o.x, rows, (int)k, FP8_OF_X, type, blocks);
    if (blocks == FP8_WHOLE) op_fp8_absmax(NULL, &o.q);
    op_fp8_scale(NULL, o.q.scale, type, NULL, 0, 0);
    op_fp8_quantize(NULL, &o.q);
    o.matrix = (Fp8Matrix){o.q.codes, type, blocks, blocks == FP8_WHOLE ? o.q.scale : NULL, o.q.block_scales};
    for (int64_t i = 0; i < rows * k; i++) {
        int64_t row = i / k, block = i % k / FP8_BLOCK;
        double inverse = (double)o.q.scale->inverse;
        if (blocks == FP8_ROWS) inverse = (double)o.q.block_scales[block * rows + row];
        if (blocks == FP8_SQUARES)
            inverse = (double)o.q.block_scales[row / FP8_BLOCK * fp8_squares_stride(k) + block];
        o.exact[i] = (double)fp8_decode(o.q.codes[i], type) * inverse;
    }
    return o;
}
static void operand_free(const Operand *o) {
    quantization_free(&o->q);
    free_all(o->x, o->exact, NULL);
}

// Computes the product in double precision and a bound on the rounding errors of an fp32 sum.
static void exact_product(const Fp8Product *p, const Operand *a, const Operand *b, double *exact,
                          double *bound) {
    for (int64_t i = 0; i < p->m; i++) {
        for (int64_t j = 0; j < p->n; j++) {
            double sum = 0, magnitude = 0;
            for (int64_t k = 0; k < p->k; k++) {
                double term = a->exact[i * p->k + k] * b->exact[j * p->k + k];
                sum += term;
                magnitude += fabs(term);
            }
            exact[i * p->n + j] = sum;
            bound[i * p->n + j] = 0x1p-24 * 2 * sqrt((double)p->k) * magnitude;
        }
    }
}

// A product into d with and without bias, and into a sum that it overwrites or adds to.
static void check_product(int64_t m, int64_t n, int64_t k, Operand *a, Operand *b) {
    Random rng = {17};
    double *exact = zero_doubles(m * n), *bound = zero_doubles(m * n);
    floatX *bias = random_floatX(&rng, n, 0, 30), *d = poisoned_floatX(m * n);
    float *sum = random_floats(&rng, m * n, 100), *before = copy_of(sum, (size_t)(m * n) * sizeof *sum);
    float *written = poisoned_floats(m * n);
    // Every matrix can be the weight: the workspace holds any of a layer's three products.
    size_t bytes = op_linear_workspace_bytes(m, (int)k, (int)n);
    size_t as_dw = op_linear_workspace_bytes(k, (int)n, (int)m);
    void *workspace = poisoned(bytes < as_dw ? bytes : as_dw);
    Fp8Product p = {.m = m, .n = n, .k = k, .a = a->matrix, .b = b->matrix, .workspace = workspace};
    exact_product(&p, a, b, exact, bound);
    for (int with_bias = 0; with_bias < 2; with_bias++) {
        p.d = d, p.bias = with_bias ? bias : NULL;
        op_fp8_product(NULL, &p);
        for (int64_t i = 0; i < m * n; i++) {
            double added = with_bias ? (double)floatX_to_float(bias[i % n]) : 0;
            check_close("product", (double)floatX_to_float(d[i]), exact[i] + added,
                        1.01 * floatX_unit_roundoff(), bound[i] + 0x1p-23 * fabs(added), i);
        }
    }
    p.d = NULL, p.bias = NULL, p.sum = sum;
    op_fp8_product(NULL, &p);
    p.sum = written, p.overwrite = true;
    op_fp8_product(NULL, &p);
    for (int64_t i = 0; i < m * n; i++) {
        check_close("overwritten", (double)written[i], exact[i], 1e-6, bound[i], i);
        assert_true(sum[i] == before[i] + written[i]);
    }
    free_all(exact, bound, bias, d, sum, before, written, workspace, NULL);
}

static void check_operands(int64_t m, int64_t n, int64_t k, Fp8Type types[2], Fp8Blocks blocks[2]) {
    Random rng = {19};
    Operand a = operand(&rng, m, k, types[0], blocks[0]), b = operand(&rng, n, k, types[1], blocks[1]);
    check_product(m, n, k, &a, &b);
    operand_free(&a);
    operand_free(&b);
}

static Fp8Type type_pairs[3][2] = {{FP8_E4M3, FP8_E4M3}, {FP8_E4M3, FP8_E5M2}, {FP8_E5M2, FP8_E4M3}};

static void products_of_whole_tensors(void **state) {
    Fp8Blocks blocks[2] = {FP8_WHOLE, FP8_WHOLE};
    for (int types = 0; types < 3; types++) {
        check_operands(48, 32, 80, type_pairs[types], blocks);
        check_operands(16, 144, 1040, type_pairs[types], blocks);
    }
    check_operands(16, 16, 16, type_pairs[0], blocks);
    check_operands(528, 32, 16, type_pairs[0], blocks);  // more than one tile of rows, and of columns
    check_operands(32, 1040, 48, type_pairs[1], blocks);
}

static void products_of_blocks(void **state) {
    static Fp8Blocks pairs[3][2] = {{FP8_ROWS, FP8_ROWS}, {FP8_ROWS, FP8_SQUARES}, {FP8_SQUARES, FP8_ROWS}};
    for (int blocks = 0; blocks < 3; blocks++) {
        for (int types = 0; types < 3; types++)
            check_operands(128, 256, 384, type_pairs[types], pairs[blocks]);
        check_operands(256, 128, 1152, type_pairs[0], pairs[blocks]);
    }
    check_operands(640, 128, 128, type_pairs[0], pairs[1]);
}

// The three products of a layer, from one quantization of each tensor, approximate the bf16 layer.
static void products_of_a_layer(void **state) {
    enum { N = 256, C = 128, OC = 384 };
    for (int blocks = 0; blocks < 2; blocks++) {
        Random rng = {23};
        Fp8Blocks activations = blocks ? FP8_ROWS : FP8_WHOLE, weights = blocks ? FP8_SQUARES : FP8_WHOLE;
        Operand x = operand(&rng, N, C, FP8_E4M3, activations), w = operand(&rng, OC, C, FP8_E4M3, weights);
        Operand dy = operand(&rng, N, OC, FP8_E5M2, activations);
        Fp8Matrix x_t = x.matrix, w_t = w.matrix, dy_t = dy.matrix;
        x_t.codes = x.q.transposed, x_t.block_scales = x.q.transposed_block_scales;
        w_t.codes = w.q.transposed, w_t.block_scales = w.q.transposed_block_scales;
        dy_t.codes = dy.q.transposed, dy_t.block_scales = dy.q.transposed_block_scales;
        floatX *y = poisoned_floatX(N * OC), *dx = poisoned_floatX(N * C), *y16 = poisoned_floatX(N * OC),
               *dx16 = poisoned_floatX(N * C);
        float *dw = poisoned_floats(OC * C), *dw16 = poisoned_floats(OC * C);
        void *workspace = poisoned(op_linear_workspace_bytes(N, C, OC));
        Linear layer = {.N = N,
                        .C = C,
                        .OC = OC,
                        .x = x.x,
                        .w = w.x,
                        .y = y16,
                        .dy = dy.x,
                        .dx = dx16,
                        .dw = dw16,
                        .overwrite = true,
                        .workspace = workspace};
        op_linear_forward(NULL, &layer);
        op_linear_backward(NULL, &layer);
        Fp8Product forward = {N, OC, C, x.matrix, w.matrix, y, NULL, NULL, false, true, workspace};
        Fp8Product dinput = {N, C, OC, dy.matrix, w_t, dx, NULL, NULL, false, false, workspace};
        Fp8Product dweight = {OC, C, N, dy_t, x_t, NULL, NULL, dw, true, false, workspace};
        op_fp8_product(NULL, &forward);
        op_fp8_product(NULL, &dinput);
        op_fp8_product(NULL, &dweight);
        // Relative rounding errors of E4M3 and E5M2 are at most 1/16 and 1/8, and average out.
        double error[3] = {0}, size[3] = {0};
        for (int64_t i = 0; i < N * OC; i++) {
            error[0] += pow((double)floatX_to_float(y[i]) - (double)floatX_to_float(y16[i]), 2);
            size[0] += pow((double)floatX_to_float(y16[i]), 2);
        }
        for (int64_t i = 0; i < N * C; i++) {
            error[1] += pow((double)floatX_to_float(dx[i]) - (double)floatX_to_float(dx16[i]), 2);
            size[1] += pow((double)floatX_to_float(dx16[i]), 2);
        }
        for (int64_t i = 0; i < OC * C; i++) {
            error[2] += pow((double)dw[i] - (double)dw16[i], 2);
            size[2] += pow((double)dw16[i], 2);
        }
        for (int i = 0; i < 3; i++) assert_true(sqrt(error[i] / size[i]) < 0.08);
        free_all(y, dx, y16, dx16, dw, dw16, workspace, NULL);
        operand_free(&x);
        operand_free(&w);
        operand_free(&dy);
    }
}

static void nan_codes_reach_the_product(void **state) {
    enum { M = 32, N = 16, K = 48 };
    Random rng = {29};
    Operand a = operand(&rng, M, K, FP8_E4M3, FP8_WHOLE), b = operand(&rng, N, K, FP8_E4M3, FP8_WHOLE);
    a.q.codes[5 * K + 3] = 0x7F;
    floatX *d = poisoned_floatX(M * N);
    void *workspace = poisoned(op_linear_workspace_bytes(M, K, N));
    Fp8Product p = {M, N, K, a.matrix, b.matrix, d, NULL, NULL, false, false, workspace};
    op_fp8_product(NULL, &p);
    for (int i = 0; i < M * N; i++) assert_int_equal(isnan(floatX_to_float(d[i])) != 0, i / N == 5);
    free_all(d, workspace, NULL);
    operand_free(&a);
    operand_free(&b);
}

// --- delayed scaling -----------------------------------------------------------------------------

enum { TENSORS = 3, RANKS = 2, LENGTH = 3 };
typedef struct Delayed {
    Fp8Scale scale[TENSORS];
    float history[TENSORS * LENGTH];
} Delayed;

// Runs one step. Every tensor has the maximum `max` on rank 0 and max / 2 on rank 1, except tensor
// 1, whose maximum is on rank 1.
static void update(Delayed *d, float max, bool most_recent, int margin) {
    static const uint8_t type[TENSORS] = {FP8_E4M3, FP8_E5M2, FP8_E4M3};
    Fp8Scale all[RANKS * TENSORS] = {{0, 0, 0, 0}};
    for (int i = 0; i < RANKS * TENSORS; i++) {
        bool largest = (i / TENSORS == 1) == (i % TENSORS == 1);
        all[i].absmax = f32_bits(largest ? max : max / 2);
    }
    for (int t = 0; t < TENSORS; t++) d->scale[t].absmax = 77;
    Fp8Update a = {TENSORS, d->scale, all, RANKS, type, d->history, LENGTH, most_recent, margin, NULL};
    op_fp8_update_scales(NULL, &a);
}

static void check_delayed(const Delayed *d, const float history[LENGTH], float e4m3_scale, float e5m2_scale) {
    for (int t = 0; t < TENSORS; t++) {
        float scale = t == 1 ? e5m2_scale : e4m3_scale;
        for (int i = 0; i < LENGTH; i++) assert_true(d->history[t * LENGTH + i] == history[i]);
        assert_true(d->scale[t].scale == scale && d->scale[t].inverse == 1.0f / scale);
        assert_int_equal(d->scale[t].absmax, 0);
    }
}

static Delayed delayed_start(void) {
    Delayed d = {0};
    for (int t = 0; t < TENSORS; t++) d.scale[t] = (Fp8Scale){1.0f, 1.0f, 0, 0};
    return d;
}

static void delayed_scales_follow_the_largest_of_the_history(void **state) {
    Delayed d = delayed_start();
    update(&d, 0.0f, false, 0);
    check_delayed(&d, (float[]){0, 0, 0}, 1, 1);
    update(&d, 7.0f, false, 0);
    check_delayed(&d, (float[]){0, 0, 7}, 64, 8192);
    update(&d, 3.5f, false, 0);
    check_delayed(&d, (float[]){0, 7, 3.5f}, 64, 8192);
    update(&d, 0.0f, false, 0);  // not quantized in this step
    check_delayed(&d, (float[]){0, 7, 3.5f}, 64, 8192);
    update(&d, INFINITY, false, 0);
    check_delayed(&d, (float[]){7, 3.5f, 0}, 64, 8192);
    update(&d, NAN, false, 0);
    check_delayed(&d, (float[]){3.5f, 0, 0}, 128, 16384);
    update(&d, INFINITY, false, 0);  // no maximum is left: the scale stays
    check_delayed(&d, (float[]){0, 0, 0}, 128, 16384);
    update(&d, 14.0f, false, 1);
    check_delayed(&d, (float[]){0, 0, 14}, 16, 2048);
    update(&d, 1e-40f, true, 0);
    check_delayed(&d, (float[]){0, 14, 1e-40f}, FLT_MAX, FLT_MAX);
}

static void delayed_scales_follow_the_newest(void **state) {
    Delayed d = delayed_start();
    update(&d, 14.0f, true, 0);
    check_delayed(&d, (float[]){0, 0, 14}, 32, 4096);
    update(&d, 3.5f, true, 0);
    check_delayed(&d, (float[]){0, 14, 3.5f}, 128, 16384);
    update(&d, INFINITY, true, 0);
    check_delayed(&d, (float[]){14, 3.5f, 0}, 128, 16384);
    update(&d, 0.0f, true, 0);
    check_delayed(&d, (float[]){14, 3.5f, 0}, 128, 16384);
    update(&d, 7.0f, true, 3);
    check_delayed(&d, (float[]){3.5f, 0, 7}, 8, 1024);
}

// A history of one entry, and tensors whose maxima differ.
static void delayed_scales_of_single_entries(void **state) {
    Fp8Scale scale[2] = {{1, 1, 3, 0}, {0.5f, 2.0f, 3, 0}};
    float history[2] = {5, 6};
    const uint8_t type[2] = {FP8_E4M3, FP8_E4M3};
    const Fp8Scale all[2] = {{1, 1, f32_bits(1.75f), 0}, {1, 1, 0, 0}};
    Fp8Update a = {2, scale, all, 1, type, history, 1, false, 0, NULL};
    op_fp8_update_scales(NULL, &a);
    assert_true(history[0] == 1.75f && scale[0].scale == 256.0f && scale[0].absmax == 0);
    assert_true(history[1] == 6.0f && scale[1].scale == 2.0f && scale[1].inverse == 0.5f);
    assert_int_equal(scale[1].absmax, 0);
}

static void skipped_steps_only_clear_the_maxima(void **state) {
    Fp8Scale scale = {.scale = 2, .inverse = 0.5f, .absmax = 3};
    float history[2] = {5, 6};
    const uint8_t type = FP8_E4M3;
    const Fp8Scale all = {1, 1, f32_bits(1e38f), 0};
    const int32_t applied[2] = {0, 1};
    Fp8Update a = {1, &scale, &all, 1, &type, history, 2, false, 0, &applied[0]};
    op_fp8_update_scales(NULL, &a);
    assert_true(history[0] == 5 && history[1] == 6 && scale.scale == 2 && scale.inverse == 0.5f);
    assert_int_equal(scale.absmax, 0);
    a.applied = &applied[1];
    op_fp8_update_scales(NULL, &a);
    assert_true(history[0] == 6 && history[1] == 1e38f && scale.scale == 448.0f / 1e38f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whole_tensors_are_quantized),
        cmocka_unit_test(absolute_maxima_accumulate),
        cmocka_unit_test(scales_of_several_ranks),
        cmocka_unit_test(blocks_are_quantized),
        cmocka_unit_test(blocks_of_functions),
        cmocka_unit_test(products_of_whole_tensors),
        cmocka_unit_test(products_of_blocks),
        cmocka_unit_test(products_of_a_layer),
        cmocka_unit_test(nan_codes_reach_the_product),
        cmocka_unit_test(delayed_scales_follow_the_largest_of_the_history),
        cmocka_unit_test(delayed_scales_follow_the_newest),
        cmocka_unit_test(delayed_scales_of_single_entries),
        cmocka_unit_test(skipped_steps_only_clear_the_maxima),
    };
    return cmocka_run_group_tests_name("FP8 ops (" FLOATX_NAME ")", tests, NULL, NULL);
}
