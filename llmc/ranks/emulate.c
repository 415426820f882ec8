// Emulated nodes: see emulate.h.
#include "llmc/ranks/emulate.h"

#include <stdio.h>
#include <stdlib.h>

void emulate_nodes(const Topology *topology, const Launch *launch) {
    char id[300];
    int end = snprintf(id, sizeof id, "%s-node%d", launch->host_name, topology->node);
    if (topology->device_turn) snprintf(id + end, sizeof id - (size_t)end, "-%d", topology->device_turn);
    setenv("NCCL_HOSTID", id, 1);
    // No way around the sockets: no plugin, no InfiniBand, no neighbour's NVLink, no fabric that spans machines. Several sockets and threads per connection, without
    // which one core's copying limits what a node sends; a message is cut into 64 KiB for each socket, so NCCL's chunk of 128 KiB would keep two of sixteen busy.
    static const char *const settings[][2] = {{"NCCL_NET", "Socket"},           {"NCCL_IB_DISABLE", "1"},      {"NCCL_PXN_DISABLE", "1"},       {"NCCL_MNNVL_ENABLE", "0"},
                                              {"NCCL_SOCKET_NTHREADS", "4"}, {"NCCL_NSOCKS_PERTHREAD", "4"}, {"NCCL_P2P_NET_CHUNKSIZE", "1048576"}};
    for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++) setenv(settings[i][0], settings[i][1], 0);
    bool one_host = true;
    for (int r = 1; r < launch->size; r++) one_host = one_host && launch->host_of_rank[r] == launch->host_of_rank[0];
    if (one_host) setenv("NCCL_SOCKET_IFNAME", "lo", 0);
}
