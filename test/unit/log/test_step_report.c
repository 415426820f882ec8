// The short iteration line and durations.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#include "llmc/log/step_report.h"

static IntervalReport report(void) {
    IntervalReport r = {.last = {.iteration = 1200, .learning_rate = 5.98e-4, .grad_norm = 0.512},
                        .train_iters = 80000,
                        .lm_loss = 3.12344,
                        .tokens_per_second = 105234.4,
                        .mfu = 0.4512,
                        .seconds_left = 3725};
    return r;
}

static void assert_line(const IntervalReport *r, const char *expected) {
    Text line = {0};
    short_line(&line, r);
    assert_string_equal(line.data, expected);
    text_free(&line);
}

static void line_of_an_interval(void **state) {
    IntervalReport r = report();
    assert_line(&r,
                "step   1200/80000 | loss 3.1234 | norm 0.512 | lr 5.98e-04 | 105,234 tokens/s | MFU "
                "45.1 % | ETA 1h02m");
    r.skipped = 2;
    r.tokens_per_second = 999.0;
    r.mfu = 0;
    r.seconds_left = -1;
    assert_line(&r, "step   1200/80000 | loss 3.1234 | norm 0.512 | lr 5.98e-04 | 999 tokens/s | 2 skipped");
    r.last.grad_norm = -1;
    r.lm_loss = 0;
    r.tokens_per_second = 12345678;
    assert_line(&r, "step   1200/80000 | lr 5.98e-04 | 12,345,678 tokens/s | 2 skipped");
    r.lm_loss = -NAN;
    r.last.grad_norm = INFINITY;
    r.tokens_per_second = 0;
    assert_line(&r, "step   1200/80000 | loss nan | norm inf | lr 5.98e-04 | 2 skipped");
}

static void durations(void **state) {
    struct {
        double seconds;
        const char *text;
    } cases[] = {{0, "0s"},        {59.4, "59s"}, {59.6, "1m00s"}, {3599, "59m59s"}, {3600, "1h00m"},
                 {90000, "1d01h"}, {-1, ""},      {NAN, ""},       {1e11, ""}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char text[32];
        short_duration(text, sizeof text, cases[i].seconds);
        assert_string_equal(text, cases[i].text);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(line_of_an_interval), cmocka_unit_test(durations)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
