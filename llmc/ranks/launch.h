// Starts and ends a job of MPI ranks: prepares the environment, initializes MPI, finds the hosts.
// Called by train_gpt.c, and by benchmarks and tests that use MPI.
#pragma once
#include <mpi.h>

#include "llmc/base/base.h"
LLMC_BEGIN

typedef struct Launch {
    int rank, size;
    int *host_of_rank;  // (size) host of each rank, identified by the lowest rank on it
    MPI_Comm world;     // duplicate of MPI_COMM_WORLD that returns errors
    MPI_Comm host;      // ranks of this host, for shared memory
    char host_name[256];
    bool owns_mpi;  // launch_init has initialized MPI, so launch_finalize finalizes it
} Launch;

// Prepares the environment (no ssh needed for a single process, root allowed), initializes MPI
// unless that is done, and finds the hosts. Processes started by srun, torchrun or another
// library's mpiexec without a common MPI world would each train alone. They exit with
// EXIT_ENVIRONMENT, and the first one prints an error.
void launch_init(Launch *launch, int *argc, char ***argv);
void launch_finalize(Launch *launch);
// Returns the rank from the launcher's environment (mpirun, srun), even before MPI starts; or -1.
int launch_rank_from_environment(void);
// Returns the seconds that a rank waits beyond a common limit. They increase with the rank, so that
// only one of the waiting ranks prints an error and ends the job. The launcher needs about a second
// to end ranks, because the trainer blocks SIGTERM.
double launch_rank_delay(int rank);

LLMC_END
