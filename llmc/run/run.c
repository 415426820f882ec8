// Creation of a run, agreement among its ranks, and cleanup: see run.h.
#include "llmc/run/run.h"

#include <string.h>

#include "llmc/base/version.h"
#include "llmc/checkpoint/save_folder.h"
#include "llmc/ranks/node_failure.h"

int run_answer(const Config *config, const char *program) {
    if (launch_rank_from_environment() > 0) return EXIT_DONE;
    if (config->help) {
        config_help(program, stdout);
    } else {
        char libraries[512], backend[512];
        version_libraries(libraries, sizeof libraries);
        device_libraries(backend, sizeof backend);
        printf("sdp4bit.c %s commit %s (%s; %s; %s)\n", version_number(), version_commit(), device_backend(),
               backend, libraries);
    }
    return EXIT_DONE;
}

void run_init(Run *run) {
    memset(run, 0, sizeof *run);
    run->save_lock = NO_SAVE_LOCK;
    run->tasks_scored_at = -1;
    run->site.rank = -1;
    run->site.node_failure = node_failure_create();
    run->started = monotonic_seconds();
}

// Returns the timeout of a collective in seconds, 0 for none: --distributed-timeout-minutes plus a
// small delay that grows with the rank, so that one rank reports the error first.
static double time_limit(const Run *run) {
    // Rank 0 may read data for a long time while the other ranks wait.
    if (run->config.check_data || run->config.inspect_data >= 0) return 0.0;
    double limit = 60.0 * run->config.distributed_timeout_minutes;
    return limit > 0 ? limit + launch_rank_delay(run->launch.rank) : 0.0;
}

Peers run_peers(Run *run, MPI_Comm comm) {
    Peers peers = {comm, time_limit(run), &run->site};
    return peers;
}

void run_barrier(Run *run) { peers_barrier(run_peers(run, run->launch.world)); }

bool run_agreed(Run *run, bool ok) {
    int who = 0;
    if (peers_agree(run_peers(run, run->launch.world), ok, &run->error, &who)) return true;
    run->exit_code = run->error.code;
    // If a subset of the ranks has agreed on the error before, error.rank is the rank that failed.
    // It is compared with site.rank, because surviving_groups.c renumbers launch.rank.
    bool mine = run->error.rank >= 0 ? run->error.rank == run->site.rank : run->launch.rank == who;
    if (mine) error_print(&run->site, run->error.what);
    return false;
}

void run_poll_stop(Run *run) {
    double minutes = run->config.exit_duration_in_mins;
    bool late = minutes > 0 && monotonic_seconds() - run->started > 60.0 * minutes;
    StopReason own = run->error.code == EXIT_DATA ? STOP_DATA : late ? STOP_DURATION : STOP_NONE;
    if (run->mesh.replica_groups.size > 1 && run->guard.ended_at) own = STOP_ANOMALY;
    run->stop.busy = saver_busy(&run->saver);
    stop_poll(&run->stop, own, run_peers(run, run->launch.world));
}

void run_close(Run *run) {
    elastic_leave(run);
    zero_stop(run->zero);
    if (run->loader) loader_close(run->loader);
    task_set_free(&run->tasks);
    comm_close(&run->mesh);  // uses the memory that is freed next: pending messages, comm_may_lose
    memory_plan_free(&run->memory_plan, run->device);  // clears pointers in the objects freed below
    elastic_free(run);
    zero_free(run->zero);
    mesh_close(&run->mesh);
    if (run->timers) timers_destroy(run->timers);
    if (run->compute) stream_destroy(run->compute);
    lanes_close(&run->lanes);
    if (run->device) device_close(run->device);
    if (run->progress) progress_close(run->progress);
    if (run->log) log_close(run->log);
    if (run->tokenizer) tokenizer_close(run->tokenizer);
    save_folder_unlock(&run->save_lock);
    config_free(&run->config);
}
