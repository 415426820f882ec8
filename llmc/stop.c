// Polling for reasons to leave: see stop.h.
#include "llmc/stop.h"

#include <signal.h>
#include <time.h>

static sigset_t stop_signals(void) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGUSR1);
    sigaddset(&set, SIGINT);
    return set;
}

void stop_block_signals(void) {
    sigset_t set = stop_signals();
    sigprocmask(SIG_BLOCK, &set, NULL);
}

void stop_poll(Stop *stop, StopReason own, Peers world) {
    sigset_t set = stop_signals();
    struct timespec at_once = {0, 0};
    int caught = sigtimedwait(&set, NULL, &at_once);
    if (caught > 0 && own < STOP_SIGNAL) own = STOP_SIGNAL;
    int found[3] = {(int)own, caught > 0 ? caught : 0, stop->busy};
    peers_reduce(world, found, 3, MPI_INT, MPI_MAX);
    if (found[0] > (int)stop->reason) stop->reason = (StopReason)found[0];
    if (found[1]) stop->signal_number = found[1];
    stop->busy = found[2] != 0;
}

const char *stop_signal_name(const Stop *stop) {
    return stop->signal_number == SIGTERM ? "SIGTERM" : stop->signal_number == SIGINT ? "SIGINT" : "SIGUSR1";
}
