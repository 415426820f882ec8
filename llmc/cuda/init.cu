// The CUDA backend of ops.h: initial weights, drawn where they live. A thread draws a pair of
// numbers at a time. Called by train_gpt.cu (gpt_init_weights).
#include "llmc/cuda/common.cuh"
#include "llmc/base/normal.h"

enum { INIT_THREADS = 256, BLOCKS_PER_PROCESSOR = 16 };

// std below 0: ones.
__global__ void __launch_bounds__(INIT_THREADS)
    init_weights_kernel(floatX *weights, int64_t n, double std, uint64_t seed, uint32_t tensor) {
    for (int64_t pair = (int64_t)blockIdx.x * INIT_THREADS + threadIdx.x; 2 * pair < n;
         pair += (int64_t)gridDim.x * INIT_THREADS) {
        double normal[2];
        normal_pair(counter_bits(seed, PURPOSE_INIT, tensor, (uint64_t)pair), normal);
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float value = std < 0 ? 1.0f : __double2float_rn(f64_mul(std, normal[e]));
            if (2 * pair + e < n) weights[2 * pair + e] = floatX_from_float(value);
        }
    }
}

void op_init_weights(Stream *s, floatX *weights, int64_t n, double std, uint64_t seed, uint32_t tensor,
                     int threads) {
    if (n <= 0) return;
    if (std == 0) {
        set_zero(s, weights, (size_t)n * sizeof *weights);
        return;
    }
    int64_t blocks = ceil_div64(n, 2 * INIT_THREADS),
            most = (int64_t)stream_device(s)->multiprocessors * BLOCKS_PER_PROCESSOR;
    init_weights_kernel<<<(unsigned)(blocks < most ? blocks : most), INIT_THREADS, 0, stream_handle(s)>>>(
        weights, n, std, seed, tensor);
    check_launch(s, "initial weights");
}
