// Compares every backward op with finite differences of its forward op, which need no formula for
// the gradient. They require smooth functions, so the test runs only in the fp32 build (make
// PRECISION=fp32 BUILD=build/fp32 ...). In bf16, test_ops.c compares with references.
//
// A case has fp32 inputs, a forward function that returns a scalar (a sum of the outputs with
// random weights), and the gradients that the backward op computed. Each input is checked along
// random sign directions, at the coordinate with the largest gradient, and at random coordinates.
#include "test/unit/ops_common.h"

// One differentiable input: n values, and the gradient to check.
typedef struct Input {
    const char *name;
    float *values;
    const float *gradient;
    int64_t n;
} Input;

typedef double (*Forward)(void *context);

// Returns the fourth-order central difference of forward with step h along `direction`, or at
// coordinate `at` if direction is NULL.
static double derivative(Forward forward, void *context, const Input *in, const float *direction, int64_t at,
                         double h) {
    const double steps[4] = {-2, -1, 1, 2}, weights[4] = {1, -8, 8, -1};
    float *saved = copy_of(in->values, (size_t)in->n * sizeof(float));
    double sum = 0, at_moved = 0, coordinate_h = h;
    for (int i = 0; i < 4; i++) {
        if (direction) {
            for (int64_t j = 0; j < in->n; j++)
                in->values[j] = (float)((double)saved[j] + steps[i] * h * (double)direction[j]);
        } else {
            in->values[at] = (float)((double)saved[at] + steps[i] * h);
            at_moved += steps[i] * ((double)in->values[at] - (double)saved[at]);
        }
        sum += weights[i] * forward(context);
        memcpy(in->values, saved, (size_t)in->n * sizeof(float));
    }
    if (!direction) coordinate_h = at_moved / 10.0;  // h after rounding; the squared steps sum to 10
    free(saved);
    return sum / (12.0 * coordinate_h);
}

// For directions the tolerance is relative to the L2 norm of the gradient, for coordinates to its
// largest element.
static void check_gradient(Forward forward, void *context, Input in, Random *rng) {
    const double tolerance = 1e-3, h = 1e-2;
    double squares = 0;
    int64_t largest = 0;
    for (int64_t i = 0; i < in.n; i++) {
        squares += (double)in.gradient[i] * (double)in.gradient[i];
        if (fabsf(in.gradient[i]) > fabsf(in.gradient[largest])) largest = i;
    }
    if (!(squares > 0 && isfinite(squares))) fail_msg("%s: the gradient is zero or not finite", in.name);
    float *direction = poisoned_floats(in.n);
    for (int trial = 0; trial < 3; trial++) {
        double analytic = 0;
        for (int64_t i = 0; i < in.n; i++) {
            direction[i] = random_u64(rng) & 1 ? 1.0f : -1.0f;
            analytic += (double)in.gradient[i] * (double)direction[i];
        }
        check_close(in.name, analytic, derivative(forward, context, &in, direction, 0, h), tolerance,
                    tolerance * sqrt(squares), -1 - trial);
    }
    for (int trial = 0; trial < 4; trial++) {
        int64_t at = trial == 0 ? largest : (int64_t)(random_u64(rng) % (uint64_t)in.n);
        double numeric = derivative(forward, context, &in, NULL, at, 2 * h);
        check_close(in.name, (double)in.gradient[at], numeric, tolerance,
                    tolerance * (double)fabsf(in.gradient[largest]), at);
    }
    free(direction);
}

// Reduces y to a scalar by a weighted sum.
static double weighted(const floatX *y, const float *weights, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += (double)floatX_to_float(y[i]) * (double)weights[i];
    return sum;
}

// floatX is float when this runs. The casts let the bf16 build compile.
static float *as_floats(floatX *x) { return (float *)(void *)x; }
static const floatX *as_floatX(const float *x) { return (const floatX *)(const void *)x; }
static bool skipped_in_bf16(void) {
    if (sizeof(floatX) == sizeof(float)) return false;
    print_message(
        "skipped: bf16 forwards are not smooth; build with PRECISION=fp32 for finite differences\n");
    skip();
    return true;
}
static float *zero_floats(int64_t n) { return xcalloc((size_t)n, sizeof(float), "a gradient"); }

// --- embedding -----------------------------------------------------------------------------------

enum { VOCABULARY = 9, POSITIONS = 12 };

typedef struct EmbeddingCase {
    Embedding op;
    floatX *wte, *wpe;
    int32_t *tokens, *positions;
    float *weights;
} EmbeddingCase;

static double embedding_forward(void *context) {
    EmbeddingCase *e = context;
    op_embedding_forward(NULL, &e->op);
    return weighted(e->op.x, e->weights, (int64_t)e->op.B * e->op.T * e->op.C);
}

static void check_embedding(int B, int T, int C, Dropout dropout) {
    Random rng = {21};
    int64_t n = (int64_t)B * T * C;
    EmbeddingCase e;
    e.wte = random_floatX(&rng, VOCABULARY * C, 0, 1);
    e.wpe = random_floatX(&rng, POSITIONS * C, 0, 1);
    e.tokens = random_ids(&rng, B * T, VOCABULARY);
    e.positions = random_ids(&rng, B * T, POSITIONS);
    e.weights = random_floats(&rng, n, 1);
    float *dwte = zero_floats(VOCABULARY * C), *dwpe = zero_floats(POSITIONS * C);
    e.op = (Embedding){B,           T,           C,     0,     VOCABULARY,         e.tokens,
                       e.positions, dropout,     e.wte, e.wpe, poisoned_floatX(n), as_floatX(e.weights),
                       dwte,        .dwpe = dwpe};
    op_embedding_backward(NULL, &e.op);
    check_gradient(embedding_forward, &e, (Input){"wte", as_floats(e.wte), dwte, VOCABULARY * C}, &rng);
    check_gradient(embedding_forward, &e, (Input){"wpe", as_floats(e.wpe), dwpe, POSITIONS * C}, &rng);
    free_all(e.wte, e.wpe, e.tokens, e.positions, e.op.x, e.weights, dwte, dwpe, NULL);
}

static void test_embedding_gradients(void **state) {
    if (skipped_in_bf16()) return;
    check_embedding(2, 5, 24, NO_DROPOUT);
    check_embedding(3, 7, 40, (Dropout){0.4f, 3, DROPOUT_EMBEDDING, 100});
}

// --- residual + LayerNorm ------------------------------------------------------------------------

typedef struct NormCase {
    LayerNorm op;
    floatX *residual, *branch, *gamma, *beta;
    float *sum_weights, *y_weights;
} NormCase;

// As in the model, the sum is used by the next residual addition and by the LayerNorm.
static double norm_forward(void *context) {
    NormCase *m = context;
    int64_t n = (int64_t)m->op.B * m->op.T * m->op.C;
    op_layernorm_forward(NULL, &m->op);
    return weighted(m->op.x, m->sum_weights, n) + weighted(m->op.y, m->y_weights, n);
}

static void check_norm(int B, int T, int C, bool rms, Dropout dropout) {
    Random rng = {22};
    int64_t N = (int64_t)B * T, n = N * C;
    NormCase m;
    m.residual = random_floatX(&rng, n, 0.5, 1);
    m.branch = random_floatX(&rng, n, 0, 1);
    m.gamma = random_floatX(&rng, C, 1, 0.3);
    m.beta = random_floatX(&rng, C, 0, 0.3);
    m.sum_weights = random_floats(&rng, n, 0.5);
    m.y_weights = random_floats(&rng, n, 1);
    floatX *dresidual = copy_of(m.sum_weights, (size_t)n * sizeof(float)), *dbranch = poisoned_floatX(n);
    float *dgamma = zero_floats(C), *dbeta = zero_floats(C);
    m.op = (LayerNorm){B,
                       T,
                       C,
                       1e-5f,
                       dropout,
                       poisoned_floatX(n),
                       m.residual,
                       m.branch,
                       m.gamma,
                       m.beta,
                       poisoned_floatX(n),
                       poisoned_floats(N),
                       poisoned_floats(N),
                       as_floatX(m.y_weights),
                       dresidual,
                       dbranch,
                       dgamma,
                       .dbeta = dbeta};
    m.op.rms = rms;
    if (rms) m.op.beta = NULL, m.op.dbeta = NULL;
    norm_forward(&m);
    op_layernorm_backward(NULL, &m.op);
    check_gradient(norm_forward, &m, (Input){"residual", as_floats(m.residual), as_floats(dresidual), n},
                   &rng);
    check_gradient(norm_forward, &m, (Input){"branch", as_floats(m.branch), as_floats(dbranch), n}, &rng);
    check_gradient(norm_forward, &m, (Input){"gamma", as_floats(m.gamma), dgamma, C}, &rng);
    if (!rms) check_gradient(norm_forward, &m, (Input){"beta", as_floats(m.beta), dbeta, C}, &rng);
    free_all(m.residual, m.branch, m.gamma, m.beta, m.op.x, m.op.y, m.op.mean, m.op.rstd, m.sum_weights,
             m.y_weights, dresidual, dbranch, dgamma, dbeta, NULL);
}

static void test_norm_gradients(void **state) {
    if (skipped_in_bf16()) return;
    for (int rms = 0; rms < 2; rms++) {
        check_norm(1, 1, 16, rms, NO_DROPOUT);
        check_norm(2, 3, 40, rms, NO_DROPOUT);
        check_norm(2, 5, 100, rms, (Dropout){0.3f, 3, 4 * 7 + DROPOUT_FFN, 9});
    }
}

// --- linear -> GELU -> linear --------------------------------------------------------------------

typedef struct Mlp {
    Linear first, second;
    floatX *x, *w1, *b1, *w2, *b2;
    float *weights;
} Mlp;

static double mlp_forward(void *context) {
    Mlp *m = context;
    op_linear_forward(NULL, &m->first);
    op_linear_forward(NULL, &m->second);
    return weighted(m->second.y, m->weights, m->second.N * m->second.OC);
}

static void check_mlp(int64_t N, int C, int F) {
    Random rng = {23};
    int64_t n_w = (int64_t)C * F;
    Mlp m = {.x = random_floatX(&rng, N * C, 0, 1)};
    m.w1 = random_floatX(&rng, n_w, 0, 1 / sqrt(C));
    m.b1 = random_floatX(&rng, F, 0, 0.5);
    m.w2 = random_floatX(&rng, n_w, 0, 1 / sqrt(F));
    m.b2 = random_floatX(&rng, C, 0, 0.5);
    m.weights = random_floats(&rng, N * C, 1);
    floatX *pre = poisoned_floatX(N * F), *hidden = poisoned_floatX(N * F), *y = poisoned_floatX(N * C);
    floatX *dx = poisoned_floatX(N * C), *dpre = poisoned_floatX(N * F);
    float *dw1 = zero_floats(n_w), *db1 = zero_floats(F), *dw2 = zero_floats(n_w), *db2 = zero_floats(C);
    void *workspace = poisoned(op_linear_workspace_bytes(N, F, F));
    const floatX *dy = as_floatX(m.weights);
    m.first = (Linear){N, C, F, m.x, m.w1, m.b1, hidden, pre, dpre, NULL, dx, dw1, .workspace = workspace};
    m.second = (Linear){N,    F,  C,   hidden, m.w2, m.b2, y,
                        NULL, dy, pre, dpre,   dw2,  db1,  .workspace = workspace};
    mlp_forward(&m);
    op_linear_backward(NULL, &m.second);
    op_bias_gradient(NULL, db2, dy, NULL, N, C, workspace, NULL);
    op_linear_backward(NULL, &m.first);
    check_gradient(mlp_forward, &m, (Input){"x", as_floats(m.x), as_floats(dx), N * C}, &rng);
    check_gradient(mlp_forward, &m, (Input){"w1", as_floats(m.w1), dw1, n_w}, &rng);
    check_gradient(mlp_forward, &m, (Input){"b1", as_floats(m.b1), db1, F}, &rng);
    check_gradient(mlp_forward, &m, (Input){"w2", as_floats(m.w2), dw2, n_w}, &rng);
    check_gradient(mlp_forward, &m, (Input){"b2", as_floats(m.b2), db2, C}, &rng);
    free_all(m.x, m.w1, m.b1, m.w2, m.b2, pre, hidden, y, m.weights, workspace, dx, dpre, dw1, db1, dw2, db2,
             NULL);
}

static void test_linear_gradients(void **state) {
    if (skipped_in_bf16()) return;
    check_mlp(1, 8, 32);
    check_mlp(13, 24, 40);
    check_mlp(530, 16, 48);
}

// --- norms of queries and keys -------------------------------------------------------------------

typedef struct HeadNormCase {
    HeadNorm op;
    const floatX *vectors;
    float *weights;
    int64_t n;
} HeadNormCase;

static double head_norm_forward(void *context) {
    HeadNormCase *c = context;
    memcpy(c->op.x, c->vectors, (size_t)c->n * sizeof(floatX));
    op_head_norm_forward(NULL, &c->op);
    return weighted(c->op.x, c->weights, c->n);
}

static void check_head_norm(bool rms) {
    enum { N = 3, G = 2, QUERIES = 2, HD = 16, ALL = N * G * (QUERIES + 2) * HD };
    Random rng = {27};
    floatX *vectors = random_floatX(&rng, ALL, 0.2, 1), *x = poisoned_floatX(ALL),
           *before = poisoned_floatX(N * G * (QUERIES + 1) * HD), *gamma[2], *beta[2];
    HeadNormCase c = {.vectors = vectors, .weights = random_floats(&rng, ALL, 1), .n = ALL};
    c.op = (HeadNorm){.N = N,
                      .groups = G,
                      .queries = QUERIES,
                      .HD = HD,
                      .epsilon = 1e-5f,
                      .rms = rms,
                      .x = x,
                      .before = before};
    for (int kind = 0; kind < 2; kind++) {
        c.op.gamma[kind] = gamma[kind] = random_floatX(&rng, HD, 1, 0.3);
        c.op.dgamma[kind] = zero_floats(HD);
        beta[kind] = random_floatX(&rng, HD, 0, 0.3);
        if (!rms) c.op.beta[kind] = beta[kind], c.op.dbeta[kind] = zero_floats(HD);
    }
    head_norm_forward(&c);
    floatX *dx = copy_of(c.weights, ALL * sizeof(floatX));
    c.op.x = dx;
    op_head_norm_backward(NULL, &c.op);
    c.op.x = x;
    check_gradient(head_norm_forward, &c, (Input){"vectors", as_floats(vectors), as_floats(dx), ALL}, &rng);
    for (int kind = 0; kind < 2; kind++) {
        check_gradient(head_norm_forward, &c, (Input){"gamma", as_floats(gamma[kind]), c.op.dgamma[kind], HD},
                       &rng);
        if (!rms) {
            check_gradient(head_norm_forward, &c,
                           (Input){"beta", as_floats(beta[kind]), c.op.dbeta[kind], HD}, &rng);
        }
    }
    for (int kind = 0; kind < 2; kind++) {
        free_all(gamma[kind], beta[kind], c.op.dgamma[kind], c.op.dbeta[kind], NULL);
    }
    free_all(vectors, x, before, c.weights, dx, NULL);
}

static void test_head_norm_gradients(void **state) {
    if (skipped_in_bf16()) return;
    check_head_norm(true);
    check_head_norm(false);
}

// --- SwiGLU --------------------------------------------------------------------------------------

typedef struct SwigluCase {
    Swiglu op;
    float *weights;
} SwigluCase;

static double swiglu_forward(void *context) {
    SwigluCase *c = context;
    op_swiglu_forward(NULL, &c->op);
    return weighted(c->op.y, c->weights, c->op.N * c->op.F);
}

static void test_swiglu_gradients(void **state) {
    if (skipped_in_bf16()) return;
    enum { N = 7, F = 24 };
    Random rng = {26};
    floatX *pre = random_floatX(&rng, N * 2 * F, 0, 1), *dpre = poisoned_floatX(N * 2 * F);
    SwigluCase c = {.weights = random_floats(&rng, N * F, 1)};
    c.op = (Swiglu){N, F, pre, poisoned_floatX(N * F), as_floatX(c.weights), dpre, NULL};
    op_swiglu_backward(NULL, &c.op);
    check_gradient(swiglu_forward, &c, (Input){"pre", as_floats(pre), as_floats(dpre), N * 2 * F}, &rng);
    free_all(pre, dpre, c.op.y, c.weights, NULL);
}

// --- attention -----------------------------------------------------------------------------------

typedef struct AttentionCase {
    Attention op;
    floatX *qkv;
    int32_t *doc_start;
    float *weights;
    int64_t n;  // elements of out
} AttentionCase;

static double attention_forward(void *context) {
    AttentionCase *a = context;
    op_attention_forward(NULL, &a->op);
    return weighted(a->op.out, a->weights, a->n);
}

static void check_attention(int B, int T, int NH, int HD, int groups, bool documents, Dropout dropout) {
    Random rng = {24};
    int64_t n = (int64_t)B * T * NH * HD, wide = (int64_t)B * T * (NH + 2 * (groups ? groups : NH)) * HD;
    AttentionCase a = {.n = n, .qkv = random_floatX(&rng, wide, 0, 0.8)};
    a.doc_start = documents ? random_doc_start(&rng, B, T) : NULL;
    a.weights = random_floats(&rng, n, 1);
    void *saved = poisoned(op_attention_saved_bytes(B, T, NH, HD));
    void *workspace = poisoned(op_attention_workspace_bytes(B, T, NH, HD, 0, false));
    floatX *out = poisoned_floatX(n), *dqkv = poisoned_floatX(wide);
    a.op = (Attention){B,
                       T,
                       NH,
                       HD,
                       dropout,
                       a.qkv,
                       a.doc_start,
                       out,
                       saved,
                       as_floatX(a.weights),
                       dqkv,
                       .workspace = workspace,
                       .groups = groups};
    attention_forward(&a);
    op_attention_backward(NULL, &a.op);
    check_gradient(attention_forward, &a, (Input){"qkv", as_floats(a.qkv), as_floats(dqkv), wide}, &rng);
    free_all(a.qkv, out, a.weights, saved, workspace, dqkv, NULL);
    free(a.doc_start);
}

static void test_attention_gradients(void **state) {
    if (skipped_in_bf16()) return;
    const int shapes[][4] = {{2, 5, 3, 8}, {1, 66, 1, 64}, {1, 17, 2, 80}, {2, 9, 1, 128}, {1, 130, 5, 8}};
    Dropout dropout = {0.25f, 6, 4 * 2 + DROPOUT_ATTENTION, 12345678901};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        const int *s = shapes[i];
        check_attention(s[0], s[1], s[2], s[3], 0, false, NO_DROPOUT);
        check_attention(s[0], s[1], s[2], s[3], 0, true, NO_DROPOUT);
        check_attention(s[0], s[1], s[2], s[3], 0, false, dropout);
        check_attention(s[0], s[1], s[2], s[3], 0, true, dropout);
    }
    check_attention(2, 9, 6, 8, 2, true, dropout);
    check_attention(1, 70, 3, 16, 1, false, NO_DROPOUT);
}

// --- head ----------------------------------------------------------------------------------------

typedef struct HeadCase {
    Head op;
    floatX *x, *wte;
    int32_t *targets;
    float *mask;  // or NULL
} HeadCase;

// Sums the losses of the rows in double, because *loss_sum in fp32 is too inaccurate for
// differences.
static double lm_head_forward(void *context) {
    HeadCase *h = context;
    Head op = h->op;
    double sum = 0;
    op.dx = NULL;
    op.dwte = NULL;
    op_head(NULL, &op);
    for (int64_t i = 0; i < op.N; i++) {
        sum += (double)op.losses[i] * (h->mask ? (double)h->mask[i] : 1.0) * (double)op.loss_scale;
    }
    return sum;
}

static void check_lm_head(int64_t N, int C, int Vp, bool masked) {
    Random rng = {25};
    HeadCase h;
    h.x = random_floatX(&rng, N * C, 0, 1);
    h.wte = random_floatX(&rng, (int64_t)Vp * C, 0, 1 / sqrt(C));
    h.targets = random_ids(&rng, N, Vp);
    h.mask = masked ? random_floats(&rng, N, 1) : NULL;  // arbitrary weights
    void *workspace = poisoned(op_head_workspace_bytes(N, C, Vp));
    floatX *dx = poisoned_floatX(N * C);
    float *dwte = zero_floats((int64_t)Vp * C), *losses = poisoned_floats(N), sum = 0;
    h.op = (Head){N,     C,         0,      Vp,    h.x,
                  h.wte, h.targets, h.mask, 0.5f,  losses,
                  &sum,  dx,        dwte,   false, .workspace = workspace};
    op_head(NULL, &h.op);
    check_gradient(lm_head_forward, &h, (Input){"x", as_floats(h.x), as_floats(dx), N * C}, &rng);
    check_gradient(lm_head_forward, &h, (Input){"wte", as_floats(h.wte), dwte, (int64_t)Vp * C}, &rng);
    free_all(h.x, h.wte, h.targets, losses, workspace, dx, dwte, NULL);
    free(h.mask);
}

static void test_head_gradients(void **state) {
    if (skipped_in_bf16()) return;
    check_lm_head(1, 8, 16, false);
    check_lm_head(11, 24, 133, false);
    check_lm_head(23, 40, 64, true);
    check_lm_head(270, 8, 8192, false);  // more than two chunks
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_embedding_gradients), cmocka_unit_test(test_norm_gradients),
        cmocka_unit_test(test_linear_gradients),    cmocka_unit_test(test_attention_gradients),
        cmocka_unit_test(test_head_norm_gradients), cmocka_unit_test(test_swiglu_gradients),
        cmocka_unit_test(test_head_gradients),
    };
    return cmocka_run_group_tests_name("gradients of the ops (" FLOATX_NAME ")", tests, NULL, NULL);
}
