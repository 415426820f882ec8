// State of node-failure recovery: see node_failure.h.
#include "llmc/ranks/node_failure.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "llmc/ranks/launcher_signal.h"

// Seconds that a wait may take after the launcher's signal. The launcher's own grace period must
// cover this, the time for others to answer, and the time to save (docs/checkpoints.md).
enum { SECONDS_AFTER_SIGNAL = 5 };
// Seconds that the other nodes get to save, in addition to a second time limit.
enum { SECONDS_TO_SAVE = 60 };

struct NodeFailure {
    atomic_bool armed, reported, started, failed;
    RecoveryGroup group;
    NodeFailureHandler handler;
    void *context;
};

NodeFailure *node_failure_create(void) {
    NodeFailure *f = (NodeFailure *)xcalloc(1, sizeof *f, "node-failure recovery");
    f->group.comm = MPI_COMM_NULL;
    return f;
}

void node_failure_free(NodeFailure *failure) { free(failure); }

void node_failure_arm(NodeFailure *failure, RecoveryGroup group, NodeFailureHandler handler, void *context) {
    assert(failure && handler && group.per_node > 0 && group.size % group.per_node == 0);
    failure->group = group;
    failure->handler = handler;
    failure->context = context;
    launcher_signal_watch();
    atomic_store(&failure->armed, true);
}

RecoveryGroup node_failure_disarm(NodeFailure *failure) {
    assert(failure);
    RecoveryGroup group = failure->group;
    atomic_store(&failure->armed, false);
    failure->group.comm = MPI_COMM_NULL;
    return group;
}

static NodeFailure *armed(const Site *site) {
    NodeFailure *f = site ? site->node_failure : NULL;
    return f && atomic_load(&f->armed) ? f : NULL;
}

const RecoveryGroup *node_failure_group(const Site *site) {
    assert(armed(site));
    return &site->node_failure->group;
}

bool node_failure_handled(const Site *site) { return armed(site) != NULL; }

double node_failure_extra_wait(const Site *site, double limit) {
    return armed(site) ? limit + SECONDS_TO_SAVE : 0;
}

bool node_failure_tolerates(const Site *site, int rank) {
    const NodeFailure *f = armed(site);
    return f && rank / f->group.per_node != f->group.rank / f->group.per_node;
}

void node_failure_report(const Site *site) {
    NodeFailure *f = armed(site);
    if (f) atomic_store(&f->reported, true);
}

bool node_failure_reported(const Site *site) {
    NodeFailure *f = armed(site);
    return f && atomic_load(&f->reported);
}

bool node_failure_suspected(const Site *site, double seconds) {
    NodeFailure *f = armed(site);
    if (!f || atomic_load(&f->started)) return false;
    double age = launcher_signal_age();
    return atomic_load(&f->reported) || (age > SECONDS_AFTER_SIGNAL && seconds > SECONDS_AFTER_SIGNAL);
}

bool node_failure_peer_recovering(const Site *site) {
    NodeFailure *f = armed(site);
    int arrived = 0;
    if (!f || atomic_load(&f->started)) return false;
    int rc = MPI_Iprobe(MPI_ANY_SOURCE, RECOVERY_TAG_ALIVE, f->group.comm, &arrived, MPI_STATUS_IGNORE);
    return rc == MPI_SUCCESS && arrived;
}

void node_failure_recover(const Site *site, const char *why) {
    NodeFailure *f = armed(site);
    if (!f || atomic_exchange(&f->started, true)) return;
    atomic_store(&f->reported, true);
    f->handler(f->context, why);
    atomic_store(&f->failed, true);
}

bool node_failure_unrecoverable(const Site *site) {
    NodeFailure *f = armed(site);
    return f && atomic_load(&f->failed);
}
