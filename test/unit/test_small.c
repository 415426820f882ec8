// Small host modules: counter-based normals, sampling from logits, the memory plan, integer helpers.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "llmc/arena.h"
#include "llmc/rng.h"
#include "llmc/sample.h"

static double rng_normal(uint64_t seed, uint32_t stream, uint64_t index) {
    double pair[2];
    rng_normal_pair(seed, stream, index / 2, pair);
    return pair[index % 2];
}

static void normals_are_normal(void **state) {
    enum { N = 200000 };
    double sum = 0, squares = 0, fourth = 0, neighbours = 0, last = 0;
    int beyond = 0;
    for (int i = 0; i < N; i++) {
        double x = rng_normal(1234, 3, (uint64_t)i);
        sum += x;
        squares += x * x;
        fourth += x * x * x * x;
        neighbours += x * last;
        beyond += fabs(x) > 1.959964;  // 5 % of a normal distribution
        last = x;
    }
    double root = sqrt(N);
    assert_true(fabs(sum / N) < 4 / root);
    assert_true(fabs(squares / N - 1) < 4 * sqrt(2.0) / root);
    assert_true(fabs(fourth / N - 3) < 4 * sqrt(96.0) / root);
    assert_true(fabs(neighbours / N) < 4 / root);
    assert_true(fabs(beyond / (double)N - 0.05) < 4 * sqrt(0.05 * 0.95) / root);
}

static void streams_do_not_depend_on_order_and_differ(void **state) {
    double late = rng_normal(1, 2, 1000001), first = rng_normal(1, 2, 0);
    assert_true(rng_normal(1, 2, 1000001) == late && rng_normal(1, 2, 0) == first);
    assert_true(rng_normal(1, 3, 0) != first && rng_normal(2, 2, 0) != first && rng_normal((uint64_t)1 << 32 | 1, 2, 0) != first);
    for (uint64_t i = 0; i < 1000; i++) {
        double u = rng_uniform(9, 1, i);
        assert_true(u >= 0.0 && u < 1.0);
    }
}

static void sampling_follows_the_softmax(void **state) {
    enum { V = 4, DRAWS = 40000 };
    const float p[V] = {0.1f, 0.2f, 0.3f, 0.4f};
    floatX logits[V];
    int counts[V] = {0};
    double total = 0, exact[V];
    for (int i = 0; i < V; i++) {
        logits[i] = floatX_from_float(logf(p[i]));
        total += exact[i] = exp(floatX_to_float(logits[i]));
    }
    for (int k = 0; k < DRAWS; k++) counts[sample_token(logits, V, 1.0, 7, k)]++;
    for (int i = 0; i < V; i++) {
        double expected = exact[i] / total;
        assert_true(fabs(counts[i] / (double)DRAWS - expected) < 4 * sqrt(expected * (1 - expected) / DRAWS));
    }
    assert_int_equal(sample_token(logits, V, 0.0, 7, 0), 3);
    for (int i = 0; i < V; i++) logits[i] = floatX_from_float(NAN);
    int token = sample_token(logits, V, 1.0, 7, 0);
    assert_true(token >= 0 && token < V);
}

static void the_memory_plan_is_what_is_allocated(void **state) {
    Site site = {.rank = -1, .phase = "test"};
    Error err = {0};
    Device *device = device_open(0, &site, &err);
    Arena arena = {0};
    void *a, *b, *none = (void *)1;
    arena_reserve(&arena, "one", "first", 1000, &a);
    arena_reserve(&arena, "two", "second", 24, &b);
    arena_reserve(&arena, "two", "nothing", 0, &none);
    assert_int_equal(arena_total(&arena), 1024);
    assert_null(none);
    assert_true(arena_allocate(&arena, device, 1, &err));
    assert_true(a && b && !none);
    for (int i = 0; i < 1000; i++) assert_int_equal(((char *)a)[i], 0);
    arena_free(&arena, device);
    assert_null(a);

    arena_reserve(&arena, "huge", "more than there is", (size_t)1 << 60, &a);
    assert_false(arena_allocate(&arena, device, 1, &err));
    assert_int_equal(err.code, EXIT_ENVIRONMENT);
    assert_non_null(strstr(err.what, "too much"));
    arena_free(&arena, device);
    device_close(device);
}

static void integer_helpers(void **state) {
    assert_int_equal(lcm64(128, 96), 384);
    assert_int_equal(lcm64(7, 7), 7);
    assert_int_equal(round_up64(0, 8), 0);
    assert_int_equal(round_up64(1, 8), 8);
    assert_int_equal(round_up64(16, 8), 16);
    assert_int_equal(ceil_div64(9, 4), 3);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(normals_are_normal),          cmocka_unit_test(streams_do_not_depend_on_order_and_differ),
        cmocka_unit_test(sampling_follows_the_softmax), cmocka_unit_test(the_memory_plan_is_what_is_allocated),
        cmocka_unit_test(integer_helpers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
