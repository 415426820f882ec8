// Ranks and devices: see placement.h.
#include "llmc/ranks/placement.h"

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
