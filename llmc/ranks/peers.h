// Host-side collectives with a time limit. If a rank does not arrive, the collective ends the job.
// Ranks agree on errors, so only one of them prints a message.
#pragma once
#include <mpi.h>

#include "llmc/base/base.h"
LLMC_BEGIN

// Ends the job (EXIT_COMMUNICATION) unless rc is MPI_SUCCESS. One rank prints "<what> <where>
// failed: ...". Requires a communicator that returns errors, like the communicators of a Launch.
void mpi_check(const Site *site, int rc, const char *what, const char *where);

// A communicator with a time limit, so that a dead rank ends the job instead of blocking it.
typedef struct Peers {
    MPI_Comm comm;
    double limit;      // seconds; 0: only the watchdog's limit applies
    const Site *site;  // place named in messages, with the heartbeat; may be NULL
} Peers;

// Returns the seconds that one rank may wait for a lock while the others wait for it.
double peers_patience(Peers peers);
int peers_rank(Peers peers);
int peers_size(Peers peers);

// Each collective ends the job (EXIT_COMMUNICATION) if MPI fails, or if a rank does not arrive
// within the limit. The message names the late rank if it is on this host. With node-failure
// recovery (node_failure.h) the other nodes save first, and the wait may take longer.

// Returns true if ok is true on all ranks. Otherwise sets err to the error of the lowest failing
// rank and *who to that rank, on all ranks. Either may be NULL.
bool peers_agree(Peers peers, bool ok, Error *err, int *who);
// A barrier.
void peers_barrier(Peers peers);
// Broadcasts root's bytes, in place.
void peers_broadcast(Peers peers, void *bytes, size_t count, int root);
// All-reduces count values in place.
void peers_all_reduce(Peers peers, void *values, int count, MPI_Datatype type, MPI_Op op);
// All-gathers. own: (count); all: (ranks, count).
void peers_all_gather(Peers peers, const void *own, void *all, int count, MPI_Datatype type);
// Gathers length[r] bytes of each rank r to all + start[r] on rank 0. Other ranks may pass NULL.
void peers_gather_bytes(Peers peers, const void *own, int bytes, void *all, const int *length,
                        const int *start);

// For long work that takes ranks different amounts of time, such as hashing files (up to hours).
// All ranks synchronize about once a second until all are done, so a slow rank does not exceed the
// time limit, and a stopped rank is detected.
//
//     PeersWork work = peers_work(peers);                          // on all ranks
//     while (ok && more && peers_work_continues(&work)) ok = ...  // part of the work
//     ok = peers_work_agree(&work, ok, err);                       // on all ranks, always
typedef struct PeersWork {
    Peers peers;
    double next;  // time of the next synchronization (monotonic_seconds)
    int state;    // result of the last synchronization
} PeersWork;
PeersWork peers_work(Peers peers);
// Reports progress. If it returns false, another rank has failed: stop and call peers_work_agree.
bool peers_work_continues(PeersWork *work);
// peers_agree for the whole work. ok is ignored if peers_work_continues has returned false.
bool peers_work_agree(PeersWork *work, bool ok, Error *err);

// Return a new communicator of the same ranks, of ranks with the same color (ordered by key), or of
// ranks that can share memory. Free it with MPI_Comm_free. Only the first has the time limit.
MPI_Comm peers_duplicate(Peers peers);
MPI_Comm peers_split(Peers peers, int color, int key);
MPI_Comm peers_of_host(Peers peers);
// Returns a communicator of two ranks, in which `first` is rank 0. Called by these two ranks only.
// MPI calls on this communicator return errors.
MPI_Comm peers_pair(Peers peers, int first, int second);

// --- host_memory.c: memory shared by the ranks of a host -----------------------------------------

// Uses an anonymous file (memfd) of the first rank, which the others open through /proc. Open MPI's
// shared windows hang if /dev/shm is too small; containers often limit it to 64 MB.

// Maps zeroed memory shared by the ranks of `host`, to be unmapped by munmap. all_write false: only
// the first rank may write. Returns NULL on all ranks if one of them cannot map it, because of
// separate PID namespaces, no /proc or too little memory. Collective.
void *host_memory_map(Peers host, size_t bytes, bool all_write);

LLMC_END
