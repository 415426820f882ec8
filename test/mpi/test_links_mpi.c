// Links between the ranks of a pipeline, tested as a ring in both directions at once. Messages of
// all sizes must arrive complete and in order, no matter whether sender or receiver is first.
//
// ranks: 2 3 4
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/comm.h"
#include "test/leaks.h"

enum { MESSAGES = 60, SIZES = 7, DIRECTIONS = 2, LARGE = (1 << 18) + 3 };
static const size_t SIZE[SIZES] = {0, 1, 1000, 4097, LARGE, 0, 65536};

static const Peers everyone = {MPI_COMM_WORLD, 0, NULL};

// This rank's links: out[d] to the neighbor in direction d, in[d] from the other neighbor.
typedef struct Ring {
    const Group *group;
    Link *out[DIRECTIONS], *in[DIRECTIONS];
    int from[DIRECTIONS];  // senders of incoming messages
} Ring;

static size_t size_of(int direction, int i) { return SIZE[(i + 3 * direction) % SIZES]; }

static uint8_t byte_of(int from, int direction, int i, size_t at) {
    return (uint8_t)(from * 31 + direction * 101 + i * 7 + (int)(at % 251));
}

static void open_ring(Ring *ring, const Group *group, Device *device) {
    static const char *const name[DIRECTIONS] = {"on a link onwards", "on a link back"};
    ring->group = group;
    for (int d = 0; d < DIRECTIONS; d++) {
        for (int i = 0; i < group->size; i++) {
            int next = (i + 1) % group->size, from = d ? next : i, to = d ? i : next;
            Link *link = link_open(group, from, to, device, name[d]);
            bool end = group->rank == from || group->rank == to;
            if ((link != NULL) != end)
                fatal(NULL, EXIT_USAGE, "link_open returned an end to the wrong ranks");
            if (group->rank == from) ring->out[d] = link;
            if (group->rank != to) continue;
            ring->in[d] = link;
            ring->from[d] = from;
        }
    }
}

typedef uint8_t *Messages[DIRECTIONS][MESSAGES];

static void allocate(Messages m) {
    for (int d = 0; d < DIRECTIONS; d++) {
        for (int i = 0; i < MESSAGES; i++) m[d][i] = (uint8_t *)xcalloc(LARGE, 1, "a test");
    }
}

static void release(Messages m) {
    for (int d = 0; d < DIRECTIONS; d++) {
        for (int i = 0; i < MESSAGES; i++) free(m[d][i]);
    }
}

static void send_one(Ring *ring, Messages m, int d, int i) {
    for (size_t at = 0; at < size_of(d, i); at++) m[d][i][at] = byte_of(ring->group->rank, d, i, at);
    link_send(ring->out[d], m[d][i], size_of(d, i), NULL);
}

// Returns true if the message is complete and memory past its end is unchanged.
static bool right(const Ring *ring, Messages m, int d, int i) {
    size_t bytes = size_of(d, i);
    for (size_t at = 0; at < bytes; at++) {
        if (m[d][i][at] == byte_of(ring->from[d], d, i, at)) continue;
        fprintf(stderr, "rank %d: message %d of direction %d is wrong at %zu of %zu\n", ring->group->rank, i,
                d, at, bytes);
        return false;
    }
    return bytes == LARGE || m[d][i][bytes] == 0;
}

// Posts all receives before any send, and completes them in a different order.
static bool test_expected_ahead(Ring *ring, Messages out, Messages in) {
    bool ok = true;
    for (int i = 0; i < MESSAGES; i++) {
        for (int d = 0; d < DIRECTIONS; d++) link_expect(ring->in[d], in[d][i], size_of(d, i), NULL);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    for (int i = 0; i < MESSAGES; i++) {
        for (int d = 0; d < DIRECTIONS; d++) send_one(ring, out, d, i);
    }
    for (int d = DIRECTIONS - 1; d >= 0; d--) {
        for (int i = 0; i < MESSAGES; i++) {
            link_arrived(ring->in[d], NULL);
            ok = right(ring, in, d, i) && ok;
        }
    }
    for (int d = 0; d < DIRECTIONS; d++) link_sent(ring->out[d], 0, NULL);
    return ok;
}

// Sends all messages before any receive is posted. Each receive then frees one of the sender's
// buffers.
static bool test_sent_ahead(Ring *ring, Messages out, Messages in) {
    bool ok = true;
    for (int i = 0; i < MESSAGES; i++) {
        for (int d = 0; d < DIRECTIONS; d++) send_one(ring, out, d, i);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    for (int i = 0; i < MESSAGES; i++) {
        for (int d = 0; d < DIRECTIONS; d++) {
            memset(in[d][i], 0, LARGE);
            link_expect(ring->in[d], in[d][i], size_of(d, i), NULL);
            link_arrived(ring->in[d], NULL);
            ok = right(ring, in, d, i) && ok;
        }
    }
    for (int d = 0; d < DIRECTIONS; d++) link_sent(ring->out[d], 0, NULL);
    return ok;
}

// Sends messages before any rank posts a receive, so large messages cannot be transferred yet.
// Buffers of sent messages may be overwritten.
static bool test_sent_late(Ring *ring, Messages out, Messages in) {
    enum { FIRST = 3, LATE = 4 };  // indices of large messages in SIZE
    bool ok = true;
    for (int d = 0; d < DIRECTIONS; d++) {
        for (int i = 0; i < FIRST; i++) {
            memset(in[d][i], 0, LARGE);
            link_expect(ring->in[d], in[d][i], size_of(d, i), NULL);
        }
    }
    for (int i = 0; i < FIRST + LATE; i++) {
        for (int d = 0; d < DIRECTIONS; d++) send_one(ring, out, d, i);
    }
    for (int d = 0; d < DIRECTIONS; d++) {
        link_sent(ring->out[d], LATE, NULL);
        for (int i = 0; i < FIRST; i++) memset(out[d][i], 0xEE, LARGE);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    for (int d = 0; d < DIRECTIONS; d++) {
        for (int i = FIRST; i < FIRST + LATE; i++) {
            memset(in[d][i], 0, LARGE);
            link_expect(ring->in[d], in[d][i], size_of(d, i), NULL);
        }
        for (int i = 0; i < FIRST + LATE; i++) {
            link_arrived(ring->in[d], NULL);
            ok = right(ring, in, d, i) && ok;
        }
        link_arrived(ring->in[d], NULL);  // no message is pending
        link_sent(ring->out[d], 0, NULL);
    }
    return ok;
}

// Returns the total bytes of the first `messages` messages in both directions.
static uint64_t bytes_of(int messages) {
    uint64_t bytes = 0;
    for (int i = 0; i < messages; i++) bytes += size_of(0, i) + size_of(1, i);
    return bytes;
}

static int test_ring(Device *device, int rank, int size) {
    static Messages out, in;
    Mesh mesh;
    Error err = {0};
    Ring ring = {0};
    if (!mesh_build(&mesh, rank, size, NULL, 1, 1, size, &err) || !mesh_open(&mesh, everyone, &err))
        fatal(NULL, EXIT_USAGE, "%s", err.what);
    allocate(out);
    allocate(in);
    comm_open(&mesh, device, 20);
    open_ring(&ring, &mesh.pp, device);
    comm_connect(&mesh, NULL);
    bool ok[4];
    ok[0] = test_expected_ahead(&ring, out, in);
    ok[1] = test_sent_ahead(&ring, out, in);
    ok[2] = test_sent_late(&ring, out, in);
    ok[3] = comm_sent(&mesh.pp) == 2 * bytes_of(MESSAGES) + bytes_of(7);
    comm_close(&mesh);
    mesh_close(&mesh);
    release(out);
    release(in);
    static const char *const what[4] = {"receives posted before sends", "sends before receives",
                                        "sends before a barrier", "bytes are counted"};
    int failures = 0;
    for (int i = 0; i < 4; i++) {
        bool everywhere = peers_agree(everyone, ok[i], NULL, NULL);
        if (rank == 0) printf("%s links: %s\n", everywhere ? "ok" : "not ok", what[i]);
        failures += !everywhere;
    }
    return failures;
}

int main(int argc, char **argv) {
    leaks_start_mpi(&argc, &argv);
    int rank, size;
    Error err = {0};
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    Device *device = device_open(0, NULL, &err);
    if (!device || size < 2) fatal(NULL, EXIT_USAGE, "%s", device ? "one rank has no links" : err.what);
    int failures = test_ring(device, rank, size);
    device_close(device);
    failures += leaks_found();
    MPI_Finalize();
    return failures ? 1 : 0;
}
