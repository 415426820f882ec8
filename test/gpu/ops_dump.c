// Runs every op of llmc/ops.h on fixed pseudo-random inputs and writes the named results to a file.
// Linked with the CPU backend, in both precisions, and with the CUDA backend; compare_dumps.py
// applies the tolerance rule to the three files.
//
//   ops_dump FILE [--deterministic | --own-kernels]
//
// --own-kernels runs only ops that call no library on a GPU, because compute-sanitizer's racecheck
// crashes in programs that call cuBLASLt.
#include "sdp4bit/muon.h"
#include "test/gpu/ops_data.h"

// --- the file ---------------------------------------------------------------------------------
// "opsdump1\n", then for each result "<name> <kind> <compare> <count>\n" and `count` values.
//   kind     b: bf16, f: fp32
//   compare  e: bitwise identical to the CPU backend in the same precision, t: within the tolerance

// Of larger tensors only about this many elements are written, at the same positions in every
// build.
enum { SAMPLED_ABOVE = 65536 };

typedef struct Dump {
    Lab lab;
    bool own_kernels;
    FILE *file;
    char scope[128];  // name of the case, prefix of result names
} Dump;

static void write_values(Dump *d, const char *name, const void *memory, int64_t count, size_t size, char kind,
                         char compare) {
    int64_t step = count > SAMPLED_ABOVE ? (ceil_div64(count, SAMPLED_ABOVE) | 1) : 1;
    uint8_t *host = (uint8_t *)xmalloc((size_t)count * size, "a result");
    copy_to_host(d->lab.stream, host, memory, (size_t)count * size);
    stream_synchronize(d->lab.stream);
    fprintf(d->file, "%s.%s %c %c %lld\n", d->scope, name, kind, compare, (long long)ceil_div64(count, step));
    for (int64_t i = 0; i < count; i += step) fwrite(host + (size_t)i * size, size, 1, d->file);
    free(host);
}
static void dump_x(Dump *d, const char *name, const floatX *memory, int64_t count, char compare) {
    write_values(d, name, memory, count, sizeof(floatX), sizeof(floatX) == 2 ? 'b' : 'f', compare);
}
static void dump_f(Dump *d, const char *name, const float *memory, int64_t count, char compare) {
    write_values(d, name, memory, count, sizeof(float), 'f', compare);
}

static const Dropout NONE = {0.0f, 0, 0, 0};
static Dropout dropout_of(float p, int site) {
    Dropout dropout = {p, 4321, 4 * 7 + (uint32_t)site, 0x123456789ll};  // a sample number beyond 32 bits
    return dropout;
}

// --- initial weights -----------------------------------------------------------------------------

// Writes to an address that is only 2-byte aligned, as a bias may be. Memory after the values
// must not change.
static void case_init(Dump *d, int64_t n, double std) {
    Lab *lab = &d->lab;
    snprintf(d->scope, sizeof d->scope, "init_%lld_std%g", (long long)n, std);
    floatX *weights = poisoned_x(lab, n + 2);
    InitWeights all = {weights + 1, n, 1, 0, 0, 1, std, 0x123456789ull, 42, 2, 0};
    op_init_weights(lab->stream, &all);
    dump_x(d, "weights", weights, n + 2, 'e');
    release(lab, (void *[]){weights, NULL});
}

// Initializes a part of a tensor with 1001 columns.
static void case_init_part(Dump *d, int64_t first_row, int64_t rows, int64_t first_column, int64_t columns) {
    Lab *lab = &d->lab;
    snprintf(d->scope, sizeof d->scope, "init_part_%lldx%lld_from_%lld_%lld", (long long)rows,
             (long long)columns, (long long)first_row, (long long)first_column);
    floatX *weights = poisoned_x(lab, rows * columns + 1);
    InitWeights part = {weights,        rows, columns, first_row, first_column, 1001, 0.02,
                        0x123456789ull, 42,   2,       0};
    op_init_weights(lab->stream, &part);
    dump_x(d, "weights", weights, rows * columns + 1, 'e');
    release(lab, (void *[]){weights, NULL});
}

// --- embedding -----------------------------------------------------------------------------------

static void case_embedding(Dump *d, int B, int T, int C, int V, bool documents, float p) {
    Lab *lab = &d->lab;
    int64_t n = (int64_t)B * T;
    snprintf(d->scope, sizeof d->scope, "embedding_%dx%dx%d%s_p%g", B, T, C, documents ? "_documents" : "",
             (double)p);
    int32_t *tokens = random_ids(lab, n, V), *start, *positions;
    random_documents(lab, B, T, documents, &start, &positions);
    floatX *wte = random_x(lab, (int64_t)V * C, 0, 0.02), *wpe = random_x(lab, (int64_t)T * C, 0, 0.02),
           *dx = random_x(lab, n * C, 0, 1), *x = poisoned_x(lab, n * C);
    float *dwte = random_f(lab, (int64_t)V * C, 1), *dwpe = random_f(lab, (int64_t)T * C, 1);
    Embedding a = {B,   T,   C, 0,  V,    tokens,      positions, dropout_of(p, DROPOUT_EMBEDDING),
                   wte, wpe, x, dx, dwte, .dwpe = dwpe};
    op_embedding_forward(lab->stream, &a);
    op_embedding_backward(lab->stream, &a);
    dump_x(d, "x", x, n * C, 'e');
    // One rank's part of the vocabulary, whose gradients are added to the previous ones.
    a.first_row = V / 3, a.rows = V / 2, a.wte += V / 3 * C, a.dwte += V / 3 * C, a.part = true;
    op_embedding_forward(lab->stream, &a);
    op_embedding_backward(lab->stream, &a);
    dump_x(d, "x_part", x, n * C, 'e');
    a.wte = NULL, a.part = false;
    op_embedding_forward(lab->stream, &a);
    dump_x(d, "x_rest", x, n * C, 'e');
    // The last two thirds of the rows, which start inside a sample.
    a.x_rows = (Rows){n / 3, n - n / 3}, a.x = x + n / 3 * C;
    op_embedding_forward(lab->stream, &a);
    dump_x(d, "x_rows", x, n * C, 'e');
    dump_f(d, "dwte", dwte, (int64_t)V * C, 't');
    dump_f(d, "dwpe", dwpe, (int64_t)T * C, 't');
    release(lab, (void *[]){tokens, start, positions, wte, wpe, dx, x, dwte, dwpe, NULL});
}

// --- LayerNorm -----------------------------------------------------------------------------------

static void case_layernorm_forward(Dump *d, int B, int T, int C, double mean_of_x) {
    Lab *lab = &d->lab;
    int64_t n = (int64_t)B * T;
    snprintf(d->scope, sizeof d->scope, "layernorm_%dx%d_mean%g", (int)n, C, mean_of_x);
    floatX *x = random_x(lab, n * C, mean_of_x, 1), *gamma = random_x(lab, C, 1, 0.1),
           *beta = random_x(lab, C, 0, 0.1), *y = poisoned_x(lab, n * C);
    float *mean = poisoned_f(lab, n), *rstd = poisoned_f(lab, n);
    LayerNorm a = {B, T, C, 1e-5f, NONE, x, NULL, NULL, gamma, beta, y, mean, .rstd = rstd};
    op_layernorm_forward(lab->stream, &a);
    dump_x(d, "y", y, n * C, 't');
    dump_f(d, "mean", mean, n, 't');
    dump_f(d, "rstd", rstd, n, 't');
    release(lab, (void *[]){x, gamma, beta, y, mean, rstd, NULL});
}

static void case_residual(Dump *d, int B, int T, int C, float p) {
    Lab *lab = &d->lab;
    int64_t n = (int64_t)B * T;
    snprintf(d->scope, sizeof d->scope, "residual_layernorm_%dx%dx%d_p%g", B, T, C, (double)p);
    floatX *residual = random_x(lab, n * C, 0, 1), *branch = random_x(lab, n * C, 0, 1),
           *gamma = random_x(lab, C, 1, 0.1), *beta = random_x(lab, C, 0, 0.1);
    floatX *sum = poisoned_x(lab, n * C), *y = poisoned_x(lab, n * C);
    float *mean = poisoned_f(lab, n), *rstd = poisoned_f(lab, n);
    LayerNorm a = {B,   T,        C,           1e-5f, dropout_of(p, DROPOUT_PROJECTION),
                   sum, residual, branch,      gamma, beta,
                   y,   mean,     .rstd = rstd};
    op_layernorm_forward(lab->stream, &a);
    dump_x(d, "sum", sum, n * C, 'e');
    dump_x(d, "y", y, n * C, 't');
    dump_f(d, "mean", mean, n, 't');
    dump_f(d, "rstd", rstd, n, 't');
    // In place.
    a.x = residual;
    op_layernorm_forward(lab->stream, &a);
    dump_x(d, "sum_in_place", residual, n * C, 'e');
    release(lab, (void *[]){residual, branch, gamma, beta, sum, y, mean, rstd, NULL});
}

// The residual sum without a norm, as at the end of a pipeline stage, on rows first to
// first + count - 1.
static void case_stage_end(Dump *d, int B, int T, int C, int64_t first, int64_t count, float p) {
    Lab *lab = &d->lab;
    snprintf(d->scope, sizeof d->scope, "stage_end_%dx%dx%d_rows%d_p%g", B, T, C, (int)count, (double)p);
    floatX *residual = random_x(lab, count * C, 0, 1), *branch = random_x(lab, count * C, 0, 1),
           *dresidual = random_x(lab, count * C, 0, 1), *x = poisoned_x(lab, count * C),
           *dbranch = poisoned_x(lab, count * C);
    float *branch_sum = poisoned_f(lab, C), *dbias = random_f(lab, C, 1);
    LayerNorm a = {B,
                   T,
                   C,
                   .dropout = dropout_of(p, DROPOUT_FFN),
                   .x = x,
                   .residual = residual,
                   .branch = branch,
                   .dresidual = dresidual,
                   .dbranch = p > 0.0f ? dbranch : NULL,
                   .branch_sum = branch_sum,
                   .rows = {first, count}};
    op_layernorm_forward(lab->stream, &a);
    op_layernorm_backward(lab->stream, &a);
    op_bias_gradient(lab->stream, dbias, p > 0.0f ? dbranch : dresidual, branch_sum, count, C, NULL, NULL);
    dump_x(d, "x", x, count * C, 'e');
    if (p > 0.0f) dump_x(d, "dbranch", dbranch, count * C, 'e');
    dump_x(d, "dresidual", dresidual, count * C, 'e');
    dump_f(d, "dbias", dbias, C, 't');
    release(lab, (void *[]){residual, branch, dresidual, x, dbranch, branch_sum, dbias, NULL});
}

static void case_layernorm_backward(Dump *d, int B, int T, int C, bool branch, float p) {
    Lab *lab = &d->lab;
    int64_t n = (int64_t)B * T;
    snprintf(d->scope, sizeof d->scope, "layernorm_backward_%dx%dx%d%s_p%g", B, T, C, branch ? "_branch" : "",
             (double)p);
    floatX *x = random_x(lab, n * C, 0.5, 1), *gamma = random_x(lab, C, 1, 0.1),
           *beta = random_x(lab, C, 0, 0.1), *y = poisoned_x(lab, n * C);
    floatX *dy = random_x(lab, n * C, 0, 1), *dresidual = random_x(lab, n * C, 0, 1),
           *dbranch = poisoned_x(lab, n * C);
    float *mean = poisoned_f(lab, n), *rstd = poisoned_f(lab, n), *dgamma = random_f(lab, C, 1),
          *dbeta = random_f(lab, C, 1), *dbias = random_f(lab, C, 1);
    float *branch_sum = poisoned_f(lab, C);
    LayerNorm a = {B,    T, C,    1e-5f,       dropout_of(p, DROPOUT_FFN), x, NULL, NULL, gamma,
                   beta, y, mean, .rstd = rstd};
    op_layernorm_forward(lab->stream, &a);
    a.dy = dy;
    a.dresidual = dresidual;
    a.dbranch = branch ? dbranch : NULL;
    a.dgamma = dgamma;
    a.dbeta = dbeta;
    a.branch_sum = branch_sum;
    op_layernorm_backward(lab->stream, &a);
    op_bias_gradient(lab->stream, dbias, branch ? dbranch : dresidual, branch_sum, n, C, NULL, NULL);
    dump_x(d, "dresidual", dresidual, n * C, 't');
    if (branch) dump_x(d, "dbranch", dbranch, n * C, 't');
    dump_f(d, "dgamma", dgamma, C, 't');
    dump_f(d, "dbeta", dbeta, C, 't');
    dump_f(d, "dbias", dbias, C, 't');
    release(lab, (void *[]){x, gamma, beta, y, dy, dresidual, dbranch, mean, rstd, dgamma, dbeta, dbias,
                            branch_sum, NULL});
}

// RMSNorm of a sum, forward and backward.
static void case_rmsnorm(Dump *d, int B, int T, int C, float p) {
    Lab *lab = &d->lab;
    int64_t n = (int64_t)B * T;
    snprintf(d->scope, sizeof d->scope, "rmsnorm_%dx%dx%d_p%g", B, T, C, (double)p);
    floatX *residual = random_x(lab, n * C, 0.5, 1), *branch = random_x(lab, n * C, 0, 1),
           *gamma = random_x(lab, C, 1, 0.1), *sum = poisoned_x(lab, n * C), *y = poisoned_x(lab, n * C),
           *dy = random_x(lab, n * C, 0, 1), *dresidual = random_x(lab, n * C, 0, 1),
           *dbranch = poisoned_x(lab, n * C);
    float *mean = poisoned_f(lab, n), *rstd = poisoned_f(lab, n), *dgamma = random_f(lab, C, 1);
    LayerNorm a = {.B = B,
                   .T = T,
                   .C = C,
                   .epsilon = 1e-5f,
                   .dropout = dropout_of(p, DROPOUT_FFN),
                   .x = sum,
                   .residual = residual,
                   .branch = branch,
                   .gamma = gamma,
                   .y = y,
                   .mean = mean,
                   .rstd = rstd,
                   .dy = dy,
                   .dresidual = dresidual,
                   .dbranch = p > 0.0f ? dbranch : NULL,
                   .dgamma = dgamma,
                   .rms = true};
    op_layernorm_forward(lab->stream, &a);
    op_layernorm_backward(lab->stream, &a);
    dump_x(d, "sum", sum, n * C, 'e');
    dump_x(d, "y", y, n * C, 't');
    dump_f(d, "rstd", rstd, n, 't');
    dump_x(d, "dresidual", dresidual, n * C, 't');
    if (p > 0.0f) dump_x(d, "dbranch", dbranch, n * C, 't');
    dump_f(d, "dgamma", dgamma, C, 't');
    release(lab,
            (void *[]){residual, branch, gamma, sum, y, dy, dresidual, dbranch, mean, rstd, dgamma, NULL});
}

static void cases_layernorm(Dump *d) {
    const int widths[] = {8, 64, 256, 512, 768, 1024, 1600, 2048, 2560, 4096, 5120, 8192, 12288};
    for (size_t i = 0; i < sizeof widths / sizeof widths[0]; i++) {
        case_layernorm_forward(d, 1, 5, widths[i], 0);
        case_residual(d, 1, 3, widths[i], 0.1f);
        case_layernorm_backward(d, 1, 11, widths[i], true, 0.1f);
    }
    for (size_t i = 0; i < sizeof widths / sizeof widths[0]; i++) case_rmsnorm(d, 1, 11, widths[i], 0.0f);
    case_rmsnorm(d, 2, 9, 768, 0.1f);
    case_rmsnorm(d, 3, 2001, 64, 0.0f);
    case_layernorm_forward(d, 1, 33, 768, 30);
    case_residual(d, 3, 17, 768, 0.0f);
    case_layernorm_backward(d, 2, 9, 768, false, 0.0f);
    case_layernorm_backward(d, 2, 9, 768, true, 0.0f);
    // More rows than a GPU's resident blocks process at once.
    case_layernorm_backward(d, 3, 2001, 64, true, 0.1f);
    case_layernorm_backward(d, 1, 1500, 2048, true, 0.1f);
    case_stage_end(d, 3, 50, 8, 0, 150, 0.1f);
    case_stage_end(d, 3, 50, 1600, 40, 75, 0.1f);
    case_stage_end(d, 3, 50, 768, 40, 75, 0.0f);
    case_stage_end(d, 2, 40000, 264, 0, 80000, 0.1f);  // more rows than resident blocks process at once
}

// --- sums over ranks -----------------------------------------------------------------------------

// shift: offset of the tensors from 16-byte alignment, in elements.
static void case_parts(Dump *d, int64_t n, int ranks, int C, int shift) {
    Lab *lab = &d->lab;
    snprintf(d->scope, sizeof d->scope, "parts_%lldx%d_bias%d_shift%d", (long long)n, ranks, C, shift);
    floatX *parts = random_x(lab, ranks * n + shift, 0, 1), *bias = random_x(lab, C + 1, 0, 1),
           *y = poisoned_x(lab, n + shift + 1);
    float *gradients = random_f(lab, ranks * n + shift, 1), *sum = poisoned_f(lab, n + shift + 1);
    SumParts a = {y + shift, parts + shift, n, ranks, C ? bias : NULL, C};
    op_sum_parts(lab->stream, &a);
    op_add_parts(lab->stream, sum + shift, gradients + shift, n, ranks);
    dump_x(d, "sum", y, n + shift + 1, 'e');
    dump_f(d, "gradients", sum, n + shift + 1, 'e');
    release(lab, (void *[]){parts, bias, y, gradients, sum, NULL});
}

static void cases_parts(Dump *d) {
    case_parts(d, 64 * 768, 2, 768, 0);
    case_parts(d, 64 * 768, 8, 0, 0);
    case_parts(d, 33 * 40, 4, 40, 1);
    case_parts(d, 1031, 3, 0, 0);
    case_parts(d, 1032, 3, 43, 0);
    case_parts(d, 1, 1, 1, 0);
}

// --- linear layers -------------------------------------------------------------------------------

static void case_linear(Dump *d, int64_t n, int C, int OC, bool bias, bool gelu) {
    Lab *lab = &d->lab;
    snprintf(d->scope, sizeof d->scope, "linear_%dx%dx%d%s%s", (int)n, C, OC, bias ? "_bias" : "",
             gelu ? "_gelu" : "");
    void *workspace = poisoned(lab, op_linear_workspace_bytes(n, C, OC));
    floatX *x = random_x(lab, n * C, 0, 1), *w = random_x(lab, (int64_t)OC * C, 0, 0.05),
           *b = random_x(lab, OC, 0, 0.5);
    floatX *y = poisoned_x(lab, n * OC), *pre = poisoned_x(lab, n * OC);
    Linear a = {n, C, OC, x, w, bias ? b : NULL, y, gelu ? pre : NULL, .workspace = workspace};
    op_linear_forward(lab->stream, &a);
    dump_x(d, "y", y, n * OC, 't');
    if (gelu) dump_x(d, "pre", pre, n * OC, 't');
    floatX *dy = random_x(lab, n * OC, 0, 1), *input_pre = random_x(lab, n * C, 0, 1),
           *dx = poisoned_x(lab, n * C);
    float *dw = random_f(lab, (int64_t)OC * C, 1), *db = random_f(lab, OC, 1),
          *dpre_bias = random_f(lab, C, 1);
    a.dy = dy;
    a.x_pre = gelu ? input_pre : NULL;
    a.dx = dx;
    a.dw = dw;
    a.dpre_bias = gelu ? dpre_bias : NULL;
    a.overwrite = true;
    op_linear_backward(lab->stream, &a);
    dump_x(d, "dx", dx, n * C, 't');
    a.dx = NULL;  // the second micro-batch does not compute dx
    a.overwrite = false;
    op_linear_backward(lab->stream, &a);
    for (int i = 0; bias && i < 2; i++) op_bias_gradient(lab->stream, db, dy, NULL, n, OC, workspace, NULL);
    dump_f(d, "dw", dw, (int64_t)OC * C, 't');
    dump_f(d, "dbias", db, OC, 't');
    dump_f(d, "dpre_bias", dpre_bias, C, 't');
    release(lab, (void *[]){workspace, x, w, b, y, pre, dy, input_pre, dx, dw, db, dpre_bias, NULL});
}

static void case_gelu(Dump *d, int64_t n) {
    snprintf(d->scope, sizeof d->scope, "gelu_%d", (int)n);
    floatX *pre = random_x(&d->lab, n, 0, 3), *y = poisoned_x(&d->lab, n);
    op_gelu_forward(d->lab.stream, y, pre, n);
    dump_x(d, "y", y, n, 't');
    release(&d->lab, (void *[]){pre, y, NULL});
}

static void cases_linear(Dump *d) {
    case_linear(d, 37, 64, 192, true, false);
    case_linear(d, 130, 256, 1024, true, true);
    case_linear(d, 256, 768, 768, true, true);
    case_linear(d, 128, 1024, 256, false, false);
    case_linear(d, 1, 64, 512, false, false);  // generation has one row
    case_linear(d, 1, 1000, 770, true, true);
    case_linear(d, 1, 4096, 72, false, true);
    case_linear(d, 2048, 80, 240, true, false);
}

// --- norms of queries and keys, SwiGLU, rotary positions -----------------------------------------

static void case_head_norm(Dump *d, int64_t n, int groups, int queries, int HD, bool rms) {
    Lab *lab = &d->lab;
    int64_t all = n * groups * (queries + 2) * HD;
    snprintf(d->scope, sizeof d->scope, "%s_%dx%dx%dx%d", rms ? "head_rms" : "head_norm", (int)n, groups,
             queries, HD);
    floatX *x = random_x(lab, all, 0.2, 1), *dy = random_x(lab, all, 0, 1),
           *before = poisoned_x(lab, n * groups * (queries + 1) * HD), *gamma[2], *beta[2];
    float *dgamma[2], *dbeta[2];
    HeadNorm a = {.N = n,
                  .groups = groups,
                  .queries = queries,
                  .HD = HD,
                  .epsilon = 1e-5f,
                  .rms = rms,
                  .x = x,
                  .before = before};
    for (int i = 0; i < 2; i++) {
        a.gamma[i] = gamma[i] = random_x(lab, HD, 1, 0.3);
        beta[i] = random_x(lab, HD, 0, 0.3);
        a.dgamma[i] = dgamma[i] = random_f(lab, HD, 1);
        dbeta[i] = random_f(lab, HD, 1);
        if (!rms) a.beta[i] = beta[i], a.dbeta[i] = dbeta[i];
    }
    op_head_norm_forward(lab->stream, &a);
    a.x = dy;
    op_head_norm_backward(lab->stream, &a);
    dump_x(d, "before", before, n * groups * (queries + 1) * HD, 'e');
    dump_x(d, "y", x, all, 't');
    dump_x(d, "dx", dy, all, 't');
    for (int i = 0; i < 2; i++) {
        dump_f(d, i ? "dgamma_keys" : "dgamma_queries", dgamma[i], HD, 't');
        dump_f(d, i ? "dbeta_keys" : "dbeta_queries", dbeta[i], HD, 't');
        release(lab, (void *[]){gamma[i], beta[i], dgamma[i], dbeta[i], NULL});
    }
    release(lab, (void *[]){x, dy, before, NULL});
}

static void case_swiglu(Dump *d, int64_t n, int F) {
    Lab *lab = &d->lab;
    snprintf(d->scope, sizeof d->scope, "swiglu_%dx%d", (int)n, F);
    floatX *pre = random_x(lab, n * 2 * F, 0, 2), *dy = random_x(lab, n * F, 0, 1),
           *y = poisoned_x(lab, n * F), *dpre = poisoned_x(lab, n * 2 * F);
    Swiglu a = {n, F, pre, y, dy, dpre, NULL};
    op_swiglu_forward(lab->stream, &a);
    op_swiglu_backward(lab->stream, &a);
    dump_x(d, "y", y, n * F, 't');
    dump_x(d, "dpre", dpre, n * 2 * F, 't');
    release(lab, (void *[]){pre, dy, y, dpre, NULL});
}

static void case_newton_schulz(Dump *d, int64_t rows, int64_t columns, float c) {
    Lab *lab = &d->lab;
    int64_t n = rows * columns;
    snprintf(d->scope, sizeof d->scope, "newton_schulz_%dx%d_c%g", (int)rows, (int)columns, (double)c);
    NewtonSchulzStep step[3] = {{3.3656576f, -3.3420992f, c}, {2.5744352f, -1.4957376f, c}, {1.9f, -1.2f, c}};
    floatX *x = random_x(lab, n, 0, 1 / sqrt((double)n));
    void *workspace = poisoned(lab, op_newton_schulz_bytes(rows, columns));
    NewtonSchulz a = {rows, columns, step, 3, x, workspace};
    dump_x(d, "y", op_newton_schulz(lab->stream, &a), n, 't');
    release(lab, (void *[]){x, workspace, NULL});
}

// The kernels around Newton-Schulz, on queries, keys and values of `groups` groups.
static void case_muon(Dump *d, int64_t groups, int64_t queries, int64_t columns, bool nesterov) {
    Lab *lab = &d->lab;
    int64_t group_rows = queries + 16, n = groups * group_rows * columns, part = groups * queries * columns;
    snprintf(d->scope, sizeof d->scope, "muon_%dx%dx%d", (int)groups, (int)queries, (int)columns);
    StepStatus status = {.applied = 1, .clip_coefficient = 0.3f, .learning_rate = 0.02f};
    StepStatus *control = (StepStatus *)upload(lab, &status, sizeof status);
    uint64_t none = 0, *fault = (uint64_t *)upload(lab, &none, sizeof none);
    float *grads = random_f(lab, n, 1), *momentum = random_f(lab, n, 1), *master = random_f(lab, n, 1);
    float *partials = poisoned_f(lab, ceil_div64(part, 32)), *sum = poisoned_f(lab, 1);
    floatX *x = poisoned_x(lab, part), *o = random_x(lab, part, 0, 1);
    MuonPart a = {.control = control,
                  .grads = grads,
                  .momentum = momentum,
                  .master = master,
                  .mu = 0.9f,
                  .one_minus_mu = 1.0f - 0.9f,
                  .nesterov = nesterov,
                  .scale = 3.5f,
                  .weight_decay = 0.1f,
                  .rows = groups * queries,
                  .columns = columns,
                  .group_rows = group_rows,
                  .first_row = 8,
                  .part_rows = queries,
                  .fault = fault,
                  .code = 3};
    kernel_muon_momentum(lab->stream, &a, n, NULL);
    kernel_muon_squares(lab->stream, &a, partials);
    dump_f(d, "partials", partials, ceil_div64(part, 32), 'e');
    kernel_tree_sum(lab->stream, sum, partials, ceil_div64(part, 32));
    kernel_muon_normalize(lab->stream, &a, sum, x);
    kernel_muon_apply(lab->stream, &a, o);
    dump_f(d, "momentum", momentum, n, 'e');
    dump_f(d, "master", master, n, 'e');
    dump_x(d, "x", x, part, 'e');
    release(lab, (void *[]){control, fault, grads, momentum, master, partials, sum, x, o, NULL});
}

// Two tensor-parallel ranks that divide the columns of a matrix, and momentum in bf16.
static void case_muon_columns(Dump *d, int64_t rows, int64_t own) {
    Lab *lab = &d->lab;
    int64_t n = rows * own, whole = 2 * n;
    snprintf(d->scope, sizeof d->scope, "muon_columns_%dx%d", (int)rows, (int)own);
    StepStatus status = {.applied = 1, .clip_coefficient = 0.3f, .learning_rate = 0.02f};
    StepStatus *control = (StepStatus *)upload(lab, &status, sizeof status);
    uint64_t none = 0, *fault = (uint64_t *)upload(lab, &none, sizeof none);
    uint16_t *momentum = (uint16_t *)xcalloc((size_t)n, sizeof *momentum, "the momentum");
    for (int64_t i = 0; i < n; i++) momentum[i] = bf16_from_float((float)(i % 37) / 16.0f - 1.0f);
    uint16_t *narrow = (uint16_t *)upload(lab, momentum, (size_t)n * sizeof *momentum);
    free(momentum);
    float *grads = random_f(lab, n, 1), *master = random_f(lab, n, 1), *directions = random_f(lab, whole, 1);
    float *partials = poisoned_f(lab, ceil_div64(whole, 32)), *sum = poisoned_f(lab, 1);
    floatX *x = poisoned_x(lab, whole), *o = random_x(lab, whole, 0, 1);
    MuonPart a = {.control = control,
                  .grads = grads,
                  .momentum_bf16 = narrow,
                  .master = master,
                  .mu = 0.9f,
                  .one_minus_mu = 1.0f - 0.9f,
                  .nesterov = true,
                  .scale = 3.5f,
                  .weight_decay = 0.1f,
                  .rows = rows,
                  .columns = own,
                  .group_rows = rows,
                  .part_rows = rows,
                  .sliced = {2 * own, own, n},
                  .fault = fault,
                  .code = 3};
    kernel_muon_momentum(lab->stream, &a, n, directions + n);
    dump_f(d, "directions", directions, whole, 'e');
    MuonPart all = a;
    all.momentum_bf16 = NULL, all.nesterov = false;
    all.grads = all.momentum = directions;
    all.columns = 2 * own;
    all.gathered = a.sliced, all.sliced = (MuonColumns){0};
    kernel_muon_squares(lab->stream, &all, partials);
    dump_f(d, "partials", partials, ceil_div64(whole, 32), 'e');
    kernel_tree_sum(lab->stream, sum, partials, ceil_div64(whole, 32));
    kernel_muon_normalize(lab->stream, &all, sum, x);
    kernel_muon_apply(lab->stream, &a, o + own);
    dump_f(d, "master", master, n, 'e');
    dump_x(d, "x", x, whole, 'e');
    release(lab, (void *[]){control, fault, narrow, grads, master, directions, partials, sum, x, o, NULL});
}

static void cases_muon(Dump *d) {
    case_muon_columns(d, 24, 40);
    case_muon_columns(d, 256, 64);

    case_muon(d, 1, 8, 24, false);
    case_muon(d, 4, 64, 256, true);
    case_muon(d, 3, 8, 1000, false);
    if (d->own_kernels) return;
    case_newton_schulz(d, 64, 256, 0.5f);
    case_newton_schulz(d, 256, 64, 0.5f);
    case_newton_schulz(d, 200, 200, 0.0f);
    case_newton_schulz(d, 768, 3072, 0.5f);  // the MLP of the 125M model
    case_newton_schulz(d, 3072, 768, 0.5f);
}

static void case_rope(Dump *d, int B, int T, int groups, int heads, int HD, int columns) {
    Lab *lab = &d->lab;
    int64_t n = (int64_t)B * T * groups * heads * HD;
    snprintf(d->scope, sizeof d->scope, "rope_%dx%dx%dx%dx%d_of%d", B, T, groups, heads, HD, columns);
    floatX *x = random_x(lab, n, 0, 1);
    float *table = random_f(lab, (int64_t)T * columns, 1);  // arbitrary values
    Rope a = {B, T, groups, heads, heads - 1, HD, columns, table, x, false, NULL, NULL}, b = a;
    b.by_kind = poisoned_x(lab, n);
    op_rope(lab->stream, &b);
    dump_x(d, "by_kind", b.by_kind, n, 'e');
    op_rope(lab->stream, &a);
    dump_x(d, "x", x, n, 'e');
    a.back = b.back = true;
    op_rope(lab->stream, &a);
    dump_x(d, "back", x, n, 'e');
    b.x = poisoned_x(lab, n);
    op_rope(lab->stream, &b);
    dump_x(d, "back_by_kind", b.x, n, 'e');
    release(lab, (void *[]){x, table, b.x, b.by_kind, NULL});
}

static void cases_llama(Dump *d) {
    case_head_norm(d, 5, 2, 3, 64, true);
    case_head_norm(d, 300, 4, 4, 128, true);
    case_head_norm(d, 1000, 3, 1, 80, false);
    case_head_norm(d, 37, 2, 2, 8, false);
    case_head_norm(d, 70, 1, 6, 256, false);
    case_swiglu(d, 1, 8);
    case_swiglu(d, 37, 5632);
    case_swiglu(d, 300, 264);
    case_rope(d, 2, 100, 3, 3, 64, 64);
    case_rope(d, 1, 77, 2, 6, 128, 128);
    case_rope(d, 3, 5, 2, 3, 80, 40);  // half of the columns is not a multiple of 8
    case_rope(d, 1, 9, 1, 10, 8, 2);
}

// --- head ----------------------------------------------------------------------------------------

static void case_head(Dump *d, int64_t n, int C, int Vp, bool mask, bool backward) {
    Lab *lab = &d->lab;
    snprintf(d->scope, sizeof d->scope, "head_%dx%dx%d%s%s", (int)n, C, Vp, mask ? "_mask" : "",
             backward ? "" : "_evaluation");
    void *workspace = poisoned(lab, op_head_workspace_bytes(n, C, Vp));
    floatX *x = random_x(lab, n * C, 0, 1), *wte = random_x(lab, (int64_t)Vp * C, 0, 1.0 / sqrt((double)C)),
           *dx = poisoned_x(lab, n * C);
    int32_t *targets = random_ids(lab, n, Vp);
    float *losses = poisoned_f(lab, n), *dwte = random_f(lab, (int64_t)Vp * C, 1e-3),
          *loss_sum = random_f(lab, 1, 1);
    float *weights = (float *)xmalloc((size_t)n * sizeof(float), "the loss mask");
    for (int64_t i = 0; i < n; i++) weights[i] = i % 5 == 2 ? 0.0f : 1.0f;
    float *loss_mask = (float *)upload(lab, weights, (size_t)n * sizeof(float));
    Head a = {n,
              C,
              0,
              Vp,
              x,
              wte,
              targets,
              mask ? loss_mask : NULL,
              1.0f / (float)n,
              losses,
              loss_sum,
              .workspace = workspace};
    a.dx = backward ? dx : NULL;
    a.dwte = backward ? dwte : NULL;
    a.overwrite = mask;
    op_head(lab->stream, &a);
    dump_f(d, "losses", losses, n, 't');
    dump_f(d, "loss_sum", loss_sum, 1, 't');
    if (backward) dump_x(d, "dx", dx, n * C, 't');
    if (backward) dump_f(d, "dwte", dwte, (int64_t)Vp * C, 't');
    free(weights);
    release(lab, (void *[]){workspace, x, wte, dx, targets, losses, dwte, loss_sum, loss_mask, NULL});
}

// Two ranks, each with half of the vocabulary. Their softmax statistics are combined between the
// two calls of a chunk.
static void case_head_of_two(Dump *d, int64_t n, int C, int V) {
    Lab *lab = &d->lab;
    int64_t half = V / 2, chunk = op_head_chunk_rows(n, (int)half);
    snprintf(d->scope, sizeof d->scope, "head_%dx%dx%d_of_two", (int)n, C, V);
    floatX *x = random_x(lab, n * C, 0, 1), *wte = random_x(lab, (int64_t)V * C, 0, 1.0 / sqrt((double)C));
    floatX *dx = poisoned_x(lab, 2 * n * C);
    int32_t *targets = random_ids(lab, n, V);
    float *losses = poisoned_f(lab, 2 * n), *dwte = poisoned_f(lab, (int64_t)V * C);
    HeadStatistics *all = (HeadStatistics *)poisoned(lab, (size_t)(2 * chunk) * sizeof *all);
    Head rank[2];
    for (int r = 0; r < 2; r++) {
        void *workspace = poisoned(lab, op_head_workspace_bytes(n, C, (int)half));
        rank[r] = (Head){n,
                         C,
                         r * (int)half,
                         (int)half,
                         x,
                         wte + r * half * C,
                         targets,
                         NULL,
                         1.0f / (float)n,
                         losses + r * n,
                         NULL,
                         dx + r * n * C,
                         dwte + r * half * C,
                         true,
                         workspace,
                         .all = all,
                         .ranks = 2};
    }
    for (int64_t row = 0; row < n; row += chunk) {
        int64_t rows = n - row < chunk ? n - row : chunk;
        for (int r = 0; r < 2; r++) {
            rank[r].own = all + r * rows;
            op_head_logits(lab->stream, &rank[r], row, rows);
        }
        for (int r = 0; r < 2; r++) op_head_gradients(lab->stream, &rank[r], row, rows);
    }
    dump_f(d, "losses", losses, 2 * n, 't');
    dump_x(d, "dx", dx, 2 * n * C, 't');
    dump_f(d, "dwte", dwte, (int64_t)V * C, 't');
    release(lab,
            (void *[]){x, wte, dx, targets, losses, dwte, all, rank[0].workspace, rank[1].workspace, NULL});
}

// Integers from -2 to 2. Their logits are exact in every precision and order, and many are equal.
static floatX *small_numbers(Lab *lab, int64_t n) {
    int32_t *ids = random_ids(lab, n, 5), *host = (int32_t *)xmalloc((size_t)n * sizeof *host, "numbers");
    floatX *numbers = (floatX *)xmalloc((size_t)n * sizeof *numbers, "numbers");
    copy_to_host(lab->stream, host, ids, (size_t)n * sizeof *host);
    stream_synchronize(lab->stream);
    for (int64_t i = 0; i < n; i++) numbers[i] = floatX_from_float((float)(host[i] - 2));
    floatX *memory = (floatX *)upload(lab, numbers, (size_t)n * sizeof *numbers);
    free(host);
    free(numbers);
    release(lab, (void *[]){ids, NULL});
    return memory;
}

static void dump_scores(Dump *d, const HeadScore *memory, int64_t n) {
    HeadScore *scores = (HeadScore *)xmalloc((size_t)n * sizeof *scores, "scores");
    float *part[4];
    copy_to_host(d->lab.stream, scores, memory, (size_t)n * sizeof *scores);
    stream_synchronize(d->lab.stream);
    for (int p = 0; p < 4; p++) {
        float *values = (float *)xmalloc((size_t)n * sizeof(float), "scores");
        for (int64_t i = 0; i < n; i++) {
            values[i] = p == 0   ? scores[i].max
                        : p == 1 ? scores[i].sum
                        : p == 2 ? scores[i].target
                                 : (float)scores[i].best;
        }
        part[p] = (float *)upload(&d->lab, values, (size_t)n * sizeof(float));
        free(values);
    }
    dump_f(d, "max", part[0], n, 'e');
    dump_f(d, "sum", part[1], n, 't');
    dump_f(d, "target", part[2], n, 'e');
    dump_f(d, "best", part[3], n, 'e');
    release(&d->lab, (void *[]){part[0], part[1], part[2], part[3], NULL});
    free(scores);
}

// A rank with ids first to first + rows - 1, of which the first `columns` are not padding. Targets
// are ids of all ranks; every seventh row has none.
static void case_head_scores(Dump *d, int64_t n, int C, int first, int rows, int columns) {
    Lab *lab = &d->lab;
    int64_t chunk = op_head_chunk_rows(n, rows);
    snprintf(d->scope, sizeof d->scope, "head_scores_%dx%dx%d_from%d_real%d", (int)n, C, rows, first,
             columns);
    void *workspace = poisoned(lab, op_head_workspace_bytes(n, C, rows));
    floatX *x = small_numbers(lab, n * C), *wte = small_numbers(lab, (int64_t)rows * C);
    int32_t *ids = random_ids(lab, n, first + columns), *host = (int32_t *)xmalloc((size_t)n * 4, "targets");
    copy_to_host(lab->stream, host, ids, (size_t)n * sizeof *host);
    stream_synchronize(lab->stream);
    for (int64_t i = 0; i < n; i += 7) host[i] = -1;
    int32_t *targets = (int32_t *)upload(lab, host, (size_t)n * sizeof *host);
    HeadScore *scores = (HeadScore *)poisoned(lab, (size_t)n * sizeof *scores);
    for (int64_t row = 0; row < n; row += chunk) {
        Head a = {.N = n,
                  .C = C,
                  .first_row = first,
                  .rows = rows,
                  .x = x,
                  .wte = wte,
                  .targets = targets,
                  .workspace = workspace,
                  .columns = columns,
                  .scores = scores + row};
        op_head_scores(lab->stream, &a, row, n - row < chunk ? n - row : chunk);
    }
    dump_scores(d, scores, n);
    free(host);
    release(lab, (void *[]){workspace, x, wte, ids, targets, scores, NULL});
}

static void cases_head(Dump *d) {
    case_head_scores(d, 67, 64, 0, 512, 509);
    case_head_scores(d, 300, 16, 512, 5120, 4097);
    case_head_scores(d, 40, 16, 50304, 50304, 50257);
    case_head_scores(d, 9, 8, 64, 64, 1);
    case_head_of_two(d, 67, 64, 512);
    case_head(d, 67, 64, 512, false, true);
    case_head(d, 200, 128, 1024, true, true);
    case_head(d, 200, 128, 1024, true, false);
    case_head(d, 40, 16, 50304, false, true);
    case_head(d, 40, 64, 136, true, true);
    // On a GPU: several chunks, and rows larger than shared memory.
    case_head(d, 4200, 16, 131072, true, true);
}

// --- attention -----------------------------------------------------------------------------------

// documents: 0 none, 1 random document starts, 2 all starts are 0 (same result as without
// documents, but excludes fused kernels on a GPU). groups: groups of heads that share keys and
// values, or 0.
// window: keys that a query sees, or 0.
// Packs the sequences of an attention without dropout: this program's kernels and cuDNN's have
// different masks. Returns the memory, NULL if the backend has no use for it.
static void *pack(Lab *lab, Attention *a, const int32_t *doc_start) {
    size_t rows = (size_t)a->B * (size_t)a->T * sizeof(int32_t);
    size_t bytes = op_attention_pack_bytes(a->B, a->T, doc_start != NULL);
    if (bytes == 0 || a->dropout.p > 0) return NULL;
    int32_t *start = doc_start ? (int32_t *)xmalloc(rows, "document starts") : NULL;
    void *packed = poisoned(lab, bytes);
    if (start) copy_to_host(lab->stream, start, doc_start, rows);
    stream_synchronize(lab->stream);
    a->sequences = op_attention_pack(lab->stream, a, start, packed);
    a->packed = packed;
    free(start);
    return packed;
}

static void case_window(Dump *d, int B, int T, int NH, int groups, int HD, int documents, float p,
                        int window) {
    Lab *lab = &d->lab;
    int64_t out_size = (int64_t)B * T * NH * HD;
    int64_t qkv_size = (int64_t)B * T * (NH + 2 * (groups ? groups : NH)) * HD;
    char shared[48] = "";
    if (d->own_kernels && !documents) return;
    if (groups) snprintf(shared, sizeof shared, "_groups%d", groups);
    if (window) snprintf(shared + strlen(shared), sizeof shared - strlen(shared), "_window%d", window);
    snprintf(d->scope, sizeof d->scope, "attention_%dx%dx%dx%d%s%s_p%g", B, T, NH, HD, shared,
             documents == 1 ? "_documents"
             : documents    ? "_plain"
                            : "",
             (double)p);
    int32_t *start, *positions;
    random_documents(lab, B, T, documents == 1, &start, &positions);
    void *workspace = poisoned(lab, op_attention_workspace_bytes(B, T, NH, HD, groups, true)),
         *saved = poisoned(lab, op_attention_saved_bytes(B, T, NH, HD));
    floatX *qkv = random_x(lab, qkv_size, 0, 1), *dout = random_x(lab, out_size, 0, 1),
           *out = poisoned_x(lab, out_size), *dqkv = poisoned_x(lab, qkv_size);
    Dropout dropout = p > 0.0f ? dropout_of(p, DROPOUT_ATTENTION) : NONE;
    Attention a = {B,
                   T,
                   NH,
                   HD,
                   dropout,
                   qkv,
                   documents ? start : NULL,
                   out,
                   saved,
                   dout,
                   dqkv,
                   .workspace = workspace,
                   .groups = groups,
                   .window = window};
    const bool packs = documents != 2 && !d->own_kernels;
    void *packed = packs ? pack(lab, &a, a.doc_start) : NULL;
    op_attention_forward(lab->stream, &a);
    op_attention_backward(lab->stream, &a);
    dump_x(d, "out", out, out_size, 't');
    dump_x(d, "dqkv", dqkv, qkv_size, 't');
    a.by_kind = true;  // reads the same memory as a different layout
    if (groups) {
        void *by_group = packed;
        packed = by_group ? pack(lab, &a, a.doc_start) : NULL;
        device_free(lab->device, by_group);
        op_attention_forward(lab->stream, &a);
        op_attention_backward(lab->stream, &a);
        dump_x(d, "out_by_kind", out, out_size, 't');
        dump_x(d, "dqkv_by_kind", dqkv, qkv_size, 't');
    }
    device_free(lab->device, packed);
    release(lab, (void *[]){start, positions, workspace, saved, qkv, dout, out, dqkv, NULL});
}

static void case_groups(Dump *d, int B, int T, int NH, int groups, int HD, int documents, float p) {
    case_window(d, B, T, NH, groups, HD, documents, p, 0);
}

static void case_attention(Dump *d, int B, int T, int NH, int HD, int documents, float p) {
    case_groups(d, B, T, NH, 0, HD, documents, p);
}

static void cases_windows(Dump *d) {
    case_window(d, 2, 256, 4, 0, 64, 0, 0, 1);
    case_window(d, 2, 256, 4, 0, 64, 0, 0, 2);
    case_window(d, 1, 512, 4, 2, 128, 0, 0, 100);
    case_window(d, 1, 2048, 2, 0, 64, 0, 0, 257);
    case_window(d, 2, 256, 3, 0, 64, 2, 0, 64);
    case_window(d, 1, 300, 4, 2, 128, 1, 0, 65);
    case_window(d, 1, 300, 2, 0, 80, 2, 0.1f, 7);
    case_window(d, 2, 512, 4, 0, 64, 1, 0, 9);
}

static void cases_attention(Dump *d) {
    case_groups(d, 2, 256, 8, 2, 64, 0, 0);
    case_groups(d, 1, 512, 6, 1, 128, 0, 0);
    case_groups(d, 3, 128, 12, 4, 80, 0, 0);
    case_groups(d, 2, 100, 6, 2, 64, 0, 0);  // not divisible by 64: packed on a GPU
    case_groups(d, 2, 130, 4, 1, 128, 1, 0.1f);
    case_groups(d, 2, 320, 8, 2, 64, 1, 0);
    case_groups(d, 4, 1000, 4, 1, 128, 1, 0);
    case_groups(d, 1, 200, 6, 3, 256, 2, 0);
    case_attention(d, 2, 64, 3, 64, 0, 0);
    case_attention(d, 1, 256, 5, 80, 0, 0);
    case_attention(d, 3, 192, 3, 128, 0, 0);
    case_attention(d, 1, 1024, 2, 64, 0, 0);
    case_attention(d, 1, 512, 2, 128, 0, 0);
    case_attention(d, 1, 128, 2, 96, 0, 0);
    case_attention(d, 1, 4096, 1, 128, 0, 0);
    case_attention(d, 1, 8192, 1, 80, 0, 0);
    case_attention(d, 1, 128, 1, 256, 0, 0);
    case_attention(d, 1, 1, 2, 64, 0, 0);  // lengths not divisible by 64: packed on a GPU
    case_attention(d, 1, 37, 1, 8, 0, 0);
    case_attention(d, 2, 100, 3, 80, 0, 0);
    case_attention(d, 2, 256, 3, 64, 2, 0);
    case_attention(d, 1, 160, 3, 96, 2, 0);
    case_attention(d, 1, 130, 3, 128, 2, 0);
    case_attention(d, 1, 130, 2, 200, 2, 0);
    case_attention(d, 1, 1000, 2, 64, 2, 0);
    case_attention(d, 3, 300, 3, 64, 1, 0);
    case_attention(d, 2, 257, 2, 128, 1, 0);
    case_attention(d, 2, 100, 3, 64, 1, 0.1f);
    case_attention(d, 1, 128, 3, 80, 2, 0.2f);
}

// T new positions after `before` cached ones. The cache has unused capacity.
static void case_cached_window(Dump *d, int T, int before, int NH, int groups, int HD, int window) {
    Lab *lab = &d->lab;
    int keys = before + T, room = keys + 7;
    int64_t row = (int64_t)(NH + 2 * groups) * HD, out_size = (int64_t)T * NH * HD;
    int64_t cache_size = (int64_t)groups * room * HD;
    snprintf(d->scope, sizeof d->scope, "cached_%d+%dx%dx%dx%d_window%d", before, T, NH, groups, HD, window);
    floatX *qkv = random_x(lab, keys * row, 0, 1), *out = poisoned_x(lab, out_size),
           *cached = poisoned_x(lab, cache_size), *values = poisoned_x(lab, cache_size);
    void *workspace = poisoned(lab, op_cached_attention_workspace_bytes(T, room, NH, HD));
    CachedAttention a = {.T = before,
                         .room = room,
                         .NH = NH,
                         .HD = HD,
                         .groups = groups,
                         .window = window,
                         .qkv = qkv,
                         .keys = cached,
                         .values = values,
                         .out = out,
                         .workspace = workspace};
    op_cache_append(lab->stream, &a);
    a.T = T;
    a.start = before;
    a.qkv = qkv + before * row;
    op_cache_append(lab->stream, &a);
    op_cached_attention(lab->stream, &a);
    dump_x(d, "out", out, out_size, 't');
    // The cached keys of the first group are copies, so they must be exact.
    dump_x(d, "keys", cached, (int64_t)keys * HD, 'e');
    release(lab, (void *[]){qkv, out, cached, values, workspace, NULL});
}

static void case_cached(Dump *d, int T, int before, int NH, int groups, int HD) {
    case_cached_window(d, T, before, NH, groups, HD, 0);
}

static void cases_cached(Dump *d) {
    case_cached_window(d, 1, 1000, 16, 4, 80, 1);
    case_cached_window(d, 1, 1000, 8, 2, 128, 700);
    case_cached_window(d, 40, 300, 4, 2, 64, 129);
    case_cached(d, 1, 0, 3, 3, 64);
    case_cached(d, 1, 63, 12, 12, 64);
    case_cached(d, 1, 64, 8, 2, 128);
    case_cached(d, 1, 1000, 16, 4, 80);
    case_cached(d, 5, 130, 6, 1, 256);
    case_cached(d, 40, 300, 4, 2, 96);
    case_cached(d, 1, 5000, 2, 2, 8);
}

int main(int argc, char **argv) {
    Site site = {.rank = -1, .phase = "ops"};
    if (argc < 2) {
        fprintf(stderr, "usage: ops_dump FILE [--deterministic | --own-kernels]\n");
        return EXIT_USAGE;
    }
    Dump d = {.lab = lab_open(&site), .file = fopen(argv[1], "wb")};
    if (!d.file) {
        fprintf(stderr, "%s cannot be written\n", argv[1]);
        return EXIT_USAGE;
    }
    device_set_deterministic(d.lab.device, argc > 2 && strcmp(argv[2], "--deterministic") == 0);
    d.own_kernels = argc > 2 && strcmp(argv[2], "--own-kernels") == 0;
    fprintf(d.file, "opsdump1\n");
    case_init(&d, 1, 0.02);
    case_init(&d, 60001, 0.02);
    case_init(&d, 60001, 0.02 / 7);
    case_init(&d, 1200002, 0.02);
    case_init(&d, 777, 0);
    case_init(&d, 777, -1);
    case_init_part(&d, 3, 40, 0, 1001);
    case_init_part(&d, 0, 77, 0, 500);
    case_init_part(&d, 5, 77, 501, 333);
    case_embedding(&d, 3, 200, 64, 50, false, 0.0f);
    case_embedding(&d, 3, 200, 768, 50, true, 0.1f);
    case_embedding(&d, 1, 7, 8, 5, false, 0.0f);
    case_embedding(&d, 2, 3000, 264, 20, true, 0.5f);
    cases_layernorm(&d);
    cases_parts(&d);
    case_gelu(&d, 8);
    case_gelu(&d, 40000);
    if (!d.own_kernels) cases_linear(&d);
    if (!d.own_kernels) cases_head(&d);
    cases_llama(&d);
    cases_muon(&d);
    cases_windows(&d);
    cases_attention(&d);
    cases_cached(&d);
    bool written = fflush(d.file) == 0 && !ferror(d.file) && fclose(d.file) == 0;
    printf("%s backend, %s: results %s\n", device_backend(), FLOATX_NAME,
           written ? "written" : "could not be written");
    lab_close(&d.lab);
    return written ? EXIT_DONE : EXIT_DATA;
}
