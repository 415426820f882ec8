// Adds the partial sums of many blocks in a fixed order, as the last step of a sum over rows.
// Included by layernorm.cu and head_norm.cu.
#pragma once
#include "llmc/cuda/common.cuh"

// A block adds 32 columns: first 32 slices of the partial sums in parallel, then the slices in
// order.
enum { PARTIALS_SLICES = 32, PARTIALS_THREADS = WARP * PARTIALS_SLICES };

// Sums partials (blocks, columns) over the blocks and returns the sums in the first warp, one
// column per lane. All threads call it with the column of their lane, which may be past the end.
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
