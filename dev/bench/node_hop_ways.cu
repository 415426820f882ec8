// Implements node_hop.h.
#include <dlfcn.h>
#include <nccl.h>
#include <stdlib.h>

#include "dev/bench/node_hop.h"
#include "llmc/cuda/peer_memory.h"
#include "llmc/ranks/heartbeat.h"
#include "llmc/ranks/peers.h"

enum { SYMMETRIC = 1 /* NCCL_WIN_COLL_SYMMETRIC */, NO_BLOCKS = 2 /* NCCL_CTA_POLICY_ZERO */ };

// ncclAlltoAll, which the oldest supported NCCL does not have. It is looked up at run time, so that
// the program builds with older headers and can report an older library.
typedef ncclResult_t (*AllToAll)(const void *, void *, size_t, ncclDataType_t, ncclComm_t, cudaStream_t);
typedef ncclResult_t (*WindowRegister)(ncclComm_t, void *, size_t, void **, int);
typedef ncclResult_t (*WindowDeregister)(ncclComm_t, void *);

struct Way {
    WayForm form;
    Device *device;
    Peers ranks;
    int rank, size;
    uint8_t *memory;  // [ send (bytes) | receive (bytes) ]
    size_t bytes;
    ncclComm_t nccl;
    AllToAll all_to_all;
    WindowDeregister deregister;
    void *window, *flags;
    PeerMemory *peers;
};

static bool by_copies(const Way *way) { return way->form.kind == WAY_COPIES; }
static bool symmetric(const Way *way) {
    return way->form.kind == WAY_SYMMETRIC || way->form.kind == WAY_ENGINES;
}
uint8_t *way_send(const Way *way) { return way->memory; }

static bool nccl_ok(ncclResult_t result, const Way *way, const char *what, Error *err) {
    if (result == ncclSuccess) return true;
    return error_set(err, EXIT_COMMUNICATION, "%s failed: %s (%s)", what, ncclGetErrorString(result),
                     ncclGetLastError(way->nccl));
}

// --- NCCL ----------------------------------------------------------------------------------------

// Sets the CTA policy, a field that NCCL's headers before 2.27 do not have.
template <class Config>
static auto ask_for_engines(Config *config, int) -> decltype(config->CTAPolicy, true) {
    return config->CTAPolicy = NO_BLOCKS, true;
}
template <class Config> static bool ask_for_engines(Config *, long) { return false; }

static bool make_communicator(Way *way, Error *err) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclUniqueId id = {};
    bool ok = way->form.kind != WAY_ENGINES || ask_for_engines(&config, 0) ||
              system_error(err, "needs NCCL 2.27 or newer, but was built with an older one");
    if (ok && way->rank == 0) ok = nccl_ok(ncclGetUniqueId(&id), way, "finding a network for NCCL", err);
    if (!peers_agree(way->ranks, ok, err, NULL)) return false;
    peers_broadcast(way->ranks, &id, sizeof id, 0);
    if (way->form.blocks) config.maxCTAs = way->form.blocks;
    ok = nccl_ok(ncclCommInitRankConfig(&way->nccl, way->size, id, way->rank, &config), way,
                 "creating the NCCL communicator", err);
    return peers_agree(way->ranks, ok, err, NULL);
}

static bool open_nccl(Way *way, Error *err) {
    size_t bytes = 2 * way->bytes;
    void *memory = NULL;
    WindowRegister enter = (WindowRegister)dlsym(RTLD_DEFAULT, "ncclCommWindowRegister");
    way->deregister = (WindowDeregister)dlsym(RTLD_DEFAULT, "ncclCommWindowDeregister");
    way->all_to_all = (AllToAll)dlsym(RTLD_DEFAULT, "ncclAlltoAll");
    bool old = !enter || !way->deregister || !way->all_to_all;
    if (!make_communicator(way, err)) return false;
    if (!symmetric(way)) memory = device_alloc(way->device, bytes, "messages", err);
    else if (old) system_error(err, "ncclAlltoAll on symmetric memory needs NCCL 2.28 or newer");
    else nccl_ok(ncclMemAlloc(&memory, bytes), way, "ncclMemAlloc", err);
    way->memory = (uint8_t *)memory;
    if (!peers_agree(way->ranks, memory != NULL, err, NULL)) return false;
    if (!symmetric(way)) return true;
    bool ok = nccl_ok(enter(way->nccl, memory, bytes, &way->window, SYMMETRIC), way, "ncclCommWindowRegister",
                      err);
    if (ok && !way->window)
        ok = system_error(err, "NCCL provides no symmetric memory here; NCCL_DEBUG=INFO shows the reason");
    return peers_agree(way->ranks, ok, err, NULL);
}

static void close_nccl(Way *way, bool broken) {
    if (broken) {
        ncclCommAbort(way->nccl);  // ends kernels that wait for a peer
    } else if (way->nccl) {
        if (way->window) way->deregister(way->nccl, way->window);
        ncclCommFinalize(way->nccl);
        ncclCommDestroy(way->nccl);
    }
    if (way_send(way) && symmetric(way)) ncclMemFree(way_send(way));
    else if (way_send(way)) device_free(way->device, way_send(way));
}

static bool exchange_nccl(Way *way, size_t slot, cudaStream_t stream, Error *err) {
    int size = way->size, rank = way->rank;
    uint8_t *send = way_send(way), *recv = send + way->bytes;
    if (symmetric(way))
        return nccl_ok(way->all_to_all(send, recv, slot, ncclUint8, way->nccl, stream), way, "ncclAlltoAll",
                       err);
    ncclResult_t result = ncclGroupStart();
    for (int i = 1; i < size; i++) {
        int to = (rank + i) % size, from = (rank + size - i) % size;
        if (result == ncclSuccess)
            result = ncclSend(send + (size_t)to * slot, slot, ncclUint8, to, way->nccl, stream);
        if (result == ncclSuccess)
            result = ncclRecv(recv + (size_t)from * slot, slot, ncclUint8, from, way->nccl, stream);
    }
    ncclResult_t end = ncclGroupEnd();  // even after a failure; otherwise later calls join the group
    return nccl_ok(result == ncclSuccess ? end : result, way, "all-to-all", err);
}

// --- copies --------------------------------------------------------------------------------------

static bool open_copies(Way *way, Error *err) {
    way->memory = (uint8_t *)device_alloc(way->device, 2 * way->bytes, "messages", err);
    way->flags = way->memory ? device_alloc(way->device, COMM_FLAG_BYTES, "flags", err) : NULL;
    if (!peers_agree(way->ranks, way->flags != NULL, err, NULL)) return false;
    CommPiece piece = {way->memory, way->bytes};
    way->peers = peer_memory_open(way->device, way->ranks.comm);
    return peer_memory_share(way->peers, way->flags, &piece, 1, err);
}

static void close_copies(Way *way) {
    if (way->peers) peer_memory_close(way->peers);
    if (way->flags) device_free(way->device, way->flags);
    if (way->memory) device_free(way->device, way->memory);
}

// --- public functions ----------------------------------------------------------------------------

Way *way_open(const WayForm *form, Device *device, MPI_Comm comm, size_t bytes, Error *err) {
    Way *way = (Way *)xcalloc(1, sizeof *way, "an all-to-all");
    way->form = *form;
    way->device = device;
    way->ranks = {comm, 0, NULL};
    way->bytes = bytes;
    MPI_Comm_rank(comm, &way->rank);
    MPI_Comm_size(comm, &way->size);
    heartbeat_waiting(device_site(device), true);
    bool ok = by_copies(way) ? open_copies(way, err) : open_nccl(way, err);
    heartbeat_waiting(device_site(device), false);
    if (ok) return way;
    way_close(way, false);
    return NULL;
}

void way_close(Way *way, bool broken) {
    heartbeat_waiting(device_site(way->device), true);
    if (by_copies(way)) close_copies(way);
    else close_nccl(way, broken);
    heartbeat_waiting(device_site(way->device), false);
    free(way);
}

bool way_exchange(Way *way, size_t slot, Stream *stream, Error *err) {
    if (!by_copies(way)) return exchange_nccl(way, slot, stream_handle(stream), err);
    peer_memory_all_to_all(way->peers, way->memory, way->memory + way->bytes, slot, stream);
    return true;
}
