// Device code shared by the CUDA kernels: 16-byte accesses to bf16 and fp32, warp and block
// reductions, absolute maxima, GELU, SwiGLU, dropout. Only this file may test the CUDA version.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "llmc/cuda/internal.h"
#include "llmc/ops.h"

#if CUDART_VERSION < 12000
#error "CUDA 12.0 or newer is required; install a newer toolkit and set CUDA_HOME to its path"
#endif

static_assert(sizeof(floatX) == 2, "the CUDA backend supports only bf16; use the CPU backend for fp32");

enum { WARP = 32 };

// --- 16-byte accesses ----------------------------------------------------------------------------

// 8 bf16 values, loaded and stored as 16 bytes. Addresses must be 16-byte aligned.
enum { PACKED = 8 };
struct Packed128 {
    uint4 words;
};

static __device__ __forceinline__ Packed128 load_packed(const floatX *p) {
    return Packed128{*reinterpret_cast<const uint4 *>(p)};
}
static __device__ __forceinline__ void store_packed(floatX *p, Packed128 v) {
    *reinterpret_cast<uint4 *>(p) = v.words;
}
// Loads data that is used only once and may be evicted from L2 first.
static __device__ __forceinline__ Packed128 load_packed_streaming(const floatX *p) {
    return Packed128{__ldcs(reinterpret_cast<const uint4 *>(p))};
}
static __device__ __forceinline__ void store_packed_streaming(floatX *p, Packed128 v) {
    __stcs(reinterpret_cast<uint4 *>(p), v.words);
}

// Converts 8 values to fp32. The low half of a word is the earlier element.
static __device__ __forceinline__ void unpack(Packed128 v, float x[PACKED]) {
    const uint32_t word[4] = {v.words.x, v.words.y, v.words.z, v.words.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[2 * i] = __uint_as_float(word[i] << 16);
        x[2 * i + 1] = __uint_as_float(word[i] & 0xFFFF0000u);
    }
}
// Rounds 8 values to bf16, to nearest even. Bitwise identical to floatX_from_float except for NaNs,
// which become 0x7FFF.
static __device__ __forceinline__ Packed128 pack(const float x[PACKED]) {
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
        word[i] = *reinterpret_cast<const uint32_t *>(&pair);
    }
    return Packed128{make_uint4(word[0], word[1], word[2], word[3])};
}

// Load and store 8 fp32 values with two 16-byte accesses.
static __device__ __forceinline__ void load_floats(const float *p, float x[PACKED]) {
    float4 a = reinterpret_cast<const float4 *>(p)[0], b = reinterpret_cast<const float4 *>(p)[1];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}
static __device__ __forceinline__ void store_floats(float *p, const float x[PACKED]) {
    reinterpret_cast<float4 *>(p)[0] = make_float4(x[0], x[1], x[2], x[3]);
    reinterpret_cast<float4 *>(p)[1] = make_float4(x[4], x[5], x[6], x[7]);
}

// --- reductions in a fixed order -----------------------------------------------------------------

// Butterfly reductions over L neighboring lanes, a power of two. The result is bitwise identical in
// all lanes, because a + b = b + a. All lanes of the warp must call them.
template <int L> static __device__ __forceinline__ float lanes_sum(float x) {
#pragma unroll
    for (int stride = L / 2; stride > 0; stride /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, stride);
    return x;
}
static __device__ __forceinline__ float warp_sum(float x) { return lanes_sum<WARP>(x); }
static __device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int stride = WARP / 2; stride > 0; stride /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, stride));
    return x;
}

// Returns the sum over a one-dimensional block of complete warps. All threads must call it.
// shared: (32) floats, which the next call may reuse.
static __device__ __forceinline__ float block_sum(float x, float *shared) {
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    x = warp_sum(x);
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    x = warp_sum(lane < warps ? shared[lane] : 0.0f);
    __syncthreads();
    return x;
}

// --- absolute maxima, as the bits of fp32 numbers ------------------------------------------------

// Returns the larger of `largest` and the absolute values. NaN is above infinity.
static __device__ __forceinline__ uint32_t packed_absolute(uint32_t largest, Packed128 v) {
    const uint32_t word[4] = {v.words.x, v.words.y, v.words.z, v.words.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
        largest = max(largest, max(word[i] << 16 & 0x7FFF0000u, word[i] & 0x7FFF0000u));
    return largest;
}

// Raises *absmax to the largest value of a one-dimensional block of complete warps. All threads
// must call it, once per kernel.
static __device__ __forceinline__ void block_absolute(uint32_t *absmax, uint32_t largest) {
    __shared__ uint32_t of_warp[WARP];
    largest = __reduce_max_sync(0xFFFFFFFFu, largest);
    if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = largest;
    __syncthreads();
    if (threadIdx.x >= WARP) return;
    largest = __reduce_max_sync(0xFFFFFFFFu, threadIdx.x < blockDim.x / WARP ? of_warp[threadIdx.x] : 0);
    // Most blocks read a value that is already larger, which saves the atomic operation.
    if (threadIdx.x == 0 && largest > *(volatile uint32_t *)absmax) atomicMax(absmax, largest);
}

// --- dropout (ops.h's Dropout) -------------------------------------------------------------------

// Computes the dropout multipliers, 0 or 1 / (1 - p), of elements block * 8 .. block * 8 + 7 of a
// sample. Bitwise identical to the CPU backend. p must not be 0.
static __device__ __forceinline__ void dropout_multipliers(float keep[PACKED], Dropout dropout,
                                                           int64_t sample, uint64_t block) {
    Philox4 bits = dropout_bits(dropout, sample, block);
    uint32_t threshold = (uint32_t)rintf(dropout.p * 65536.0f);
    float scale = f32_div(1.0f, f32_sub(1.0f, dropout.p));
#pragma unroll
    for (int e = 0; e < PACKED; e++) keep[e] = philox_half(bits, e) >= threshold ? scale : 0.0f;
}

// Computes the dropout multipliers of columns c .. c + 7 of row `row` of (B, T, C).
static __device__ __forceinline__ void row_multipliers(float keep[PACKED], Dropout dropout, int T, int C,
                                                       int64_t row, int c) {
    dropout_multipliers(keep, dropout, dropout.first_sample + row / T, (uint64_t)(row % T * C + c) / PACKED);
}

// --- launches ------------------------------------------------------------------------------------

// Must be called before launching a kernel with more than 48 KiB of dynamic shared memory.
template <class Kernel> inline void allow_shared(Stream *s, Kernel kernel, size_t bytes, const char *what) {
    cuda_check(stream_site(s),
               cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes), what);
}

// --- fast approximations, for ops outside the exact regime ---------------------------------------

// 2^x and 1 / x with a relative error of about 2^-22, in one instruction each. Denormal results are
// flushed to zero.
static __device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
static __device__ __forceinline__ float fast_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#define LOG2_E 1.44269504f

// --- GELU, tanh form -----------------------------------------------------------------------------

// Returns the factor of x in tanh-GELU, 0.5 (1 + tanh u) = 1 / (1 + e^-2u), where u is GELU's inner
// polynomial of x.
static __device__ __forceinline__ float gelu_gate(float x) {
    float u = 0.79788456f * x * (1.0f + 0.044715f * x * x);
    return fast_reciprocal(1.0f + fast_exp2(-2.0f * LOG2_E * u));
}
static __device__ __forceinline__ float gelu(float x) { return x * gelu_gate(x); }
static __device__ __forceinline__ float gelu_derivative(float x) {
    float gate = gelu_gate(x), du = 0.79788456f * (1.0f + 3.0f * 0.044715f * x * x);
    return gate + x * gate * (1.0f - gate) * 2.0f * du;
}

// --- SwiGLU --------------------------------------------------------------------------------------

static __device__ __forceinline__ float logistic(float x) {
    return fast_reciprocal(1.0f + fast_exp2(-LOG2_E * x));
}
static __device__ __forceinline__ float swiglu(float gate, float up) { return gate * logistic(gate) * up; }
