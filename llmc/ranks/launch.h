// Starting and ending a job of MPI ranks: environment fixes before MPI_Init, the hosts, and what
// the launcher's environment tells before MPI is up. Called by train_gpt.c, and by benches and
// tests that are programs of ranks.
#pragma once
#include <mpi.h>

#include "llmc/base/base.h"
LLMC_BEGIN

typedef struct Launch {
    int rank, size;
    int *host_of_rank;  // (size) index of each rank's host
    MPI_Comm world;     // a duplicate whose errors are returned
    MPI_Comm host;      // the ranks of this host, for memory shared between them
    char host_name[256];
    bool owns_mpi;  // started here, so ended by launch_finalize
} Launch;

// Prepares the environment (a singleton needs no ssh; root may run), starts MPI, and finds the
// hosts. MPI may run already: dev/bench/train_presets.c trains several times in one process.
// Processes that MPI does not join (of srun, torchrun or another library's mpiexec) end here with
// one line of the first of them and EXIT_ENVIRONMENT: each would train the same model for itself.
void launch_init(Launch *launch, int *argc, char ***argv);
void launch_finalize(Launch *launch);
// The rank that a launcher's environment (mpirun, srun) gives this process, before MPI is up. -1:
// none that is known here.
int launch_rank_from_environment(void);
// Seconds that a rank waits beyond a limit that all have: more the higher the rank. So of all who
// wait for one that hangs a single one speaks and ends the job. The launcher takes a second to end
// ranks, because the trainer blocks SIGTERM.
double launch_rank_delay(int rank);

LLMC_END
