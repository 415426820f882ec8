// The learning rate against golden values of the paper's 125M run, all decay styles at their
// boundaries, and the weight-decay ramp.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "llmc/config/config.h"

// The 125M run: 80,000 iterations of 256 samples, decay over 70,000, warm-up 1 %.
static Schedule paper_schedule(LrStyle style) {
    Schedule s = {
        .style = style, .lr = 6e-4, .min_lr = 6e-5, .warmup_samples = 179200, .decay_samples = 17920000};
    return s;
}

static void near_relative(double got, double want, double tolerance) {
    if (!(fabs(got - want) <= tolerance * fabs(want))) fail_msg("got %.12g, want %.12g", got, want);
}

static void cosine_matches_the_golden_values(void **state) {
    // Iteration i uses the rate after (i - 1) * 256 samples.
    static const struct {
        int64_t iteration;
        double lr;
    } golden[] = {{2, 8.571428571e-07},     {100, 8.485714286e-05},   {701, 6.000000000e-04},
                  {1000, 5.999751971e-04},  {10000, 5.763626634e-04}, {40000, 2.735166896e-04},
                  {60000, 8.727733685e-05}, {70001, 6e-05},           {80000, 6e-05}};
    Schedule s = paper_schedule(LR_COSINE);
    assert_true(schedule_lr(&s, 0) == 0);
    for (size_t i = 0; i < sizeof golden / sizeof golden[0]; i++)
        near_relative(schedule_lr(&s, (golden[i].iteration - 1) * 256), golden[i].lr, 1e-9);
    char printed[32];
    // At iteration 100 the log has the rate of iteration 101.
    snprintf(printed, sizeof printed, "%.3E", schedule_lr(&s, 100 * 256));
    assert_string_equal(printed, "8.571E-05");
}

static void config_gives_the_same_schedule(void **state) {
    char *argv[] = {"train_gpt", "@configs/gpt_125m.args", "--mock-data", "--tokenizer-type", "Byte", NULL};
    Config config;
    Error err;
    if (!config_parse(&config, 5, argv, NULL, 0, &err)) fail_msg("%s", err.what);
    if (!config_finish(&config, 32, 0, 0, &err)) fail_msg("%s", err.what);
    Schedule got = schedule_from_config(&config), want = paper_schedule(LR_COSINE);
    assert_true(got.warmup_samples == 179200 && got.decay_samples == 17920000 &&
                got.weight_decay_samples == 20480000);
    for (int64_t n = 0; n < 20480000; n += 256 * 977)
        assert_true(schedule_lr(&got, n) == schedule_lr(&want, n));
    assert_true(schedule_weight_decay(&got, 0) == 0.1 && schedule_weight_decay(&got, 20480001) == 0.1);
    config_free(&config);
}

static void every_style_at_its_boundaries(void **state) {
    Schedule linear = paper_schedule(LR_LINEAR), root = paper_schedule(LR_INVERSE_SQUARE_ROOT),
             constant = paper_schedule(LR_CONSTANT);
    near_relative(schedule_lr(&linear, 179200), 6e-4, 1e-15);
    near_relative(schedule_lr(&linear, (179200 + 17920000) / 2), 3.3e-4, 1e-12);  // halfway
    near_relative(schedule_lr(&linear, 17920000), 6e-5, 1e-12);
    near_relative(schedule_lr(&linear, 17920001), 6e-5, 0);
    near_relative(schedule_lr(&root, 4 * 179200), 3e-4, 1e-15);
    near_relative(schedule_lr(&root, 17920000), 6e-5, 1e-12);  // 6e-4 / sqrt(100)
    root.min_lr = 1e-4;
    near_relative(schedule_lr(&root, 17920000), 1e-4, 0);  // never below min-lr
    near_relative(schedule_lr(&constant, 179199), 6e-4 * 179199 / 179200, 1e-15);
    near_relative(schedule_lr(&constant, 99999999), 6e-4, 0);  // a constant rate never ends
    root.decay_samples = 4 * 179200;
    near_relative(schedule_lr(&root, 4 * 179200), 3e-4, 1e-15);  // at the last sample of the decay
    near_relative(schedule_lr(&root, 4 * 179200 + 1), 1e-4, 0);  // one sample after it
    root.warmup_samples = 0;
    near_relative(schedule_lr(&root, 0), 6e-4, 0);  // no division by zero without warm-up
    constant.lr_init = 3e-4;
    near_relative(schedule_lr(&constant, 0), 3e-4, 0);
    near_relative(schedule_lr(&constant, 89600), 4.5e-4, 1e-15);
}

// Warm-up over 100 samples, a constant rate, then decay over the last 400 of 1000 samples. The
// expected factors at r = 1/4, 1/2 and 1 were computed in Python with Megatron-LM's formulas: 2 *
// 0.5 ** r - 1, 1 - r, (cos(pi r) + 1) / 2, 1 - sqrt(r).
static void wsd_at_its_boundaries(void **state) {
    static const double weight[][3] = {
        [WSD_EXPONENTIAL] = {0.681792830507429, 0.4142135623730951, 0},
        [WSD_LINEAR] = {0.75, 0.5, 0},
        [WSD_COSINE] = {0.8535533905932737, 0.5, 0},
        [WSD_MINUS_SQRT] = {0.5, 0.2928932188134524, 0},
    };
    Schedule s = {.style = LR_WSD,
                  .lr = 1,
                  .min_lr = 0.2,
                  .warmup_samples = 100,
                  .decay_samples = 1000,
                  .wsd_samples = 400};
    for (int style = WSD_EXPONENTIAL; style <= WSD_MINUS_SQRT; style++) {
        s.wsd_style = (WsdStyle)style;
        near_relative(schedule_lr(&s, 50), 0.5, 1e-15);
        near_relative(schedule_lr(&s, 101), 1, 0);
        near_relative(schedule_lr(&s, 600), 1, 0);
        assert_true(schedule_lr(&s, 601) < 1);
        for (int k = 0; k < 3; k++) {
            const int64_t at[3] = {700, 800, 1000};
            near_relative(schedule_lr(&s, at[k]), 0.2 + 0.8 * weight[style][k], 1e-14);
        }
        near_relative(schedule_lr(&s, 1001), 0.2, 0);
    }
    // If the decay is as long as the schedule, it starts during warm-up, and the rate jumps when
    // the warm-up ends. This is as in Megatron-LM.
    s.wsd_style = WSD_LINEAR;
    s.wsd_samples = 1000;
    near_relative(schedule_lr(&s, 100), 1, 1e-15);
    near_relative(schedule_lr(&s, 500), 0.2 + 0.8 * 0.5, 1e-14);
}

static void weight_decay_ramps(void **state) {
    Schedule s = {.start_weight_decay = 0.1,
                  .end_weight_decay = 0.5,
                  .weight_decay_samples = 1000,
                  .weight_decay_style = WEIGHT_DECAY_LINEAR};
    near_relative(schedule_weight_decay(&s, 0), 0.1, 0);
    near_relative(schedule_weight_decay(&s, 250), 0.2, 1e-15);
    near_relative(schedule_weight_decay(&s, 1000), 0.5, 1e-15);
    near_relative(schedule_weight_decay(&s, 1001), 0.5, 0);
    s.weight_decay_style = WEIGHT_DECAY_COSINE;
    near_relative(schedule_weight_decay(&s, 0), 0.1, 1e-15);
    near_relative(schedule_weight_decay(&s, 500), 0.3, 1e-15);
    // cos(3 pi / 4) = -sqrt(2) / 2
    near_relative(schedule_weight_decay(&s, 250), 0.1 + 0.4 * (0.5 - 0.25 * sqrt(2)), 1e-14);
    near_relative(schedule_weight_decay(&s, 5000), 0.5, 0);
    s.weight_decay_style = WEIGHT_DECAY_CONSTANT;
    near_relative(schedule_weight_decay(&s, 1), 0.5, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cosine_matches_the_golden_values),
        cmocka_unit_test(config_gives_the_same_schedule),
        cmocka_unit_test(every_style_at_its_boundaries),
        cmocka_unit_test(wsd_at_its_boundaries),
        cmocka_unit_test(weight_decay_ramps),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
