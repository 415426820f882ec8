// llmc/ranks/stop.c: polls detect signals to the process, no matter to which thread the kernel
// delivers them, and the reason with the highest priority is reported.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

#include "llmc/ranks/launch.h"
#include "llmc/ranks/node_failure.h"
#include "llmc/ranks/stop.h"

static void nap(void) {
    struct timespec t = {0, 1000000};
    nanosleep(&t, NULL);
}

// A thread that starts before main has blocked signals, like the threads of loaded libraries.
static void *live(void *end) {
    while (!atomic_load((atomic_bool *)end)) nap();
    return NULL;
}

// Sends a signal that the kernel delivers to any thread that does not block it.
static int to_process(int number) { return kill(getpid(), number); }

// Polls like training steps until a signal arrives, for at most 10 s.
static Stop polled(StopReason own) {
    Stop stop = {STOP_NONE, 0, false};
    Site site = {.rank = 0, .phase = "test"};
    for (int i = 0; i < 10000 && stop.signal_number == 0; i++) {
        if (i) nap();
        stop_poll(&stop, own, (Peers){MPI_COMM_WORLD, 0, &site});
    }
    return stop;
}

static bool nothing_left(void) {
    Stop stop = {STOP_NONE, 0, false};
    Site site = {.rank = 0, .phase = "test"};
    for (int i = 0; i < 20; i++) {
        stop_poll(&stop, STOP_NONE, (Peers){MPI_COMM_WORLD, 0, &site});
        nap();
    }
    return stop.reason == STOP_NONE && stop.signal_number == 0;
}

static void each_is_named(int (*send)(int number)) {
    static const struct {
        int number;
        const char *name;
    } all[] = {{SIGTERM, "SIGTERM"}, {SIGUSR1, "SIGUSR1"}, {SIGINT, "SIGINT"}};
    for (int i = 0; i < 3; i++) {
        assert_int_equal(send(all[i].number), 0);
        Stop stop = polled(STOP_NONE);
        assert_int_equal(stop.reason, STOP_SIGNAL);
        assert_int_equal(stop.signal_number, all[i].number);
        assert_string_equal(stop_signal_name(&stop), all[i].name);
        assert_true(nothing_left());
    }
}

static void older_threads_receive_signals(void **state) { each_is_named(to_process); }
static void signals_wait_for_the_poll(void **state) { each_is_named(raise); }

static void repeated_signals_are_harmless(void **state) {
    for (int i = 0; i < 100; i++) assert_int_equal(to_process(SIGUSR1), 0);
    assert_int_equal(polled(STOP_NONE).signal_number, SIGUSR1);
    for (int i = 0; i < 100; i++) assert_int_equal(to_process(i % 2 ? SIGTERM : SIGINT) || raise(SIGUSR1), 0);
    assert_int_equal(polled(STOP_NONE).reason, STOP_SIGNAL);
    while (!nothing_left()) nap();
}

static void highest_priority_wins(void **state) {
    assert_int_equal(to_process(SIGTERM), 0);
    assert_int_equal(polled(STOP_DURATION).reason, STOP_SIGNAL);
    assert_int_equal(to_process(SIGTERM), 0);
    assert_int_equal(polled(STOP_DATA).reason, STOP_DATA);
    assert_true(nothing_left());
}

// Time of monotonic_seconds (linker option --wrap); negative: the real time.
static double set_time = -1;
double __real_monotonic_seconds(void);
double __wrap_monotonic_seconds(void);
double __wrap_monotonic_seconds(void) { return set_time < 0 ? __real_monotonic_seconds() : set_time; }

// SIGCONT is attributed to the launcher only if the process was not stopped before.
static void launcher_signal_is_detected(void **state) {
    set_time = 100;
    launcher_signal_watch();
    assert_true(launcher_signal_age() < 0);
    set_time += 2.1;  // looks as if the process was stopped
    raise(SIGCONT);
    assert_true(launcher_signal_age() < 0);
    raise(SIGCONT);  // the watchdog ran before the handler
    assert_true(launcher_signal_age() < 0);
    set_time += 1.1;
    raise(SIGCONT);
    assert_float_equal(launcher_signal_age(), 0, 1e-9);
    set_time += 0.125;
    raise(SIGCONT);
    assert_float_equal(launcher_signal_age(), 0.125, 1e-9);  // age of the first signal
    signal(SIGCONT, SIG_DFL);
    set_time = -1;
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(launcher_signal_is_detected), cmocka_unit_test(older_threads_receive_signals),
        cmocka_unit_test(signals_wait_for_the_poll),   cmocka_unit_test(repeated_signals_are_harmless),
        cmocka_unit_test(highest_priority_wins),
    };
    atomic_bool end = false;
    pthread_t older;
    Launch launch;
    if (pthread_create(&older, NULL, live, &end)) return 1;
    stop_catch_signals();
    launch_init(&launch, &argc, &argv);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    atomic_store(&end, true);
    pthread_join(older, NULL);
    launch_finalize(&launch);
    return failed;
}
