// Logs at startup how messages are exchanged inside a node. Called by run_report.c and
// dev/bench/sync_only.c.
#pragma once
#include "llmc/log/log.h"
#include "llmc/ranks/peers.h"
LLMC_BEGIN

// Logs the transport of intra-node messages: copy engines or NCCL (--node-exchange). Warns if only
// some ranks can use copy engines, which slows down all. Collective over world. not_shared: why
// this rank's node does not use copy engines (zero_node_shares). shared: its return value. asked:
// the user has requested copy engines.
void node_exchange_report(Log *log, Peers world, const Error *not_shared, bool shared, bool asked);

LLMC_END
