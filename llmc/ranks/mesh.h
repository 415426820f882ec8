// Who is where: the groups that ranks communicate in, in Megatron's order of ranks,
//     rank = pp * T * D + dp * T + tp
// Groups are arithmetic first: --plan and the tests need no MPI for them. mesh_open makes their
// communicators. Called by llmc/run and by benches and tests that are programs of ranks.
// Whoever communicates is given a Mesh or one of its groups.
#pragma once
#include "llmc/ranks/peers.h"
LLMC_BEGIN

// What a backend keeps for messages within one group (llmc/comm.h).
typedef struct Comm Comm;

// Ranks that communicate. Their numbers in the world lie at equal distances.
typedef struct Group {
    const char *name;   // for messages: "inside the node"
    int rank, size;     // this rank's place in it, and how many ranks it has
    int first, stride;  // member i is rank first + i * stride of the world
    MPI_Comm mpi;       // for meetings of the hosts; MPI_COMM_NULL before mesh_open
    Comm *comm;         // for messages in device memory; NULL in a group of one, and before comm_open
} Group;

enum { MESH_GROUPS = 11 };
typedef struct Mesh {
    union {
        struct {
            Group world;
            Group tp, pp, dp;          // tensor, pipeline and data parallel
            Group node, rail;          // the two levels of dp: its ranks of one node, one rank of each node
            Group embedding;           // first and last stage of a pipeline; one rank elsewhere
            Group shards, shard_rail;  // the two levels of the ranks that hold one replica's weights
                                       // together: node and rail, as far as mesh_share_weights
                                       // says; else this rank alone
            Group replica_group,
                replica_groups;  // mesh_make_replica_groups: the ranks of this replica group, and one rank of
                                 // each. Else this rank alone, without communicators
        };
        Group group[MESH_GROUPS];  // the same, for loops
    };
    int nodes, per_node;  // of the world: this rank is in node world.rank / per_node
} Mesh;

// Arithmetic alone. host_of_rank: (world_size) numbers in [0, world_size), equal for ranks of one
// host. It is not read where gpus_per_node, the ranks of a node, says where nodes end; 0: nodes are
// hosts. EXIT_USAGE: sizes that do not divide. EXIT_ENVIRONMENT: hosts with unequal numbers of
// ranks, or whose ranks are not consecutive.
bool mesh_build(Mesh *mesh, int world_rank, int world_size, const int *host_of_rank, int gpus_per_node,
                int tp_size, int pp_size, Error *err);
// The ranks of a node share a replica's weights out among themselves, or with all_nodes all
// data-parallel ranks do. What gathers a layer's weights then has communicators of its own, so that
// it never waits for other messages. Arithmetic alone, before mesh_open.
void mesh_share_weights(Mesh *mesh, bool all_nodes);
// Each node becomes a replica group, which trains by itself (--local-steps): dp ends with the node,
// rail is this rank alone, and what the replica groups exchange goes through `replica groups`.
// Arithmetic alone, before mesh_open. EXIT_USAGE: a node does not hold whole models.
bool mesh_make_replica_groups(Mesh *mesh, Error *err);
// Who judges a step together: the ranks of the replica group; without replica groups all ranks.
const Group *mesh_judges(const Mesh *mesh);
// This rank's place among all that take samples, and how many those are, on all replica groups.
int mesh_data_rank(const Mesh *mesh);
int mesh_data_ranks(const Mesh *mesh);
// The same world as its rank `rank` sees it. Arithmetic alone.
Mesh mesh_seen_by(const Mesh *mesh, int rank);
// A node of replica groups is lost: the mesh of those that are left, as one of their ranks sees it.
// The world and `replica groups` lose their communicators, the groups inside the node keep them.
void mesh_without(Mesh *mesh, int node);
// Makes the communicators. Collective over world, whose ranks must agree on the result.
// EXIT_ENVIRONMENT on a rank whose groups are not as computed: the ranks were started with
// different flags.
bool mesh_open(Mesh *mesh, Peers world, Error *err);
// Frees the communicators. Collective. Nothing without mesh_open.
void mesh_close(Mesh *mesh);

// Groups of one kind divide the world. The world's number of member i of the one that `of` is in.
int group_peer(const Group *kind, int of, int i);

LLMC_END
