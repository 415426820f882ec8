// Checks properties of ops that need no reference from the other backend:
//   - repeated calls with the same inputs are bitwise identical
//   - attention's dropout mask (chosen by the backend) is the same in forward and backward, has the
//     right density, and differs between layers
//   - computing some rows or heads is bitwise identical to computing all
//   - absolute maxima that ops return are the maxima of their results
// Prints ok / not ok lines and a count. Exit code 0 if all checks passed.
//
//   ops_invariants [--deterministic]
//
// With the flag, repeated backward passes of attention must be bitwise identical too.
#include "llmc/ops_fp8.h"
#include "test/gpu/ops_data.h"

typedef struct Checks {
    int passed, failed;
} Checks;

static void report(Checks *v, bool ok, const char *what, double value) {
    printf("%s - %s (%.6g)\n", ok ? "ok" : "not ok", what, value);
    if (ok) v->passed++;
    else v->failed++;
}

static void *download(Lab *lab, const void *memory, size_t bytes) {
    void *host = xmalloc(bytes, "a result");
    copy_to_host(lab->stream, host, memory, bytes);
    stream_synchronize(lab->stream);
    return host;
}
static bool same_bits(Lab *lab, const void *a, const void *b, size_t bytes) {
    void *x = download(lab, a, bytes), *y = download(lab, b, bytes);
    bool same = memcmp(x, y, bytes) == 0;
    free(x);
    free(y);
    return same;
}
static floatX *from_doubles(Lab *lab, const double *x, int64_t n) {
    floatX *host = (floatX *)xmalloc((size_t)n * sizeof(floatX), "an input");
    for (int64_t i = 0; i < n; i++) host[i] = floatX_from_float((float)x[i]);
    floatX *memory = (floatX *)upload(lab, host, (size_t)n * sizeof(floatX));
    free(host);
    return memory;
}
static double *to_doubles(Lab *lab, const floatX *memory, int64_t n) {
    floatX *host = (floatX *)download(lab, memory, (size_t)n * sizeof(floatX));
    double *x = (double *)xcalloc((size_t)n, sizeof(double), "a result");
    for (int64_t i = 0; i < n; i++) x[i] = (double)floatX_to_float(host[i]);
    free(host);
    return x;
}
static double *random_doubles(Lab *lab, int64_t n) {
    double *x = (double *)xcalloc((size_t)n, sizeof(double), "an input");
    for (int64_t i = 0; i < n; i++)
        x[i] = (double)floatX_to_float(floatX_from_float((float)random_normal(&lab->random)));
    return x;
}

// --- repeated calls ------------------------------------------------------------------------------

enum { RB = 4, RT = 512, RC = 256, RV = 1024, RN = RB * RT };

static void repeat_norm_and_embedding(Lab *lab, Checks *v) {
    int32_t *tokens = random_ids(lab, RN, 40), *start, *positions;
    random_documents(lab, RB, RT, true, &start, &positions);
    floatX *x = random_x(lab, RN * RC, 0, 1), *dy = random_x(lab, RN * RC, 0, 1),
           *gamma = random_x(lab, RC, 1, 0.1), *y = poisoned_x(lab, RN * RC);
    float *mean = poisoned_f(lab, RN), *rstd = poisoned_f(lab, RN), *sum = poisoned_f(lab, RC), *result[2];
    size_t results = RV * RC + RT * RC + 3 * RC;  // dwte, dwpe, dgamma, dbeta, dbias
    floatX *dresidual = poisoned_x(lab, RN * RC);
    Dropout dropout = {0.1f, 5, 9, 77};
    LayerNorm norm = {RB, RT,   RC,   1e-5f, dropout,
                      x,  NULL, NULL, gamma, gamma,
                      y,  mean, rstd, dy,    .dresidual = dresidual};
    op_layernorm_forward(lab->stream, &norm);
    for (int i = 0; i < 2; i++) {
        result[i] = (float *)lab_alloc(lab, results * sizeof(float));
        float *dgamma = result[i] + RV * RC + RT * RC;
        copy_on_device(lab->stream, dresidual, x, RN * RC * sizeof(floatX));
        Embedding embedding = {RB,
                               RT,
                               RC,
                               0,
                               RV,
                               tokens,
                               positions,
                               dropout,
                               .dx = dy,
                               .dwte = result[i],
                               .dwpe = result[i] + RV * RC};
        op_embedding_backward(lab->stream, &embedding);
        norm.dgamma = dgamma, norm.dbeta = dgamma + RC, norm.branch_sum = sum;
        op_layernorm_backward(lab->stream, &norm);
        op_bias_gradient(lab->stream, dgamma + 2 * RC, dresidual, sum, RN, RC, NULL, NULL);
    }
    report(v, same_bits(lab, result[0], result[1], results * sizeof(float)),
           "embedding and LayerNorm backward are bitwise reproducible", 0);
    release(lab, (void *[]){tokens, start, positions, x, dy, gamma, y, mean, rstd, sum, dresidual, result[0],
                            result[1], NULL});
}

static void repeat_head_and_linear(Lab *lab, Checks *v) {
    size_t bytes = op_head_workspace_bytes(RN, RC, RV), linear = op_linear_workspace_bytes(RN, RC, RV);
    void *workspace = poisoned(lab, bytes > linear ? bytes : linear);
    floatX *x = random_x(lab, RN * RC, 0, 1), *w = random_x(lab, RV * RC, 0, 0.1),
           *dy = random_x(lab, RN * RV, 0, 1);
    int32_t *targets = random_ids(lab, RN, RV);
    float *losses = poisoned_f(lab, RN), *result[2];
    floatX *dx[2];
    size_t results = RV * RC + RV + 1;  // dw, dbias, loss_sum
    for (int i = 0; i < 2; i++) {
        result[i] = (float *)lab_alloc(lab, results * sizeof(float));
        dx[i] = poisoned_x(lab, RN * RC);
        Head head = {RN,
                     RC,
                     0,
                     RV,
                     x,
                     w,
                     targets,
                     NULL,
                     1e-3f,
                     losses,
                     result[i] + RV * RC + RV,
                     dx[i],
                     result[i],
                     .workspace = workspace};
        op_head(lab->stream, &head);
        Linear product = {RN, RC, RV, x, w, .dy = dy, .dw = result[i], .workspace = workspace};
        op_linear_backward(lab->stream, &product);
        op_bias_gradient(lab->stream, result[i] + RV * RC, dy, NULL, RN, RV, workspace, NULL);
    }
    report(v, same_bits(lab, result[0], result[1], results * sizeof(float)),
           "LM head and linear backward are bitwise reproducible: weight gradients and loss", 0);
    report(v, same_bits(lab, dx[0], dx[1], RN * RC * sizeof(floatX)),
           "LM head backward is bitwise reproducible: input gradient", 0);
    release(lab, (void *[]){workspace, x, w, dy, targets, losses, result[0], result[1], dx[0], dx[1], NULL});
}

// If one rank has the whole vocabulary, computing logits and gradients in two calls per chunk is
// bitwise identical to op_head.
static void head_in_two_calls(Lab *lab, Checks *v) {
    floatX *x = random_x(lab, RN * RC, 0, 1), *w = random_x(lab, RV * RC, 0, 0.1), *dx[2];
    int32_t *targets = random_ids(lab, RN, RV);
    float *result[2];  // dwte, losses, loss_sum
    int64_t chunk = op_head_chunk_rows(RN, RV), results = RV * RC + RN + 1;
    HeadStatistics *own = (HeadStatistics *)lab_alloc(lab, (size_t)chunk * sizeof *own);
    void *workspace = poisoned(lab, op_head_workspace_bytes(RN, RC, RV));
    for (int i = 0; i < 2; i++) {
        result[i] = (float *)lab_alloc(lab, (size_t)results * sizeof(float));
        dx[i] = poisoned_x(lab, RN * RC);
        Head head = {RN,
                     RC,
                     0,
                     RV,
                     x,
                     w,
                     targets,
                     NULL,
                     1e-3f,
                     result[i] + RV * RC,
                     result[i] + RV * RC + RN,
                     dx[i],
                     result[i],
                     true,
                     workspace,
                     own,
                     own,
                     .ranks = 1};
        if (i == 0) op_head(lab->stream, &head);
        for (int64_t row = 0; i == 1 && row < RN; row += chunk) {
            int64_t rows = RN - row < chunk ? RN - row : chunk;
            op_head_logits(lab->stream, &head, row, rows);
            op_head_gradients(lab->stream, &head, row, rows);
        }
        if (i == 1) op_loss_sum(lab->stream, &head);
    }
    report(v, same_bits(lab, result[0], result[1], (size_t)results * sizeof(float)),
           "the LM head in two calls: weight gradient and losses", 0);
    report(v, same_bits(lab, dx[0], dx[1], RN * RC * sizeof(floatX)),
           "the LM head in two calls: input gradient", 0);
    release(lab, (void *[]){x, w, dx[0], dx[1], targets, result[0], result[1], own, workspace, NULL});
}

// --- parts of a micro-batch ----------------------------------------------------------------------

// Creates a LayerNorm with branch and dropout for forward and backward in new memory. The residual
// is x itself. input: x, branch, dresidual and dy.
static LayerNorm norm_on(Lab *lab, floatX *const input[4], floatX *gamma) {
    LayerNorm a = {RB, RT, RC, 1e-5f, {0.1f, 5, 9, 77}, .gamma = gamma, .beta = gamma};
    floatX *own[3];  // written by the op
    for (int i = 0; i < 3; i++) {
        own[i] = poisoned_x(lab, RN * RC);
        copy_on_device(lab->stream, own[i], input[i], RN * RC * sizeof(floatX));
    }
    a.x = own[0], a.residual = own[0], a.branch = own[1], a.dresidual = own[2], a.dy = input[3];
    a.y = poisoned_x(lab, RN * RC), a.dbranch = poisoned_x(lab, RN * RC);
    a.mean = poisoned_f(lab, RN), a.rstd = poisoned_f(lab, RN), a.branch_sum = poisoned_f(lab, RC);
    a.dgamma = random_f(lab, RC, 1), a.dbeta = random_f(lab, RC, 1);
    return a;
}
static void norm_release(Lab *lab, const LayerNorm *a) {
    release(lab, (void *[]){a->x, (void *)a->branch, a->dresidual, a->y, a->dbranch, a->mean, a->rstd,
                            a->branch_sum, a->dgamma, a->dbeta, NULL});
}

static void norm_of_rows(Lab *lab, Checks *v) {
    const int64_t bounds[] = {0, 700, RN};  // inside a sample
    floatX *input[4], *gamma = random_x(lab, RC, 1, 0.1);
    for (int i = 0; i < 4; i++) input[i] = random_x(lab, RN * RC, 0, 1);
    LayerNorm whole = norm_on(lab, input, gamma), parts = norm_on(lab, input, gamma),
              ends = norm_on(lab, input, gamma);
    op_layernorm_forward(lab->stream, &whole);
    op_layernorm_backward(lab->stream, &whole);
    copy_on_device(lab->stream, ends.dresidual, whole.dresidual, RN * RC * sizeof(floatX));
    for (int i = 0; i < 2; i++) {
        LayerNorm block[2] = {parts, ends};
        for (int k = 0; k < 2; k++) {
            LayerNorm *a = &block[k];
            const int64_t at = bounds[i] * RC;
            a->rows = (Rows){bounds[i], bounds[i + 1] - bounds[i]};
            a->x += at, a->residual += at, a->branch += at, a->dresidual += at, a->dbranch += at;
            a->y += at, a->dy += at, a->mean += bounds[i], a->rstd += bounds[i];
            if (k == 1) a->gamma = NULL;  // only the sum
            op_layernorm_forward(lab->stream, a);
            op_layernorm_backward(lab->stream, a);
        }
    }
    const size_t bytes = RN * RC * sizeof(floatX);
    report(v, same_bits(lab, whole.x, parts.x, bytes) && same_bits(lab, whole.y, parts.y, bytes),
           "LayerNorm of some rows: forward", 0);
    report(v,
           same_bits(lab, whole.dresidual, parts.dresidual, bytes) &&
               same_bits(lab, whole.dbranch, parts.dbranch, bytes),
           "LayerNorm of some rows: backward", 0);
    report(v,
           same_bits(lab, whole.x, ends.x, bytes) && same_bits(lab, whole.dbranch, ends.dbranch, bytes) &&
               same_bits(lab, whole.dresidual, ends.dresidual, bytes),
           "the residual sum alone equals the fused LayerNorm's sum bitwise", 0);
    norm_release(lab, &whole);
    norm_release(lab, &parts);
    norm_release(lab, &ends);
    release(lab, (void *[]){input[0], input[1], input[2], input[3], gamma, NULL});
}

// --- attention: one call -------------------------------------------------------------------------

typedef struct Call {
    int B, T, NH, HD;
    Dropout dropout;
    int32_t *doc_start;  // NULL: fastest kernels; zeros: this program's kernels on a GPU
    int first_head;
} Call;

// out (B, T, NH, HD) and dqkv (B, T, NH, 3, HD) of one forward and backward.
typedef struct Answer {
    floatX *out, *dqkv;
} Answer;

static int64_t out_size(const Call *c) { return (int64_t)c->B * c->T * c->NH * c->HD; }

static Answer attend(Lab *lab, const Call *c, const floatX *qkv, const floatX *dout) {
    Answer answer = {poisoned_x(lab, out_size(c)), poisoned_x(lab, 3 * out_size(c))};
    void *workspace = poisoned(lab, op_attention_workspace_bytes(c->B, c->T, c->NH, c->HD, 0, false)),
         *saved = poisoned(lab, op_attention_saved_bytes(c->B, c->T, c->NH, c->HD));
    Attention a = {c->B,          c->T,       c->NH, c->HD, c->dropout,  qkv,
                   c->doc_start,  answer.out, saved, dout,  answer.dqkv, workspace,
                   c->first_head, 0,          false, 0,     0,           NULL};
    op_attention_forward(lab->stream, &a);
    op_attention_backward(lab->stream, &a);
    release(lab, (void *[]){workspace, saved, NULL});
    return answer;
}

static void repeat_attention(Lab *lab, Checks *v, Call call, const char *what) {
    floatX *qkv = random_x(lab, 3 * out_size(&call), 0, 1), *dout = random_x(lab, out_size(&call), 0, 1);
    Answer a = attend(lab, &call, qkv, dout), b = attend(lab, &call, qkv, dout);
    bool same = same_bits(lab, a.out, b.out, (size_t)out_size(&call) * sizeof(floatX)) &&
                same_bits(lab, a.dqkv, b.dqkv, 3 * (size_t)out_size(&call) * sizeof(floatX));
    report(v, same, what, 0);
    release(lab, (void *[]){qkv, dout, a.out, a.dqkv, b.out, b.dqkv, NULL});
}

// Copies `heads` heads, starting at `first`, from a tensor with `part` x HD values per head.
static floatX *cut_heads(Lab *lab, const Call *c, const floatX *whole, int part, int first, int heads) {
    const int64_t rows = (int64_t)c->B * c->T, size = part * c->HD;
    floatX *cut = poisoned_x(lab, rows * heads * size);
    for (int64_t row = 0; row < rows; row++)
        copy_on_device(lab->stream, cut + row * heads * size, whole + (row * c->NH + first) * size,
                       (size_t)(heads * size) * sizeof(floatX));
    return cut;
}

// Two ranks with some heads each, on kernels that use the dropout masks of ops.h.
static void attention_of_heads(Lab *lab, Checks *v, Call call) {
    floatX *qkv = random_x(lab, 3 * out_size(&call), 0, 1), *dout = random_x(lab, out_size(&call), 0, 1);
    Answer whole = attend(lab, &call, qkv, dout);
    for (int rank = 0; rank < 2; rank++) {
        Call mine = call;
        mine.first_head = rank, mine.NH = rank ? call.NH - 1 : 1;
        floatX *cut[] = {cut_heads(lab, &call, qkv, 3, rank, mine.NH),
                         cut_heads(lab, &call, dout, 1, rank, mine.NH),
                         cut_heads(lab, &call, whole.out, 1, rank, mine.NH),
                         cut_heads(lab, &call, whole.dqkv, 3, rank, mine.NH)};
        Answer part = attend(lab, &mine, cut[0], cut[1]);
        size_t bytes = (size_t)out_size(&mine) * sizeof(floatX);
        report(v, same_bits(lab, part.out, cut[2], bytes) && same_bits(lab, part.dqkv, cut[3], 3 * bytes),
               "attention of some heads is bitwise identical to all heads", rank);
        release(lab, (void *[]){cut[0], cut[1], cut[2], cut[3], part.out, part.dqkv, NULL});
    }
    release(lab, (void *[]){qkv, dout, whole.out, whole.dqkv, NULL});
}

// --- attention: dropout's mask, made visible -----------------------------------------------------

// With q = k = 0 the probabilities of query t are 1 / (t + 1). If v is the identity (T = HD), `out`
// contains the probabilities after dropout. If dout is the identity, dv contains the transposed
// probabilities that backward uses.
enum { SIDE = 64 };  // T and HD

// Returns the mask (B, NH, T, T) of multipliers in forward. *disagreements: number of entries that
// differ in backward by more than rounding.
static double *read_mask(Lab *lab, const Call *c, int64_t *disagreements) {
    int64_t rows = (int64_t)c->B * c->T * c->NH;
    double *qkv = (double *)xcalloc((size_t)rows * 3 * SIDE, sizeof(double), "qkv"),
           *dout = (double *)xcalloc((size_t)rows * SIDE, sizeof(double), "dout");
    for (int64_t row = 0; row < rows; row++) {
        int64_t t = row / c->NH % c->T;
        qkv[(row * 3 + 2) * SIDE + t] = 1.0;
        dout[row * SIDE + t] = 1.0;
    }
    floatX *device_qkv = from_doubles(lab, qkv, rows * 3 * SIDE),
           *device_dout = from_doubles(lab, dout, rows * SIDE);
    Answer answer = attend(lab, c, device_qkv, device_dout);
    double *out = to_doubles(lab, answer.out, rows * SIDE),
           *dqkv = to_doubles(lab, answer.dqkv, rows * 3 * SIDE);
    double *mask = (double *)xcalloc((size_t)rows * SIDE, sizeof(double), "the mask");
    *disagreements = 0;
    for (int64_t i = 0; i < rows * SIDE; i++) {
        int64_t b = i / (c->NH * SIDE * SIDE), head = i / (SIDE * SIDE) % c->NH, t = i / SIDE % SIDE,
                key = i % SIDE;
        double forward = out[((b * SIDE + t) * c->NH + head) * SIDE + key] * (double)(t + 1);
        double backward = dqkv[(((b * SIDE + key) * c->NH + head) * 3 + 2) * SIDE + t] * (double)(t + 1);
        mask[i] = forward;
        if (!(fabs(forward - backward) <= 0.02 * fabs(forward))) (*disagreements)++;
        if (key > t && forward != 0.0) (*disagreements)++;
    }
    release(lab, (void *[]){device_qkv, device_dout, answer.out, answer.dqkv, NULL});
    free(qkv);
    free(dout);
    free(out);
    free(dqkv);
    return mask;
}

// Fraction of kept probabilities, and the largest relative deviation of a kept multiplier from 1 /
// (1 - p).
static void mask_statistics(const double *mask, int64_t heads, float p, double *kept, double *off) {
    int64_t visible = 0, alive = 0;
    *off = 0.0;
    for (int64_t i = 0; i < heads * SIDE * SIDE; i++) {
        if (i % SIDE > i / SIDE % SIDE) continue;
        visible++;
        if (mask[i] == 0.0) continue;
        alive++;
        *off = fmax(*off, fabs(mask[i] * (1.0 - (double)p) - 1.0));
    }
    *kept = (double)alive / (double)visible;
}
static double share_of_equal_zeros(const double *a, const double *b, int64_t heads) {
    int64_t equal = 0, visible = 0;
    for (int64_t i = 0; i < heads * SIDE * SIDE; i++) {
        if (i % SIDE > i / SIDE % SIDE) continue;
        visible++;
        equal += (a[i] == 0.0) == (b[i] == 0.0);
    }
    return (double)equal / (double)visible;
}

static void check_mask(Lab *lab, Checks *v, Call call) {
    float p = call.dropout.p;
    int64_t heads = (int64_t)call.B * call.NH, wrong;
    double visible = (double)heads * SIDE * (SIDE + 1) / 2, kept, off;
    double *mask = read_mask(lab, &call, &wrong);
    report(v, wrong == 0, "dropout: forward and backward use the same mask", (double)wrong);
    mask_statistics(mask, heads, p, &kept, &off);
    report(v, fabs(kept - (1.0 - (double)p)) < 5.0 * sqrt((double)p * (1.0 - (double)p) / visible),
           "dropout: fraction of kept probabilities is 1 - p within 5 sigma", kept);
    report(v, off < 0.02, "dropout: kept probabilities are multiplied by 1 / (1 - p)", off);
    // Entries of unrelated masks agree by chance: both are dropped or both are kept.
    double chance = (double)p * (double)p + (1.0 - (double)p) * (1.0 - (double)p),
           spread = 5.0 * sqrt(chance * (1.0 - chance) / visible);
    for (int other = 0; other < 4; other++) {
        Call changed = call;
        if (other == 0) changed.dropout.site += 4;
        if (other == 1) changed.dropout.first_sample += call.B;
        if (other == 2) changed.dropout.seed += 1;
        if (other == 3) changed.first_head += call.NH;
        double *second = read_mask(lab, &changed, &wrong), equal = share_of_equal_zeros(mask, second, heads);
        report(v, fabs(equal - chance) < spread,
               "dropout: another layer, sample, seed or part of the heads has an unrelated mask", equal);
        free(second);
    }
    double *again = read_mask(lab, &call, &wrong);
    report(v, share_of_equal_zeros(mask, again, heads) == 1.0,
           "dropout: a recomputed forward has the same mask", 0);
    free(again);
    free(mask);
}

// --- attention with a known mask against double precision ----------------------------------------

// One head: out, dq, dk, dv (SIDE, SIDE) from q, k, v, dout and the mask.
static void reference_head(const double *q, const double *k, const double *v, const double *dout,
                           const double *mask, double *out, double *dq, double *dk, double *dv) {
    double scale = 1.0 / sqrt((double)SIDE), p[SIDE], dp[SIDE];
    memset(out, 0, SIDE * SIDE * sizeof(double));
    memset(dq, 0, SIDE * SIDE * sizeof(double));
    memset(dk, 0, SIDE * SIDE * sizeof(double));
    memset(dv, 0, SIDE * SIDE * sizeof(double));
    for (int t = 0; t < SIDE; t++) {
        double sum = 0.0, mean = 0.0;
        for (int j = 0; j <= t; j++) {
            double score = 0.0;
            for (int d = 0; d < SIDE; d++) score += q[t * SIDE + d] * k[j * SIDE + d];
            p[j] = exp(scale * score);
            sum += p[j];
        }
        for (int j = 0; j <= t; j++) {
            p[j] /= sum;
            dp[j] = 0.0;
            for (int d = 0; d < SIDE; d++) {
                out[t * SIDE + d] += p[j] * mask[t * SIDE + j] * v[j * SIDE + d];
                dv[j * SIDE + d] += p[j] * mask[t * SIDE + j] * dout[t * SIDE + d];
                dp[j] += mask[t * SIDE + j] * dout[t * SIDE + d] * v[j * SIDE + d];
            }
            mean += p[j] * dp[j];
        }
        for (int j = 0; j <= t; j++) {
            for (int d = 0; d < SIDE; d++) {
                dq[t * SIDE + d] += scale * p[j] * (dp[j] - mean) * k[j * SIDE + d];
                dk[j * SIDE + d] += scale * p[j] * (dp[j] - mean) * q[t * SIDE + d];
            }
        }
    }
}

// Relative RMS error of one head; rows of `got` are `stride` apart.
static void add_errors(const double *got, int64_t stride, const double *expected, double *error,
                       double *size) {
    for (int i = 0; i < SIDE * SIDE; i++) {
        double difference = got[i / SIDE * stride + i % SIDE] - expected[i];
        *error += difference * difference;
        *size += expected[i] * expected[i];
    }
}
static void gather(double *to, const double *from, int64_t stride) {
    for (int i = 0; i < SIDE * SIDE; i++) to[i] = from[i / SIDE * stride + i % SIDE];
}

static void check_against_double(Lab *lab, Checks *v, Call call) {
    int64_t n = out_size(&call), wrong, out_row = (int64_t)call.NH * SIDE, qkv_row = 3 * out_row;
    double *mask = read_mask(lab, &call, &wrong), *qkv = random_doubles(lab, 3 * n),
           *dout = random_doubles(lab, n);
    for (int64_t i = 0; i < (int64_t)call.B * call.NH * SIDE * SIDE; i++)
        mask[i] = mask[i] == 0.0 ? 0.0 : 1.0 / (1.0 - (double)call.dropout.p);
    floatX *device_qkv = from_doubles(lab, qkv, 3 * n), *device_dout = from_doubles(lab, dout, n);
    Answer answer = attend(lab, &call, device_qkv, device_dout);
    double *out = to_doubles(lab, answer.out, n), *dqkv = to_doubles(lab, answer.dqkv, 3 * n), error[4] = {0},
           size[4] = {0};
    // q, k, v, dout, out, dq, dk, dv.
    double *head = (double *)xcalloc(8 * SIDE * SIDE, sizeof(double), "a head");
    enum { AREA = SIDE * SIDE };
    for (int64_t i = 0; i < (int64_t)call.B * call.NH; i++) {
        int64_t b = i / call.NH, h = i % call.NH, out_at = b * SIDE * out_row + h * SIDE,
                qkv_at = b * SIDE * qkv_row + h * 3 * SIDE;
        for (int part = 0; part < 3; part++) gather(head + part * AREA, qkv + qkv_at + part * SIDE, qkv_row);
        gather(head + 3 * AREA, dout + out_at, out_row);
        reference_head(head, head + AREA, head + 2 * AREA, head + 3 * AREA, mask + i * AREA, head + 4 * AREA,
                       head + 5 * AREA, head + 6 * AREA, head + 7 * AREA);
        add_errors(out + out_at, out_row, head + 4 * AREA, &error[0], &size[0]);
        for (int part = 0; part < 3; part++)
            add_errors(dqkv + qkv_at + part * SIDE, qkv_row, head + (5 + part) * AREA, &error[1 + part],
                       &size[1 + part]);
    }
    // Bounds allow three bf16 roundings (probabilities, gradients of scores, result), each with a
    // relative error of at most 2^-9.
    const char *names[4] = {"attention with dropout, out", "attention with dropout, dq",
                            "attention with dropout, dk", "attention with dropout, dv"};
    for (int i = 0; i < 4; i++)
        report(v, sqrt(error[i] / size[i]) < 0x1p-7, names[i], sqrt(error[i] / size[i]));
    release(lab, (void *[]){device_qkv, device_dout, answer.out, answer.dqkv, NULL});
    free(mask);
    free(qkv);
    free(dout);
    free(out);
    free(dqkv);
    free(head);
}

// --- absolute maxima -----------------------------------------------------------------------------

// Checks *absmax of an op against op_fp8_absmax of its result (n, C), and clears it.
static void check_absmax(Lab *lab, Checks *v, uint32_t *absmax, const floatX *result, int64_t n, int C,
                         const char *what) {
    Fp8Scale *scale = (Fp8Scale *)lab_alloc(lab, sizeof *scale);
    Fp8Quantize a = {.N = n, .C = C, .x = result, .scale = scale};
    op_fp8_absmax(lab->stream, &a);
    uint32_t *got = (uint32_t *)download(lab, absmax, sizeof *absmax);
    report(v, *got > 0 && same_bits(lab, &scale->absmax, absmax, sizeof *absmax), what,
           (double)f32_from_bits(*got));
    set_zero(lab->stream, absmax, sizeof *absmax);
    free(got);
    release(lab, (void *[]){scale, NULL});
}

static void maxima_of_norms(Lab *lab, Checks *v, uint32_t *absmax, int C) {
    const int64_t n = RN * C;
    floatX *x = random_x(lab, n, 0, 1), *dy = random_x(lab, n, 0, 1), *gamma = random_x(lab, C, 1, 0.1),
           *y = poisoned_x(lab, n), *dresidual = random_x(lab, n, 0, 1), *dbranch = poisoned_x(lab, n);
    float *mean = poisoned_f(lab, RN), *rstd = poisoned_f(lab, RN), *dgamma = random_f(lab, 3 * C, 1);
    LayerNorm a = {.B = RB, .T = RT, .C = C, .epsilon = 1e-5f, .x = x, .gamma = gamma, .beta = gamma};
    a.y = y, a.mean = mean, a.rstd = rstd, a.dy = dy, a.dresidual = dresidual, a.absmax = absmax;
    a.dgamma = dgamma, a.dbeta = dgamma + C, a.branch_sum = dgamma + 2 * C;
    op_layernorm_forward(lab->stream, &a);
    check_absmax(lab, v, absmax, y, RN, C, "absolute maximum of LayerNorm");
    op_layernorm_backward(lab->stream, &a);
    check_absmax(lab, v, absmax, dresidual, RN, C, "absolute maximum of LayerNorm's dresidual");
    a.dropout = (Dropout){0.5f, 5, 9, 77};
    a.dbranch = dbranch;
    op_layernorm_backward(lab->stream, &a);
    check_absmax(lab, v, absmax, dbranch, RN, C, "absolute maximum of LayerNorm's dbranch");
    a.gamma = NULL;
    op_layernorm_backward(lab->stream, &a);
    check_absmax(lab, v, absmax, dbranch, RN, C, "absolute maximum of dbranch without a norm");
    release(lab, (void *[]){x, dy, gamma, y, dresidual, dbranch, mean, rstd, dgamma, NULL});
}

static void maxima_of_linears(Lab *lab, Checks *v, uint32_t *absmax) {
    const int64_t n = RN * RC;
    floatX *dx = random_x(lab, n, 0, 1), *pre = random_x(lab, 2 * n, 0, 2), *dpre = poisoned_x(lab, 2 * n);
    float *dbias = random_f(lab, RC, 1);
    void *workspace = poisoned(lab, op_linear_workspace_bytes(RN, RC, RC));
    op_bias_gradient(lab->stream, dbias, dx, NULL, RN, RC, workspace, absmax);
    check_absmax(lab, v, absmax, dx, RN, RC, "absolute maximum in the bias gradient");
    op_gelu_backward(lab->stream, dx, pre, dbias, RN, RC, workspace, absmax);
    check_absmax(lab, v, absmax, dx, RN, RC, "absolute maximum of GELU backward");
    Swiglu swiglu = {.N = RN, .F = RC, .pre = pre, .dy = dx, .dpre = dpre, .absmax = absmax};
    op_swiglu_backward(lab->stream, &swiglu);
    check_absmax(lab, v, absmax, dpre, RN, 2 * RC, "absolute maximum of SwiGLU backward");
    release(lab, (void *[]){dx, pre, dpre, dbias, workspace, NULL});
}

// One outlier per kind of vector, also in columns and vectors that do not change.
static void maxima_of_rope(Lab *lab, Checks *v, uint32_t *absmax, int columns) {
    enum { GROUPS = 2, HEADS = 4, HD = 64, WIDTH = GROUPS * HEADS * HD };
    float *table = random_f(lab, (int64_t)RT * columns, 1);
    floatX *other = poisoned_x(lab, (int64_t)RN * WIDTH);
    for (int head = 0; head < HEADS; head++) {
        double *x = random_doubles(lab, (int64_t)RN * WIDTH);
        x[(int64_t)RN / 2 * WIDTH + head * HD + HD - 1] = 1000;
        floatX *memory = from_doubles(lab, x, (int64_t)RN * WIDTH);
        Rope a = {RB, RT, GROUPS, HEADS, HEADS - 1, HD, columns, table, memory, false, other, absmax};
        op_rope(lab->stream, &a);
        check_absmax(lab, v, absmax, other, RN, WIDTH, "absolute maximum of reordered rotated vectors");
        a.back = true;
        op_rope(lab->stream, &a);
        check_absmax(lab, v, absmax, memory, RN, WIDTH, "absolute maximum of rotated gradients");
        a.by_kind = NULL;
        op_rope(lab->stream, &a);
        check_absmax(lab, v, absmax, memory, RN, WIDTH, "absolute maximum of vectors rotated in place");
        free(x);
        release(lab, (void *[]){memory, NULL});
    }
    release(lab, (void *[]){table, other, NULL});
}

static void maxima_of_results(Lab *lab, Checks *v) {
    uint32_t *absmax = (uint32_t *)lab_alloc(lab, sizeof *absmax);
    maxima_of_norms(lab, v, absmax, RC);
    maxima_of_norms(lab, v, absmax, 2560);
    maxima_of_linears(lab, v, absmax);
    maxima_of_rope(lab, v, absmax, 64);
    maxima_of_rope(lab, v, absmax, 24);  // one column per thread on a GPU
    release(lab, (void *[]){absmax, NULL});
}

int main(int argc, char **argv) {
    Site site = {.rank = -1, .phase = "ops"};
    Lab lab = lab_open(&site);
    Checks v = {0, 0};
    bool deterministic = argc > 1 && strcmp(argv[1], "--deterministic") == 0;
    device_set_deterministic(lab.device, deterministic);
    repeat_norm_and_embedding(&lab, &v);
    repeat_head_and_linear(&lab, &v);
    head_in_two_calls(&lab, &v);
    norm_of_rows(&lab, &v);
    maxima_of_results(&lab, &v);
    int32_t *zeros, *positions;
    random_documents(&lab, 4, 512, false, &zeros, &positions);
    Call big = {2, 512, 3, 64, {0.0f, 0, 0, 0}, zeros, 0},
         small = {2, SIDE, 3, SIDE, {0.25f, 4321, 4 * 7 + DROPOUT_ATTENTION, 1000}, NULL, 0};
    repeat_attention(&lab, &v, big, "attention with document starts is bitwise reproducible");
    Call heads = {2, 100, 3, 64, small.dropout, zeros, 0};
    attention_of_heads(&lab, &v, heads);
    big.doc_start = NULL;
    if (deterministic)
        repeat_attention(&lab, &v, big, "attention is bitwise reproducible in deterministic mode");
    big.dropout = small.dropout;
    if (deterministic)
        repeat_attention(&lab, &v, big,
                         "attention with dropout is bitwise reproducible in deterministic mode");
    check_mask(&lab, &v, small);
    check_against_double(&lab, &v, small);
    small.dropout.p = 0.0f;
    check_against_double(&lab, &v, small);
    small.dropout.p = 0.25f;
    small.doc_start = zeros;
    check_mask(&lab, &v, small);
    check_against_double(&lab, &v, small);
    release(&lab, (void *[]){zeros, positions, NULL});
    lab_close(&lab);
    printf("ops_invariants: %s backend, %d passed, %d failed\n", device_backend(), v.passed, v.failed);
    return v.failed == 0 && v.passed > 0 ? EXIT_DONE : EXIT_FAILURE;
}
