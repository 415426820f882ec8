// The anomaly guard: kernel_step_status detects spikes and updates running means, and the host
// reacts to step statuses.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "llmc/state/guard.h"

// Computes step statuses of a single rank, step by step.
typedef struct Bench {
    StepStatus control;
    StatusInputs inputs;
} Bench;

static Bench bench_of(float loss_factor, float norm_factor, bool skip) {
    Bench b;
    memset(&b, 0, sizeof b);
    b.control.applied = 1;
    b.control.beta1_power = b.control.beta2_power = 1;
    b.inputs.ranks = b.inputs.losses = 1;
    b.inputs.beta1 = 0.9f;
    b.inputs.beta2 = 0.95f;
    b.inputs.skip_non_finite = true;
    b.inputs.skip_spikes = skip;
    b.inputs.loss_spike_factor = loss_factor;
    b.inputs.norm_spike_factor = norm_factor;
    b.inputs.loss_factor = b.inputs.gradient_factor = 1;
    return b;
}

static int step(Bench *b, double loss, double norm) {
    StepRecord record;
    memset(&record, 0, sizeof record);
    record.sum_squares = norm * norm;
    record.loss = loss;
    b->inputs.records = &record;
    kernel_step_status(NULL, &b->control, &b->inputs);
    return b->control.spikes.found;
}

// Losses around 3 and norms around 1, with noise.
static double noise(int i) { return (double)(i * 37 % 101) / 50 - 1; }
static int calm(Bench *b, int steps) {
    int found = 0;
    for (int i = 0; i < steps; i++) found |= step(b, 3 + 0.03 * noise(i), 1 + 0.1 * noise(7 * i));
    return found;
}

// A corrupted payload is reported as corruption, even if it caused a non-finite value or a spike.
static void corrupted_payloads_take_precedence(void **state) {
    for (int i = 0; i < 3; i++) {
        Bench b = bench_of(10, 10, true);
        calm(&b, 100);
        StepRecord record = {i == 0 ? INFINITY : 1.0, i == 1 ? NAN : i == 2 ? 1e6 : 3.0, 77};
        b.inputs.records = &record;
        kernel_step_status(NULL, &b.control, &b.inputs);
        assert_false(b.control.applied);
        assert_true(b.control.fault == 77);
    }
}

// If there are several faults, all ranks report the fault with the lowest code on its lowest rank.
// The step is skipped.
static void first_fault_in_data_flow_is_reported(void **state) {
    uint64_t update = fault_code(FAULT_OF_UPDATE, 3), message = fault_code(FAULT_OF_MESSAGE, 0);
    StepRecord records[4] = {{1, 3, 0}, {1, 3, message}, {1, 3, update + 1}, {1, 3, update}};
    Bench b = bench_of(10, 10, true);
    b.inputs.records = records;
    b.inputs.ranks = b.inputs.losses = 4;
    kernel_step_status(NULL, &b.control, &b.inputs);
    assert_false(b.control.applied);
    assert_true(b.control.fault == update && b.control.fault_rank == 3);
}

// Squares are summed over all ranks. The loss is the mean over the ranks that have one: here the
// two ranks of the last stage.
static void loss_is_the_mean_of_last_stages(void **state) {
    StepRecord records[4] = {{1, 0, 0}, {4, 0, 0}, {9, 3, 0}, {2, 5, 0}};
    Bench b = bench_of(0, 0, false);
    b.inputs.records = records;
    b.inputs.ranks = 4;
    b.inputs.losses = 2;
    kernel_step_status(NULL, &b.control, &b.inputs);
    assert_true(b.control.loss == 4 && b.control.grad_norm == 4);
}

static void non_finite_update_ends_the_run(void **state) {
    static const OnNan on_nan[] = {ON_NAN_ABORT, ON_NAN_SKIP};
    for (int i = 0; i < 4; i++) {
        Config config = {.on_nan = on_nan[i % 2], .check_for_nan_in_loss_and_grad = i < 2};
        Mesh mesh = {.replica_groups = {.size = 1}};
        AnomalyGuard guard = {.config = &config, .mesh = &mesh};
        StepStatus status = {.loss = 2,
                             .grad_norm = 1,
                             .fault = fault_code(FAULT_OF_UPDATE, 3),
                             .fault_rank = 1};
        Error err = {0};
        guard_check(&guard, &status, 7, NULL, &err);
        assert_int_equal(err.code, EXIT_DIVERGED);
        assert_non_null(
            strstr(err.what, "the update on rank 1, bucket 3, produced weights that are not finite"));
        assert_int_equal(guard.ended_at, 6);  // the error is reported with the next step's record
    }
}

static void noise_is_not_a_spike(void **state) {
    Bench b = bench_of(10, 10, true);
    assert_int_equal(calm(&b, 1000), 0);
    assert_true(b.control.adam_steps == 1000);
    assert_true(fabs(b.control.spikes.loss.mean - 3) < 0.01 && fabs(b.control.spikes.norm.mean - 1) < 0.05);
    // Uniform numbers in [-a, a] have a mean absolute deviation of a / 2.
    assert_true(fabs(b.control.spikes.loss.deviation - 0.015) < 0.003 &&
                fabs(b.control.spikes.norm.deviation - 0.05) < 0.01);
}

static void spikes_are_found(void **state) {
    Bench b = bench_of(10, 10, false);
    calm(&b, 200);
    assert_int_equal(step(&b, 3.5, 1), SPIKE_LOSS);
    assert_int_equal(b.control.applied, 1);
    assert_true(b.control.spikes.loss_limit > 3.2f && b.control.spikes.loss_limit < 3.5f);
    assert_int_equal(step(&b, 3, 4), SPIKE_NORM);
    assert_int_equal(step(&b, 9, 50), SPIKE_LOSS | SPIKE_NORM);
    assert_int_equal(step(&b, 0.5, 0.01), 0);  // only upward jumps count
}

static void spikes_are_skipped_only_on_request(void **state) {
    Bench b = bench_of(10, 10, true);
    calm(&b, 200);
    step(&b, 9, 1);
    assert_int_equal(b.control.applied, 0);
    assert_true(b.control.adam_steps == 200 && b.control.spikes.skipped_in_a_row == 1);
    step(&b, NAN, 1);
    assert_true(b.control.spikes.skipped_in_a_row == 2);
    step(&b, 3, 1);
    assert_true(b.control.applied && b.control.spikes.skipped_in_a_row == 0 && b.control.adam_steps == 201);
}

static void no_spikes_during_warmup_or_with_factor_zero(void **state) {
    Bench b = bench_of(10, 10, true);
    for (int i = 0; i < SPIKE_WARMUP; i++)
        assert_int_equal(step(&b, i == 20 ? 1e6 : 3, i == 25 ? 1e6 : 1), 0);
    Bench off = bench_of(0, 10, true);
    calm(&off, 200);
    assert_int_equal(step(&off, 1e6, 1), 0);
    assert_int_equal(step(&off, 3, 1e6), SPIKE_NORM);
    off = bench_of(10, 0, true);
    calm(&off, 200);
    assert_int_equal(step(&off, 3, 1e6), 0);
    assert_int_equal(step(&off, 1e6, 1), SPIKE_LOSS);
}

static void one_spike_hardly_changes_the_means(void **state) {
    Bench b = bench_of(10, 10, false);
    calm(&b, 200);
    SpikeState before = b.control.spikes;
    step(&b, 1e30, 1e15);
    assert_true(b.control.spikes.loss.mean < before.loss.mean * 1.01 &&
                b.control.spikes.norm.mean < before.norm.mean * 1.02);
    calm(&b, 10);
    assert_true(step(&b, 3.6, 1) == SPIKE_LOSS);  // the next spike is still found
}

// A permanent change of the level must be accepted after some steps, or --on-spike skip would skip
// forever.
static void lasting_level_is_accepted(void **state) {
    Bench b = bench_of(10, 10, true);
    calm(&b, 200);
    int skipped = 0;
    for (int i = 0; i < 200; i++) {
        step(&b, 4 + 0.03 * noise(i), 1);
        skipped += !b.control.applied;
    }
    assert_in_range(skipped, 3, 20);
    assert_int_equal(b.control.applied, 1);
}

static void non_finite_values_do_not_change_the_means(void **state) {
    Bench b = bench_of(10, 10, true);
    calm(&b, 100);
    SpikeState before = b.control.spikes;
    step(&b, NAN, 1);
    step(&b, 3, INFINITY);
    b.inputs.skip_non_finite = false;
    step(&b, INFINITY, NAN);
    assert_int_equal(b.control.applied, 1);
    assert_memory_equal(&before.loss, &b.control.spikes.loss, 2 * sizeof(SpikeTrack));
    assert_true(b.control.spikes.seen == before.seen && b.control.spikes.found == 0);
}

// --- the host -------------------------------------------------------------------------------

static Config config_of(OnNan on_nan, int64_t limit) {
    Config c;
    memset(&c, 0, sizeof c);
    c.on_nan = on_nan;
    c.check_for_nan_in_loss_and_grad = true;
    c.max_skipped_in_a_row = limit;
    return c;
}

// Runs `applied` good steps, then n steps with a NaN loss. Returns the index of the NaN step that
// ends the run, or 0.
static int ends_at(const Config *c, int applied, int n, AnomalyGuard *guard, Error *err) {
    Bench b = bench_of(10, 10, false);
    Log *log = log_open(c, 1, false, NULL, err);
    AnomalyGuard fresh = {.config = c};
    *guard = fresh;
    memset(err, 0, sizeof *err);
    int end = 0;
    for (int i = 1; i <= applied + n && !end; i++) {
        step(&b, i <= applied ? 3 : NAN, 1);
        guard_check(guard, &b.control, i, log, err);
        if (err->code) end = i - applied;
    }
    log_close(log);
    return end;
}

static void anomalies_end_the_run(void **state) {
    AnomalyGuard s;
    Error err;
    Config c = config_of(ON_NAN_ABORT, 20);
    assert_int_equal(ends_at(&c, 5, 3, &s, &err), 1);
    assert_int_equal(err.code, EXIT_DIVERGED);
    assert_true(s.ended_at == 6 && s.nan == 1 && s.skipped == 1 && strstr(err.what, "not finite"));
    c = config_of(ON_NAN_SKIP, 4);
    assert_int_equal(ends_at(&c, 5, 3, &s, &err), 0);
    assert_true(s.nan == 3 && s.skipped == 3);
    assert_int_equal(ends_at(&c, 5, 10, &s, &err), 4);
    assert_int_equal(err.code, EXIT_DIVERGED);
    assert_true(s.ended_at == 9 && strstr(err.what, "4 steps in a row"));
    c = config_of(ON_NAN_SKIP, 0);
    assert_int_equal(ends_at(&c, 5, 100, &s, &err), 0);
}

// After saving and restoring, step statuses and means are bitwise identical to an uninterrupted
// run.
static void state_is_saved_and_restored(void **state) {
    Bench whole = bench_of(2, 2, true), part = whole;
    Config c = config_of(ON_NAN_SKIP, 0);
    AnomalyGuard a = {&c, NULL, 1, 2, 3, 4, 0}, b = {&c, NULL, 0, 0, 0, 0, 0};
    calm(&whole, 77);
    step(&whole, NAN, 1);
    RunState saved;
    memset(&saved, 0, sizeof saved);
    guard_save(&a, &whole.control, &saved);
    part.control.adam_steps = whole.control.adam_steps;
    part.control.beta1_power = whole.control.beta1_power;
    part.control.beta2_power = whole.control.beta2_power;
    guard_restore(&b, &part.control, &saved);
    assert_true(b.skipped == 1 && b.nan == 2 && b.spikes == 3 && b.repairs == 4 &&
                part.control.spikes.skipped_in_a_row == 1);
    int found = 0;
    for (int i = 0; i < 100; i++) {
        double loss = 3 + 0.03 * noise(i) + (i % 9 == 0), norm = 1 + 0.1 * noise(3 * i);
        found += step(&whole, loss, norm) != 0;
        step(&part, loss, norm);
        assert_memory_equal(&whole.control.spikes, &part.control.spikes, sizeof(SpikeState));
    }
    assert_in_range(found, 5, 95);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(corrupted_payloads_take_precedence),
        cmocka_unit_test(first_fault_in_data_flow_is_reported),
        cmocka_unit_test(loss_is_the_mean_of_last_stages),
        cmocka_unit_test(non_finite_update_ends_the_run),
        cmocka_unit_test(noise_is_not_a_spike),
        cmocka_unit_test(spikes_are_found),
        cmocka_unit_test(spikes_are_skipped_only_on_request),
        cmocka_unit_test(no_spikes_during_warmup_or_with_factor_zero),
        cmocka_unit_test(one_spike_hardly_changes_the_means),
        cmocka_unit_test(lasting_level_is_accepted),
        cmocka_unit_test(non_finite_values_do_not_change_the_means),
        cmocka_unit_test(anomalies_end_the_run),
        cmocka_unit_test(state_is_saved_and_restored),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
