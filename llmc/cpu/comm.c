// Collectives and links over MPI for CPU ranks: see llmc/comm.h. They use point-to-point messages
// instead of MPI's collectives, so that comm_sent counts exactly the bytes that are sent. Linked
// into the CPU program only.
#include "llmc/comm.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/ranks/heartbeat.h"
#include "llmc/ranks/node_failure.h"

// An MPI request for part of a message.
typedef struct Part {
    int whom;   // world rank of the peer
    bool last;  // last part of its message
} Part;

// Pending parts of messages, oldest first.
typedef struct Requests {
    MPI_Request *request;  // (room) grown on demand
    Part *part;            // (room)
    int count, room;
    bool in_turn;  // requests of a link, whose peer may itself be waiting for another stage
} Requests;

struct Comm {
    const Site *site;
    double limit;       // timeout in seconds; 0: wait forever
    Requests requests;  // messages of the collective in progress
    Link *links;        // open links between members of the group, in the order of opening
    uint64_t sent;
    volatile int *lost;  // flag of comm_may_lose; NULL: members cannot be lost
};

struct Link {
    Comm *comm;  // communicator of the group: error site, timeout, byte count
    const char *name;
    MPI_Comm mpi;  // the two ends of the link; member 0 sends to member 1
    int other;     // world rank of the other end
    Requests requests;
    Link *next;
};

static void free_requests(Requests *requests) {
    free(requests->request);
    free(requests->part);
}

void comm_open(Mesh *mesh, Device *device, double limit) {
    for (int i = 0; i < MESH_GROUPS; i++) {
        Group *group = &mesh->group[i];
        if (group->size == 1 || group == &mesh->dp) continue;
        group->comm = xcalloc(1, sizeof(Comm), "the communicator");
        group->comm->site = device_site(device);
        group->comm->limit = limit;
    }
}

bool comm_share(const Group *node, void *flags, const CommPiece *piece, int pieces, Error *err) {
    return system_error(err, "%s", device_kind()->only_way);
}
void comm_unshare(const Group *node) {}
bool comm_own_gpus(const Group *group, Error *err) { return true; }
bool comm_open_direct(const Group *group, void *flags, const CommPiece *piece, int pieces, Error *err) {
    return system_error(err, "%s", device_kind()->only_way);
}
void comm_close_direct(const Group *group) {}
bool comm_reduce_direct(const Group *group, const CommReduce *a, Stream *stream) { return false; }
bool comm_gather_direct(const Group *group, const CommGather *a, Stream *stream) { return false; }
bool comm_norm_direct(const Group *group, const CommNorm *a, Stream *stream) { return false; }
void comm_connect(const Mesh *mesh, void *memory) {}
void comm_may_lose(const Group *group, int *lost) {
    if (group->comm) group->comm->lost = lost;
}
void comm_lose(const Group *group) {
    if (group->comm && group->comm->lost) *group->comm->lost = 1;
}
uint64_t comm_sent(const Group *group) { return group->comm ? group->comm->sent : 0; }

// --- pending messages ----------------------------------------------------------------------------

enum { PIECE = 1 << 30 };  // maximum bytes per MPI message, because MPI counts are int

static int piece_at(size_t at, size_t bytes) { return bytes - at < PIECE ? (int)(bytes - at) : PIECE; }

static MPI_Request *next_request(Requests *all, int whom, bool last) {
    if (all->count == all->room) {
        all->room = all->room ? 2 * all->room : 64;
        size_t room = (size_t)all->room;
        all->request = xrealloc(all->request, room * sizeof(MPI_Request), "MPI requests");
        all->part = xrealloc(all->part, room * sizeof(Part), "MPI requests");
    }
    all->part[all->count] = (Part){whom, last};
    return &all->request[all->count++];
}

// Ends the job with a message that names the peer of the oldest incomplete part.
static void timed_out(const Comm *comm, Requests *all, int count, const char *what, const char *where,
                      double waited) {
    int late = 0, done = 1;
    char who[512];
    bool blames = heartbeat_find_busy(comm->site, who, sizeof who);
    heartbeat_claim_exit(comm->site);
    if (blames) {
        fatal(comm->site, EXIT_COMMUNICATION,
              "%s %s, waited %.0f s: %s; check what stopped it "
              "(--distributed-timeout-minutes sets the limit)",
              what, where, waited, who);
    }
    for (int i = 0; i < count && done; i++) {
        late = i;
        MPI_Test(&all->request[i], &done, MPI_STATUS_IGNORE);
    }
    fatal(comm->site, EXIT_COMMUNICATION,
          "%s %s: rank %d has not answered for %.0f s%s; check what stopped it "
          "(--distributed-timeout-minutes sets the limit)",
          what, where, all->part[late].whom, waited,
          all->in_turn ? ", or itself waits for another rank" : "");
}

static bool may_lose(const Comm *comm) { return comm->lost && node_failure_handled(comm->site); }

// Abandons messages with a lost node. Their MPI requests stay allocated until the run ends.
static void give_up(const Comm *comm) {
    node_failure_report(comm->site);
    *comm->lost = 1;
}

// Returns false if MPI failed because a node is lost. Other errors end the job.
static bool survives(const Comm *comm, int rc, const char *what, const char *where) {
    bool loses = rc != MPI_SUCCESS && may_lose(comm);
    if (loses) give_up(comm);
    else mpi_check(comm->site, rc, what, where);
    return !loses;
}

// Waits for the oldest `count` parts and removes them.
static void wait_for(const Comm *comm, Requests *all, int count, const char *what, const char *where) {
    bool outlives = may_lose(comm);
    double patience = outlives ? 0 : node_failure_extra_wait(comm->site, comm->limit),
           began = monotonic_seconds();
    Deadline deadline = deadline_in(comm->limit + patience);
    heartbeat_waiting(comm->site, true);
    int done = 0;
    for (unsigned polls = 1; !done; polls++) {
        int rc = MPI_Testall(count, all->request, &done, MPI_STATUSES_IGNORE);
        if (!survives(comm, rc, what, where)) break;
        if (done || polls % POLLS_PER_CHECK != 0) continue;
        double waited = monotonic_seconds() - began;
        bool late = comm->limit > 0 && deadline_passed(&deadline);
        bool told = node_failure_suspected(comm->site, waited) || node_failure_peer_recovering(comm->site);
        if (outlives && (late || told)) {
            give_up(comm);
            break;
        }
        if (late) timed_out(comm, all, count, what, where, waited);
    }
    heartbeat_waiting(comm->site, false);
    all->count -= count;
    if (all->count == 0) return;
    memmove(all->request, all->request + count, (size_t)all->count * sizeof(MPI_Request));
    memmove(all->part, all->part + count, (size_t)all->count * sizeof(Part));
}

// --- collectives ---------------------------------------------------------------------------------

static bool posted(const Group *group, int rc, const char *what) {
    return survives(group->comm, rc, what, group->name);
}

static void post(const Group *group, int to, const uint8_t *send, uint8_t *recv, size_t bytes) {
    Comm *comm = group->comm;
    int whom = group_peer(group, group->first, to);
    for (size_t at = 0; at < bytes; at += PIECE) {
        int count = piece_at(at, bytes);
        MPI_Request *request = next_request(&comm->requests, whom, true);
        if (!posted(group, MPI_Irecv(recv + at, count, MPI_BYTE, to, 0, group->mpi, request), "receiving"))
            return;
        request = next_request(&comm->requests, whom, true);
        if (!posted(group, MPI_Isend(send + at, count, MPI_BYTE, to, 0, group->mpi, request), "sending"))
            return;
    }
    comm->sent += bytes;
}

// Sends the message at send + r * stride to every other member r, and receives one from each.
static void exchange(const Group *group, const uint8_t *send, size_t stride, void *recv, size_t bytes,
                     const char *what) {
    Comm *comm = group->comm;
    if (!comm || (comm->lost && *comm->lost)) return;
    for (int i = 1; i < group->size; i++) {
        size_t to = (size_t)((group->rank + i) % group->size);
        post(group, (int)to, send + to * stride, (uint8_t *)recv + to * bytes, bytes);
    }
    if (comm->lost && *comm->lost) {
        comm->requests.count = 0;  // failed requests must not be tested
        return;
    }
    if (comm->requests.count > 0) heartbeat_collective(comm->site, what, group->name);
    wait_for(comm, &comm->requests, comm->requests.count, what, group->name);
}

void comm_all_to_all(const Group *group, const void *send, void *recv, size_t bytes, Stream *stream) {
    exchange(group, (const uint8_t *)send, bytes, recv, bytes, "all-to-all");
}

void comm_all_gather(const Group *group, void *buffer, size_t bytes, Stream *stream) {
    exchange(group, (const uint8_t *)buffer + (size_t)group->rank * bytes, 0, buffer, bytes, "all-gather");
}

void comm_gather_rows(const Group *group, const CommRow *row, int rows, Stream *stream) {
    for (int i = 0; i < rows && group->comm; i++) {
        memcpy((uint8_t *)row[i].all + (size_t)group->rank * row[i].bytes, row[i].own, row[i].bytes);
        exchange(group, (const uint8_t *)row[i].own, 0, row[i].all, row[i].bytes, "all-gather");
    }
}

// --- links ---------------------------------------------------------------------------------------

Link *link_open(const Group *group, int from, int to, Device *device, const char *name) {
    assert(from != to && from >= 0 && from < group->size && to >= 0 && to < group->size);
    if (group->rank != from && group->rank != to) return NULL;
    Link *link = xcalloc(1, sizeof *link, "a link");
    Peers peers = {group->mpi, group->comm->limit, group->comm->site};
    link->comm = group->comm;
    link->name = name;
    link->other = group_peer(group, group->first, group->rank == from ? to : from);
    link->mpi = peers_pair(peers, from, to);
    link->requests.in_turn = true;
    Link **last = &group->comm->links;
    while (*last) last = &(*last)->next;
    *last = link;
    return link;
}

// Posts a message in parts, at least one, so that empty messages are sent too.
static void post_on(Link *link, uint8_t *memory, size_t bytes, bool sends) {
    size_t at = 0;
    do {
        int count = piece_at(at, bytes);
        MPI_Request *request = next_request(&link->requests, link->other, bytes - at <= PIECE);
        int rc = sends ? MPI_Isend(memory + at, count, MPI_BYTE, 1, 0, link->mpi, request)
                       : MPI_Irecv(memory + at, count, MPI_BYTE, 0, 0, link->mpi, request);
        mpi_check(link->comm->site, rc, sends ? "sending" : "receiving", link->name);
        at += PIECE;
    } while (at < bytes);
}

void link_send(Link *link, const void *memory, size_t bytes, Stream *stream) {
    assert(link && (memory || bytes == 0));
    post_on(link, (uint8_t *)memory, bytes, true);
    link->comm->sent += bytes;
}

void link_expect(Link *link, void *memory, size_t bytes, Stream *stream) {
    assert(link && (memory || bytes == 0));
    post_on(link, (uint8_t *)memory, bytes, false);
}

void link_sent(Link *link, int pending, Stream *stream) {
    assert(link && pending >= 0);
    int count = link->requests.count;
    for (; count > 0; count--) {
        if (link->requests.part[count - 1].last && pending-- <= 0) break;
    }
    wait_for(link->comm, &link->requests, count, "sending", link->name);
}

void link_arrived(Link *link, Stream *stream) {
    assert(link != NULL);
    int count = 0;
    while (count < link->requests.count && !link->requests.part[count++].last) continue;
    wait_for(link->comm, &link->requests, count, "receiving", link->name);
}

static void close_link(Link *link) {
    wait_for(link->comm, &link->requests, link->requests.count, "closing the link of", link->name);
    MPI_Comm_free(&link->mpi);
    free_requests(&link->requests);
    free(link);
}

void comm_close(Mesh *mesh) {
    for (int i = 0; i < MESH_GROUPS; i++) {
        Comm *comm = mesh->group[i].comm;
        mesh->group[i].comm = NULL;
        if (!comm) continue;
        for (Link *link = comm->links, *next; link; link = next) {
            next = link->next;
            close_link(link);
        }
        free_requests(&comm->requests);
        free(comm);
    }
}
