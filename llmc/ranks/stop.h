// Leaving a run early: signals, the time limit, data found broken. Signals are kept and polled, so
// that a step is never cut in two. Every rank reaches the same answer. Called by train_gpt.cu after
// each step and between the parts of an evaluation, and by salvage.c.
#pragma once
#include "llmc/ranks/peers.h"
LLMC_BEGIN

// In order of weight: the weightiest reason of any rank counts. STOP_VERDICT: a replica group's
// verdict ends the run.
typedef enum StopReason { GO_ON, STOP_DURATION, STOP_SIGNAL, STOP_VERDICT, STOP_DATA } StopReason;

typedef struct Stop {
    StopReason reason;
    int signal_number;  // SIGTERM, SIGUSR1 or SIGINT, once one was caught on any rank
    bool busy;          // this rank still does something in the background; after stop_poll: some rank does
} Stop;

// From here on SIGTERM, SIGUSR1 and SIGINT end nothing. They are blocked in this thread and those
// that it starts. A handler keeps what older threads are given. Call it before MPI starts threads
// of its own; it may be called again.
void stop_catch_signals(void);
// From here on SIGCONT tells that the launcher has begun to end the job: Open MPI's mpirun sends it
// to every rank before it sends SIGTERM and SIGKILL.
void stop_watch_launcher(void);
// Seconds since it came; -1: it has not. It is forgotten when two polls of all ranks have passed
// since: all live. One does not count that comes when nobody has called this function for two
// seconds, or had not until just before: the process was stopped (Ctrl-Z and fg).
double stop_seconds_since_launcher(void);
// Collective over the world, once a poll has said that a signal came to the job. All ranks live, so
// from here on SIGCONT, which a launcher may have sent with it, tells nothing: a slow save is no
// lost node.
void stop_ignore_launcher(Peers world);
// Collective over the world: adds this rank's reason to those of the others. GO_ON: only a pending
// signal, if there is one.
void stop_poll(Stop *stop, StopReason own, Peers world);
// "SIGTERM", ...
const char *stop_signal_name(const Stop *stop);

LLMC_END
