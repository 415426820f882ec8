// llmc/ranks/parallel.h: every element is processed once, ranges are aligned to chunks, and the
// work is complete even if threads cannot be created. The linker replaces pthread_create with the
// function below.
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "llmc/ranks/parallel.h"

enum { N = 100003 };

static int allowed_threads;  // remaining successful pthread_create calls
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *),
                          void *argument);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *),
                          void *argument);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *),
                          void *argument) {
    if (allowed_threads-- <= 0) return 11;  // EAGAIN
    return __real_pthread_create(thread, attributes, start, argument);
}

typedef struct Counts {
    int64_t lo, hi, chunk;
    atomic_int misaligned;  // misaligned ranges
    int seen[N];            // not atomic, so ThreadSanitizer detects overlapping ranges
} Counts;

static void count(void *context, int64_t lo, int64_t hi) {
    Counts *c = (Counts *)context;
    if ((lo - c->lo) % c->chunk || (hi != c->hi && hi - lo != c->chunk) || lo >= hi || hi > c->hi) {
        atomic_fetch_add(&c->misaligned, 1);
    }
    for (int64_t i = lo; i < hi; i++) c->seen[i]++;
}

static void check_counts(int threads, int64_t lo, int64_t hi, int64_t chunk, int allowed, int took_part) {
    Counts *c = (Counts *)calloc(1, sizeof *c);
    c->lo = lo;
    c->hi = hi;
    c->chunk = chunk;
    allowed_threads = allowed;
    assert_int_equal(parallel_ranges(threads, lo, hi, chunk, count, c), took_part);
    assert_int_equal(c->misaligned, 0);
    for (int64_t i = 0; i < N; i++) assert_int_equal(c->seen[i], i >= lo && i < hi);
    free(c);
}

static void every_element_once(void **state) {
    for (int threads = 1; threads <= 8; threads++) {
        check_counts(threads, 0, N, 1000, 100, threads);
        check_counts(threads, 7, N - 3, 64, 100, threads);
    }
}

static void no_more_threads_than_chunks(void **state) {
    check_counts(8, 0, 100, 64, 100, 2);
    check_counts(8, 10, 11, 64, 100, 1);
    check_counts(8, 10, 10, 64, 100, 1);
    check_counts(0, 0, N, 1000, 100, 1);
    check_counts(-3, 20, 10, 1000, 100, 1);
}

static void works_without_refused_threads(void **state) {
    check_counts(8, 0, N, 1000, 0, 1);
    check_counts(8, 0, N, 1000, 3, 4);
}

// Returns only if two threads run at the same time.
static void wait_for_both(void *context, int64_t lo, int64_t hi) {
    atomic_int *inside = (atomic_int *)context;
    atomic_fetch_add(inside, 1);
    while (atomic_load(inside) < 2) continue;
}

static void threads_run_at_the_same_time(void **state) {
    atomic_int inside = 0;
    allowed_threads = 1;
    assert_int_equal(parallel_ranges(2, 0, 2, 1, wait_for_both, &inside), 2);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_element_once),
        cmocka_unit_test(no_more_threads_than_chunks),
        cmocka_unit_test(works_without_refused_threads),
        cmocka_unit_test(threads_run_at_the_same_time),
    };
    return cmocka_run_group_tests_name("parallel", tests, NULL, NULL);
}
