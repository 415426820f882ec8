// Collectives and links over NCCL for GPU ranks: see llmc/comm.h. Each group of several ranks has a
// communicator of its own, except a node whose ranks fetch messages out of each other's memory
// (peer_memory.h). Communicators are blocking. A call puts its work on the stream and returns, but
// it may hold the host while connections are made, for as long as the watchdog (heartbeat.h)
// allows. In non-blocking mode each call makes NCCL start a thread, about 100 us in which the next
// cannot be issued: milliseconds in a step. Linked into train_gpt only.
#include <algorithm>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <thread>
#include <unistd.h>

#include "llmc/comm.h"
#include "llmc/cuda/peer_memory.h"
#include "llmc/ranks/heartbeat.h"
#include "llmc/ranks/node_failure.h"

struct Comm {
    Device *device;
    const Site *site;
    const Mesh *mesh;   // what the watchdog looks at
    ncclComm_t nccl;    // NULL: not connected yet, or not needed (comm_connect)
    PeerMemory *peers;  // of the group inside the node; else NULL
    bool few_bytes;     // the world, which exchanges step statuses
    bool one_way;       // a link's
    bool links_alone;   // between stages, where nothing else travels
    Link *links;        // between members of the group, oldest first
    bool by_messages;   // between nodes: gathers, too, go as one message to each rank
    bool connected;     // all groups of all ranks are
    uint64_t sent;
    volatile int *lost;  // comm_may_lose; NULL: no member may be
};

struct Link {
    Group pair;  // its ends, member 0 sends to member 1, with a Comm of their own
    Comm *of;    // of the group, where bytes are counted
    Stream *stream;
    Event *ready;   // what the caller's stream has done so far
    Event **event;  // (room) first those of the messages under way, oldest first
    int under_way, room;
    Link *next;  // opened after this one
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
    heartbeat_set_check(comm->site, NULL, (void *)comm->mesh);
    heartbeat_waiting(comm->site, true);
    sleep(AFTER_THE_CAUSE);
    heartbeat_waiting(comm->site, false);
}

// Until all ranks have spoken to each other once, what NCCL finds wrong (memory that is gone, no
// network, a variable of its own) would be wrong after a restart too.
static void nccl_failed(const Group *group, ncclResult_t result, const char *what) {
    const Comm *comm = group->comm;
    char text[1000];
    describe_failure(group, result, what, comm->connected, text, sizeof text);
    if (result == ncclRemoteError && !comm->connected) leave_word_to_others(comm);
    heartbeat_claim_exit_in_turn(comm->site);  // a lost rank fails the collectives of all
    fatal(comm->site, comm->connected ? EXIT_COMMUNICATION : EXIT_ENVIRONMENT, "%s", text);
}

// False unless NCCL's threads have met an error in this group. "In progress" is none.
static bool broken(const Group *group, char *what, size_t bytes) {
    ncclResult_t behind = ncclSuccess;
    if (!group->comm || !group->comm->nccl) return false;
    ncclResult_t asked = ncclCommGetAsyncError(group->comm->nccl, &behind);
    if (asked != ncclSuccess || behind == ncclSuccess || behind == ncclInProgress) return false;
    describe_failure(group, behind, "NCCL", true, what, bytes);
    return true;
}

static bool is_lost(const Comm *comm) { return comm->lost && *comm->lost; }

// Kernels that wait for the lost member end, and find *lost. NCCL's abort may wait for threads of
// its own, and nobody here waits for it.
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
    heartbeat_set_check(comm->site, NULL, (void *)comm->mesh);  // the watchdog may be giving it up too
    abandon(comm);
}

// Does an error of this group mean that another node is lost, which this one outlives?
static bool outlives(const Group *group) {
    const Mesh *mesh = group->comm->mesh;
    const Comm *replica_groups = mesh->replica_groups.comm;
    bool between_nodes = group == &mesh->world || group == &mesh->replica_groups;
    return between_nodes && replica_groups && replica_groups->lost &&
           node_failure_handled(replica_groups->site);
}

// The main thread may be blocked by a device that waits for a lost node. In the first beat
// collectives are switched off. In the second the communicator is given up. By then the main thread
// is not inside NCCL, or in a call that would never return.
static void free_main_thread(const Mesh *mesh) {
    Comm *replica_groups = mesh->replica_groups.comm;
    if (!replica_groups || !replica_groups->lost || !node_failure_reported(replica_groups->site)) return;
    if (is_lost(replica_groups)) abandon(replica_groups);
    *replica_groups->lost = 1;
}

// What NCCL's threads have met, such as a connection that broke. The watchdog asks, because the
// host may be blocked until the limit by a device that waits for what will not come. This runs
// beside the host's own calls on the communicators: NCCL answers from words that its threads write
// atomically, and takes no lock. context: the mesh.
static bool broken_behind(void *context, char *what, size_t bytes) {
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

// Around every call: it may hold the host until the other ranks come, which the watchdog limits.
static void nccl_begin(const Group *group) { heartbeat_waiting(group->comm->site, true); }
static void nccl_end(const Group *group, ncclResult_t result, const char *what) {
    // What went wrong behind the host's back, in this collective or one before it.
    ncclResult_t behind = ncclSuccess;
    bool lost = is_lost(group->comm);
    if (result == ncclSuccess && !lost) result = ncclCommGetAsyncError(group->comm->nccl, &behind);
    heartbeat_waiting(group->comm->site, false);
    if (result == ncclSuccess) result = behind;
    if (result == ncclSuccess || lost) return;
    if (!outlives(group)) nccl_failed(group, result, what);
    node_failure_report(group->comm->site);
    *group->comm->mesh->replica_groups.comm->lost = 1;  // before kernels use what has not arrived
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

// A receipt that is posted ahead holds a multiprocessor per channel until its message comes, and
// every channel has buffers. A message has the time of a whole micro-batch, so two are enough.
enum { LINK_CHANNELS = 2 };

// One channel is enough for a step status's few bytes. Its buffers are a small part of all of
// NCCL's.
static void make_communicator(const Group *group) {
    Comm *comm = group->comm;
    ncclUniqueId id = {};
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    if (comm->few_bytes) config.maxCTAs = 1;
    if (comm->one_way) config.maxCTAs = LINK_CHANNELS;
    ncclResult_t result = group->rank == 0 ? ncclGetUniqueId(&id) : ncclSuccess;
    if (result != ncclSuccess) nccl_failed(group, result, "finding a network for NCCL");
    peers_broadcast(peers_of(group), &id, sizeof id, 0);
    heartbeat_set_check(comm->site, NULL, (void *)comm->mesh);  // while it looks, pointers stay as they are
    nccl_begin(group);
    result = ncclCommInitRankConfig(&comm->nccl, group->size, id, group->rank, &config);
    nccl_end(group, result, "making the NCCL communicator");
    heartbeat_set_check(comm->site, broken_behind, (void *)comm->mesh);
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
    if (comm->peers) comm_all_to_all(group, memory, received, bytes, stream);
    comm_all_gather(group, memory, bytes, stream);
    stream_destroy(stream);  // once it has ended
    comm->sent = before;
}

static bool wants_nccl(const Comm *comm) {
    return !comm->nccl && !comm->links_alone && !(comm->peers && peer_memory_sharing(comm->peers));
}

static void send_first_on(Link *link, void *memory) {
    const Group *pair = &link->pair;
    cudaStream_t stream = stream_handle(link->stream);
    ncclComm_t nccl = pair->comm->nccl;
    nccl_begin(pair);
    nccl_end(pair,
             pair->rank == 0 ? ncclSend(memory, COMM_TRIAL_BYTES, ncclUint8, 1, nccl, stream)
                             : ncclRecv(memory, COMM_TRIAL_BYTES, ncclUint8, 0, nccl, stream),
             "the first message");
    stream_synchronize(link->stream);
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
        send_first_on(link, memory);
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
    peers_barrier(peers_of(&mesh->world));  // nobody is connected before all are
    for (int i = 0; i < MESH_GROUPS; i++) {
        if (mesh->group[i].comm) set_connected(mesh->group[i].comm);
    }
}

// The group may have none.
static void close_communicator(const Group *group) {
    Comm *comm = group->comm;
    if (!comm->nccl) return;
    nccl_begin(group);
    nccl_end(group, ncclCommFinalize(comm->nccl), "closing the NCCL communicator");
    ncclCommDestroy(comm->nccl);
}

uint64_t comm_sent(const Group *group) { return group->comm ? group->comm->sent : 0; }

bool comm_share(const Group *node, void *flags, const CommPiece *piece, int pieces, Error *err) {
    if (!node->comm) return error_set(err, EXIT_ENVIRONMENT, "the node has one rank");
    return peer_memory_share(node->comm->peers, flags, piece, pieces, err);
}

void comm_unshare(const Group *node) {
    if (node->comm) peer_memory_unshare(node->comm->peers);
}

// --- collectives ---------------------------------------------------------------------------------

// Counts a collective. False where there is nothing to send.
static bool begin_collective(const Group *group, size_t bytes, const char *what) {
    if (!group->comm || bytes == 0 || is_lost(group->comm)) return false;
    heartbeat_collective(group->comm->site, what, group->name);
    group->comm->sent += (uint64_t)(group->size - 1) * bytes;
    return true;
}

// Whether peers may fetch these bytes themselves.
static bool fetched(const Group *group, const void *memory, size_t bytes) {
    return group->comm->peers && peer_memory_hold(group->comm->peers, memory, bytes);
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
    // Between nodes a message to each rank. Over sockets NCCL's own all-gather made a step of 1.3B
    // at micro-batch 1 longer by 21 to 33 % (dev/bench/NOTES.md).
    ncclResult_t result = group->comm->by_messages
                              ? one_message_each(group, own, 0, (uint8_t *)buffer, bytes, handle)
                              : ncclAllGather(own, buffer, bytes, ncclUint8, group->comm->nccl, handle);
    nccl_end(group, result, what);
}

// One kernel for all rows.
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

// --- links ---------------------------------------------------------------------------------------
// Why links cannot lock each other up. The kernel of a message stays on the GPU until the other
// end's kernel has met it, and receipts are posted before their messages are made. So nothing that
// a message needs may wait for another message, unless that one passes first anyway. Four things
// could wait:
//
// 1. Work on the same stream. Each link has a stream of its own. The caller's stream waits for a
//    message where link_arrived or link_sent says so. It does that in the order of the 1F1B
//    schedule, which has no cycle: a pass needs earlier passes of its neighbors (test_pipeline.c).
// 2. Work in the same hardware queue of the GPU. device.cu asks for 32 queues. A rank has at most
//    16 streams: compute, sums of parts, copies, five lanes, layers' gathers, updates on the host
//    and six links. They are made before NCCL's own.
// 3. Kernels that find no free multiprocessor. A link's kernel takes LINK_CHANNELS blocks, so six
//    links take 12 of a GPU's 100 or more multiprocessors. No kernel of this program needs all of
//    its blocks on the GPU at once. So each ends on the multiprocessors that are left. Then a
//    link's kernel comes first, for its stream is urgent.
// 4. The host. CUDA loads a kernel when it is launched for the first time, and may wait for all
//    work on the GPU to do that. So a stage launches the kernels of its passes once before its
//    first message (launch_first in stages.c), with the reductions that every micro-batch makes
//    (zero_warm_up). What is new then comes late: from the first unit on that is reduced once a
//    step, in the last micro-batch's backward pass. All that is under way there passes without
//    this rank's later work (test_pipeline.c). Hidden states have all arrived. A gradient is not
//    expected while its own micro-batch passes (gpt_micro_batches), and later stages need nothing
//    more of this one to make it. The words' gradient leaves after the last stage's last pass
//    (gpt_end_backward), for the first stage takes it in its own last pass.
//
// To connect, NCCL allocates memory, which may wait for the GPU too. So a rank connects one
// communicator after the other, and its first message passes before the next one begins. All ranks
// go through the groups, and through the borders between stages, in one order (connect_group,
// pipeline_open). A rank only ever waits for one that is at the same border or an earlier one.

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
    heartbeat_set_check(comm->site, NULL, (void *)comm->mesh);  // until comm_connect
    Link **last = &group->comm->links;
    while (*last) last = &(*last)->next;
    *last = link;
    return link;
}

// The link's stream goes on when `stream` is done so far. Returns what to record when the message
// has passed.
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
    const Group *pair = &link->pair;
    Event *sent = begin_message(link, stream);
    nccl_begin(pair);
    nccl_end(pair, ncclSend(memory, bytes, ncclUint8, 1, pair->comm->nccl, stream_handle(link->stream)),
             "sending");
    event_record(sent, link->stream);
    link->of->sent += bytes;
}

void link_expect(Link *link, void *memory, size_t bytes, Stream *stream) {
    const Group *pair = &link->pair;
    Event *arrived = begin_message(link, stream);
    nccl_begin(pair);
    nccl_end(pair, ncclRecv(memory, bytes, ncclUint8, 0, pair->comm->nccl, stream_handle(link->stream)),
             "receiving");
    event_record(arrived, link->stream);
}

// stream waits for the oldest `count` messages. Their events serve again, behind the others.
static void wait_for(Link *link, int count, Stream *stream) {
    if (count <= 0) return;
    stream_wait(stream, link->event[count - 1]);
    link->under_way -= count;
    std::rotate(link->event, link->event + count, link->event + link->room);
}

void link_sent(Link *link, int behind, Stream *stream) { wait_for(link, link->under_way - behind, stream); }

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

// Whoever closes a communicator waits for its other ranks. So all close them in one order, that of
// comm_connect.
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
