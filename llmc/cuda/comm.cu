// Collectives over NCCL for GPU ranks: see comm.h. Every scope of more than one rank has its own communicator, made in non-blocking mode so that a rank
// that never answers is noticed by the host instead of holding it. Linked into train_gpt only; called by sdp4bit/tlq_hs.c, sdp4bit/qwd.c and zero.c.
#include <nccl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "llmc/comm.h"
#include "llmc/cuda/internal.h"
#include "llmc/heartbeat.h"

struct Comm {
    Device *device;
    ncclComm_t scope[COMM_SCOPES];  // NULL where the scope is this rank alone
    int size[COMM_SCOPES], rank[COMM_SCOPES];
    double timeout_seconds;         // 0: wait for ever
    CommTraffic traffic;
};

static const char *const scope_name[COMM_SCOPES] = {"inside the node", "between nodes", "in the data-parallel group"};

static void nccl_failed(const Comm *comm, ncclResult_t result, CommScope scope, const char *what) {
    const char *detail = ncclGetLastError(comm->scope[scope]);
    fatal(device_site(comm->device), EXIT_COMMUNICATION, "%s %s failed: %s (%s); see whether another rank or its node died, and run again with NCCL_DEBUG=INFO", what,
          scope_name[scope], ncclGetErrorString(result), detail && *detail ? detail : "no detail");
}

// A call on a non-blocking communicator may still be going on when it returns. Nothing else may be asked of the communicator before it ends.
static void nccl_finish(const Comm *comm, ncclResult_t result, CommScope scope, const char *what) {
    double deadline = monotonic_seconds() + comm->timeout_seconds;
    heartbeat_waits(device_site(comm->device), true);
    while (result == ncclInProgress) {
        ncclResult_t asked = ncclCommGetAsyncError(comm->scope[scope], &result);
        if (asked != ncclSuccess) result = asked;
        if (result != ncclInProgress) break;
        if (comm->timeout_seconds > 0 && monotonic_seconds() > deadline) {
            char who[512];
            if (!heartbeat_blames(device_site(comm->device), who, sizeof who)) snprintf(who, sizeof who, "a rank has not answered");
            heartbeat_take_floor(device_site(comm->device));
            fatal(device_site(comm->device), EXIT_COMMUNICATION, "%s %s, waited %.0f s: %s; see what stopped it (--distributed-timeout-minutes sets the limit)", what,
                  scope_name[scope], comm->timeout_seconds, who);
        }
        sched_yield();
    }
    heartbeat_waits(device_site(comm->device), false);
    if (result != ncclSuccess) nccl_failed(comm, result, scope, what);
}

// --- communicators ---------------------------------------------------------------------------------------------------------------

// Collective over group, whose order becomes the communicator's.
static void scope_create(Comm *comm, CommScope scope, MPI_Comm group) {
    MPI_Comm_size(group, &comm->size[scope]);
    MPI_Comm_rank(group, &comm->rank[scope]);
    if (comm->size[scope] == 1) return;
    ncclUniqueId id = {};
    ncclResult_t result = comm->rank[scope] == 0 ? ncclGetUniqueId(&id) : ncclSuccess;
    if (result != ncclSuccess) nccl_failed(comm, result, scope, "finding a network for NCCL");
    heartbeat_waits(device_site(comm->device), true);  // nccl_finish ends it
    MPI_Bcast(&id, (int)sizeof id, MPI_BYTE, 0, group);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    result = ncclCommInitRankConfig(&comm->scope[scope], comm->size[scope], id, comm->rank[scope], &config);
    nccl_finish(comm, result, scope, "making the NCCL communicator");
}

Comm *comm_create(Device *device, const Topology *t, MPI_Comm dp_group, Error *err) {
    Comm *comm = (Comm *)xcalloc(1, sizeof *comm, "the communicator");
    comm->device = device;
    MPI_Comm group[COMM_SCOPES];
    heartbeat_waits(device_site(device), true);
    MPI_Comm_split(dp_group, t->node, t->local, &group[COMM_NODE]);
    MPI_Comm_split(dp_group, t->local, t->node, &group[COMM_RAIL]);
    MPI_Comm_dup(dp_group, &group[COMM_GROUP]);
    int node_size = 0, rail_size = 0, rank = 0;
    MPI_Comm_size(group[COMM_NODE], &node_size);
    MPI_Comm_size(group[COMM_RAIL], &rail_size);
    MPI_Comm_rank(dp_group, &rank);
    // All ranks must see a disagreement, or those that do not would wait for the others.
    int agrees = node_size == t->per_node && rail_size == t->nodes && rank == t->dp_rank;
    MPI_Allreduce(MPI_IN_PLACE, &agrees, 1, MPI_INT, MPI_MIN, dp_group);
    for (int s = 0; s < COMM_SCOPES; s++) {
        if (agrees) scope_create(comm, (CommScope)s, group[s]);
        MPI_Comm_free(&group[s]);
    }
    heartbeat_waits(device_site(device), false);
    if (agrees) return comm;
    error_set(err, EXIT_ENVIRONMENT, "the ranks disagree about the topology; start every rank with the same flags");
    comm_destroy(comm);
    return NULL;
}

void comm_destroy(Comm *comm) {
    if (!comm) return;
    for (int s = 0; s < COMM_SCOPES; s++) {
        if (!comm->scope[s]) continue;
        nccl_finish(comm, ncclCommFinalize(comm->scope[s]), (CommScope)s, "closing the NCCL communicator");
        ncclCommDestroy(comm->scope[s]);
    }
    free(comm);
}

void comm_set_timeout(Comm *comm, double seconds) { comm->timeout_seconds = seconds; }
int comm_size(const Comm *comm, CommScope scope) { return comm->size[scope]; }
int comm_rank(const Comm *comm, CommScope scope) { return comm->rank[scope]; }
CommTraffic comm_traffic(const Comm *comm) { return comm->traffic; }

// --- collectives -----------------------------------------------------------------------------------------------------------------

static void nccl_check(const Comm *comm, ncclResult_t result, CommScope scope, const char *what) {
    if (result != ncclSuccess && result != ncclInProgress) nccl_failed(comm, result, scope, what);
}

void comm_all_to_all(Comm *comm, CommScope scope, const void *send, void *recv, size_t bytes, Stream *stream) {
    int size = comm->size[scope], rank = comm->rank[scope];
    if (size == 1 || bytes == 0) return;
    nccl_check(comm, ncclGroupStart(), scope, "all-to-all");
    for (int i = 1; i < size; i++) {
        int to = (rank + i) % size, from = (rank + size - i) % size;
        nccl_check(comm, ncclSend((const uint8_t *)send + (size_t)to * bytes, bytes, ncclUint8, to, comm->scope[scope], stream_handle(stream)), scope, "all-to-all");
        nccl_check(comm, ncclRecv((uint8_t *)recv + (size_t)from * bytes, bytes, ncclUint8, from, comm->scope[scope], stream_handle(stream)), scope, "all-to-all");
    }
    nccl_finish(comm, ncclGroupEnd(), scope, "all-to-all");
    comm->traffic.sent[scope] += (uint64_t)(size - 1) * bytes;
}

void comm_all_gather(Comm *comm, CommScope scope, void *buffer, size_t bytes, Stream *stream) {
    int size = comm->size[scope];
    if (size == 1 || bytes == 0) return;
    const uint8_t *own = (const uint8_t *)buffer + (size_t)comm->rank[scope] * bytes;
    nccl_finish(comm, ncclAllGather(own, buffer, bytes, ncclUint8, comm->scope[scope], stream_handle(stream)), scope, "all-gather");
    comm->traffic.sent[scope] += (uint64_t)(size - 1) * bytes;
}
