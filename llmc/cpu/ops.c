// CPU ops, part 1: embedding, dropout, LayerNorm, linear layers, GELU, SwiGLU, RoPE, sums over
// ranks (see ops.h). CPU ranks run them, and GPU ops are tested against them. They are loops over
// rows, which the compiler vectorizes, and fp32 GEMMs by OpenBLAS.
#include <assert.h>

#include "llmc/cpu/ops_internal.h"
#include "llmc/ranks/parallel.h"

enum { ROW_CHUNK = 512 };  // elements that row loops process at once; fits the stack and L1 cache

// --- dropout -------------------------------------------------------------------------------------

// Number of Philox blocks drawn at once. Storing their words in arrays lets the compiler vectorize.
enum { DRAW_BLOCKS = 64, DRAW_ELEMENTS = 8 * DRAW_BLOCKS };

// Draws the dropout multipliers of 8 * blocks elements, starting at element 8 * block of the
// sample. blocks <= DRAW_BLOCKS.
static void draw_multipliers(float *multiplier, Dropout dropout, int64_t sample, int64_t block, int blocks) {
    uint32_t words[4][DRAW_BLOCKS];
    for (int i = 0; i < blocks; i++) {
        Philox4 bits = dropout_bits(dropout, sample, (uint64_t)(block + i));
        for (int w = 0; w < 4; w++) words[w][i] = bits.v[w];
    }
    uint32_t threshold = (uint32_t)rintf(dropout.p * 65536.0f);
    float kept = 1.0f / (1.0f - dropout.p);
    for (int i = 0; i < blocks; i++) {
        Philox4 bits = {{words[0][i], words[1][i], words[2][i], words[3][i]}};
        for (int e = 0; e < 8; e++) {
            multiplier[8 * i + e] = philox_half(bits, e) >= threshold ? kept : 0.0f;
        }
    }
}

void dropout_multipliers(float *multiplier, Dropout dropout, int64_t sample, int64_t first, int64_t n) {
    if (!(dropout.p > 0.0f)) {
        for (int64_t i = 0; i < n; i++) multiplier[i] = 1.0f;
        return;
    }
    float drawn[DRAW_ELEMENTS];
    for (int64_t done = 0; done < n;) {
        // The range may start in the middle of a block.
        int64_t block = (first + done) / 8, skipped = (first + done) % 8;
        int64_t wanted = min64(DRAW_ELEMENTS - skipped, n - done);
        draw_multipliers(drawn, dropout, sample, block, (int)ceil_div64(skipped + wanted, 8));
        memcpy(multiplier + done, drawn + skipped, (size_t)wanted * sizeof(float));
        done += wanted;
    }
}

// Computes the dropout multipliers of columns c0 .. c0 + n - 1 of row `row` of (B, T, C).
static void row_multipliers(float *keep, Dropout dropout, int T, int C, int64_t row, int64_t c0, int64_t n) {
    dropout_multipliers(keep, dropout, dropout.first_sample + row / T, row % T * C + c0, n);
}

// --- embedding -----------------------------------------------------------------------------------

// Returns true if this rank's part of the vocabulary contains the token.
static bool holds(const Embedding *a, int32_t token) {
    return token >= a->first_row && token - a->first_row < a->rows;
}

// Embeds n columns of row `row` of the micro-batch into x + at. If wte is NULL, x already contains
// the word embeddings. If a->part is set, position embeddings and dropout are left out.
static void embed(const Embedding *a, int64_t row, int64_t at, int64_t c0, int64_t n, const float *keep) {
    int64_t C = a->C;
    bool word = a->wte && holds(a, a->tokens[row]);
    const floatX *word_row = word ? a->wte + (a->tokens[row] - a->first_row) * C + c0 : NULL;
    const floatX *position = a->wpe && !a->part ? a->wpe + a->positions[row] * C + c0 : NULL;
    for (int64_t c = 0; c < n; c++) {
        float x = word ? floatX_to_float(word_row[c]) : a->wte ? 0.0f : floatX_to_float(a->x[at + c]);
        if (position) x += floatX_to_float(position[c]);
        if (!a->part) x *= keep[c];
        a->x[at + c] = floatX_from_float(x);
    }
}

void op_embedding_forward(Stream *s, const Embedding *a) {
    float keep[ROW_CHUNK];
    const Rows all = {0, 0}, rows = a->wte ? all : a->x_rows;
    for (int64_t i = 0; i < rows_held(rows, a->B, a->T); i++) {
        for (int64_t c0 = 0; c0 < a->C; c0 += ROW_CHUNK) {
            int64_t n = min64(ROW_CHUNK, a->C - c0);
            row_multipliers(keep, a->dropout, a->T, a->C, rows.first + i, c0, n);
            embed(a, rows.first + i, i * a->C + c0, c0, n, keep);
        }
    }
}

void op_embedding_backward(Stream *s, const Embedding *a) {
    float keep[ROW_CHUNK];
    int64_t C = a->C;
    for (int64_t row = 0; row < (int64_t)a->B * a->T; row++) {
        bool word = a->dwte && holds(a, a->tokens[row]);
        float *dword = word ? a->dwte + (a->tokens[row] - a->first_row) * C : NULL;
        float *dposition = a->dwpe ? a->dwpe + a->positions[row] * C : NULL;
        const floatX *dx = a->dx + row * C;
        for (int64_t c0 = 0; c0 < C; c0 += ROW_CHUNK) {
            int64_t n = min64(ROW_CHUNK, C - c0);
            row_multipliers(keep, a->dropout, a->T, a->C, row, c0, n);
            for (int64_t c = 0; word && c < n; c++) dword[c0 + c] += floatX_to_float(dx[c0 + c]) * keep[c];
            for (int64_t c = 0; dposition && c < n; c++)
                dposition[c0 + c] += floatX_to_float(dx[c0 + c]) * keep[c];
        }
    }
}

// --- LayerNorm -----------------------------------------------------------------------------------

static float row_mean(const floatX *x, int C) {
    float sum[LANES] = {0};
    EACH_LANE(C, sum[l] += floatX_to_float(x[i]));
    return join_lanes(sum) / (float)C;
}

// Computes the mean and the reciprocal standard deviation of a row. The variance takes a second
// pass over differences from the mean, which is accurate even if the mean is large.
static void row_statistics(const LayerNorm *a, const floatX *x, float *mean, float *rstd) {
    float squares[LANES] = {0}, m = a->rms ? 0.0f : row_mean(x, a->C);
    EACH_LANE(a->C, float d = floatX_to_float(x[i]) - m; squares[l] += d * d);
    *mean = m;
    *rstd = 1.0f / sqrtf(join_lanes(squares) / (float)a->C + a->epsilon);
}

static void residual_sum_row(const LayerNorm *a, int64_t row) {
    float keep[ROW_CHUNK];
    for (int64_t c0 = 0; c0 < a->C; c0 += ROW_CHUNK) {
        int64_t n = min64(ROW_CHUNK, a->C - c0), at = row * a->C + c0;
        row_multipliers(keep, a->dropout, a->T, a->C, a->rows.first + row, c0, n);
        for (int64_t c = 0; c < n; c++) {
            float sum = floatX_to_float(a->residual[at + c]) + floatX_to_float(a->branch[at + c]) * keep[c];
            a->x[at + c] = floatX_from_float(sum);
        }
    }
}

static void normalize_row(const LayerNorm *a, int64_t row) {
    int C = a->C;
    const floatX *x = a->x + row * C;
    floatX *y = a->y + row * C;
    float m, r;
    row_statistics(a, x, &m, &r);
    for (int c = 0; c < C; c++) {
        float scaled = (floatX_to_float(x[c]) - m) * r * floatX_to_float(a->gamma[c]);
        y[c] = floatX_from_float(a->beta ? scaled + floatX_to_float(a->beta[c]) : scaled);
    }
    a->mean[row] = m;
    a->rstd[row] = r;
}

// Row 0 is this rank's first row.
void op_layernorm_forward(Stream *s, const LayerNorm *a) {
    for (int64_t row = 0; row < rows_held(a->rows, a->B, a->T); row++) {
        if (a->branch) residual_sum_row(a, row);
        if (!a->gamma) continue;
        normalize_row(a, row);
        raise_absmax(a->absmax, a->y + row * a->C, a->C);
    }
}

// Computes the means of g = dy gamma and of g xhat over a row. Every element of dx depends on both.
static void backward_means(const LayerNorm *a, int64_t row, float *mean_g, float *mean_g_xhat) {
    const floatX *dy = a->dy + row * a->C, *x = a->x + row * a->C;
    float mean = a->mean[row], rstd = a->rstd[row], sum_g[LANES] = {0}, sum_g_xhat[LANES] = {0};
    EACH_LANE(a->C, {
        float g = floatX_to_float(dy[i]) * floatX_to_float(a->gamma[i]);
        sum_g[l] += g;
        sum_g_xhat[l] += g * ((floatX_to_float(x[i]) - mean) * rstd);
    });
    *mean_g = a->rms ? 0.0f : join_lanes(sum_g) / (float)a->C;
    *mean_g_xhat = join_lanes(sum_g_xhat) / (float)a->C;
}

static void branch_gradient_row(const LayerNorm *a, int64_t row) {
    float keep[ROW_CHUNK];
    for (int64_t c0 = 0; c0 < a->C; c0 += ROW_CHUNK) {
        int64_t n = min64(ROW_CHUNK, a->C - c0), at = row * a->C + c0;
        row_multipliers(keep, a->dropout, a->T, a->C, a->rows.first + row, c0, n);
        for (int64_t c = 0; c < n; c++) {
            a->dbranch[at + c] = floatX_from_float(floatX_to_float(a->dresidual[at + c]) * keep[c]);
        }
    }
}

// Computes one row of dresidual and adds its contribution to dgamma and dbeta.
static void normalize_row_backward(const LayerNorm *a, int64_t row) {
    int C = a->C;
    const floatX *dy = a->dy + row * C, *x = a->x + row * C;
    floatX *dresidual = a->dresidual + row * C;
    float m = a->mean[row], r = a->rstd[row], mean_g, mean_g_xhat;
    backward_means(a, row, &mean_g, &mean_g_xhat);
    for (int c = 0; c < C; c++) {
        float xhat = (floatX_to_float(x[c]) - m) * r;
        float g = floatX_to_float(dy[c]) * floatX_to_float(a->gamma[c]);
        float dx = (g - mean_g - xhat * mean_g_xhat) * r;
        dresidual[c] = floatX_from_float(floatX_to_float(dresidual[c]) + dx);
    }
    for (int c = 0; a->dgamma && c < C; c++) {
        a->dgamma[c] += floatX_to_float(dy[c]) * ((floatX_to_float(x[c]) - m) * r);
    }
    for (int c = 0; a->dbeta && c < C; c++) a->dbeta[c] += floatX_to_float(dy[c]);
}

// Does not compute branch_sum: on CPUs op_bias_gradient sums the rows itself.
void op_layernorm_backward(Stream *s, const LayerNorm *a) {
    for (int64_t row = 0; row < rows_held(a->rows, a->B, a->T); row++) {
        if (a->gamma) normalize_row_backward(a, row);
        if (a->dbranch) branch_gradient_row(a, row);
        raise_absmax(a->absmax, (a->dbranch ? a->dbranch : a->dresidual) + row * a->C, a->C);
    }
}

// --- norms of queries and keys -------------------------------------------------------------------

// Returns a LayerNorm of HD columns with vector i of `before` as its only row.
static LayerNorm head_norm_of(const HeadNorm *a, int64_t i, floatX *y, float *mean, float *rstd) {
    bool key = i % (a->queries + 1) == a->queries;
    LayerNorm n = {.C = a->HD,
                   .epsilon = a->epsilon,
                   .rms = a->rms,
                   .x = a->before + i * a->HD,
                   .y = y,
                   .gamma = a->gamma[key],
                   .beta = a->beta[key],
                   .dy = y,
                   .mean = mean,
                   .rstd = rstd,
                   .dgamma = a->dgamma[key],
                   .dbeta = a->dbeta[key]};
    return n;
}
// Returns the position of vector i in x, where a value follows each key.
static floatX *head_vector(const HeadNorm *a, int64_t i) { return a->x + (i + i / (a->queries + 1)) * a->HD; }
static int64_t head_vectors(const HeadNorm *a) { return a->N * a->groups * (a->queries + 1); }

void op_head_norm_forward(Stream *s, const HeadNorm *a) {
    for (int64_t i = 0; i < head_vectors(a); i++) {
        float mean, rstd;
        LayerNorm n = head_norm_of(a, i, head_vector(a, i), &mean, &rstd);
        memcpy(n.x, n.y, (size_t)a->HD * sizeof(floatX));
        normalize_row(&n, 0);
    }
}

void op_head_norm_backward(Stream *s, const HeadNorm *a) {
    for (int64_t i = 0; i < head_vectors(a); i++) {
        float mean, rstd, mean_g, mean_g_xhat;
        floatX *dx = head_vector(a, i);
        LayerNorm n = head_norm_of(a, i, dx, &mean, &rstd);
        row_statistics(&n, n.x, &mean, &rstd);
        backward_means(&n, 0, &mean_g, &mean_g_xhat);
        for (int c = 0; c < a->HD; c++) {
            float dy = floatX_to_float(dx[c]), xhat = (floatX_to_float(n.x[c]) - mean) * rstd;
            if (n.dgamma) n.dgamma[c] += dy * xhat;
            if (n.dbeta) n.dbeta[c] += dy;
            float g = dy * floatX_to_float(n.gamma[c]);
            dx[c] = floatX_from_float((g - mean_g - xhat * mean_g_xhat) * rstd);
        }
    }
}

// --- linear layers -------------------------------------------------------------------------------

size_t op_scratch_bytes(int64_t N, int C) { return 0; }
void op_set_scratch(Device *device, void *memory, size_t bytes) {}
bool op_check_model(int C, int NH, int HD, int F, int V, int64_t N, Error *err) { return true; }
void op_attention_notice(int T, bool documents, const char *unpacked, char *text, size_t bytes) {
    *text = '\0';
}

size_t op_linear_workspace_bytes(int64_t max_N, int max_C, int max_OC) {
    int64_t rows = min64(max_N, LINEAR_ROWS);
    int64_t weights = slice_floats((int64_t)max_OC * max_C);
    int64_t inputs = slice_floats(rows * max_C), outputs = slice_floats(rows * max_OC);
    return (size_t)(weights + 2 * inputs + outputs) * sizeof(float);  // backward needs x and dx
}

// Epilogue of one row: adds the bias and rounds. If pre is set, applies GELU to the rounded value.
static void linear_epilogue_row(floatX *y, floatX *pre, const float *product, const floatX *bias, int OC) {
    floatX *sum = pre ? pre : y;
    if (bias) {
        for (int o = 0; o < OC; o++) sum[o] = floatX_from_float(product[o] + floatX_to_float(bias[o]));
    } else {
        narrow(sum, product, OC);
    }
    if (pre) op_gelu_forward(NULL, y, pre, OC);
}

// Product of one row x (C) with weights w (OC, C).
typedef struct RowProduct {
    float *product;  // (OC) out
    const float *x;
    const floatX *w;
    int64_t C;
} RowProduct;

// Computes outputs lo .. hi - 1. Converts the weights while reading them, in a single pass.
static void row_product(void *context, int64_t lo, int64_t hi) {
    const RowProduct *p = context;
    for (int64_t o = lo; o < hi; o++) {
        const floatX *w = p->w + o * p->C;
        float lane[LANES] = {0};
        EACH_LANE(p->C, lane[l] += p->x[i] * floatX_to_float(w[i]));
        p->product[o] = join_lanes(lane);
    }
}

// Linear layer of a single row, for text generation. It is memory-bound. Each thread reads at least
// 1 MB of weights, which justifies the cost of starting it.
static void linear_forward_row(const Linear *a) {
    enum { PIECE = 1 << 19 };  // elements
    float *cursor = a->workspace;
    float *x_buffer = take_slice(&cursor, a->C), *product = take_slice(&cursor, a->OC);
    RowProduct p = {product, widen(a->x, a->C, x_buffer), a->w, a->C};
    parallel_ranges(a->threads, 0, a->OC, ceil_div64(PIECE, a->C), row_product, &p);
    linear_epilogue_row(a->y, a->pre, product, a->bias, a->OC);
}

static float linear_scale(const Linear *a) { return a->scale != 0.0f ? a->scale : 1.0f; }

void op_linear_forward(Stream *s, const Linear *a) {
    if (a->N == 1 && !a->add && !a->scale) {
        linear_forward_row(a);
        return;
    }
    float *cursor = a->workspace;
    int64_t C = a->C, OC = a->OC, max_rows = min64(a->N, LINEAR_ROWS);
    const float *w = widen(a->w, OC * C, take_slice(&cursor, OC * C));  // (OC, C)
    float *x_buffer = take_slice(&cursor, max_rows * C);
    float *product = take_slice(&cursor, max_rows * OC);  // (rows, OC)
    for (int64_t row = 0; row < a->N; row += LINEAR_ROWS) {
        int64_t rows = min64(LINEAR_ROWS, a->N - row);
        show_progress(s);
        const float *x = widen(a->x + row * C, rows * C, x_buffer);  // (rows, C)
        if (a->add) widen_copy(product, a->add + row * OC, rows * OC);
        matmul_nt(rows, OC, C, linear_scale(a), x, w, a->add ? 1.0f : 0.0f, product);
        for (int64_t i = 0; i < rows; i++) {
            int64_t at = (row + i) * OC;
            linear_epilogue_row(a->y + at, a->pre ? a->pre + at : NULL, product + i * OC, a->bias, (int)OC);
        }
    }
}

// dx *= GELU'(pre) for n values.
static void multiply_gelu_derivative(float *dx, const floatX *pre, int64_t n) {
    for (int64_t i = 0; i < n; i++) dx[i] *= gelu_derivative(floatX_to_float(pre[i]));
}

// Epilogue of dx (rows, C), whose first row is `row`: applies GELU', rounds, and adds the rows to
// dpre_bias.
static void linear_dx_epilogue(const Linear *a, float *dx, int64_t row, int64_t rows) {
    int64_t at = row * a->C, n = rows * a->C;
    if (a->x_pre) multiply_gelu_derivative(dx, a->x_pre + at, n);
    narrow(a->dx + at, dx, n);
    if (a->x_pre && a->dpre_bias)
        op_bias_gradient(NULL, a->dpre_bias, a->dx + at, NULL, rows, a->C, NULL, NULL);
}

void op_linear_backward(Stream *s, const Linear *a) {
    float *cursor = a->workspace;
    int64_t C = a->C, OC = a->OC, max_rows = min64(a->N, LINEAR_ROWS);
    float *w_buffer = take_slice(&cursor, OC * C);
    const float *w = a->dx ? widen(a->w, OC * C, w_buffer) : NULL;  // (OC, C)
    float *x_buffer = take_slice(&cursor, max_rows * C);
    float *dx = take_slice(&cursor, max_rows * C);  // (rows, C)
    float *dy_buffer = take_slice(&cursor, max_rows * OC);
    for (int64_t row = 0; row < a->N; row += LINEAR_ROWS) {
        int64_t rows = min64(LINEAR_ROWS, a->N - row);
        show_progress(s);
        const float *dy = widen(a->dy + row * OC, rows * OC, dy_buffer);  // (rows, OC)
        if (a->dw) {
            const float *x = widen(a->x + row * C, rows * C, x_buffer);  // (rows, C)
            float beta = a->overwrite && row == 0 ? 0.0f : 1.0f;
            matmul_tn(OC, C, rows, linear_scale(a), dy, x, beta, a->dw);
        }
        if (!a->dx) continue;
        if (a->dx_add) widen_copy(dx, a->dx_add + row * C, rows * C);
        matmul_nn(rows, C, OC, linear_scale(a), dy, w, a->dx_add ? 1.0f : 0.0f, dx);
        linear_dx_epilogue(a, dx, row, rows);
    }
}

void op_bias_gradient(Stream *s, float *dbias, const floatX *dy, const float *sum, int64_t N, int OC,
                      void *workspace, uint32_t *absmax) {
    assert(!(sum && absmax));
    raise_absmax(absmax, dy, N * OC);
    for (int64_t row = 0; row < N; row++) {
        for (int64_t o = 0; o < OC; o++) dbias[o] += floatX_to_float(dy[row * OC + o]);
    }
}

void op_gelu_forward(Stream *s, floatX *y, const floatX *pre, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = floatX_from_float(gelu(floatX_to_float(pre[i])));
}

void op_gelu_backward(Stream *s, floatX *dx, const floatX *pre, float *dbias, int64_t N, int C,
                      void *workspace, uint32_t *absmax) {
    float product[ROW_CHUNK];
    for (int64_t at = 0; at < N * C; at += ROW_CHUNK) {
        int64_t n = min64(ROW_CHUNK, N * C - at);
        for (int64_t i = 0; i < n; i++) product[i] = floatX_to_float(dx[at + i]);
        multiply_gelu_derivative(product, pre + at, n);
        narrow(dx + at, product, n);
    }
    raise_absmax(absmax, dx, N * C);
    if (dbias) op_bias_gradient(NULL, dbias, dx, NULL, N, C, NULL, NULL);
}

// --- SwiGLU and rotary position embedding --------------------------------------------------------

void op_swiglu_forward(Stream *s, const Swiglu *a) {
    int64_t F = a->F;
    for (int64_t row = 0; row < a->N; row++) {
        const floatX *gate = a->pre + row * 2 * F;
        swiglu(a->y + row * F, gate, gate + F, F);
    }
}

void op_swiglu_backward(Stream *s, const Swiglu *a) {
    int64_t F = a->F;
    for (int64_t row = 0; row < a->N; row++) {
        const floatX *gate = a->pre + row * 2 * F, *up = gate + F, *dy = a->dy + row * F;
        floatX *dgate = a->dpre + row * 2 * F, *dup = dgate + F;
        for (int64_t i = 0; i < F; i++) {
            float g = floatX_to_float(gate[i]), share = logistic(g), d = floatX_to_float(dy[i]);
            float slope = share * (1.0f + g * (1.0f - share));
            dgate[i] = floatX_from_float(d * floatX_to_float(up[i]) * slope);
            dup[i] = floatX_from_float(d * (g * share));
        }
        raise_absmax(a->absmax, dgate, 2 * F);
    }
}

// Rotates one vector in place. turn: the table's row for its position (cosines, then sines).
static void turn_vector(floatX *x, const float *turn, int half, float direction) {
    for (int i = 0; i < half; i++) {
        float a = floatX_to_float(x[i]), b = floatX_to_float(x[i + half]);
        float cosine = turn[i], sine = turn[half + i] * direction;
        x[i] = floatX_from_float(a * cosine - b * sine);
        x[i + half] = floatX_from_float(b * cosine + a * sine);
    }
}

void op_rope(Stream *s, const Rope *a) {
    int vectors = a->groups * a->heads;
    size_t bytes = (size_t)a->HD * sizeof(floatX);
    for (int64_t token = 0; token < (int64_t)a->B * a->T; token++) {
        const float *turn = a->table + token % a->T * a->columns;
        for (int v = 0; v < vectors; v++) {
            floatX *x = a->x + (token * vectors + v) * a->HD, *to = x;
            if (a->by_kind) {
                floatX *other = a->by_kind + (token * vectors + rope_place(a, v)) * a->HD;
                to = a->back ? x : other;
                memcpy(to, a->back ? other : x, bytes);
            }
            if (v % a->heads < a->turned) turn_vector(to, turn, a->columns / 2, a->back ? -1.0f : 1.0f);
            raise_absmax(a->absmax, to, a->HD);
        }
    }
}

// --- sums over ranks -----------------------------------------------------------------------------

static void sum_parts_chunk(const SumParts *a, int64_t at, int64_t n) {
    float sum[ROW_CHUNK];
    for (int64_t i = 0; i < n; i++) sum[i] = floatX_to_float(a->parts[at + i]);
    for (int r = 1; r < a->ranks; r++) {
        const floatX *part = a->parts + r * a->n + at;
        for (int64_t i = 0; i < n; i++) sum[i] += floatX_to_float(part[i]);
    }
    const floatX *bias = a->bias ? a->bias + at % a->C : NULL;
    for (int64_t i = 0; bias && i < n; i++) sum[i] += floatX_to_float(bias[i]);
    narrow(a->y + at, sum, n);
}

void op_sum_parts(Stream *s, const SumParts *a) {
    for (int64_t at = 0, n; at < a->n; at += n) {
        n = min64(ROW_CHUNK, a->n - at);
        if (a->bias) n = min64(n, a->C - at % a->C);  // a chunk must not cross rows
        sum_parts_chunk(a, at, n);
    }
}

// Sums in chunks, so that y stays in the cache.
void op_add_parts(Stream *s, float *y, const float *parts, int64_t n, int ranks) {
    for (int64_t at = 0; at < n; at += ROW_CHUNK) {
        int64_t count = min64(ROW_CHUNK, n - at);
        memcpy(y + at, parts + at, (size_t)count * sizeof *y);
        for (int r = 1; r < ranks; r++) {
            for (int64_t i = 0; i < count; i++) y[at + i] += parts[r * n + at + i];
        }
    }
}
