// Tests the collectives over NCCL with one GPU per rank under mpirun, or in a single process (which
// sends nothing and opens no communicator). --nodes N splits the ranks into N nodes, so all groups
// of the mesh have several members. Inside a node, payloads are also copied through memory that
// ranks map from each other (comm_share). Links form a ring of all ranks. --emulate-nodes as a
// fourth argument lets ranks share GPUs (devices.h).
//
//   mpirun -n 4 test_comm_gpu --nodes 2
#include <mpi.h>
#include <stdint.h>
#include <string.h>

#include "llmc/comm.h"
#include "llmc/cuda/internal.h"
#include "llmc/ranks/devices.h"
#include "test/gpu/check.h"

// Byte i of the payload that world rank `from` sends to world rank `to` in a group. Also fills
// slots that must not change.
static uint8_t message(int from, int to, const Group *group, size_t i) {
    return (uint8_t)(from * 31 + to * 7 + group->size * 3 + (int)(i % 251));
}
enum { UNTOUCHED = 0xEE };

// World rank of a member.
static int member(const Group *group, int i) { return group_peer(group, group->first, i); }
static int self(const Group *group) { return member(group, group->rank); }

typedef struct Buffers {
    uint8_t *send, *recv;  // device
    uint8_t *host;
    Stream *stream;
} Buffers;

static void test_all_to_all(Checks *c, const Group *group, const Buffers *m, size_t bytes) {
    int size = group->size, rank = group->rank;
    for (int to = 0; to < size; to++) {
        uint8_t *slot = m->host + (size_t)to * bytes;
        for (size_t i = 0; i < bytes; i++) slot[i] = message(self(group), member(group, to), group, i);
    }
    copy_to_device(m->stream, m->send, m->host, (size_t)size * bytes);
    memset(m->host, UNTOUCHED, (size_t)size * bytes);
    copy_to_device(m->stream, m->recv, m->host, (size_t)size * bytes);
    uint64_t before = comm_sent(group);
    comm_all_to_all(group, m->send, m->recv, bytes, m->stream);
    uint64_t sent = comm_sent(group) - before;
    check(c, sent == (uint64_t)(size - 1) * bytes, "all-to-all of %zu bytes: wrong count of sent bytes",
          bytes);
    copy_to_host(m->stream, m->host, m->recv, (size_t)size * bytes);
    stream_synchronize(m->stream);
    size_t wrong = 0;
    for (int from = 0; from < size; from++) {
        for (size_t i = 0; i < bytes; i++) {
            uint8_t want = message(member(group, from), self(group), group, i);
            if (from == rank) want = UNTOUCHED;
            wrong += m->host[(size_t)from * bytes + i] != want;
        }
    }
    check(c, wrong == 0, "all-to-all of %zu bytes %s: %zu bytes are wrong", bytes, group->name, wrong);
}

static void test_all_gather(Checks *c, const Group *group, const Buffers *m, size_t bytes) {
    int size = group->size, rank = group->rank;
    memset(m->host, UNTOUCHED, (size_t)size * bytes);
    for (size_t i = 0; i < bytes; i++) m->host[(size_t)rank * bytes + i] = message(self(group), 0, group, i);
    copy_to_device(m->stream, m->recv, m->host, (size_t)size * bytes);
    uint64_t before = comm_sent(group);
    comm_all_gather(group, m->recv, bytes, m->stream);
    uint64_t sent = comm_sent(group) - before;
    check(c, sent == (uint64_t)(size - 1) * bytes, "all-gather of %zu bytes: wrong count of sent bytes",
          bytes);
    copy_to_host(m->stream, m->host, m->recv, (size_t)size * bytes);
    stream_synchronize(m->stream);
    size_t wrong = 0;
    for (int from = 0; from < size; from++) {
        const uint8_t *slot = m->host + (size_t)from * bytes;
        for (size_t i = 0; i < bytes; i++) wrong += slot[i] != message(member(group, from), 0, group, i);
    }
    check(c, wrong == 0, "all-gather of %zu bytes %s: %zu bytes are wrong", bytes, group->name, wrong);
}

// Repeats collectives on the same memory, whose contents change between rounds without
// synchronization. A payload that is copied too early or too late belongs to another round.
// offset: position of the payloads in the shared memory.
static void test_rounds(Checks *c, const Group *node, const Buffers *m, size_t offset, size_t bytes) {
    enum { ROUNDS = 100 };
    int size = node->size;
    size_t all = (size_t)size * bytes;
    Error err = {};
    uint8_t *log = (uint8_t *)device_alloc(stream_device(m->stream), 2 * ROUNDS * all, "a test", &err);
    uint8_t *host = (uint8_t *)malloc(2 * ROUNDS * all);
    if (!check(c, log != NULL, "%s", err.what)) return;
    for (int round = 0; round < ROUNDS; round++) {
        // In every second round one rank is late, and the others run ahead.
        if (round % 2 && node->rank == round / 2 % size) stream_synchronize(m->stream);
        for (int to = 0; to < size; to++)
            memset(m->host + to * bytes, round * 64 + node->rank * 8 + to, bytes);
        copy_to_device(m->stream, m->send + offset, m->host, all);
        comm_all_to_all(node, m->send + offset, m->recv + offset, bytes, m->stream);
        set_zero(m->stream, m->send + offset, all);  // all reads must be complete
        copy_on_device(m->stream, log + 2 * round * all, m->recv + offset, all);
        memset(m->host, round + 100 * node->rank, all);
        copy_to_device(m->stream, m->recv + offset, m->host, all);
        comm_all_gather(node, m->recv + offset, bytes, m->stream);
        copy_on_device(m->stream, log + (2 * round + 1) * all, m->recv + offset, all);
        set_zero(m->stream, m->recv + offset, all);
    }
    copy_to_host(m->stream, host, log, 2 * ROUNDS * all);
    stream_synchronize(m->stream);
    size_t wrong[2] = {0, 0};
    for (int round = 0; round < ROUNDS; round++) {
        for (int from = 0; from < size; from++) {
            for (size_t i = from * bytes; i < (from + 1) * bytes; i++) {
                uint8_t exchanged = (uint8_t)(round * 64 + from * 8 + node->rank);
                if (from != node->rank) wrong[0] += host[2 * round * all + i] != exchanged;
                wrong[1] += host[(2 * round + 1) * all + i] != (uint8_t)(round + 100 * from);
            }
        }
    }
    check(c, wrong[0] == 0, "%d all-to-alls of %zu bytes in a row: %zu bytes are wrong", ROUNDS, bytes,
          wrong[0]);
    check(c, wrong[1] == 0, "%d all-gathers of %zu bytes in a row: %zu bytes are wrong", ROUNDS, bytes,
          wrong[1]);
    device_free(stream_device(m->stream), log);
    free(host);
}

// Tests the collectives while ranks of a node copy from each other's memory. Shares the memory
// twice, and tests the collectives again after sharing has ended.
static void test_shared(Checks *c, const Mesh *mesh, const Buffers *m, size_t most) {
    const Group *node = &mesh->node;
    Error err = {};
    void *flags = device_alloc(stream_device(m->stream), COMM_FLAG_BYTES, "a test", &err);
    CommPiece piece[] = {{m->send, most}, {m->recv, most}, {NULL, 0}};
    for (int time = 0; time < 2 && node->size > 1; time++) {
        if (!check(c, comm_share(node, flags, piece, 3, &err), "not shared: %s", err.what)) break;
        const size_t sizes[] = {16, 1000, most / (size_t)mesh->world.size};
        for (int i = 0; i < 3; i++) {
            test_all_to_all(c, node, m, sizes[i]);
            test_all_gather(c, node, m, sizes[i]);
            test_rounds(c, node, m, 0, sizes[i] < 4096 ? sizes[i] : 65536);
        }
        test_rounds(c, node, m, 4096, 256);
        comm_unshare(node);
        test_rounds(c, node, m, 0, 256);
    }
    device_free(stream_device(m->stream), flags);
}

// Tests a ring of links over all ranks, in both directions, with all messages in flight at once.
static void test_links(Checks *c, const Group *world, Link *const out[2], Link *const in[2], const Buffers *m,
                       size_t bytes) {
    enum { MESSAGES = 20 };
    int rank = world->rank, size = world->size;
    uint64_t before = comm_sent(world);
    size_t all = MESSAGES * bytes;
    set_zero(m->stream, m->recv, 2 * all);
    for (int d = 0; d < 2; d++) {
        for (int k = 0; k < MESSAGES; k++)
            link_expect(in[d], m->recv + d * all + k * bytes, bytes, m->stream);
    }
    for (int d = 0; d < 2; d++) {
        for (int k = 0; k < MESSAGES; k++) {
            uint8_t *message = m->host + (d * MESSAGES + k) * bytes;
            memset(message, 1 + k + 30 * d + 60 * rank, bytes);
            copy_to_device(m->stream, m->send + d * all + k * bytes, message, bytes);
            link_send(out[d], m->send + d * all + k * bytes, bytes, m->stream);
        }
    }
    for (int d = 0; d < 2; d++) {
        link_sent(out[d], 0, m->stream);
        for (int k = 0; k < MESSAGES; k++) link_arrived(in[d], m->stream);
    }
    set_zero(m->stream, m->send, 2 * all);  // all reads must be complete
    copy_to_host(m->stream, m->host, m->recv, 2 * all);
    stream_synchronize(m->stream);
    size_t wrong = 0;
    for (int d = 0; d < 2; d++) {
        int from = (d ? rank + 1 : rank + size - 1) % size;
        for (int k = 0; k < MESSAGES; k++) {
            const uint8_t *message = m->host + (d * MESSAGES + k) * bytes;
            for (size_t i = 0; i < bytes; i++) wrong += message[i] != (uint8_t)(1 + k + 30 * d + 60 * from);
        }
    }
    check(c, wrong == 0, "links with messages of %zu bytes: %zu bytes are wrong", bytes, wrong);
    check(c, comm_sent(world) - before == 2 * all,
          "links with messages of %zu bytes: wrong count of sent bytes", bytes);
}

// Opens the links of the ring in the same order on all ranks.
static void open_links(const Group *world, Device *device, Link *out[2], Link *in[2]) {
    for (int i = 0; i < 2 * world->size; i++) {
        int d = i / world->size, low = i % world->size, next = (low + 1) % world->size;
        int from = d ? next : low, to = d ? low : next;
        Link *link = link_open(world, from, to, device, d ? "on a link back" : "on a link onwards");
        if (world->rank == from) out[d] = link;
        if (world->rank == to) in[d] = link;
    }
}

static void test_groups(Checks *c, Device *device, Mesh *mesh) {
    Error err = {};
    Peers world = {MPI_COMM_WORLD, 60, NULL};
    if (!check(c, mesh_open(mesh, world, &err), "%s", err.what)) return;
    comm_open(mesh, device, 60);
    const size_t sizes[] = {0, 16, 1000, (size_t)1 << 20};
    size_t most = (size_t)mesh->world.size * sizes[3];
    Buffers m = {(uint8_t *)device_alloc(device, most, "a test", &err),
                 (uint8_t *)device_alloc(device, most, "a test", &err), (uint8_t *)malloc(most),
                 stream_create(device, "communication")};
    Link *out[2] = {}, *in[2] = {};
    bool ring = mesh->world.size > 1;
    if (ring) open_links(&mesh->world, device, out, in);
    comm_connect(mesh, m.send);
    const Group *const groups[] = {&mesh->node, &mesh->rail, &mesh->world};
    for (int g = 0; g < 3; g++) {
        check(c, comm_sent(groups[g]) == 0, "connection setup %s was counted as traffic", groups[g]->name);
        for (int i = 0; i < 4; i++) {
            test_all_to_all(c, groups[g], &m, sizes[i]);
            test_all_gather(c, groups[g], &m, sizes[i]);
        }
    }
    test_shared(c, mesh, &m, most);
    for (int i = 0; ring && i < 3; i++) test_links(c, &mesh->world, out, in, &m, 25001 * (size_t)i);
    stream_destroy(m.stream);
    device_free(device, m.send);
    device_free(device, m.recv);
    free(m.host);
    comm_close(mesh);
    mesh_close(mesh);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int rank = 0, size = 1, nodes = argc > 2 && strcmp(argv[1], "--nodes") == 0 ? atoi(argv[2]) : 1;
    bool emulate = argc > 3 && strcmp(argv[3], "--emulate-nodes") == 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    int *host_of_rank = (int *)calloc((size_t)size, sizeof(int));
    Error err = {};
    Mesh mesh;
    if (nodes < 1 || !mesh_build(&mesh, rank, size, host_of_rank, size / nodes, 1, 1, &err)) {
        fatal(NULL, EXIT_USAGE, "%s", err.what);
    }
    Peers host = {MPI_COMM_WORLD, 0, NULL};
    OwnDevice own = devices_choose(host, &mesh, emulate);
    Launch launch = {rank, size, host_of_rank, MPI_COMM_WORLD, MPI_COMM_WORLD, "test", false};
    if (emulate) devices_emulate_nodes(&own, &mesh, &launch);
    Device *device = device_open(own.index, NULL, &err);
    if (!device) fatal(NULL, err.code, "%s", err.what);
    Checks checks = {"test_comm_gpu", 0, 0};
    test_groups(&checks, device, &mesh);
    device_close(device);
    free(host_of_rank);
    int failed = checks.failed;
    MPI_Allreduce(&failed, &checks.failed, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    int rc = rank == 0 ? checks_end(&checks) : checks.failed != 0;
    MPI_Finalize();
    return rc;
}
