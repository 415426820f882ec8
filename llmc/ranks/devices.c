// Device assignment: see devices.h.
#include "llmc/ranks/devices.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/device.h"

OwnDevice devices_in_order(MPI_Comm host) {
    OwnDevice own = {.sharers = 1};
    MPI_Comm_size(host, &own.host_ranks);
    MPI_Comm_rank(host, &own.index);
    return own;
}

int devices_memory_sharers(const OwnDevice *own) {
    return device_kind()->own_memory ? own->sharers : own->host_ranks;
}

void devices_share(OwnDevice *own, const Mesh *mesh, int devices, bool emulated_nodes) {
    assert(own && mesh && own->host_ranks > 0);
    if (!emulated_nodes || own->host_ranks <= devices || devices < 1) return;
    if (devices % mesh->per_node && mesh->per_node % devices) return;
    own->turn = mesh->world.rank % mesh->per_node / devices;
    own->index %= devices;
    own->sharers = (own->host_ranks - own->index + devices - 1) / devices;
}

void devices_take_visible(OwnDevice *own, const VisibleDevices *of_rank) {
    assert(own->host_ranks > 0 && of_rank);
    for (int a = 0; a < own->host_ranks; a++) {
        if (of_rank[a].count != 1 || !of_rank[a].first[0]) return;
        for (int b = 0; b < a; b++) {
            if (!strcmp(of_rank[a].first, of_rank[b].first)) return;
        }
    }
    own->index = own->turn = 0;
    own->sharers = 1;
}

// Hardware queues that a rank needs: one for each of its streams. With tensor or pipeline
// parallelism, NCCL's streams wait for other ranks too, so it needs all queues that CUDA offers.
enum { QUEUES = 12, QUEUES_OF_PARTS = 32 };

OwnDevice devices_choose(Peers host, const Mesh *mesh, bool emulated_nodes) {
    OwnDevice own = devices_in_order(host.comm);
    bool parts = mesh->tp.size > 1 || mesh->pp.size > 1;
    VisibleDevices seen = {device_count(parts ? QUEUES_OF_PARTS : QUEUES), ""};
    devices_share(&own, mesh, seen.count, emulated_nodes);
    if (!device_kind()->numbered || own.host_ranks == 1) return own;
    device_identity(0, seen.first, sizeof seen.first);
    size_t ranks = (size_t)own.host_ranks;
    VisibleDevices *all = xcalloc(ranks, sizeof seen, "device identities");
    peers_all_gather(host, &seen, all, (int)sizeof seen, MPI_BYTE);
    devices_take_visible(&own, all);
    free(all);
    return own;
}

static bool on_one_machine(const Launch *launch) {
    for (int r = 1; r < launch->size; r++) {
        if (launch->host_of_rank[r] != launch->host_of_rank[0]) return false;
    }
    return true;
}

void devices_emulate_nodes(const OwnDevice *own, const Mesh *mesh, const Launch *launch) {
    // The first four variables leave sockets as the only path: no plugin, no InfiniBand, no NVLink.
    // The next two set several threads and sockets per connection, because with one thread the copy
    // speed of a core limits the bandwidth of a node. The last one increases chunks: NCCL sends 64
    // KiB per socket, so the default of 128 KiB would use only two of the sixteen sockets.
    static const char *const settings[][2] = {{"NCCL_NET", "Socket"},
                                              {"NCCL_IB_DISABLE", "1"},
                                              {"NCCL_PXN_DISABLE", "1"},
                                              {"NCCL_MNNVL_ENABLE", "0"},
                                              {"NCCL_SOCKET_NTHREADS", "4"},
                                              {"NCCL_NSOCKS_PERTHREAD", "4"},
                                              {"NCCL_P2P_NET_CHUNKSIZE", "1048576"}};
    char id[300], turn[16] = "";
    if (own->turn) snprintf(turn, sizeof turn, "-%d", own->turn);
    snprintf(id, sizeof id, "%s-node%d%s", launch->host_name, mesh->world.rank / mesh->per_node, turn);
    setenv("NCCL_HOSTID", id, 1);
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        setenv(settings[i][0], settings[i][1], 0);
    }
    if (on_one_machine(launch)) setenv("NCCL_SOCKET_IFNAME", "lo", 0);
}
