// Assigns each rank one of its host's devices, and makes NCCL treat groups of ranks on one machine
// as separate nodes (--emulate-nodes).
#pragma once
#include "llmc/ranks/launch.h"
#include "llmc/ranks/mesh.h"
LLMC_BEGIN

typedef struct OwnDevice {
    int host_ranks;  // number of ranks on this host
    int index;       // index of the device on this host
    int sharers;     // number of ranks that share the device
    int turn;        // index of this rank among the ranks of its node that share the device
} OwnDevice;

// Assigns devices in rank order, without sharing. host: the ranks of this host.
OwnDevice devices_in_order(MPI_Comm host);
// Chooses the device to open. Differs from devices_in_order in two cases: ranks of emulated nodes
// share devices if the host has too few, and a launcher may show each rank only its own device.
// Collective over host, before any device is opened.
OwnDevice devices_choose(Peers host, const Mesh *mesh, bool emulated_nodes);

// Returns the number of ranks that share the memory this rank allocates from.
int devices_memory_sharers(const OwnDevice *own);

// Lets ranks of emulated nodes share devices if the host has too few. The device count must divide
// the ranks per node, or vice versa; otherwise nothing changes, and device_open reports the error.
void devices_share(OwnDevice *own, const Mesh *mesh, int devices, bool emulated_nodes);
// The devices that a rank sees. srun --gpus-per-task=1 or CUDA_VISIBLE_DEVICES may hide others.
typedef struct VisibleDevices {
    int count;
    char first[32];  // device_identity of device 0; empty: unknown
} VisibleDevices;
// If every rank of this host sees exactly one device and all these devices differ,
// each rank takes its device. of_rank: (host_ranks).
void devices_take_visible(OwnDevice *own, const VisibleDevices *of_rank);

// Sets environment variables so that NCCL treats the mesh's nodes as separate machines connected by
// sockets. Variables set by the user are kept, except NCCL_HOSTID, which is set to the host and
// node. Ranks of a node that share a device get different IDs, because NCCL allows only one rank
// per device. If all ranks are on one machine, NCCL uses the loopback interface, which
// scripts/emulate_network.sh can slow down. Call before the first use of NCCL.
void devices_emulate_nodes(const OwnDevice *own, const Mesh *mesh, const Launch *launch);

LLMC_END
