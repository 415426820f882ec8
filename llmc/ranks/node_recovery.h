// Collective part of node-failure recovery (node_failure.h): arms it, and finds the surviving nodes
// after a loss. Called by llmc/run.
#pragma once
#include "llmc/ranks/node_failure.h"
#include "llmc/ranks/peers.h"
LLMC_BEGIN

// Arms recovery. Collective over world. per_node: ranks per node.
void node_recovery_arm(const Site *site, Peers world, int per_node, NodeFailureHandler handler,
                       void *context);
// Disarms recovery: a lost rank ends the job again. Collective; no-op unless armed.
void node_recovery_disarm(const Site *site);
// Called by the handler. Returns a communicator of all ranks outside the lost node in world order,
// valid until the process ends, or MPI_COMM_NULL if this node or several nodes are lost. *lost: the
// node that did not answer within 20 s (or the time limit, if shorter); -1 if all nodes answered.
// Takes at most twice that time plus 5 s. A rank of the lost node prints an error if it was only
// late, and waits up to 80 s for the others to save; then *lost is its node, or -2 if they did not.
MPI_Comm node_recovery_surviving_ranks(const Site *site, int *lost);
// Tells the lost node that all others have saved. Called by the lowest surviving rank.
void node_recovery_end(const Site *site, int lost);

LLMC_END
