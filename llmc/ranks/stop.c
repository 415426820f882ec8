// Polling for reasons to leave: see stop.h.
//
// Our own threads and MPI's start with these signals blocked, so that none of their calls is cut
// short (EINTR): a signal waits for the poll. But a library may start threads when it is loaded,
// before main can block anything. OpenBLAS's pool does, wherever a rank may use more than one core.
// The kernel gives a signal of the process to any thread that lets it through, and by default that
// ends the process. No mask set later reaches such a thread. A handler holds for all threads there
// are.
#include "llmc/ranks/stop.h"

#include <signal.h>
#include <stdatomic.h>
#include <time.h>

// The last signal that came on another thread, 0: none. A handler is told nothing, so this is the
// file's.
static atomic_int handled;

static void on_signal(int number) { atomic_store(&handled, number); }

// Milliseconds of the monotonic clock. The first SIGCONT that came while this process was running;
// 0: none. When somebody last asked for it, as the watchdog does every second. And when somebody
// did so who had not for long: the watchdog may be faster than the handler.
static atomic_llong continued, asked, woken;
static atomic_int polled;  // since then
enum { RUNNING = 2000, AWAKE = 1000 };

static long long now(void) { return (long long)(1e3 * monotonic_seconds()); }

static void on_continue(int number) {
    long long none = 0, at = now();
    bool running = at - atomic_load(&asked) < RUNNING && at - atomic_load(&woken) > AWAKE;
    if (running && atomic_compare_exchange_strong(&continued, &none, at)) atomic_store(&polled, 0);
}

// After a poll that began when SIGCONT had come. A rank that was dead by then may have taken part
// in the first, but not in the second.
static void all_live(void) {
    if (atomic_fetch_add(&polled, 1) > 0) atomic_store(&continued, 0);
}

void stop_watch_launcher(void) {
    struct sigaction take = {.sa_handler = on_continue, .sa_flags = SA_RESTART};
    atomic_store(&asked, now());
    sigaction(SIGCONT, &take, NULL);
}

void stop_ignore_launcher(Peers world) {
    peers_meet(world);  // the second time after a poll: see all_live
    signal(SIGCONT, SIG_DFL);
    atomic_store(&continued, 0);
}

double stop_seconds_since_launcher(void) {
    long long at = atomic_load(&continued), here = now();
    if (here - atomic_exchange(&asked, here) > RUNNING) atomic_store(&woken, here);
    return at ? 1e-3 * (double)(here - at) : -1;
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

// The number of a signal that came since the last time, 0: none. Where several came, the next poll
// finds another.
static int take_signal(void) {
    sigset_t set = stop_signals();
    struct timespec at_once = {0, 0};
    int waiting = sigtimedwait(&set, NULL, &at_once);
    return waiting > 0 ? waiting : atomic_exchange(&handled, 0);
}

void stop_poll(Stop *stop, StopReason own, Peers world) {
    int caught = take_signal();
    if (caught && own < STOP_SIGNAL) own = STOP_SIGNAL;
    int found[3] = {(int)own, caught, stop->busy};
    bool ending = atomic_load(&continued) != 0;
    peers_reduce(world, found, 3, MPI_INT, MPI_MAX);
    if (ending) all_live();
    if (found[0] > (int)stop->reason) stop->reason = (StopReason)found[0];
    if (found[1]) stop->signal_number = found[1];
    stop->busy = found[2] != 0;
}

const char *stop_signal_name(const Stop *stop) {
    return stop->signal_number == SIGTERM ? "SIGTERM" : stop->signal_number == SIGINT ? "SIGINT" : "SIGUSR1";
}
