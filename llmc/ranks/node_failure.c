// State of node-failure recovery: see node_failure.h.
#include "llmc/ranks/node_failure.h"

#include <assert.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>

// --- the launcher's signal -----------------------------------------------------------------------

// File scope, because a signal handler gets no context argument. Times are milliseconds of the
// monotonic clock, 0: never.
static atomic_llong continued;  // first SIGCONT that arrived while the process was running
static atomic_llong asked;      // last call of launcher_signal_age; the watchdog calls it every second
static atomic_llong woken;      // last call of launcher_signal_age that followed a long gap
static atomic_int polls;        // number of collective polls since `continued`
enum { RUNNING_MS = 2000, AWAKE_MS = 1000 };

static long long now_ms(void) { return (long long)(1e3 * monotonic_seconds()); }

static void on_continue(int number) {
    long long none = 0, at = now_ms();
    bool running = at - atomic_load(&asked) < RUNNING_MS && at - atomic_load(&woken) > AWAKE_MS;
    if (running && atomic_compare_exchange_strong(&continued, &none, at)) atomic_store(&polls, 0);
}

void launcher_signal_watch(void) {
    struct sigaction take = {.sa_handler = on_continue, .sa_flags = SA_RESTART};
    atomic_store(&asked, now_ms());
    sigaction(SIGCONT, &take, NULL);
}

void launcher_signal_ignore(void) {
    signal(SIGCONT, SIG_DFL);
    atomic_store(&continued, 0);
}

double launcher_signal_age(void) {
    long long at = atomic_load(&continued), now = now_ms();
    if (now - atomic_exchange(&asked, now) > RUNNING_MS) atomic_store(&woken, now);
    return at ? 1e-3 * (double)(now - at) : -1;
}

bool launcher_signal_pending(void) { return atomic_load(&continued) != 0; }

void launcher_signal_polled(bool arrived) {
    if (arrived && atomic_fetch_add(&polls, 1) > 0) atomic_store(&continued, 0);
}

// --- recovery ------------------------------------------------------------------------------------

// Seconds that a wait may last after the launcher's signal. The launcher's grace period must cover
// this time, the time in which other ranks answer, and the time to save (docs/checkpoints.md).
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
    NodeFailure *f = xcalloc(1, sizeof *f, "node-failure recovery");
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
