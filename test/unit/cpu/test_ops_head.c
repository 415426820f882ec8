// The LM head on the CPU, with an unsplit or a split vocabulary, and sums over ranks, against naive
// double-precision references. Runs in both precisions of llmc/base/dtype.h.
#include "test/unit/ops_common.h"

#include "llmc/cpu/ops_internal.h"

// --- head ----------------------------------------------------------------------------------------

typedef struct HeadCase {
    int64_t N;
    int C, Vp;
    floatX *x, *wte;
    int32_t *targets;
    float *mask;                           // or NULL
    double *losses, *dx, *dwte, loss_sum;  // reference
} HeadCase;

// The reference rounds logits and dlogits to floatX, as the op does, because rounding dlogits
// changes dx noticeably.
static void head_reference_row(HeadCase *h, int64_t row, const double *x, const double *wte, double *logits,
                               float scale) {
    double max = -INFINITY, sum = 0, weight = (double)(h->mask ? h->mask[row] * scale : scale);
    for (int v = 0; v < h->Vp; v++) {
        logits[v] = 0;
        for (int c = 0; c < h->C; c++) logits[v] += x[row * h->C + c] * wte[v * h->C + c];
        logits[v] = (double)floatX_to_float(floatX_from_float((float)logits[v]));
        max = logits[v] > max ? logits[v] : max;
    }
    for (int v = 0; v < h->Vp; v++) sum += exp(logits[v] - max);
    h->losses[row] = log(sum) + max - logits[h->targets[row]];
    h->loss_sum += h->losses[row] * weight;
    for (int v = 0; v < h->Vp; v++) {
        double d = weight * (exp(logits[v] - max) / sum - (v == h->targets[row]));
        d = (double)floatX_to_float(floatX_from_float((float)d));
        for (int c = 0; c < h->C; c++) {
            h->dx[row * h->C + c] += d * wte[v * h->C + c];
            h->dwte[v * h->C + c] += d * x[row * h->C + c];
        }
    }
}

static HeadCase head_make(int64_t N, int C, int Vp, bool masked, float scale) {
    Random rng = {10};
    HeadCase h = {.N = N, .C = C, .Vp = Vp, .loss_sum = 2.0};
    h.x = random_floatX(&rng, N * C, 0, 1);
    h.wte = random_floatX(&rng, (int64_t)Vp * C, 0, 1 / sqrt(C));
    h.targets = random_ids(&rng, N, Vp);
    h.mask = masked ? random_floats(&rng, N, 1) : NULL;
    for (int64_t i = 0; masked && i < N; i++) h.mask[i] = h.mask[i] > 0 ? 1.0f : 0.0f;
    h.losses = zero_doubles(N);
    h.dx = zero_doubles(N * C);
    h.dwte = zero_doubles((int64_t)Vp * C);
    double *x = doubles_of(h.x, N * C), *wte = doubles_of(h.wte, (int64_t)Vp * C), *logits = zero_doubles(Vp);
    for (int64_t i = 0; i < (int64_t)Vp * C; i++) h.dwte[i] = 0.5;
    for (int64_t row = 0; row < N; row++) head_reference_row(&h, row, x, wte, logits, scale);
    free_all(x, wte, logits, NULL);
    return h;
}
static void head_free(HeadCase *h) {
    free_all(h->x, h->wte, h->targets, h->losses, h->dx, h->dwte, NULL);
    free(h->mask);
}

// A logit or dlogit near a rounding boundary may round to the other neighbor in fp32. `slack`
// allows for one such difference.
static void check_head(int64_t N, int C, int Vp, bool masked, bool want_dx, bool want_dwte) {
    float scale = 1.0f / (float)N, loss_sum = 2.0f;
    HeadCase h = head_make(N, C, Vp, masked, scale);
    float *losses = poisoned_floats(N), *dwte = poisoned_floats((int64_t)Vp * C);
    floatX *dx = poisoned_floatX(N * C);
    void *workspace = poisoned(op_head_workspace_bytes(N, C, Vp));
    for (int64_t i = 0; i < (int64_t)Vp * C; i++) dwte[i] = 0.5f;
    Head head = {N,
                 C,
                 0,
                 Vp,
                 h.x,
                 h.wte,
                 h.targets,
                 h.mask,
                 scale,
                 losses,
                 &loss_sum,
                 want_dx ? dx : NULL,
                 want_dwte ? dwte : NULL,
                 false,
                 .workspace = workspace};
    op_head(NULL, &head);
    double slack = floatX_unit_roundoff() / 4 + 1e-5;
    for (int64_t i = 0; i < N; i++) check_close("loss", (double)losses[i], h.losses[i], 0, slack, i);
    check_close("loss sum", (double)loss_sum, h.loss_sum, 0, slack / 8, 0);
    if (want_dx) check_floatX("head dx", dx, h.dx, N * C, slack / (double)N);
    double *untouched = zero_doubles((int64_t)Vp * C);
    for (int64_t i = 0; i < (int64_t)Vp * C; i++) untouched[i] = 0.5;
    check_floats("head dwte", dwte, want_dwte ? h.dwte : untouched, (int64_t)Vp * C,
                 4 * slack / (double)N + 1e-6);
    head_free(&h);
    free_all(losses, dwte, dx, workspace, untouched, NULL);
}

static void test_head(void **state) {
    check_head(1, 8, 16, false, true, true);
    check_head(7, 24, 133, false, true, true);
    check_head(29, 40, 128, true, true, true);
    check_head(29, 40, 128, true, true, false);
    check_head(29, 40, 128, false, false, true);
    check_head(29, 40, 128, true, false, false);
    // If all rows are masked, there is no loss and no gradient.
    enum { N = 4, C = 8, VP = 16 };
    Random rng = {11};
    floatX *x = random_floatX(&rng, N * C, 0, 1), *wte = random_floatX(&rng, VP * C, 0, 1), dx[N * C];
    float mask[N] = {0}, losses[N], sum = 0, dwte[VP * C] = {0};
    int32_t targets[N] = {0, 3, 15, 7};
    void *workspace = poisoned(op_head_workspace_bytes(N, C, VP));
    Head head = {N,    C,       0,    VP,    x,
                 wte,  targets, mask, 0.25f, losses,
                 &sum, dx,      dwte, false, .workspace = workspace};
    op_head(NULL, &head);
    assert_true(sum == 0.0f && losses[0] > 0.0f);
    for (int i = 0; i < N * C; i++) assert_true(floatX_to_float(dx[i]) == 0.0f);
    for (int i = 0; i < VP * C; i++) assert_true(dwte[i] == 0.0f);
    x[2 * C] = floatX_from_float(NAN);
    head.dx = NULL;
    head.dwte = NULL;
    head.loss_mask = NULL;
    op_head(NULL, &head);
    assert_true(isnan(losses[2]) && isnan(sum) && isfinite(losses[0]) && isfinite(losses[3]));
    free_all(x, wte, workspace, NULL);
}

// If there are more rows than a chunk has, one call matches several calls of op_head with fewer
// rows, and the naive reference.
static void test_head_chunks(void **state) {
    enum { C = 8, VP = 8192 };
    int64_t chunk = op_head_chunk_rows(1 << 20, VP), N = 2 * chunk + 5;
    assert_true(chunk >= 1 && op_head_chunk_rows(3, VP) == 3);
    assert_true(op_head_workspace_bytes(N, C, VP) == op_head_workspace_bytes(100 * N, C, VP));
    Random rng = {12};
    floatX *x = random_floatX(&rng, N * C, 0, 1), *wte = random_floatX(&rng, VP * C, 0, 0.5),
           *dx = poisoned_floatX(N * C), *dx_parts = poisoned_floatX(N * C);
    int32_t *targets = random_ids(&rng, N, VP);
    float *mask = random_floats(&rng, N, 1);  // arbitrary weights
    float *losses = poisoned_floats(N), *losses_parts = poisoned_floats(N), sum = 0, sum_parts = 0;
    float *dwte = xcalloc(VP * C, sizeof(float), "dwte"),
          *dwte_parts = xcalloc(VP * C, sizeof(float), "dwte");
    void *workspace = poisoned(op_head_workspace_bytes(N, C, VP));
    dwte[0] = dwte_parts[VP * C - 1] = NAN;  // must be overwritten
    Head whole = {N,       C,    0,
                  VP,      x,    wte,
                  targets, mask, 1.0f / (float)N,
                  losses,  &sum, dx,
                  dwte,    true, .workspace = workspace};
    op_head(NULL, &whole);
    // Calls with a third of a chunk, whose boundaries differ from the op's chunks.
    for (int64_t row = 0, step = chunk / 3; row < N; row += step) {
        int64_t rows = row + step < N ? step : N - row;
        Head part = {rows,
                     C,
                     0,
                     VP,
                     x + row * C,
                     wte,
                     targets + row,
                     mask + row,
                     1.0f / (float)N,
                     losses_parts + row,
                     &sum_parts,
                     dx_parts + row * C,
                     dwte_parts,
                     row == 0,
                     .workspace = workspace};
        op_head(NULL, &part);
    }
    double unit = floatX_unit_roundoff();
    for (int64_t i = 0; i < N; i++)
        check_close("chunked loss", (double)losses_parts[i], (double)losses[i], 1e-6, unit, i);
    for (int64_t i = 0; i < N * C; i++) {
        check_close("chunked dx", (double)floatX_to_float(dx_parts[i]), (double)floatX_to_float(dx[i]),
                    2 * unit, 4 * unit / (double)N + 1e-8, i);
    }
    for (int64_t i = 0; i < VP * C; i++)
        check_close("chunked dwte", (double)dwte_parts[i], (double)dwte[i], 1e-4, unit * 1e-3, i);
    check_close("chunked loss sum", (double)sum_parts, (double)sum, 1e-4, 1e-6, 0);
    double expected_sum = 0;
    for (int64_t i = 0; i < N; i++) expected_sum += (double)losses[i] * (double)mask[i] / (double)N;
    check_close("loss sum", (double)sum, expected_sum, 1e-5, 1e-6, 0);
    free_all(x, wte, dx, dx_parts, targets, mask, losses, losses_parts, dwte, dwte_parts, workspace, NULL);
}

// Runs the LM head in chunks like `ranks` ranks, each with V / ranks rows of the vocabulary. `head`
// describes the unsplit op. dx (ranks, N, C): addend of each rank.
static void head_of_ranks(Head head, int ranks, int V, float *losses, floatX *dx, float *dwte) {
    int64_t rows = V / ranks, chunk = op_head_chunk_rows(head.N, (int)rows);
    HeadStatistics *all = xcalloc((size_t)(ranks * chunk), sizeof *all, "statistics");
    void *workspace[4];
    Head rank[4];
    for (int r = 0; r < ranks; r++) {
        rank[r] = head;
        rank[r].first_row = r * (int)rows, rank[r].rows = (int)rows;
        rank[r].wte = head.wte + r * rows * head.C;
        rank[r].dwte = dwte + r * rows * head.C;
        rank[r].dx = dx + r * head.N * head.C;
        rank[r].losses = losses + r * head.N;
        rank[r].workspace = workspace[r] = poisoned(op_head_workspace_bytes(head.N, head.C, (int)rows));
        rank[r].all = all, rank[r].ranks = ranks;
    }
    for (int64_t row = 0; row < head.N; row += chunk) {
        int64_t n = head.N - row < chunk ? head.N - row : chunk;
        for (int r = 0; r < ranks; r++) {
            rank[r].own = all + r * n;
            op_head_logits(NULL, &rank[r], row, n);
        }
        for (int r = 0; r < ranks; r++) op_head_gradients(NULL, &rank[r], row, n);
    }
    op_loss_sum(NULL, &rank[0]);
    for (int r = 0; r < ranks; r++) free(workspace[r]);
    free(all);
}

// With one rank the results are bitwise identical to op_head's; with two and four they are equal
// except for rounding. All ranks get the same losses.
static void check_head_ranks(int ranks) {
    enum { N = 300, C = 8, V = 8192 };
    Random rng = {13};
    floatX *x = random_floatX(&rng, N * C, 0, 1), *wte = random_floatX(&rng, V * C, 0, 0.5);
    int32_t *targets = random_ids(&rng, N, V);
    floatX *dx = poisoned_floatX(N * C), *dx_parts = poisoned_floatX((int64_t)ranks * N * C);
    float *losses = poisoned_floats(N), *losses_parts = poisoned_floats((int64_t)ranks * N), sum = 3,
          sum_parts = 3;
    float *dwte = poisoned_floats(V * C), *dwte_parts = poisoned_floats(V * C);
    void *workspace = poisoned(op_head_workspace_bytes(N, C, V));
    Head head = {N,    C,       0,    V,     x,
                 wte,  targets, NULL, 0.25f, losses,
                 &sum, dx,      dwte, true,  .workspace = workspace};
    op_head(NULL, &head);
    head.loss_sum = &sum_parts;
    head_of_ranks(head, ranks, V, losses_parts, dx_parts, dwte_parts);
    double unit = floatX_unit_roundoff();
    if (ranks == 1) {
        assert_memory_equal(losses, losses_parts, N * sizeof(float));
        assert_memory_equal(dx, dx_parts, N * C * sizeof(floatX));
        assert_memory_equal(dwte, dwte_parts, V * C * sizeof(float));
        assert_true(sum == sum_parts);
    }
    for (int r = 1; r < ranks; r++)
        assert_memory_equal(losses_parts, losses_parts + r * N, N * sizeof(float));
    for (int64_t i = 0; i < N; i++)
        check_close("loss of ranks", (double)losses_parts[i], (double)losses[i], 2e-6, 1e-6, i);
    for (int64_t i = 0; i < N * C; i++) {
        double whole = 0;
        for (int r = 0; r < ranks; r++) whole += (double)floatX_to_float(dx_parts[(int64_t)r * N * C + i]);
        check_close("dx of ranks", whole, (double)floatX_to_float(dx[i]), 4 * unit, 2 * unit + 2e-6, i);
    }
    for (int64_t i = 0; i < V * C; i++)
        check_close("dwte of ranks", (double)dwte_parts[i], (double)dwte[i], 4 * unit, unit * 1e-2 + 2e-6, i);
    check_close("loss sum of ranks", (double)sum_parts, (double)sum, 1e-5, 0, 0);
    free_all(x, wte, targets, dx, dx_parts, losses, losses_parts, dwte, dwte_parts, workspace, NULL);
}

static void test_head_ranks(void **state) {
    for (int ranks = 1; ranks <= 4; ranks *= 2) check_head_ranks(ranks);
}

// --- likelihoods without a loss ------------------------------------------------------------------

// Compares a rank's score of one row with a computation in double, without padding columns.
static void check_score(const HeadScore *score, const Head *h, int64_t row) {
    double max = -INFINITY, sum = 0, target = 0;
    int32_t best = INT32_MAX, wanted = h->targets[row] - h->first_row;
    double *logits = zero_doubles(h->rows);
    for (int v = 0; v < h->columns; v++) {
        const floatX *x = h->x + row * h->C, *w = h->wte + v * h->C;
        for (int c = 0; c < h->C; c++) logits[v] += (double)(floatX_to_float(x[c]) * floatX_to_float(w[c]));
        if (logits[v] > max) max = logits[v], best = h->first_row + v;
        if (v == wanted) target = logits[v];
    }
    for (int v = 0; v < h->columns; v++) sum += exp(logits[v] - max);
    if (h->targets[row] < 0) max = sum = target = best = 0;
    assert_true((double)score->max == max && (double)score->target == target);
    assert_int_equal(score->best, best);
    check_close("sum of a score", (double)score->sum, sum, 1e-5, 0, row);
    free(logits);
}

// Integer inputs give exact, often equal logits. Cases have more rows than a chunk, padding
// columns, ranks with only padding, and rows without a request.
static void check_scores(int64_t N, int C, int first, int rows, int columns) {
    Random rng = {14};
    int64_t count = (N + rows) * C;
    int32_t *numbers = random_ids(&rng, count, 5), *targets = random_ids(&rng, N, first + 2 * rows);
    floatX *x = poisoned_floatX(count), *wte = x + N * C;
    for (int64_t i = 0; i < count; i++) x[i] = floatX_from_float((float)(numbers[i] - 2));
    for (int64_t i = 0; i < N; i += 7) targets[i] = -1;
    void *workspace = poisoned(op_head_workspace_bytes(N, C, rows));
    HeadScore *scores = poisoned((size_t)N * sizeof *scores);
    int64_t chunk = op_head_chunk_rows(N, rows);
    Head head = {.N = N,
                 .C = C,
                 .first_row = first,
                 .rows = rows,
                 .x = x,
                 .wte = wte,
                 .targets = targets,
                 .workspace = workspace,
                 .columns = columns};
    for (int64_t row = 0; row < N; row += chunk) {
        head.scores = scores + row;
        op_head_scores(NULL, &head, row, row + chunk < N ? chunk : N - row);
    }
    for (int64_t i = 0; i < N; i++) check_score(&scores[i], &head, i);
    free_all(numbers, targets, x, workspace, scores, NULL);
}

static void test_scores(void **state) {
    check_scores(1, 8, 0, 16, 16);
    check_scores(29, 8, 0, 133, 130);
    check_scores(29, 16, 256, 128, 5);
    check_scores(29, 16, 256, 128, 0);
    check_scores(300, 8, 100, 8192, 8000);
}

// A non-finite score is reported as NaN and does not affect other rows.
static void test_scores_not_finite(void **state) {
    enum { N = 3, C = 8, V = 16 };
    Random rng = {15};
    floatX *x = random_floatX(&rng, N * C, 0, 1), *wte = random_floatX(&rng, V * C, 0, 1);
    int32_t targets[N] = {0, 3, 15};
    HeadScore scores[N];
    void *workspace = poisoned(op_head_workspace_bytes(N, C, V));
    x[C] = floatX_from_float(NAN);
    Head head = {.N = N,
                 .C = C,
                 .rows = V,
                 .x = x,
                 .wte = wte,
                 .targets = targets,
                 .workspace = workspace,
                 .columns = V,
                 .scores = scores};
    op_head_scores(NULL, &head, 0, N);
    assert_true(isnan(scores[1].sum) && isfinite(scores[0].sum) && isfinite(scores[2].sum));
    free_all(x, wte, workspace, NULL);
}

// --- sums over ranks -----------------------------------------------------------------------------

// Parts are summed in fp32 in rank order, then the bias is added, and the result is rounded once.
// Memory after y is unchanged.
static void check_sum_parts(int64_t n, int ranks, int C) {
    Random rng = {41};
    floatX *parts = random_floatX(&rng, ranks * n, 0, 1), *bias = C ? random_floatX(&rng, C, 0, 1) : NULL;
    float *float_parts = random_floats(&rng, ranks * n, 1), *sums = poisoned_floats(n + 1);
    floatX *y = poisoned_floatX(n + 1), nan = y[n];
    for (int r = 0; r < ranks; r++) parts[r * n] = floatX_from_float(-0.0f);
    float large = 0x1p30f;  // makes the result depend on the order of the sum
    for (int r = 0; ranks > 2 && r < ranks; r++)
        parts[r * n + n - 1] = floatX_from_float(r == 0 ? large : r == 1 ? -large : r == 2 ? 1.0f : 0.0f);
    SumParts a = {y, parts, n, ranks, bias, C};
    op_sum_parts(NULL, &a);
    op_add_parts(NULL, sums, float_parts, n, ranks);
    for (int64_t i = 0; i < n; i++) {
        float sum = floatX_to_float(parts[i]), added = float_parts[i];
        double exact = (double)sum, largest = fabs(exact);
        for (int r = 1; r < ranks; r++) {
            float part = floatX_to_float(parts[r * n + i]);
            sum += part, added += float_parts[r * n + i];
            exact += (double)part, largest = fmax(largest, fabs((double)part));
        }
        if (bias) sum += floatX_to_float(bias[i % C]), exact += (double)floatX_to_float(bias[i % C]);
        floatX expected = floatX_from_float(sum);
        assert_memory_equal(&y[i], &expected, sizeof expected);
        assert_memory_equal(&sums[i], &added, sizeof added);
        check_close("sum of parts", (double)floatX_to_float(y[i]), exact, floatX_unit_roundoff(),
                    largest * 1e-6, i);
    }
    assert_memory_equal(&y[n], &nan, sizeof nan);
    assert_true(isnan(sums[n]));
    free_all(parts, float_parts, sums, y, NULL);
    free(bias);
}

static void test_sum_parts(void **state) {
    const int64_t sizes[] = {1, 7, 8, 24 * 37, 1031, 2048};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        for (int ranks = 1; ranks <= 8; ranks += ranks < 4 ? 1 : 4) {
            check_sum_parts(sizes[i], ranks, 0);
            check_sum_parts(sizes[i], ranks, 24);
            check_sum_parts(sizes[i], ranks, 700);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_head),
        cmocka_unit_test(test_head_chunks),
        cmocka_unit_test(test_head_ranks),
        cmocka_unit_test(test_scores),
        cmocka_unit_test(test_scores_not_finite),
        cmocka_unit_test(test_sum_parts),
    };
    return cmocka_run_group_tests_name("head (" FLOATX_NAME ")", tests, NULL, NULL);
}
