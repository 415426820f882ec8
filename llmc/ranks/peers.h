// Host-side collectives with a time limit. A collective ends the job if a rank does not arrive.
// Ranks agree on errors, so that one message is printed instead of one per rank.
#pragma once
#include <mpi.h>

#include "llmc/base/base.h"
LLMC_BEGIN

// Ends the job (EXIT_COMMUNICATION) unless rc is MPI_SUCCESS, with one line for all ranks: "<what>
// <where> failed: ...". The communicators of a Launch return errors. After a failed operation,
// neither its buffers nor its request may be used.
void mpi_check(const Site *site, int rc, const char *what, const char *where);

// A communicator and how long one rank waits for another. A rank that died or hangs must end the
// job rather than block it forever.
typedef struct Peers {
    MPI_Comm comm;
    double limit;      // seconds; 0: only the watchdog's limit
    const Site *site;  // named in messages; its heartbeat is used; may be NULL
} Peers;

// Each collective ends the job (EXIT_COMMUNICATION) with one line if MPI fails, or if a rank does
// not arrive within the limit. The line names that rank if ranks of this host know it. With
// node-failure recovery (node_failure.h) the other nodes save first, and the wait may take longer.

// Returns true if ok on every rank. Otherwise every rank gets the error of the lowest failing rank
// in err, and that rank in *who. Either may be NULL.
bool peers_agree(Peers peers, bool ok, Error *err, int *who);
// A barrier.
void peers_barrier(Peers peers);
// Broadcasts root's bytes, in place.
void peers_broadcast(Peers peers, void *bytes, size_t count, int root);
// All-reduces count values in place.
void peers_all_reduce(Peers peers, void *values, int count, MPI_Datatype type, MPI_Op op);
// All-gathers. own: (count); all: (ranks, count).
void peers_all_gather(Peers peers, const void *own, void *all, int count, MPI_Datatype type);
// Gathers bytes on rank 0: length[r] bytes of rank r to all + start[r]. all, length and start are
// only read there.
void peers_gather_bytes(Peers peers, const void *own, int bytes, void *all, const int *length,
                        const int *start);

// For long work that takes ranks different amounts of time, such as hashing files (up to hours).
// All ranks synchronize about once a second until everyone is done, so none is taken for hung, and
// none waits forever for a stopped one.
//
//     PeersWork work = peers_work(peers);                          // on all ranks
//     while (ok && more && peers_work_continues(&work)) ok = ...  // part of the work
//     ok = peers_work_agree(&work, ok, err);                       // on all ranks, always
typedef struct PeersWork {
    Peers peers;
    double next;  // synchronization, in monotonic_seconds
    int state;    // result of the last one
} PeersWork;
PeersWork peers_work(Peers peers);
// Reports progress. Returns false if another rank has failed: stop working and call
// peers_work_agree.
bool peers_work_continues(PeersWork *work);
// peers_agree for the whole work. If peers_work_continues returned false, ok is ignored: the
// interrupted share has not failed.
bool peers_work_agree(PeersWork *work, bool ok, Error *err);

// New communicators, for MPI_Comm_free: of the same ranks; of ranks with the same color, ordered by
// key; of ranks that can share memory. The latter two only have the watchdog's limit.
MPI_Comm peers_duplicate(Peers peers);
MPI_Comm peers_split(Peers peers, int color, int key);
MPI_Comm peers_of_host(Peers peers);
// Returns a communicator of two ranks, in which `first` is rank 0. Called by these two ranks only.
// Returns errors instead of ending the job.
MPI_Comm peers_pair(Peers peers, int first, int second);

// --- host_memory.c: memory shared by the ranks of a host -----------------------------------------

// An anonymous file (memfd) of the first rank, which the others open through /proc. Not an MPI
// window, because Open MPI puts those in /dev/shm, which containers often limit to 64 MB, and hangs
// when it is too small.

// Maps zeroed memory shared by host (ranks of one host), for munmap. Collective. All ranks may
// write to it, or only the first. Returns NULL on every rank if any rank cannot map it: separate
// PID namespaces, no /proc, or no memory.
void *host_memory_map(Peers host, size_t bytes, bool all_write);

LLMC_END
