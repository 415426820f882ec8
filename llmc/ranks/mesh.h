// Process groups, in Megatron's rank order,
//     rank = pp * T * D + dp * T + tp
// Groups are pure arithmetic first, so --plan and tests need no MPI; mesh_open creates their
// communicators.
#pragma once
#include "llmc/ranks/peers.h"
LLMC_BEGIN

// State of a backend for messages within one group (llmc/comm.h).
typedef struct Comm Comm;

// A process group. Its ranks in the world are equally spaced.
typedef struct Group {
    const char *name;   // for messages: "inside the node"
    int rank, size;     // this rank's index and the number of ranks
    int first, stride;  // member i is rank first + i * stride of the world
    MPI_Comm mpi;       // host-side collectives; MPI_COMM_NULL before mesh_open
    Comm *comm;         // device collectives; NULL in a group of one and before comm_open
} Group;

enum { MESH_GROUPS = 11 };
typedef struct Mesh {
    union {
        struct {
            Group world;
            Group tp, pp, dp;  // tensor, pipeline and data parallel
            Group node, rail;  // the two levels of dp: ranks of one node; one rank per node
            Group embedding;   // first and last pipeline stage; one rank elsewhere
            // The two levels over which weights are sharded, set by mesh_shard_weights. Otherwise
            // only this rank.
            Group shards, shard_rail;
            // Ranks of this replica group; one rank of each replica group. Set by
            // mesh_make_replica_groups. Otherwise only this rank, without communicators.
            Group replica_group, replica_groups;
        };
        Group group[MESH_GROUPS];  // the same, for loops
    };
    int nodes, per_node;  // number of nodes, ranks per node; this rank is in node world.rank / per_node
} Mesh;

// Builds the groups without MPI. host_of_rank: (world_size) numbers in [0, world_size), equal for
// ranks of one host; not read if gpus_per_node (ranks per node) is given; 0: nodes are hosts.
// EXIT_USAGE: sizes that don't divide. EXIT_ENVIRONMENT: hosts with unequal numbers of ranks or
// non-consecutive ranks.
bool mesh_build(Mesh *mesh, int world_rank, int world_size, const int *host_of_rank, int gpus_per_node,
                int tp_size, int pp_size, Error *err);
// Shards weights over the ranks of a node, or with all_nodes over all data-parallel ranks. Weight
// gathers get their own communicators, so that they never wait for other messages. Without MPI,
// before mesh_open.
void mesh_shard_weights(Mesh *mesh, bool all_nodes);
// Makes each node a replica group that trains independently (--local-steps): dp is limited to the
// node, rail is this rank alone, and replica groups communicate through `replica_groups`. Without
// MPI, before mesh_open. EXIT_USAGE: nodes do not hold whole models.
bool mesh_make_replica_groups(Mesh *mesh, Error *err);
// Returns the group that computes the step status together: the replica group, or all ranks if
// there is only one.
const Group *mesh_status_group(const Mesh *mesh);
// Returns this rank's index among all data-parallel ranks of all replica groups, and their number.
int mesh_data_rank(const Mesh *mesh);
int mesh_data_ranks(const Mesh *mesh);
// Returns the mesh of another rank of the same world. Without MPI.
Mesh mesh_of_rank(const Mesh *mesh, int rank);
// Removes a lost node from a mesh of replica groups, as seen by one of the remaining ranks. `world`
// and `replica_groups` lose their communicators; groups within the node keep theirs.
void mesh_remove_node(Mesh *mesh, int node);
// Creates the communicators. Collective over world, whose ranks must agree on the result.
// EXIT_ENVIRONMENT on a rank whose groups differ from the computed ones, because ranks were started
// with different flags.
bool mesh_open(Mesh *mesh, Peers world, Error *err);
// Frees the communicators. Collective. No-op before mesh_open.
void mesh_close(Mesh *mesh);

// Returns the world rank of member i of the group of this kind that rank `of` belongs to.
int group_peer(const Group *kind, int of, int i);

LLMC_END
