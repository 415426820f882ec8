// The kernel of comm_norm_direct: sums the ranks' partial results, adds bias and residual, and
// normalizes (peer_norm.cu). Launched by peer_reduce.cu.
#pragma once
#include "llmc/cuda/peer_barrier.cuh"

struct PeerNorm {
    PeerBarrier barrier;
    const floatX *part[PEER_RANKS];  // (rows, C) this rank's rows of each rank's partial results
    floatX *to[PEER_RANKS];          // (rows, C) destinations of the normalized rows besides norm.y
    int destinations;
    const floatX *bias;  // (C) or NULL
    int64_t rows;
    LayerNorm norm;  // its branch is not used
};

// A kernel and its launch. rows: number of rows that a block processes at a time.
struct PeerNormShape {
    void (*kernel)(PeerNorm);
    int threads, rows;
};
// Returns the kernel for rows of C elements. C must be a multiple of 8, and at most LIMIT_HIDDEN.
PeerNormShape peer_norm_shape(int C, int ranks);
