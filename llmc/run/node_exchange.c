// Logs the transport of intra-node messages: see node_exchange.h.
#include "llmc/run/node_exchange.h"

#include "llmc/device.h"

void node_exchange_report(Log *log, Peers world, const Error *not_shared, bool shared, bool asked) {
    Error why = *not_shared;
    int without = why.code != 0, ranks;
    MPI_Comm_size(world.comm, &ranks);
    peers_all_reduce(world, &without, 1, MPI_INT, MPI_SUM);
    peers_agree(world, !why.code, &why, NULL);
    if (without == 0) {
        if (shared) log_line(log, "intra-node messages are fetched by the GPUs' copy engines");
    } else if (without < ranks) {
        log_line(log,
                 "WARNING: intra-node messages are fetched by the GPUs' copy engines, but %d of %d ranks use "
                 "NCCL: %s",
                 without, ranks, why.what);
    } else if (asked) {
        log_line(log, "WARNING: --node-exchange copies has no effect: %s", why.what);
    } else if (!device_kind()->only_way) {
        log_line(log, "intra-node messages use NCCL: %s", why.what);
    }
}
