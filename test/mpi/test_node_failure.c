// Node-failure recovery between processes that act as hosts: the surviving nodes find each other
// within the time limit and agree on the lost node. After a loss an MPI wait stays pending, so each
// case uses its own communicators, and lost ranks complete the wait at the end.
// ranks: 4
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "llmc/ranks/watchdog.h"
#include "llmc/ranks/launch.h"
#include "llmc/ranks/node_recovery.h"

enum { LIMIT = 2, NOT_CALLED = -9 };

typedef struct Case {
    const char *name;
    int per_node;
    bool comes[4];   // rank r arrives at the wait
    double late;     // seconds after which the missing ranks arrive
    int lost, left;  // expected lost node and remaining nodes; left 0: saving is impossible
} Case;
static const Case cases[] = {
    {"the last of four nodes is lost", 1, {true, true, true, false}, 0, 3, 3},
    {"the first of two nodes with two ranks is lost", 2, {false, false, true, true}, 0, 0, 2},
    {"one lost rank loses its node", 2, {true, true, true, false}, 0, 1, 2},
    {"two of four nodes are lost", 1, {true, false, true, false}, 0, 0, 0},
    {"a node is late", 1, {true, true, true, false}, LIMIT + 1, -1, 4},
};

// Result of the handler on this rank, and the jump target with which it leaves the wait.
typedef struct Found {
    Site *site;
    int lost, left;
    jmp_buf back;
} Found;

static void handler(void *context, const char *why) {
    Found *found = (Found *)context;
    MPI_Comm left = node_recovery_surviving_ranks(found->site, &found->lost);
    found->left = 0;
    if (left != MPI_COMM_NULL) {
        int rank;
        MPI_Comm_rank(left, &rank);
        MPI_Comm_size(left, &found->left);
        if (rank == 0) node_recovery_end(found->site, found->lost);
    }
    longjmp(found->back, 1);
}

// Completes the pending wait.
static void complete_wait(MPI_Comm everyone, bool came) {
    MPI_Request request;
    MPI_Barrier(MPI_COMM_WORLD);
    if (came) return;
    MPI_Ibarrier(everyone, &request);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
}

static bool as_expected(const Case *c, const Found *found, int rank) {
    if (found->left == NOT_CALLED) return !c->comes[rank] && c->late <= 0;
    if (c->left == 0) return found->left == 0;
    // A rank of the lost node that arrives must find that it cannot save. It waits for
    // node_recovery_end first.
    if (c->lost >= 0 && rank / c->per_node == c->lost) return found->left == 0 && found->lost == c->lost;
    return found->lost == c->lost && found->left == c->left;
}

// Result of a case, ordered so that MPI_MIN gives the result over all ranks. LATE: not as expected,
// but ranks were delayed.
enum { WRONG, LATE, RIGHT, ATTEMPTS = 3 };

// Three time limits: for the wait, for finding the missing nodes, and for agreeing on them.
static const double LONGEST = 3 * LIMIT + 5;

// Returns whether other programs on the machine delayed the ranks, so that they did not arrive at
// the times of the case or waited too long. arrived, left: times of this rank.
static bool was_delayed(const Case *c, bool came, double arrived, double left) {
    enum { MARGIN_MS = 500 };
    double own[3] = {came ? arrived : -1e30, came ? -arrived : -1e30, left - arrived}, most[3];
    MPI_Allreduce(own, most, 3, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return most[0] + most[1] > c->late + 1e-3 * MARGIN_MS || most[2] >= LONGEST;
}

static int run(const Case *c, int rank) {
    Site site = {rank, rank, -1, 1, "test", NULL, NULL};
    MPI_Comm everyone;
    MPI_Comm_dup(MPI_COMM_WORLD, &everyone);
    Peers peers = {everyone, LIMIT, &site};
    Found found = {.site = &site, .left = NOT_CALLED};
    watchdog_open(&site, MPI_COMM_SELF, 4, 60);
    site.node_failure = node_failure_create();
    node_recovery_arm(&site, peers, c->per_node, handler, &found);
    peers.limit += 0.3 * rank;
    bool came = c->comes[rank] || c->late > 0;
    if (!c->comes[rank] && came) usleep((useconds_t)(1e6 * c->late));
    double arrived = monotonic_seconds();
    if (setjmp(found.back) == 0 && came) peers_barrier(peers);
    double left = monotonic_seconds();
    watchdog_close(&site);
    complete_wait(everyone, came);
    bool delayed = was_delayed(c, came, arrived, left), right = as_expected(c, &found, rank);
    int result = right && left - arrived < LONGEST ? RIGHT : delayed ? LATE : WRONG;
    if (result != RIGHT)
        fprintf(stderr, "# rank %d: lost %d, left %d, %.1f s\n", rank, found.lost, found.left,
                left - arrived);
    node_recovery_disarm(&site);
    node_failure_free(site.node_failure);
    MPI_Allreduce(MPI_IN_PLACE, &result, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    return result;
}

int main(int argc, char **argv) {
    Launch launch;
    int failures = 0;
    launch_init(&launch, &argc, &argv);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        // A case in which ranks were delayed runs again.
        int result = LATE;
        for (int attempt = 0; attempt < ATTEMPTS && result == LATE; attempt++)
            result = run(&cases[i], launch.rank);
        if (launch.rank == 0) printf("%sok %s\n", result == RIGHT ? "" : "not ", cases[i].name);
        failures += result != RIGHT;
    }
    launch_finalize(&launch);
    return failures > 0;
}
