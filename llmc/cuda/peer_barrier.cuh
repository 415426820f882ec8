// Barriers between the ranks' kernels over peer memory. Included by peer_reduce.cu, peer_norm.cu
// and peer_norm.h.
//
// Barriers connect thread blocks with the same index: block b of a rank waits for block b of every
// other rank, so all ranks launch the same number of blocks. A thread stores the barrier's number
// into a flag in each other rank's memory (release) and waits until the flags in its own memory
// reach this number (acquire). Numbers only grow, so flags are never reset, and a fast rank may
// already have stored a later number; comparisons are modulo 2^32. Every stream has its own flags
// and numbers (a lane), because kernels of different streams may run in different orders on
// different ranks.
//
// Why this cannot deadlock: a block that has started needs only the block with the same index on
// the other ranks, which starts as soon as an SM of its GPU has room for it. Other kernels leave
// room when they end. The only kernels that wait for other ranks are these and NCCL's, and the GPU
// has room for all of them at once (peer_most_blocks, peer_nccl_blocks). If a rank dies, its flags
// never arrive: the watchdog then sets the abort word, which all waiting threads poll.
//
// Ranks may share a GPU in tests. The GPU preempts each process after a time slice, even if its
// kernels wait, and the next process gets all SMs. Under MPS the processes run at the same time
// instead, and may need more SMs than there are.
#pragma once
#include "llmc/cuda/common.cuh"
#include "llmc/cuda/peer_layout.h"

enum {
    BARRIERS = 2,      // per launch
    POLL_PERIOD = 512  // reads of a flag between two reads of the abort word, about 0.5 ms
};

struct PeerBarrier {
    uint32_t *flags[PEER_RANKS];  // (blocks, PEER_RANKS) of each rank; rank r writes column r
    const volatile int *abort;
    uint32_t number;  // of the launch's first barrier
    int rank, size;
};

static __device__ __forceinline__ void store_release(uint32_t *flag, uint32_t number) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(number) : "memory");
}
static __device__ __forceinline__ uint32_t load_acquire(const uint32_t *flag) {
    uint32_t number;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(number) : "l"(flag) : "memory");
    return number;
}

// Waits for this block of all ranks. Memory accesses of the block before the barrier happen before
// accesses of the other ranks' blocks after it: __syncthreads orders them with this block's
// release, and release and acquire are cumulative at system scope. Returns false if the kernel must
// end. All threads must call it.
static __device__ bool wait_for_ranks(const PeerBarrier &b, uint32_t number) {
    const int peer = threadIdx.x, first = blockIdx.x * PEER_RANKS;
    int aborted = 0;
    __syncthreads();
    if (peer < b.size && peer != b.rank) {
        store_release(b.flags[peer] + first + b.rank, number);
        const uint32_t *flag = b.flags[b.rank] + first + peer;
        for (uint32_t reads = 1; !aborted && (int32_t)(load_acquire(flag) - number) < 0; reads++) {
            if (reads % POLL_PERIOD == 0) aborted = *b.abort;
        }
    }
    return !__syncthreads_or(aborted);
}
