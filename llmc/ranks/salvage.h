// A node that is lost while nodes train alone (--local-steps): what the others have is saved before
// the job ends. A node counts as missing when the time limit passes, when the transport fails, or
// when the launcher begins to end the job. Whoever waits for other nodes then calls the run's
// handler. It asks who is left, saves, and does not return (llmc/run/survivors.c).
//
// Asked by peers.c, heartbeat.c and the backends' comm files, which wait. One per process, made by
// run.c, armed by train_gpt.cu while it trains.
#pragma once
#include <mpi.h>

#include "llmc/ranks/peers.h"
LLMC_BEGIN

// Called once, on the main thread, behind the latest step: between two, in an evaluation or in a
// save. why: what was noticed. It ends the process. It returns where more than one node does not
// answer, or ranks of this one do not.
typedef void (*SalvageSave)(void *context, const char *why);

Salvage *salvage_create(void);
void salvage_free(Salvage *salvage);
// Collective. From here on losses are handled. per_node: ranks of a node.
void salvage_preset(const Site *site, Peers world, int per_node, SalvageSave save, void *context);
// From here on a lost rank ends the job as ever. Collective. Nothing where it is not armed.
void salvage_disarm(const Site *site);

// From any thread. True from preset to disarm.
bool salvage_covers(const Site *site);
// Seconds beyond a limit of `limit` seconds that a rank waits for its own node's ranks, so that the
// other nodes can save before it ends the job. 0 where nothing is handled.
double salvage_patience(const Site *site, double limit);
// True where rank (of the world) belongs to another node. The watchdog then does not end the job
// for it.
bool salvage_spares(const Site *site, int rank);
// Some rank of another node does not come any more.
void salvage_notice(const Site *site);
bool salvage_noticed(const Site *site);
// For a wait that has lasted `seconds`. True once a loss was noticed. True too when the wait and
// the launcher's signal are both more than 5 s old.
bool salvage_due(const Site *site, double seconds);

// On the main thread.
// Another rank has begun to salvage.
bool salvage_asked(const Site *site);
// Calls the handler, the first time. Returns where it is not armed, or nothing can be saved.
void salvage_begin(const Site *site, const char *why);
// The handler has returned: what it gave up is lost, and the job must end.
bool salvage_failed(const Site *site);
// For the handler: a communicator of the ranks of all nodes but one, in world order, which lasts
// until the process ends. *lost: the node that does not answer within 20 s, or the time limit where
// that is less; -1: all do. It takes at most twice that, and 5 s. MPI_COMM_NULL: more than one node
// is lost, or this one is.
MPI_Comm salvage_survivors(const Site *site, int *lost);

LLMC_END
