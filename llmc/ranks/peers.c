// Host-side collectives: see peers.h.
#include "llmc/ranks/peers.h"

#include <assert.h>
#include <stdio.h>

#include "llmc/ranks/heartbeat.h"
#include "llmc/ranks/node_failure.h"

void mpi_check(const Site *site, int rc, const char *what, const char *where) {
    if (rc == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(rc, text, &length);
    heartbeat_claim_exit_in_turn(site);  // after the loss of a rank, collectives fail on all ranks
    fatal(site, EXIT_COMMUNICATION, "%s %s failed: %s; check whether another rank or its node died", what,
          where, text);
}

static void check(Peers peers, int rc, const char *what) {
    if (rc != MPI_SUCCESS) node_failure_recover(peers.site, "MPI reported an error");
    mpi_check(peers.site, rc, what, "over MPI");
}

// Handles a wait that has exceeded its limit. Starts node-failure recovery before looking for the
// late rank, because other ranks may not wait long. If recovery fails because this node is lost,
// extends the wait once (more, NULL the second time), so that the other nodes can save.
static void no_answer(Peers peers, MPI_Request *request, int *done, const char *what, double began,
                      Deadline *more) {
    char who[512];
    double waited = monotonic_seconds() - began;
    node_failure_recover(peers.site, "a rank does not respond");
    if (more && node_failure_handled(peers.site)) {
        *more = deadline_in(node_failure_extra_wait(peers.site, peers.limit));
        return;
    }
    if (!heartbeat_find_busy(peers.site, who, sizeof who))
        snprintf(who, sizeof who, "a rank has not arrived");
    check(peers, MPI_Test(request, done, MPI_STATUS_IGNORE), what);
    if (*done) return;  // the rank has arrived in the meantime
    heartbeat_claim_exit(peers.site);
    fatal(peers.site, EXIT_COMMUNICATION,
          "waited %.0f s: %s; check what stopped it (--distributed-timeout-minutes sets the limit)", waited,
          who);
}

// Completes a nonblocking operation. started: result of the call that started it.
static void complete(Peers peers, int started, MPI_Request *request, const char *what) {
    assert(peers.comm != MPI_COMM_NULL);
    Deadline deadline = deadline_in(peers.limit);
    int done = 0;
    check(peers, started, what);
    // After a reported failure, abandon the operation even if all ranks arrive.
    if (node_failure_reported(peers.site)) node_failure_recover(peers.site, "a rank did not respond");
    double began = monotonic_seconds();
    bool patient = false;
    heartbeat_waiting(peers.site, true);
    for (unsigned polls = 1; !done; polls++) {
        check(peers, MPI_Test(request, &done, MPI_STATUS_IGNORE), what);
        if (done || polls % POLLS_PER_CHECK != 1) continue;
        if (node_failure_suspected(peers.site, monotonic_seconds() - began) ||
            node_failure_peer_recovering(peers.site))
            node_failure_recover(peers.site, "a rank does not respond");
        if (peers.limit <= 0 || !deadline_passed(&deadline)) continue;
        no_answer(peers, request, &done, what, began, patient ? NULL : &deadline);
        patient = true;
    }
    heartbeat_waiting(peers.site, false);
    if (!node_failure_unrecoverable(peers.site)) return;
    heartbeat_claim_exit(peers.site);
    fatal(peers.site, EXIT_COMMUNICATION,
          "this node or several others did not respond in time, so this node saved nothing; restart the"
          " job from the latest checkpoint");
}

double peers_patience(Peers peers) {
    const double most = 20.0;
    return peers.limit > 0 && 0.5 * peers.limit < most ? 0.5 * peers.limit : most;
}

int peers_rank(Peers peers) {
    int rank;
    MPI_Comm_rank(peers.comm, &rank);
    return rank;
}

int peers_size(Peers peers) {
    int size;
    MPI_Comm_size(peers.comm, &size);
    return size;
}

bool peers_agree(Peers peers, bool ok, Error *err, int *who) {
    int rank = peers_rank(peers), size = peers_size(peers);
    Error shared = {0};
    int first = ok ? size : rank;
    peers_all_reduce(peers, &first, 1, MPI_INT, MPI_MIN);
    if (who) *who = first;
    if (first == size) return true;
    if (err && first == rank) {
        shared = *err;
        if (shared.rank < 0 && peers.site) shared.rank = peers.site->rank;
    }
    peers_broadcast(peers, &shared, sizeof shared, first);
    if (err) *err = shared;
    return false;
}

void peers_barrier(Peers peers) {
    MPI_Request request;
    complete(peers, MPI_Ibarrier(peers.comm, &request), &request, "barrier");
}

void peers_broadcast(Peers peers, void *bytes, size_t count, int root) {
    assert((bytes || !count) && root >= 0);
    const size_t most = (size_t)1 << 30;  // MPI counts are int
    for (size_t at = 0; at < count; at += most) {
        MPI_Request request;
        int part = (int)(count - at < most ? count - at : most);
        complete(peers, MPI_Ibcast((uint8_t *)bytes + at, part, MPI_BYTE, root, peers.comm, &request),
                 &request, "broadcast");
    }
}

void peers_all_reduce(Peers peers, void *values, int count, MPI_Datatype type, MPI_Op op) {
    assert((values || !count) && count >= 0);
    MPI_Request request;
    complete(peers, MPI_Iallreduce(MPI_IN_PLACE, values, count, type, op, peers.comm, &request), &request,
             "all-reduce");
}

void peers_all_gather(Peers peers, const void *own, void *all, int count, MPI_Datatype type) {
    assert(count >= 0 && (count == 0 || (own && all)));
    MPI_Request request;
    complete(peers, MPI_Iallgather(own, count, type, all, count, type, peers.comm, &request), &request,
             "all-gather");
}

void peers_gather_bytes(Peers peers, const void *own, int bytes, void *all, const int *length,
                        const int *start) {
    assert(bytes >= 0 && (own || bytes == 0));
    MPI_Request request;
    complete(peers, MPI_Igatherv(own, bytes, MPI_BYTE, all, length, start, MPI_BYTE, 0, peers.comm, &request),
             &request, "gather");
}

enum { WORK_DONE, WORK_CONTINUES, WORK_FAILED };  // ordered by priority

// Well below the limit, which includes the wait for ranks that are still working.
static double next_sync_time(Peers peers) {
    return monotonic_seconds() + (peers.limit > 0 && peers.limit < 4 ? peers.limit / 4 : 1);
}

PeersWork peers_work(Peers peers) {
    PeersWork work = {peers, next_sync_time(peers), WORK_CONTINUES};
    return work;
}

// Combines the states of all ranks, so that all ranks stop synchronizing together.
static void sync_work(PeersWork *work, int state) {
    peers_all_reduce(work->peers, &state, 1, MPI_INT, MPI_MAX);
    work->state = state;
    work->next = next_sync_time(work->peers);
}

bool peers_work_continues(PeersWork *work) {
    heartbeat_progress(work->peers.site);
    if (work->state == WORK_CONTINUES && monotonic_seconds() >= work->next) sync_work(work, WORK_CONTINUES);
    return work->state == WORK_CONTINUES;
}

bool peers_work_agree(PeersWork *work, bool ok, Error *err) {
    bool cut_short = work->state == WORK_FAILED;
    while (work->state == WORK_CONTINUES) sync_work(work, ok ? WORK_DONE : WORK_FAILED);
    return work->state == WORK_DONE || peers_agree(work->peers, ok || cut_short, err, NULL);
}

MPI_Comm peers_duplicate(Peers peers) {
    MPI_Comm made;
    MPI_Request request;
    complete(peers, MPI_Comm_idup(peers.comm, &made, &request), &request, "creating a communicator");
    return made;
}

MPI_Comm peers_split(Peers peers, int color, int key) {
    MPI_Comm made;
    heartbeat_waiting(peers.site, true);
    check(peers, MPI_Comm_split(peers.comm, color, key, &made), "creating a communicator");
    heartbeat_waiting(peers.site, false);
    return made;
}

MPI_Comm peers_of_host(Peers peers) {
    MPI_Comm made;
    heartbeat_waiting(peers.site, true);
    check(peers, MPI_Comm_split_type(peers.comm, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &made),
          "creating a communicator");
    heartbeat_waiting(peers.site, false);
    return made;
}

MPI_Comm peers_pair(Peers peers, int first, int second) {
    MPI_Comm made;
    MPI_Group all, pair;
    const int ranks[2] = {first, second};
    heartbeat_waiting(peers.site, true);
    check(peers, MPI_Comm_group(peers.comm, &all), "creating a communicator");
    check(peers, MPI_Group_incl(all, 2, ranks, &pair), "creating a communicator");
    check(peers, MPI_Comm_create_group(peers.comm, pair, 0, &made), "creating a communicator");
    heartbeat_waiting(peers.site, false);
    MPI_Group_free(&pair);
    MPI_Group_free(&all);
    MPI_Comm_set_errhandler(made, MPI_ERRORS_RETURN);
    return made;
}
