// The last step of sums over rows by many blocks: adds the blocks' partial sums in a fixed order.
// Included by layernorm.cu and head_norm.cu.
#pragma once
#include "llmc/cuda/common.cuh"

// A block adds up 32 columns: 32 slices of the partials in parallel, then the slices in order.
enum { PARTIALS_SLICES = 32, PARTIALS_THREADS = WARP * PARTIALS_SLICES };

// Returns the sum of partials (blocks, columns) over the blocks on the first warp, a column per
// lane. Called by all threads with their lane's column, which may be past the end.
static __device__ __forceinline__ float partials_total(const float *partials, int blocks, int columns,
                                                       int column) {
    __shared__ float slices[PARTIALS_SLICES][WARP];
    const int slice = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    float sum = 0.0f, total = 0.0f;
    for (int b = slice; b < blocks && column < columns; b += PARTIALS_SLICES)
        sum += partials[(int64_t)b * columns + column];
    slices[slice][lane] = sum;
    __syncthreads();
    if (slice > 0) return 0.0f;
#pragma unroll
    for (int i = 0; i < PARTIALS_SLICES; i++) total += slices[i][lane];
    return total;
}
