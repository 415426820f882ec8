// Tests FP8 quantization, scales and products on a GPU. Codes and scales must be bitwise
// identical to the functions of llmc/base/fp8.h. Products are compared with fp64 on the host.
//
//   test_fp8_gpu [--diagnose | --speed]
//
// A product that cuBLASLt refuses counts as failed; the other cases still run, and at the end the
// test prints which descriptions of a product this version of cuBLASLt accepts (--diagnose: prints
// them always). --speed prints times of the layers of the 125M to 6.7B models next to bf16 GEMMs.
//
// Tolerances of products, relative to the sum of |a b|:
//   slow   2^-8: tensor cores align products to 13 fraction bits and truncate; after every 128
//          products the sum moves to fp32
//   fast   2^-9 + k / 32 x 2^-13: an instruction adds 32 products to a sum of the same precision
// A floatX result adds half a unit in the last place.
#include <cublasLt.h>
#include <string.h>

#include "llmc/ops_fp8.h"
#include "test/gpu/linear_data.h"

static uint64_t draw_bits(Bench *b) {
    b->random = b->random * 6364136223846793005u + 1442695040888963407u;
    return b->random >> 24;
}

// --- codes and scales ----------------------------------------------------------------------------

static const char *const source_names[] = {"x", "GELU", "SwiGLU"}, *const type_names[] = {"E4M3", "E5M2"};

// Kinds of inputs. ANY_BITS: also subnormal, infinite and NaN.
enum { UNIFORM, WIDE, ANY_BITS, INPUT_KINDS };
static const char *const input_names[] = {"uniform", "wide", "any bits"};

static Values quantized_input(Bench *b, int64_t count, int kind) {
    Values v = random_values(b, count, 4.0f);
    for (int64_t i = 0; i < count && kind != UNIFORM; i++) {
        uint32_t bits = (uint32_t)draw_bits(b);
        // Exponents of WIDE: 2^-40 .. 2^23.
        if (kind == WIDE) v.host[i] = (floatX)((bits & 0x807Fu) | (87 + (bits >> 16) % 64) << 7);
        else if (bits >> 16 & 1) v.host[i] = (floatX)bits;
    }
    copy_to_device(b->stream, v.device, v.host, (size_t)count * sizeof(floatX));
    return v;
}

// A quantized tensor, its function y as the separate op computes it, and the expected codes.
typedef struct Quantized {
    int64_t N;
    int C, kind;
    Fp8Quantize op;  // codes and transposed: outputs on the device, with GUARD more bytes
    Values x;
    floatX *y;               // host
    uint8_t *codes, *other;  // host, expected: (N, C) and (C, N)
} Quantized;
enum { GUARD = 64, POISON = 0xA5 };

static void compute_source(Bench *b, Quantized *q) {
    int64_t count = q->N * q->C;
    floatX *y = (floatX *)new_memory(b, (size_t)count * sizeof(floatX));
    Swiglu swiglu = {.N = q->N, .F = q->C, .pre = q->x.device, .y = y};
    if (q->op.source == FP8_OF_X) copy_on_device(b->stream, y, q->x.device, (size_t)count * sizeof(floatX));
    if (q->op.source == FP8_OF_GELU) op_gelu_forward(b->stream, y, q->x.device, count);
    if (q->op.source == FP8_OF_SWIGLU) op_swiglu_forward(b->stream, &swiglu);
    q->y = fetch(b, y, count, sizeof(floatX));
    device_free(b->device, y);
}

static Quantized new_quantized(Bench *b, int64_t N, int C, Fp8Source source, Fp8Type type, int kind) {
    Quantized q = {N, C, kind};
    q.x = quantized_input(b, N * C * (source == FP8_OF_SWIGLU ? 2 : 1), kind);
    q.op.N = N, q.op.C = C, q.op.x = q.x.device, q.op.source = source, q.op.type = type;
    q.op.codes = (uint8_t *)new_memory(b, (size_t)(N * C + GUARD));
    q.op.transposed = (uint8_t *)new_memory(b, (size_t)(N * C + GUARD));
    q.op.scale = (Fp8Scale *)new_memory(b, sizeof(Fp8Scale));
    compute_source(b, &q);
    q.codes = (uint8_t *)new_host((size_t)(N * C)), q.other = (uint8_t *)new_host((size_t)(N * C));
    return q;
}
static void quantized_free(Bench *b, Quantized *q) {
    values_free(b, &q->x);
    device_free(b->device, q->op.codes), device_free(b->device, q->op.transposed);
    device_free(b->device, q->op.scale);
    free(q->y), free(q->codes), free(q->other);
}

static Fp8Scale fetch_scale(Bench *b, const Fp8Scale *device) {
    Fp8Scale scale;
    copy_to_host(b->stream, &scale, device, sizeof scale);
    stream_synchronize(b->stream);
    return scale;
}

static uint32_t expected_absmax(const Quantized *q) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < q->N * q->C; i++) {
        uint32_t bits = fp8_absolute(floatX_to_float(q->y[i]));
        if (bits > largest) largest = bits;
    }
    return largest;
}

static void expect_codes(Quantized *q, float scale) {
    for (int64_t n = 0; n < q->N; n++) {
        for (int c = 0; c < q->C; c++) {
            float y = floatX_to_float(q->y[n * q->C + c]);
            uint8_t code = fp8_encode_scaled(y, scale, q->op.type);
            q->codes[n * q->C + c] = q->other[c * q->N + n] = code;
        }
    }
}

static void check_codes(Bench *b, const Quantized *q, const char *what, const uint8_t *device,
                        const uint8_t *expected, float scale) {
    int64_t count = q->N * q->C, wrong = 0, first = -1;
    uint8_t *got = (uint8_t *)fetch(b, device, count + GUARD, 1);
    for (int64_t i = 0; i < count; i++) {
        if (got[i] == expected[i]) continue;
        if (wrong++ == 0) first = i;
    }
    bool transposed = expected == q->other;
    int64_t at_y = !transposed ? first : first % q->N * q->C + first / q->N;
    check(b->checks, wrong == 0,
          "%s of %s (%lld, %d) as %s, %s, scale %g: %lld of %lld codes are wrong, first [%lld]: 0x%02x, "
          "expected 0x%02x for %g",
          what, source_names[q->op.source], (long long)q->N, q->C, type_names[q->op.type],
          input_names[q->kind], (double)scale, (long long)wrong, (long long)count, (long long)first,
          first < 0 ? 0 : got[first], first < 0 ? 0 : expected[first],
          first < 0 ? 0.0 : (double)floatX_to_float(q->y[at_y]));
    bool kept = true;
    for (int i = 0; i < GUARD; i++) kept &= got[count + i] == POISON;
    check(b->checks, kept, "%s (%lld, %d) wrote past the end", what, (long long)q->N, q->C);
    free(got);
}

static void poison(Bench *b, const Quantized *q) {
    size_t bytes = (size_t)(q->N * q->C + GUARD);
    void *host = memset(new_host(bytes), POISON, bytes);
    copy_to_device(b->stream, q->op.codes, host, bytes);
    copy_to_device(b->stream, q->op.transposed, host, bytes);
    stream_synchronize(b->stream);
    free(host);
}

// Quantizes with the scale in q->op.scale: both outputs, then each output alone.
static void check_quantize(Bench *b, Quantized *q, float scale) {
    expect_codes(q, scale);
    for (int form = 0; form < 3; form++) {
        poison(b, q);
        Fp8Quantize op = q->op;
        if (form == 1) op.transposed = NULL;
        if (form == 2) op.codes = NULL;
        op.accumulate = form == 1;
        op_fp8_quantize(b->stream, &op);
        if (op.codes) check_codes(b, q, form ? "codes alone" : "codes", op.codes, q->codes, scale);
        if (op.transposed) {
            check_codes(b, q, form ? "transposed alone" : "transposed", op.transposed, q->other, scale);
        }
        uint32_t absmax = fetch_scale(b, q->op.scale).absmax, expected = form ? expected_absmax(q) : 0;
        check(b->checks, absmax == expected, "quantizing form %d left absmax 0x%08x, expected 0x%08x", form,
              absmax, expected);
    }
    poison(b, q);
    copy_to_device(b->stream, q->op.codes, q->codes, (size_t)(q->N * q->C));
    op_fp8_transpose(b->stream, q->op.transposed, q->op.codes, q->N, q->C);
    check_codes(b, q, "op_fp8_transpose", q->op.transposed, q->other, scale);
}

static void test_quantize(Bench *b, int64_t N, int C, Fp8Source source, Fp8Type type, int kind) {
    Quantized q = new_quantized(b, N, C, source, type, kind);
    op_fp8_absmax(b->stream, &q.op);
    uint32_t absmax = fetch_scale(b, q.op.scale).absmax, expected = expected_absmax(&q);
    check(b->checks, absmax == expected, "absmax of %s (%lld, %d), %s: 0x%08x, expected 0x%08x",
          source_names[source], (long long)N, C, input_names[kind], absmax, expected);
    op_fp8_scale(b->stream, q.op.scale, type, NULL, 0, 0);
    Fp8Scale scale = fetch_scale(b, q.op.scale);
    float value = fp8_scale(expected, type, 0, 1.0f);
    check(b->checks, scale.scale == value && scale.inverse == f32_div(1.0f, value) && scale.absmax == 0,
          "scale of absmax 0x%08x: %g, inverse %g, absmax 0x%08x; expected %g, %g, 0", expected,
          (double)scale.scale, (double)scale.inverse, scale.absmax, (double)value, (double)(1.0f / value));
    check_quantize(b, &q, value);
    // Values beyond the range, only zeros and subnormal codes, and products that overflow.
    const float others[] = {1.0f, 1234.5f, 0x1p-20f, 0x1.8p90f};
    for (int i = 0; i < 4 && kind == ANY_BITS; i++) {
        Fp8Scale given = {1.0f / others[i], others[i]};
        copy_to_device(b->stream, q.op.scale, &given, sizeof given);
        check_quantize(b, &q, others[i]);
    }
    quantized_free(b, &q);
}

// --- block scales --------------------------------------------------------------------------------

static const char *const block_names[] = {"", " rows", " squares"};

// Number and place of the scale of element (row, column) of a (rows, columns) matrix.
static int64_t block_place(Fp8Blocks blocks, int64_t rows, int64_t columns, int64_t row, int64_t column) {
    int64_t k = column / FP8_BLOCK;
    return blocks == FP8_ROWS ? k * rows + row : row / FP8_BLOCK * fp8_squares_stride(columns) + k;
}

// Expected codes and inverse scales of y, or of y transposed.
static void expect_blocks(const Quantized *q, Fp8Blocks blocks, bool transposed, uint8_t *codes,
                          float *scales) {
    int64_t rows = transposed ? q->C : q->N, columns = transposed ? q->N : q->C;
    uint32_t *absmax = (uint32_t *)new_host((size_t)fp8_block_scales(blocks, rows, columns) * sizeof *absmax);
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t i = 0; i < rows * columns; i++) {
            int64_t row = i / columns, column = i % columns;
            float y = floatX_to_float(q->y[transposed ? column * q->C + row : i]);
            int64_t place = block_place(blocks, rows, columns, row, column);
            if (pass == 0) {
                if (fp8_absolute(y) > absmax[place]) absmax[place] = fp8_absolute(y);
                continue;
            }
            float scale = fp8_block_scale(absmax[place], q->op.type);
            codes[i] = fp8_encode_scaled(y, scale, q->op.type);
            scales[place] = f32_div(1.0f, scale);
        }
    }
    free(absmax);
}

static void check_block_scales(Bench *b, const Quantized *q, Fp8Blocks blocks, const char *what,
                               const float *device, const float *expected, int64_t count) {
    float *got = (float *)fetch(b, device, count, sizeof(float));
    int64_t wrong = 0, first = 0;
    for (int64_t i = 0; i < count; i++) {
        if (f32_bits(got[i]) != f32_bits(expected[i]) && wrong++ == 0) first = i;
    }
    check(b->checks, wrong == 0,
          "%s%s of %s (%lld, %d) as %s, %s: %lld of %lld scales are wrong, first [%lld]: %g, expected %g",
          what, block_names[blocks], source_names[q->op.source], (long long)q->N, q->C,
          type_names[q->op.type], input_names[q->kind], (long long)wrong, (long long)count, (long long)first,
          (double)got[first], (double)expected[first]);
    free(got);
}

static void test_blocks(Bench *b, int64_t N, int C, Fp8Source source, Fp8Type type, Fp8Blocks blocks,
                        int kind) {
    Quantized q = new_quantized(b, N, C, source, type, kind);
    int64_t counts[2] = {fp8_block_scales(blocks, N, C), fp8_block_scales(blocks, C, N)};
    float *device[2], *expected[2];
    for (int i = 0; i < 2; i++) {
        device[i] = (float *)new_memory(b, (size_t)counts[i] * sizeof(float));  // zeroed, like unused scales
        expected[i] = (float *)new_host((size_t)counts[i] * sizeof(float));
        expect_blocks(&q, blocks, i, i ? q.other : q.codes, expected[i]);
    }
    for (int form = 0; form < 3; form++) {
        poison(b, &q);
        for (int i = 0; i < 2; i++) set_zero(b->stream, device[i], (size_t)counts[i] * sizeof(float));
        Fp8Quantize op = q.op;
        op.blocks = blocks;
        op.scale = NULL;
        op.block_scales = device[0], op.transposed_block_scales = device[1];
        if (form == 1) op.transposed = NULL, op.transposed_block_scales = NULL;
        if (form == 2) op.codes = NULL, op.block_scales = NULL;
        op_fp8_quantize(b->stream, &op);
        const char *suffix = form ? " alone" : "";
        char what[2][48];
        snprintf(what[0], sizeof what[0], "codes%s%s", block_names[blocks], suffix);
        snprintf(what[1], sizeof what[1], "transposed%s%s", block_names[blocks], suffix);
        if (op.codes) check_codes(b, &q, what[0], op.codes, q.codes, NAN);
        if (op.codes) check_block_scales(b, &q, blocks, "codes", device[0], expected[0], counts[0]);
        if (op.transposed) check_codes(b, &q, what[1], op.transposed, q.other, NAN);
        if (op.transposed) check_block_scales(b, &q, blocks, "transposed", device[1], expected[1], counts[1]);
    }
    for (int i = 0; i < 2; i++) device_free(b->device, device[i]), free(expected[i]);
    quantized_free(b, &q);
}

static void test_block_scales(Bench *b) {
    const int sizes[][2] = {{128, 128}, {384, 640}, {256, 1152}};
    for (int i = 0; i < 3; i++) {
        for (int form = 0; form < 12; form++) {  // source, type, blocks
            for (int kind = 0; kind < INPUT_KINDS; kind++) {
                test_blocks(b, sizes[i][0], sizes[i][1], (Fp8Source)(form % 3), (Fp8Type)(form / 3 % 2),
                            form / 6 ? FP8_ROWS : FP8_SQUARES, kind);
            }
        }
    }
    printf("  block scales: %d passed, %d failed so far\n", b->checks->passed, b->checks->failed);
}

// --- all inputs ----------------------------------------------------------------------------------

static void test_quantizing(Bench *b) {
    const int sizes[][2] = {{16, 16}, {48, 80}, {112, 144}, {128, 128}, {272, 400}, {1040, 384}, {16, 2064}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (int source = 0; source < 3; source++) {
            for (int type = 0; type < 2; type++) {
                for (int kind = 0; kind < INPUT_KINDS; kind++)
                    test_quantize(b, sizes[i][0], sizes[i][1], (Fp8Source)source, (Fp8Type)type, kind);
            }
        }
    }
    printf("  codes and scales: %d passed, %d failed so far\n", b->checks->passed, b->checks->failed);
}

// Every floatX value.
static void test_every_value(Bench *b) {
    for (int type = 0; type < 2; type++) {
        Quantized q = new_quantized(b, 256, 256, FP8_OF_X, (Fp8Type)type, UNIFORM);
        for (int i = 0; i < 65536; i++) q.x.host[i] = q.y[i] = (floatX)i;
        copy_to_device(b->stream, q.x.device, q.x.host, 65536 * sizeof(floatX));
        const float scales[] = {1.0f, 3.14159f, 0x1p30f};
        for (int i = 0; i < 3; i++) {
            Fp8Scale given = {1.0f / scales[i], scales[i]};
            copy_to_device(b->stream, q.op.scale, &given, sizeof given);
            check_quantize(b, &q, scales[i]);
        }
        quantized_free(b, &q);
    }
}

// op_fp8_scale from gathered maxima, with finite and other values.
static void test_scale_of_maxima(Bench *b) {
    const uint32_t cases[][3] = {
        {0x3F800000u, 0x40490FDBu, 0x3E000000u}, {0, 0, 0}, {0, 0x7F800000u, 0x3F800000u},
        {0x7FC00000u, 0x3F800000u, 0},           {1, 0, 0}, {0x7F7FFFFFu, 0, 0}};
    Fp8Scale *scale = (Fp8Scale *)new_memory(b, sizeof *scale);
    uint32_t *maxima = (uint32_t *)new_memory(b, sizeof cases[0]);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (int type = 0; type < 2; type++) {
            uint32_t largest = 0;
            for (int k = 0; k < 3; k++) largest = cases[i][k] > largest ? cases[i][k] : largest;
            Fp8Scale before = {0.0f, 0.0f, 0x7F000000u};
            copy_to_device(b->stream, scale, &before, sizeof before);
            copy_to_device(b->stream, maxima, cases[i], sizeof cases[i]);
            op_fp8_scale(b->stream, scale, (Fp8Type)type, maxima, 3, 0);
            Fp8Scale got = fetch_scale(b, scale);
            float value = fp8_scale(largest, (Fp8Type)type, 0, 1.0f);
            check(b->checks, got.scale == value && got.inverse == f32_div(1.0f, value) && got.absmax == 0,
                  "scale of the maximum 0x%08x: %g, inverse %g; expected %g", largest, (double)got.scale,
                  (double)got.inverse, (double)value);
        }
    }
    device_free(b->device, scale), device_free(b->device, maxima);
}

// --- delayed scaling -----------------------------------------------------------------------------

enum { TENSORS = 37 };

typedef struct Delayed {
    Fp8Scale scale[TENSORS];
    uint8_t type[TENSORS];
    uint32_t *absmax;  // (ranks, TENSORS)
    float *history;    // (TENSORS, length)
} Delayed;

// Updates on the host.
static void update_on_host(Delayed *d, const Fp8Update *a) {
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        uint32_t largest = 0;
        for (int rank = 0; rank < a->ranks; rank++) {
            uint32_t bits = d->absmax[rank * TENSORS + tensor];
            largest = bits > largest ? bits : largest;
        }
        d->scale[tensor].absmax = 0;
        if (largest == 0) continue;
        float newest = largest < 0x7F800000u ? f32_from_bits(largest) : 0.0f;
        float *history = d->history + tensor * a->length, top = newest;
        memmove(history, history + 1, (size_t)(a->length - 1) * sizeof(float));
        history[a->length - 1] = newest;
        for (int i = 0; i < a->length; i++) top = history[i] > top ? history[i] : top;
        float used = a->most_recent ? newest : top;
        float scale = fp8_scale(f32_bits(used), (Fp8Type)d->type[tensor], a->margin, d->scale[tensor].scale);
        d->scale[tensor].scale = scale;
        d->scale[tensor].inverse = f32_div(1.0f, scale);
    }
}

static void draw_maxima(Bench *b, Delayed *d, int ranks) {
    for (int i = 0; i < ranks * TENSORS; i++) {
        uint64_t bits = draw_bits(b);
        uint32_t strange = bits % 23 == 0 ? 0x7F800000u : bits % 23 == 1 ? 0x7FC12345u : 0;
        d->absmax[i] = strange ? strange : fp8_absolute(draw(b, 10.0f));
        if (i % TENSORS % 5 == 0 || bits % 3 == 0) d->absmax[i] = 0;  // every fifth tensor is not quantized
    }
}

static void test_update(Bench *b, int ranks, int length, bool most_recent, int margin) {
    size_t maxima = (size_t)(ranks * TENSORS) * sizeof(uint32_t), entries = (size_t)(TENSORS * length);
    size_t scales = (size_t)(ranks * TENSORS) * sizeof(Fp8Scale);
    Delayed d = {};
    d.absmax = (uint32_t *)new_host(maxima), d.history = (float *)new_host(entries * sizeof(float));
    for (int i = 0; i < TENSORS; i++) {
        d.scale[i] = (Fp8Scale){0.5f, 2.0f, 0x3F800000u};
        d.type[i] = (uint8_t)(i % 2);
    }
    Fp8Update a = {.tensors = TENSORS, .ranks = ranks, .length = length, .most_recent = most_recent};
    a.margin = margin;
    a.scale = (Fp8Scale *)new_memory(b, sizeof d.scale);
    Fp8Scale *all = (Fp8Scale *)new_memory(b, scales), *host = (Fp8Scale *)new_host(scales);
    uint8_t *type = (uint8_t *)new_memory(b, sizeof d.type);
    a.history = (float *)new_memory(b, entries * sizeof(float));
    a.all = all, a.type = type;
    copy_to_device(b->stream, a.scale, d.scale, sizeof d.scale);
    copy_to_device(b->stream, type, d.type, sizeof d.type);
    const int32_t flags[2] = {0, 1};
    int32_t *applied = (int32_t *)new_memory(b, sizeof flags);
    copy_to_device(b->stream, applied, flags, sizeof flags);
    for (int step = 0; step < 4; step++) {
        a.applied = step == 0 ? NULL : &applied[step != 2];
        draw_maxima(b, &d, ranks);
        for (int i = 0; i < ranks * TENSORS; i++) host[i].absmax = d.absmax[i];
        copy_to_device(b->stream, all, host, scales);
        op_fp8_update_scales(b->stream, &a);
        if (step != 2) update_on_host(&d, &a);
        for (int i = 0; step == 2 && i < TENSORS; i++) d.scale[i].absmax = 0;
        Fp8Scale *scale = (Fp8Scale *)fetch(b, a.scale, TENSORS, sizeof(Fp8Scale));
        float *history = (float *)fetch(b, a.history, (int64_t)entries, sizeof(float));
        check(b->checks, memcmp(scale, d.scale, sizeof d.scale) == 0,
              "update of scales, %d ranks, history %d, margin %d, step %d: other scales", ranks, length,
              margin, step);
        check(b->checks, memcmp(history, d.history, entries * sizeof(float)) == 0,
              "update of scales, %d ranks, history %d, step %d: other history", ranks, length, step);
        free(scale), free(history);
    }
    device_free(b->device, a.scale), device_free(b->device, all), device_free(b->device, type),
        device_free(b->device, a.history), device_free(b->device, applied);
    free(d.absmax), free(d.history), free(host);
}

static void test_updates(Bench *b) {
    const int lengths[] = {1, 2, 31, 32, 33, 1024}, ranks[] = {1, 3, 40};
    for (int l = 0; l < 6; l++) {
        for (int r = 0; r < 3; r++) {
            test_update(b, ranks[r], lengths[l], false, 0);
            test_update(b, ranks[r], lengths[l], true, 2);
        }
    }
}

// dx *= GELU'(pre), and the column sums.
static void test_gelu_backward(Bench *b, int64_t N, int C) {
    Values dx = random_values(b, N * C, 1.0f), pre = random_values(b, N * C, 4.0f);
    float *dbias = (float *)new_memory(b, (size_t)C * sizeof(float));
    void *workspace = new_memory(b, op_linear_workspace_bytes(N, C, C));
    op_gelu_backward(b->stream, dx.device, pre.device, dbias, N, C, workspace, NULL);
    floatX *got = fetch(b, dx.device, N * C, sizeof(floatX));
    float *sums = (float *)fetch(b, dbias, C, sizeof(float));
    Worst worst = {}, worst_sum = {};
    for (int c = 0; c < C; c++) {
        double sum = 0.0, size = 0.0;
        for (int64_t n = 0; n < N; n++) {
            int64_t i = n * C + c;
            double x = at(&pre, i), u = 0.7978845608028654 * (x + 0.044715 * x * x * x), t = tanh(u);
            double slope = 0.5 * (1.0 + t) +
                           0.5 * x * (1.0 - t * t) * 0.7978845608028654 * (1.0 + 3 * 0.044715 * x * x);
            double exact = at(&dx, i) * slope, stored = floatX_to_float(got[i]);
            compare(&worst, i, stored, exact, bf16_half_ulp(exact) + fabs(at(&dx, i)) * 0x1p-16);
            sum += stored, size += fabs(stored);
        }
        compare(&worst_sum, c, sums[c], sum, (double)N * 0x1p-23 * size);
    }
    check(b->checks, worst.ratio <= 1.0,
          "GELU backward (%lld, %d): element %lld is off by %g times its bound", (long long)N, C,
          (long long)worst.at, worst.ratio);
    check(b->checks, worst_sum.ratio <= 1.0,
          "GELU backward (%lld, %d): sum %lld is off by %g times its bound", (long long)N, C,
          (long long)worst_sum.at, worst_sum.ratio);
    values_free(b, &dx), values_free(b, &pre);
    device_free(b->device, dbias), device_free(b->device, workspace);
    free(got), free(sums);
}

// --- products ------------------------------------------------------------------------------------

// Random codes with a positive mean, so that sums do not cancel, and their scale.
typedef struct Codes {
    uint8_t *host, *device;
    Fp8Scale *scale;
    Fp8Type type;
    float inverse;
    // Powers of 2 from 2^-3 to 2^3 for a matrix with `rows` rows and block scales.
    Fp8Blocks blocks;
    int64_t rows, columns;
    float *host_scales, *block_scales;
} Codes;

static void random_scales(Bench *b, Codes *c, Fp8Blocks blocks, int64_t rows, int64_t columns) {
    size_t count = (size_t)fp8_block_scales(blocks, rows, columns), bytes = count * sizeof(float);
    c->blocks = blocks, c->rows = rows, c->columns = columns;
    c->host_scales = (float *)new_host(bytes), c->block_scales = (float *)new_memory(b, bytes);
    for (size_t i = 0; i < count; i++) c->host_scales[i] = ldexpf(1.0f, (int)(draw_bits(b) % 7) - 3);
    copy_to_device(b->stream, c->block_scales, c->host_scales, bytes);
}
static double decoded(const Codes *c, int64_t row, int64_t column) {
    double code = fp8_decode(c->host[row * c->columns + column], c->type);
    if (c->blocks == FP8_WHOLE) return code * (double)c->inverse;
    return code * (double)c->host_scales[block_place(c->blocks, c->rows, c->columns, row, column)];
}

static Codes random_codes(Bench *b, int64_t count, Fp8Type type, float inverse) {
    enum { KINDS = 4096 };
    uint8_t table[KINDS];
    for (int i = 0; i < KINDS; i++) table[i] = fp8_encode(16.0f * (0.25f + draw(b, 1.0f)), type);
    Codes c = {(uint8_t *)new_host((size_t)count), (uint8_t *)new_memory(b, (size_t)count),
               (Fp8Scale *)new_memory(b, sizeof(Fp8Scale)), type, inverse};
    for (int64_t i = 0; i < count; i++) c.host[i] = table[draw_bits(b) % KINDS];
    Fp8Scale scale = {inverse, 1.0f / inverse};
    copy_to_device(b->stream, c.device, c.host, (size_t)count);
    copy_to_device(b->stream, c.scale, &scale, sizeof scale);
    return c;
}
static void codes_free(Bench *b, Codes *c) {
    stream_synchronize(b->stream);
    device_free(b->device, c->device), device_free(b->device, c->scale);
    if (c->block_scales) device_free(b->device, c->block_scales);
    free(c->host), free(c->host_scales);
}
static Fp8Matrix matrix_of(const Codes *c) {
    Fp8Matrix m = {.codes = c->device, .type = c->type, .blocks = c->blocks, .scale = c->scale};
    m.block_scales = c->block_scales;
    return m;
}

typedef struct ProductCase {
    int64_t m, n, k;
    Fp8Type a, b;
    bool bias, sum, overwrite, fast;
    Fp8Blocks a_blocks, b_blocks;
} ProductCase;

static void describe_case(const ProductCase *p, char *text, size_t bytes) {
    snprintf(text, bytes, "(%lld, %lld) x (%lld, %lld)^T %s%s x %s%s%s%s%s%s", (long long)p->m,
             (long long)p->k, (long long)p->n, (long long)p->k, type_names[p->a], block_names[p->a_blocks],
             type_names[p->b], block_names[p->b_blocks], p->bias ? " + bias" : "", p->sum ? " to fp32" : "",
             p->sum && !p->overwrite ? ", added" : "", p->fast ? ", fast" : "");
}

// The exact value of an element without bias, and the sum of |a b|.
static double exact_product(const ProductCase *p, const Codes *a, const Codes *b, int64_t row, int64_t column,
                            double *size) {
    double sum = 0.0;
    *size = 0.0;
    for (int64_t k = 0; k < p->k; k++) {
        double term = decoded(a, row, k) * decoded(b, column, k);
        sum += term, *size += fabs(term);
    }
    return sum;
}

// Checks all elements of small results, else 4096 of them. Prints the largest errors.
static void check_product(Bench *b, const ProductCase *p, const Codes *x, const Codes *w, const Values *bias,
                          const void *got, const float *before) {
    int64_t count = p->m * p->n, checked = count < 4096 ? count : 4096;
    double tolerance = p->fast ? 0x1p-9 + (double)p->k / 32 * 0x1p-13 : 0x1p-8, largest = 0.0;
    Worst worst = {};
    for (int64_t i = 0; i < checked; i++) {
        int64_t place = checked == count ? i
                        : i < 2          ? (count - 1) * i
                                         : (int64_t)(draw_bits(b) % (uint64_t)count);
        double size, exact = exact_product(p, x, w, place / p->n, place % p->n, &size);
        double computed = p->sum ? ((const float *)got)[place]
                                 : floatX_to_float(((const floatX *)got)[place]);
        if (p->bias) exact += at(bias, place % p->n);
        if (p->sum && !p->overwrite) exact += before[place];
        double rounding = p->sum ? fabs(exact) * 0x1p-23 : bf16_half_ulp(exact);
        compare(&worst, place, computed, exact, tolerance * size + rounding);
        double error = (fabs(computed - exact) - rounding) / size;
        if (!(error <= largest)) largest = error;
    }
    char text[160];
    describe_case(p, text, sizeof text);
    printf("  %s: largest error beyond rounding 2^%.1f of the sum of |a b| (bound 2^%.1f)\n", text,
           log2(largest > 0 ? largest : 0x1p-60), log2(tolerance));
    check(b->checks, worst.ratio <= 1.0, "%s: element %lld is off by %g times its bound", text,
          (long long)worst.at, worst.ratio);
}

// Returns false if cuBLASLt refuses the product.
static bool test_product(Bench *b, const ProductCase *p) {
    Codes x = random_codes(b, p->m * p->k, p->a, 0.0137f), w = random_codes(b, p->n * p->k, p->b, 0.37f);
    x.rows = p->m, x.columns = p->k, w.rows = p->n, w.columns = p->k;
    if (p->a_blocks) random_scales(b, &x, p->a_blocks, p->m, p->k);
    if (p->b_blocks) random_scales(b, &w, p->b_blocks, p->n, p->k);
    Values bias = random_values(b, p->n, 100.0f);
    size_t bytes = (size_t)(p->m * p->n) * (p->sum ? sizeof(float) : sizeof(floatX));
    void *d = new_memory(b, bytes),
         *workspace = new_memory(b, op_linear_workspace_bytes(p->m, (int)p->n, 16));
    float *before = (float *)new_host(p->sum ? bytes : 1);
    for (int64_t i = 0; i < p->m * p->n && p->sum; i++) before[i] = draw(b, 50.0f);
    if (p->sum) copy_to_device(b->stream, d, before, bytes);
    Fp8Product product = {.m = p->m, .n = p->n, .k = p->k, .a = matrix_of(&x), .b = matrix_of(&w)};
    product.d = p->sum ? NULL : (floatX *)d;
    product.bias = p->bias ? bias.device : NULL;
    product.sum = p->sum ? (float *)d : NULL;
    product.overwrite = p->overwrite;
    product.fast = p->fast;
    product.workspace = workspace;
    Gemm g = fp8_gemm(&product);
    const char *refused = gemm_attempt(b->stream, &g);
    char text[160];
    describe_case(p, text, sizeof text);
    check(b->checks, !refused, "%s: cuBLASLt: %s", text, refused ? refused : "");
    if (!refused) {
        void *got = fetch(b, d, (int64_t)bytes, 1);
        check_product(b, p, &x, &w, &bias, got, before);
        if (p->sum && !p->overwrite) copy_to_device(b->stream, d, before, bytes);
        op_fp8_product(b->stream, &product);
        void *again = fetch(b, d, (int64_t)bytes, 1);
        check(b->checks, memcmp(got, again, bytes) == 0, "%s: a second product differs", text);
        free(got), free(again);
    }
    codes_free(b, &x), codes_free(b, &w), values_free(b, &bias);
    device_free(b->device, d), device_free(b->device, workspace);
    free(before);
    return !refused;
}

// Forward with each option, dx, and dw of layers from (N, C) to (N, OC).
static bool test_products(Bench *b) {
    const int64_t layers[][3] = {
        {16, 16, 16}, {48, 112, 80}, {256, 64, 192}, {1024, 768, 2304}, {16384, 2048, 8192}};
    bool accepted = true;
    for (size_t i = 0; i < sizeof layers / sizeof *layers; i++) {
        int64_t N = layers[i][0], C = layers[i][1], OC = layers[i][2];
        const ProductCase cases[] = {{N, OC, C, FP8_E4M3, FP8_E4M3, false, false, false, false},
                                     {N, OC, C, FP8_E4M3, FP8_E4M3, true, false, false, false},
                                     {N, OC, C, FP8_E4M3, FP8_E4M3, false, false, false, true},
                                     {N, OC, C, FP8_E4M3, FP8_E4M3, true, false, false, true},
                                     {N, C, OC, FP8_E5M2, FP8_E4M3, false, false, false, false},
                                     {N, C, OC, FP8_E4M3, FP8_E4M3, false, false, false, false},
                                     {OC, C, N, FP8_E5M2, FP8_E4M3, false, true, false, false},
                                     {OC, C, N, FP8_E5M2, FP8_E4M3, false, true, true, false},
                                     {OC, C, N, FP8_E4M3, FP8_E4M3, false, true, false, false}};
        for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) accepted &= test_product(b, &cases[k]);
    }
    return accepted;
}

// The same with block scales: weights have squares, and dw has rows in both operands.
static void test_block_products(Bench *b) {
    const int64_t layers[][3] = {{128, 128, 128}, {384, 768, 256}, {1024, 768, 2304}, {16384, 2048, 8192}};
    for (size_t i = 0; i < sizeof layers / sizeof *layers; i++) {
        int64_t N = layers[i][0], C = layers[i][1], OC = layers[i][2];
        const Fp8Type E4M3 = FP8_E4M3, E5M2 = FP8_E5M2;
        const ProductCase cases[] = {
            {N, OC, C, E4M3, E4M3, false, false, false, false, FP8_ROWS, FP8_SQUARES},
            {N, OC, C, E4M3, E4M3, true, false, false, false, FP8_ROWS, FP8_SQUARES},
            {N, C, OC, E4M3, E4M3, false, false, false, false, FP8_ROWS, FP8_SQUARES},
            {N, C, OC, E5M2, E4M3, false, false, false, false, FP8_ROWS, FP8_SQUARES},
            {OC, C, N, E4M3, E4M3, false, true, false, false, FP8_ROWS, FP8_ROWS},
            {OC, C, N, E4M3, E4M3, false, true, true, false, FP8_ROWS, FP8_ROWS},
            {OC, C, N, E5M2, E4M3, false, true, false, false, FP8_ROWS, FP8_ROWS}};
        for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) test_product(b, &cases[k]);
    }
}

// --- what cuBLASLt accepts -----------------------------------------------------------------------

// One description of the product (1024, 768) x (2304, 768)^T.
typedef struct Description {
    uint32_t reductions;
    int alignment;  // MIN_ALIGNMENT_* in bytes; 0: not set
    int scales;     // offset of the scale pointers in bytes; negative: not set
    int fast;       // FAST_ACCUM
    bool fp32, e5m2;
} Description;

typedef struct Handles {
    cublasLtHandle_t lt;
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulPreference_t wish;
    uint8_t *codes, *out, *workspace;
    float *scales;
} Handles;
enum { ROWS = 1024, COLUMNS = 2304, INNER = 768, RESULTS = 8 };

static void describe(Handles *h, const Description *p) {
    cublasLtMatmulDescCreate(&h->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    cublasOperation_t transpose = CUBLAS_OP_T;
    const cublasLtMatmulDescAttributes_t pointers[] = {CUBLASLT_MATMUL_DESC_A_SCALE_POINTER,
                                                       CUBLASLT_MATMUL_DESC_B_SCALE_POINTER};
    cublasLtMatmulDescSetAttribute(h->operation, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof transpose);
    for (int i = 0; i < 2 && p->scales >= 0; i++) {
        const float *scale = h->scales + p->scales / 4 + 4 * i;
        cublasLtMatmulDescSetAttribute(h->operation, pointers[i], &scale, sizeof scale);
    }
    int8_t fast = (int8_t)p->fast;
    cublasLtMatmulDescSetAttribute(h->operation, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast);
    cublasLtMatrixLayoutCreate(&h->a, CUDA_R_8F_E4M3, INNER, COLUMNS, INNER);
    cublasLtMatrixLayoutCreate(&h->b, p->e5m2 ? CUDA_R_8F_E5M2 : CUDA_R_8F_E4M3, INNER, ROWS, INNER);
    cublasLtMatrixLayoutCreate(&h->d, p->fp32 ? CUDA_R_32F : CUDA_R_16BF, COLUMNS, ROWS, COLUMNS);
    cublasLtMatmulPreferenceCreate(&h->wish);
    size_t workspace = GEMM_WORKSPACE_BYTES;
    cublasLtMatmulPreferenceSetAttribute(h->wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                         sizeof workspace);
    cublasLtMatmulPreferenceSetAttribute(h->wish, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &p->reductions,
                                         sizeof p->reductions);
    const cublasLtMatmulPreferenceAttributes_t alignments[] = {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                                                               CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                                                               CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                                                               CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    uint32_t alignment = (uint32_t)p->alignment;
    for (int i = 0; i < 4 && p->alignment > 0; i++)
        cublasLtMatmulPreferenceSetAttribute(h->wish, alignments[i], &alignment, sizeof alignment);
}

// Prints a line: found results, then one letter per result for the check and for the product. y:
// accepted, N: not supported, I: invalid value, E: another error.
static void print_accepted(Bench *b, Handles *h, const Description *p) {
    describe(h, p);
    cublasLtMatmulHeuristicResult_t found[RESULTS];
    int count = 0;
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(h->lt, h->operation, h->a, h->b, h->d, h->d,
                                                           h->wish, RESULTS, found, &count);
    char checked[RESULTS + 1] = "", computed[RESULTS + 1] = "";
    for (int i = 0; i < count; i++) {
        float one = 1.0f, zero = 0.0f;
        cublasLtMatmulHeuristicResult_t result;
        cublasStatus_t both[2];
        both[0] = cublasLtMatmulAlgoCheck(h->lt, h->operation, h->a, h->b, h->d, h->d, &found[i].algo,
                                          &result);
        both[1] = cublasLtMatmul(h->lt, h->operation, &one, h->codes, h->a, h->codes, h->b, &zero, h->out,
                                 h->d, h->out, h->d, &found[i].algo, h->workspace, GEMM_WORKSPACE_BYTES,
                                 stream_handle(b->stream));
        for (int k = 0; k < 2; k++) {
            char letter = both[k] == CUBLAS_STATUS_SUCCESS         ? 'y'
                          : both[k] == CUBLAS_STATUS_NOT_SUPPORTED ? 'N'
                          : both[k] == CUBLAS_STATUS_INVALID_VALUE ? 'I'
                                                                   : 'E';
            (k ? computed : checked)[i] = letter;
        }
    }
    cudaError_t ran = cudaStreamSynchronize(stream_handle(b->stream));
    printf(
        "  reductions %2u alignment %2d scales %2d fast %d %s %s: heuristic %s, %d found; check %s, product "
        "%s, CUDA %s\n",
        p->reductions, p->alignment, p->scales, p->fast, p->e5m2 ? "E5M2" : "E4M3", p->fp32 ? "fp32" : "bf16",
        cublasLtGetStatusName(status), count, checked, computed, cudaGetErrorName(ran));
    cublasLtMatmulPreferenceDestroy(h->wish);
    cublasLtMatrixLayoutDestroy(h->a), cublasLtMatrixLayoutDestroy(h->b), cublasLtMatrixLayoutDestroy(h->d);
    cublasLtMatmulDescDestroy(h->operation);
}

static void diagnose(Bench *b) {
    Handles h = {};
    cublasLtCreate(&h.lt);
    h.codes = (uint8_t *)new_memory(b, (size_t)COLUMNS * INNER);
    h.out = (uint8_t *)new_memory(b, (size_t)ROWS * COLUMNS * sizeof(float));
    h.workspace = (uint8_t *)new_memory(b, GEMM_WORKSPACE_BYTES);
    h.scales = (float *)new_memory(b, 256);
    const uint32_t reductions[] = {CUBLASLT_REDUCTION_SCHEME_MASK, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE};
    const int scales[] = {0, 4, -1};
    printf("  cuBLASLt %zu; scales: offset of the pointers, -1: not set\n", cublasLtGetVersion());
    for (int form = 0; form < 48; form++) {  // every combination
        const bool backward = form >= 24;
        const Description p = {reductions[form % 2], form / 2 % 2 * 16, scales[form / 4 % 3],
                               form / 12 % 2,        backward,          backward};
        print_accepted(b, &h, &p);
    }
    device_free(b->device, h.codes), device_free(b->device, h.out), device_free(b->device, h.workspace),
        device_free(b->device, h.scales);
    cublasLtDestroy(h.lt);
}

// --- speed ---------------------------------------------------------------------------------------

// Returns the median time of a call in microseconds.
template <class Call> static double microseconds(Bench *b, Call call) {
    enum { ROUNDS = 7, REPEATS = 10 };
    Event *start = event_create_timed(b->device), *stop = event_create_timed(b->device);
    double times[ROUNDS];
    for (int i = 0; i < 3; i++) call();
    for (int round = 0; round < ROUNDS; round++) {
        event_record(start, b->stream);
        for (int i = 0; i < REPEATS; i++) call();
        event_record(stop, b->stream);
        event_synchronize(stop);
        double time = 1e3 * event_elapsed_ms(start, stop) / REPEATS;
        int place = round;
        for (; place > 0 && times[place - 1] > time; place--) times[place] = times[place - 1];
        times[place] = time;
    }
    event_destroy(start), event_destroy(stop);
    return times[ROUNDS / 2];
}

// Device memory filled with copies of random values.
static void *filled(Bench *b, size_t bytes, const void *pattern, size_t pattern_bytes) {
    uint8_t *memory = (uint8_t *)new_memory(b, bytes);
    for (size_t i = 0; i < bytes; i += pattern_bytes) {
        size_t left = bytes - i;
        copy_on_device(b->stream, memory + i, pattern, left < pattern_bytes ? left : pattern_bytes);
    }
    return memory;
}

typedef struct Speed {
    Bench *b;
    int64_t N;
    int C;
    Values values;   // patterns for tensors and codes
    Codes codes[2];  // of each type
    void *workspace;
} Speed;
enum { PATTERN = 1 << 22 };

static void print_time(const char *what, double time, double bytes) {
    printf("    %-38s %9.1f us %7.0f GB/s\n", what, time, 1e-3 * bytes / time);
}

// Absolute maximum and quantization of (N, C).
static void time_quantize(Speed *s, Fp8Source source, int C) {
    Bench *b = s->b;
    double count = (double)s->N * C, read = count * (source == FP8_OF_SWIGLU ? 4 : 2);
    Fp8Quantize a = {.N = s->N, .C = C, .source = source, .type = FP8_E4M3};
    a.x = (const floatX *)filled(b, (size_t)read, s->values.device, PATTERN * sizeof(floatX));
    a.codes = (uint8_t *)new_memory(b, (size_t)count), a.transposed = (uint8_t *)new_memory(b, (size_t)count);
    a.scale = s->codes[0].scale;
    printf("   %s (%lld, %d)\n", source_names[source], (long long)s->N, C);
    print_time("absmax", microseconds(b, [&] { op_fp8_absmax(b->stream, &a); }), read);
    print_time("quantize, both", microseconds(b, [&] { op_fp8_quantize(b->stream, &a); }), read + 2 * count);
    a.accumulate = true;
    print_time("quantize, both, accumulate", microseconds(b, [&] { op_fp8_quantize(b->stream, &a); }),
               read + 2 * count);
    a.accumulate = false;
    Fp8Quantize one = a;
    one.transposed = NULL;
    print_time("quantize, codes", microseconds(b, [&] { op_fp8_quantize(b->stream, &one); }), read + count);
    one = a, one.codes = NULL;
    print_time("quantize, transposed", microseconds(b, [&] { op_fp8_quantize(b->stream, &one); }),
               read + count);
    print_time("transpose",
               microseconds(b, [&] { op_fp8_transpose(b->stream, a.transposed, a.codes, s->N, C); }),
               2 * count);
    stream_synchronize(b->stream);
    device_free(b->device, (void *)a.x), device_free(b->device, a.codes),
        device_free(b->device, a.transposed);
}

static void time_gelu_backward(Speed *s, int C) {
    Bench *b = s->b;
    size_t bytes = (size_t)s->N * (size_t)C * sizeof(floatX);
    floatX *dx = (floatX *)filled(b, bytes, s->values.device, PATTERN * sizeof(floatX)),
           *pre = (floatX *)filled(b, bytes, s->values.device, PATTERN * sizeof(floatX));
    print_time("gelu_backward",
               microseconds(b,
                            [&] { op_gelu_backward(b->stream, dx, pre, NULL, s->N, C, s->workspace, NULL); }),
               1.5 * 2 * (double)bytes);
    stream_synchronize(b->stream);
    device_free(b->device, dx), device_free(b->device, pre);
}

// Returns the time of a product, or NAN if cuBLASLt refuses it.
static double time_gemm(Bench *b, const Fp8Product *a) {
    Gemm g = fp8_gemm(a);
    return gemm_attempt(b->stream, &g) ? NAN : microseconds(b, [&] { gemm(b->stream, &g); });
}

// The product with block scales.
static double time_blocks(Speed *s, const ProductCase *p, Fp8Product a) {
    Error err = {};
    if (!op_check_fp8(s->b->device, FP8_ROWS, &err)) return NAN;
    Codes x = {}, w = {};
    random_scales(s->b, &x, FP8_ROWS, p->m, p->k);
    random_scales(s->b, &w, p->sum ? FP8_ROWS : FP8_SQUARES, p->n, p->k);
    a.a.blocks = x.blocks, a.a.block_scales = x.block_scales;
    a.b.blocks = w.blocks, a.b.block_scales = w.block_scales;
    double time = time_gemm(s->b, &a);
    stream_synchronize(s->b->stream);
    device_free(s->b->device, x.block_scales), device_free(s->b->device, w.block_scales);
    free(x.host_scales), free(w.host_scales);
    return time;
}

// The product of a case in FP8, slow, fast and with block scales, and in bf16.
static void time_product(Speed *s, const char *what, const ProductCase *p) {
    Bench *b = s->b;
    size_t a_count = (size_t)(p->m * p->k), b_count = (size_t)(p->n * p->k);
    Codes x = s->codes[p->a], w = s->codes[p->b];
    x.device = (uint8_t *)filled(b, a_count, x.device, PATTERN);
    w.device = (uint8_t *)filled(b, b_count, w.device, PATTERN);
    floatX *wide_a = (floatX *)filled(b, a_count * sizeof(floatX), s->values.device,
                                      PATTERN * sizeof(floatX)),
           *wide_b = (floatX *)filled(b, b_count * sizeof(floatX), s->values.device,
                                      PATTERN * sizeof(floatX));
    void *d = new_memory(b, (size_t)(p->m * p->n) * (p->sum ? sizeof(float) : sizeof(floatX)));
    Fp8Product a = {.m = p->m, .n = p->n, .k = p->k, .a = matrix_of(&x), .b = matrix_of(&w)};
    a.d = p->sum ? NULL : (floatX *)d, a.sum = p->sum ? (float *)d : NULL, a.workspace = s->workspace;
    a.overwrite = p->overwrite;
    double times[4];
    for (int fast = 0; fast < 2; fast++) {
        a.fast = fast;
        times[fast] = time_gemm(b, &a);
    }
    times[3] = time_blocks(s, p, a);
    times[2] = microseconds(b, [&] {
        if (p->sum) {
            matmul_tn(b->stream, (float *)d, wide_a, wide_b, p->m, p->n, p->k, p->overwrite, s->workspace);
        } else if (p->a == FP8_E5M2) {  // dx
            matmul_nn(b->stream, (floatX *)d, wide_a, wide_b, p->m, p->n, p->k, s->workspace);
        } else {
            matmul_nt(b->stream, (floatX *)d, wide_a, wide_b, p->m, p->n, p->k, s->workspace);
        }
    });
    double flops = 2e-6 * (double)p->m * (double)p->n * (double)p->k;
    printf(
        "    %-9s %6lld %6lld %6lld  us (TFLOP/s): FP8 %7.1f (%4.0f)  fast %7.1f (%4.0f)  blocks %7.1f "
        "(%4.0f)  "
        "bf16 %7.1f (%4.0f)\n",
        what, (long long)p->m, (long long)p->n, (long long)p->k, times[0], flops / times[0], times[1],
        flops / times[1], times[3], flops / times[3], times[2], flops / times[2]);
    stream_synchronize(b->stream);
    device_free(b->device, x.device), device_free(b->device, w.device), device_free(b->device, wide_a),
        device_free(b->device, wide_b), device_free(b->device, d);
}

static void time_model(Bench *b, const char *name, int64_t N, int C) {
    Speed s = {b, N, C, random_values(b, PATTERN, 2.0f)};
    for (int type = 0; type < 2; type++) s.codes[type] = random_codes(b, PATTERN, (Fp8Type)type, 0.01f);
    s.workspace = new_memory(b, op_linear_workspace_bytes(N, 4 * C, 4 * C));
    printf("  %s\n", name);
    time_quantize(&s, FP8_OF_X, C);
    time_quantize(&s, FP8_OF_GELU, 4 * C);
    time_gelu_backward(&s, 4 * C);
    time_quantize(&s, FP8_OF_SWIGLU, 4 * C);
    const struct {
        const char *name;
        int from, to;
    } layers[] = {{"qkv", C, 3 * C}, {"proj", C, C}, {"fc1", C, 4 * C}, {"fc2", 4 * C, C}};
    for (int i = 0; i < 4; i++) {
        int64_t from = layers[i].from, to = layers[i].to;
        const ProductCase forward = {N, to, from, FP8_E4M3, FP8_E4M3};
        const ProductCase dx = {N, from, to, FP8_E5M2, FP8_E4M3};
        const ProductCase dw = {to, from, N, FP8_E5M2, FP8_E4M3, false, true};
        const ProductCase *cases[] = {&forward, &dx, &dw};
        const char *const names[] = {"", " dx", " dw"};
        for (int k = 0; k < 3; k++) {
            char text[16];
            snprintf(text, sizeof text, "%s%s", layers[i].name, names[k]);
            time_product(&s, text, cases[k]);
        }
    }
    values_free(b, &s.values);
    codes_free(b, &s.codes[0]), codes_free(b, &s.codes[1]);
    device_free(b->device, s.workspace);
}

int main(int argc, char **argv) {
    Checks checks = {"test_fp8_gpu", 0, 0};
    Error err = {};
    Bench b = {&checks, device_open(0, NULL, &err), NULL, 12345};
    if (!b.device) fatal(NULL, err.code, "%s", err.what);
    b.stream = stream_create(b.device, "compute");
    setvbuf(stdout, NULL, _IOLBF, 0);
    test_quantizing(&b);
    test_block_scales(&b);
    test_every_value(&b);
    test_scale_of_maxima(&b);
    test_updates(&b);
    test_gelu_backward(&b, 300, 144);
    test_gelu_backward(&b, 1024, 3072);
    bool supported = op_check_fp8(b.device, FP8_WHOLE, &err), accepted = true;
    if (supported) accepted = test_products(&b);
    else printf("  no products: %s\n", err.what);
    if (op_check_fp8(b.device, FP8_ROWS, &err)) test_block_products(&b);
    else printf("  no products with block scales: %s\n", err.what);
    bool asked = argc > 1 && strcmp(argv[1], "--diagnose") == 0;
    if (supported && (asked || !accepted)) diagnose(&b);
    if (argc > 1 && strcmp(argv[1], "--speed") == 0) {
        time_model(&b, "125M", 65536, 768);
        time_model(&b, "350M", 32768, 1024);
        time_model(&b, "1.3B", 16384, 2048);
        time_model(&b, "6.7B", 8192, 4096);
    }
    stream_destroy(b.stream);
    device_close(b.device);
    return checks_end(&checks);
}
