// Starting and ending a job of MPI ranks: environment fixes before MPI_Init, the hosts; what the launcher's environment tells before that. Called by train_gpt.cu
// and the benches and tests that are programs of ranks; emulate.c reads the hosts, heartbeat.c a rank's number and turn.
#pragma once
#include <mpi.h>

#include "llmc/base/base.h"
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

LLMC_END
