// Who is where: ranks, nodes and the groups that communication runs in. Pure, given the hosts of all ranks. Megatron's rank order:
// rank = pp * T * D + dp * T + tp. Built once by main; read by comm, zero, placement.c, emulate.c, sentry.c.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

typedef struct Topology {
    int world_rank, world_size;
    int tp_size, pp_size, dp_size;  // only 1 is accepted for tp and pp, but ranks are computed for any
    int tp_rank, pp_rank, dp_rank;
    int nodes, per_node;            // N and D of this rank's data-parallel group: dp_size = nodes * per_node
    int node, local;                // dp_rank = node * per_node + local
    int host_ranks;                 // ranks on this rank's real host
    int device;                     // local device index on the real host: its place among them, or topology_share_devices'
    int device_sharers;             // ranks that use this device
    int device_turn;                // of its own node's: this rank's place among them, 0 unless a node has more ranks than devices
    bool borders_by_flag;           // node borders were set by --gpus-per-node, not by hosts
} Topology;

// host_of_rank: (world_size) an integer naming each rank's host. gpus_per_node: ranks per node, 0 = the real hosts.
// Errors: EXIT_USAGE for sizes that do not divide; EXIT_ENVIRONMENT for an uneven number of ranks per node or a node whose ranks are not consecutive.
bool topology_build(Topology *topology, int world_rank, int world_size, const int *host_of_rank, int gpus_per_node, int tp_size,
                    int pp_size, Error *err);
// Where a host has more ranks than devices: those of emulated nodes (emulate.h) may share devices in turn, if one of the two numbers, the host's devices and a
// node's ranks, is a multiple of the other.
// Otherwise nothing changes, and device_open says what is wrong.
void topology_share_devices(Topology *topology, int devices, bool emulated_nodes);

// What a rank sees of its host's devices: a launcher (srun --gpus-per-task=1, a wrapper that sets CUDA_VISIBLE_DEVICES) may show each rank its own only.
typedef struct VisibleDevices {
    int count;
    char first[32];  // device 0's name on its host (device_identity), empty: unknown
} VisibleDevices;

// of_rank: (host_ranks) what the ranks of this host see. Where each sees a single device, and no two the same, a rank takes the one it sees, for itself. After
// topology_share_devices, which takes what one rank sees for all that there is.
void topology_take_own_device(Topology *topology, const VisibleDevices *of_rank);

LLMC_END
