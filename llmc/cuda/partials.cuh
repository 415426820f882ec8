// The last part of sums over rows that many blocks share: adding the blocks' partial sums, in a
// fixed order. Included by layernorm.cu and head_norm.cu.
#pragma once
#include "llmc/cuda/common.cuh"

// A block of so many threads adds up 32 columns: 32 slices of the partials side by side, then the
// slices in order.
enum { PARTIALS_SLICES = 32, PARTIALS_THREADS = WARP * PARTIALS_SLICES };

// The sum of partials (blocks, columns) over the blocks, for the block's first warp, one column a
// lane. Every thread calls it; `column` is that of its lane, and may be beyond the last one.
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
