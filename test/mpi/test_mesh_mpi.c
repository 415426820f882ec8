// For every layout of tensor parallel size, pipeline parallel size and nodes that fits the ranks,
// checks the communicators of the mesh against the rank arithmetic, and runs collectives in each
// group.
// ranks: 1 2 4 8
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/comm.h"
#include "test/leaks.h"

enum { BYTES = 1000, MOST_RANKS = 16, UNTOUCHED = 0xEE };

static const Peers everyone = {MPI_COMM_WORLD, 0, NULL};

static bool complain(const Mesh *m, const char *group, const char *what, int at) {
    fprintf(stderr, "rank %d, T %d, P %d, nodes of %d, %s: %s at %d\n", m->world.rank, m->tp.size, m->pp.size,
            m->per_node, group, what, at);
    return false;
}

// Byte i of the message from world rank `from` to world rank `to`.
static uint8_t message(int from, int to, int i) { return (uint8_t)(from * 31 + to * 7 + i % 251); }

static bool same_members(const Mesh *m, const Group *group) {
    int self = m->world.rank, all[MOST_RANKS], size;
    MPI_Comm_size(group->mpi, &size);
    if (size != group->size) return complain(m, group->name, "wrong size", size);
    MPI_Allgather(&self, 1, MPI_INT, all, 1, MPI_INT, group->mpi);
    for (int i = 0; i < size; i++) {
        if (all[i] != group_peer(group, self, i)) return complain(m, group->name, "wrong member", i);
    }
    return true;
}

// Returns true if every slot has its member's message. An all-to-all must not write this rank's
// slot.
static bool arrived(const Mesh *m, const Group *group, const uint8_t *slots, bool gathered) {
    int self = m->world.rank;
    for (int at = 0; at < group->size * BYTES; at++) {
        int from = group_peer(group, self, at / BYTES);
        uint8_t wanted = message(from, gathered ? 0 : self, at % BYTES);
        if (!gathered && from == self) wanted = UNTOUCHED;
        if (slots[at] != wanted)
            return complain(m, group->name, gathered ? "wrong byte in a gather" : "wrong byte in an exchange",
                            at);
    }
    return true;
}

static bool collectives(const Mesh *m, const Group *group) {
    static uint8_t send[MOST_RANKS * BYTES], recv[MOST_RANKS * BYTES];
    int self = m->world.rank;
    bool travels = group->size > 1 && group != &m->dp;
    if ((group->comm != NULL) != travels)
        return complain(m, group->name, "Comm present or absent unexpectedly", 0);
    if (group == &m->dp) return true;
    for (int at = 0; at < group->size * BYTES; at++) {
        send[at] = message(self, group_peer(group, self, at / BYTES), at % BYTES);
    }
    memset(recv, UNTOUCHED, sizeof recv);
    comm_all_to_all(group, send, recv, BYTES, NULL);
    bool ok = arrived(m, group, recv, false);
    for (int i = 0; i < BYTES; i++) recv[group->rank * BYTES + i] = message(self, 0, i);
    comm_all_gather(group, recv, BYTES, NULL);
    ok = ok && arrived(m, group, recv, true);
    bool counted = comm_sent(group) == 2 * (uint64_t)(group->size - 1) * BYTES;
    return ok && (counted || complain(m, group->name, "wrong number of bytes sent", (int)comm_sent(group)));
}

static bool test_shape(Mesh *mesh, Device *device) {
    Error err = {0};
    bool ok = mesh_open(mesh, everyone, &err) || complain(mesh, "mesh_open", err.what, 0);
    comm_open(mesh, device, 60);
    comm_connect(mesh, NULL);
    // Continues after a failure, because other ranks would wait for this one.
    for (int i = 0; i < MESH_GROUPS; i++) {
        if (mesh->group[i].mpi == MPI_COMM_NULL) continue;  // group exists only with local steps
        ok = same_members(mesh, &mesh->group[i]) && ok;
        ok = collectives(mesh, &mesh->group[i]) && ok;
    }
    comm_close(mesh);
    mesh_close(mesh);
    return peers_agree(everyone, ok, NULL, NULL);
}

// One rank opens a different layout. At least one rank must report this, and none may hang.
static bool test_disagreement(int rank, int size) {
    Mesh mesh;
    Error err = {0};
    if (size == 1) return true;
    if (!mesh_build(&mesh, rank, size, NULL, rank == 0 ? 1 : size, 1, 1, &err)) return false;
    bool accepted = peers_agree(everyone, mesh_open(&mesh, everyone, &err), &err, NULL);
    mesh_close(&mesh);
    return !accepted && err.code == EXIT_ENVIRONMENT && strstr(err.what, "disagree");
}

static int test_shapes(Device *device, int rank, int size) {
    int failures = 0;
    for (int per_node = 1; per_node <= size; per_node++) {
        for (int shape = 0; shape < 64; shape++) {
            Mesh mesh;
            int tp = 1 + shape % 8, pp = 1 + shape / 8;
            if (!mesh_build(&mesh, rank, size, NULL, per_node, tp, pp, NULL)) continue;
            bool ok = test_shape(&mesh, device);
            bool replica_groups = mesh_make_replica_groups(&mesh, NULL);
            if (replica_groups) ok = test_shape(&mesh, device) && ok;
            failures += !ok;
            if (rank == 0)
                printf("%s T %d, P %d, nodes of %d%s\n", ok ? "ok" : "not ok", tp, pp, per_node,
                       replica_groups ? ", also as replica groups" : "");
        }
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
    if (!device || size > MOST_RANKS) fatal(NULL, EXIT_USAGE, "%s", device ? "too many ranks" : err.what);
    int failures = test_shapes(device, rank, size);
    bool told = test_disagreement(rank, size);
    if (rank == 0) printf("%s ranks that disagree get an error\n", told ? "ok" : "not ok");
    failures += !told;
    device_close(device);
    failures += leaks_found();
    MPI_Finalize();
    return failures ? 1 : 0;
}
