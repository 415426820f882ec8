// The CUDA backend of ops.h: SwiGLU and rotary positions, called by train_gpt.cu. Each kernel reads
// and writes once, 8 elements a thread.
#include "llmc/cuda/common.cuh"

enum { THREADS = 256 };

static unsigned blocks_for(int64_t threads) { return (unsigned)ceil_div64(threads, THREADS); }

// --- SwiGLU --------------------------------------------------------------------------------------

static __device__ __forceinline__ float logistic(float x) {
    return fast_reciprocal(1.0f + fast_exp2(-LOG2_E * x));
}

// Where a thread's 8 columns stand: of y and dy, and of the gate, with the other half F behind it.
struct GatePlace {
    int64_t out, gate;
};
static __device__ __forceinline__ GatePlace gate_place(const Swiglu &a, int64_t i) {
    const int64_t at = i * PACKED;
    return GatePlace{at, at + at / a.F * a.F};
}

static __global__ void __launch_bounds__(THREADS) swiglu_forward_kernel(Swiglu a, int64_t vectors) {
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= vectors) return;
    const GatePlace at = gate_place(a, i);
    float gate[PACKED], up[PACKED];
    unpack(load_packed_streaming(a.pre + at.gate), gate);
    unpack(load_packed_streaming(a.pre + at.gate + a.F), up);
#pragma unroll
    for (int e = 0; e < PACKED; e++) gate[e] = gate[e] * logistic(gate[e]) * up[e];
    store_packed(a.y + at.out, pack(gate));
}

static __global__ void __launch_bounds__(THREADS) swiglu_backward_kernel(Swiglu a, int64_t vectors) {
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= vectors) return;
    const GatePlace at = gate_place(a, i);
    float gate[PACKED], up[PACKED], dy[PACKED];
    unpack(load_packed_streaming(a.pre + at.gate), gate);
    unpack(load_packed_streaming(a.pre + at.gate + a.F), up);
    unpack(load_packed_streaming(a.dy + at.out), dy);
#pragma unroll
    for (int e = 0; e < PACKED; e++) {
        const float g = gate[e], share = logistic(g);
        gate[e] = dy[e] * up[e] * (share * (1.0f + g * (1.0f - share)));
        up[e] = dy[e] * (g * share);
    }
    store_packed(a.dpre + at.gate, pack(gate));
    store_packed(a.dpre + at.gate + a.F, pack(up));
}

static int64_t swiglu_vectors(Stream *s, const Swiglu *a) {
    if (a->F % PACKED) {
        fatal(stream_site(s), EXIT_USAGE, "SwiGLU of width %d: the GPU takes multiples of %d", a->F,
              (int)PACKED);
    }
    return a->N * a->F / PACKED;
}

void op_swiglu_forward(Stream *s, const Swiglu *a) {
    const int64_t vectors = swiglu_vectors(s, a);
    if (vectors == 0) return;
    swiglu_forward_kernel<<<blocks_for(vectors), THREADS, 0, stream_handle(s)>>>(*a, vectors);
    check_launch(s, "SwiGLU forward");
}

void op_swiglu_backward(Stream *s, const Swiglu *a) {
    const int64_t vectors = swiglu_vectors(s, a);
    if (vectors == 0) return;
    swiglu_backward_kernel<<<blocks_for(vectors), THREADS, 0, stream_handle(s)>>>(*a, vectors);
    check_launch(s, "SwiGLU backward");
}

// --- rotary positions ----------------------------------------------------------------------------

// One pair of columns. The products and sums are the CPU backend's, bit for bit.
static __device__ __forceinline__ void turn(float *x, float *y, float cosine, float sine) {
    const float a = *x, b = *y;
    *x = __fsub_rn(__fmul_rn(a, cosine), __fmul_rn(b, sine));
    *y = __fadd_rn(__fmul_rn(b, cosine), __fmul_rn(a, sine));
}

// A thread turns W pairs of one vector: 8, or 1 where half of the columns is no multiple of 8.
template <int W>
static __global__ void __launch_bounds__(THREADS) rope_kernel(Rope a, int64_t threads) {
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= threads) return;
    const int half = a.columns / 2, per_vector = half / W;
    const int64_t vector = i / per_vector, group = vector / a.turned, token = group / a.groups;
    const int column = (int)(i % per_vector) * W;
    const float *table = a.table + token % a.T * a.columns + column;
    floatX *x = a.x + (group * a.heads + vector % a.turned) * a.HD + column;
    const float direction = a.back ? -1.0f : 1.0f;
    if constexpr (W == PACKED) {
        float front[PACKED], rear[PACKED], cosine[PACKED], sine[PACKED];
        unpack(load_packed(x), front);
        unpack(load_packed(x + half), rear);
        load_floats(table, cosine);
        load_floats(table + half, sine);
#pragma unroll
        for (int e = 0; e < PACKED; e++) turn(&front[e], &rear[e], cosine[e], sine[e] * direction);
        store_packed(x, pack(front));
        store_packed(x + half, pack(rear));
    } else {
        float front = floatX_to_float(x[0]), rear = floatX_to_float(x[half]);
        turn(&front, &rear, table[0], table[half] * direction);
        x[0] = floatX_from_float(front);
        x[half] = floatX_from_float(rear);
    }
}

void op_rope(Stream *s, const Rope *a) {
    const int64_t pairs = (int64_t)a->B * a->T * a->groups * a->turned * (a->columns / 2);
    if (pairs == 0) return;
    cudaStream_t stream = stream_handle(s);
    const bool packed = a->columns / 2 % PACKED == 0 && a->HD % PACKED == 0;
    const int64_t threads = packed ? pairs / PACKED : pairs;
    if (packed) rope_kernel<PACKED><<<blocks_for(threads), THREADS, 0, stream>>>(*a, threads);
    else rope_kernel<1><<<blocks_for(threads), THREADS, 0, stream>>>(*a, threads);
    check_launch(s, "rotary positions");
}
