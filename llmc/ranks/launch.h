// Starts and ends a job of MPI ranks: environment fixes before MPI_Init, hosts, and the launcher's
// environment before MPI starts. Called by train_gpt.c and by benchmarks and tests that are MPI
// programs.
#pragma once
#include <mpi.h>

#include "llmc/base/base.h"
LLMC_BEGIN

typedef struct Launch {
    int rank, size;
    int *host_of_rank;  // (size) host of each rank, as the lowest rank on it
    MPI_Comm world;     // duplicate of MPI_COMM_WORLD that returns errors
    MPI_Comm host;      // ranks of this host, for shared memory
    char host_name[256];
    bool owns_mpi;  // MPI was initialized by launch_init, so launch_finalize finalizes it
} Launch;

// Prepares the environment (singletons need no ssh, root is allowed), initializes MPI unless it is
// already, and finds the hosts. Processes that MPI does not join (started by srun, torchrun or
// another library's mpiexec) exit with one line of the first of them and EXIT_ENVIRONMENT: each
// would train the same model on its own.
void launch_init(Launch *launch, int *argc, char ***argv);
void launch_finalize(Launch *launch);
// Returns the rank according to the launcher's environment (mpirun, srun), before MPI starts, or
// -1.
int launch_rank_from_environment(void);
// Seconds that a rank waits beyond a common limit, increasing with the rank, so that only one of
// the waiting ranks prints an error and ends the job. The launcher needs about a second to end
// ranks, because the trainer blocks SIGTERM.
double launch_rank_delay(int rank);

LLMC_END
