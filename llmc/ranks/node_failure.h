// Node-failure recovery while nodes train independently (--local-steps): if a node is lost, the
// other nodes save their state before the job ends. A node counts as lost when a wait exceeds its
// limit, the transport fails, or the launcher begins to end the job. Code that waits for other
// nodes then calls node_failure_recover, which runs the handler set by node_recovery_arm.
//
// All functions are no-ops (or return false or 0) unless recovery is armed. Called by code that
// waits: peers.c, watchdog.c and the backends' communication. One object per process, made by
// run.c.
#pragma once
#include <mpi.h>

#include "llmc/base/base.h"
LLMC_BEGIN

// Runs once, on the main thread, with the state of the last complete step: between two steps, in an
// evaluation, or in a save. why: the symptom. Returns only if nothing could be saved: several nodes
// are lost, or ranks of this one.
typedef void (*NodeFailureHandler)(void *context, const char *why);

// The ranks that take part in recovery.
typedef struct RecoveryGroup {
    MPI_Comm comm;    // duplicate of the world, for recovery messages only
    double patience;  // seconds to wait for answers: equal on all ranks
    int rank, size, per_node;
} RecoveryGroup;

NodeFailure *node_failure_create(void);
void node_failure_free(NodeFailure *failure);
// Sets the handler; node_recovery.h has the collective version. Disarming returns the group.
void node_failure_arm(NodeFailure *failure, RecoveryGroup group, NodeFailureHandler handler, void *context);
RecoveryGroup node_failure_disarm(NodeFailure *failure);
const RecoveryGroup *node_failure_group(const Site *site);

// From any thread.
// Returns true while recovery is armed.
bool node_failure_handled(const Site *site);
// Seconds beyond `limit` that a rank waits for ranks of its own node, so that the other nodes can
// save before it ends the job.
double node_failure_extra_wait(const Site *site, double limit);
// Returns true if `rank` (of the world) belongs to another node: the watchdog must not end the job
// because of it.
bool node_failure_tolerates(const Site *site, int rank);
// Records that a rank of another node no longer responds.
void node_failure_report(const Site *site);
bool node_failure_reported(const Site *site);
// For a wait that has lasted `seconds`: returns true if a failure was reported, or if both the wait
// and the launcher's signal are more than 5 s old.
bool node_failure_suspected(const Site *site, double seconds);

// On the main thread.
// Returns true if another rank has started recovery.
bool node_failure_peer_recovering(const Site *site);
// Runs the handler on the first call. Returns if nothing can be saved.
void node_failure_recover(const Site *site, const char *why);
// Returns true if the handler has returned: the interrupted operation is lost and the job must end.
bool node_failure_unrecoverable(const Site *site);

// First message of recovery, which node_failure_peer_recovering looks for.
enum { RECOVERY_TAG_ALIVE };

// --- the launcher's signal -----------------------------------------------------------------------

// Detects that the launcher has begun to end the job: Open MPI's mpirun sends SIGCONT to every rank
// before SIGTERM and SIGKILL. Also called by stop.c.

// Installs the SIGCONT handler.
void launcher_signal_watch(void);
// Removes the handler and forgets a signal.
void launcher_signal_ignore(void);
// Seconds since SIGCONT arrived, or -1 if it has not. Callable from any thread, at least once a
// second. A SIGCONT is ignored if there was no call in the two seconds before it, or calls have
// only just resumed: the process was then stopped (Ctrl-Z and fg).
double launcher_signal_age(void);
// Brackets a collective poll of all ranks: `arrived` is whether a signal was pending when the poll
// began. After two such polls the signal is forgotten, since all ranks are alive. One poll isn't
// enough: a rank that was already dead may still have contributed to the first.
bool launcher_signal_pending(void);
void launcher_signal_polled(bool arrived);

LLMC_END
