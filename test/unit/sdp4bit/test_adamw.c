// AdamW of one element (sdp4bit/adamw.h): the updates that are refused with any flags. A refusal
// leaves the element unchanged and records a fault. test_simulator.c and test_sdp4bit_mpi.c test
// the values of updates.
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "sdp4bit/adamw.h"

typedef struct Element {
    float p, m, v, grad;
} Element;

static const AdamScalars USUAL = {.clip = 1,
                                  .beta1 = 0.9f,
                                  .one_minus_beta1 = 0.1f,
                                  .beta2 = 0.95f,
                                  .one_minus_beta2 = 0.05f,
                                  .correction1 = 0.1f,
                                  .correction2 = 0.05f,
                                  .epsilon = 1e-8f,
                                  .learning_rate = 1e-3f,
                                  .weight_decay = 0.1f};

static bool update(Element *e, AdamScalars a) { return adamw_element(&e->p, &e->m, &e->v, e->grad, a); }

static void is_refused(Element e, AdamScalars a) {
    Element before = e;
    assert_false(update(&e, a));
    assert_memory_equal(&e, &before, sizeof e);
}
static void is_applied(Element e, AdamScalars a) {
    Element before = e;
    assert_true(update(&e, a));
    assert_true(isfinite(e.p) && isfinite(e.m) && isfinite(e.v) && fabsf(e.p) < 0x1p126f);
    assert_true(e.p != before.p);
}

static const Element ORDINARY = {0.5f, 0.01f, 1e-4f, 0.02f};

// Scalars that are valid in double precision but overflow in fp32.
static void overflowing_scalars_are_refused(void **state) {
    AdamScalars a;
    is_applied(ORDINARY, USUAL);
    a = USUAL, a.learning_rate = INFINITY, is_refused(ORDINARY, a);
    a = USUAL, a.learning_rate = 3e38f, is_refused(ORDINARY, a);
    a = USUAL, a.weight_decay = INFINITY, is_refused(ORDINARY, a);
    a = USUAL, a.beta2 = 1, a.one_minus_beta2 = a.correction2 = 0, is_refused((Element){0.5f, 0, 0, 1}, a);
    a = USUAL, a.beta1 = 1, a.one_minus_beta1 = a.correction1 = 0, is_refused(ORDINARY, a);
    a = USUAL, a.epsilon = 0, is_refused((Element){0.5f, 0, 0, 0}, a);
    a = USUAL, a.clip = NAN, is_refused(ORDINARY, a);
}

static void non_finite_values_are_refused(void **state) {
    const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < 3; i++) {
        is_refused((Element){bad[i], 0.01f, 1e-4f, 0.02f}, USUAL);
        is_refused((Element){0.5f, bad[i], 1e-4f, 0.02f}, USUAL);
        is_refused((Element){0.5f, 0.01f, bad[i], 0.02f}, USUAL);
        is_refused((Element){0.5f, 0.01f, 1e-4f, bad[i]}, USUAL);
    }
    is_refused((Element){0.5f, 0.01f, 1e-4f, 1e25f}, USUAL);  // only v overflows: the step would be 0
    is_applied((Element){0.5f, 0.01f, FLT_MAX, 1e19f},
               USUAL);  // v / correction2 overflows, but is not stored
    is_refused((Element){0.5f, FLT_MAX, 1e-4f, 0.02f}, USUAL);
}

// An update to a magnitude below 2^126 is written; an update to the limit is refused.
static void the_limit(void **state) {
    AdamScalars a = USUAL;
    a.learning_rate = 0;
    for (int sign = -1; sign <= 1; sign += 2) {
        float below = sign * nextafterf(0x1p126f, 0), at = sign * 0x1p126f;
        assert_true(update(&(Element){below, 0, 0, 0}, a));
        is_refused((Element){at, 0, 0, 0}, a);
    }
    // With this limit the difference of two master weights and the bf16 weight are finite.
    assert_true(isfinite(0x1p126f * 1.34f + 0x1p126f) && bf16_from_float(0x1p126f) < 0x7F80);
}

// The kernel refuses one element of the matrix and one of the tail, and writes all others. It
// reports the first refusal.
static void kernel_reports_refused_elements(void **state) {
    enum { MATRIX = 64, TAIL = 8, N = MATRIX + TAIL };
    float master[N], m[N] = {0}, v[N] = {0}, grads[N];
    floatX weights[N] = {0}, codes[MATRIX], tail[TAIL];
    Segment segment = {0, MATRIX, 0, 0};
    StepStatus control = {.applied = 1,
                          .clip_coefficient = 1,
                          .learning_rate = 0.01f,
                          .bias_correction1 = 0.1f,
                          .bias_correction2 = 0.05f};
    uint64_t fault = 0;
    for (int i = 0; i < N; i++) master[i] = 1, grads[i] = 0.5f;
    UpdateShard u = {.control = &control,
                     .beta1 = 0.9f,
                     .beta2 = 0.95f,
                     .epsilon = 1e-8f,
                     .table = {&segment, 1},
                     .matrix_grads = grads,
                     .tail_grads = grads + MATRIX,
                     .matrix_weights = weights,
                     .master = master,
                     .exp_avg = m,
                     .exp_avg_sq = v,
                     .codec = FLOATX_CODEC,
                     .group = 32,
                     .codes = (uint8_t *)codes,
                     .tail = (uint8_t *)tail,
                     .fault = &fault,
                     .code = fault_code(FAULT_OF_UPDATE, 9)};
    u.bucket.matrix_elements = u.bucket.matrix_per_rank = MATRIX;
    u.bucket.tail_elements = u.bucket.tail_per_rank = TAIL;
    kernel_update_shard(NULL, &u);
    assert_true(fault == 0);
    for (int i = 0; i < N; i++) assert_true(master[i] < 1 && m[i] > 0 && v[i] > 0);
    grads[5] = NAN, grads[MATRIX + 2] = INFINITY;
    float old = master[5], old_tail = master[MATRIX + 2], other = master[6];
    kernel_update_shard(NULL, &u);
    assert_true(fault == u.code && master[5] == old && master[MATRIX + 2] == old_tail && master[6] < other);
    assert_true(codes[5] == floatX_from_float(old) && tail[2] == floatX_from_float(old_tail));
    u.code = fault_code(FAULT_OF_UPDATE, 1);
    kernel_update_shard(NULL, &u);
    assert_true(fault == fault_code(FAULT_OF_UPDATE, 9));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(overflowing_scalars_are_refused),
        cmocka_unit_test(non_finite_values_are_refused),
        cmocka_unit_test(the_limit),
        cmocka_unit_test(kernel_reports_refused_elements),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
