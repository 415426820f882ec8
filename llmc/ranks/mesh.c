// Process groups: see mesh.h.
#include "llmc/ranks/mesh.h"

#include <assert.h>
#include <stddef.h>
#include <stdlib.h>

// Counts the ranks per host. All hosts must have the same number of consecutive ranks.
static bool ranks_per_host(const int *host_of_rank, int size, int *per_host, Error *err) {
    int *on_host = xcalloc((size_t)size, sizeof *on_host, "the host table");
    bool ok = true;
    for (int r = 0; r < size; r++) on_host[host_of_rank[r]]++;
    *per_host = on_host[host_of_rank[0]];
    for (int r = 0; ok && r < size; r++) {
        int found = on_host[host_of_rank[r]];
        if (found != *per_host) {
            ok = system_error(err,
                              "the nodes of ranks 0 and %d have %d and %d ranks; start the same number of "
                              "ranks on every node",
                              r, *per_host, found);
        } else if (host_of_rank[r] != host_of_rank[r - r % *per_host]) {
            ok = system_error(
                err, "ranks of one node are not consecutive; map ranks by node (mpirun --map-by slot)");
        }
    }
    free(on_host);
    return ok;
}

static bool ranks_per_node(int size, const int *host_of_rank, int gpus_per_node, int *per_node, Error *err) {
    *per_node = gpus_per_node;
    if (gpus_per_node == 0) return ranks_per_host(host_of_rank, size, per_node, err);
    if (gpus_per_node > 0 && size % gpus_per_node == 0) return true;
    return usage_error(
        err, "%d ranks cannot be split into nodes of %d; --gpus-per-node must divide the number of ranks",
        size, gpus_per_node);
}

// Sets *d to the number of data-parallel ranks per node; 1 if a tensor-parallel group spans nodes.
static bool data_parallel_per_node(int per_node, int tp_size, int dp_size, int *d, Error *err) {
    *d = per_node >= tp_size ? per_node / tp_size : 1;
    if (*d > dp_size) *d = dp_size;
    if (per_node % tp_size && tp_size % per_node) {
        return usage_error(
            err, "--tensor-model-parallel-size %d does not fit nodes of %d ranks; one must divide the other",
            tp_size, per_node);
    }
    // A pipeline stage must consist of whole nodes, or a node of whole pipeline stages.
    if (dp_size % *d || (per_node >= tp_size && per_node % (tp_size * *d))) {
        return usage_error(err,
                           "a data-parallel group of %d ranks cannot be split into nodes of %d; change "
                           "--pipeline-model-parallel-size or the number of nodes",
                           dp_size, per_node / tp_size);
    }
    return true;
}

_Static_assert(offsetof(Mesh, replica_groups) == offsetof(Mesh, group[MESH_GROUPS - 1]),
               "group[] covers all groups");

static Group group_of(const char *name, int world_rank, int stride, int size) {
    int rank = world_rank / stride % size;
    Group group = {name, rank, size, world_rank - rank * stride, stride, MPI_COMM_NULL, NULL};
    return group;
}

bool mesh_build(Mesh *mesh, int rank, int size, const int *host_of_rank, int gpus_per_node, int tp_size,
                int pp_size, Error *err) {
    assert(mesh && size > 0 && rank >= 0 && rank < size && (gpus_per_node || host_of_rank));
    int per_node, d;
    int64_t model = (int64_t)tp_size * pp_size;
    if (tp_size < 1 || pp_size < 1 || size % model) {
        return usage_error(
            err,
            "%d ranks cannot be split by --tensor-model-parallel-size %d x --pipeline-model-parallel-size "
            "%d; start a multiple of %lld ranks, or change the sizes",
            size, tp_size, pp_size, (long long)model);
    }
    if (!ranks_per_node(size, host_of_rank, gpus_per_node, &per_node, err)) return false;
    int dp_size = (int)(size / model);
    if (!data_parallel_per_node(per_node, tp_size, dp_size, &d, err)) return false;
    mesh->nodes = size / per_node;
    mesh->per_node = per_node;
    mesh->world.size = size;
    mesh->tp.size = tp_size;
    mesh->pp.size = pp_size;
    mesh->node.size = d;
    mesh->shards.size = mesh->shard_rail.size = mesh->replica_groups.size = 1;
    *mesh = mesh_of_rank(mesh, rank);
    return true;
}

Mesh mesh_of_rank(const Mesh *mesh, int rank) {
    assert(mesh && rank >= 0 && rank < mesh->world.size);
    int size = mesh->world.size, tp_size = mesh->tp.size, pp_size = mesh->pp.size, d = mesh->node.size;
    int replica_groups = mesh->replica_groups.size, stage = size / pp_size,
        dp_size = stage / tp_size / replica_groups;
    Mesh seen;
    seen.nodes = mesh->nodes;
    seen.per_node = mesh->per_node;
    seen.world = group_of("among all ranks", rank, 1, size);
    seen.tp = group_of("in the tensor-parallel group", rank, 1, tp_size);
    seen.pp = group_of("in the pipeline", rank, stage, pp_size);
    seen.dp = group_of("in the data-parallel group", rank, tp_size, dp_size);
    seen.node = group_of("inside the node", rank, tp_size, d);
    seen.rail = group_of("between nodes", rank, tp_size * d, dp_size / d);
    bool at_end = pp_size > 1 && (seen.pp.rank == 0 || seen.pp.rank == pp_size - 1);
    seen.embedding = group_of("between the embedding's copies", rank, at_end ? stage * (pp_size - 1) : 1,
                              at_end ? 2 : 1);
    seen.shards = group_of("of weights in the node", rank, tp_size, mesh->shards.size);
    seen.shard_rail = group_of("of weights between nodes", rank, tp_size * d, mesh->shard_rail.size);
    seen.replica_group = group_of("in the replica group", rank, 1,
                                  replica_groups > 1 ? size / replica_groups : 1);
    seen.replica_groups = group_of("between replica groups", rank, size / replica_groups, replica_groups);
    return seen;
}

void mesh_shard_weights(Mesh *mesh, bool all_nodes) {
    assert(mesh->world.mpi == MPI_COMM_NULL);
    mesh->shards.size = mesh->node.size;
    if (all_nodes) mesh->shard_rail.size = mesh->rail.size;
    *mesh = mesh_of_rank(mesh, mesh->world.rank);
}

bool mesh_make_replica_groups(Mesh *mesh, Error *err) {
    assert(mesh->world.mpi == MPI_COMM_NULL);
    if (mesh->pp.size > 1)
        return usage_error(err,
                           "--local-steps needs the whole model on every node; drop "
                           "--pipeline-model-parallel-size %d",
                           mesh->pp.size);
    if (mesh->per_node != mesh->tp.size * mesh->node.size)
        return usage_error(err,
                           "--local-steps needs the whole model on every node; lower "
                           "--tensor-model-parallel-size %d, or raise --gpus-per-node %d",
                           mesh->tp.size, mesh->per_node);
    mesh->replica_groups.size = mesh->nodes;
    *mesh = mesh_of_rank(mesh, mesh->world.rank);
    return true;
}

const Group *mesh_status_group(const Mesh *mesh) {
    return mesh->replica_groups.size > 1 ? &mesh->replica_group : &mesh->world;
}
int mesh_data_rank(const Mesh *mesh) { return mesh->replica_groups.rank * mesh->dp.size + mesh->dp.rank; }
int mesh_data_ranks(const Mesh *mesh) { return mesh->replica_groups.size * mesh->dp.size; }

int group_peer(const Group *kind, int of, int i) {
    assert(kind && i >= 0 && i < kind->size);
    return of + (i - of / kind->stride % kind->size) * kind->stride;
}

void mesh_remove_node(Mesh *mesh, int node) {
    assert(mesh->replica_groups.size > 1 && node >= 0 && node < mesh->nodes);
    Mesh left = *mesh;
    bool after = mesh->world.rank / mesh->per_node > node;
    left.nodes = left.replica_groups.size = mesh->nodes - 1;
    left.world.size -= mesh->per_node;
    left = mesh_of_rank(&left, mesh->world.rank - (after ? mesh->per_node : 0));
    for (int i = 0; i < MESH_GROUPS; i++) {
        if (&left.group[i] == &left.world || &left.group[i] == &left.replica_groups) continue;
        left.group[i].mpi = mesh->group[i].mpi;
        left.group[i].comm = mesh->group[i].comm;
    }
    *mesh = left;
}

// Returns true for the groups of local steps if there is one replica group: saves communicators.
static bool unused(const Mesh *mesh, const Group *group) {
    return mesh->replica_groups.size == 1 &&
           (group == &mesh->replica_group || group == &mesh->replica_groups);
}

bool mesh_open(Mesh *mesh, Peers world, Error *err) {
    bool as_computed = true;
    for (int i = 0; i < MESH_GROUPS; i++) {
        Group *group = &mesh->group[i];
        int rank, size;
        if (unused(mesh, group)) continue;
        // The world is first, because only peers_duplicate detects a missing rank within the limit.
        group->mpi = i == 0 ? peers_duplicate(world) : peers_split(world, group->first, group->rank);
        MPI_Comm_set_errhandler(group->mpi, MPI_ERRORS_RETURN);
        MPI_Comm_rank(group->mpi, &rank);
        MPI_Comm_size(group->mpi, &size);
        as_computed = as_computed && rank == group->rank && size == group->size;
    }
    if (as_computed) return true;
    return system_error(err, "the ranks disagree about the topology; start every rank with the same flags");
}

void mesh_close(Mesh *mesh) {
    for (int i = 0; i < MESH_GROUPS; i++) {
        Group *group = &mesh->group[i];
        if (group->name && group->mpi != MPI_COMM_NULL) MPI_Comm_free(&group->mpi);
    }
}
