// CPU ops, part 3: LM head, loss and their gradients, in chunks of rows: see ops.h.
#include "llmc/cpu/ops_internal.h"

// A chunk has 4 MiB of fp32 logits, which fit in the cache, or more if the vocabulary is so large
// that efficient GEMMs need more rows.
enum { CHUNK_LOGITS = 1 << 20, CHUNK_MIN_ROWS = 128 };

int64_t op_head_chunk_rows(int64_t N, int rows) {
    int64_t chunk = CHUNK_LOGITS / rows;
    return min64(N, chunk > CHUNK_MIN_ROWS ? chunk : CHUNK_MIN_ROWS);
}

// Rounds one row of logits to floatX in place and returns the largest.
static float round_and_max(float *logits, int columns) {
    float lane[LANES];
    for (int l = 0; l < LANES; l++) lane[l] = -INFINITY;
    EACH_LANE(columns, {
        float logit = floatX_to_float(floatX_from_float(logits[i]));
        logits[i] = logit;
        lane[l] = logit > lane[l] ? logit : lane[l];
    });
    return max_of_lanes(lane);
}

// Replaces logits with exp(logit - max) and returns their sum.
static float exponentiate(float *logits, float max, int columns) {
    float lane[LANES] = {0};
    EACH_LANE(columns, {
        logits[i] = exp_approx(logits[i] - max);
        lane[l] += logits[i];
    });
    return join_lanes(lane);
}

// Workspace of a chunk. The first chunk converts wte to fp32; the other chunks reuse it.
typedef struct HeadBuffers {
    float *wte;           // (vocabulary rows, C); unused if floatX is fp32
    float *x, *dx;        // (rows, C)
    float *logits;        // (rows, vocabulary rows)
    HeadStatistics *own;  // (rows)
} HeadBuffers;

static HeadBuffers buffers_of(const Head *a) {
    float *cursor = a->workspace;
    int64_t chunk = op_head_chunk_rows(a->N, a->rows);
    HeadBuffers m;
    m.wte = take_slice(&cursor, (int64_t)a->rows * a->C);
    m.x = take_slice(&cursor, chunk * a->C);
    m.dx = take_slice(&cursor, chunk * a->C);
    m.logits = take_slice(&cursor, chunk * a->rows);
    m.own = (HeadStatistics *)cursor;
    return m;
}

size_t op_head_workspace_bytes(int64_t N, int C, int rows) {
    int64_t chunk = op_head_chunk_rows(N, rows), statistics = chunk * (int64_t)sizeof(HeadStatistics);
    int64_t matrices = slice_floats((int64_t)rows * C) + 2 * slice_floats(chunk * C) +
                       slice_floats(chunk * rows);
    return (size_t)matrices * sizeof(float) + (size_t)statistics;
}

static const float *wide_wte(const Head *a, const HeadBuffers *m) {
    return sizeof(floatX) == sizeof(float) ? (const float *)(const void *)a->wte : m->wte;
}

// Returns the column of the target in this rank's logits, or -1 if another rank has it.
static int target_column(const Head *a, int64_t row) {
    int32_t target = a->targets[row];
    return target >= a->first_row && target - a->first_row < a->rows ? target - a->first_row : -1;
}

static float row_weight(const Head *a, int64_t row) {
    return a->loss_mask ? a->loss_mask[row] * a->loss_scale : a->loss_scale;
}

// Computes the unrounded logits of a chunk in the workspace.
static void chunk_logits(Stream *s, const Head *a, const HeadBuffers *m, int64_t row, int64_t rows) {
    show_progress(s);
    if (row == 0) widen(a->wte, (int64_t)a->rows * a->C, m->wte);
    const float *x = widen(a->x + row * a->C, rows * a->C, m->x);  // (rows, C)
    matmul_nt(rows, a->rows, a->C, 1.0f, x, wide_wte(a, m), 0.0f, m->logits);
}

// Leaves e^(logit - max) in the workspace, where max is over this rank's columns of the row.
void op_head_logits(Stream *s, const Head *a, int64_t row, int64_t rows) {
    HeadBuffers m = buffers_of(a);
    chunk_logits(s, a, &m, row, rows);
    HeadStatistics *own = a->own ? a->own : m.own;
    for (int64_t i = 0; i < rows; i++) {
        float *logits = m.logits + i * a->rows, max = round_and_max(logits, a->rows);
        int column = target_column(a, row + i);
        float target = column < 0 ? 0.0f : logits[column];
        own[i] = (HeadStatistics){max, exponentiate(logits, max, a->rows), target};
        m.own[i] = own[i];
    }
}

void op_head_scores(Stream *s, const Head *a, int64_t row, int64_t rows) {
    HeadBuffers m = buffers_of(a);
    chunk_logits(s, a, &m, row, rows);
    for (int64_t i = 0; i < rows; i++) {
        float *logits = m.logits + i * a->rows;
        HeadScore *score = &a->scores[i];
        *score = (HeadScore){0.0f, 0.0f, 0.0f, 0};
        if (a->targets[row + i] < 0) continue;
        int column = target_column(a, row + i), best = 0;
        score->max = round_and_max(logits, a->columns);
        while (best < a->columns && !(logits[best] >= score->max)) best++;
        score->best = best < a->columns ? a->first_row + best : INT32_MAX;
        if (column >= 0 && column < a->columns) score->target = logits[column];
        score->sum = exponentiate(logits, score->max, a->columns);
    }
}

// Combines all ranks' statistics of row i, in rank order.
static HeadStatistics join_ranks(const HeadStatistics *all, int ranks, int64_t rows, int64_t i) {
    HeadStatistics row = all[i];
    for (int r = 1; r < ranks; r++) row.max = fmaxf(row.max, all[r * rows + i].max);
    row.sum *= exp_approx(all[i].max - row.max);  // factor 1 if the first rank has the maximum
    for (int r = 1; r < ranks; r++) {
        const HeadStatistics *part = &all[r * rows + i];
        row.sum += part->sum * exp_approx(part->max - row.max);
        row.target += part->target;
    }
    return row;
}

// Replaces e^(logit - max) with dlogits = weight * (softmax - onehot), rounded to floatX. scale:
// converts the exponentials to probabilities.
static void dlogits_row(float *logits, int columns, int target, float weight, float scale) {
    float at_target = target < 0 ? 0.0f : logits[target] * scale - 1.0f;
    for (int v = 0; v < columns; v++) {
        logits[v] = floatX_to_float(floatX_from_float(weight * (logits[v] * scale)));
    }
    if (target >= 0) logits[target] = floatX_to_float(floatX_from_float(weight * at_target));
}

void op_head_gradients(Stream *s, const Head *a, int64_t row, int64_t rows) {
    HeadBuffers m = buffers_of(a);
    const HeadStatistics *all = a->all ? a->all : m.own;
    for (int64_t i = 0; i < rows; i++) {
        HeadStatistics whole = join_ranks(all, a->all ? a->ranks : 1, rows, i);
        a->losses[row + i] = logf(whole.sum) + (whole.max - whole.target);
        if (!a->dx && !a->dwte) continue;
        float scale = exp_approx(m.own[i].max - whole.max) / whole.sum;
        float *logits = m.logits + i * a->rows, weight = row_weight(a, row + i);
        dlogits_row(logits, a->rows, target_column(a, row + i), weight, scale);
    }
    const float *x = sizeof(floatX) == sizeof(float) ? (const float *)(const void *)(a->x + row * a->C) : m.x;
    float beta = a->overwrite && row == 0 ? 0.0f : 1.0f;
    if (a->dwte) matmul_tn(a->rows, a->C, rows, 1.0f, m.logits, x, beta, a->dwte);
    if (!a->dx) return;
    matmul_nn(rows, a->C, a->rows, 1.0f, m.logits, wide_wte(a, &m), 0.0f, m.dx);
    narrow(a->dx + row * a->C, m.dx, rows * a->C);
}

void op_loss_sum(Stream *s, const Head *a) {
    Head report = *a;
    float sum = 0.0f;
    if (a->report_scale > 0) report.loss_scale = a->report_scale;
    for (int64_t row = 0; row < a->N; row++) sum += a->losses[row] * row_weight(&report, row);
    *a->loss_sum += sum;
}

void op_head(Stream *s, const Head *a) {
    Head whole = *a;
    whole.own = NULL;
    whole.all = NULL;
    int64_t chunk = op_head_chunk_rows(a->N, a->rows);
    for (int64_t row = 0; row < a->N; row += chunk) {
        op_head_logits(s, &whole, row, min64(chunk, a->N - row));
        op_head_gradients(s, &whole, row, min64(chunk, a->N - row));
    }
    op_loss_sum(s, a);
}
