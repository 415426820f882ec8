// Starting and ending a job of MPI ranks: environment fixes before MPI_Init, the hosts, agreement on errors so that one message is printed and not one
// per rank, waits with a limit. Called by train_gpt.cu, by the modules of llmc/ in which ranks meet, by the benches and the MPI tests.
#pragma once
#include <mpi.h>

#include "llmc/topology.h"
LLMC_BEGIN

typedef struct Launch {
    int rank, size;
    int *host_of_rank;   // (size) index of each rank's host
    MPI_Comm world;      // a duplicate whose errors are returned
    MPI_Comm host;       // the ranks of this host, for memory shared between them
    char host_name[256];
    bool owns_mpi;       // started here, so ended by launch_finalize
} Launch;

// Prepares the environment (a singleton needs no ssh; root may run), starts MPI unless the caller has done so (dev/bench/train_arms.c trains several times
// in one process), finds the hosts. Processes of srun, of torchrun or of another MPI library's mpiexec that MPI does not join end here, before they train the
// same model each for itself: one line, from the first of them, and EXIT_ENVIRONMENT.
void launch_init(Launch *launch, int *argc, char ***argv);
void launch_finalize(Launch *launch);
// The rank that the environment of a launcher (mpirun, srun) gives this process, before MPI is up; -1: there is none that is known here.
int launch_rank_guess(void);
// Seconds that a rank waits beyond a limit that all have: more the higher the rank, so that of all who wait for one that hangs a single one speaks and ends
// the job. (The launcher takes a second to end ranks: the trainer blocks SIGTERM.)
double launch_rank_delay(int rank);

// Ends the job (EXIT_COMMUNICATION) with one line of all ranks, "<what> <where> failed: ...", unless rc is MPI_SUCCESS: the communicators of a Launch return
// their errors, and an operation that failed has left nothing that may be looked at, its request neither.
void mpi_check(const Site *site, int rc, const char *what, const char *where);

// Ranks that act together, and how long one waits for another: a rank that died or hangs must end the job, not stop it for ever.
typedef struct Peers {
    MPI_Comm comm;
    double limit;      // seconds; 0: none but the heartbeat's, which ends a wait that nobody on this host can explain
    const Site *site;  // for messages, and the heartbeat that is told of waits; may be NULL
} Peers;

// Collectives over the hosts. Each ends the job (EXIT_COMMUNICATION) with one line when MPI fails, or when a rank does not come within the limit, which the
// line names if this host's ranks know it.

// True when ok on every rank. Otherwise every rank gets the error of the lowest failing rank in err (may be NULL), and *who (may be NULL) is that rank.
bool peers_agree(Peers peers, bool ok, Error *err, int *who);
// A barrier.
void peers_meet(Peers peers);
// Root's bytes to all, in place.
void peers_broadcast(Peers peers, void *bytes, size_t count, int root);
// count values of each rank become the sum (minimum, ...) over the ranks, on every rank.
void peers_reduce(Peers peers, void *values, int count, MPI_Datatype type, MPI_Op op);
// Every rank's values on every rank. own: (count); all: (ranks, count).
void peers_gather(Peers peers, const void *own, void *all, int count, MPI_Datatype type);
// Every rank's bytes on rank 0: length[r] of rank r at all + start[r]. all, length and start are read there alone.
void peers_collect(Peers peers, const void *own, int bytes, void *all, const int *length, const int *start);
// Long work, of which ranks have shares that take unequal times, hours at most, such as hashing a checkpoint's files. Who is done must neither take the others' work for a
// fault nor wait for ever for one that is stopped, whose own watchdog is stopped too: so the ranks meet every second or so until all are done, within the usual
// limit. peers_work on all ranks; then peers_work_goes_on between pieces that take less than the limit; peers_work_agree when a rank has done its share, or failed.
typedef struct PeersWork {
    Peers peers;
    double next;  // meeting, in monotonic_seconds
    int news;     // what the last one brought
} PeersWork;
PeersWork peers_work(Peers peers);
// Progress for the heartbeat. False: another rank has failed, leave the rest and agree.
bool peers_work_goes_on(PeersWork *work);
// peers_agree for the whole work. A share that peers_work_goes_on has cut short has not failed, whatever ok says.
bool peers_work_agree(PeersWork *work, bool ok, Error *err);
// New communicators, for MPI_Comm_free: of the same ranks; of those with the same color, in the order of key; of those that can share memory. The latter two know
// the heartbeat's limit alone.
MPI_Comm peers_duplicate(Peers peers);
MPI_Comm peers_split(Peers peers, int color, int key);
MPI_Comm peers_of_host(Peers peers);

LLMC_END
