// What becomes of a run whose nodes train alone (--local-steps) when one of them is lost: the
// others save what they have, and the job ends. Started again, it goes on from there with as many
// nodes as it is given. A node that is new begins with the outer weights. So the lost node costs
// what it had learned since its last exchange, and nothing else. Called by train_gpt.c.
#include <stdio.h>
#include <unistd.h>

#include "llmc/ranks/node_recovery.h"
#include "llmc/run/run.h"

// From here on the run's ranks are those of the other nodes. node -1: all.
static void go_on_without(Run *run, int node, MPI_Comm left) {
    if (node >= 0) mesh_remove_node(&run->mesh, node);
    run->launch.world = run->mesh.world.mpi = left;
    MPI_Comm_rank(left, &run->launch.rank);
    MPI_Comm_size(left, &run->launch.size);
}

static void tell(const Run *run, int lost, const char *why) {
    Error err;
    if (lost < 0) {
        error_set(&err, EXIT_COMMUNICATION,
                  "a node was late (%.600s); all nodes have answered and saved what they have; start again",
                  why);
    } else {
        error_set(&err, EXIT_COMMUNICATION,
                  "node %d was lost (%.600s); the other nodes have saved what they have; start again", lost,
                  why);
    }
    error_print(&run->site, err.what);
}

// The run stands between two steps, in an evaluation or in a save. Messages between nodes that were
// under way have had no effect (comm_may_lose).
static void on_node_loss(void *context, const char *why) {
    Run *run = (Run *)context;
    int lost = 0;
    MPI_Comm left = node_recovery_survivors(&run->site, &lost);
    if (left == MPI_COMM_NULL) return;
    comm_lose(&run->mesh.replica_groups);
    zero_use_outer(run->zero, false);
    settle_alone(run);
    go_on_without(run, lost, left);
    // A step that the run would have ended for is not saved.
    bool sound = !run->guard.ended_at && run->error.code != EXIT_DATA;
    bool saved = run_agreed(run, sound) && run_agreed(run, save_surviving_groups(run));
    if (saved && run->launch.rank == 0) tell(run, lost, why);
    run_meet(run);  // the launcher kills the others when the first one ends
    fflush(stdout);
    bool failed = run->exit_code != EXIT_DONE && run->exit_code != EXIT_STOPPED;
    _exit(failed ? run->exit_code : EXIT_COMMUNICATION);
}

void arm_node_recovery(Run *run) {
    if (run->mesh.replica_groups.size < 2 || !run->config.save) return;
    node_recovery_arm(&run->site, run_peers(run, run->launch.world), run->mesh.per_node, on_node_loss, run);
}
