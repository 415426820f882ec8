// Recovery from a lost node with --local-steps: the surviving replica groups save a checkpoint, and
// the job ends. It can be restarted with two or more nodes; new nodes start from the outer weights.
// Only the lost node's progress since its last outer sync is lost. Called by train_gpt.c.
#include <stdio.h>
#include <unistd.h>

#include "llmc/ranks/node_recovery.h"
#include "llmc/run/run.h"

// Continues with the ranks in `left` only. node: the lost node, or -1 if all nodes responded.
static void continue_without(Run *run, int node, MPI_Comm left) {
    if (node >= 0) mesh_remove_node(&run->mesh, node);
    run->launch.world = run->mesh.world.mpi = left;
    MPI_Comm_rank(left, &run->launch.rank);
    MPI_Comm_size(left, &run->launch.size);
}

static void print_error(const Run *run, int lost, const char *why) {
    Error err;
    if (lost < 0) {
        error_set(
            &err, EXIT_COMMUNICATION,
            "a node timed out (%.600s), but all nodes responded and saved a checkpoint; restart the job",
            why);
    } else {
        error_set(&err, EXIT_COMMUNICATION,
                  "node %d was lost (%.600s); the other nodes saved a checkpoint; restart the job", lost,
                  why);
    }
    error_print(&run->site, err.what);
}

// Handles the loss of a node between two steps, in an evaluation or in a save. Pending inter-node
// messages had no effect (comm_may_lose). Returns only if recovery is impossible.
static void on_node_loss(void *context, const char *why) {
    Run *run = (Run *)context;
    int lost = 0;
    MPI_Comm left = node_recovery_surviving_ranks(&run->site, &lost);
    if (left == MPI_COMM_NULL && lost >= 0) _exit(EXIT_COMMUNICATION);  // the other nodes have saved
    if (left == MPI_COMM_NULL) return;
    comm_lose(&run->mesh.replica_groups);
    zero_use_outer(run->zero, false);
    read_step_status(run, 0, true);
    continue_without(run, lost, left);
    // Don't save after an anomaly or corrupt data, which would have ended the run without a save.
    bool sound = !run->guard.ended_at && run->error.code != EXIT_DATA;
    bool saved = run_agreed(run, sound) && run_agreed(run, save_surviving_groups(run));
    if (saved && run->launch.rank == 0) print_error(run, lost, why);
    run_barrier(run);  // because mpirun kills all ranks as soon as one exits
    if (run->launch.rank == 0) node_recovery_end(&run->site, lost);
    fflush(stdout);
    bool failed = run->exit_code != EXIT_DONE && run->exit_code != EXIT_STOPPED;
    _exit(failed ? run->exit_code : EXIT_COMMUNICATION);
}

void arm_node_recovery(Run *run) {
    if (run->mesh.replica_groups.size < 2 || !run->config.save) return;
    node_recovery_arm(&run->site, run_peers(run, run->launch.world), run->mesh.per_node, on_node_loss, run);
}
