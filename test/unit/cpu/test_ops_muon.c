// Newton-Schulz iteration against a double-precision reference, which does not round. The steps
// amplify rounding errors of singular values several times, so only the fp32 build (make
// PRECISION=fp32) has a tight bound.
#include "test/unit/ops_common.h"

static const NewtonSchulzStep QUINTIC[] = {{4.0848f, -6.8946f, 2.9270f},
                                           {3.9505f, -6.3029f, 2.6377f},
                                           {3.7418f, -5.5913f, 2.3037f},
                                           {2.8769f, -3.1427f, 1.2046f},
                                           {2.8366f, -3.0525f, 1.2012f}};
static const NewtonSchulzStep CUBIC[] = {{3.3656576f, -3.3420992f, 0.0f},
                                         {2.5744352f, -1.4957376f, 0.0f},
                                         {2.5368962f, -1.4312570f, 0.0f},
                                         {2.4418906f, -1.2764040f, 0.0f},
                                         {2.2230472f, -0.9630650f, 0.0f}};
enum { STEPS = 5 };

// c (m, n) = a b with a (m, k) and b (k, n).
static double *product(const double *a, const double *b, int m, int n, int k) {
    double *c = zero_doubles(m * n);
    for (int i = 0; i < m; i++) {
        for (int l = 0; l < k; l++) {
            for (int j = 0; j < n; j++) c[i * n + j] += a[i * k + l] * b[l * n + j];
        }
    }
    return c;
}
static double *transposed(const double *x, int rows, int columns) {
    double *t = zero_doubles(rows * columns);
    for (int i = 0; i < rows * columns; i++) t[i % columns * rows + i / columns] = x[i];
    return t;
}

// One step as the specification writes it, for any shape.
static double *step_of(const double *x, NewtonSchulzStep step, int rows, int columns) {
    double *xt = transposed(x, rows, columns), *gram = product(x, xt, rows, rows, columns);
    double *square = product(gram, gram, rows, rows, rows);
    for (int i = 0; i < rows * rows; i++) square[i] = (double)step.b * gram[i] + (double)step.c * square[i];
    double *next = product(square, x, rows, columns, rows);
    for (int i = 0; i < rows * columns; i++) next[i] += (double)step.a * x[i];
    free_all(xt, gram, square, NULL);
    return next;
}

// A matrix with Frobenius norm 1.
static floatX *unit_matrix(Random *rng, int64_t n) { return random_floatX(rng, n, 0, 1 / sqrt((double)n)); }

static double relative_error(const floatX *x, const double *expected, int n) {
    double error = 0, norm = 0;
    for (int i = 0; i < n; i++) {
        double e = (double)floatX_to_float(x[i]) - expected[i];
        error += e * e;
        norm += expected[i] * expected[i];
    }
    return sqrt(error / norm);
}

static void check_shape(Random *rng, int rows, int columns, const NewtonSchulzStep *step) {
    int n = rows * columns;
    floatX *x = unit_matrix(rng, n);
    double *expected = doubles_of(x, n);
    for (int i = 0; i < STEPS; i++) {
        double *next = step_of(expected, step[i], rows, columns);
        free(expected);
        expected = next;
    }
    void *workspace = poisoned(op_newton_schulz_bytes(rows, columns));
    NewtonSchulz a = {rows, columns, step, STEPS, x, workspace};
    const floatX *y = op_newton_schulz(NULL, &a);
    double error = relative_error(y, expected, n), bound = sizeof(floatX) == 2 ? 0.06 : 1e-5;
    if (error > bound)
        fail_msg("%d x %d: the error is %g instead of at most %g", rows, columns, error, bound);
    free_all(x, expected, workspace, NULL);
}

static void test_every_shape(void **state) {
    static const int shapes[][2] = {{1, 1},   {1, 40},  {40, 1},  {16, 16},
                                    {24, 96}, {96, 24}, {65, 33}, {8, 200}};
    Random rng = {5};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        check_shape(&rng, shapes[i][0], shapes[i][1], QUINTIC);
        check_shape(&rng, shapes[i][0], shapes[i][1], CUBIC);
    }
}

// Returns the largest |X X^T - I| of an orthogonalized wide matrix.
static double distance_from_identity(int rows, int columns, uint64_t seed) {
    Random rng = {seed};
    int n = rows * columns;
    floatX *x = unit_matrix(&rng, n);
    void *workspace = poisoned(op_newton_schulz_bytes(rows, columns));
    NewtonSchulz a = {rows, columns, QUINTIC, STEPS, x, workspace};
    double *y = doubles_of(op_newton_schulz(NULL, &a), n), *yt = transposed(y, rows, columns), worst = 0;
    double *gram = product(y, yt, rows, rows, columns);
    for (int i = 0; i < rows * rows; i++) worst = fmax(worst, fabs(gram[i] - (i % (rows + 1) == 0)));
    free_all(x, workspace, y, yt, gram, NULL);
    return worst;
}

static void test_rows_become_orthogonal(void **state) {
    assert_true(distance_from_identity(16, 128, 1) < 0.35);
    assert_true(distance_from_identity(64, 256, 2) < 0.35);
}

// The bits depend on nothing but the matrix: not on the address, and not on the workspace's
// contents.
static void test_same_bits(void **state) {
    enum { ROWS = 40, COLUMNS = 72, N = ROWS * COLUMNS };
    Random rng = {9};
    floatX *x = unit_matrix(&rng, N), *first = copy_of(x, N * sizeof(floatX));
    size_t bytes = op_newton_schulz_bytes(ROWS, COLUMNS);
    void *workspace = poisoned(bytes);
    NewtonSchulz a = {ROWS, COLUMNS, QUINTIC, STEPS, first, workspace};
    const floatX *expected = op_newton_schulz(NULL, &a);
    for (int shift = 1; shift < 8; shift++) {
        floatX *moved = poisoned_floatX(N + shift);
        memcpy(moved + shift, x, N * sizeof(floatX));
        void *other = xmalloc(bytes, "a workspace");
        memset(other, shift, bytes);
        NewtonSchulz b = {ROWS, COLUMNS, QUINTIC, STEPS, moved + shift, other};
        assert_memory_equal(op_newton_schulz(NULL, &b), expected, N * sizeof(floatX));
        free_all(moved, other, NULL);
    }
    free_all(x, first, workspace, NULL);
}

static void test_zero_stays_zero(void **state) {
    floatX x[6 * 4] = {0}, zero[6 * 4] = {0};
    void *workspace = poisoned(op_newton_schulz_bytes(6, 4));
    NewtonSchulz a = {6, 4, QUINTIC, STEPS, x, workspace};
    assert_memory_equal(op_newton_schulz(NULL, &a), zero, sizeof zero);
    free(workspace);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_shape),
        cmocka_unit_test(test_rows_become_orthogonal),
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_zero_stays_zero),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
