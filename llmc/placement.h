// Which of its host's devices a rank takes, and how it reaches those of the other ranks of its node. Called by train_gpt.cu and dev/bench/sync_only.c.
#pragma once
#include "llmc/log.h"
#include "llmc/peers.h"
#include "llmc/topology.h"
LLMC_BEGIN

// Sets topology->device: this rank's place among its host's ranks, if those of emulated nodes do not share devices (topology_share_devices) and no launcher shows
// each rank only one of its own (topology_take_own_device). Collective over host, the ranks of this host. Before the device is opened.
void placement_choose_device(Peers host, Topology *topology, bool emulated_nodes);

// Tells the log how messages travel inside a node (--node-exchange), and if some ranks cannot do what others do, which slows all. Collective over world.
// not_shared: why this rank's node does not fetch messages (zero.h); shared: it would, if it could; asked: the user has asked for it.
void placement_report_exchange(Log *log, Peers world, const Error *not_shared, bool shared, bool asked);

LLMC_END
