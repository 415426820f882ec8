// Finds the surviving nodes after a loss: see node_recovery.h.
// MPI cannot handle a lost rank, but still works between live ranks unless one of them waits
// indefinitely for a lost one. So recovery uses point-to-point messages with a time limit.
#include "llmc/ranks/node_recovery.h"

#include <assert.h>
#include <unistd.h>

#include "llmc/ranks/heartbeat.h"

// Seconds to wait for answers in round 1, and extra seconds for round 2.
enum { SECONDS_TO_ANSWER = 20, EXTRA_SECONDS = 5 };
enum { TAG_ALIVE = RECOVERY_TAG_ALIVE, TAG_LOST, TAG_GROUP, TAG_ENDS };
// Special node indices: no node is lost; recovery is impossible.
enum { NO_NODE = -1, IMPOSSIBLE = -2 };
static const int any_word = 1;

void node_recovery_arm(const Site *site, Peers world, int per_node, NodeFailureHandler handler,
                       void *context) {
    RecoveryGroup group = {.comm = peers_duplicate(world), .per_node = per_node};
    MPI_Comm_set_errhandler(group.comm, MPI_ERRORS_RETURN);
    MPI_Comm_rank(group.comm, &group.rank);
    MPI_Comm_size(group.comm, &group.size);
    group.patience = world.limit > 0 ? world.limit : SECONDS_TO_ANSWER;
    peers_all_reduce(world, &group.patience, 1, MPI_DOUBLE, MPI_MIN);
    if (group.patience > SECONDS_TO_ANSWER) group.patience = SECONDS_TO_ANSWER;
    node_failure_arm(site->node_failure, group, handler, context);
}

void node_recovery_disarm(const Site *site) {
    RecoveryGroup group = node_failure_disarm(site->node_failure);
    if (group.comm != MPI_COMM_NULL) MPI_Comm_free(&group.comm);
}

// One message from every rank of the world: arrays of (size). Never freed, because receives from
// lost ranks stay pending.
typedef struct Inbox {
    const RecoveryGroup *group;
    MPI_Request *request;
    int *message;
    bool *arrived;
} Inbox;

static Inbox inbox_make(const RecoveryGroup *group) {
    size_t ranks = (size_t)group->size;
    const char *purpose = "node-failure recovery";
    Inbox box = {group, xcalloc(ranks, sizeof(MPI_Request), purpose), xcalloc(ranks, sizeof(int), purpose),
                 xcalloc(ranks, sizeof(bool), purpose)};
    for (int r = 0; r < group->size; r++) box.request[r] = MPI_REQUEST_NULL;
    return box;
}

// Exchanges a message of one int with rank r, asynchronously. *word must outlive the send.
static void exchange(Inbox *box, int r, int tag, const int *word) {
    MPI_Comm comm = box->group->comm;
    MPI_Request sent;
    if (MPI_Irecv(&box->message[r], 1, MPI_INT, r, tag, comm, &box->request[r]) != MPI_SUCCESS)
        box->request[r] = MPI_REQUEST_NULL;
    MPI_Isend(word, 1, MPI_INT, r, tag, comm, &sent);
}

// Returns the number of messages that have arrived so far.
static int poll_inbox(Inbox *box) {
    int count = 0;
    for (int r = 0; r < box->group->size; r++) {
        int done = 0;
        bool pending = !box->arrived[r] && box->request[r] != MPI_REQUEST_NULL;
        if (pending && MPI_Test(&box->request[r], &done, MPI_STATUS_IGNORE) != MPI_SUCCESS)
            box->request[r] = MPI_REQUEST_NULL;
        else if (done) box->arrived[r] = true;
        count += box->arrived[r];
    }
    return count;
}

// Polls until `wanted` messages have arrived or `seconds` have passed.
static void wait_inbox(const Site *site, Inbox *box, int wanted, double seconds) {
    double until = monotonic_seconds() + seconds;
    while (poll_inbox(box) < wanted && monotonic_seconds() < until) {
        heartbeat_progress(site);
        usleep(1000);
    }
}

static int node_of(const RecoveryGroup *g, int rank) { return rank / g->per_node; }

// Returns the node with ranks that did not answer; NO_NODE if all ranks answered; IMPOSSIBLE if
// there are several such nodes or it is this rank's node.
static int missing_node(const Inbox *alive) {
    const RecoveryGroup *g = alive->group;
    int missing = NO_NODE;
    for (int r = 0; r < g->size; r++) {
        int node = node_of(g, r);
        if (alive->arrived[r] || node == missing) continue;
        if (missing != NO_NODE || node == node_of(g, g->rank)) return IMPOSSIBLE;
        missing = node;
    }
    return missing;
}

// Combines the conclusions of all live ranks. A node counts as lost if any rank reports it. If
// ranks report different nodes, the report of the lowest rank counts.
static int agreed_node(const Inbox *conclusions) {
    const RecoveryGroup *g = conclusions->group;
    int lost = NO_NODE;
    for (int r = 0; r < g->size && lost == NO_NODE; r++) {
        if (conclusions->arrived[r] && conclusions->message[r] >= 0) lost = conclusions->message[r];
    }
    for (int r = 0; r < g->size; r++) {
        bool survives = lost == NO_NODE || node_of(g, r) != lost;
        if (survives && (!conclusions->arrived[r] || conclusions->message[r] == IMPOSSIBLE))
            return IMPOSSIBLE;
    }
    return lost;
}

// Creates the communicator of the surviving ranks. Collective over these ranks only.
static MPI_Comm without_node(const RecoveryGroup *g, int lost) {
    MPI_Comm made = MPI_COMM_NULL;
    MPI_Group all, rest;
    int range[1][3] = {{lost * g->per_node, (lost + 1) * g->per_node - 1, 1}};
    MPI_Comm_group(g->comm, &all);
    MPI_Group_range_excl(all, lost == NO_NODE ? 0 : 1, range, &rest);
    if (MPI_Comm_create_group(g->comm, rest, TAG_GROUP, &made) != MPI_SUCCESS) return MPI_COMM_NULL;
    MPI_Comm_set_errhandler(made, MPI_ERRORS_RETURN);
    return made;
}

// Called on the ranks of the lost node. Waits until the other nodes have saved, because the
// launcher ends all ranks as soon as one exits. Returns false if they have not saved in time. If
// this rank was only late, first prints an error, because the launcher may end it during the wait.
static bool others_save(const Site *site, bool late) {
    const RecoveryGroup *g = node_failure_group(site);
    Inbox ends = inbox_make(g);
    if (late && g->rank % g->per_node == 0)
        error_print(site, "this node answered too late, so the others save without it; restart the job");
    exchange(&ends, node_of(g, g->rank) == 0 ? g->per_node : 0, TAG_ENDS, &any_word);
    wait_inbox(site, &ends, 1, node_failure_extra_wait(site, g->patience));
    return poll_inbox(&ends) > 0;
}

// Round 1: every live rank sends a message to all others and waits for theirs, because a rank may
// only be late. Round 2: live ranks exchange which node did not answer, so that all agree.
MPI_Comm node_recovery_surviving_ranks(const Site *site, int *lost) {
    assert(lost);
    const RecoveryGroup *g = node_failure_group(site);
    Inbox alive = inbox_make(g), conclusions = inbox_make(g);
    int expected = 1;
    alive.arrived[g->rank] = conclusions.arrived[g->rank] = true;
    for (int r = 0; r < g->size; r++) {
        if (r != g->rank) exchange(&alive, r, TAG_ALIVE, &any_word);
    }
    wait_inbox(site, &alive, g->size, g->patience);
    int *own = &conclusions.message[g->rank];
    *own = missing_node(&alive);
    for (int r = 0; r < g->size; r++) {
        if (r == g->rank) continue;
        exchange(&conclusions, r, TAG_LOST, own);
        if (alive.arrived[r]) expected++;
        else conclusions.request[r] = MPI_REQUEST_NULL;  // r may only be late, and need not answer
    }
    // The last rank to answer may have started late, and waits in round 1 as long as this rank did.
    wait_inbox(site, &conclusions, expected, g->patience + EXTRA_SECONDS);
    *lost = agreed_node(&conclusions);
    bool lost_itself = *lost == node_of(g, g->rank);
    if (lost_itself && !others_save(site, *own == NO_NODE)) *lost = IMPOSSIBLE;
    return *lost == IMPOSSIBLE || lost_itself ? MPI_COMM_NULL : without_node(g, *lost);
}

void node_recovery_end(const Site *site, int lost) {
    const RecoveryGroup *g = node_failure_group(site);
    Inbox ends = inbox_make(g);
    for (int i = 0; i < g->per_node && lost >= 0; i++)
        exchange(&ends, lost * g->per_node + i, TAG_ENDS, &any_word);
}
