// SwiGLU and rotary position embedding on GPUs, with 8 elements per thread: see ops.h.
#include <assert.h>

#include "llmc/cuda/common.cuh"

enum { THREADS = 256 };

static unsigned blocks_for(int64_t threads) { return (unsigned)ceil_div64(threads, THREADS); }

// --- SwiGLU --------------------------------------------------------------------------------------

// Offsets of a thread's 8 columns in y and dy, and of their gate in pre. `up` is F columns after
// the gate.
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
    for (int e = 0; e < PACKED; e++) gate[e] = swiglu(gate[e], up[e]);
    store_packed(a.y + at.out, pack(gate));
}

// Computes a thread's 16 gradients. Returns the largest absolute value.
static __device__ __forceinline__ uint32_t swiglu_gradient(const Swiglu &a, GatePlace at) {
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
    Packed128 dgate = pack(gate), dup = pack(up);
    store_packed(a.dpre + at.gate, dgate);
    store_packed(a.dpre + at.gate + a.F, dup);
    return packed_absolute(packed_absolute(0, dgate), dup);
}

static __global__ void __launch_bounds__(THREADS) swiglu_backward_kernel(Swiglu a, int64_t vectors) {
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    const uint32_t largest = i < vectors ? swiglu_gradient(a, gate_place(a, i)) : 0;
    if (a.absmax) block_absolute(a.absmax, largest);
}

static int64_t swiglu_vectors(const Swiglu *a) {
    assert(a->F % PACKED == 0);
    return a->N * a->F / PACKED;
}

void op_swiglu_forward(Stream *s, const Swiglu *a) {
    const int64_t vectors = swiglu_vectors(a);
    if (vectors == 0) return;
    swiglu_forward_kernel<<<blocks_for(vectors), THREADS, 0, stream_handle(s)>>>(*a, vectors);
    check_launch(s, "SwiGLU forward");
}

void op_swiglu_backward(Stream *s, const Swiglu *a) {
    const int64_t vectors = swiglu_vectors(a);
    if (vectors == 0) return;
    swiglu_backward_kernel<<<blocks_for(vectors), THREADS, 0, stream_handle(s)>>>(*a, vectors);
    check_launch(s, "SwiGLU backward");
}

// --- rotary positions ----------------------------------------------------------------------------

// Rotates one pair of columns, bitwise identical to the CPU.
static __device__ __forceinline__ void turn(float *x, float *y, float cosine, float sine) {
    const float a = *x, b = *y;
    *x = __fsub_rn(__fmul_rn(a, cosine), __fmul_rn(b, sine));
    *y = __fadd_rn(__fmul_rn(b, cosine), __fmul_rn(a, sine));
}

// Rope, and how its work is divided among threads.
struct RopeWork : Rope {
    int vectors;      // number of vectors per group that are processed
    int pairs, rest;  // threads per vector that rotate pairs of columns, that copy other columns
    int64_t threads;
};

// Stores W values, if they are at a new place. Returns the larger of `largest` and their absolute
// values.
template <int W>
static __device__ __forceinline__ uint32_t copy_columns(floatX *to, const floatX *from, uint32_t largest) {
    if constexpr (W == PACKED) {
        const Packed128 values = load_packed(from);
        if (to != from) store_packed(to, values);
        return packed_absolute(largest, values);
    } else {
        const floatX value = *from;
        if (to != from) *to = value;
        return max(largest, (uint32_t)(value & 0x7FFF) << 16);
    }
}

// Returns the largest absolute value of the results.
template <int W>
static __device__ __forceinline__ uint32_t turn_columns(floatX *to, const floatX *from, const float *table,
                                                        int half, float direction) {
    if constexpr (W == PACKED) {
        float front[PACKED], rear[PACKED], cosine[PACKED], sine[PACKED];
        unpack(load_packed(from), front);
        unpack(load_packed(from + half), rear);
        load_floats(table, cosine);
        load_floats(table + half, sine);
#pragma unroll
        for (int e = 0; e < PACKED; e++) turn(&front[e], &rear[e], cosine[e], sine[e] * direction);
        const Packed128 first = pack(front), second = pack(rear);
        store_packed(to, first);
        store_packed(to + half, second);
        return packed_absolute(packed_absolute(0, first), second);
    } else {
        float front = floatX_to_float(from[0]), rear = floatX_to_float(from[half]);
        turn(&front, &rear, table[0], table[half] * direction);
        to[0] = floatX_from_float(front);
        to[half] = floatX_from_float(rear);
        return max((uint32_t)(to[0] & 0x7FFF), (uint32_t)(to[half] & 0x7FFF)) << 16;
    }
}

// Processes the columns of thread i. Returns the largest absolute value of the results.
template <int W> static __device__ __forceinline__ uint32_t rope_columns(const RopeWork &a, int64_t i) {
    const int half = a.columns / 2, per_vector = a.pairs + a.rest, part = (int)(i % per_vector);
    const int64_t vector = i / per_vector, group = vector / a.vectors, token = group / a.groups;
    const int head = (int)(vector % a.vectors);
    const bool pair = part < a.pairs;
    const int column = pair ? part * W : a.columns + (part - a.pairs) * W;
    floatX *x = a.x + (group * a.heads + head) * a.HD + column;
    const floatX *from = x;
    floatX *to = x;
    if (a.by_kind) {
        const int place = rope_place(&a, (int)(group % a.groups) * a.heads + head);
        floatX *other = a.by_kind + (token * a.groups * a.heads + place) * a.HD + column;
        if (a.back) from = other;
        else to = other;
    }
    if (pair && head < a.turned) {
        const float *table = a.table + token % a.T * a.columns + column;
        return turn_columns<W>(to, from, table, half, a.back ? -1.0f : 1.0f);
    }
    const uint32_t largest = copy_columns<W>(to, from, 0);
    return pair ? copy_columns<W>(to + half, from + half, largest) : largest;
}

// Each thread rotates W pairs of a vector: 8, or 1 if columns / 2 is not a multiple of 8. If
// by_kind or absmax is set, threads also process the columns and vectors that are not rotated.
template <int W> static __global__ void __launch_bounds__(THREADS) rope_kernel(RopeWork a) {
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    const uint32_t largest = i < a.threads ? rope_columns<W>(a, i) : 0;
    if (a.absmax) block_absolute(a.absmax, largest);
}

void op_rope(Stream *s, const Rope *a) {
    const bool packed = a->columns / 2 % PACKED == 0 && a->HD % PACKED == 0;
    const int W = packed ? PACKED : 1;
    const bool all = a->by_kind || a->absmax;
    RopeWork work = {*a, all ? a->heads : a->turned, a->columns / 2 / W, all ? (a->HD - a->columns) / W : 0,
                     0};
    work.threads = (int64_t)a->B * a->T * a->groups * work.vectors * (work.pairs + work.rest);
    if (work.threads == 0) return;
    cudaStream_t stream = stream_handle(s);
    if (packed) rope_kernel<PACKED><<<blocks_for(work.threads), THREADS, 0, stream>>>(work);
    else rope_kernel<1><<<blocks_for(work.threads), THREADS, 0, stream>>>(work);
    check_launch(s, "rotary position embedding");
}
