// Which of its host's devices a rank takes. Called by train_gpt.cu and dev/bench/sync_only.c.
#pragma once
#include "llmc/ranks/peers.h"
#include "llmc/ranks/topology.h"
LLMC_BEGIN

// Sets topology->device: this rank's place among its host's ranks, if those of emulated nodes do not share devices (topology_share_devices) and no launcher shows
// each rank only one of its own (topology_take_own_device). Collective over host, the ranks of this host. Before the device is opened.
void placement_choose_device(Peers host, Topology *topology, bool emulated_nodes);

LLMC_END
