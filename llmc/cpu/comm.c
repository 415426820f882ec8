// Collectives over MPI for CPU ranks: see comm.h. Point-to-point pairs instead of MPI's own collectives, so that the bytes counted are the bytes
// handed to the transport and the own slot never travels. Linked into the CPU program only.
#include "llmc/comm.h"

#include <stdlib.h>

#include "llmc/ranks/heartbeat.h"
#include "llmc/ranks/peers.h"

struct Comm {
    Device *device;
    MPI_Comm scope[COMM_SCOPES];
    int size[COMM_SCOPES], rank[COMM_SCOPES];
    MPI_Request *requests;  // (2 * group size * pieces) grown on demand
    int *peers;             // (capacity) whom each request waits for
    int capacity;
    double timeout_seconds; // 0: wait for ever
    CommTraffic traffic;
};

static void check(const Comm *comm, int rc, CommScope scope, const char *what) {
    mpi_check(device_site(comm->device), rc, what, comm_scope_name(scope));
}

Comm *comm_create(Device *device, const Topology *t, MPI_Comm dp_group, Error *err) {
    Comm *comm = (Comm *)xcalloc(1, sizeof *comm, "the communicator");
    comm->device = device;
    Peers group = {dp_group, 0, device_site(device)};
    comm->scope[COMM_GROUP] = peers_duplicate(group);
    comm->scope[COMM_NODE] = peers_split(group, t->node, t->local);
    comm->scope[COMM_RAIL] = peers_split(group, t->local, t->node);
    for (int s = 0; s < COMM_SCOPES; s++) {
        MPI_Comm_set_errhandler(comm->scope[s], MPI_ERRORS_RETURN);
        MPI_Comm_size(comm->scope[s], &comm->size[s]);
        MPI_Comm_rank(comm->scope[s], &comm->rank[s]);
    }
    if (comm->size[COMM_NODE] != t->per_node || comm->size[COMM_RAIL] != t->nodes || comm->rank[COMM_GROUP] != t->dp_rank) {
        comm_disagreement(err);
        comm_destroy(comm);
        return NULL;
    }
    return comm;
}

void comm_destroy(Comm *comm) {
    if (!comm) return;
    for (int s = 0; s < COMM_SCOPES; s++) MPI_Comm_free(&comm->scope[s]);
    free(comm->requests);
    free(comm->peers);
    free(comm);
}

bool comm_share(Comm *comm, void *flags, const CommPiece *piece, int pieces, Error *err) { return error_set(err, EXIT_ENVIRONMENT, "CPU ranks send everything through MPI"); }
void comm_unshare(Comm *comm) {}
void comm_connect(Comm *comm, void *memory) {}
int comm_size(const Comm *comm, CommScope scope) { return comm->size[scope]; }
int comm_rank(const Comm *comm, CommScope scope) { return comm->rank[scope]; }
CommTraffic comm_traffic(const Comm *comm) { return comm->traffic; }

enum { PIECE = 1 << 30 };  // MPI counts are int: longer messages travel in pieces

static MPI_Request *next_request(Comm *comm, int peer, int *used) {
    if (*used == comm->capacity) {
        comm->capacity = comm->capacity ? 2 * comm->capacity : 64;
        comm->requests = (MPI_Request *)xrealloc(comm->requests, (size_t)comm->capacity * sizeof(MPI_Request), "MPI requests");
        comm->peers = (int *)xrealloc(comm->peers, (size_t)comm->capacity * sizeof(int), "MPI requests");
    }
    comm->peers[*used] = peer;
    return &comm->requests[(*used)++];
}

static void post(Comm *comm, CommScope scope, int peer, const uint8_t *send, uint8_t *recv, size_t bytes, int *used) {
    for (size_t at = 0; at < bytes; at += PIECE) {
        int count = bytes - at < PIECE ? (int)(bytes - at) : PIECE;
        check(comm, MPI_Irecv(recv + at, count, MPI_BYTE, peer, 0, comm->scope[scope], next_request(comm, peer, used)), scope, "receiving");
        check(comm, MPI_Isend(send + at, count, MPI_BYTE, peer, 0, comm->scope[scope], next_request(comm, peer, used)), scope, "sending");
    }
    comm->traffic.sent[scope] += bytes;
}

// The data-parallel rank of a peer in one of the scopes.
static int group_rank(const Comm *comm, CommScope scope, int peer) {
    int node = comm->rank[COMM_RAIL], local = comm->rank[COMM_NODE], per_node = comm->size[COMM_NODE];
    if (scope == COMM_NODE) return node * per_node + peer;
    return scope == COMM_RAIL ? peer * per_node + local : peer;
}

static void timed_out(Comm *comm, CommScope scope, int used, const char *what) {
    int late = 0, done = 1;
    char who[512];
    bool blames = heartbeat_blames(device_site(comm->device), who, sizeof who);
    heartbeat_take_floor(device_site(comm->device));
    if (blames) {
        fatal(device_site(comm->device), EXIT_COMMUNICATION, "%s %s, waited %.0f s: %s; see what stopped it (--distributed-timeout-minutes sets the limit)", what,
              comm_scope_name(scope), comm->timeout_seconds, who);
    }
    for (int i = 0; i < used && done; i++) {
        late = i;
        MPI_Test(&comm->requests[i], &done, MPI_STATUS_IGNORE);
    }
    fatal(device_site(comm->device), EXIT_COMMUNICATION, "%s %s: rank %d has not answered for %.0f s; see what stopped it (--distributed-timeout-minutes sets the limit)",
          what, comm_scope_name(scope), group_rank(comm, scope, comm->peers[late]), comm->timeout_seconds);
}

static void wait_all(Comm *comm, CommScope scope, int used, const char *what) {
    if (used > 0) heartbeat_issues(device_site(comm->device), what, comm_scope_name(scope));
    Deadline deadline = deadline_in(comm->timeout_seconds);
    heartbeat_waits(device_site(comm->device), true);
    for (int done = 0, polls = 1; !done; polls++) {
        check(comm, MPI_Testall(used, comm->requests, &done, MPI_STATUSES_IGNORE), scope, what);
        if (!done && polls % 1024 == 0 && comm->timeout_seconds > 0 && deadline_passed(&deadline)) timed_out(comm, scope, used, what);
    }
    heartbeat_waits(device_site(comm->device), false);
}

void comm_set_timeout(Comm *comm, double seconds) { comm->timeout_seconds = seconds; }

void comm_all_to_all(Comm *comm, CommScope scope, const void *send, void *recv, size_t bytes, Stream *stream) {
    int used = 0, size = comm->size[scope], rank = comm->rank[scope];
    for (int i = 1; i < size; i++) {
        int peer = (rank + i) % size;
        post(comm, scope, peer, (const uint8_t *)send + (size_t)peer * bytes, (uint8_t *)recv + (size_t)peer * bytes, bytes, &used);
    }
    wait_all(comm, scope, used, "all-to-all");
}

void comm_all_gather(Comm *comm, CommScope scope, void *buffer, size_t bytes, Stream *stream) {
    int used = 0, size = comm->size[scope], rank = comm->rank[scope];
    uint8_t *own = (uint8_t *)buffer + (size_t)rank * bytes;
    for (int i = 1; i < size; i++) {
        int peer = (rank + i) % size;
        post(comm, scope, peer, own, (uint8_t *)buffer + (size_t)peer * bytes, bytes, &used);
    }
    wait_all(comm, scope, used, "all-gather");
}
