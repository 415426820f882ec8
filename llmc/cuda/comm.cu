// Collectives over NCCL for GPU ranks: see comm.h. Every scope of more than one rank has its own communicator, but for the node whose ranks fetch messages out of each
// other's memory instead (neighbours.h). Communicators are blocking: a call puts its work on the stream and returns, but may hold the host while connections are made,
// for as long as the watchdog (heartbeat.h) allows. In non-blocking mode each call makes NCCL start a thread, about 100 us in which the next cannot be issued: a
// step's worth is milliseconds. Linked into train_gpt only.
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "llmc/comm.h"
#include "llmc/cuda/neighbours.h"
#include "llmc/ranks/heartbeat.h"
#include "llmc/ranks/peers.h"

struct Comm {
    Device *device;
    Peers group[COMM_SCOPES];       // over which communicators are made
    ncclComm_t scope[COMM_SCOPES];  // NULL where the scope is this rank alone or NCCL is not needed (comm_connect)
    int size[COMM_SCOPES], rank[COMM_SCOPES];
    Neighbours *neighbours;         // of COMM_NODE; NULL where that is this rank alone
    bool connected;
    CommTraffic traffic;
};

// in_training: another rank may be what is wrong.
static void describe_failure(const Comm *comm, ncclResult_t result, CommScope scope, const char *what, bool in_training, char *text, size_t bytes) {
    const char *detail = ncclGetLastError(comm->scope[scope]);
    snprintf(text, bytes, "%s %s failed: %s (%.600s); %srun again with NCCL_DEBUG=INFO", what, comm_scope_name(scope), ncclGetErrorString(result),
             detail && *detail ? detail : "no detail", in_training ? "see whether another rank or its node died, and " : "");
}

enum { AFTER_THE_CAUSE = 25 };  // seconds: longer than all hosts' turns

// Another rank does not answer, while NCCL connects. Either it met an error, which it tells itself, or it died, of which the launcher ends the job: both before this
// returns. Else it is the network that lets nothing pass.
static void leave_word_to_others(const Comm *comm) {
    const Site *site = device_site(comm->device);
    heartbeat_watch(site, NULL, (void *)comm);
    heartbeat_waits(site, true);
    sleep(AFTER_THE_CAUSE);
    heartbeat_waits(site, false);
}

// Until all ranks have spoken to each other once, what NCCL finds wrong (memory that is gone, no network, a variable of its own) would be wrong after a restart too.
static void nccl_failed(const Comm *comm, ncclResult_t result, CommScope scope, const char *what) {
    char text[1000];
    describe_failure(comm, result, scope, what, comm->connected, text, sizeof text);
    if (result == ncclRemoteError && !comm->connected) leave_word_to_others(comm);
    heartbeat_take_turn(device_site(comm->device));  // a lost rank fails the collectives of all
    fatal(device_site(comm->device), comm->connected ? EXIT_COMMUNICATION : EXIT_ENVIRONMENT, "%s", text);
}

// What NCCL's threads have met, such as a link that broke, asked by the watchdog: the host may be blocked until the limit, by a device that waits for what will not
// come. Beside the host's own calls on the communicator: NCCL answers from words that its threads write atomically, and takes no lock. In progress is no error.
static bool broken_behind(void *context, char *what, size_t bytes) {
    const Comm *comm = (const Comm *)context;
    for (int s = 0; s < COMM_SCOPES; s++) {
        ncclResult_t behind = ncclSuccess;
        if (!comm->scope[s] || ncclCommGetAsyncError(comm->scope[s], &behind) != ncclSuccess || behind == ncclSuccess || behind == ncclInProgress) continue;
        describe_failure(comm, behind, (CommScope)s, "NCCL", true, what, bytes);
        return true;
    }
    return false;
}

// Around every call: it may hold the host until the other ranks come, which the watchdog of heartbeat.h limits.
static void nccl_begin(const Comm *comm) { heartbeat_waits(device_site(comm->device), true); }
static void nccl_end(const Comm *comm, ncclResult_t result, CommScope scope, const char *what) {
    // What went wrong behind the host's back, in this collective or one before it.
    ncclResult_t behind = ncclSuccess;
    if (result == ncclSuccess) result = ncclCommGetAsyncError(comm->scope[scope], &behind);
    heartbeat_waits(device_site(comm->device), false);
    if (result == ncclSuccess) result = behind;
    if (result != ncclSuccess) nccl_failed(comm, result, scope, what);
}

// --- communicators ---------------------------------------------------------------------------------------------------------------

// Sizes, ranks and, where the topology is as believed, who can reach whose memory.
Comm *comm_create(Device *device, const Topology *t, MPI_Comm dp_group, Error *err) {
    Comm *comm = (Comm *)xcalloc(1, sizeof *comm, "the communicator");
    comm->device = device;
    Peers all = {dp_group, 0, device_site(device)};
    for (int s = 0; s < COMM_SCOPES; s++) comm->group[s] = all;
    comm->group[COMM_NODE].comm = peers_split(all, t->node, t->local);
    comm->group[COMM_RAIL].comm = peers_split(all, t->local, t->node);
    comm->group[COMM_GROUP].comm = peers_duplicate(all);
    for (int s = 0; s < COMM_SCOPES; s++) {
        MPI_Comm_size(comm->group[s].comm, &comm->size[s]);
        MPI_Comm_rank(comm->group[s].comm, &comm->rank[s]);
    }
    // All ranks must see a disagreement, or those that do not would wait for the others.
    int agrees = comm->size[COMM_NODE] == t->per_node && comm->size[COMM_RAIL] == t->nodes && comm->rank[COMM_GROUP] == t->dp_rank;
    peers_reduce(all, &agrees, 1, MPI_INT, MPI_MIN);
    if (agrees && t->per_node > 1) comm->neighbours = neighbours_open(device, comm->group[COMM_NODE].comm);
    if (agrees) return comm;
    comm_disagreement(err);
    comm_destroy(comm);
    return NULL;
}

// The group's communicator moves the verdict's few bytes: one channel is enough, whose buffers are a small part of all of NCCL's.
static void scope_create(Comm *comm, CommScope scope) {
    ncclUniqueId id = {};
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    if (scope == COMM_GROUP) config.maxCTAs = 1;
    ncclResult_t result = comm->rank[scope] == 0 ? ncclGetUniqueId(&id) : ncclSuccess;
    if (result != ncclSuccess) nccl_failed(comm, result, scope, "finding a network for NCCL");
    peers_broadcast(comm->group[scope], &id, sizeof id, 0);
    nccl_begin(comm);
    result = ncclCommInitRankConfig(&comm->scope[scope], comm->size[scope], id, comm->rank[scope], &config);
    nccl_end(comm, result, scope, "making the NCCL communicator");
}

// NCCL connects ranks as the first message passes between them: a small one of each kind that training sends, whose bytes do not count.
// memory: (2, ranks, bytes).
static void scope_try(Comm *comm, CommScope scope, uint8_t *memory) {
    const size_t bytes = COMM_TRIAL_BYTES / 2;
    CommTraffic before = comm->traffic;
    Stream *stream = stream_create(comm->device, "first messages");
    if (scope == COMM_NODE) comm_all_to_all(comm, scope, memory, memory + (size_t)comm->size[scope] * bytes, bytes, stream);
    comm_all_gather(comm, scope, memory, bytes, stream);  // between nodes by the same connections as an all-to-all
    stream_destroy(stream);  // once it has ended
    comm->traffic = before;
}

static bool needs_nccl(const Comm *comm, CommScope scope) {
    bool copies = scope == COMM_NODE && comm->neighbours && neighbours_sharing(comm->neighbours);
    return comm->size[scope] > 1 && !copies;
}

void comm_connect(Comm *comm, void *memory) {
    const Site *site = device_site(comm->device);
    for (int s = 0; s < COMM_SCOPES; s++) {
        if (comm->scope[s] || !needs_nccl(comm, (CommScope)s)) continue;
        heartbeat_watch(site, NULL, comm);  // while it looks, the pointers stay as they are
        scope_create(comm, (CommScope)s);
        heartbeat_watch(site, broken_behind, comm);
        scope_try(comm, (CommScope)s, (uint8_t *)memory);
    }
    peers_meet(comm->group[COMM_GROUP]);  // nobody is connected before all are
    comm->connected = true;
}

void comm_destroy(Comm *comm) {
    if (!comm) return;
    heartbeat_watch(device_site(comm->device), NULL, comm);
    if (comm->neighbours) neighbours_close(comm->neighbours);
    for (int s = 0; s < COMM_SCOPES; s++) {
        MPI_Comm_free(&comm->group[s].comm);
        if (!comm->scope[s]) continue;
        nccl_begin(comm);
        nccl_end(comm, ncclCommFinalize(comm->scope[s]), (CommScope)s, "closing the NCCL communicator");
        ncclCommDestroy(comm->scope[s]);
    }
    free(comm);
}

void comm_set_timeout(Comm *, double) {}  // the watchdog's limit is the same flag's
int comm_size(const Comm *comm, CommScope scope) { return comm->size[scope]; }
int comm_rank(const Comm *comm, CommScope scope) { return comm->rank[scope]; }
CommTraffic comm_traffic(const Comm *comm) { return comm->traffic; }

bool comm_share(Comm *comm, void *flags, const CommPiece *piece, int pieces, Error *err) {
    if (!comm->neighbours) return error_set(err, EXIT_ENVIRONMENT, "the node has one rank");
    return neighbours_share(comm->neighbours, flags, piece, pieces, err);
}

void comm_unshare(Comm *comm) {
    if (comm->neighbours) neighbours_unshare(comm->neighbours);
}

// --- collectives -----------------------------------------------------------------------------------------------------------------

// Whether peers may fetch these bytes themselves.
static bool fetched(const Comm *comm, CommScope scope, const void *memory, size_t bytes) {
    return scope == COMM_NODE && comm->neighbours && neighbours_hold(comm->neighbours, memory, bytes);
}

// One message to every other rank of the scope, from send + its number * stride, and one from each. send, recv: device memory.
static ncclResult_t one_message_each(const Comm *comm, CommScope scope, const uint8_t *send, size_t stride, uint8_t *recv, size_t bytes, Stream *stream) {
    int size = comm->size[scope], rank = comm->rank[scope];
    ncclResult_t result = ncclGroupStart();
    for (int i = 1; i < size; i++) {
        int to = (rank + i) % size, from = (rank + size - i) % size;
        if (result == ncclSuccess) result = ncclSend(send + (size_t)to * stride, bytes, ncclUint8, to, comm->scope[scope], stream_handle(stream));
        if (result == ncclSuccess) result = ncclRecv(recv + (size_t)from * bytes, bytes, ncclUint8, from, comm->scope[scope], stream_handle(stream));
    }
    return result == ncclSuccess ? ncclGroupEnd() : result;
}

void comm_all_to_all(Comm *comm, CommScope scope, const void *send, void *recv, size_t bytes, Stream *stream) {
    int size = comm->size[scope];
    if (size == 1 || bytes == 0) return;
    heartbeat_issues(device_site(comm->device), "all-to-all", comm_scope_name(scope));
    comm->traffic.sent[scope] += (uint64_t)(size - 1) * bytes;
    if (fetched(comm, scope, send, (size_t)size * bytes)) {
        neighbours_all_to_all(comm->neighbours, send, recv, bytes, stream);
        return;
    }
    nccl_begin(comm);
    nccl_end(comm, one_message_each(comm, scope, (const uint8_t *)send, bytes, (uint8_t *)recv, bytes, stream), scope, "all-to-all");
}

void comm_all_gather(Comm *comm, CommScope scope, void *buffer, size_t bytes, Stream *stream) {
    int size = comm->size[scope];
    if (size == 1 || bytes == 0) return;
    const uint8_t *own = (const uint8_t *)buffer + (size_t)comm->rank[scope] * bytes;
    heartbeat_issues(device_site(comm->device), "all-gather", comm_scope_name(scope));
    comm->traffic.sent[scope] += (uint64_t)(size - 1) * bytes;
    if (fetched(comm, scope, buffer, (size_t)size * bytes)) {
        neighbours_all_gather(comm->neighbours, buffer, bytes, stream);
        return;
    }
    nccl_begin(comm);
    // Between nodes a message to each rank: over sockets NCCL's own all-gather made a step of 1.3B at micro-batch 1 longer by 21 to 33 % (dev/bench/NOTES.md).
    ncclResult_t result = scope == COMM_RAIL ? one_message_each(comm, scope, own, 0, (uint8_t *)buffer, bytes, stream)
                                             : ncclAllGather(own, buffer, bytes, ncclUint8, comm->scope[scope], stream_handle(stream));
    nccl_end(comm, result, scope, "all-gather");
}
