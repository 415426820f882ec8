// Ranks and devices: see placement.h.
#include "llmc/placement.h"

#include <stdlib.h>

#include "llmc/device.h"

void placement_choose_device(Peers host, Topology *topology, bool emulated_nodes) {
    VisibleDevices own = {device_count(), ""};
    topology_share_devices(topology, own.count, emulated_nodes);
    if (device_is_host() || topology->host_ranks == 1) return;
    device_identity(0, own.first, sizeof own.first);
    VisibleDevices *all = (VisibleDevices *)xcalloc((size_t)topology->host_ranks, sizeof own, "the host's devices");
    peers_gather(host, &own, all, (int)sizeof own, MPI_BYTE);
    topology_take_own_device(topology, all);
    free(all);
}

void placement_report_exchange(Log *log, Peers world, const Error *not_shared, bool shared, bool asked) {
    Error why = *not_shared;
    int without = why.code != 0, ranks;
    MPI_Comm_size(world.comm, &ranks);
    peers_reduce(world, &without, 1, MPI_INT, MPI_SUM);
    peers_agree(world, !why.code, &why, NULL);
    if (without == 0) {
        if (shared) log_line(log, "inside a node messages are fetched by the GPUs' copy engines");
    } else if (without < ranks) {
        log_line(log, "WARNING: inside a node messages are fetched by the GPUs' copy engines, but on %d of %d ranks they travel through NCCL: %s", without, ranks, why.what);
    } else if (asked) {
        log_line(log, "WARNING: --node-exchange copies has no effect: %s", why.what);
    } else if (!device_is_host()) {
        log_line(log, "inside a node messages travel through NCCL: %s", why.what);
    }
}
