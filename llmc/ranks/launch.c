// Job start and end: see launch.h.
#include "llmc/ranks/launch.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "llmc/base/json.h"
#include "llmc/ranks/peers.h"

int launch_rank_from_environment(void) {
    // Set by Open MPI's mpirun, by PMIx, and by MPICH and PMI-2.
    static const char *const names[] = {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *rank = getenv(names[i]);
        if (rank) return atoi(rank);
    }
    return -1;
}

double launch_rank_delay(int rank) {
    assert(rank >= 0);
    return rank < 30 ? 2.0 * rank : 60.0;
}

// Open MPI requires ssh even to start a single process without mpirun, and refuses to run as root.
// Neither should make a first run fail. Variables set by the user are kept.
static void prepare_environment(void) {
    if (launch_rank_from_environment() < 0) setenv("OMPI_MCA_plm", "isolated", 0);
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 0);
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 0);
}

// A launcher that starts several processes, and the environment variables it sets.
typedef struct Launcher {
    const char *mark, *size, *rank;  // environment variables: set by this launcher, number of processes, rank
    const char *name, *processes, *advice;
} Launcher;

static const Launcher launchers[] = {
    {"TORCHELASTIC_RUN_ID", "WORLD_SIZE", "RANK", "torchrun", "processes",
     "start this program with mpirun -np RANKS instead"},
    {"SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "srun", "tasks",
     "use srun --mpi=pmix (srun --mpi=list shows the choices), or mpirun inside the allocation"},
    {"PMI_RANK", "PMI_SIZE", "PMI_RANK", "mpiexec", "processes",
     "use the mpirun of the MPI library that this program was built with (--version names it)"},
};

// Exits if a launcher started several processes without a common MPI world, because each would
// train alone. Called before MPI starts, because Open MPI would end srun's tasks with a page of
// text and exit code 1. Called again after it, for libraries that start worlds of one rank.
static void refuse_unconnected(bool joined) {
    for (size_t i = 0; i < sizeof launchers / sizeof *launchers && !joined; i++) {
        const Launcher *s = &launchers[i];
        const char *mark = getenv(s->mark), *size = getenv(s->size), *rank = getenv(s->rank);
        if (!mark || !size || atoi(size) <= 1) continue;
        Error err;
        system_error(&err, "%s started %s %s that MPI does not connect, so each would train alone; %s",
                     s->name, size, s->processes, s->advice);
        // The first process prints the error; the others wait 2 s before they exit.
        if (rank && atoi(rank) > 0) sleep(2);
        else error_print(NULL, err.what);
        exit(err.code);
    }
}

static void find_hosts(Launch *launch) {
    gethostname(launch->host_name, sizeof launch->host_name - 1);
    Peers world = {launch->world, 0, NULL}, host = world;
    host.comm = launch->host = peers_of_host(world);
    int lowest = launch->rank;
    peers_all_reduce(host, &lowest, 1, MPI_INT, MPI_MIN);
    launch->host_of_rank = xcalloc((size_t)launch->size, sizeof(int), "the host table");
    peers_all_gather(world, &lowest, launch->host_of_rank, 1, MPI_INT);
}

void launch_init(Launch *launch, int *argc, char ***argv) {
    memset(launch, 0, sizeof *launch);
    refuse_unconnected(launch_rank_from_environment() >= 0);
    prepare_environment();
    json_use_checked_memory();
    // FUNNELED is enough, because only the main thread calls MPI.
    int provided, running = 0;
    MPI_Initialized(&running);
    if (!running) MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided);
    launch->owns_mpi = !running;
    MPI_Comm_dup(MPI_COMM_WORLD, &launch->world);
    MPI_Comm_set_errhandler(launch->world, MPI_ERRORS_RETURN);
    MPI_Comm_rank(launch->world, &launch->rank);
    MPI_Comm_size(launch->world, &launch->size);
    find_hosts(launch);
    refuse_unconnected(launch->size > 1 || getenv("OMPI_COMM_WORLD_SIZE"));
}

void launch_finalize(Launch *launch) {
    free(launch->host_of_rank);
    MPI_Comm_free(&launch->host);
    MPI_Comm_free(&launch->world);
    if (launch->owns_mpi) MPI_Finalize();
}
