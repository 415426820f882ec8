// Reasons to end a run early: signals, the time limit, corrupt data. Signals are recorded and
// polled, so they never interrupt a step, and all ranks make the same decision. Polled after each
// step and between the batches of an evaluation.
#pragma once
#include "llmc/ranks/peers.h"
LLMC_BEGIN

// In order of increasing priority; the highest reason of any rank wins. STOP_ANOMALY: the anomaly
// guard of a replica group ends the run.
typedef enum StopReason { STOP_NONE, STOP_DURATION, STOP_SIGNAL, STOP_ANOMALY, STOP_DATA } StopReason;

typedef struct Stop {
    StopReason reason;
    int signal_number;  // SIGTERM, SIGUSR1 or SIGINT, once any rank has received one
    bool busy;          // before stop_poll: this rank has work in the background; after it: any rank has
} Stop;

// Lets stop_poll receive SIGTERM, SIGUSR1 and SIGINT: blocks them in this thread and the threads it
// starts, and installs a handler for existing threads. Call before MPI starts its threads.
void stop_catch_signals(void);
// Stops treating SIGCONT as a sign that mpirun is ending the job (node_failure.h), so that a slow
// save after a signal is not mistaken for a lost node. Collective over the world.
void stop_ignore_launcher_signal(Peers world);
// Combines the reasons of all ranks. own: this rank's reason other than a signal. Collective.
void stop_poll(Stop *stop, StopReason own, Peers world);
// Returns true if this rank has received a signal that stop_poll has not reported yet.
bool stop_signal_waits(void);
// Returns "SIGTERM", "SIGINT" or "SIGUSR1".
const char *stop_signal_name(const Stop *stop);

LLMC_END
