// How messages travel inside a node, told to the user at the start of a run. Called by report.c
// and dev/bench/sync_only.c.
#pragma once
#include "llmc/log/log.h"
#include "llmc/ranks/peers.h"
LLMC_BEGIN

// Writes one line on how messages travel inside a node (--node-exchange). A WARNING where some
// ranks cannot do what the others do, which slows all. Collective over world. not_shared: why this
// rank's node does not fetch messages (zero.h). shared: it would, if it could. asked: the user has
// asked for it.
void node_exchange_report(Log *log, Peers world, const Error *not_shared, bool shared, bool asked);

LLMC_END
