// Copies among the GPUs of one node: see peer_memory.h.
//
// Each rank reads its messages from the other ranks' memory. The barrier before the reads waits
// until all messages are written; the barrier after them allows the owners to overwrite the
// messages.
//
// Barriers are numbered. At a barrier, each rank writes the barrier's number into its flag in every
// other rank's memory and waits until the others' flags in its own memory reach this number. A fast
// rank's flag may already hold the next number, so the wait compares with >=, modulo 2^32. Both
// steps are stream operations (cuStreamBatchMemOp), which block neither the host nor an SM.
//
// Like an NCCL kernel, a barrier waits forever for a dead rank; the watchdog (heartbeat.h) ends
// such a job.
#include <cuda.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/cuda/peer_memory.h"
#include "llmc/ranks/heartbeat.h"
#include "llmc/ranks/peers.h"

enum { MAX_PEERS = 16 };

// Driver functions, looked up in libcuda.so at run time: a program linked against libcuda.so would
// not start on a machine without a driver.
typedef CUresult (*BatchMemOp)(CUstream, unsigned, CUstreamBatchMemOpParams *, unsigned);
typedef CUresult (*AddressRange)(CUdeviceptr *, size_t *, CUdeviceptr);

// A memory range that every rank of the node shares with the others.
typedef struct Region {
    uint8_t *of[MAX_PEERS];   // address of rank r's range in this process
    void *mapped[MAX_PEERS];  // IPC mapping that contains the range, NULL for this rank's own
    size_t bytes;
} Region;

struct PeerMemory {
    Device *device;
    const Site *site;
    Peers node;  // without a site, because the functions below report their waits themselves
    int rank, size;
    BatchMemOp batch;
    AddressRange address_range;
    Region flags;  // (size) uint32_t, flag i is written by rank i; bytes is 0 if nothing is shared
    Region region[COMM_PIECES];
    int regions;
    uint32_t barrier;  // number of the last barrier
};

static bool cuda_ok(cudaError_t status, const char *what, Error *err) {
    if (status == cudaSuccess) return true;
    cudaGetLastError();  // clears the error, which the next kernel launch would report otherwise
    return system_error(err, "%s failed: %s", what, cudaGetErrorString(status));
}

// --- mapping memory ------------------------------------------------------------------------------

// Describes a rank's range to the other ranks.
typedef struct Offer {
    cudaIpcMemHandle_t handle;  // of the allocation that contains the range
    uint64_t offset, bytes;     // position of the range in that allocation
    uint64_t mark;              // written at the start of the range to verify the peers' mappings
} Offer;

static bool make_offer(const PeerMemory *n, void *memory, size_t bytes, Offer *offer, Error *err) {
    CUdeviceptr base = 0;
    size_t whole = 0;
    memset(offer, 0, sizeof *offer);
    if (bytes < sizeof offer->mark) {
        return system_error(err, "a shared memory range has %zu bytes, but needs at least %zu", bytes,
                            sizeof offer->mark);
    }
    if (n->address_range(&base, &whole, (CUdeviceptr)memory) != CUDA_SUCCESS) {
        return system_error(err, "cannot share %p: cudaMalloc did not allocate it", memory);
    }
    offer->offset = (uint64_t)((CUdeviceptr)memory - base);
    offer->bytes = bytes;
    offer->mark = 0x9E3779B97F4A7C15u * (uint64_t)(n->rank + 1) ^ (uint64_t)(uintptr_t)memory;
    if (!cuda_ok(cudaIpcGetMemHandle(&offer->handle, (void *)base), "cudaIpcGetMemHandle", err)) return false;
    cudaError_t written = cudaMemcpy(memory, &offer->mark, sizeof offer->mark, cudaMemcpyHostToDevice);
    if (written == cudaSuccess) written = cudaDeviceSynchronize();
    return cuda_ok(written, "writing into shared memory", err);
}

static void close_region(Region *region) {
    for (int r = 0; r < MAX_PEERS; r++) {
        if (region->mapped[r]) cuda_ok(cudaIpcCloseMemHandle(region->mapped[r]), "closing", NULL);
    }
    memset(region, 0, sizeof *region);
}

static bool reach(Region *region, const Offer *offer, int r, Error *err) {
    uint64_t mark = 0;
    if (offer->bytes != region->bytes) {
        return system_error(err, "rank %d of the node shares %zu bytes, but this rank shares %zu", r,
                            (size_t)offer->bytes, region->bytes);
    }
    cudaError_t done = cudaIpcOpenMemHandle(&region->mapped[r], offer->handle,
                                            cudaIpcMemLazyEnablePeerAccess);
    if (!cuda_ok(done, "cudaIpcOpenMemHandle", err)) return false;
    region->of[r] = (uint8_t *)region->mapped[r] + offer->offset;
    done = cudaMemcpy(&mark, region->of[r], sizeof mark, cudaMemcpyDeviceToHost);
    if (!cuda_ok(done, "reading another GPU's memory", err)) return false;
    return mark == offer->mark ||
           system_error(err, "reading the memory of rank %d of the node gives wrong data", r);
}

// Maps each rank's range at `memory` into all other ranks. Collective. Maps nothing on failure.
static bool open_region(const PeerMemory *n, Region *region, void *memory, size_t bytes, Error *err) {
    Offer own, offer[MAX_PEERS];
    memset(region, 0, sizeof *region);
    region->bytes = bytes;
    region->of[n->rank] = (uint8_t *)memory;
    bool ok = make_offer(n, memory, bytes, &own, err);
    peers_all_gather(n->node, &own, offer, (int)sizeof own, MPI_BYTE);
    ok = peers_agree(n->node, ok, err, NULL);
    for (int r = 0; ok && r < n->size; r++) {
        if (r != n->rank) ok = reach(region, &offer[r], r, err);
    }
    ok = peers_agree(n->node, ok, err, NULL);  // also waits until all ranks have read the marks
    if (!ok) close_region(region);
    size_t marked = bytes < sizeof own.mark ? bytes : sizeof own.mark;
    cuda_check(n->site, cudaMemset(memory, 0, marked), "clearing shared memory");
    cuda_check(n->site, cudaDeviceSynchronize(), "clearing shared memory");
    peers_barrier(n->node);  // no rank writes into the memory before all have cleared theirs
    return ok;
}

// --- barriers ------------------------------------------------------------------------------------

// The two halves of a barrier: set_flags writes this rank's flag in the other ranks' memory, and
// await_flags waits for their flags in its own. Both fill op, which must be zeroed, and return the
// number of operations.
static unsigned set_flags(const PeerMemory *n, CUstreamBatchMemOpParams *op) {
    unsigned count = 0;
    for (int i = 1; i < n->size; i++, count++) {
        uint32_t *theirs = (uint32_t *)n->flags.of[(n->rank + i) % n->size];
        op[count].operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
        op[count].writeValue.address = (CUdeviceptr)(theirs + n->rank);
        op[count].writeValue.value = n->barrier;
    }
    return count;
}
static unsigned await_flags(const PeerMemory *n, CUstreamBatchMemOpParams *op) {
    unsigned count = 0;
    for (int i = 1; i < n->size; i++, count++) {
        uint32_t *own = (uint32_t *)n->flags.of[n->rank];
        op[count].operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
        op[count].waitValue.address = (CUdeviceptr)(own + (n->rank + i) % n->size);
        op[count].waitValue.value = n->barrier;
        op[count].waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
    }
    return count;
}

static CUresult barrier(PeerMemory *n, cudaStream_t stream) {
    CUstreamBatchMemOpParams op[2 * MAX_PEERS];
    memset(op, 0, sizeof op);
    n->barrier++;
    unsigned count = set_flags(n, op);
    count += await_flags(n, op + count);
    return n->batch(stream, count, op, 0);
}

static bool batch_ok(const PeerMemory *n, Stream *stream, unsigned count, CUstreamBatchMemOpParams *op,
                     Error *err) {
    CUresult status = n->batch(stream_handle(stream), count, op, 0);
    if (!cuda_ok(cudaStreamSynchronize(stream_handle(stream)), "cuStreamBatchMemOp", err)) return false;
    return status == CUDA_SUCCESS ||
           system_error(err, "cuStreamBatchMemOp failed: driver error %d", (int)status);
}

// Polls the other ranks' flags from the host. They may arrive after the stream that wrote them has
// completed. Returns true once all have arrived, false after PEER_TEST_SECONDS.
static bool all_flags_set(const PeerMemory *n, Error *err) {
    uint32_t flag[MAX_PEERS] = {0};
    int here = 0;
    for (double until = MPI_Wtime() + PEER_TEST_SECONDS; here < n->size;) {
        cudaError_t read = cudaMemcpy(flag, n->flags.of[n->rank], sizeof flag, cudaMemcpyDeviceToHost);
        if (!cuda_ok(read, "reading flags", err)) return false;
        while (here < n->size && (here == n->rank || flag[here] == n->barrier)) here++;
        if (here == n->size || MPI_Wtime() < until) continue;
        return system_error(err, "a flag written into another GPU's memory did not arrive within %g s",
                            PEER_TEST_SECONDS);
    }
    return true;
}

// Tests whether barriers work on these GPUs without the risk of a hang: no stream waits for a flag
// before the host has seen all of them. Collective.
static bool try_barrier(PeerMemory *n, Error *err) {
    CUstreamBatchMemOpParams op[MAX_PEERS];
    Stream *stream = stream_create(n->device, "first barrier");
    memset(op, 0, sizeof op);
    n->barrier++;
    bool ok = batch_ok(n, stream, set_flags(n, op), op, err);
    ok = peers_agree(n->node, ok, err, NULL);
    if (ok) ok = peers_agree(n->node, all_flags_set(n, err), err, NULL);
    memset(op, 0, sizeof op);
    if (ok) ok = peers_agree(n->node, batch_ok(n, stream, await_flags(n, op), op, err), err, NULL);
    stream_destroy(stream);
    return ok;
}

// --- peer memory --------------------------------------------------------------------------------

static bool on_one_host(const PeerMemory *n) {
    MPI_Comm host = peers_of_host(n->node);
    int size = 0;
    MPI_Comm_size(host, &size);
    MPI_Comm_free(&host);
    return size == n->size;
}

// Checks the requirements that do not depend on the memory to share. Collective.
static bool can_share(PeerMemory *n, int pieces, Error *err) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    n->batch = driver ? (BatchMemOp)dlsym(driver, "cuStreamBatchMemOp_v2") : NULL;
    n->address_range = driver ? (AddressRange)dlsym(driver, "cuMemGetAddressRange_v2") : NULL;
    bool ok = true;
    if (!on_one_host(n)) {
        ok = system_error(err, "the ranks of a node run on several hosts");
    } else if (n->size > MAX_PEERS) {
        ok = system_error(err, "a node has %d ranks, but at most %d can share memory", n->size, MAX_PEERS);
    } else if (!n->batch || !n->address_range) {
        ok = system_error(err, "the CUDA driver has no cuStreamBatchMemOp; update the driver");
    } else if (peer_memory_sharing(n)) {
        ok = system_error(err, "the ranks of this node already share memory; call comm_unshare first");
    } else if (pieces > COMM_PIECES) {
        ok = system_error(err, "%d memory ranges are too many to share; the limit is %d", pieces,
                          COMM_PIECES);
    }
    return peers_agree(n->node, ok, err, NULL);
}

PeerMemory *peer_memory_open(Device *device, MPI_Comm node) {
    PeerMemory *n = (PeerMemory *)xcalloc(1, sizeof *n, "the node's ranks");
    n->device = device;
    n->site = device_site(device);
    n->node = {node, 0, NULL};
    MPI_Comm_rank(node, &n->rank);
    MPI_Comm_size(node, &n->size);
    return n;
}

static void unmap_all(PeerMemory *n) {
    for (int i = 0; i < n->regions; i++) close_region(&n->region[i]);
    close_region(&n->flags);
    n->regions = 0;
    peers_barrier(n->node);  // an owner may free its memory only after all ranks have unmapped it
}

bool peer_memory_share(PeerMemory *n, void *flags, const CommPiece *piece, int pieces, Error *err) {
    heartbeat_waiting(n->site, true);
    // Pending kernels might use the memory, whose first bytes are overwritten below.
    cuda_check(n->site, cudaDeviceSynchronize(), "synchronizing before sharing memory");
    bool ok = can_share(n, pieces, err);
    if (ok) {
        cuda_check(n->site, cudaMemset(flags, 0, COMM_FLAG_BYTES), "clearing flags");
        n->barrier = 0;
        ok = open_region(n, &n->flags, flags, COMM_FLAG_BYTES, err);
        for (int i = 0; ok && i < pieces; i++) {
            if (piece[i].bytes == 0) continue;
            ok = open_region(n, &n->region[n->regions], piece[i].memory, piece[i].bytes, err);
            n->regions += ok;
        }
        ok = ok && try_barrier(n, err);
        heartbeat_waiting(n->site, true);  // again: try_barrier's stream functions reset it
        if (!ok) unmap_all(n);
    }
    heartbeat_waiting(n->site, false);
    return ok;
}

bool peer_memory_sharing(const PeerMemory *n) { return n->flags.bytes > 0; }

void peer_memory_unshare(PeerMemory *n) {
    if (!peer_memory_sharing(n)) return;
    heartbeat_waiting(n->site, true);
    unmap_all(n);
    heartbeat_waiting(n->site, false);
}

void peer_memory_close(PeerMemory *n) {
    peer_memory_unshare(n);
    free(n);
}

static const Region *region_of(const PeerMemory *n, const void *memory, size_t bytes) {
    for (int i = 0; i < n->regions; i++) {
        const uint8_t *start = n->region[i].of[n->rank], *at = (const uint8_t *)memory;
        if (at >= start && at + bytes <= start + n->region[i].bytes) return &n->region[i];
    }
    return NULL;
}

bool peer_memory_hold(const PeerMemory *n, const void *memory, size_t bytes) {
    return region_of(n, memory, bytes) != NULL;
}

uint8_t *peer_memory_of(const PeerMemory *n, int rank, const void *memory, size_t bytes) {
    const Region *region = region_of(n, memory, bytes);
    return region ? region->of[rank] + ((const uint8_t *)memory - region->of[n->rank]) : NULL;
}
uint8_t *peer_memory_flags(const PeerMemory *n, int rank) { return n->flags.of[rank]; }

// --- exchanges -----------------------------------------------------------------------------------

static void barrier_or_end(PeerMemory *n, Stream *stream) {
    CUresult status = barrier(n, stream_handle(stream));
    if (status == CUDA_SUCCESS) return;
    heartbeat_claim_exit_in_turn(n->site);  // a broken link fails the barriers of all ranks
    fatal(n->site, EXIT_COMMUNICATION,
          "cuStreamBatchMemOp failed: driver error %d; run again with --node-exchange nccl", (int)status);
}

// Exits with EXIT_COMMUNICATION, like a failure of NCCL: a restart may help.
static void copy_failed(const PeerMemory *n, int from, cudaError_t status) {
    heartbeat_claim_exit_in_turn(n->site);  // every rank that reads this memory fails
    fatal(n->site, EXIT_COMMUNICATION,
          "copying from the GPU of rank %d of the node failed: %s (%s); check nvidia-smi and dmesg, or run "
          "again with --node-exchange nccl",
          from, cudaGetErrorString(status), cudaGetErrorName(status));
}

// Copies one slot of `bytes` bytes from every other rank r into slot r of `to`. The slot is read
// from rank r's copy of `memory` (same offset in the shared range); its index is `slot`, or r if
// slot is -1. Each rank starts with its successor, so that no GPU is read by several ranks at once.
// All copies run on one stream: concurrent copies were measured to be slower.
static void fetch(PeerMemory *n, uint8_t *to, const void *memory, size_t bytes, int slot, Stream *stream) {
    const Region *region = region_of(n, memory, (size_t)n->size * bytes);
    size_t place = (size_t)((const uint8_t *)memory - region->of[n->rank]);
    heartbeat_waiting(n->site, true);  // with a full queue, enqueuing blocks until the peers arrive
    barrier_or_end(n, stream);
    for (int i = 1; i < n->size; i++) {
        int from = (n->rank + i) % n->size;
        const uint8_t *theirs = region->of[from] + place + (size_t)(slot < 0 ? from : slot) * bytes;
        uint8_t *slot_here = to + (size_t)from * bytes;
        cudaError_t status = cudaMemcpyAsync(slot_here, theirs, bytes, cudaMemcpyDeviceToDevice,
                                             stream_handle(stream));
        if (status != cudaSuccess) copy_failed(n, from, status);
    }
    barrier_or_end(n, stream);
    heartbeat_waiting(n->site, false);
}

void peer_memory_all_to_all(PeerMemory *n, const void *send, void *recv, size_t bytes, Stream *stream) {
    fetch(n, (uint8_t *)recv, send, bytes, n->rank, stream);
}
void peer_memory_all_gather(PeerMemory *n, void *buffer, size_t bytes, Stream *stream) {
    fetch(n, (uint8_t *)buffer, buffer, bytes, -1, stream);
}
