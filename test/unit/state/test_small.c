// Small host modules: counter-based uniform random numbers, memory plan, error lines, integer
// helpers.
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "llmc/base/memory_plan.h"
#include "llmc/base/rng.h"
#include "llmc/base/version.h"
#include "llmc/state/zero.h"

static void uniforms_are_below_one(void **state) {
    for (uint64_t i = 0; i < 1000; i++) {
        double u = rng_uniform(9, 1, i);
        assert_true(u >= 0.0 && u < 1.0);
    }
}

static void memory_plan_matches_allocation(void **state) {
    Site site = {.rank = -1, .phase = "test"};
    Error err = {0};
    Device *device = device_open(0, &site, &err);
    MemoryPlan memory_plan = {0};
    void *a, *b, *none = (void *)1, *host;
    memory_plan_reserve(&memory_plan, "one", "first", 1000, &a);
    memory_plan_reserve(&memory_plan, "two", "second", 24, &b);
    memory_plan_reserve(&memory_plan, "two", "nothing", 0, &none);
    memory_plan_reserve_host(&memory_plan, "host", "copy", 77, &host);  // allocated separately
    assert_int_equal(memory_plan_total(&memory_plan), 1024);
    assert_null(none);
    assert_true(memory_plan_allocate(&memory_plan, device, 1, &err));
    assert_true(a && b && host && !none);
    memset(host, 1, 77);
    for (int i = 0; i < 1000; i++) assert_int_equal(((char *)a)[i], 0);
    memory_plan_free(&memory_plan, device);
    assert_true(!a && !host);

    // Host memory is device memory on CPU ranks.
    memory_plan_reserve_host(&memory_plan, "huge", "more than there is", (size_t)1 << 60, &host);
    assert_false(memory_plan_allocate(&memory_plan, device, 1, &err));
    memory_plan_free(&memory_plan, device);
    memory_plan_reserve(&memory_plan, "huge", "more than there is", (size_t)1 << 60, &a);
    assert_false(memory_plan_allocate(&memory_plan, device, 1, &err));
    assert_int_equal(err.code, EXIT_ENVIRONMENT);
    assert_non_null(strstr(err.what, "too much"));
    memory_plan_free(&memory_plan, device);
    device_close(device);
}

// Captures the output of error_print.
static void printed_error(const Site *site, const char *what, char *text, size_t bytes) {
    FILE *file = tmpfile();
    fflush(stderr);
    int kept = dup(STDERR_FILENO);
    assert_non_null(file);
    dup2(fileno(file), STDERR_FILENO);
    error_print(site, what);
    dup2(kept, STDERR_FILENO);
    close(kept);
    rewind(file);
    text[fread(text, 1, bytes - 1, file)] = 0;
    fclose(file);
}

static void errors_stay_on_one_line(void **state) {
    Site site = {3, 1, 2, 1841, "reduce gradients", NULL, NULL};
    char text[2048], longest[3000];
    printed_error(&site, "it broke; mend it", text, sizeof text);
    assert_string_equal(text,
                        "error: rank 3 (node 1, gpu 2) iteration 1841 reduce gradients: it broke; "
                        "mend it\n");
    site.gpu = -1;
    printed_error(&site, "it broke", text, sizeof text);
    assert_string_equal(text, "error: rank 3 (node 1) iteration 1841 reduce gradients: it broke\n");
    // A name from a damaged file may contain a newline with a fake error line, and a terminal
    // escape.
    printed_error(NULL, "tensor 'a\nerror: \033[2J\177\xC3\xA9'", text, sizeof text);
    assert_string_equal(text, "error: tensor 'a?error: ?[2J?\xC3\xA9'\n");
    memset(longest, 'x', sizeof longest);
    longest[sizeof longest - 1] = 0;
    printed_error(NULL, longest, text, sizeof text);
    assert_int_equal(strlen(text),
                     strlen("error: ") + sizeof((Error *)0)->what);  // truncated, ends in a newline
}

// If stdout and stderr are the same file, buffered output is written before the error.
static void errors_follow_the_log(void **state) {
    enum { LINES = 300 };
    FILE *file = tmpfile();
    assert_non_null(file);
    fflush(stdout);
    int out = dup(STDOUT_FILENO), err = dup(STDERR_FILENO), seen = 0;
    dup2(fileno(file), STDOUT_FILENO);
    dup2(fileno(file), STDERR_FILENO);
    for (int i = 0; i < LINES; i++) printf("  argument_%d ........................ None\n", i);
    error_print(NULL, "it broke; mend it");
    dup2(out, STDOUT_FILENO);
    dup2(err, STDERR_FILENO);
    close(out);
    close(err);
    rewind(file);
    char line[200], last[200] = "";
    while (fgets(line, sizeof line, file)) {
        seen += !strncmp(line, "  argument_", 11) && strstr(line, " None\n");
        memcpy(last, line, sizeof last);
    }
    fclose(file);
    assert_int_equal(seen, LINES);
    assert_string_equal(last, "error: it broke; mend it\n");
}

// A full pipe must not block error_print, because the watchdog may call it to end the job.
static void errors_do_not_block_on_full_pipes(void **state) {
    int ends[2], out;
    char block[4096], text[200];
    memset(block, 'x', sizeof block);
    assert_int_equal(pipe(ends), 0);
    fcntl(ends[1], F_SETFL, O_NONBLOCK);
    while (write(ends[1], block, sizeof block) > 0) continue;
    fcntl(ends[1], F_SETFL, 0);
    fflush(stdout);
    out = dup(STDOUT_FILENO);
    dup2(ends[1], STDOUT_FILENO);
    fputs("unread", stdout);
    printed_error(NULL, "it broke; mend it", text, sizeof text);
    assert_string_equal(text, "error: it broke; mend it\n");
    dup2(out, STDOUT_FILENO);  // restores stdout for the test's report
    close(out);
    close(ends[0]);
    close(ends[1]);
}

static void at_exit(void) { fputs("exit() was called\n", stderr); }

static void *runs_out_of_memory(void *site) {
    set_thread_site((const Site *)site);
    fatal(NULL, EXIT_ENVIRONMENT, "out of memory; use a machine with more memory");
}

static void ends_out_of_memory(bool on_a_thread) {
    static const Site site = {3, 1, 2, 1841, "save checkpoint", NULL, NULL};
    pthread_t thread;
    atexit(at_exit);
    if (on_a_thread && pthread_create(&thread, NULL, runs_out_of_memory, (void *)&site) == 0) {
        pthread_join(thread, NULL);
    } else runs_out_of_memory((void *)&site);
}

static void *executes_illegal_instruction(void *barrier) {
    pthread_barrier_wait((pthread_barrier_t *)barrier);
    raise(SIGILL);
    return NULL;
}

static void ends_by_instructions_on_threads(bool unused) {
    enum { THREADS = 8 };
    pthread_t thread[THREADS];
    pthread_barrier_t barrier;
    report_illegal_instructions();
    pthread_barrier_init(&barrier, NULL, THREADS);
    for (int i = 0; i < THREADS; i++)
        pthread_create(&thread[i], NULL, executes_illegal_instruction, &barrier);
    for (int i = 0; i < THREADS; i++) pthread_join(thread[i], NULL);
}

// Runs `ends` in a child process. Returns its exit code and its stderr.
static int end_child(void (*ends)(bool on_a_thread), bool on_a_thread, char *text, size_t bytes) {
    FILE *file = tmpfile();
    assert_non_null(file);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        dup2(fileno(file), STDERR_FILENO);
        ends(on_a_thread);
        _exit(77);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    rewind(file);
    text[fread(text, 1, bytes - 1, file)] = 0;
    fclose(file);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// Only the main thread runs exit handlers. MPI has one.
static void only_the_main_thread_runs_exit(void **state) {
    char text[2048];
    assert_int_equal(end_child(ends_out_of_memory, false, text, sizeof text), EXIT_ENVIRONMENT);
    const char *line = "error: rank 3 (node 1, gpu 2) iteration 1841 save checkpoint: out of memory; ";
    assert_non_null(strstr(text, line));
    assert_non_null(strstr(text, "exit() was called\n"));
    assert_int_equal(end_child(ends_out_of_memory, true, text, sizeof text), EXIT_ENVIRONMENT);
    assert_non_null(strstr(text, line));
    assert_null(strstr(text, "exit()"));
}

// Kernels run on all threads, so several may execute an illegal instruction at the same time.
static void illegal_instruction_is_reported_once(void **state) {
    for (int i = 0; i < 40; i++) {
        char text[2048];
        int code = end_child(ends_by_instructions_on_threads, true, text, sizeof text);
        assert_int_equal(code, EXIT_ENVIRONMENT);
        assert_non_null(strstr(text, "error: this CPU lacks an instruction"));
        assert_ptr_equal(strchr(text, '\n'), text + strlen(text) - 1);
    }
}

static void integer_helpers(void **state) {
    assert_int_equal(lcm64(128, 96), 384);
    assert_int_equal(lcm64(7, 7), 7);
    assert_int_equal(round_up64(0, 8), 0);
    assert_int_equal(round_up64(1, 8), 8);
    assert_int_equal(round_up64(16, 8), 16);
    assert_int_equal(ceil_div64(9, 4), 3);
}

// Only time between frequent polls counts toward a limit. A long gap between polls means that the
// job was stopped.
static void pauses_do_not_count_toward_limits(void **state) {
    double now = monotonic_seconds();
    Deadline polled = {now - 1.0, now - 1.5}, paused = {now - 50.0, now - 100.0}, ahead = deadline_in(1000.0);
    assert_true(deadline_passed(&polled));
    assert_false(deadline_passed(&paused));
    assert_true(paused.at > now + 40.0 && paused.at < now + 60.0);
    assert_false(deadline_passed(&ahead));
}

static void exposed_time_is_the_minimum_over_ranks(void **state) {
    const double ms[8] = {5, 1, 4, 9, 2, 3, 0.5, 1};  // (2, 4)
    Exposed e = timers_exposed_of(ms, 4);
    assert_true(e.gradients_ms == 1 && e.weights_ms == 3 && e.most_ms == 10);
    const double other[4] = {2, 7, 6, 0};  // (2, 2): the minima are on different ranks
    e = timers_exposed_of(other, 2);
    assert_true(e.gradients_ms == 7 && e.weights_ms == 0 && e.most_ms == 8);
    e = timers_exposed_of(ms, 1);
    assert_true(e.gradients_ms == 5 && e.weights_ms == 1 && e.most_ms == 6);
}

// The version text names every linked library that affects input or output.
static void libraries_are_named(void **state) {
    char text[512];
    version_libraries(text, sizeof text);
    const char *const names[] = {"xxHash ", "cJSON ", "PCRE2 ", "Unicode "};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (!strstr(text, names[i])) fail_msg("no %sin \"%s\"", names[i], text);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(uniforms_are_below_one),
        cmocka_unit_test(memory_plan_matches_allocation),
        cmocka_unit_test(errors_stay_on_one_line),
        cmocka_unit_test(libraries_are_named),
        cmocka_unit_test(errors_follow_the_log),
        cmocka_unit_test(errors_do_not_block_on_full_pipes),
        cmocka_unit_test(only_the_main_thread_runs_exit),
        cmocka_unit_test(illegal_instruction_is_reported_once),
        cmocka_unit_test(pauses_do_not_count_toward_limits),
        cmocka_unit_test(integer_helpers),
        cmocka_unit_test(exposed_time_is_the_minimum_over_ranks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
