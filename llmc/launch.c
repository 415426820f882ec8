// Job start and end: see launch.h.
#include "llmc/launch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "llmc/heartbeat.h"
#include "llmc/json.h"

int launch_rank_guess(void) {
    static const char *const names[] = {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"};  // Open MPI's mpirun, PMIx, MPICH and PMI-2
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *rank = getenv(names[i]);
        if (rank) return atoi(rank);
    }
    return -1;
}

// Open MPI's singleton start wants a launcher agent (ssh) even for one process, and refuses root in containers: neither is worth a failed first run.
// Set only where the user has set nothing.
static void prepare_environment(void) {
    if (launch_rank_guess() < 0) setenv("OMPI_MCA_plm", "isolated", 0);
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 0);
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 0);
}

// Tasks of one srun that MPI does not join would each train alone. Asked before MPI starts, because Open MPI then ends such a task itself, with a page of text
// and exit code 1; and after, for libraries that start a world of one. A shell inside an allocation is a step of one task.
static void refuse_lonely_task(bool joined) {
    const char *tasks = getenv("SLURM_STEP_NUM_TASKS"), *task = getenv("SLURM_PROCID");
    if (joined || !tasks || atoi(tasks) <= 1) return;
    Error err;
    error_set(&err, EXIT_ENVIRONMENT, "srun started %s tasks that MPI does not join: each would train alone; use srun --mpi=pmix (srun --mpi=list shows what there is), "
                                      "or mpirun inside the allocation", tasks);
    // The first task speaks for all, and has the time to, whatever srun does when one ends. Nobody is there to agree with, nothing to abort.
    if (task && atoi(task) > 0) sleep(2);
    else error_print(NULL, err.what);
    exit(err.code);
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
    refuse_lonely_task(launch_rank_guess() >= 0);
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
    refuse_lonely_task(launch->size > 1 || getenv("OMPI_COMM_WORLD_SIZE"));
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
