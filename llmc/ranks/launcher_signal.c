// SIGCONT from the launcher: see launcher_signal.h.
#include "llmc/ranks/launcher_signal.h"

#include <signal.h>
#include <stdatomic.h>

// File scope, because a signal handler gets no context argument. Times are milliseconds of the
// monotonic clock, 0: never.
static atomic_llong continued;  // first SIGCONT that arrived while the process was running
static atomic_llong asked;      // last call of launcher_signal_age; the watchdog calls it every second
static atomic_llong woken;      // last such call after a long gap: the watchdog may run before the handler
static atomic_int polls;        // polls of all ranks since `continued`
enum { RUNNING_MS = 2000, AWAKE_MS = 1000 };

static long long now_ms(void) { return (long long)(1e3 * monotonic_seconds()); }

static void on_continue(int number) {
    long long none = 0, at = now_ms();
    bool running = at - atomic_load(&asked) < RUNNING_MS && at - atomic_load(&woken) > AWAKE_MS;
    if (running && atomic_compare_exchange_strong(&continued, &none, at)) atomic_store(&polls, 0);
}

void launcher_signal_watch(void) {
    struct sigaction take = {.sa_handler = on_continue, .sa_flags = SA_RESTART};
    atomic_store(&asked, now_ms());
    sigaction(SIGCONT, &take, NULL);
}

void launcher_signal_ignore(void) {
    signal(SIGCONT, SIG_DFL);
    atomic_store(&continued, 0);
}

double launcher_signal_age(void) {
    long long at = atomic_load(&continued), now = now_ms();
    if (now - atomic_exchange(&asked, now) > RUNNING_MS) atomic_store(&woken, now);
    return at ? 1e-3 * (double)(now - at) : -1;
}

bool launcher_signal_pending(void) { return atomic_load(&continued) != 0; }

void launcher_signal_polled(bool arrived) {
    if (arrived && atomic_fetch_add(&polls, 1) > 0) atomic_store(&continued, 0);
}
