// Frozen weights of QLoRA on GPUs, 8 elements per thread: see ops.h.
#include <assert.h>

#include "llmc/cuda/common.cuh"

enum { DEQUANTIZE_THREADS = 256 };

// A group is a multiple of 8, so the elements of a thread have one scale.
template <FrozenFormat FORMAT>
static __global__ void __launch_bounds__(DEQUANTIZE_THREADS) dequantize_kernel(Dequantize a) {
    const int64_t at = ((int64_t)blockIdx.x * DEQUANTIZE_THREADS + threadIdx.x) * PACKED;
    if (at >= a.n) return;
    __align__(8) uint8_t codes[PACKED];
    if (FORMAT == FROZEN_INT8) *(uint2 *)codes = *(const uint2 *)(a.codes + at);
    else *(uint32_t *)codes = *(const uint32_t *)(a.codes + at / 2);
    const float scale = floatX_to_float(a.scales[at / FROZEN_GROUP]);
    float x[PACKED];
#pragma unroll
    for (int e = 0; e < PACKED; e++) x[e] = __fmul_rn(frozen_value(FORMAT, codes, e), scale);
    store_packed(a.w + at, pack(x));
}

void op_dequantize(Stream *s, const Dequantize *a) {
    assert(a->n % PACKED == 0);
    if (a->n == 0) return;
    const auto kernel = a->format == FROZEN_INT8 ? dequantize_kernel<FROZEN_INT8>
                                                 : dequantize_kernel<FROZEN_NF4>;
    const unsigned blocks = (unsigned)ceil_div64(a->n, DEQUANTIZE_THREADS * PACKED);
    kernel<<<blocks, DEQUANTIZE_THREADS, 0, stream_handle(s)>>>(*a);
    check_launch(s, "dequantization of frozen weights");
}
