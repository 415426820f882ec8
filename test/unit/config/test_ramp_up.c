// Batch ramp-up: batch sizes, iteration counts and refused flags, as in Megatron-LM.
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "test/unit/config/command_line.h"

// Counts the iterations one by one, like Megatron-LM.
static int64_t count_iterations(int64_t start, int64_t increment, int64_t ramp, int64_t full,
                                int64_t samples) {
    int64_t consumed = 0, iterations = 0, steps = (full - start) / increment;
    while (consumed <= ramp) {
        int64_t batch = steps && ramp
                            ? start + increment * (int64_t)((double)consumed / ((double)ramp / (double)steps))
                            : full;
        consumed += batch;
        iterations++;
    }
    return iterations + (samples > consumed ? (samples - consumed) / full : 0);
}

#define RAMPING \
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 " \
    "--micro-batch-size 2 --lr 1 " \
    "--mock-data --tokenizer-type Byte "

static void ramp_up(void **state) {
    Run run;
    must_run(&run, RAMPING "--train-samples 10000 --global-batch-size 32 --rampup-batch-size 8 8 3000", 4);
    static const struct {
        int64_t consumed;
        int batch;
    } golden[] = {{0, 8},     {999, 8},   {1000, 16}, {1999, 16}, {2000, 24},
                  {2999, 24}, {3000, 32}, {3001, 32}, {10000, 32}};
    for (size_t i = 0; i < sizeof golden / sizeof golden[0]; i++)
        assert_int_equal(config_global_batch_size(&run.config, golden[i].consumed), golden[i].batch);
    // 125 iterations of 8 (1000), 63 of 16 (2008), 42 of 24 (3016), then (10000 - 3016) / 32 = 218.
    assert_int_equal(run.config.train_iters, 125 + 63 + 42 + 218);
    assert_int_equal(run.config.total_samples, 10000);
    config_free(&run.config);
    must_run(&run, SMALL, 4);
    assert_int_equal(config_global_batch_size(&run.config, 12345), 8);
    config_free(&run.config);
}

static void ramp_up_counts_iterations_as_megatron(void **state) {
    static const int64_t cases[][4] = {{8, 8, 3000, 32}, {8, 8, 5859375, 1536}, {16, 24, 77777, 16 + 24 * 7},
                                       {8, 8, 7, 24},    {8, 8, 0, 16},         {32, 8, 100, 32}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        for (int64_t samples = 6000000; samples < 6000100; samples += 33) {
            char line[1024];
            Run run;
            snprintf(line, sizeof line,
                     RAMPING
                     "--train-samples %lld --global-batch-size %lld --rampup-batch-size %lld %lld %lld",
                     (long long)samples, (long long)cases[i][3], (long long)cases[i][0],
                     (long long)cases[i][1], (long long)cases[i][2]);
            must_run(&run, line, 4);
            assert_int_equal(run.config.train_iters,
                             count_iterations(cases[i][0], cases[i][1], cases[i][2], cases[i][3], samples));
            config_free(&run.config);
        }
    }
    Run run;  // must not loop over the iterations
    must_run(&run,
             RAMPING
             "--train-samples 999999999999999 --global-batch-size 16 --rampup-batch-size 8 8 999999999999998",
             4);
    assert_true(run.config.train_iters > 100000000000000 && run.config.train_iters < 130000000000000);
    config_free(&run.config);
}

static void bad_ramp_up(void **state) {
#define RAMP RAMPING "--train-samples 10000 --global-batch-size 32 --rampup-batch-size "
    must_fail(RAMP "8 x 100", 4, "three integers");
    must_fail(RAMP "8 0 100", 4, "at least 1");
    must_fail(RAMP "-8 8 100", 4, "three integers");
    must_fail(RAMP "8 8 99999999999999999999", 4, "three integers");
    must_fail(RAMP "40 8 100", 4, "does not reach --global-batch-size 32");
    must_fail(RAMP "8 7 100", 4, "in steps of 7");
    must_fail(RAMP "4 4 100", 4, "must be multiples of 8, the smallest");
    must_fail(RAMP "8 8 20000", 4, "longer than --train-samples 10000");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ramp_up),
        cmocka_unit_test(ramp_up_counts_iterations_as_megatron),
        cmocka_unit_test(bad_ramp_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
