// The CPU backend's ops of Llama blocks against double-precision references: grouped-query
// attention, RMSNorm, query and key norms, SwiGLU, RoPE.
#include "test/unit/ops_common.h"

// --- heads that share keys and values ------------------------------------------------------------

// Expands (rows, groups, sharers + 2, HD) to (rows, NH, 3, HD): every head gets a copy of its
// group's key and value.
static floatX *with_own_keys(const floatX *qkv, int64_t rows, int groups, int sharers, int HD) {
    int heads = groups * sharers;
    floatX *own = poisoned_floatX(rows * heads * 3 * HD);
    for (int64_t i = 0; i < rows * heads * 3 * HD; i++) {
        int64_t row = i / (heads * 3 * HD), head = i / (3 * HD) % heads;
        int part = (int)(i / HD % 3), vector = part == 0 ? (int)head % sharers : sharers + part - 1;
        own[i] = qkv[((row * groups + head / sharers) * (sharers + 2) + vector) * HD + i % HD];
    }
    return own;
}

// Reorders each row of Megatron-LM's (groups, sharers + 2, HD) to queries, keys, values.
static floatX *by_kind(const floatX *qkv, int64_t rows, int groups, int sharers, int HD) {
    int vectors = groups * (sharers + 2);
    floatX *sorted = poisoned_floatX(rows * vectors * HD);
    for (int64_t i = 0; i < rows * vectors; i++) {
        int group = (int)(i % vectors) / (sharers + 2), head = (int)(i % vectors) % (sharers + 2);
        int place = head < sharers ? group * sharers + head : groups * head + group;
        memcpy(sorted + (i / vectors * vectors + place) * HD, qkv + i * HD, (size_t)HD * sizeof(floatX));
    }
    return sorted;
}

// Grouped-query attention equals ordinary attention with copied keys and values, whose gradients
// are summed over the heads of a group. Rows ordered by kind give bitwise identical results.
static void test_attention_groups(void **state) {
    enum { B = 2, T = 70, G = 2, SHARERS = 3, NH = G * SHARERS, HD = 8, N = B * T };
    Random rng = {43};
    Dropout d = {0.2f, 6, 4 * 2 + DROPOUT_ATTENTION, 77};
    floatX *qkv = random_floatX(&rng, N * (NH + 2 * G) * HD, 0, 1);
    floatX *dout = random_floatX(&rng, N * NH * HD, 0, 1);
    floatX *own = with_own_keys(qkv, N, G, SHARERS, HD), *out = poisoned_floatX(N * NH * HD),
           *own_out = poisoned_floatX(N * NH * HD), *dqkv = poisoned_floatX(N * (NH + 2 * G) * HD),
           *down = poisoned_floatX(N * NH * 3 * HD);
    int32_t *start = random_doc_start(&rng, B, T);
    void *saved = poisoned(op_attention_saved_bytes(B, T, NH, HD)),
         *workspace = poisoned(op_attention_workspace_bytes(B, T, NH, HD, G, false));
    Attention a = {B,          T, NH, HD, d, qkv, start, out, saved, dout, dqkv, workspace, .first_head = 4,
                   .groups = G};
    Attention b = a;
    b.qkv = own, b.out = own_out, b.dqkv = down, b.groups = 0;
    op_attention_forward(NULL, &a);
    op_attention_backward(NULL, &a);
    op_attention_forward(NULL, &b);
    op_attention_backward(NULL, &b);
    assert_memory_equal(out, own_out, N * NH * HD * sizeof(floatX));
    Attention c = a;
    floatX *kinds = by_kind(qkv, N, G, SHARERS, HD), *expected_kinds = by_kind(dqkv, N, G, SHARERS, HD);
    c.by_kind = true, c.qkv = kinds, c.out = own_out, c.dqkv = poisoned_floatX(N * (NH + 2 * G) * HD);
    memset(own_out, 0xFF, N * NH * HD * sizeof(floatX));
    op_attention_forward(NULL, &c);
    op_attention_backward(NULL, &c);
    assert_memory_equal(out, own_out, N * NH * HD * sizeof(floatX));
    assert_memory_equal(c.dqkv, expected_kinds, N * (NH + 2 * G) * HD * sizeof(floatX));
    free_all(kinds, expected_kinds, c.dqkv, NULL);
    double *expected = zero_doubles(N * (NH + 2 * G) * HD);
    for (int i = 0; i < N * NH * 3 * HD; i++) {
        int row = i / (NH * 3 * HD), head = i / (3 * HD) % NH, part = i / HD % 3;
        int vector = part == 0 ? head % SHARERS : SHARERS + part - 1;
        int at = ((row * G + head / SHARERS) * (SHARERS + 2) + vector) * HD + i % HD;
        expected[at] += (double)floatX_to_float(down[i]);
    }
    for (int i = 0; i < N * (NH + 2 * G) * HD; i++) {
        check_close("dqkv", (double)floatX_to_float(dqkv[i]), expected[i], 2 * floatX_unit_roundoff(),
                    8 * floatX_unit_roundoff(), i);
    }
    free_all(qkv, dout, own, out, own_out, dqkv, down, start, saved, workspace, expected, NULL);
}

// --- RMSNorm, SwiGLU, rotary positions -----------------------------------------------------------

static void test_rmsnorm(void **state) {
    enum { N = 3, C = 40 };
    Random rng = {31};
    double expected[N * C], root[N];
    LayerNorm op = {.B = 1,
                    .T = N,
                    .C = C,
                    .epsilon = 1e-5f,
                    .x = random_floatX(&rng, N * C, 0, 1),
                    .gamma = random_floatX(&rng, C, 1, 0.3),
                    .y = poisoned_floatX(N * C),
                    .mean = poisoned_floats(N),
                    .rstd = poisoned_floats(N),
                    .dy = random_floatX(&rng, N * C, 0, 1),
                    .dresidual = random_floatX(&rng, N * C, 0, 1),
                    .dgamma = random_floats(&rng, C, 1),
                    .rms = true};
    float *dgamma = copy_of(op.dgamma, C * sizeof(float));
    floatX *dresidual = copy_of(op.dresidual, N * C * sizeof(floatX));
    op_layernorm_forward(NULL, &op);
    for (int i = 0; i < N; i++) {
        double squares = 0;
        for (int c = 0; c < C; c++) squares += pow((double)floatX_to_float(op.x[i * C + c]), 2);
        root[i] = sqrt(squares / C + 1e-5);
        for (int c = 0; c < C; c++) {
            double x = (double)floatX_to_float(op.x[i * C + c]);
            expected[i * C + c] = x / root[i] * (double)floatX_to_float(op.gamma[c]);
        }
        check_close("rstd", (double)op.rstd[i], 1 / root[i], 1e-5, 0, i);
    }
    check_floatX("RMSNorm", op.y, expected, N * C, 1e-5);
    op_layernorm_backward(NULL, &op);
    double sums[C];
    for (int c = 0; c < C; c++) sums[c] = (double)dgamma[c];
    for (int i = 0; i < N; i++) {
        double dot = 0;  // sum of dy gamma x
        for (int c = 0; c < C; c++) {
            dot += (double)floatX_to_float(op.dy[i * C + c]) * (double)floatX_to_float(op.gamma[c]) *
                   (double)floatX_to_float(op.x[i * C + c]);
        }
        for (int c = 0; c < C; c++) {
            double x = (double)floatX_to_float(op.x[i * C + c]);
            double dy = (double)floatX_to_float(op.dy[i * C + c]);
            double dx = dy * (double)floatX_to_float(op.gamma[c]) / root[i] - x * dot / (C * pow(root[i], 3));
            expected[i * C + c] = (double)floatX_to_float(dresidual[i * C + c]) + dx;
            sums[c] += dy * x / root[i];
        }
    }
    check_floatX("RMSNorm dresidual", op.dresidual, expected, N * C, 1e-5);
    check_floats("RMSNorm dgamma", op.dgamma, sums, C, 1e-5);
    free_all(dgamma, dresidual, op.x, op.y, op.mean, op.rstd, op.dresidual, op.dgamma, NULL);
    free((void *)op.gamma);
    free((void *)op.dy);
}

// Computes the norm of one vector and its gradients from the definition of LayerNorm or RMSNorm.
// dgamma and dbeta accumulate.
static void norm_by_definition(const HeadNorm *a, int kind, const double *x, const double *dy, double *y,
                               double *dx, double *dgamma, double *dbeta) {
    int HD = a->HD;
    double mean = 0, squares = 0, mean_g = 0, mean_g_x = 0;
    for (int c = 0; c < HD && !a->rms; c++) mean += x[c] / HD;
    for (int c = 0; c < HD; c++) squares += (x[c] - mean) * (x[c] - mean);
    double rstd = 1 / sqrt(squares / HD + (double)a->epsilon);
    for (int c = 0; c < HD; c++) {
        double gamma = (double)floatX_to_float(a->gamma[kind][c]), xhat = (x[c] - mean) * rstd;
        y[c] = xhat * gamma + (a->rms ? 0 : (double)floatX_to_float(a->beta[kind][c]));
        mean_g += a->rms ? 0 : dy[c] * gamma / HD;
        mean_g_x += dy[c] * gamma * xhat / HD;
        dgamma[c] += dy[c] * xhat;
        dbeta[c] += dy[c];
    }
    for (int c = 0; c < HD; c++) {
        double gamma = (double)floatX_to_float(a->gamma[kind][c]), xhat = (x[c] - mean) * rstd;
        dx[c] = (dy[c] * gamma - mean_g - xhat * mean_g_x) * rstd;
    }
}

static void check_head_norm(bool rms) {
    enum { N = 3, G = 2, QUERIES = 3, HD = 24, VECTORS = G * (QUERIES + 2), ALL = N * VECTORS * HD };
    Random rng = {44};
    HeadNorm a = {.N = N, .groups = G, .queries = QUERIES, .HD = HD, .epsilon = 1e-5f, .rms = rms};
    floatX *x = random_floatX(&rng, ALL, 0.3, 1), *dy = random_floatX(&rng, ALL, 0, 1),
           *before = poisoned_floatX(N * G * (QUERIES + 1) * HD);
    double *y = doubles_of(x, ALL), *dx = doubles_of(dy, ALL), *in = doubles_of(x, ALL),
           *din = doubles_of(dy, ALL), dgamma[2][HD], dbeta[2][HD];
    for (int kind = 0; kind < 2; kind++) {
        a.gamma[kind] = random_floatX(&rng, HD, 1, 0.3);
        if (!rms) a.beta[kind] = random_floatX(&rng, HD, 0, 0.3);
        a.dgamma[kind] = random_floats(&rng, HD, 1);
        if (!rms) a.dbeta[kind] = random_floats(&rng, HD, 1);
        for (int c = 0; c < HD; c++) {
            dgamma[kind][c] = (double)a.dgamma[kind][c];
            dbeta[kind][c] = rms ? 0 : (double)a.dbeta[kind][c];
        }
    }
    for (int v = 0; v < N * VECTORS; v++) {
        int place = v % (QUERIES + 2), at = v * HD, kind = place == QUERIES;
        if (place > QUERIES) continue;
        norm_by_definition(&a, kind, in + at, din + at, y + at, dx + at, dgamma[kind], dbeta[kind]);
    }
    a.before = before;
    a.x = x;
    op_head_norm_forward(NULL, &a);
    a.x = dy;
    op_head_norm_backward(NULL, &a);
    check_floatX("head norm", x, y, ALL, 1e-5);
    check_floatX("head norm dx", dy, dx, ALL, 1e-5);
    for (int kind = 0; kind < 2; kind++) {
        check_floats("head norm dgamma", a.dgamma[kind], dgamma[kind], HD, 1e-5);
        if (!rms) check_floats("head norm dbeta", a.dbeta[kind], dbeta[kind], HD, 1e-5);
        free((void *)a.gamma[kind]);
        free((void *)a.beta[kind]);
        free(a.dgamma[kind]);
        free(a.dbeta[kind]);
    }
    free_all(x, dy, before, y, dx, in, din, NULL);
}

static void test_head_norm(void **state) {
    check_head_norm(true);
    check_head_norm(false);
}

static void test_swiglu(void **state) {
    enum { N = 5, F = 24 };
    Random rng = {41};
    floatX *pre = random_floatX(&rng, N * 2 * F, 0, 2), *dy = random_floatX(&rng, N * F, 0, 1),
           *y = poisoned_floatX(N * F), *dpre = poisoned_floatX(N * 2 * F);
    double expected[N * F], gradient[N * 2 * F];
    pre[0] = floatX_from_float(-90.0f),
    pre[1] = floatX_from_float(90.0f);  // e^x overflows and underflows around here
    for (int i = 0; i < N * F; i++) {
        int at = i / F * 2 * F + i % F;
        double g = (double)floatX_to_float(pre[at]), up = (double)floatX_to_float(pre[at + F]),
               d = (double)floatX_to_float(dy[i]), share = 1 / (1 + exp(-g));
        expected[i] = g * share * up;
        gradient[at] = d * up * (share + g * share * (1 - share));
        gradient[at + F] = d * g * share;
    }
    Swiglu a = {N, F, pre, y, dy, dpre, NULL};
    op_swiglu_forward(NULL, &a);
    op_swiglu_backward(NULL, &a);
    check_floatX("SwiGLU", y, expected, N * F, 1e-5);
    check_floatX("SwiGLU dpre", dpre, gradient, N * 2 * F, 1e-5);
    free_all(pre, dy, y, dpre, NULL);
}

// Each pair is a complex number that is multiplied by e^(i angle). Other columns and vectors do not
// change. The inverse rotation restores the input except for rounding.
static void test_rope(void **state) {
    enum { B = 2, T = 5, G = 2, HEADS = 4, TURNED = 3, HD = 16, COLUMNS = 12, HALF = COLUMNS / 2 };
    enum { N = B * T * G * HEADS * HD };
    Random rng = {42};
    float table[T * COLUMNS];
    double expected[N], before[N];
    floatX *x = random_floatX(&rng, N, 0, 1);
    for (int i = 0; i < N; i++) before[i] = expected[i] = (double)floatX_to_float(x[i]);
    for (int t = 0; t < T; t++) {
        for (int i = 0; i < HALF; i++) {
            double angle = t / pow(10000, 2.0 * i / COLUMNS);
            table[t * COLUMNS + i] = (float)cos(angle), table[t * COLUMNS + HALF + i] = (float)sin(angle);
            for (int v = 0; v < B * G * HEADS; v++) {
                int b = v / (G * HEADS), head = v % (G * HEADS);
                double *vector = expected + ((b * T + t) * G * HEADS + head) * HD;
                if (head % HEADS >= TURNED) continue;
                double real = vector[i], imaginary = vector[i + HALF];
                vector[i] = real * cos(angle) - imaginary * sin(angle);
                vector[i + HALF] = real * sin(angle) + imaginary * cos(angle);
            }
        }
    }
    Rope a = {B, T, G, HEADS, TURNED, HD, COLUMNS, table, x, false, NULL, NULL}, b = a;
    b.x = copy_of(x, N * sizeof(floatX));
    b.by_kind = poisoned_floatX(N);
    op_rope(NULL, &a);
    op_rope(NULL, &b);
    check_floatX("rope", x, expected, N, 1e-6);
    floatX *kinds = by_kind(x, B * T, G, HEADS - 2, HD);
    assert_memory_equal(b.by_kind, kinds, N * sizeof(floatX));
    a.back = b.back = true;
    op_rope(NULL, &a);
    memset(b.x, 0xFF, N * sizeof(floatX));
    op_rope(NULL, &b);
    assert_memory_equal(b.x, x, N * sizeof(floatX));
    free_all(b.x, b.by_kind, kinds, NULL);
    for (int i = 0; i < N; i++) {
        double after = (double)floatX_to_float(x[i]);
        check_close("turned back", after, before[i], 0, 8 * floatX_unit_roundoff(), i);
    }
    free(x);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_attention_groups),
        cmocka_unit_test(test_rmsnorm),
        cmocka_unit_test(test_head_norm),
        cmocka_unit_test(test_swiglu),
        cmocka_unit_test(test_rope),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
