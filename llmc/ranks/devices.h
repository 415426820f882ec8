// Which of its host's devices a rank takes; and nodes inside one machine that NCCL takes for real
// ones (--emulate-nodes). Called by llmc/run/setup.c, dev/bench/sync_only.c and tests that are
// programs of ranks.
#pragma once
#include "llmc/ranks/launch.h"
#include "llmc/ranks/mesh.h"
LLMC_BEGIN

typedef struct OwnDevice {
    int host_ranks;  // ranks on this rank's host
    int index;       // of the device among the host's
    int sharers;     // ranks that use it
    int turn;        // this rank's place among those of its own node that use it
} OwnDevice;

// A device for each rank: the host's devices in the order of its ranks. host: the ranks of this
// host.
OwnDevice devices_in_order(MPI_Comm host);
// The device that a rank is to open, other than devices_in_order says in two cases. Ranks of
// emulated nodes share devices where a host has too few. And a launcher may show each rank its own
// device only. Collective over host, before any device is opened.
OwnDevice devices_choose(Peers host, const Mesh *mesh, bool emulated_nodes);

// How many ranks draw on the memory that this rank allocates from.
int devices_memory_sharers(const OwnDevice *own);

// The first case. Ranks take the devices in turn if, of the host's devices and a node's ranks, one
// number is a multiple of the other. Else nothing changes, and device_open says what is wrong.
void devices_share(OwnDevice *own, const Mesh *mesh, int devices, bool emulated_nodes);
// What a rank sees of its host's devices. srun --gpus-per-task=1 or CUDA_VISIBLE_DEVICES may hide
// some.
typedef struct VisibleDevices {
    int count;
    char first[32];  // name of device 0 on its host (device_identity); empty: unknown
} VisibleDevices;
// The second case. of_rank: (host_ranks) what the ranks of this host see. Where each sees one
// device, and no two the same, a rank takes the one it sees, for itself alone.
void devices_take_visible(OwnDevice *own, const VisibleDevices *of_rank);

// Sets this process's environment so that NCCL takes the mesh's nodes for separate machines, with
// sockets between them. NCCL_HOSTID names host and node. Ranks of one node that share a device get
// names of their own, because NCCL refuses them otherwise. Other variables that the user has set
// stay. Where all ranks are on one machine the sockets are the loopback's, which
// scripts/emulate_network.sh slows down to a network. Before the first use of NCCL.
void devices_emulate_nodes(const OwnDevice *own, const Mesh *mesh, const Launch *launch);

LLMC_END
