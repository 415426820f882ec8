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
// Completes a nonblocking operation of the hosts. When it takes longer than this many seconds (0: whenever it completes) a rank did not come: ends the job
// with one line that names it, if this host's ranks know it, and EXIT_COMMUNICATION.
void launch_await(const Site *site, MPI_Request *request, double seconds);
// Collective over comm: true when ok on every rank. Otherwise every rank gets the error of the lowest failing rank
// in err (may be NULL), and *who (may be NULL) is that rank.
bool launch_agree(MPI_Comm comm, bool ok, Error *err, int *who);

// Ranks that act together, and how long one waits for another: a rank that died or hangs must end the job, not stop it for ever.
typedef struct Peers {
    MPI_Comm comm;
    double limit;      // seconds; 0: for ever
    const Site *site;  // for the message; may be NULL
} Peers;
// Completes a nonblocking collective of theirs; ends the job (EXIT_COMMUNICATION) when the time is up.
void peers_wait(const Peers *peers, MPI_Request *request);
// launch_agree with that limit.
bool peers_agree(const Peers *peers, bool ok, Error *err, int *who);
// Collectives with that limit: root's bytes to all, in place; and a barrier.
void peers_broadcast(const Peers *peers, void *bytes, size_t count, int root);
void peers_meet(const Peers *peers);

LLMC_END
