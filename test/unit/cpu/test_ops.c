// The CPU ops, forward and backward, against naive double-precision references, dropout against its
// definition, and some ops against PyTorch. Runs in both precisions of llmc/base/dtype.h.
// test_ops_head.c tests the LM head and sums over ranks, test_ops_gradients.c finite differences.
#include "test/unit/ops_common.h"

#include "llmc/cpu/ops_internal.h"
#include "test/golden/golden.h"

// --- functions -----------------------------------------------------------------------------------

static double gelu_exact(double x) {
    return 0.5 * x * (1.0 + tanh(0.79788456 * x * (1.0 + 0.044715 * x * x)));
}
static double gelu_derivative_exact(double x) {
    double t = tanh(0.79788456 * x * (1.0 + 0.044715 * x * x));
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * 0.79788456 * (1.0 + 3.0 * 0.044715 * x * x);
}

static void test_exp(void **state) {
    for (float x = -87.0f; x < 88.3f; x += 0.00371f)
        check_close("exp", (double)exp_approx(x), exp((double)x), 1.3e-7, 0.0, 0);
    assert_true(exp_approx(0.0f) == 1.0f);
    assert_true(exp_approx(100.0f) == INFINITY && exp_approx(INFINITY) == INFINITY);
    assert_true(exp_approx(-1e30f) < 2e-38f && exp_approx(-INFINITY) < 2e-38f);
    assert_true(isnan(exp_approx(NAN)));
}

static void test_gelu(void **state) {
    // The relative limit is far below a hundredth of a bf16 ulp (2^-8 / 100 = 4e-5). In the left
    // tail, where GELU is small, the absolute limit applies.
    for (float x = -30.0f; x < 30.0f; x += 0.00113f) {
        check_close("gelu", (double)gelu(x), gelu_exact((double)x), 1e-6, 1e-7, (int64_t)(x * 1000));
        check_close("gelu'", (double)gelu_derivative(x), gelu_derivative_exact((double)x), 1e-6, 4e-6,
                    (int64_t)(x * 1000));
    }
    assert_true(isnan(gelu(NAN)) && isnan(gelu_derivative(NAN)));
    assert_true(gelu(1e4f) == 1e4f && gelu(-1e4f) == 0.0f && gelu_derivative(1e4f) == 1.0f &&
                gelu_derivative(-1e4f) == 0.0f);
    floatX pre[3] = {floatX_from_float(-1.5f), floatX_from_float(0.0f), floatX_from_float(2.25f)}, y[3];
    double expected[3] = {gelu_exact(-1.5), 0.0, gelu_exact(2.25)};
    op_gelu_forward(NULL, y, pre, 3);
    check_floatX("op_gelu_forward", y, expected, 3, 1e-6);
}

// dx in place, with and without its sum over the rows.
static void test_gelu_backward(void **state) {
    enum { N = 9, C = 131 };
    Random rng = {31};
    floatX *pre = random_floatX(&rng, N * C, 0, 2), *dx = random_floatX(&rng, N * C, 0, 1);
    floatX *again = copy_of(dx, N * C * sizeof(floatX));
    float *dbias = random_floats(&rng, C, 1);
    double *expected = doubles_of(dx, N * C), *dbias64 = zero_doubles(C);
    for (int c = 0; c < C; c++) dbias64[c] = (double)dbias[c];
    for (int i = 0; i < N * C; i++) expected[i] *= gelu_derivative_exact((double)floatX_to_float(pre[i]));
    op_gelu_backward(NULL, dx, pre, dbias, N, C, NULL, NULL);
    check_floatX("op_gelu_backward", dx, expected, N * C, 2e-5);
    for (int i = 0; i < N * C; i++) dbias64[i % C] += (double)floatX_to_float(dx[i]);
    check_floats("its sum", dbias, dbias64, C, 1e-5);
    op_gelu_backward(NULL, again, pre, NULL, N, C, NULL, NULL);
    assert_memory_equal(again, dx, N * C * sizeof(floatX));
    free_all(pre, dx, again, dbias, expected, dbias64, NULL);
}

// --- dropout -------------------------------------------------------------------------------------

// The multiplier of one element, from the definition in ops.h.
static float multiplier(Dropout d, int64_t sample, int64_t element) {
    if (d.p == 0.0f) return 1.0f;
    uint32_t purpose = PURPOSE_DROPOUT + 256 * (uint32_t)(element / 8 >> 32);
    Philox4 r = philox4x32_10(d.seed, purpose, (uint32_t)(element / 8), d.site,
                              (uint32_t)(sample & 0xFFFFFFFF), (uint32_t)(sample >> 32));
    uint32_t word = r.v[element % 8 / 2], bits = element % 2 ? word >> 16 : word & 0xFFFF;
    return bits >= (uint32_t)rint((double)d.p * 65536.0) ? 1.0f / (1.0f - d.p) : 0.0f;
}

static void test_dropout_multipliers(void **state) {
    Dropout d = {0.3f, 77, 4 * 5 + DROPOUT_FFN, 0};
    int64_t sample = 0x1234567890ll;
    // Tests all alignments of start and end, and ranges longer than any internal batch.
    for (int64_t first = 0; first < 20; first++) {
        for (int64_t n = 1; n < 40; n++) {
            float got[40 + 1];
            got[n] = -1.0f;
            dropout_multipliers(got, d, sample, first, n);
            for (int64_t i = 0; i < n; i++) assert_true(got[i] == multiplier(d, sample, first + i));
            assert_true(got[n] == -1.0f);
        }
    }
    enum { MANY = 100003 };
    float *many = poisoned_floats(MANY);
    dropout_multipliers(many, d, sample, 5, MANY);
    for (int64_t i = 0; i < MANY; i++) assert_true(many[i] == multiplier(d, sample, i + 5));
    d.p = 0.0f;
    dropout_multipliers(many, d, sample, 5, MANY);
    for (int64_t i = 0; i < MANY; i++) assert_true(many[i] == 1.0f);
    free(many);
}

// Elements whose indices differ only above bit 35 have independent masks.
static void test_dropout_far_elements(void **state) {
    enum { N = 4096 };
    const int64_t far[] = {1ll << 35, 2ll << 35, 1ll << 58};  // 8 elements share a counter
    Dropout d = {0.5f, 77, 4 * 5 + DROPOUT_ATTENTION, 0};
    float near[N], there[N];
    dropout_multipliers(near, d, 3, 0, N);
    for (size_t i = 0; i < sizeof far / sizeof far[0]; i++) {
        int equal = 0;
        dropout_multipliers(there, d, 3, far[i], N);
        for (int j = 0; j < N; j++) equal += near[j] == there[j];
        assert_in_range(equal, N / 2 - 200, N / 2 + 200);  // 6 sigma
        for (int j = 0; j < N; j++) assert_true(there[j] == multiplier(d, 3, far[i] + j));
    }
    // A range that crosses this boundary.
    dropout_multipliers(there, d, 3, far[0] - 13, N);
    for (int j = 0; j < N; j++) assert_true(there[j] == multiplier(d, 3, far[0] - 13 + j));
}

// The fraction of kept elements matches p, and different masks are independent.
static void test_dropout_statistics(void **state) {
    enum { N = 200000 };
    float *a = poisoned_floats(N), *b = poisoned_floats(N);
    const float rates[] = {0.1f, 0.5f, 0.001f};
    for (size_t i = 0; i < 3; i++) {
        double p = (double)rates[i], keep = 1.0 - p, sigma = sqrt(p * keep / N),
               sigma_pair = sqrt(keep * keep * (1 - keep * keep) / N);
        Dropout base = {rates[i], 1234, 4 * 3 + DROPOUT_PROJECTION, 0};
        dropout_multipliers(a, base, 42, 0, N);
        double kept = 0;
        for (int j = 0; j < N; j++) kept += a[j] != 0.0f;
        check_close("keep rate", kept / N, keep, 0.0, 5 * sigma + 1e-5, 0);
        // Another seed, site or sample gives an independent mask.
        Dropout others[] = {base, base, base};
        others[0].seed++;
        others[1].site++;
        for (int k = 0; k < 3; k++) {
            dropout_multipliers(b, others[k], k == 2 ? 43 : 42, 0, N);
            double both = 0;
            for (int j = 0; j < N; j++) both += a[j] != 0.0f && b[j] != 0.0f;
            check_close("kept in both", both / N, keep * keep, 0.0, 5 * sigma_pair + 2e-5, k);
        }
    }
    free_all(a, b, NULL);
}

// --- embedding -----------------------------------------------------------------------------------

static void check_embedding(int B, int T, int C, Dropout d) {
    Random rng = {1};
    enum { VOCABULARY = 11, POSITIONS = 40 };
    int64_t n = (int64_t)B * T * C;
    floatX *wte = random_floatX(&rng, VOCABULARY * C, 0, 1), *wpe = random_floatX(&rng, POSITIONS * C, 0, 1);
    int32_t *tokens = random_ids(&rng, B * T, VOCABULARY), *positions = random_ids(&rng, B * T, POSITIONS);
    floatX *x = poisoned_floatX(n), *dx = random_floatX(&rng, n, 0, 1);
    float *dwte = random_floats(&rng, VOCABULARY * C, 1), *dwpe = random_floats(&rng, POSITIONS * C, 1);
    double *dwte_expected = zero_doubles(VOCABULARY * C), *dwpe_expected = zero_doubles(POSITIONS * C);
    for (int64_t i = 0; i < VOCABULARY * C; i++) dwte_expected[i] = (double)dwte[i];
    for (int64_t i = 0; i < POSITIONS * C; i++) dwpe_expected[i] = (double)dwpe[i];

    Embedding e = {B, T, C, 0, VOCABULARY, tokens, positions, d, wte, wpe, x, dx, dwte, .dwpe = dwpe};
    op_embedding_forward(NULL, &e);
    op_embedding_backward(NULL, &e);
    for (int64_t i = 0; i < n; i++) {
        int64_t row = i / C, c = i % C;
        float keep = multiplier(d, d.first_sample + row / T, row % T * C + c);
        float sum = floatX_to_float(wte[tokens[row] * C + c]) + floatX_to_float(wpe[positions[row] * C + c]);
        assert_true(x[i] == floatX_from_float(sum * keep));
        dwte_expected[tokens[row] * C + c] += (double)floatX_to_float(dx[i]) * (double)keep;
        dwpe_expected[positions[row] * C + c] += (double)floatX_to_float(dx[i]) * (double)keep;
    }
    check_floats("dwte", dwte, dwte_expected, VOCABULARY * C, 2e-5);
    check_floats("dwpe", dwpe, dwpe_expected, POSITIONS * C, 2e-5);
    free_all(wte, wpe, tokens, positions, x, dx, dwte, dwpe, dwte_expected, dwpe_expected, NULL);
}

// A vocabulary split over three ranks is bitwise identical to one rank.
static void test_embedding_parts(void **state) {
    enum { V = 50, B = 2, T = 9, C = 24, N = B * T };
    const int bounds[] = {0, 7, 40, V};
    Random rng = {21};
    Dropout d = {0.25f, 9, DROPOUT_EMBEDDING, 11};
    floatX *wte = random_floatX(&rng, V * C, 0, 1), *wpe = random_floatX(&rng, N * C, 0, 1),
           *dx = random_floatX(&rng, N * C, 0, 1);
    floatX *x = poisoned_floatX(N * C), *sum = xcalloc(N * C, sizeof(floatX), "x"),
           *part = poisoned_floatX(N * C);
    int32_t *tokens = random_ids(&rng, N, V), *positions = random_ids(&rng, N, N);
    float *dwte = random_floats(&rng, V * C, 1), *dwpe = random_floats(&rng, N * C, 1);
    float *dwte_parts = copy_of(dwte, V * C * sizeof(float)),
          *dwpe_part = copy_of(dwpe, N * C * sizeof(float));
    Embedding whole = {B, T, C, 0, V, tokens, positions, d, wte, wpe, x, dx, dwte, .dwpe = dwpe};
    op_embedding_forward(NULL, &whole);
    op_embedding_backward(NULL, &whole);
    for (int rank = 0; rank < 3; rank++) {
        int64_t at = bounds[rank] * C;
        float *dwpe_rank = copy_of(dwpe_part, N * C * sizeof(float));
        Embedding mine = {B,
                          T,
                          C,
                          bounds[rank],
                          bounds[rank + 1] - bounds[rank],
                          tokens,
                          positions,
                          d,
                          wte + at,
                          NULL,
                          part,
                          dx,
                          dwte_parts + at,
                          .dwpe = dwpe_rank,
                          .part = true};
        op_embedding_forward(NULL, &mine);
        op_embedding_backward(NULL, &mine);
        assert_memory_equal(dwpe_rank, dwpe, N * C * sizeof(float));  // every rank has all positions
        for (int i = 0; i < N * C; i++)
            sum[i] = floatX_from_float(floatX_to_float(sum[i]) + floatX_to_float(part[i]));
        free(dwpe_rank);
    }
    Embedding rest = {B, T, C, .positions = positions, .dropout = d, .wpe = wpe, .x = part};
    memcpy(part, sum, N * C * sizeof(floatX));
    op_embedding_forward(NULL, &rest);
    assert_memory_equal(part, x, N * C * sizeof(floatX));
    // Each rank computes its own rows; the boundary is inside a sample.
    for (int rank = 0; rank < 2; rank++) {
        rest.x_rows = rank ? (Rows){5, N - 5} : (Rows){0, 5};
        rest.x = sum + rest.x_rows.first * C;
        op_embedding_forward(NULL, &rest);
    }
    assert_memory_equal(sum, x, N * C * sizeof(floatX));
    assert_memory_equal(dwte_parts, dwte, V * C * sizeof(float));
    free_all(wte, wpe, dx, x, sum, part, tokens, positions, dwte, dwpe, dwte_parts, dwpe_part, NULL);
}

// Separate backward calls for the two tables are bitwise identical to one call for both.
static void test_embedding_one_table(void **state) {
    enum { V = 20, B = 2, T = 9, C = 24, N = B * T };
    Random rng = {22};
    floatX *dx = random_floatX(&rng, N * C, 0, 1);
    int32_t *tokens = random_ids(&rng, N, V), *positions = random_ids(&rng, N, N);
    float *dwte = random_floats(&rng, V * C, 1), *dwpe = random_floats(&rng, N * C, 1),
          *dwte_alone = copy_of(dwte, V * C * sizeof(float)),
          *dwpe_alone = copy_of(dwpe, N * C * sizeof(float));
    Embedding both = {
        B,           T, C, 0, V, tokens, positions, {0.25f, 9, DROPOUT_EMBEDDING, 11}, .dx = dx, .dwte = dwte,
        .dwpe = dwpe};
    Embedding words = both, places = both;
    words.positions = NULL, words.dwte = dwte_alone, words.dwpe = NULL;
    places.tokens = NULL, places.dwte = NULL, places.dwpe = dwpe_alone;
    op_embedding_backward(NULL, &both);
    op_embedding_backward(NULL, &words);
    op_embedding_backward(NULL, &places);
    assert_memory_equal(dwte, dwte_alone, V * C * sizeof(float));
    assert_memory_equal(dwpe, dwpe_alone, N * C * sizeof(float));
    free_all(dx, tokens, positions, dwte, dwpe, dwte_alone, dwpe_alone, NULL);
}

static void test_embedding(void **state) {
    check_embedding(1, 1, 8, NO_DROPOUT);
    check_embedding(3, 17, 24, NO_DROPOUT);
    check_embedding(3, 17, 24, (Dropout){0.25f, 9, DROPOUT_EMBEDDING, 5000000000});
    check_embedding(2, 3, 1040, (Dropout){0.1f, 9, DROPOUT_EMBEDDING, 3});
}

// --- LayerNorm -----------------------------------------------------------------------------------

typedef struct NormCase {
    int B, T, C;
    int64_t N, n;
    floatX *x, *gamma, *beta;
    double *y, *mean, *rstd;  // reference
} NormCase;

// Reference forward. x has mean 3, so computing the variance as E[x^2] - E[x]^2 would lose digits.
static void layernorm_reference(NormCase *ln, double epsilon) {
    ln->y = zero_doubles(ln->n);
    ln->mean = zero_doubles(ln->N);
    ln->rstd = zero_doubles(ln->N);
    for (int64_t row = 0; row < ln->N; row++) {
        double *x = doubles_of(ln->x + row * ln->C, ln->C), variance = 0;
        for (int c = 0; c < ln->C; c++) ln->mean[row] += x[c] / ln->C;
        for (int c = 0; c < ln->C; c++) variance += (x[c] - ln->mean[row]) * (x[c] - ln->mean[row]) / ln->C;
        ln->rstd[row] = 1.0 / sqrt(variance + epsilon);
        for (int c = 0; c < ln->C; c++) {
            double gamma = (double)floatX_to_float(ln->gamma[c]), beta = (double)floatX_to_float(ln->beta[c]);
            ln->y[row * ln->C + c] = (x[c] - ln->mean[row]) * ln->rstd[row] * gamma + beta;
        }
        free(x);
    }
}

static NormCase layernorm_make(Random *rng, int B, int T, int C) {
    NormCase ln = {.B = B, .T = T, .C = C, .N = (int64_t)B * T, .n = (int64_t)B * T * C};
    ln.x = random_floatX(rng, ln.n, 3, 1);
    ln.gamma = random_floatX(rng, C, 1, 0.3);
    ln.beta = random_floatX(rng, C, 0, 0.3);
    return ln;
}
static void layernorm_free(NormCase *ln) {
    free_all(ln->x, ln->gamma, ln->beta, ln->y, ln->mean, ln->rstd, NULL);
}

static void check_layernorm_forward(int B, int T, int C) {
    Random rng = {2};
    NormCase ln = layernorm_make(&rng, B, T, C);
    layernorm_reference(&ln, 1e-5);
    floatX *y = poisoned_floatX(ln.n);
    float *mean = poisoned_floats(ln.N), *rstd = poisoned_floats(ln.N);
    LayerNorm norm = {
        B, T, C, 1e-5f, .x = ln.x, .gamma = ln.gamma, .beta = ln.beta, .y = y, .mean = mean, .rstd = rstd};
    op_layernorm_forward(NULL, &norm);
    check_floatX("layernorm y", y, ln.y, ln.n, 1e-5);
    check_floats("layernorm mean", mean, ln.mean, ln.N, 1e-6);
    for (int64_t i = 0; i < ln.N; i++) check_close("layernorm rstd", (double)rstd[i], ln.rstd[i], 1e-5, 0, i);
    layernorm_free(&ln);
    free_all(y, mean, rstd, NULL);
}

// alias: x is the same buffer as residual, which ops.h allows.
static void check_residual_layernorm(int B, int T, int C, Dropout d, bool alias) {
    Random rng = {3};
    NormCase ln = layernorm_make(&rng, B, T, C);  // ln.x: the residual, later the sum
    floatX *branch = random_floatX(&rng, ln.n, 0, 1), *y = poisoned_floatX(ln.n);
    floatX *sum = alias ? copy_of(ln.x, (size_t)ln.n * sizeof(floatX)) : poisoned_floatX(ln.n);
    float *mean = poisoned_floats(ln.N), *rstd = poisoned_floats(ln.N);
    LayerNorm norm = {B,      T,        C,       1e-5f, d,    sum,         alias ? sum : ln.x,
                      branch, ln.gamma, ln.beta, y,     mean, .rstd = rstd};
    op_layernorm_forward(NULL, &norm);
    for (int64_t i = 0; i < ln.n; i++) {
        float keep = multiplier(d, d.first_sample + i / C / T, i % ((int64_t)T * C));
        floatX expected = floatX_from_float(floatX_to_float(ln.x[i]) + floatX_to_float(branch[i]) * keep);
        assert_true(sum[i] == expected);
    }
    memcpy(ln.x, sum, (size_t)ln.n * sizeof(floatX));
    layernorm_reference(&ln, 1e-5);
    check_floatX("residual layernorm y", y, ln.y, ln.n, 1e-5);
    check_floats("residual layernorm mean", mean, ln.mean, ln.N, 1e-6);
    layernorm_free(&ln);
    free_all(branch, y, sum, mean, rstd, NULL);
}

static void check_layernorm_backward(int B, int T, int C, Dropout d, bool branch) {
    Random rng = {4};
    NormCase ln = layernorm_make(&rng, B, T, C);
    layernorm_reference(&ln, 1e-5);
    floatX *dy = random_floatX(&rng, ln.n, 0, 1), *dresidual = random_floatX(&rng, ln.n, 0, 1),
           *dbranch = poisoned_floatX(ln.n);
    float *dgamma = random_floats(&rng, C, 1), *dbeta = random_floats(&rng, C, 1),
          *mean = poisoned_floats(ln.N), *rstd = poisoned_floats(ln.N);
    float *dbias = random_floats(&rng, C, 1), *branch_sum = poisoned_floats(C);
    double *expected = doubles_of(dresidual, ln.n), *dgamma_expected = zero_doubles(C),
           *dbeta_expected = zero_doubles(C), *dbias_expected = zero_doubles(C);
    for (int c = 0; c < C; c++)
        dgamma_expected[c] = (double)dgamma[c], dbeta_expected[c] = (double)dbeta[c],
        dbias_expected[c] = (double)dbias[c];
    for (int64_t row = 0; row < ln.N; row++) {
        double mean_g = 0, mean_g_xhat = 0;
        mean[row] = (float)ln.mean[row], rstd[row] = (float)ln.rstd[row];
        for (int pass = 0; pass < 2; pass++) {  // pass 0: means, pass 1: gradient
            for (int c = 0; c < C; c++) {
                double xhat = ((double)floatX_to_float(ln.x[row * C + c]) - ln.mean[row]) * ln.rstd[row];
                double dy_c = (double)floatX_to_float(dy[row * C + c]),
                       g = dy_c * (double)floatX_to_float(ln.gamma[c]);
                if (pass == 0) {
                    mean_g += g / C, mean_g_xhat += g * xhat / C;
                    dgamma_expected[c] += dy_c * xhat, dbeta_expected[c] += dy_c;
                } else {
                    expected[row * C + c] += (g - mean_g - xhat * mean_g_xhat) * ln.rstd[row];
                }
            }
        }
    }
    LayerNorm norm = {B,
                      T,
                      C,
                      1e-5f,
                      d,
                      .x = ln.x,
                      .gamma = ln.gamma,
                      .mean = mean,
                      .rstd = rstd,
                      .dy = dy,
                      .dresidual = dresidual,
                      .dbranch = branch ? dbranch : NULL,
                      .dgamma = dgamma,
                      .dbeta = dbeta,
                      .branch_sum = branch_sum};
    op_layernorm_backward(NULL, &norm);
    op_bias_gradient(NULL, dbias, branch ? dbranch : dresidual, branch_sum, ln.N, C, NULL, NULL);
    check_floatX("dresidual", dresidual, expected, ln.n, 2e-5);
    check_floats("dgamma", dgamma, dgamma_expected, C, 1e-4);
    check_floats("dbeta", dbeta, dbeta_expected, C, 1e-4);
    for (int64_t i = 0; branch && i < ln.n; i++) {
        float keep = multiplier(d, d.first_sample + i / C / T, i % ((int64_t)T * C));
        assert_true(dbranch[i] == floatX_from_float(floatX_to_float(dresidual[i]) * keep));
    }
    for (int64_t i = 0; i < ln.n; i++)
        dbias_expected[i % C] += (double)floatX_to_float(branch ? dbranch[i] : dresidual[i]);
    check_floats("dbias of the branch", dbias, dbias_expected, C, 1e-4);
    layernorm_free(&ln);
    free_all(dy, dresidual, dbranch, dgamma, dbeta, dbias, branch_sum, mean, rstd, expected, dgamma_expected,
             dbeta_expected, dbias_expected, NULL);
}

static void test_layernorm(void **state) {
    const int shapes[][3] = {{1, 1, 8}, {2, 3, 40}, {3, 5, 100}, {1, 7, 1031}};
    Dropout d = {0.2f, 8, 4 * 2 + DROPOUT_PROJECTION, 1ll << 33};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        int B = shapes[i][0], T = shapes[i][1], C = shapes[i][2];
        check_layernorm_forward(B, T, C);
        check_residual_layernorm(B, T, C, NO_DROPOUT, false);
        check_residual_layernorm(B, T, C, d, false);
        check_residual_layernorm(B, T, C, d, true);
        check_layernorm_backward(B, T, C, NO_DROPOUT, false);
        check_layernorm_backward(B, T, C, NO_DROPOUT, true);
        check_layernorm_backward(B, T, C, d, true);
    }
}

// Tensors of a LayerNorm with a residual branch for N rows. The same seed gives the same inputs.
typedef struct NormTensors {
    LayerNorm op;
    int64_t n;
    floatX *residual, *branch, *gamma, *beta, *dy;
} NormTensors;

static NormTensors norm_tensors(int B, int T, int C, Dropout d) {
    Random rng = {31};
    int64_t N = (int64_t)B * T, n = N * C;
    NormTensors m = {.n = n,
                     .residual = random_floatX(&rng, n, 0, 1),
                     .branch = random_floatX(&rng, n, 0, 1),
                     .gamma = random_floatX(&rng, C, 1, 0.3),
                     .beta = random_floatX(&rng, C, 0, 0.3),
                     .dy = random_floatX(&rng, n, 0, 1)};
    m.op = (LayerNorm){B,
                       T,
                       C,
                       1e-5f,
                       d,
                       poisoned_floatX(n),
                       m.residual,
                       m.branch,
                       m.gamma,
                       m.beta,
                       poisoned_floatX(n),
                       poisoned_floats(N),
                       poisoned_floats(N),
                       m.dy,
                       random_floatX(&rng, n, 0, 1),
                       poisoned_floatX(n),
                       random_floats(&rng, C, 1),
                       .dbeta = random_floats(&rng, C, 1)};
    return m;
}
static void norm_tensors_free(NormTensors *m) {
    free_all(m->residual, m->branch, m->gamma, m->beta, m->dy, m->op.x, m->op.y, m->op.mean, m->op.rstd,
             m->op.dresidual, m->op.dbranch, m->op.dgamma, m->op.dbeta, NULL);
}
// Returns the arguments for rows first to first + count - 1.
static LayerNorm norm_rows(const LayerNorm *whole, int64_t first, int64_t count) {
    LayerNorm a = *whole;
    int64_t at = first * a.C;
    a.rows = (Rows){first, count};
    a.x += at, a.residual += at, a.branch += at, a.dresidual += at, a.dbranch += at;
    if (a.gamma) a.y += at, a.mean += first, a.rstd += first, a.dy += at;
    return a;
}

// Computing in blocks of rows, with boundaries inside samples, is bitwise identical to one call.
static void test_layernorm_rows(void **state) {
    enum { B = 3, T = 7, C = 40, N = B * T, BLOCKS = 3 };
    const int bounds[BLOCKS + 1] = {0, 5, 16, N};
    Dropout d = {0.3f, 8, 4 * 2 + DROPOUT_PROJECTION, 1ll << 33};
    NormTensors whole = norm_tensors(B, T, C, d), parts = norm_tensors(B, T, C, d);
    op_layernorm_forward(NULL, &whole.op);
    op_layernorm_backward(NULL, &whole.op);
    for (int i = 0; i < BLOCKS; i++) {
        LayerNorm block = norm_rows(&parts.op, bounds[i], bounds[i + 1] - bounds[i]);
        op_layernorm_forward(NULL, &block);
        op_layernorm_backward(NULL, &block);
    }
    assert_memory_equal(whole.op.x, parts.op.x, N * C * sizeof(floatX));
    assert_memory_equal(whole.op.y, parts.op.y, N * C * sizeof(floatX));
    assert_memory_equal(whole.op.mean, parts.op.mean, N * sizeof(float));
    assert_memory_equal(whole.op.rstd, parts.op.rstd, N * sizeof(float));
    assert_memory_equal(whole.op.dresidual, parts.op.dresidual, N * C * sizeof(floatX));
    assert_memory_equal(whole.op.dbranch, parts.op.dbranch, N * C * sizeof(floatX));
    assert_memory_equal(whole.op.dgamma, parts.op.dgamma, C * sizeof(float));
    assert_memory_equal(whole.op.dbeta, parts.op.dbeta, C * sizeof(float));
    norm_tensors_free(&whole);
    norm_tensors_free(&parts);
}

// At the end of a pipeline stage the residual sum is computed without a LayerNorm. The sum and the
// branch's gradient are bitwise identical to the fused op's, and no other tensor is written.
static void test_residual_sum_alone(void **state) {
    enum { B = 2, T = 6, C = 24, N = B * T };
    Dropout d = {0.3f, 8, 4 * 2 + DROPOUT_FFN, 12};
    for (int blocks = 1; blocks <= 2; blocks++) {
        NormTensors fused = norm_tensors(B, T, C, d), alone = norm_tensors(B, T, C, d);
        op_layernorm_forward(NULL, &fused.op);
        op_layernorm_backward(NULL, &fused.op);
        memcpy(alone.op.dresidual, fused.op.dresidual, N * C * sizeof(floatX));
        LayerNorm sum = alone.op;
        sum.gamma = sum.beta = sum.dy = NULL;
        sum.y = NULL, sum.mean = sum.rstd = sum.dgamma = sum.dbeta = NULL;
        for (int i = 0; i < blocks; i++) {
            LayerNorm block = norm_rows(&sum, i * N / blocks, N / blocks);
            op_layernorm_forward(NULL, &block);
            op_layernorm_backward(NULL, &block);
        }
        assert_memory_equal(fused.op.x, alone.op.x, N * C * sizeof(floatX));
        assert_memory_equal(fused.op.dbranch, alone.op.dbranch, N * C * sizeof(floatX));
        assert_memory_equal(fused.op.dresidual, alone.op.dresidual, N * C * sizeof(floatX));
        sum.dbranch = NULL;  // there is nothing to compute
        op_layernorm_backward(NULL, &sum);
        assert_memory_equal(fused.op.dresidual, alone.op.dresidual, N * C * sizeof(floatX));
        norm_tensors_free(&fused);
        norm_tensors_free(&alone);
    }
}

// --- linear layers -------------------------------------------------------------------------------

static void check_linear(int N, int C, int OC, bool with_bias, bool with_gelu) {
    Random rng = {5};
    floatX *x = random_floatX(&rng, N * C, 0, 1), *w = random_floatX(&rng, OC * C, 0, 1 / sqrt(C)),
           *bias = random_floatX(&rng, OC, 0, 1);
    floatX *y = poisoned_floatX(N * OC), *pre = poisoned_floatX(N * OC);
    double *x64 = doubles_of(x, N * C), *w64 = doubles_of(w, OC * C), *bias64 = doubles_of(bias, OC),
           *sum = zero_doubles(N * OC);
    void *workspace = poisoned(op_linear_workspace_bytes(N, C, OC));
    for (int64_t i = 0; i < N * OC; i++) {
        sum[i] = with_bias ? bias64[i % OC] : 0.0;
        for (int c = 0; c < C; c++) sum[i] += x64[i / OC * C + c] * w64[i % OC * C + c];
    }
    const floatX *used_bias = with_bias ? bias : NULL;
    Linear linear = {N, C, OC, x, w, used_bias, y, with_gelu ? pre : NULL, .workspace = workspace};
    op_linear_forward(NULL, &linear);
    check_floatX(with_gelu ? "linear pre" : "linear y", with_gelu ? pre : y, sum, N * OC, 1e-5);
    // GELU is applied to the rounded value.
    for (int64_t i = 0; with_gelu && i < N * OC; i++) sum[i] = gelu_exact((double)floatX_to_float(pre[i]));
    if (with_gelu) check_floatX("linear gelu", y, sum, N * OC, 1e-6);
    free_all(x, w, bias, y, pre, x64, w64, bias64, sum, workspace, NULL);
}

static void check_linear_backward(int N, int C, int OC, bool with_dx, bool with_dbias, bool with_pre,
                                  bool overwrite) {
    Random rng = {6};
    floatX *x = random_floatX(&rng, N * C, 0, 1), *w = random_floatX(&rng, OC * C, 0, 1 / sqrt(OC)),
           *dy = random_floatX(&rng, N * OC, 0, 1);
    floatX *pre = random_floatX(&rng, N * C, 0, 1.5), *dx = poisoned_floatX(N * C);
    float *dw = random_floats(&rng, OC * C, 1), *dbias = random_floats(&rng, OC, 1);
    double *x64 = doubles_of(x, N * C), *w64 = doubles_of(w, OC * C), *dy64 = doubles_of(dy, N * OC),
           *dx64 = zero_doubles(N * C);
    double *dw64 = zero_doubles(OC * C), *dbias64 = zero_doubles(OC);
    for (int i = 0; i < OC * C; i++) dw64[i] = overwrite ? 0.0 : (double)dw[i];
    if (overwrite) dw[0] = NAN;
    float *dpre_bias = random_floats(&rng, C, 1);
    double *dpre_bias64 = zero_doubles(C);
    for (int c = 0; c < C; c++) dpre_bias64[c] = (double)dpre_bias[c];
    for (int i = 0; i < OC; i++) dbias64[i] = (double)dbias[i];
    for (int i = 0; i < N; i++) {
        for (int o = 0; o < OC; o++) {
            if (with_dbias) dbias64[o] += dy64[i * OC + o];
            for (int c = 0; c < C; c++) {
                dw64[o * C + c] += dy64[i * OC + o] * x64[i * C + c];
                dx64[i * C + c] += dy64[i * OC + o] * w64[o * C + c];
            }
        }
        for (int c = 0; with_pre && c < C; c++)
            dx64[i * C + c] *= gelu_derivative_exact((double)floatX_to_float(pre[i * C + c]));
    }
    void *workspace = poisoned(op_linear_workspace_bytes(N, C, OC));
    Linear linear = {N,
                     C,
                     OC,
                     .x = x,
                     .w = w,
                     .dy = dy,
                     .x_pre = with_pre ? pre : NULL,
                     .dx = with_dx ? dx : NULL,
                     .dw = dw,
                     .dpre_bias = with_pre ? dpre_bias : NULL,
                     .overwrite = overwrite,
                     .workspace = workspace};
    op_linear_backward(NULL, &linear);
    if (with_dbias) op_bias_gradient(NULL, dbias, dy, NULL, N, OC, workspace, NULL);
    if (with_dx) check_floatX("linear dx", dx, dx64, N * C, 2e-5);
    for (int i = 0; with_dx && with_pre && i < N * C; i++)
        dpre_bias64[i % C] += (double)floatX_to_float(dx[i]);
    check_floats("bias gradient before GELU", dpre_bias, dpre_bias64, C, 2e-4);
    check_floats("linear dw", dw, dw64, OC * C, 2e-4);
    check_floats("linear dbias", dbias, dbias64, OC, 2e-4);
    free_all(dpre_bias, dpre_bias64, x, w, dy, pre, dx, dw, dbias, x64, w64, dy64, dx64, dw64, dbias64,
             workspace, NULL);
}

// Separate calls for dx and dw are bitwise identical to one call for both.
static void test_linear_halves(void **state) {
    enum { N = 1100, C = 16, OC = 24 };
    Random rng = {7};
    floatX *x = random_floatX(&rng, N * C, 0, 1), *w = random_floatX(&rng, OC * C, 0, 1),
           *dy = random_floatX(&rng, N * OC, 0, 1);
    floatX *dx[2] = {poisoned_floatX(N * C), poisoned_floatX(N * C)};
    float *dw[2] = {poisoned_floats(OC * C), poisoned_floats(OC * C)};
    void *workspace = poisoned(op_linear_workspace_bytes(N, C, OC));
    Linear both = {N,
                   C,
                   OC,
                   .x = x,
                   .w = w,
                   .dy = dy,
                   .dx = dx[0],
                   .dw = dw[0],
                   .overwrite = true,
                   .workspace = workspace};
    Linear input = both, weights = both;
    input.dx = dx[1];
    input.dw = NULL;
    weights.dx = NULL;
    weights.dw = dw[1];
    op_linear_backward(NULL, &both);
    op_linear_backward(NULL, &input);
    op_linear_backward(NULL, &weights);
    assert_memory_equal(dx[0], dx[1], N * C * sizeof(floatX));
    assert_memory_equal(dw[0], dw[1], OC * C * sizeof(float));
    free_all(x, w, dy, dx[0], dx[1], dw[0], dw[1], workspace, NULL);
}

static void test_linear(void **state) {
    // 1100 rows: several internal chunks, the last one partial.
    const int shapes[][3] = {{1, 8, 8}, {5, 24, 40}, {37, 48, 33}, {1100, 16, 24}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        for (int options = 0; options < 4; options++)
            check_linear(shapes[i][0], shapes[i][1], shapes[i][2], options & 1, options & 2);
        for (int options = 0; options < 16; options++) {
            check_linear_backward(shapes[i][0], shapes[i][1], shapes[i][2], options & 1, options & 2,
                                  options & 4, options & 8);
        }
    }
}

// --- attention -----------------------------------------------------------------------------------

typedef struct AttentionCase {
    int B, T, NH, HD;
    Dropout dropout;
    int64_t n;  // B T NH HD
    floatX *qkv, *dout;
    int32_t *doc_start;  // or NULL
    double *out, *dqkv;  // reference
} AttentionCase;

static double qkv_value(const AttentionCase *a, int b, int t, int head, int part, int d) {
    return (double)floatX_to_float(a->qkv[((((int64_t)b * a->T + t) * a->NH + head) * 3 + part) * a->HD + d]);
}

// Computes forward and backward of one query of one head from the definition.
static void attention_reference_row(const AttentionCase *a, int b, int head, int t, double *p, double *dp) {
    int begin = a->doc_start ? a->doc_start[b * a->T + t] : 0;
    double scale = 1.0 / sqrt(a->HD), sum = 0, mean = 0;
    int64_t row = ((int64_t)b * a->T + t) * a->NH + head;
    for (int key = begin; key <= t; key++) {
        p[key] = 0;
        for (int d = 0; d < a->HD; d++)
            p[key] += qkv_value(a, b, t, head, 0, d) * qkv_value(a, b, key, head, 1, d);
        sum += p[key] = exp(p[key] * scale);
    }
    for (int key = begin; key <= t; key++) {
        double keep = (double)multiplier(a->dropout, a->dropout.first_sample + b,
                                         ((int64_t)head * a->T + t) * a->T + key);
        p[key] /= sum;
        dp[key] = 0;
        for (int d = 0; d < a->HD; d++) {
            double dout = (double)floatX_to_float(a->dout[row * a->HD + d]),
                   v = qkv_value(a, b, key, head, 2, d);
            a->out[row * a->HD + d] += p[key] * keep * v;
            a->dqkv[((((int64_t)b * a->T + key) * a->NH + head) * 3 + 2) * a->HD + d] += p[key] * keep * dout;
            dp[key] += dout * v * keep;
        }
        mean += p[key] * dp[key];
    }
    for (int key = begin; key <= t; key++) {
        double ds = p[key] * (dp[key] - mean) * scale;
        for (int d = 0; d < a->HD; d++) {
            a->dqkv[row * 3 * a->HD + d] += ds * qkv_value(a, b, key, head, 1, d);
            a->dqkv[((((int64_t)b * a->T + key) * a->NH + head) * 3 + 1) * a->HD + d] +=
                ds * qkv_value(a, b, t, head, 0, d);
        }
    }
}

static AttentionCase attention_make(int B, int T, int NH, int HD, bool documents, Dropout dropout) {
    Random rng = {7};
    AttentionCase a = {.B = B, .T = T, .NH = NH, .HD = HD, .dropout = dropout, .n = (int64_t)B * T * NH * HD};
    a.qkv = random_floatX(&rng, 3 * a.n, 0, 1);
    a.dout = random_floatX(&rng, a.n, 0, 1);
    a.doc_start = documents ? random_doc_start(&rng, B, T) : NULL;
    a.out = zero_doubles(a.n);
    a.dqkv = zero_doubles(3 * a.n);
    double *p = zero_doubles(T), *dp = zero_doubles(T);
    for (int b = 0; b < B; b++) {
        for (int head = 0; head < NH; head++) {
            for (int t = 0; t < T; t++) attention_reference_row(&a, b, head, t, p, dp);
        }
    }
    free_all(p, dp, NULL);
    return a;
}

static void check_attention(int B, int T, int NH, int HD, bool documents, Dropout dropout) {
    AttentionCase a = attention_make(B, T, NH, HD, documents, dropout);
    floatX *out = poisoned_floatX(a.n), *dqkv = poisoned_floatX(3 * a.n);
    void *saved = poisoned(op_attention_saved_bytes(B, T, NH, HD));
    void *workspace = poisoned(op_attention_workspace_bytes(B, T, NH, HD, 0, false));
    Attention attention = {B,           T,   NH,    HD,     dropout, a.qkv,
                           a.doc_start, out, saved, a.dout, dqkv,    .workspace = workspace};
    op_attention_forward(NULL, &attention);
    memset(workspace, 0xFF,
           op_attention_workspace_bytes(B, T, NH, HD, 0, false));  // poison: must not affect the result
    op_attention_backward(NULL, &attention);
    check_floatX("attention out", out, a.out, a.n, 2e-5);
    check_floatX("attention dqkv", dqkv, a.dqkv, 3 * a.n, 5e-5);
    free_all(a.qkv, a.dout, a.out, a.dqkv, out, dqkv, saved, workspace, NULL);
    free(a.doc_start);
}

static void test_attention(void **state) {
    const int shapes[][4] = {{1, 1, 1, 8},   {2, 5, 3, 8},    {1, 64, 1, 64},
                             {2, 65, 2, 16}, {1, 131, 1, 80}, {1, 33, 2, 128}};
    Dropout dropout = {0.3f, 5, 4 * 1 + DROPOUT_ATTENTION, 1000000000000};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        const int *s = shapes[i];
        check_attention(s[0], s[1], s[2], s[3], false, NO_DROPOUT);
        check_attention(s[0], s[1], s[2], s[3], true, NO_DROPOUT);
        check_attention(s[0], s[1], s[2], s[3], false, dropout);
        check_attention(s[0], s[1], s[2], s[3], true, dropout);
    }
}

// A micro-batch of two samples is bitwise identical to two micro-batches of one sample, because
// dropout masks depend on the global sample index.
static void test_attention_split(void **state) {
    enum { T = 70, NH = 3, HD = 16, ROW = T * NH * HD };
    Dropout dropout = {0.2f, 11, DROPOUT_ATTENTION, 40}, second = dropout;
    second.first_sample = 41;
    Random rng = {8};
    floatX *qkv = random_floatX(&rng, 2 * 3 * ROW, 0, 1), *whole = poisoned_floatX(2 * ROW),
           *parts = poisoned_floatX(2 * ROW);
    void *saved = poisoned(op_attention_saved_bytes(2, T, NH, HD)),
         *workspace = poisoned(op_attention_workspace_bytes(2, T, NH, HD, 0, false));
    Attention calls[] = {{2, T, NH, HD, dropout, qkv, .out = whole, .saved = saved, .workspace = workspace},
                         {1, T, NH, HD, dropout, qkv, .out = parts, .saved = saved, .workspace = workspace},
                         {1, T, NH, HD, second, qkv + 3 * ROW, .out = parts + ROW, .saved = saved,
                          .workspace = workspace}};
    for (int i = 0; i < 3; i++) op_attention_forward(NULL, &calls[i]);
    assert_memory_equal(whole, parts, 2 * ROW * sizeof(floatX));
    free_all(qkv, whole, parts, saved, workspace, NULL);
}

// Copies columns first to first + count - 1 to or from a matrix with only these columns.
static void cut_columns(floatX *part, floatX *whole, int64_t rows, int64_t columns, int64_t first,
                        int64_t count, bool back) {
    for (int64_t row = 0; row < rows; row++) {
        floatX *inside = whole + row * columns + first, *alone = part + row * count;
        memcpy(back ? inside : alone, back ? alone : inside, (size_t)count * sizeof(floatX));
    }
}

// With dropout and documents, heads split over two ranks are bitwise identical to one call.
static void test_attention_heads(void **state) {
    enum { B = 2, T = 70, NH = 5, HD = 16, N = B * T, C = NH * HD };
    const int bounds[] = {0, 2, NH};
    Dropout dropout = {0.2f, 11, DROPOUT_ATTENTION, 40};
    Random rng = {14};
    floatX *qkv = random_floatX(&rng, N * 3 * C, 0, 1), *dout = random_floatX(&rng, N * C, 0, 1);
    floatX *out = poisoned_floatX(N * C), *dqkv = poisoned_floatX(N * 3 * C);
    floatX *out_parts = poisoned_floatX(N * C), *dqkv_parts = poisoned_floatX(N * 3 * C);
    int32_t *start = random_doc_start(&rng, B, T);
    void *saved = poisoned(op_attention_saved_bytes(B, T, NH, HD)),
         *workspace = poisoned(op_attention_workspace_bytes(B, T, NH, HD, 0, false));
    Attention all = {B, T, NH, HD, dropout, qkv, start, out, saved, dout, dqkv, .workspace = workspace};
    op_attention_forward(NULL, &all);
    op_attention_backward(NULL, &all);
    for (int rank = 0; rank < 2; rank++) {
        int first = bounds[rank], heads = bounds[rank + 1] - first;
        int64_t at = first * HD, width = heads * HD;
        floatX *my_qkv = poisoned_floatX(N * 3 * width), *my_dout = poisoned_floatX(N * width),
               *my_out = poisoned_floatX(N * width), *my_dqkv = poisoned_floatX(N * 3 * width);
        void *my_saved = poisoned(op_attention_saved_bytes(B, T, heads, HD)),
             *my_workspace = poisoned(op_attention_workspace_bytes(B, T, heads, HD, 0, false));
        cut_columns(my_qkv, qkv, N, 3 * C, 3 * at, 3 * width, false);
        cut_columns(my_dout, dout, N, C, at, width, false);
        Attention mine = {B,
                          T,
                          heads,
                          HD,
                          dropout,
                          my_qkv,
                          start,
                          my_out,
                          my_saved,
                          my_dout,
                          my_dqkv,
                          my_workspace,
                          .first_head = first};
        op_attention_forward(NULL, &mine);
        op_attention_backward(NULL, &mine);
        cut_columns(my_out, out_parts, N, C, at, width, true);
        cut_columns(my_dqkv, dqkv_parts, N, 3 * C, 3 * at, 3 * width, true);
        free_all(my_qkv, my_dout, my_out, my_dqkv, my_saved, my_workspace, NULL);
    }
    assert_memory_equal(out, out_parts, N * C * sizeof(floatX));
    assert_memory_equal(dqkv, dqkv_parts, N * 3 * C * sizeof(floatX));
    free_all(qkv, dout, out, dqkv, out_parts, dqkv_parts, start, saved, workspace, NULL);
}

// A window is bitwise identical to documents that start at its first key, with dropout and with
// documents inside the window.
static void test_attention_window(void **state) {
    enum { B = 2, T = 150, NH = 4, G = 2, HD = 16, N = B * T, C = NH * HD, QKV = C + 2 * G * HD };
    static const int windows[] = {1, 2, 63, 64, 65, T - 1, T, 1000};
    Dropout dropout = {0.2f, 11, DROPOUT_ATTENTION, 40};
    Random rng = {15};
    floatX *qkv = random_floatX(&rng, N * QKV, 0, 1), *dout = random_floatX(&rng, N * C, 0, 1);
    int32_t *start = random_doc_start(&rng, B, T), *both = malloc(N * sizeof *both);
    void *saved = poisoned(op_attention_saved_bytes(B, T, NH, HD)),
         *workspace = poisoned(op_attention_workspace_bytes(B, T, NH, HD, G, false));
    for (size_t i = 0; i < 2 * sizeof windows / sizeof *windows; i++) {
        int window = windows[i / 2];
        const int32_t *documents = i % 2 ? start : NULL;
        floatX *out[2], *dqkv[2];
        for (int t = 0; t < N; t++) {
            int first = t % T - window + 1, document = documents ? start[t] : 0;
            both[t] = first > document ? first : document;
        }
        for (int k = 0; k < 2; k++) {
            out[k] = poisoned_floatX(N * C), dqkv[k] = poisoned_floatX(N * QKV);
            Attention a = {B,      T,     NH,   HD,      dropout,   qkv,         k ? both : documents,
                           out[k], saved, dout, dqkv[k], workspace, .groups = G, .window = k ? 0 : window};
            op_attention_forward(NULL, &a);
            op_attention_backward(NULL, &a);
        }
        assert_memory_equal(out[0], out[1], N * C * sizeof(floatX));
        assert_memory_equal(dqkv[0], dqkv[1], N * QKV * sizeof(floatX));
        free_all(out[0], out[1], dqkv[0], dqkv[1], NULL);
    }
    free_all(qkv, dout, start, both, saved, workspace, NULL);
}

// Scores in the hundreds overflow exp unless the maximum is subtracted. NaNs must propagate to the
// output, where the anomaly guard detects them.
static void test_attention_extremes(void **state) {
    enum { T = 9, HD = 8 };
    Random rng = {9};
    floatX *qkv = random_floatX(&rng, T * 3 * HD, 0, 30), *out = poisoned_floatX(T * HD),
           *dqkv = poisoned_floatX(T * 3 * HD);
    void *saved = poisoned(op_attention_saved_bytes(1, T, 1, HD)),
         *workspace = poisoned(op_attention_workspace_bytes(1, T, 1, HD, 0, false));
    Attention attention = {1, T, 1, HD, NO_DROPOUT, qkv, NULL, out, saved, out, dqkv, .workspace = workspace};
    op_attention_forward(NULL, &attention);
    op_attention_backward(NULL, &attention);
    for (int i = 0; i < T * HD; i++)
        assert_true(isfinite(floatX_to_float(out[i])) && isfinite(floatX_to_float(dqkv[i])));
    qkv[5 * 3 * HD] = floatX_from_float(NAN);  // query 5
    op_attention_forward(NULL, &attention);
    for (int i = 0; i < T * HD; i++) assert_true(isnan(floatX_to_float(out[i])) == (i / HD == 5));
    free_all(qkv, out, dqkv, saved, workspace, NULL);
}

// --- against PyTorch -----------------------------------------------------------------------------

// Reads the bf16 values of a golden tensor, which are exact in both precisions.
static floatX *golden_floatX(const Golden *g, const char *name, int64_t *count) {
    const uint16_t *bits = golden_bf16(g, name, count);
    assert_non_null(bits);
    floatX *x = poisoned_floatX(*count);
    for (int64_t i = 0; i < *count; i++) x[i] = floatX_from_float(bf16_to_float(bits[i]));
    return x;
}

// In bf16 the RMS error against PyTorch's fp32 result must be at most twice the error of PyTorch in
// bf16. In fp32 only rounding errors are allowed.
static void check_golden(const Golden *g, const char *name, const double *ours) {
    char error_name[128];
    snprintf(error_name, sizeof error_name, "error.%s", name);
    int64_t n;
    const float *expected = golden_f32(g, name, &n), *torch_error = golden_f32(g, error_name, NULL);
    assert_true(expected && torch_error);
    double squares = 0, reference = 0;
    for (int64_t i = 0; i < n; i++) {
        squares += (ours[i] - (double)expected[i]) * (ours[i] - (double)expected[i]);
        reference += (double)expected[i] * (double)expected[i];
    }
    double error = sqrt(squares / (double)n), atol = 1e-6 * sqrt(reference / (double)n);
    double allowed = atol + (sizeof(floatX) == 2 ? 2.0 * (double)torch_error[0] : 0.0);
    if (!(error <= allowed))
        fail_msg("%s: error %.3g, allowed %.3g (PyTorch bf16 %.3g)", name, error, allowed,
                 (double)torch_error[0]);
}
static void check_golden_floatX(const Golden *g, const char *name, const floatX *ours, int64_t n) {
    double *values = doubles_of(ours, n);
    check_golden(g, name, values);
    free(values);
}
static void check_golden_floats(const Golden *g, const char *name, const float *ours, int64_t n) {
    double *values = zero_doubles(n);
    for (int64_t i = 0; i < n; i++) values[i] = (double)ours[i];
    check_golden(g, name, values);
    free(values);
}

static void test_golden(void **state) {
    Golden g;
    if (!golden_open(&g, "test/golden/gpt/gpt.golden"))
        fail_msg("cannot read test/golden/gpt/gpt.golden; run the tests from the repository's root");
    assert_null(golden_f32(&g, "no.such.tensor", NULL));
    assert_null(golden_f32(&g, "config", NULL));
    const int32_t *config = golden_i32(&g, "config", NULL), *targets = golden_i32(&g, "targets", NULL);
    int C = config[1], NH = config[2], T = config[3], Vp = config[4], B = config[5];
    int64_t n, n_qkv, n_wte;

    floatX *qkv = golden_floatX(&g, "op.attention.qkv", &n_qkv),
           *dout = golden_floatX(&g, "op.attention.dout", &n);
    assert_true(n == (int64_t)B * T * C && n_qkv == 3 * n);
    floatX *out = poisoned_floatX(n), *dqkv = poisoned_floatX(n_qkv);
    void *saved = poisoned(op_attention_saved_bytes(B, T, NH, C / NH)),
         *workspace = poisoned(op_attention_workspace_bytes(B, T, NH, C / NH, 0, false));
    Attention attention = {B,    T,   NH,    C / NH, NO_DROPOUT, qkv,
                           NULL, out, saved, dout,   dqkv,       .workspace = workspace};
    op_attention_forward(NULL, &attention);
    op_attention_backward(NULL, &attention);
    check_golden_floatX(&g, "op.attention.out", out, n);
    check_golden_floatX(&g, "op.attention.dqkv", dqkv, n_qkv);

    floatX *x = golden_floatX(&g, "op.head.x", &n),
           *wte = golden_floatX(&g, "weight.embedding.word_embeddings.weight", &n_wte),
           *dx = poisoned_floatX(n);
    float *losses = poisoned_floats(B * T), *dwte = xcalloc((size_t)n_wte, sizeof(float), "dwte"), sum = 0;
    void *head_workspace = poisoned(op_head_workspace_bytes(B * T, C, Vp));
    Head head = {B * T,   C,    0,
                 Vp,      x,    wte,
                 targets, NULL, 1.0f / (float)(B * T),
                 losses,  &sum, dx,
                 dwte,    true, .workspace = head_workspace};
    op_head(NULL, &head);
    check_golden_floats(&g, "op.head.losses", losses, B * T);
    check_golden_floatX(&g, "op.head.dx", dx, n);
    check_golden_floats(&g, "op.head.dwte", dwte, n_wte);
    free_all(qkv, dout, out, dqkv, saved, workspace, x, wte, dx, losses, dwte, head_workspace, NULL);
    golden_close(&g);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exp),
        cmocka_unit_test(test_gelu),
        cmocka_unit_test(test_gelu_backward),
        cmocka_unit_test(test_dropout_multipliers),
        cmocka_unit_test(test_dropout_far_elements),
        cmocka_unit_test(test_dropout_statistics),
        cmocka_unit_test(test_embedding),
        cmocka_unit_test(test_embedding_parts),
        cmocka_unit_test(test_embedding_one_table),
        cmocka_unit_test(test_layernorm),
        cmocka_unit_test(test_layernorm_rows),
        cmocka_unit_test(test_residual_sum_alone),
        cmocka_unit_test(test_linear),
        cmocka_unit_test(test_linear_halves),
        cmocka_unit_test(test_attention),
        cmocka_unit_test(test_attention_split),
        cmocka_unit_test(test_attention_heads),
        cmocka_unit_test(test_attention_window),
        cmocka_unit_test(test_attention_extremes),
        cmocka_unit_test(test_golden),
    };
    return cmocka_run_group_tests_name("ops (" FLOATX_NAME ")", tests, NULL, NULL);
}
