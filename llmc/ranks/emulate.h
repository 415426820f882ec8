// Nodes inside one machine that are real for NCCL: --emulate-nodes. Called by train_gpt.cu before the first use of NCCL.
#pragma once
#include "llmc/ranks/launch.h"
#include "llmc/ranks/topology.h"
LLMC_BEGIN

// Sets this process's environment so that NCCL takes the topology's nodes for separate machines, whose traffic goes through sockets: NCCL_HOSTID names host and
// node. Ranks of a node that topology_share_devices, to be called before, has put on one device are separate machines to NCCL too, which refuses them otherwise.
// What a user has set already stays, but for NCCL_HOSTID. Where all ranks are on one machine the sockets are the loopback's, which
// scripts/emulate_network.sh gives the speed of a network.
void emulate_nodes(const Topology *topology, const Launch *launch);

LLMC_END
