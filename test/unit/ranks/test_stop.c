// llmc/ranks/stop.c: a signal to the process is taken by a poll, whichever thread the kernel gives
// it to, and the weightiest reason counts.
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
#include "llmc/ranks/launcher_signal.h"
#include "llmc/ranks/stop.h"

static void nap(void) {
    struct timespec t = {0, 1000000};
    nanosleep(&t, NULL);
}

// A thread that was there before main blocked anything, as those are that a library starts when it
// is loaded.
static void *live(void *end) {
    while (!atomic_load((atomic_bool *)end)) nap();
    return NULL;
}

// To a thread that lets it through, if there is one.
static int to_process(int number) { return kill(getpid(), number); }

// Polls, as steps do, until a signal was taken; 10 s are more than another thread's handler can
// take to run.
static Stop polled(StopReason own) {
    Stop stop = {GO_ON, 0, false};
    Site site = {.rank = 0, .phase = "test"};
    for (int i = 0; i < 10000 && stop.signal_number == 0; i++) {
        if (i) nap();
        stop_poll(&stop, own, (Peers){MPI_COMM_WORLD, 0, &site});
    }
    return stop;
}

static bool nothing_left(void) {
    Stop stop = {GO_ON, 0, false};
    Site site = {.rank = 0, .phase = "test"};
    for (int i = 0; i < 20; i++) {
        stop_poll(&stop, GO_ON, (Peers){MPI_COMM_WORLD, 0, &site});
        nap();
    }
    return stop.reason == GO_ON && stop.signal_number == 0;
}

static void each_is_named(int (*send)(int number)) {
    static const struct {
        int number;
        const char *name;
    } all[] = {{SIGTERM, "SIGTERM"}, {SIGUSR1, "SIGUSR1"}, {SIGINT, "SIGINT"}};
    for (int i = 0; i < 3; i++) {
        assert_int_equal(send(all[i].number), 0);
        Stop stop = polled(GO_ON);
        assert_int_equal(stop.reason, STOP_SIGNAL);
        assert_int_equal(stop.signal_number, all[i].number);
        assert_string_equal(stop_signal_name(&stop), all[i].name);
        assert_true(nothing_left());
    }
}

static void an_older_thread_gets_them(void **state) { each_is_named(to_process); }
static void they_wait_on_the_thread_that_polls(void **state) { each_is_named(raise); }

static void more_of_them_end_nothing(void **state) {
    for (int i = 0; i < 100; i++) assert_int_equal(to_process(SIGUSR1), 0);
    assert_int_equal(polled(GO_ON).signal_number, SIGUSR1);
    for (int i = 0; i < 100; i++) assert_int_equal(to_process(i % 2 ? SIGTERM : SIGINT) || raise(SIGUSR1), 0);
    assert_int_equal(polled(GO_ON).reason, STOP_SIGNAL);
    while (!nothing_left()) nap();
}

static void the_weightiest_reason_counts(void **state) {
    assert_int_equal(to_process(SIGTERM), 0);
    assert_int_equal(polled(STOP_DURATION).reason, STOP_SIGNAL);
    assert_int_equal(to_process(SIGTERM), 0);
    assert_int_equal(polled(STOP_DATA).reason, STOP_DATA);
    assert_true(nothing_left());
}

// Only a process that runs, and asks, takes SIGCONT for the launcher's.
static void a_launcher_is_noticed(void **state) {
    launcher_signal_watch();
    assert_true(launcher_signal_age() < 0);
    usleep(2100000);  // as if stopped
    raise(SIGCONT);
    assert_true(launcher_signal_age() < 0);
    raise(SIGCONT);  // the watchdog has been faster than the handler
    assert_true(launcher_signal_age() < 0);
    usleep(1100000);
    raise(SIGCONT);
    assert_true(launcher_signal_age() >= 0);
    usleep(100000);
    raise(SIGCONT);
    assert_true(launcher_signal_age() >= 0.1);  // since the first
    signal(SIGCONT, SIG_DFL);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_launcher_is_noticed),
        cmocka_unit_test(an_older_thread_gets_them),
        cmocka_unit_test(they_wait_on_the_thread_that_polls),
        cmocka_unit_test(more_of_them_end_nothing),
        cmocka_unit_test(the_weightiest_reason_counts),
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
