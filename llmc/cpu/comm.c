// Collectives over MPI for CPU ranks: see llmc/comm.h. They are made of point-to-point messages,
// not of MPI's own collectives: so the bytes counted are those handed to the transport, and the own
// slot never travels. Linked into the CPU program only.
#include "llmc/comm.h"

#include <stdlib.h>

#include "llmc/ranks/heartbeat.h"

struct Comm {
    const Site *site;
    double limit;           // seconds; 0: wait for ever
    MPI_Request *requests;  // (capacity) grown on demand
    int *member;            // (capacity) whom each request waits for
    int capacity;
    uint64_t sent;
};

void comm_open(Mesh *mesh, Device *device, double limit) {
    for (int i = 0; i < MESH_GROUPS; i++) {
        Group *group = &mesh->group[i];
        if (group->size == 1 || group == &mesh->dp) continue;
        group->comm = (Comm *)xcalloc(1, sizeof(Comm), "the communicator");
        group->comm->site = device_site(device);
        group->comm->limit = limit;
    }
}

void comm_close(Mesh *mesh) {
    for (int i = 0; i < MESH_GROUPS; i++) {
        Comm *comm = mesh->group[i].comm;
        mesh->group[i].comm = NULL;
        if (!comm) continue;
        free(comm->requests);
        free(comm->member);
        free(comm);
    }
}

bool comm_share(const Group *node, void *flags, const CommPiece *piece, int pieces, Error *err) {
    return error_set(err, EXIT_ENVIRONMENT, "%s", device_kind()->only_way);
}
void comm_unshare(const Group *node) {}
void comm_connect(const Mesh *mesh, void *memory) {}
uint64_t comm_sent(const Group *group) { return group->comm ? group->comm->sent : 0; }

static void check(const Group *group, int rc, const char *what) {
    mpi_check(group->comm->site, rc, what, group->name);
}

enum { PIECE = 1 << 30 };  // MPI counts are int: longer messages travel in pieces

static MPI_Request *next_request(Comm *comm, int member, int *used) {
    if (*used == comm->capacity) {
        comm->capacity = comm->capacity ? 2 * comm->capacity : 64;
        size_t room = (size_t)comm->capacity;
        comm->requests = (MPI_Request *)xrealloc(comm->requests, room * sizeof(MPI_Request), "MPI requests");
        comm->member = (int *)xrealloc(comm->member, room * sizeof(int), "MPI requests");
    }
    comm->member[*used] = member;
    return &comm->requests[(*used)++];
}

static void post(const Group *group, int to, const uint8_t *send, uint8_t *recv, size_t bytes, int *used) {
    Comm *comm = group->comm;
    for (size_t at = 0; at < bytes; at += PIECE) {
        int count = bytes - at < PIECE ? (int)(bytes - at) : PIECE;
        MPI_Request *request = next_request(comm, to, used);
        check(group, MPI_Irecv(recv + at, count, MPI_BYTE, to, 0, group->mpi, request), "receiving");
        request = next_request(comm, to, used);
        check(group, MPI_Isend(send + at, count, MPI_BYTE, to, 0, group->mpi, request), "sending");
    }
    comm->sent += bytes;
}

static void timed_out(const Group *group, int used, const char *what) {
    const Comm *comm = group->comm;
    int late = 0, done = 1;
    char who[512];
    bool blames = heartbeat_blames(comm->site, who, sizeof who);
    heartbeat_take_floor(comm->site);
    if (blames) {
        fatal(comm->site, EXIT_COMMUNICATION, "%s %s, waited %.0f s: %s; see what stopped it "
              "(--distributed-timeout-minutes sets the limit)", what, group->name, comm->limit, who);
    }
    for (int i = 0; i < used && done; i++) {
        late = i;
        MPI_Test(&comm->requests[i], &done, MPI_STATUS_IGNORE);
    }
    fatal(comm->site, EXIT_COMMUNICATION, "%s %s: rank %d has not answered for %.0f s; see what stopped it "
          "(--distributed-timeout-minutes sets the limit)", what, group->name,
          group_peer(group, group->first, comm->member[late]), comm->limit);
}

static void wait_all(const Group *group, int used, const char *what) {
    const Comm *comm = group->comm;
    if (used > 0) heartbeat_issues(comm->site, what, group->name);
    Deadline deadline = deadline_in(comm->limit);
    heartbeat_waits(comm->site, true);
    for (int done = 0, polls = 1; !done; polls++) {
        check(group, MPI_Testall(used, comm->requests, &done, MPI_STATUSES_IGNORE), what);
        bool late = !done && polls % 1024 == 0 && comm->limit > 0 && deadline_passed(&deadline);
        if (late) timed_out(group, used, what);
    }
    heartbeat_waits(comm->site, false);
}

// One message to every other member, from send + its number * stride, and one from each.
static void exchange(const Group *group, const uint8_t *send, size_t stride, void *recv, size_t bytes,
                     const char *what) {
    int used = 0;
    if (!group->comm) return;
    for (int i = 1; i < group->size; i++) {
        size_t to = (size_t)((group->rank + i) % group->size);
        post(group, (int)to, send + to * stride, (uint8_t *)recv + to * bytes, bytes, &used);
    }
    wait_all(group, used, what);
}

void comm_all_to_all(const Group *group, const void *send, void *recv, size_t bytes, Stream *stream) {
    exchange(group, (const uint8_t *)send, bytes, recv, bytes, "all-to-all");
}

void comm_all_gather(const Group *group, void *buffer, size_t bytes, Stream *stream) {
    exchange(group, (const uint8_t *)buffer + (size_t)group->rank * bytes, 0, buffer, bytes, "all-gather");
}
