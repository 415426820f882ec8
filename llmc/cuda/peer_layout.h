// Partition of elements, launch sizes and flag addresses of peer_reduce.cu and peer_norm.cu. All
// ranks must compute the same values. Plain C, so that tests run without a GPU.
#pragma once
#include <stddef.h>

#include "llmc/comm.h"

enum {
    PEER_RANKS = 8,  // maximum ranks of a group
    PEER_LANES = 4,  // streams that may use a group at the same time
    // Thread blocks of a launch, one per SM
    PEER_BLOCKS = 24,       // most of them beside a GEMM
    PEER_BLOCKS_MOST = 64,  // without a GEMM
    PEER_BLOCKS_NORM = 48,  // fewer make an all-reduce with a norm slower than two kernels
    NCCL_BLOCKS = 32,       // maximum of an NCCL collective with tensor parallelism (comm.cu)
    NCCL_LINK_BLOCKS = 12,  // of all links (comm.cu)
    PEER_THREADS = 512,     // threads of a block
    PEER_VECTOR = 16,       // bytes of an access
    PEER_BLOCK_BYTES = PEER_THREADS * PEER_VECTOR,
    // Flags of a lane: (PEER_BLOCKS_MOST, PEER_RANKS) uint32_t. The memory below PEER_FLAGS_START
    // belongs to peer_memory.cu.
    PEER_FLAGS_START = 4096,
    PEER_LANE_FLAGS = PEER_BLOCKS_MOST * PEER_RANKS
};

typedef struct PeerRange {
    int64_t first, count;  // elements
} PeerRange;

// Returns the range of `total` elements that a rank sums. An all-reduce may use any partition, so
// ranges start at multiples of 16 bytes; the last ranges may be shorter or empty. A reduce-scatter
// needs equal ranges, so `total` must then be a multiple of ranks.
static inline PeerRange peer_range(int64_t total, int ranks, int rank, bool scatter, size_t element_bytes) {
    if (scatter) return (PeerRange){rank * (total / ranks), total / ranks};
    int64_t unit = PEER_VECTOR / (int64_t)element_bytes;
    int64_t length = ((total + ranks - 1) / ranks + unit - 1) / unit * unit;
    int64_t first = rank * length < total ? rank * length : total;
    return (PeerRange){first, length < total - first ? length : total - first};
}

// Returns the number of thread blocks for `work` bytes or rows, of which a block processes
// `of_block` at a time. It must not depend on alignment or on the rank, because block b of a rank
// waits for block b of every other rank.
static inline int peer_blocks(int64_t work, int64_t of_block, int most) {
    int64_t blocks = (work + of_block - 1) / of_block;
    if (blocks < 1) return 1;
    return blocks < most ? (int)blocks : most;
}

// Returns the maximum blocks of a launch beside a GEMM: PEER_BLOCKS, or a quarter of a small GPU's
// SMs.
static inline int peer_blocks_beside_gemm(int multiprocessors) {
    return multiprocessors / 4 < PEER_BLOCKS ? multiprocessors / 4 : PEER_BLOCKS;
}

// Returns the maximum blocks of an NCCL collective, so that `collectives` of them, NCCL's links and
// a launch beside a GEMM fit on the GPU at the same time.
static inline int peer_nccl_blocks(int multiprocessors, int collectives) {
    int room = multiprocessors - NCCL_LINK_BLOCKS - peer_blocks_beside_gemm(multiprocessors);
    int blocks = collectives > 0 ? room / collectives : NCCL_BLOCKS;
    return blocks < 1 ? 1 : blocks < NCCL_BLOCKS ? blocks : NCCL_BLOCKS;
}

// Returns the maximum blocks of a launch on a GPU. Without a GEMM: up to half of its SMs, but
// NCCL's links and `collectives` concurrent collectives must find room.
static inline int peer_most_blocks(CommBeside beside, int multiprocessors, int collectives) {
    int least = peer_blocks_beside_gemm(multiprocessors), most = multiprocessors / 2;
    int room = multiprocessors - NCCL_LINK_BLOCKS -
               collectives * peer_nccl_blocks(multiprocessors, collectives);
    if (most > room) most = room;
    if (most > PEER_BLOCKS_MOST) most = PEER_BLOCKS_MOST;
    if (beside == COMM_BESIDE_GEMM || most < least) most = least;
    return most < 1 ? 1 : most;
}

// Returns true if the kernel that reduces and normalizes all rows on every rank supports the group
// and is faster than separate kernels. most: its blocks.
static inline bool peer_normalizes_all(int ranks, int most) { return ranks == 2 && most >= PEER_BLOCKS_NORM; }

// Returns the byte offset of a lane's flags in the memory for flags.
static inline size_t peer_lane_offset(int lane) {
    return PEER_FLAGS_START + (size_t)lane * PEER_LANE_FLAGS * sizeof(uint32_t);
}

// Returns the lane of a stream, or -1 if all lanes belong to other streams. Lanes are assigned in
// the order of first use, which is the same on all ranks. user: (PEER_LANES) NULL: free.
static inline int peer_lane(const void **user, const void *stream) {
    for (int i = 0; i < PEER_LANES; i++) {
        if (!user[i]) user[i] = stream;
        if (user[i] == stream) return i;
    }
    return -1;
}

// Returns true if two ranges of memory of `bytes` and `other_bytes` bytes have a byte in common.
static inline bool peer_overlap(const void *memory, size_t bytes, const void *other, size_t other_bytes) {
    uintptr_t a = (uintptr_t)memory, b = (uintptr_t)other;
    return a < b + other_bytes && b < a + bytes;
}
