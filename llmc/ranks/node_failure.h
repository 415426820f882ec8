// Node-failure recovery with --local-steps: if a node is lost, the other nodes save their state
// before the job ends. A node counts as lost if a wait exceeds its limit, communication fails, or
// the launcher begins to end the job. Code that waits for other nodes (peers.c, watchdog.c, the
// communication backends) then calls node_failure_recover, which runs the handler.
//
// All functions are no-ops (or return false or 0) unless recovery is armed.
#pragma once
#include <mpi.h>

#include "llmc/base/base.h"
LLMC_BEGIN

// Saves the state of the last complete step and ends the process. Runs once, on the main thread,
// which may be between two steps, in an evaluation or in a save. why: the symptom. Returns only if
// nothing could be saved, because several nodes or ranks of this node are lost.
typedef void (*NodeFailureHandler)(void *context, const char *why);

// The ranks that take part in recovery.
typedef struct RecoveryGroup {
    MPI_Comm comm;    // duplicate of the world, only for recovery messages
    double patience;  // seconds to wait for answers, equal on all ranks
    int rank, size, per_node;
} RecoveryGroup;

NodeFailure *node_failure_create(void);
void node_failure_free(NodeFailure *failure);
// Arm and disarm recovery on this rank; node_recovery.h has the collective versions.
void node_failure_arm(NodeFailure *failure, RecoveryGroup group, NodeFailureHandler handler, void *context);
RecoveryGroup node_failure_disarm(NodeFailure *failure);
const RecoveryGroup *node_failure_group(const Site *site);

// The following functions may be called from any thread. Returns true while recovery is armed.
bool node_failure_handled(const Site *site);
// Returns the seconds beyond `limit` that a rank waits for ranks of its own node, so that the other
// nodes can save before it ends the job.
double node_failure_extra_wait(const Site *site, double limit);
// Returns true if world rank `rank` belongs to another node, so its loss must not end the job.
bool node_failure_tolerates(const Site *site, int rank);
// Records that a rank of another node no longer responds.
void node_failure_report(const Site *site);
bool node_failure_reported(const Site *site);
// Returns true if a failure was reported, or if this wait has lasted more than 5 s and the
// launcher's signal arrived more than 5 s ago. seconds: duration of the wait.
bool node_failure_suspected(const Site *site, double seconds);

// The next functions are for the main thread. Returns true if another rank has started recovery.
bool node_failure_peer_recovering(const Site *site);
// Runs the handler on the first call. Returns if nothing can be saved.
void node_failure_recover(const Site *site, const char *why);
// Returns true if the handler has returned. Then nothing was saved, and the job must end.
bool node_failure_unrecoverable(const Site *site);

// First message of recovery, which node_failure_peer_recovering looks for.
enum { RECOVERY_TAG_ALIVE };

// --- the launcher's signal -----------------------------------------------------------------------

// Detects that the launcher has begun to end the job: Open MPI's mpirun sends SIGCONT to every rank
// before SIGTERM and SIGKILL. Also called by stop.c.

void launcher_signal_watch(void);
void launcher_signal_ignore(void);
// Returns the seconds since SIGCONT arrived, or -1 if it has not. Must be called at least once a
// second, from any thread: a SIGCONT is ignored if there was no call in the two seconds before it,
// or if calls have just resumed, because then the process had been stopped (Ctrl-Z, fg).
double launcher_signal_age(void);
// Call these before and after a collective poll of all ranks; arrived: the result of the first.
// A pending signal is discarded after two polls, because all ranks are then known to be alive. One
// poll is not enough, because a rank may have died after contributing to it.
bool launcher_signal_pending(void);
void launcher_signal_polled(bool arrived);

LLMC_END
