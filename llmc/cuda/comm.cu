// Collectives and links over NCCL for GPU ranks: see llmc/comm.h. Each group of several ranks has
// its own communicator, except the node group if its ranks read each other's memory
// (peer_memory.h).
//
// Communicators are blocking. A call enqueues its work, but may block the host while NCCL connects;
// the watchdog (heartbeat.h) limits this time. In non-blocking mode NCCL would start a thread per
// call, which costs milliseconds per step.
#include <algorithm>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <thread>
#include <unistd.h>

#include "llmc/comm.h"
#include "llmc/cuda/peer_layout.h"
#include "llmc/cuda/peer_memory.h"
#include "llmc/cuda/peer_reduce.h"
#include "llmc/ranks/heartbeat.h"
#include "llmc/ranks/node_failure.h"

struct Comm {
    Device *device;
    const Site *site;
    const Mesh *mesh;    // for the watchdog
    ncclComm_t nccl;     // NULL: not connected yet, or not needed (comm_connect)
    PeerMemory *peers;   // only in the node group, else NULL
    PeerReduce *direct;  // between comm_open_direct and comm_close_direct, else NULL
    bool few_bytes;      // world group, which exchanges only step statuses and FP8 scales
    bool one_way;        // this Comm belongs to a link
    bool links_alone;    // pp and embedding groups, which have links but no collectives
    Link *links;         // open links between members of the group, in the order of opening
    bool by_messages;    // all-gathers send one message per rank (used between nodes)
    bool connected;      // all groups of all ranks are connected
    uint64_t sent;
    volatile int *lost;  // flag of comm_may_lose; NULL: members cannot be lost
};

struct Link {
    Group pair;  // the two ends, with their own Comm; member 0 sends to member 1
    Comm *of;    // Comm of the group, which counts the bytes
    Stream *stream;
    Event *ready;   // end of the work that the caller has queued
    Event **event;  // (room) events of pending messages, oldest first, then unused events
    int under_way, room;
    Link *next;
};

// Writes an error message. in_training: another rank may have caused the failure.
static void describe_failure(const Group *group, ncclResult_t result, const char *what, bool in_training,
                             char *text, size_t bytes) {
    const char *detail = ncclGetLastError(group->comm->nccl);
    snprintf(text, bytes, "%s %s failed: %s (%.600s); %srun again with NCCL_DEBUG=INFO", what, group->name,
             ncclGetErrorString(result), detail && *detail ? detail : "no detail",
             in_training ? "check whether another rank or its node died, and " : "");
}

enum { AFTER_THE_CAUSE = 25 };  // seconds, longer than the staggered exits of all hosts take

// Waits before reporting that another rank does not answer while NCCL connects. If that rank
// failed, it prints its own error in this time, or mpirun ends the job. Otherwise the network
// blocks traffic.
static void leave_word_to_others(const Comm *comm) {
    heartbeat_set_check(comm->site, NULL, (void *)comm->mesh);
    heartbeat_waiting(comm->site, true);
    sleep(AFTER_THE_CAUSE);
    heartbeat_waiting(comm->site, false);
}

// Ends the job. Errors of NCCL before all ranks are connected (memory, network, environment
// variables) would occur again after a restart, so they are EXIT_ENVIRONMENT.
static void nccl_failed(const Group *group, ncclResult_t result, const char *what) {
    const Comm *comm = group->comm;
    char text[1000];
    describe_failure(group, result, what, comm->connected, text, sizeof text);
    if (result == ncclRemoteError && !comm->connected) leave_word_to_others(comm);
    heartbeat_claim_exit_in_turn(comm->site);  // a lost rank makes the collectives of all ranks fail
    fatal(comm->site, comm->connected ? EXIT_COMMUNICATION : EXIT_ENVIRONMENT, "%s", text);
}

// Returns true if NCCL's threads reported an error in this group.
static bool broken(const Group *group, char *what, size_t bytes) {
    ncclResult_t async = ncclSuccess;
    if (!group->comm || !group->comm->nccl) return false;
    ncclResult_t asked = ncclCommGetAsyncError(group->comm->nccl, &async);
    if (asked != ncclSuccess || async == ncclSuccess || async == ncclInProgress) return false;
    describe_failure(group, async, "NCCL", true, what, bytes);
    return true;
}

static bool is_lost(const Comm *comm) { return comm->lost && *comm->lost; }

// Aborts the communicator, which ends kernels that wait for the lost member; later kernels find
// *lost set. ncclCommAbort may wait for NCCL's threads, so it runs on its own thread.
static void abandon(Comm *comm) {
    ncclComm_t nccl = comm->nccl;
    *comm->lost = 1;
    comm->nccl = NULL;
    if (nccl) std::thread(ncclCommAbort, nccl).detach();
}

void comm_may_lose(const Group *group, int *lost) {
    if (group->comm) group->comm->lost = lost;
}

void comm_lose(const Group *group) {
    Comm *comm = group->comm;
    if (!comm || !comm->lost) return;
    heartbeat_set_check(comm->site, NULL, (void *)comm->mesh);  // stops the watchdog's checks first
    abandon(comm);
}

// Returns true if an error of this group means that another node is lost and this one continues.
static bool outlives(const Group *group) {
    const Mesh *mesh = group->comm->mesh;
    const Comm *replica_groups = mesh->replica_groups.comm;
    bool between_nodes = group == &mesh->world || group == &mesh->replica_groups;
    return between_nodes && replica_groups && replica_groups->lost &&
           node_failure_handled(replica_groups->site);
}

// Releases the main thread if it waits for a device that waits for a lost node. The first call sets
// *lost, which disables collectives, and the next call, one heartbeat later, abandons the
// communicator. By then the main thread is not inside NCCL, except in a call that would never
// return.
static void free_main_thread(const Mesh *mesh) {
    Comm *replica_groups = mesh->replica_groups.comm;
    if (!replica_groups || !replica_groups->lost || !node_failure_reported(replica_groups->site)) return;
    if (is_lost(replica_groups)) abandon(replica_groups);
    *replica_groups->lost = 1;
}

// Reports errors of NCCL's threads, such as a broken connection. The watchdog calls this from its
// own thread, even while the main thread is inside NCCL. This is safe, because NCCL only reads
// atomic variables here. context: the mesh.
static bool check_groups(void *context, char *what, size_t bytes) {
    const Mesh *mesh = (const Mesh *)context;
    for (int i = 0; i < MESH_GROUPS; i++) {
        const Group *group = &mesh->group[i];
        if (broken(group, what, bytes)) {
            if (!outlives(group)) return true;
            node_failure_report(group->comm->site);
        }
        for (const Link *link = group->comm ? group->comm->links : NULL; link; link = link->next) {
            if (broken(&link->pair, what, bytes)) return true;
        }
    }
    free_main_thread(mesh);
    return false;
}

// nccl_begin and nccl_end enclose every NCCL call, which may block until the other ranks make the
// same call. The watchdog limits this time.
static void nccl_begin(const Group *group) { heartbeat_waiting(group->comm->site, true); }
static void nccl_end(const Group *group, ncclResult_t result, const char *what) {
    ncclResult_t async = ncclSuccess;
    bool lost = is_lost(group->comm);
    if (result == ncclSuccess && !lost) result = ncclCommGetAsyncError(group->comm->nccl, &async);
    heartbeat_waiting(group->comm->site, false);
    if (result == ncclSuccess) result = async;
    if (result == ncclSuccess || lost) return;
    if (!outlives(group)) nccl_failed(group, result, what);
    node_failure_report(group->comm->site);
    *group->comm->mesh->replica_groups.comm->lost = 1;  // before kernels use data that did not arrive
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
        if (group == &mesh->node) comm->peers = peer_memory_open(device, group->mpi);
        comm->few_bytes = group == &mesh->world;
        comm->by_messages = group == &mesh->rail || group == &mesh->shard_rail ||
                            group == &mesh->replica_groups;
        comm->links_alone = group == &mesh->pp || group == &mesh->embedding;
        group->comm = comm;
    }
}

static Peers peers_of(const Group *group) { return {group->mpi, 0, group->comm->site}; }

// A posted receive occupies an SM per channel until its message arrives. Messages may take as long
// as a micro-batch, so two channels are fast enough.
enum { LINK_CHANNELS = 2 };

// Returns the number of NCCL collectives that may be pending at the same time as a direct
// collective: both hops of gradients and weights, the gather of a layer's weights, and the outer
// exchange of local steps.
static int concurrent_collectives(const Mesh *mesh) {
    return (mesh->node.size > 1) + (mesh->rail.size > 1) +
           (mesh->shards.size > 1 || mesh->shard_rail.size > 1) + (mesh->replica_groups.size > 1);
}

// The world group exchanges only a few bytes, so it has one channel, which saves buffers. With
// tensor parallelism, all collectives must fit on the GPU at the same time (peer_barrier.cuh).
static void make_communicator(const Group *group) {
    Comm *comm = group->comm;
    ncclUniqueId id = {};
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    if (comm->mesh->tp.size > 1) {
        config.maxCTAs = peer_nccl_blocks(comm->device->multiprocessors, concurrent_collectives(comm->mesh));
    }
    if (comm->few_bytes) config.maxCTAs = 1;
    if (comm->one_way) config.maxCTAs = LINK_CHANNELS;
    ncclResult_t result = group->rank == 0 ? ncclGetUniqueId(&id) : ncclSuccess;
    if (result != ncclSuccess) nccl_failed(group, result, "finding a network for NCCL");
    peers_broadcast(peers_of(group), &id, sizeof id, 0);
    heartbeat_set_check(comm->site, NULL, (void *)comm->mesh);  // no check while comm->nccl changes
    nccl_begin(group);
    result = ncclCommInitRankConfig(&comm->nccl, group->size, id, group->rank, &config);
    nccl_end(group, result, "making the NCCL communicator");
    heartbeat_set_check(comm->site, check_groups, (void *)comm->mesh);
}

// Sends a small message of each kind that training uses, because NCCL connects two ranks at their
// first message. Not counted in comm_sent. memory: (2, ranks, bytes).
static void send_first_messages(const Group *group, uint8_t *memory) {
    const size_t bytes = COMM_TRIAL_BYTES / 2;
    Comm *comm = group->comm;
    uint64_t before = comm->sent;
    Stream *stream = stream_create(comm->device, "first messages");
    uint8_t *received = memory + (size_t)group->size * bytes;
    if (comm->peers) comm_all_to_all(group, memory, received, bytes, stream);
    comm_all_gather(group, memory, bytes, stream);
    stream_destroy(stream);  // synchronizes
    comm->sent = before;
}

static bool wants_nccl(const Comm *comm) {
    return !comm->nccl && !comm->links_alone && !(comm->peers && peer_memory_sharing(comm->peers));
}

// Sends or receives one message on the link's stream.
static void transfer(Link *link, void *memory, size_t bytes, const char *what) {
    const Group *pair = &link->pair;
    cudaStream_t stream = stream_handle(link->stream);
    ncclComm_t nccl = pair->comm->nccl;
    nccl_begin(pair);
    nccl_end(pair,
             pair->rank == 0 ? ncclSend(memory, bytes, ncclUint8, 1, nccl, stream)
                             : ncclRecv(memory, bytes, ncclUint8, 0, nccl, stream),
             what);
}

static void connect_group(const Group *group, void *memory) {
    Comm *comm = group->comm;
    if (wants_nccl(comm)) {
        make_communicator(group);
        send_first_messages(group, (uint8_t *)memory);
    }
    for (Link *link = comm->links; link; link = link->next) {
        if (!wants_nccl(link->pair.comm)) continue;
        make_communicator(&link->pair);
        transfer(link, memory, COMM_TRIAL_BYTES, "the first message");
        stream_synchronize(link->stream);
    }
}

static void set_connected(Comm *comm) {
    comm->connected = true;
    for (Link *link = comm->links; link; link = link->next) link->pair.comm->connected = true;
}

void comm_connect(const Mesh *mesh, void *memory) {
    if (!mesh->world.comm) return;
    for (int i = 0; i < MESH_GROUPS; i++) {
        if (mesh->group[i].comm) connect_group(&mesh->group[i], memory);
    }
    peers_barrier(peers_of(&mesh->world));  // all ranks are connected
    for (int i = 0; i < MESH_GROUPS; i++) {
        if (mesh->group[i].comm) set_connected(mesh->group[i].comm);
    }
}

// No-op for a group without a communicator.
static void close_communicator(const Group *group) {
    Comm *comm = group->comm;
    if (!comm->nccl) return;
    nccl_begin(group);
    nccl_end(group, ncclCommFinalize(comm->nccl), "closing the NCCL communicator");
    ncclCommDestroy(comm->nccl);
}

uint64_t comm_sent(const Group *group) { return group->comm ? group->comm->sent : 0; }

bool comm_share(const Group *node, void *flags, const CommPiece *piece, int pieces, Error *err) {
    if (!node->comm) return system_error(err, "the node has one rank");
    return peer_memory_share(node->comm->peers, flags, piece, pieces, err);
}

void comm_unshare(const Group *node) {
    if (node->comm) peer_memory_unshare(node->comm->peers);
}

// --- collectives ---------------------------------------------------------------------------------

// Counts a collective. Returns false if there is nothing to send.
static bool begin_collective(const Group *group, size_t bytes, const char *what) {
    if (!group->comm || bytes == 0 || is_lost(group->comm)) return false;
    heartbeat_collective(group->comm->site, what, group->name);
    group->comm->sent += (uint64_t)(group->size - 1) * bytes;
    return true;
}

// Returns true if peers can read these bytes directly.
static bool fetched(const Group *group, const void *memory, size_t bytes) {
    return group->comm->peers && peer_memory_hold(group->comm->peers, memory, bytes);
}

// Sends the message at send + r * stride to every other member r, and receives one from each.
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
        peer_memory_all_to_all(group->comm->peers, send, recv, bytes, stream);
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
        peer_memory_all_gather(group->comm->peers, buffer, bytes, stream);
        return;
    }
    const uint8_t *own = (const uint8_t *)buffer + (size_t)group->rank * bytes;
    cudaStream_t handle = stream_handle(stream);
    nccl_begin(group);
    // Between nodes, send one message per rank, because ncclAllGather was slower over sockets
    // (dev/bench/NOTES.md).
    ncclResult_t result = group->comm->by_messages
                              ? one_message_each(group, own, 0, (uint8_t *)buffer, bytes, handle)
                              : ncclAllGather(own, buffer, bytes, ncclUint8, group->comm->nccl, handle);
    nccl_end(group, result, what);
}

// Gathers all rows with one kernel.
void comm_gather_rows(const Group *group, const CommRow *row, int rows, Stream *stream) {
    static const char what[] = "all-gather";
    size_t bytes = 0;
    for (int i = 0; i < rows; i++) bytes += row[i].bytes;
    if (!begin_collective(group, bytes, what)) return;
    nccl_begin(group);
    ncclResult_t result = ncclGroupStart();
    for (int i = 0; i < rows && result == ncclSuccess; i++) {
        result = ncclAllGather(row[i].own, row[i].all, row[i].bytes, ncclUint8, group->comm->nccl,
                               stream_handle(stream));
    }
    nccl_end(group, result == ncclSuccess ? ncclGroupEnd() : result, what);
}

// --- direct collectives --------------------------------------------------------------------------

bool comm_own_gpus(const Group *group, Error *err) {
    char device[32], own[128] = "";  // hosts of the same kind have the same PCI addresses
    struct utsname host;
    bool ok = true;
    if (!group->comm) return true;
    const Group *world = &group->comm->mesh->world;
    char *all = (char *)xcalloc((size_t)world->size, sizeof own, "device identities");
    device_identity(group->comm->device->index, device, sizeof device);
    uname(&host);
    if (*device) snprintf(own, sizeof own, "%s of %.64s", device, host.nodename);
    peers_all_gather(peers_of(world), own, all, sizeof own, MPI_BYTE);
    for (int r = 0; ok && *own && r < world->size; r++) {
        if (r == world->rank || strcmp(all + (size_t)r * sizeof own, own) != 0) continue;
        ok = system_error(err, "several ranks share GPU %s", own);
    }
    free(all);
    return peers_agree(peers_of(group), ok, err, NULL);
}

bool comm_open_direct(const Group *group, void *flags, const CommPiece *piece, int pieces, Error *err) {
    if (!group->comm) return system_error(err, "the group has one rank");
    Comm *comm = group->comm;
    const Group *node = &comm->mesh->node;
    bool copies = node->comm && node->comm->peers && peer_memory_sharing(node->comm->peers);  // use no SM
    comm->direct = peer_reduce_open(comm->device, group->mpi, flags, piece, pieces,
                                    concurrent_collectives(comm->mesh) - copies, err);
    return comm->direct != NULL;
}

void comm_close_direct(const Group *group) {
    if (!group->comm || !group->comm->direct) return;
    peer_reduce_close(group->comm->direct);
    group->comm->direct = NULL;
}

bool comm_reduce_direct(const Group *group, const CommReduce *a, Stream *stream) {
    if (!group->comm || !group->comm->direct) return false;
    size_t bytes = (size_t)a->total * (a->fp32 ? sizeof(float) : sizeof(floatX)) / (size_t)group->size;
    if (a->total == 0) return true;
    if (!peer_reduce_sum(group->comm->direct, a, stream)) return false;
    // An all-reduce sends as much as a reduce-scatter and an all-gather.
    begin_collective(group, a->scatter ? bytes : 2 * bytes, a->scatter ? "reduce-scatter" : "all-reduce");
    return true;
}

bool comm_gather_direct(const Group *group, const CommGather *a, Stream *stream) {
    if (!group->comm || !group->comm->direct) return false;
    if (a->bytes == 0) return true;
    if (!peer_reduce_gather(group->comm->direct, a, stream)) return false;
    begin_collective(group, a->bytes, "all-gather");
    return true;
}

bool comm_norm_direct(const Group *group, const CommNorm *a, Stream *stream) {
    if (!group->comm || !group->comm->direct) return false;
    const LayerNorm *n = a->norm;
    int64_t N = (int64_t)n->B * n->T, rows = rows_held(n->rows, n->B, n->T);
    if (!peer_reduce_norm(group->comm->direct, a, stream)) return false;
    size_t bytes = (size_t)(rows * n->C) * sizeof(floatX);  // of the partial sums that each rank sends
    begin_collective(group, a->whole ? 2 * bytes : bytes, rows == N ? "all-reduce" : "reduce-scatter");
    return true;
}

// --- links ---------------------------------------------------------------------------------------
// Why links cannot deadlock: the kernel of a message occupies the GPU until the kernel of the other
// end runs, and receives are posted long before their messages are sent. So the work that produces
// a message must never wait for a pending receive of a later message. It could wait in four places:
//
// 1. The same stream. Each link has its own stream. The caller's stream waits for messages only in
//    link_arrived and link_sent, in the order of the 1F1B schedule. The schedule has no cycles,
//    because a pass depends only on earlier passes of its neighbors (test_pipeline.c).
// 2. The same hardware queue. device.cu requests at least as many queues as a rank has streams (at
//    most 16, see devices.c), usually 32. NCCL creates its own streams later.
// 3. Free SMs. Links occupy 6 * LINK_CHANNELS = 12 of 100 or more SMs. On a GPU of 132 SMs, direct
//    collectives leave room for them and for NCCL's collectives (peer_most_blocks). The other
//    kernels need no other rank and complete on the remaining SMs.
// 4. The host. At the first launch of a kernel, CUDA may wait for all work on the GPU. So before
//    the first message, stages launch once each kernel of forward and backward (gpt_needs_warm_up)
//    and of the reductions in every micro-batch (zero_warm_up). Other kernels run first in the
//    backward pass of the last micro-batch. All messages pending at that time complete without
//    later work of this rank (test_pipeline.c): all hidden states have arrived, later stages have
//    all inputs for the pending gradients, and the gradient of the tied embedding is sent later.
//
// NCCL allocates memory when it connects, which may also wait for the GPU. So a rank connects one
// communicator at a time and completes its first message before it connects the next one. All ranks
// connect groups and links in the same order (connect_group, pipeline_open), so a rank waits only
// for ranks at the same or an earlier position in this order.

Link *link_open(const Group *group, int from, int to, Device *device, const char *name) {
    if (group->rank != from && group->rank != to) return NULL;
    Link *link = (Link *)xcalloc(1, sizeof *link, "a link");
    Comm *comm = (Comm *)xcalloc(1, sizeof *comm, "a link");
    comm->device = device;
    comm->site = group->comm->site;
    comm->mesh = group->comm->mesh;
    comm->one_way = true;
    link->of = group->comm;
    link->pair.name = name;
    link->pair.rank = group->rank == to;
    link->pair.size = 2;
    link->pair.mpi = peers_pair(peers_of(group), from, to);
    link->pair.comm = comm;
    link->stream = stream_create_urgent(device, name);
    link->ready = event_create(device);
    heartbeat_set_check(comm->site, NULL, (void *)comm->mesh);  // no checks until comm_connect
    Link **last = &group->comm->links;
    while (*last) last = &(*last)->next;
    *last = link;
    return link;
}

// Makes the link's stream wait for the work queued on `stream`. Returns the event to record after
// the message.
static Event *begin_message(Link *link, Stream *stream) {
    if (link->under_way == link->room) {
        link->room = link->room ? 2 * link->room : 16;
        link->event = (Event **)xrealloc(link->event, (size_t)link->room * sizeof(Event *), "a link");
        for (int i = link->under_way; i < link->room; i++) link->event[i] = event_create(link->of->device);
    }
    event_record(link->ready, stream);
    stream_wait(link->stream, link->ready);
    return link->event[link->under_way++];
}

void link_send(Link *link, const void *memory, size_t bytes, Stream *stream) {
    Event *sent = begin_message(link, stream);
    transfer(link, (void *)memory, bytes, "sending");
    event_record(sent, link->stream);
    link->of->sent += bytes;
}

void link_expect(Link *link, void *memory, size_t bytes, Stream *stream) {
    Event *arrived = begin_message(link, stream);
    transfer(link, memory, bytes, "receiving");
    event_record(arrived, link->stream);
}

// Makes `stream` wait for the oldest `count` messages, and recycles their events.
static void wait_for(Link *link, int count, Stream *stream) {
    if (count <= 0) return;
    stream_wait(stream, link->event[count - 1]);
    link->under_way -= count;
    std::rotate(link->event, link->event + count, link->event + link->room);
}

void link_sent(Link *link, int pending, Stream *stream) { wait_for(link, link->under_way - pending, stream); }

void link_arrived(Link *link, Stream *stream) { wait_for(link, link->under_way > 0, stream); }

static void close_link(Link *link) {
    stream_synchronize(link->stream);
    close_communicator(&link->pair);
    MPI_Comm_free(&link->pair.mpi);
    for (int i = 0; i < link->room; i++) event_destroy(link->event[i]);
    event_destroy(link->ready);
    stream_destroy(link->stream);
    free(link->event);
    free(link->pair.comm);
    free(link);
}

// --- the end -------------------------------------------------------------------------------------

// Closing a communicator waits for its other ranks. All ranks use the order of comm_connect.
void comm_close(Mesh *mesh) {
    if (mesh->world.comm) heartbeat_set_check(mesh->world.comm->site, NULL, mesh);
    for (int i = 0; i < MESH_GROUPS; i++) {
        Group *group = &mesh->group[i];
        Comm *comm = group->comm;
        if (!comm) continue;
        if (comm->peers) peer_memory_close(comm->peers);
        close_communicator(group);
        for (Link *link = comm->links, *next; link; link = next) {
            next = link->next;
            close_link(link);
        }
        group->comm = NULL;
        free(comm);
    }
}
