// Leaving a run early: signals, the time limit, damaged data. Signals are recorded and polled, so
// that a step is never interrupted, and all ranks reach the same decision. Called by train_gpt.c
// after each step and between the parts of an evaluation.
#pragma once
#include "llmc/ranks/peers.h"
LLMC_BEGIN

// In order of priority: the highest reason of any rank wins. STOP_ANOMALY: the step status of a
// replica group ends the run.
typedef enum StopReason { STOP_NONE, STOP_DURATION, STOP_SIGNAL, STOP_ANOMALY, STOP_DATA } StopReason;

typedef struct Stop {
    StopReason reason;
    int signal_number;  // SIGTERM, SIGUSR1 or SIGINT, once any rank has received one
    bool busy;          // this rank has work in the background; after stop_poll: any rank has
} Stop;

// Makes SIGTERM, SIGUSR1 and SIGINT wait for stop_poll: blocks them in this thread and in threads
// it starts, and installs a handler for threads that exist already. Call before MPI starts its
// threads; may be called again.
void stop_catch_signals(void);
// Ignores the launcher's SIGCONT until exit, so that a slow save isn't taken for a lost node.
// Collective over the world, after a poll reported a signal.
void stop_ignore_launcher_signal(Peers world);
// Combines the reasons of all ranks. Collective over the world. own == STOP_NONE: only a pending
// signal counts.
void stop_poll(Stop *stop, StopReason own, Peers world);
// Returns "SIGTERM", "SIGINT" or "SIGUSR1".
const char *stop_signal_name(const Stop *stop);

LLMC_END
