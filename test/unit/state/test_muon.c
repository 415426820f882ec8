// Muon's coefficients and scales, and the update of one matrix (sdp4bit/muon.h, llmc/state/muon.h)
// against golden values of dev/ref/muon_golden.py. test/mpi/model_gradients.c compares updates in a
// model with the simulator.
//
// In the fp32 build (make PRECISION=fp32) the bound is tight.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "llmc/state/muon.h"
#include "sdp4bit/muon.h"
#include "test/golden/muon/updates.h"

// --- coefficients and scales ---------------------------------------------------------------------

static void is_step(NewtonSchulzStep step, float a, float b, float c) {
    assert_true(step.a == a && step.b == b && step.c == c);
}

static void sets_start_over_or_repeat_the_last(void **state) {
    NewtonSchulzStep step[MOST_MUON_STEPS];
    muon_coefficients(MUON_SIMPLE, step, 12);
    is_step(step[11], 3.4445f, -4.7750f, 2.0315f);
    muon_coefficients(MUON_QUINTIC, step, 6);
    is_step(step[4], 2.8366f, -3.0525f, 1.2012f);
    is_step(step[5], 4.0848f, -6.8946f, 2.9270f);
    muon_coefficients(MUON_AOL, step, 9);
    is_step(step[8], 4.0098f, -7.0585f, 2.4635f);
    muon_coefficients(MUON_POLAR_EXPRESS, step, 64);
    is_step(step[7], 1.8750f, -1.2500f, 0.3750f);
    is_step(step[63], 1.8750f, -1.2500f, 0.3750f);
    muon_coefficients(MUON_CANS, step, 7);
    is_step(step[6], 2.2737f, -1.6447f, 0.4162f);
    muon_coefficients(MUON_DEEPSEEK_V4, step, 12);
    is_step(step[7], 3.4445f, -4.7750f, 2.0315f);
    is_step(step[8], 2.0f, -1.5f, 0.5f);
    is_step(step[11], 2.0f, -1.5f, 0.5f);
    muon_coefficients(MUON_CUBIC5, step, 5);
    is_step(step[4], 2.2230472f, -0.9630650f, 0.0f);
}

// Every set brings singular values of a wide range near 1: those from 0.03 to `most` end between
// `low` and `high`.
static void sets_converge(void **state) {
    static const struct {
        int steps;
        double most, low, high;
    } sets[] = {
        [MUON_SIMPLE] = {5, 0.95, 0.68, 1.14},
        [MUON_QUINTIC] = {5, 0.95, 0.97, 1.04},
        [MUON_POLAR_EXPRESS] = {8, 0.95, 0.999, 1.001},
        [MUON_CANS] = {5, 0.95, 0.88, 1.12},
        [MUON_AOL] = {4, 0.6, 0.98, 1.02},
        [MUON_DEEPSEEK_V4] = {10, 0.95, 0.999, 1.001},
        [MUON_CUBIC5] = {5, 0.95, 0.77, 1.301},
    };
    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++) {
        NewtonSchulzStep step[MOST_MUON_STEPS];
        muon_coefficients((MuonCoefficients)i, step, sets[i].steps);
        for (double start = 0.03; start < sets[i].most; start *= 1.002) {
            double s = start;
            for (int k = 0; k < sets[i].steps; k++)
                s = (double)step[k].a * s + (double)step[k].b * pow(s, 3) + (double)step[k].c * pow(s, 5);
            if (!(s >= sets[i].low && s <= sets[i].high)) fail_msg("set %zu: %g becomes %g", i, start, s);
        }
    }
}

static void scales_by_shape(void **state) {
    assert_true(muon_scale(MUON_SPECTRAL, 16, 64) == 8 && muon_scale(MUON_SPECTRAL, 64, 16) == 8);
    assert_true(muon_scale(MUON_UNIT_RMS_NORM, 16, 64) == 0.5 && muon_scale(MUON_UNIT_RMS_NORM, 64, 16) == 2);
    assert_true(muon_scale(MUON_SHAPE_SCALING, 16, 64) == 1 && muon_scale(MUON_SHAPE_SCALING, 64, 16) == 2);
}

// --- updates -------------------------------------------------------------------------------------

// Input values of dev/ref/muon_golden.py.
static float value_of(int seed, int i) {
    uint32_t x = (uint32_t)i * 2654435761u + (uint32_t)seed * 40503u;
    x ^= x >> 15;
    x *= 2246822519u;
    x ^= x >> 13;
    return (float)(x >> 8) * 0x1p-23f - 1.0f;
}

typedef struct Matrix {
    float master[GOLDEN_MOST], momentum[GOLDEN_MOST], grads[GOLDEN_MOST];
    uint64_t fault;
    StepStatus control;
} Matrix;

static void step_part(MuonPart *a, int part_rows, int groups, const Golden *g) {
    NewtonSchulzStep step[5];
    float partials[GOLDEN_MOST / HADAMARD_ORDER + 1], sum;
    floatX x[GOLDEN_MOST];
    a->part_rows = part_rows;
    a->rows = groups * part_rows;
    a->scale = (float)(0.2 * muon_scale(MUON_SPECTRAL, a->rows, a->columns));
    muon_coefficients((MuonCoefficients)g->coefficients, step, 5);
    kernel_muon_squares(NULL, a, partials);
    kernel_tree_sum(NULL, &sum, partials, ceil_div64(a->rows * a->columns, HADAMARD_ORDER));
    kernel_muon_normalize(NULL, a, &sum, x);
    void *workspace = xmalloc(op_newton_schulz_bytes(a->rows, a->columns), "a workspace");
    NewtonSchulz iteration = {a->rows, a->columns, step, 5, x, workspace};
    kernel_muon_apply(NULL, a, op_newton_schulz(NULL, &iteration));
    free(workspace);
    a->first_row += part_rows;
}

static MuonPart part_of(Matrix *m, const Golden *g) {
    MuonPart a = {.control = &m->control,
                  .grads = m->grads,
                  .momentum = m->momentum,
                  .master = m->master,
                  .mu = 0.9f,
                  .one_minus_mu = 1.0f - 0.9f,
                  .nesterov = g->nesterov,
                  .weight_decay = 0.1f,
                  .columns = g->columns,
                  .group_rows = g->group_rows,
                  .fault = &m->fault,
                  .code = 7};
    return a;
}

static void check_golden(const Golden *g) {
    Matrix *m = xcalloc(1, sizeof *m, "a matrix");
    int n = g->groups * g->group_rows * g->columns;
    m->control = (StepStatus){.applied = 1, .clip_coefficient = 0.5f, .learning_rate = 0.02f};
    for (int i = 0; i < n; i++) m->master[i] = value_of(0, i);
    for (int step = 1; step <= 3; step++) {
        for (int i = 0; i < n; i++) m->grads[i] = value_of(step, i);
        MuonPart a = part_of(m, g);
        kernel_muon_momentum(NULL, &a, n, NULL);
        for (int part = 0; part < 3; part++) {
            if (g->part[part]) step_part(&a, g->part[part], g->groups, g);
        }
    }
    assert_int_equal(m->fault, 0);
    double bound = sizeof(floatX) == 2 ? 6e-3 : 2e-6;  // three steps move an element by about 0.01
    for (int i = 0; i < n; i++) {
        if (fabs((double)m->master[i] - g->master[i]) > bound ||
            fabs((double)m->momentum[i] - g->momentum[i]) > 1e-6)
            fail_msg("%s, element %d: %.8g and %.8g instead of %.8g and %.8g", g->name, i,
                     (double)m->master[i], (double)m->momentum[i], g->master[i], g->momentum[i]);
    }
    free(m);
}

static void updates_equal_the_golden_values(void **state) {
    for (size_t i = 0; i < sizeof goldens / sizeof *goldens; i++) check_golden(&goldens[i]);
}

// --- refused updates -----------------------------------------------------------------------------

static void refused_elements_keep_their_values(void **state) {
    Matrix *m = xcalloc(1, sizeof *m, "a matrix");
    Golden g = {.columns = 4, .groups = 1, .group_rows = 2};
    m->control = (StepStatus){.applied = 1, .clip_coefficient = 1, .learning_rate = 0.1f};
    m->grads[3] = INFINITY, m->grads[4] = 1;
    MuonPart a = part_of(m, &g);
    kernel_muon_momentum(NULL, &a, 8, NULL);
    assert_true(m->momentum[3] == 0 && m->momentum[4] == a.one_minus_mu);
    assert_int_equal(m->fault, 7);
    m->fault = 0;
    a.rows = a.part_rows = 2, a.scale = 1;
    floatX o[8] = {0};
    o[2] = floatX_from_float(NAN), o[5] = floatX_from_float(1);
    m->master[0] = 0x1.fp125f, m->master[2] = 3;
    kernel_muon_apply(NULL, &a, o);
    assert_true(m->master[2] == 3 && m->master[5] == -0.1f && m->master[0] < 0x1.fp125f);
    assert_int_equal(m->fault, 7);
    m->fault = 0, m->control.learning_rate = 3e38f, m->master[2] = 0;
    o[2] = floatX_from_float(1);
    kernel_muon_apply(NULL, &a, o);
    assert_int_equal(m->fault, 7);
    assert_true(m->master[2] == 0);
    free(m);
}

// Rounding every step to bf16 (at most 2^-8 of a value) adds up to at most 2^-8 / (1 - mu) of the
// largest momentum so far. Constant gradients come closest to it: once a step changes the momentum
// by less than its rounding error, it stands still.
static void momentum_in_bf16_stays_close(void **state) {
    Matrix *wide = xcalloc(1, sizeof *wide, "a matrix"), *narrow = xcalloc(1, sizeof *narrow, "a matrix");
    uint16_t momentum[256] = {0};
    float largest[256] = {0};
    Golden g = {.columns = 16, .groups = 1, .group_rows = 16};
    wide->control = narrow->control = (StepStatus){.applied = 1, .clip_coefficient = 1};
    MuonPart a = part_of(wide, &g), b = part_of(narrow, &g);
    b.momentum = NULL, b.momentum_bf16 = momentum;
    double worst = 0;
    for (int step = 1; step <= 200; step++) {
        float direction[256];
        for (int i = 0; i < 256; i++)
            wide->grads[i] = narrow->grads[i] = i ? value_of(step, i) + 0.25f : 1.038f;
        kernel_muon_momentum(NULL, &a, 256, NULL);
        kernel_muon_momentum(NULL, &b, 256, direction);
        for (int i = 0; i < 256; i++) {
            float found = bf16_to_float(momentum[i]);
            assert_true(direction[i] == found);  // U is the rounded momentum
            largest[i] = fmaxf(largest[i], fabsf(found));
            double error = fabs((double)found - wide->momentum[i]);
            if (error > 0x1p-8 / 0.1 * 1.001 * largest[i]) fail_msg("step %d: %g", step, error);
            worst = fmax(worst, error);
        }
    }
    assert_true(worst > 0x1p-9 / 0.1);  // of the constant one
    free(wide);
    free(narrow);
}

// A momentum that bf16 rounds to infinity is refused.
static void bf16_overflow_is_refused(void **state) {
    Matrix *m = xcalloc(1, sizeof *m, "a matrix");
    uint16_t momentum[8] = {0};
    Golden g = {.columns = 4, .groups = 1, .group_rows = 2};
    m->control = (StepStatus){.applied = 1, .clip_coefficient = 1};
    MuonPart a = part_of(m, &g);
    a.momentum = NULL, a.momentum_bf16 = momentum;
    a.mu = 0, a.one_minus_mu = 1;
    m->grads[1] = 0x1.fffffep127f, m->grads[2] = 0x1.fep127f;
    kernel_muon_momentum(NULL, &a, 8, NULL);
    assert_true(momentum[1] == 0 && bf16_to_float(momentum[2]) == 0x1.fep127f);
    assert_int_equal(m->fault, 7);
    free(m);
}

// A finite momentum whose sum of squares overflows must not become an update of 0.
static void norm_overflow_is_refused(void **state) {
    Matrix *m = xcalloc(1, sizeof *m, "a matrix");
    Golden g = {.coefficients = MUON_QUINTIC, .columns = 4, .groups = 1, .group_rows = 2};
    m->control = (StepStatus){.applied = 1, .clip_coefficient = 1, .learning_rate = 0.1f};
    for (int i = 0; i < 8; i++) m->grads[i] = i % 2 ? 3e20f : -2e20f, m->master[i] = 2;
    MuonPart a = part_of(m, &g);
    kernel_muon_momentum(NULL, &a, 8, NULL);
    assert_int_equal(m->fault, 0);
    step_part(&a, 2, 1, &g);
    assert_int_equal(m->fault, 7);
    for (int i = 0; i < 8; i++) assert_true(m->master[i] == 2);
    free(m);
}

static void skipped_steps_change_nothing(void **state) {
    Matrix *m = xcalloc(1, sizeof *m, "a matrix");
    Golden g = {.columns = 4, .groups = 1, .group_rows = 2};
    floatX o[8];
    for (int i = 0; i < 8; i++) m->grads[i] = 1, o[i] = floatX_from_float(1), m->master[i] = 2;
    m->control.clip_coefficient = m->control.learning_rate = 1;
    MuonPart a = part_of(m, &g);
    a.rows = a.part_rows = 2, a.scale = 1;
    kernel_muon_momentum(NULL, &a, 8, NULL);
    kernel_muon_apply(NULL, &a, o);
    for (int i = 0; i < 8; i++) assert_true(m->momentum[i] == 0 && m->master[i] == 2);
    free(m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sets_start_over_or_repeat_the_last),
        cmocka_unit_test(sets_converge),
        cmocka_unit_test(scales_by_shape),
        cmocka_unit_test(updates_equal_the_golden_values),
        cmocka_unit_test(refused_elements_keep_their_values),
        cmocka_unit_test(momentum_in_bf16_stays_close),
        cmocka_unit_test(bf16_overflow_is_refused),
        cmocka_unit_test(norm_overflow_is_refused),
        cmocka_unit_test(skipped_steps_change_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
