// Collectives over NCCL for GPU ranks: see llmc/comm.h. Each group of several ranks has a
// communicator of its own, except a node whose ranks fetch messages out of each other's memory
// (neighbours.h). Communicators are blocking. A call puts its work on the stream and returns, but
// it may hold the host while connections are made, for as long as the watchdog (heartbeat.h)
// allows. In non-blocking mode each call makes NCCL start a thread, about 100 us in which the next
// cannot be issued: milliseconds in a step. Linked into train_gpt only.
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "llmc/comm.h"
#include "llmc/cuda/neighbours.h"
#include "llmc/ranks/heartbeat.h"

struct Comm {
    Device *device;
    const Site *site;
    const Mesh *mesh;        // what the watchdog looks at
    ncclComm_t nccl;         // NULL: not connected yet, or not needed (comm_connect)
    Neighbours *neighbours;  // of the group inside the node; else NULL
    bool few_bytes;          // the world, which exchanges verdicts
    bool by_messages;        // between nodes: gathers, too, go as one message to each rank
    bool connected;          // all groups of all ranks are
    uint64_t sent;
};

// in_training: another rank may be what is wrong.
static void describe_failure(const Group *group, ncclResult_t result, const char *what, bool in_training,
                             char *text, size_t bytes) {
    const char *detail = ncclGetLastError(group->comm->nccl);
    snprintf(text, bytes, "%s %s failed: %s (%.600s); %srun again with NCCL_DEBUG=INFO", what, group->name,
             ncclGetErrorString(result), detail && *detail ? detail : "no detail",
             in_training ? "see whether another rank or its node died, and " : "");
}

enum { AFTER_THE_CAUSE = 25 };  // seconds: longer than all hosts' turns

// Another rank does not answer while NCCL connects. If it met an error, it tells that itself. If it
// died, the launcher ends the job. Both happen before this returns. Else it is the network that
// lets nothing pass.
static void leave_word_to_others(const Comm *comm) {
    heartbeat_watch(comm->site, NULL, (void *)comm->mesh);
    heartbeat_waits(comm->site, true);
    sleep(AFTER_THE_CAUSE);
    heartbeat_waits(comm->site, false);
}

// Until all ranks have spoken to each other once, what NCCL finds wrong (memory that is gone, no
// network, a variable of its own) would be wrong after a restart too.
static void nccl_failed(const Group *group, ncclResult_t result, const char *what) {
    const Comm *comm = group->comm;
    char text[1000];
    describe_failure(group, result, what, comm->connected, text, sizeof text);
    if (result == ncclRemoteError && !comm->connected) leave_word_to_others(comm);
    heartbeat_take_turn(comm->site);  // a lost rank fails the collectives of all
    fatal(comm->site, comm->connected ? EXIT_COMMUNICATION : EXIT_ENVIRONMENT, "%s", text);
}

// What NCCL's threads have met, such as a link that broke. The watchdog asks, because the host may
// be blocked until the limit by a device that waits for what will not come. This runs beside the
// host's own calls on the communicators: NCCL answers from words that its threads write atomically,
// and takes no lock. "In progress" is no error. context: the mesh.
static bool broken_behind(void *context, char *what, size_t bytes) {
    for (int i = 0; i < MESH_GROUPS; i++) {
        const Group *group = &((const Mesh *)context)->group[i];
        ncclResult_t behind = ncclSuccess;
        if (!group->comm || !group->comm->nccl) continue;
        ncclResult_t asked = ncclCommGetAsyncError(group->comm->nccl, &behind);
        if (asked != ncclSuccess || behind == ncclSuccess || behind == ncclInProgress) continue;
        describe_failure(group, behind, "NCCL", true, what, bytes);
        return true;
    }
    return false;
}

// Around every call: it may hold the host until the other ranks come, which the watchdog limits.
static void nccl_begin(const Group *group) { heartbeat_waits(group->comm->site, true); }
static void nccl_end(const Group *group, ncclResult_t result, const char *what) {
    // What went wrong behind the host's back, in this collective or one before it.
    ncclResult_t behind = ncclSuccess;
    if (result == ncclSuccess) result = ncclCommGetAsyncError(group->comm->nccl, &behind);
    heartbeat_waits(group->comm->site, false);
    if (result == ncclSuccess) result = behind;
    if (result != ncclSuccess) nccl_failed(group, result, what);
}

// --- communicators -------------------------------------------------------------------------------

void comm_open(Mesh *mesh, Device *device, double) {
    for (int i = 0; i < MESH_GROUPS; i++) {
        Group *group = &mesh->group[i];
        if (group->size == 1 || group == &mesh->dp) continue;
        Comm *comm = (Comm *)xcalloc(1, sizeof *comm, "the communicator");
        comm->device = device;
        comm->site = device_site(device);
        comm->mesh = mesh;
        if (group == &mesh->node) comm->neighbours = neighbours_open(device, group->mpi);
        comm->few_bytes = group == &mesh->world;
        comm->by_messages = group == &mesh->rail;
        group->comm = comm;
    }
}

static Peers peers_of(const Group *group) { return {group->mpi, 0, group->comm->site}; }

// One channel is enough for a verdict's few bytes. Its buffers are a small part of all of NCCL's.
static void make_communicator(const Group *group) {
    Comm *comm = group->comm;
    ncclUniqueId id = {};
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    if (comm->few_bytes) config.maxCTAs = 1;
    ncclResult_t result = group->rank == 0 ? ncclGetUniqueId(&id) : ncclSuccess;
    if (result != ncclSuccess) nccl_failed(group, result, "finding a network for NCCL");
    peers_broadcast(peers_of(group), &id, sizeof id, 0);
    nccl_begin(group);
    result = ncclCommInitRankConfig(&comm->nccl, group->size, id, group->rank, &config);
    nccl_end(group, result, "making the NCCL communicator");
}

// NCCL connects ranks as the first message passes between them: a small one of each kind that
// training sends, whose bytes do not count. Between nodes both kinds use the same connections.
// memory: (2, ranks, bytes).
static void send_first_messages(const Group *group, uint8_t *memory) {
    const size_t bytes = COMM_TRIAL_BYTES / 2;
    Comm *comm = group->comm;
    uint64_t before = comm->sent;
    Stream *stream = stream_create(comm->device, "first messages");
    uint8_t *received = memory + (size_t)group->size * bytes;
    if (comm->neighbours) comm_all_to_all(group, memory, received, bytes, stream);
    comm_all_gather(group, memory, bytes, stream);
    stream_destroy(stream);  // once it has ended
    comm->sent = before;
}

static bool wants_nccl(const Comm *comm) {
    return comm && !comm->nccl && !(comm->neighbours && neighbours_sharing(comm->neighbours));
}

void comm_connect(const Mesh *mesh, void *memory) {
    if (!mesh->world.comm) return;
    const Site *site = mesh->world.comm->site;
    for (int i = 0; i < MESH_GROUPS; i++) {
        const Group *group = &mesh->group[i];
        if (!wants_nccl(group->comm)) continue;
        heartbeat_watch(site, NULL, (void *)mesh);  // while it looks, the pointers stay as they are
        make_communicator(group);
        heartbeat_watch(site, broken_behind, (void *)mesh);
        send_first_messages(group, (uint8_t *)memory);
    }
    peers_meet(peers_of(&mesh->world));  // nobody is connected before all are
    for (int i = 0; i < MESH_GROUPS; i++) {
        if (mesh->group[i].comm) mesh->group[i].comm->connected = true;
    }
}

void comm_close(Mesh *mesh) {
    if (mesh->world.comm) heartbeat_watch(mesh->world.comm->site, NULL, mesh);
    for (int i = 0; i < MESH_GROUPS; i++) {
        Group *group = &mesh->group[i];
        Comm *comm = group->comm;
        if (!comm) continue;
        if (comm->neighbours) neighbours_close(comm->neighbours);
        if (comm->nccl) {
            nccl_begin(group);
            nccl_end(group, ncclCommFinalize(comm->nccl), "closing the NCCL communicator");
            ncclCommDestroy(comm->nccl);
        }
        group->comm = NULL;
        free(comm);
    }
}

uint64_t comm_sent(const Group *group) { return group->comm ? group->comm->sent : 0; }

bool comm_share(const Group *node, void *flags, const CommPiece *piece, int pieces, Error *err) {
    if (!node->comm) return error_set(err, EXIT_ENVIRONMENT, "the node has one rank");
    return neighbours_share(node->comm->neighbours, flags, piece, pieces, err);
}

void comm_unshare(const Group *node) {
    if (node->comm) neighbours_unshare(node->comm->neighbours);
}

// --- collectives ---------------------------------------------------------------------------------

// Counts a collective. False where there is nothing to send.
static bool begin_collective(const Group *group, size_t bytes, const char *what) {
    if (!group->comm || bytes == 0) return false;
    heartbeat_issues(group->comm->site, what, group->name);
    group->comm->sent += (uint64_t)(group->size - 1) * bytes;
    return true;
}

// Whether peers may fetch these bytes themselves.
static bool fetched(const Group *group, const void *memory, size_t bytes) {
    return group->comm->neighbours && neighbours_hold(group->comm->neighbours, memory, bytes);
}

// One message to every other member, from send + its number * stride, and one from each. Device
// memory.
static ncclResult_t one_message_each(const Group *group, const uint8_t *send, size_t stride, uint8_t *recv,
                                     size_t bytes, cudaStream_t stream) {
    int size = group->size, rank = group->rank;
    ncclComm_t nccl = group->comm->nccl;
    ncclResult_t result = ncclGroupStart();
    for (int i = 1; i < size; i++) {
        int to = (rank + i) % size, from = (rank + size - i) % size;
        const uint8_t *message = send + (size_t)to * stride;
        if (result == ncclSuccess) result = ncclSend(message, bytes, ncclUint8, to, nccl, stream);
        uint8_t *slot = recv + (size_t)from * bytes;
        if (result == ncclSuccess) result = ncclRecv(slot, bytes, ncclUint8, from, nccl, stream);
    }
    return result == ncclSuccess ? ncclGroupEnd() : result;
}

void comm_all_to_all(const Group *group, const void *send, void *recv, size_t bytes, Stream *stream) {
    static const char what[] = "all-to-all";
    if (!begin_collective(group, bytes, what)) return;
    if (fetched(group, send, (size_t)group->size * bytes)) {
        neighbours_all_to_all(group->comm->neighbours, send, recv, bytes, stream);
        return;
    }
    nccl_begin(group);
    ncclResult_t result = one_message_each(group, (const uint8_t *)send, bytes, (uint8_t *)recv, bytes,
                                           stream_handle(stream));
    nccl_end(group, result, what);
}

void comm_all_gather(const Group *group, void *buffer, size_t bytes, Stream *stream) {
    static const char what[] = "all-gather";
    if (!begin_collective(group, bytes, what)) return;
    if (fetched(group, buffer, (size_t)group->size * bytes)) {
        neighbours_all_gather(group->comm->neighbours, buffer, bytes, stream);
        return;
    }
    const uint8_t *own = (const uint8_t *)buffer + (size_t)group->rank * bytes;
    cudaStream_t handle = stream_handle(stream);
    nccl_begin(group);
    // Between nodes a message to each rank. Over sockets NCCL's own all-gather made a step of 1.3B
    // at micro-batch 1 longer by 21 to 33 % (dev/bench/NOTES.md).
    ncclResult_t result = group->comm->by_messages
                              ? one_message_each(group, own, 0, (uint8_t *)buffer, bytes, handle)
                              : ncclAllGather(own, buffer, bytes, ncclUint8, group->comm->nccl, handle);
    nccl_end(group, result, what);
}
