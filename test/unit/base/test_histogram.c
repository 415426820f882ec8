// Histograms: bins, sums, non-finite values, and the text for plots.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "llmc/base/histogram.h"

static Histogram *fresh(void) { return (Histogram *)calloc(1, sizeof(Histogram)); }

static float lower_edge(int bin) {
    uint32_t bits = (uint32_t)bin << HISTOGRAM_SHIFT;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// There are eight bins from 1 to 2. Bin 127 * 8 starts at 1.0; the float below 1.0 is in the bin
// before it.
static void bins(void **state) {
    Histogram *h = fresh();
    float values[] = {
        1.0f, nextafterf(1.0f, 0.0f), 1.124f, 1.125f, 1.99f, -1.0f, -0.5f, 0.0f, -0.0f, 1e-45f, 3.4e38f};
    histogram_add(h, values, sizeof values / sizeof values[0]);
    assert_int_equal(h->bin[0][127 * 8], 2);  // 1.0 and 1.124
    assert_int_equal(h->bin[0][127 * 8 - 1], 1);
    assert_int_equal(h->bin[0][127 * 8 + 1], 1);  // 1.125
    assert_int_equal(h->bin[0][127 * 8 + 7], 1);
    assert_int_equal(h->bin[1][127 * 8], 1);
    assert_int_equal(h->bin[1][126 * 8], 1);
    assert_int_equal(h->bin[0][0], 1);            // the smallest subnormal
    assert_int_equal(h->bin[0][254 * 8 + 7], 1);  // close to the largest float
    assert_int_equal(h->zeros, 2);
    assert_int_equal(h->count, 11);
    assert_true(lower_edge(127 * 8) == 1.0f && lower_edge(127 * 8 + 1) == 1.125f &&
                lower_edge(126 * 8 + 4) == 0.75f);
    int64_t all = h->zeros;
    for (int i = 0; i < HISTOGRAM_BINS; i++) all += h->bin[0][i] + h->bin[1][i];
    assert_int_equal(all, h->count);
    free(h);
}

static void sums(void **state) {
    Histogram *h = fresh();
    float values[] = {1.0f, -3.0f, NAN, INFINITY, -INFINITY, 2.0f};
    histogram_add(h, values, 3);
    histogram_add(h, values + 3, 3);
    assert_int_equal(h->count, 6);
    assert_int_equal(h->non_finite, 3);
    assert_true(h->sum == 0.0 && h->squares == 14.0 && h->fourth == 98.0 && h->largest == 3.0f);
    free(h);
}

static void text(void **state) {
    Histogram *h = fresh();
    float values[] = {1.0f, 1.0f, -2.0f, 0.0f};
    char *out = NULL;
    size_t bytes = 0;
    histogram_add(h, values, 4);
    FILE *file = open_memstream(&out, &bytes);
    histogram_write(h, file);
    fclose(file);
    assert_string_equal(out,
                        "\"count\":4,\"zeros\":1,\"non_finite\":0,\"sum\":0,\"squares\":6,\"fourth\":18,"
                        "\"largest\":2,\"positive\":[[1016,2]],\"negative\":[[1024,1]]");
    free(out);
    free(h);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(bins), cmocka_unit_test(sums),
                                       cmocka_unit_test(text)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
