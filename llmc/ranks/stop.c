// Polls for reasons to end a run: see stop.h.
// Threads of the program and of MPI start with these signals blocked, so a signal stays pending
// until the next poll and no system call fails with EINTR. But some libraries, such as OpenBLAS,
// start threads when they are loaded, before main can block signals. The kernel may deliver the
// signal to such a thread, and without a handler the process would end. A handler applies to all
// threads.
#include "llmc/ranks/stop.h"

#include <assert.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>

#include "llmc/ranks/node_failure.h"

// Last signal that the handler received, 0: none. File scope: handlers get no context argument.
static atomic_int handled;

static void on_signal(int number) { atomic_store(&handled, number); }

void stop_ignore_launcher_signal(Peers world) {
    peers_barrier(world);  // all ranks have returned from the poll
    launcher_signal_ignore();
}

static sigset_t stop_signals(void) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGUSR1);
    sigaddset(&set, SIGINT);
    return set;
}

void stop_catch_signals(void) {
    sigset_t set = stop_signals();
    struct sigaction take = {.sa_handler = on_signal, .sa_mask = set, .sa_flags = SA_RESTART};
    sigprocmask(SIG_BLOCK, &set, NULL);
    sigaction(SIGTERM, &take, NULL);
    sigaction(SIGUSR1, &take, NULL);
    sigaction(SIGINT, &take, NULL);
}

// Returns a signal that arrived since the last call, or 0. Other signals stay pending.
static int take_signal(void) {
    sigset_t set = stop_signals();
    struct timespec no_wait = {0, 0};
    int pending = sigtimedwait(&set, NULL, &no_wait);
    return pending > 0 ? pending : atomic_exchange(&handled, 0);
}

void stop_poll(Stop *stop, StopReason own, Peers world) {
    assert(stop && own >= STOP_NONE && own <= STOP_DATA);
    int caught = take_signal();
    if (caught && own < STOP_SIGNAL) own = STOP_SIGNAL;
    int found[3] = {(int)own, caught, stop->busy};
    bool ending = launcher_signal_pending();
    peers_all_reduce(world, found, 3, MPI_INT, MPI_MAX);
    launcher_signal_polled(ending);
    if (found[0] > (int)stop->reason) stop->reason = (StopReason)found[0];
    if (found[1]) stop->signal_number = found[1];
    stop->busy = found[2] != 0;
}

bool stop_signal_waits(void) {
    sigset_t pending;
    sigpending(&pending);
    return atomic_load(&handled) != 0 || sigismember(&pending, SIGTERM) == 1 ||
           sigismember(&pending, SIGUSR1) == 1 || sigismember(&pending, SIGINT) == 1;
}

const char *stop_signal_name(const Stop *stop) {
    return stop->signal_number == SIGTERM ? "SIGTERM" : stop->signal_number == SIGINT ? "SIGINT" : "SIGUSR1";
}
