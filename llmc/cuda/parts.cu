// Sums gathered parts over the ranks of a group, in rank order: see ops.h. Bitwise identical to the
// CPU backend. Called by tensor_parallel.c and tied_embedding.c.
#include "llmc/cuda/common.cuh"

enum { PART_THREADS = 256, FLOATS = 4 };  // FLOATS: fp32 values in 16 bytes

// Returns true if 16-byte accesses are possible. address: all addresses, ORed. bytes: size of a
// part.
static bool in_sixteens(uintptr_t address, size_t bytes) { return (address | bytes) % 16 == 0; }

static unsigned blocks_for(int64_t threads) { return (unsigned)ceil_div64(threads, PART_THREADS); }

// --- floatX --------------------------------------------------------------------------------------

__global__ void __launch_bounds__(PART_THREADS) sum_parts_packed_kernel(SumParts a) {
    const int64_t i = ((int64_t)blockIdx.x * PART_THREADS + threadIdx.x) * PACKED;
    if (i >= a.n) return;
    float sum[PACKED], part[PACKED];
    unpack(load_packed_streaming(a.parts + i), sum);
    for (int r = 1; r < a.ranks; r++) {
        unpack(load_packed_streaming(a.parts + r * a.n + i), part);
#pragma unroll
        for (int e = 0; e < PACKED; e++) sum[e] = __fadd_rn(sum[e], part[e]);
    }
    if (a.bias) {
        unpack(load_packed(a.bias + i % a.C), part);
#pragma unroll
        for (int e = 0; e < PACKED; e++) sum[e] = __fadd_rn(sum[e], part[e]);
    }
    store_packed(a.y + i, pack(sum));
}

__global__ void __launch_bounds__(PART_THREADS) sum_parts_kernel(SumParts a) {
    const int64_t i = (int64_t)blockIdx.x * PART_THREADS + threadIdx.x;
    if (i >= a.n) return;
    float sum = floatX_to_float(a.parts[i]);
    for (int r = 1; r < a.ranks; r++) sum = __fadd_rn(sum, floatX_to_float(a.parts[r * a.n + i]));
    if (a.bias) sum = __fadd_rn(sum, floatX_to_float(a.bias[i % a.C]));
    a.y[i] = floatX_from_float(sum);
}

void op_sum_parts(Stream *s, const SumParts *a) {
    if (a->n <= 0) return;
    const bool bias_packs = !a->bias || in_sixteens((uintptr_t)a->bias, (size_t)a->C * sizeof(floatX));
    if (bias_packs && in_sixteens((uintptr_t)a->y | (uintptr_t)a->parts, (size_t)a->n * sizeof(floatX)))
        sum_parts_packed_kernel<<<blocks_for(a->n / PACKED), PART_THREADS, 0, stream_handle(s)>>>(*a);
    else sum_parts_kernel<<<blocks_for(a->n), PART_THREADS, 0, stream_handle(s)>>>(*a);
    check_launch(s, "sum of ranks' parts");
}

// --- fp32 ----------------------------------------------------------------------------------------

static __device__ __forceinline__ float4 add(float4 x, float4 y) {
    return make_float4(__fadd_rn(x.x, y.x), __fadd_rn(x.y, y.y), __fadd_rn(x.z, y.z), __fadd_rn(x.w, y.w));
}
static __device__ __forceinline__ float add(float x, float y) { return __fadd_rn(x, y); }

// T: float or float4. n: number of elements of type T.
template <class T>
__global__ void __launch_bounds__(PART_THREADS) add_parts_kernel(T *y, const T *parts, int64_t n, int ranks) {
    const int64_t i = (int64_t)blockIdx.x * PART_THREADS + threadIdx.x;
    if (i >= n) return;
    T sum = __ldcs(parts + i);
    for (int r = 1; r < ranks; r++) sum = add(sum, __ldcs(parts + r * n + i));
    y[i] = sum;
}

void op_add_parts(Stream *s, float *y, const float *parts, int64_t n, int ranks) {
    if (n <= 0) return;
    const int64_t vectors = n / FLOATS;
    cudaStream_t stream = stream_handle(s);
    if (in_sixteens((uintptr_t)y | (uintptr_t)parts, (size_t)n * sizeof(float)))
        add_parts_kernel<<<blocks_for(vectors), PART_THREADS, 0, stream>>>((float4 *)y, (const float4 *)parts,
                                                                           vectors, ranks);
    else add_parts_kernel<<<blocks_for(n), PART_THREADS, 0, stream>>>(y, parts, n, ranks);
    check_launch(s, "sum of ranks' gradients");
}
