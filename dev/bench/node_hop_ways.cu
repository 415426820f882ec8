// Ways to exchange messages inside one node: see node_hop.h. Linked into node_hop.
//
// The ways without NCCL meet through flags in each rank's memory, before they move bytes (the peer's message is there, its receive buffer is free) and after
// (the send buffer may be overwritten). A flag holds the number of the last meeting that its writer reached.
//   push, pull  a copy engine writes the flag as a copy of 4 bytes, and the stream waits for the own flags (cuStreamWaitValue32): no multiprocessor is used at all
//   loads       each block meets the peers' blocks of the same number, inside the kernel that loads
#include <cuda.h>
#include <dlfcn.h>
#include <nccl.h>
#include <stdlib.h>

#include "dev/bench/node_hop.h"
#include "llmc/heartbeat.h"
#include "llmc/launch.h"

enum { MOST_RANKS = 8, MOST_BLOCKS = 64, FLAGS = MOST_BLOCKS * MOST_RANKS, MEETINGS = 1 << 18 };
enum { LOAD_THREADS = 512, LOADS_AT_ONCE = 8 };  // 64 KB in flight for each block
enum { SYMMETRIC = 1 /* NCCL_WIN_COLL_SYMMETRIC */, NO_BLOCKS = 2 /* NCCL_CTA_POLICY_ZERO */ };

// Newer than the oldest NCCL served: asked of the library at run time, so that older headers do, and an older library is named.
typedef ncclResult_t (*AllToAll)(const void *, void *, size_t, ncclDataType_t, ncclComm_t, cudaStream_t);
typedef ncclResult_t (*WindowRegister)(ncclComm_t, void *, size_t, void **, int);
typedef ncclResult_t (*WindowDeregister)(ncclComm_t, void *);
typedef CUresult (*WaitValue)(CUstream, CUdeviceptr, cuuint32_t, unsigned);

// Each rank's memory as this rank sees it, one allocation: [ send (bytes) | receive (bytes) | flags (MOST_BLOCKS, MOST_RANKS) | numbers 0, 1, 2 ... (MEETINGS) ].
// Ways through NCCL have their own alone, and no flags.
typedef struct Memories {
    uint8_t *of[MOST_RANKS];
    size_t bytes;
    int rank, size;
} Memories;

struct Way {
    WayForm form;
    Device *device;
    MPI_Comm comm;
    Memories memory;
    ncclComm_t nccl;
    AllToAll all_to_all;
    WindowDeregister deregister;
    void *window;
    WaitValue wait_value;
    Stream *copy[MOST_RANKS];  // [i]: with the i-th rank after this one; 0 is none
    Event *met, *copied[MOST_RANKS];
    uint32_t meeting;          // the last one
};

static bool through_nccl(const Way *way) { return way->form.kind <= WAY_ENGINES; }
static bool symmetric(const Way *way) { return way->form.kind == WAY_SYMMETRIC || way->form.kind == WAY_ENGINES; }
uint8_t *way_send(const Way *way) { return way->memory.of[way->memory.rank]; }

// What `writer` writes into rank `of`'s memory. row: a block of the kernel that loads; copies use row 0.
static __host__ __device__ uint32_t *flag(const Memories *m, int of, int row, int writer) { return (uint32_t *)(m->of[of] + 2 * m->bytes) + row * MOST_RANKS + writer; }
// Whole blocks of 2 MiB, which the driver shares between processes as wholes.
static size_t shared_bytes(size_t bytes) { return (size_t)round_up64((int64_t)(2 * bytes + (FLAGS + MEETINGS) * sizeof(uint32_t)), 2 << 20); }

static bool cuda_ok(cudaError_t status, const char *what, Error *err) {
    if (status == cudaSuccess) return true;
    cudaGetLastError();  // or the next launch would report it
    return error_set(err, EXIT_ENVIRONMENT, "%s failed: %s", what, cudaGetErrorString(status));
}
static bool nccl_ok(ncclResult_t result, const Way *way, const char *what, Error *err) {
    if (result == ncclSuccess) return true;
    return error_set(err, EXIT_COMMUNICATION, "%s failed: %s (%s)", what, ncclGetErrorString(result), ncclGetLastError(way->nccl));
}

// --- NCCL --------------------------------------------------------------------------------------------------------------------------------

// Headers before 2.27 have no such field.
template <class Config> static auto ask_for_engines(Config *config, int) -> decltype(config->CTAPolicy, true) { return config->CTAPolicy = NO_BLOCKS, true; }
template <class Config> static bool ask_for_engines(Config *, long) { return false; }

static bool make_communicator(Way *way, Error *err) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclUniqueId id = {};
    bool ok = way->form.kind != WAY_ENGINES || ask_for_engines(&config, 0) || error_set(err, EXIT_ENVIRONMENT, "this program was built with an NCCL older than 2.27");
    if (ok && way->memory.rank == 0) ok = nccl_ok(ncclGetUniqueId(&id), way, "finding a network for NCCL", err);
    if (!launch_agree(way->comm, ok, err, NULL)) return false;
    MPI_Bcast(&id, (int)sizeof id, MPI_BYTE, 0, way->comm);
    if (way->form.blocks) config.maxCTAs = way->form.blocks;
    ok = nccl_ok(ncclCommInitRankConfig(&way->nccl, way->memory.size, id, way->memory.rank, &config), way, "making the NCCL communicator", err);
    return launch_agree(way->comm, ok, err, NULL);
}

static bool open_nccl(Way *way, Error *err) {
    size_t bytes = 2 * way->memory.bytes;
    void *memory = NULL;
    WindowRegister enter = (WindowRegister)dlsym(RTLD_DEFAULT, "ncclCommWindowRegister");
    way->deregister = (WindowDeregister)dlsym(RTLD_DEFAULT, "ncclCommWindowDeregister");
    way->all_to_all = (AllToAll)dlsym(RTLD_DEFAULT, "ncclAlltoAll");
    bool old = !enter || !way->deregister || !way->all_to_all;
    if (!make_communicator(way, err)) return false;
    if (!symmetric(way)) memory = device_alloc(way->device, bytes, "messages", err);
    else if (old) error_set(err, EXIT_ENVIRONMENT, "this NCCL has no ncclAlltoAll on symmetric memory, which came with 2.28");
    else nccl_ok(ncclMemAlloc(&memory, bytes), way, "ncclMemAlloc", err);
    way->memory.of[way->memory.rank] = (uint8_t *)memory;
    if (!launch_agree(way->comm, memory != NULL, err, NULL)) return false;
    if (!symmetric(way)) return true;
    bool ok = nccl_ok(enter(way->nccl, memory, bytes, &way->window, SYMMETRIC), way, "ncclCommWindowRegister", err);
    if (ok && !way->window) ok = error_set(err, EXIT_ENVIRONMENT, "NCCL has no symmetric memory here; NCCL_DEBUG=INFO tells why");
    return launch_agree(way->comm, ok, err, NULL);
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
    int size = way->memory.size, rank = way->memory.rank;
    uint8_t *send = way_send(way), *recv = send + way->memory.bytes;
    if (symmetric(way)) return nccl_ok(way->all_to_all(send, recv, slot, ncclUint8, way->nccl, stream), way, "ncclAlltoAll", err);
    ncclResult_t result = ncclGroupStart();
    for (int i = 1; i < size; i++) {
        int to = (rank + i) % size, from = (rank + size - i) % size;
        if (result == ncclSuccess) result = ncclSend(send + (size_t)to * slot, slot, ncclUint8, to, way->nccl, stream);
        if (result == ncclSuccess) result = ncclRecv(recv + (size_t)from * slot, slot, ncclUint8, from, way->nccl, stream);
    }
    ncclResult_t end = ncclGroupEnd();  // after a failure too, or what other ways issue would wait for it
    return nccl_ok(result == ncclSuccess ? end : result, way, "all-to-all", err);
}

// --- memory that all ranks have opened ---------------------------------------------------------------------------------------------------

static __global__ void count_kernel(uint32_t *number) { number[blockIdx.x * 1024 + threadIdx.x] = blockIdx.x * 1024 + threadIdx.x; }

static bool open_direct(Way *way, Error *err) {
    Memories *m = &way->memory;
    cudaIpcMemHandle_t own = {}, handle[MOST_RANKS];
    m->of[m->rank] = (uint8_t *)device_alloc(way->device, shared_bytes(m->bytes), "messages", err);  // flags are zero
    bool ok = m->of[m->rank] && cuda_ok(cudaIpcGetMemHandle(&own, m->of[m->rank]), "cudaIpcGetMemHandle", err);
    if (ok) {
        count_kernel<<<MEETINGS / 1024, 1024>>>(flag(m, m->rank, MOST_BLOCKS, 0));
        ok = cuda_ok(cudaDeviceSynchronize(), "numbering", err);
    }
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);  // the runtime has opened it, for itself alone
    way->wait_value = driver ? (WaitValue)dlsym(driver, "cuStreamWaitValue32_v2") : NULL;
    if (ok && !way->wait_value) ok = error_set(err, EXIT_ENVIRONMENT, "the driver has no cuStreamWaitValue32");
    if (!launch_agree(way->comm, ok, err, NULL)) return false;
    way->met = event_create(way->device);
    for (int i = 1; i < m->size; i++) way->copy[i] = stream_create_urgent(way->device, "copies"), way->copied[i] = event_create(way->device);
    MPI_Allgather(&own, (int)sizeof own, MPI_BYTE, handle, (int)sizeof own, MPI_BYTE, way->comm);
    for (int r = 0; ok && r < m->size; r++) {
        if (r != m->rank) ok = cuda_ok(cudaIpcOpenMemHandle((void **)&m->of[r], handle[r], cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle", err);
    }
    return launch_agree(way->comm, ok, err, NULL);
}

static void close_direct(Way *way) {
    for (int i = 1; i < way->memory.size; i++) {
        uint8_t *peer = way->memory.of[(way->memory.rank + i) % way->memory.size];
        if (peer) cudaIpcCloseMemHandle(peer);
        event_destroy(way->copied[i]);
        stream_destroy(way->copy[i]);
    }
    event_destroy(way->met);
    MPI_Barrier(way->comm);  // memory goes when nobody has it open
    if (way_send(way)) device_free(way->device, way_send(way));
}

// --- push and pull -----------------------------------------------------------------------------------------------------------------------

static bool meet_by_copies(Way *way, Stream *stream, Error *err) {
    const Memories *m = &way->memory;
    uint32_t meeting = ++way->meeting;
    const uint32_t *number = flag(m, m->rank, MOST_BLOCKS, 0) + meeting;
    cudaStream_t handle = stream_handle(stream);
    bool ok = meeting < MEETINGS || error_set(err, EXIT_ENVIRONMENT, "more than %d exchanges in one way", MEETINGS / 2);
    for (int i = 1; ok && i < m->size; i++) {
        uint32_t *theirs = flag(m, (m->rank + i) % m->size, 0, m->rank);
        ok = cuda_ok(cudaMemcpyAsync(theirs, number, sizeof *number, cudaMemcpyDeviceToDevice, handle), "a flag's copy", err);
    }
    for (int i = 1; ok && i < m->size; i++) {
        CUresult status = way->wait_value(handle, (CUdeviceptr)flag(m, m->rank, 0, (m->rank + i) % m->size), meeting, CU_STREAM_WAIT_VALUE_GEQ);
        ok = status == CUDA_SUCCESS || error_set(err, EXIT_ENVIRONMENT, "cuStreamWaitValue32 failed: the driver's error %d", (int)status);
    }
    return ok;
}

static bool exchange_copies(Way *way, size_t slot, Stream *stream, Error *err) {
    const Memories *m = &way->memory;
    uint8_t *own = m->of[m->rank];
    if (!meet_by_copies(way, stream, err)) return false;
    event_record(way->met, stream);
    for (int i = 1; i < m->size; i++) {
        int with = (m->rank + i) % m->size;
        uint8_t *to = way->form.kind == WAY_PULL ? own + m->bytes + (size_t)with * slot : m->of[with] + m->bytes + (size_t)m->rank * slot;
        const uint8_t *from = way->form.kind == WAY_PULL ? m->of[with] + (size_t)m->rank * slot : own + (size_t)with * slot;
        stream_wait(way->copy[i], way->met);
        if (!cuda_ok(cudaMemcpyAsync(to, from, slot, cudaMemcpyDeviceToDevice, stream_handle(way->copy[i])), "a copy between GPUs", err)) return false;
        event_record(way->copied[i], way->copy[i]);
        stream_wait(stream, way->copied[i]);
    }
    return meet_by_copies(way, stream, err);
}

// --- loads -------------------------------------------------------------------------------------------------------------------------------

// This block and the peers' blocks of the same number: what each did before is seen by all after.
static __device__ void meet(const Memories *m, uint32_t meeting) {
    int peer = threadIdx.x;
    __syncthreads();
    if (peer < m->size && peer != m->rank) {
        asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag(m, peer, blockIdx.x, m->rank)), "r"(meeting) : "memory");
        const uint32_t *own = flag(m, m->rank, blockIdx.x, peer);
        uint32_t reached;
        do asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(reached) : "l"(own) : "memory");
        while ((int32_t)(reached - meeting) < 0);
    }
    __syncthreads();
}

// Every block fetches its part of each peer's message, the blocks beginning with different peers. Blocks wait for each other across GPUs, so all of a grid
// must come to run at the same time: they are fewer than the multiprocessors, and what else runs there waits for none of them.
static __global__ void __launch_bounds__(LOAD_THREADS) load_kernel(const __grid_constant__ Memories m, int64_t vectors /* of 16 bytes, in a slot */, uint32_t meeting) {
    int64_t first = vectors * blockIdx.x / gridDim.x, end = vectors * (blockIdx.x + 1) / gridDim.x;
    meet(&m, meeting);
    for (int i = 0; i < m.size - 1; i++) {
        int from = (m.rank + 1 + (int)(blockIdx.x + i) % (m.size - 1)) % m.size;
        const uint4 *in = (const uint4 *)m.of[from] + m.rank * vectors;
        uint4 *out = (uint4 *)(m.of[m.rank] + m.bytes) + from * vectors;
        for (int64_t v = first + threadIdx.x; v < end; v += LOADS_AT_ONCE * LOAD_THREADS) {
            uint4 x[LOADS_AT_ONCE];
#pragma unroll
            for (int k = 0; k < LOADS_AT_ONCE; k++) {
                if (v + k * LOAD_THREADS < end) x[k] = in[v + k * LOAD_THREADS];
            }
#pragma unroll
            for (int k = 0; k < LOADS_AT_ONCE; k++) {
                if (v + k * LOAD_THREADS < end) out[v + k * LOAD_THREADS] = x[k];
            }
        }
    }
    meet(&m, meeting + 1);
}

static bool exchange_loads(Way *way, size_t slot, Stream *stream, Error *err) {
    load_kernel<<<(unsigned)way->form.blocks, LOAD_THREADS, 0, stream_handle(stream)>>>(way->memory, (int64_t)(slot / sizeof(uint4)), way->meeting + 1);
    way->meeting += 2;
    return cuda_ok(cudaGetLastError(), "starting the kernel that loads", err);
}

// --- any of them -------------------------------------------------------------------------------------------------------------------------

Way *way_open(const WayForm *form, Device *device, MPI_Comm comm, size_t bytes, Error *err) {
    Way *way = (Way *)xcalloc(1, sizeof *way, "a way to exchange messages");
    way->form = *form;
    way->device = device;
    way->comm = comm;
    way->memory.bytes = bytes;
    MPI_Comm_rank(comm, &way->memory.rank);
    MPI_Comm_size(comm, &way->memory.size);
    heartbeat_waits(device_site(device), true);
    bool ok = through_nccl(way) ? open_nccl(way, err) : open_direct(way, err);
    heartbeat_waits(device_site(device), false);
    if (ok) return way;
    way_close(way, false);
    return NULL;
}

void way_close(Way *way, bool broken) {
    heartbeat_waits(device_site(way->device), true);
    if (through_nccl(way)) close_nccl(way, broken);
    else close_direct(way);
    heartbeat_waits(device_site(way->device), false);
    free(way);
}

bool way_exchange(Way *way, size_t slot, Stream *stream, Error *err) {
    if (through_nccl(way)) return exchange_nccl(way, slot, stream_handle(stream), err);
    return way->form.kind == WAY_LOADS ? exchange_loads(way, slot, stream, err) : exchange_copies(way, slot, stream, err);
}
