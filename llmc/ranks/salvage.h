// A node that is lost while nodes train alone (--local-steps): what the others have is saved before
// the job ends. A rank notices that a rank of another node does not come: by the time limit, by an
// error of the transport, or because the launcher ends the job. Whoever waits for other nodes then
// calls the run's handler. It asks who is left, saves, and does not return (llmc/run/survivors.c).
//
// Asked by peers.c, heartbeat.c and the backends' comm files, which wait. One per process, made by
// run.c, armed by train_gpt.cu while it trains.
#pragma once
#include <mpi.h>

#include "llmc/ranks/peers.h"
LLMC_BEGIN

// Called once, on the main thread, behind the latest step: between two, in an evaluation or in a
// save. why: what was noticed. It ends the process, or returns where nothing can be saved.
typedef void (*SalvageSave)(void *context, const char *why);

Salvage *salvage_create(void);
void salvage_free(Salvage *salvage);
// Collective. From here on losses are handled. per_node: ranks of a node.
void salvage_arm(const Site *site, Peers world, int per_node, SalvageSave save, void *context);
// From here on a lost rank ends the job as ever. Collective. Nothing where it is not armed.
void salvage_disarm(const Site *site);

// From any thread. Armed: a lost node is handled, now or already.
bool salvage_covers(const Site *site);
// Seconds beyond a limit of `limit` seconds that a rank waits for its own node's ranks, so that the
// other nodes can save before it ends the job. 0 where nothing is handled.
double salvage_patience(const Site *site, double limit);
// Rank (of the world) is of another node than this one, whose loss is handled.
bool salvage_spares(const Site *site, int rank);
// Some rank of another node does not come any more.
void salvage_notice(const Site *site);
bool salvage_noticed(const Site *site);
// For a wait that began `seconds` ago: the loss was noticed, or the launcher has begun to end the
// job and what is waited for does not come.
bool salvage_due(const Site *site, double seconds);

// On the main thread.
// Another rank has begun to salvage.
bool salvage_asked(const Site *site);
// Calls the handler, the first time. Returns where it is not armed, or nothing can be saved.
void salvage_begin(const Site *site, const char *why);
// For the handler: a communicator of the ranks of all nodes but one, in world order, which lasts
// until the process ends. *lost: the node that does not answer within 20 s, or the time limit where
// that is less; -1: all do. MPI_COMM_NULL: more than one node is lost, or this one is. Collective
// over those ranks.
MPI_Comm salvage_survivors(const Site *site, int *lost);

LLMC_END
