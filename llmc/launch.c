// Job start and end: see launch.h.
#include "llmc/launch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "llmc/heartbeat.h"
#include "llmc/json.h"

static bool knows_a_launcher(void) { return getenv("OMPI_COMM_WORLD_SIZE") || getenv("PMIX_RANK") || getenv("PMI_RANK"); }

// Open MPI's singleton start wants a launcher agent (ssh) even for one process, and refuses root in containers: neither is worth a failed first run.
// Set only where the user has set nothing.
static void prepare_environment(void) {
    if (!knows_a_launcher()) setenv("OMPI_MCA_plm", "isolated", 0);
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 0);
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 0);
}

// What starts several processes without a word to MPI, where MPI does not know it.
typedef struct Starter {
    const char *sign, *size, *rank;  // environment: that it was this one, how many processes, which of them
    const char *name, *processes, *advice;
} Starter;

static const Starter starters[] = {
    {"TORCHELASTIC_RUN_ID", "WORLD_SIZE", "RANK", "torchrun", "processes", "start this program with mpirun -np RANKS instead"},
    {"SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "srun", "tasks",
     "use srun --mpi=pmix (srun --mpi=list shows what there is), or mpirun inside the allocation"},
    {"PMI_RANK", "PMI_SIZE", "PMI_RANK", "mpiexec", "processes", "use the mpirun of the MPI library that this program was built with (--version names it)"},
};

// Such processes would each train alone. Asked before MPI starts, because Open MPI then ends a task of srun itself, with a page of text and exit code 1; and
// after, for libraries that start a world of one. A shell inside an allocation is a step of one task.
static void refuse_lonely(bool joined) {
    for (size_t i = 0; i < sizeof starters / sizeof *starters && !joined; i++) {
        const Starter *s = &starters[i];
        const char *sign = getenv(s->sign), *size = getenv(s->size), *rank = getenv(s->rank);
        if (!sign || !size || atoi(size) <= 1) continue;
        Error err;
        error_set(&err, EXIT_ENVIRONMENT, "%s started %s %s that MPI does not join: each would train alone; %s", s->name, size, s->processes, s->advice);
        // The first one speaks for all, and has the time to, whatever the starter does when one ends. Nobody is there to agree with, nothing to abort.
        if (rank && atoi(rank) > 0) sleep(2);
        else error_print(NULL, err.what);
        exit(err.code);
    }
}

static void find_hosts(Launch *launch) {
    gethostname(launch->host_name, sizeof launch->host_name - 1);
    MPI_Comm_split_type(launch->world, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &launch->host);
    int lowest = launch->rank;
    MPI_Allreduce(MPI_IN_PLACE, &lowest, 1, MPI_INT, MPI_MIN, launch->host);
    launch->host_of_rank = (int *)xcalloc((size_t)launch->size, sizeof(int), "the host table");
    MPI_Allgather(&lowest, 1, MPI_INT, launch->host_of_rank, 1, MPI_INT, launch->world);
}

void launch_init(Launch *launch, int *argc, char ***argv) {
    memset(launch, 0, sizeof *launch);
    refuse_lonely(knows_a_launcher());
    prepare_environment();
    json_use_checked_memory();
    // The thread that writes a checkpoint in the background calls no MPI: FUNNELED is what every library gives.
    int provided, running = 0;
    MPI_Initialized(&running);
    if (!running) MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided);
    launch->owns_mpi = !running;
    MPI_Comm_dup(MPI_COMM_WORLD, &launch->world);
    MPI_Comm_set_errhandler(launch->world, MPI_ERRORS_RETURN);
    MPI_Comm_rank(launch->world, &launch->rank);
    MPI_Comm_size(launch->world, &launch->size);
    find_hosts(launch);
    refuse_lonely(launch->size > 1 || getenv("OMPI_COMM_WORLD_SIZE"));
}

void launch_finalize(Launch *launch) {
    free(launch->host_of_rank);
    MPI_Comm_free(&launch->host);
    MPI_Comm_free(&launch->world);
    if (launch->owns_mpi) MPI_Finalize();
}

// The limit has passed; whoever comes while the culprit is looked for is welcome.
static void no_answer(const Site *site, MPI_Request *request, int *done, double seconds) {
    char who[512];
    if (!heartbeat_blames(site, who, sizeof who)) snprintf(who, sizeof who, "a rank has not come here");
    MPI_Test(request, done, MPI_STATUS_IGNORE);
    if (*done) return;
    heartbeat_take_floor(site);
    fatal(site, EXIT_COMMUNICATION, "waited %.0f s: %s; see what stopped it (--distributed-timeout-minutes sets the limit)", seconds, who);
}

void launch_await(const Site *site, MPI_Request *request, double seconds) {
    Deadline deadline = deadline_in(seconds);
    int done = 0;
    heartbeat_waits(site, true);
    for (int polls = 1; !done; polls++) {
        MPI_Test(request, &done, MPI_STATUS_IGNORE);
        if (done || polls % 1024) continue;
        if (seconds <= 0) heartbeat_moves(site);  // without a limit, waiting is no fault of this rank
        else if (deadline_passed(&deadline)) no_answer(site, request, &done, seconds);
    }
    heartbeat_waits(site, false);
}

void peers_wait(const Peers *peers, MPI_Request *request) { launch_await(peers->site, request, peers->limit); }

bool peers_agree(const Peers *peers, bool ok, Error *err, int *who) {
    int rank, size;
    Error shared = {0};
    MPI_Request request;
    MPI_Comm_rank(peers->comm, &rank);
    MPI_Comm_size(peers->comm, &size);
    int first = ok ? size : rank;
    MPI_Iallreduce(MPI_IN_PLACE, &first, 1, MPI_INT, MPI_MIN, peers->comm, &request);
    peers_wait(peers, &request);
    if (who) *who = first;
    if (first == size) return true;
    if (err && first == rank) shared = *err;
    MPI_Ibcast(&shared, (int)sizeof shared, MPI_BYTE, first, peers->comm, &request);
    peers_wait(peers, &request);
    if (err) *err = shared;
    return false;
}

void peers_broadcast(const Peers *peers, void *bytes, size_t count, int root) {
    const size_t most = (size_t)1 << 30;  // MPI counts are int
    for (size_t at = 0; at < count; at += most) {
        MPI_Request request;
        MPI_Ibcast((uint8_t *)bytes + at, (int)(count - at < most ? count - at : most), MPI_BYTE, root, peers->comm, &request);
        peers_wait(peers, &request);
    }
}

void peers_meet(const Peers *peers) {
    MPI_Request request;
    MPI_Ibarrier(peers->comm, &request);
    peers_wait(peers, &request);
}

bool launch_agree(MPI_Comm comm, bool ok, Error *err, int *who) {
    Peers peers = {comm, 0, NULL};
    return peers_agree(&peers, ok, err, who);
}
