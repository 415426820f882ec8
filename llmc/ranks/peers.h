// Ranks that act together on the host. A collective ends the job where a rank does not come. Ranks
// agree on errors, so that one message is printed and not one per rank. Called wherever ranks meet
// on the host: llmc/run/, the modules that are given Peers, the benches and the MPI tests.
#pragma once
#include <mpi.h>

#include "llmc/base/base.h"
LLMC_BEGIN

// Unless rc is MPI_SUCCESS: ends the job (EXIT_COMMUNICATION) with one line of all ranks, "<what>
// <where> failed: ...". The communicators of a Launch return their errors. An operation that failed
// has left nothing that may be looked at, its request neither.
void mpi_check(const Site *site, int rc, const char *what, const char *where);

// Ranks that act together, and how long one waits for another. A rank that died or hangs must end
// the job, and not stop it for ever.
typedef struct Peers {
    MPI_Comm comm;
    double limit;      // seconds; 0: the heartbeat's alone
    const Site *site;  // for messages, and the heartbeat that is told of waits; may be NULL
} Peers;

// Collectives over the hosts. Each ends the job (EXIT_COMMUNICATION) with one line when MPI fails,
// or when a rank does not come within the limit. The line names that rank if this host's ranks know
// it. Where losses are handled (node_failure.h) the others save first, and the wait may last longer.

// True when ok on every rank. Otherwise every rank gets the error of the lowest failing rank in
// err, and *who is that rank. Either may be NULL.
bool peers_agree(Peers peers, bool ok, Error *err, int *who);
// A barrier.
void peers_meet(Peers peers);
// Root's bytes to all, in place.
void peers_broadcast(Peers peers, void *bytes, size_t count, int root);
// count values of each rank become the sum (minimum, ...) over the ranks, on every rank.
void peers_reduce(Peers peers, void *values, int count, MPI_Datatype type, MPI_Op op);
// Every rank's values on every rank. own: (count); all: (ranks, count).
void peers_gather(Peers peers, const void *own, void *all, int count, MPI_Datatype type);
// Every rank's bytes on rank 0: length[r] of rank r at all + start[r]. all, length and start are
// read there alone.
void peers_collect(Peers peers, const void *own, int bytes, void *all, const int *length, const int *start);

// For long work of unequal shares, such as hashing files: hours at most. All ranks meet about once
// a second until everyone is done. So none takes the others' work for a hang, and none waits for
// ever for one that is stopped, whose own watchdog is stopped too.
//
//     PeersWork work = peers_work(peers);                          // on all ranks
//     while (ok && more && peers_work_goes_on(&work)) ok = ...     // one piece, below the limit
//     ok = peers_work_agree(&work, ok, err);                       // on all ranks, always
typedef struct PeersWork {
    Peers peers;
    double next;  // meeting, in monotonic_seconds
    int news;     // what the last one brought
} PeersWork;
PeersWork peers_work(Peers peers);
// Progress for the heartbeat. False: another rank has failed, leave the rest and agree.
bool peers_work_goes_on(PeersWork *work);
// peers_agree for the whole work. A share that peers_work_goes_on has cut short has not failed,
// whatever ok says.
bool peers_work_agree(PeersWork *work, bool ok, Error *err);

// New communicators, for MPI_Comm_free: of the same ranks; of those with the same color, in the
// order of key; of those that can share memory. The latter two know the heartbeat's limit alone.
MPI_Comm peers_duplicate(Peers peers);
MPI_Comm peers_split(Peers peers, int color, int key);
MPI_Comm peers_of_host(Peers peers);
// Of two ranks, first is its rank 0. Called by these two alone. It returns errors, as a Launch's.
MPI_Comm peers_pair(Peers peers, int first, int second);

LLMC_END
