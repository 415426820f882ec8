// Rank arithmetic: see topology.h.
#include "llmc/ranks/topology.h"

#include <stdlib.h>
#include <string.h>

// Ranks of rank r's host, and r's place among them.
static void host_place(const int *host_of_rank, int size, int rank, int *place, int *on_host) {
    *place = *on_host = 0;
    for (int r = 0; r < size; r++) {
        if (host_of_rank[r] != host_of_rank[rank]) continue;
        if (r < rank) (*place)++;
        (*on_host)++;
    }
}

// The real hosts as nodes: each must hold the same number of consecutive ranks.
static bool ranks_per_host(const int *host_of_rank, int size, int *per_host, Error *err) {
    int place;
    host_place(host_of_rank, size, 0, &place, per_host);
    for (int r = 0; r < size; r++) {
        int on_host;
        host_place(host_of_rank, size, r, &place, &on_host);
        if (on_host != *per_host) {
            return error_set(err, EXIT_ENVIRONMENT, "rank 0's node has %d ranks but rank %d's has %d; start the same number of ranks on every node", *per_host, r, on_host);
        }
        if (host_of_rank[r] != host_of_rank[r - r % *per_host]) {
            return error_set(err, EXIT_ENVIRONMENT, "ranks of one node are not consecutive; map ranks by node (mpirun --map-by slot)");
        }
    }
    return true;
}

bool topology_build(Topology *t, int world_rank, int world_size, const int *host_of_rank, int gpus_per_node, int tp_size, int pp_size, Error *err) {
    Topology fresh = {0};
    *t = fresh;
    if (tp_size < 1 || pp_size < 1 || world_size % (tp_size * pp_size)) {
        return error_set(err, EXIT_USAGE, "%d ranks cannot be split into tensor parallel size %d x pipeline parallel size %d", world_size, tp_size, pp_size);
    }
    int per_host = gpus_per_node;
    if (gpus_per_node < 0 || (gpus_per_node && world_size % gpus_per_node)) {
        return error_set(err, EXIT_USAGE, "%d ranks cannot be split into nodes of %d; --gpus-per-node must divide the number of ranks", world_size, gpus_per_node);
    }
    if (!gpus_per_node && !ranks_per_host(host_of_rank, world_size, &per_host, err)) return false;
    t->world_rank = world_rank;
    t->world_size = world_size;
    t->tp_size = tp_size;
    t->pp_size = pp_size;
    t->dp_size = world_size / (tp_size * pp_size);
    t->tp_rank = world_rank % tp_size;
    t->dp_rank = world_rank / tp_size % t->dp_size;
    t->pp_rank = world_rank / (tp_size * t->dp_size);
    // A node's ranks of one data-parallel group: those of its ranks that share tp and pp.
    t->per_node = per_host >= tp_size ? per_host / tp_size : 1;
    if (t->per_node > t->dp_size) t->per_node = t->dp_size;
    if (per_host % tp_size && tp_size % per_host) {
        return error_set(err, EXIT_USAGE, "tensor parallel size %d does not fit nodes of %d ranks", tp_size, per_host);
    }
    if (t->dp_size % t->per_node) {
        return error_set(err, EXIT_USAGE, "a data-parallel group of %d ranks cannot be split into nodes of %d", t->dp_size, t->per_node);
    }
    t->nodes = t->dp_size / t->per_node;
    t->node = t->dp_rank / t->per_node;
    t->local = t->dp_rank % t->per_node;
    t->borders_by_flag = gpus_per_node != 0;
    t->device_sharers = 1;
    t->device_turn = 0;
    host_place(host_of_rank, world_size, world_rank, &t->device, &t->host_ranks);
    return true;
}

void topology_take_own_device(Topology *t, const VisibleDevices *of_rank) {
    for (int a = 0; a < t->host_ranks; a++) {
        if (of_rank[a].count != 1 || !of_rank[a].first[0]) return;
        for (int b = 0; b < a; b++) {
            if (!strcmp(of_rank[a].first, of_rank[b].first)) return;
        }
    }
    t->device = 0;
    t->device_sharers = 1;
    t->device_turn = 0;
}

void topology_share_devices(Topology *t, int devices, bool emulated_nodes) {
    if (!emulated_nodes || t->host_ranks <= devices || devices < 1) return;
    if (devices % t->per_node && t->per_node % devices) return;
    t->device_turn = t->local / devices;
    t->device %= devices;
    t->device_sharers = (t->host_ranks - t->device + devices - 1) / devices;
}
