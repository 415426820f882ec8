// Process groups in Megatron-LM's rank order:
//     rank = pp * T * D + dp * T + tp
// Groups are computed without MPI, for --plan and tests. mesh_open creates their communicators.
#pragma once
#include "llmc/ranks/peers.h"
LLMC_BEGIN

// State of a backend for messages within one group (llmc/comm.h).
typedef struct Comm Comm;

// A process group. Its ranks in the world are equally spaced.
typedef struct Group {
    const char *name;   // for messages, such as "inside the node"
    int rank, size;     // this rank's index in the group, number of ranks in the group
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
            Group node, rail;  // the two levels of dp: ranks of one node, and one rank per node
            Group embedding;   // first and last pipeline stage; on other stages only this rank
            // Levels over which weights are sharded (mesh_shard_weights); else only this rank.
            Group shards, shard_rail;
            // Ranks of this replica group, and one rank of each replica group
            // (mesh_make_replica_groups); else only this rank, without communicators.
            Group replica_group, replica_groups;
        };
        Group group[MESH_GROUPS];  // the same, for loops
    };
    int nodes, per_node;  // number of nodes, ranks per node; this rank's node is world.rank / per_node
} Mesh;

// Computes the groups without MPI. gpus_per_node: ranks per node; 0: hosts are nodes. host_of_rank:
// (world_size) indices in [0, world_size), equal for ranks of the same host; only read if
// gpus_per_node is 0. EXIT_USAGE: sizes that do not divide each other. EXIT_ENVIRONMENT: hosts with
// different numbers of ranks, or with ranks that are not consecutive.
bool mesh_build(Mesh *mesh, int world_rank, int world_size, const int *host_of_rank, int gpus_per_node,
                int tp_size, int pp_size, Error *err);
// Shards weights over the ranks of a node, or with all_nodes over all data-parallel ranks. Weight
// gathers get their own communicators, so they never wait for other messages. Call before
// mesh_open.
void mesh_shard_weights(Mesh *mesh, bool all_nodes);
// Makes each node a replica group that trains independently (--local-steps): dp is limited to the
// node, rail contains only this rank, and replica groups communicate through `replica_groups`. Call
// before mesh_open. EXIT_USAGE: nodes do not hold whole models.
bool mesh_make_replica_groups(Mesh *mesh, Error *err);
// Returns the group that computes the step status: the replica group, or world without local steps.
const Group *mesh_status_group(const Mesh *mesh);
// Return this rank's index among the data-parallel ranks of all replica groups, and their number.
int mesh_data_rank(const Mesh *mesh);
int mesh_data_ranks(const Mesh *mesh);
// Returns the mesh of another rank of the same world. Needs no MPI.
Mesh mesh_of_rank(const Mesh *mesh, int rank);
// Removes a lost node from a mesh of replica groups; called on the remaining ranks. `world` and
// `replica_groups` lose their communicators; groups within the node keep theirs.
void mesh_remove_node(Mesh *mesh, int node);
// Creates the communicators. Collective over world; the caller must combine the results of all
// ranks. EXIT_ENVIRONMENT on a rank whose communicators differ from the computed groups, because
// ranks were started with different flags.
bool mesh_open(Mesh *mesh, Peers world, Error *err);
// Frees the communicators. Collective. No-op before mesh_open.
void mesh_close(Mesh *mesh);

// Returns the world rank of member i of the group that contains rank `of`. kind: this rank's group.
int group_peer(const Group *kind, int of, int i);

LLMC_END
