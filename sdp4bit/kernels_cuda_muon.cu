// Muon's kernels on GPUs, bit-identical to muon_cpu.c: see muon.h.
#include "sdp4bit/kernels_cuda.cuh"
#include "sdp4bit/muon.h"

DEV_FN void mark_refused(const MuonPart &a) {
    atomicCAS(reinterpret_cast<unsigned long long *>(a.fault), 0ull, (unsigned long long)a.code);
}

__global__ void __launch_bounds__(CODEC_THREADS)
    muon_momentum_kernel(const __grid_constant__ MuonPart a, int64_t n, float *direction) {
    if (!a.control->applied) return;
    float clip = a.control->clip_coefficient;
    for_own_elements(n, [&](int64_t i) {
        if (!muon_update_momentum(&a, clip, i)) mark_refused(a);
        if (direction) direction[i] = muon_direction(&a, clip, muon_load(&a, i), a.grads[i]);
    });
}

void kernel_muon_momentum(Stream *s, const MuonPart *a, int64_t elements, float *direction) {
    muon_momentum_kernel<<<stride_blocks(s, elements), CODEC_THREADS, 0, stream_handle(s)>>>(*a, elements,
                                                                                             direction);
    check_launch(s, "Muon's momentum");
}

DEV_FN float direction_of(const MuonPart &a, float clip, int64_t i) {
    int64_t at = muon_index(&a, i);
    return muon_direction(&a, clip, muon_load(&a, at), a.grads[at]);
}

// A warp sums 32 elements, in the order of tree_sum.
__global__ void __launch_bounds__(CODEC_THREADS)
    muon_squares_kernel(const __grid_constant__ MuonPart a, float *partials, int64_t n) {
    float clip = a.control->clip_coefficient;
    for_own_elements((n + WARP - 1) / WARP * WARP, [&](int64_t i) {
        float u = i < n ? direction_of(a, clip, i) : 0.0f, sum = f32_mul(u, u);
        for (int stride = 1; stride < WARP; stride *= 2)
            sum = f32_add(sum, __shfl_down_sync(ALL_LANES, sum, stride));
        if (i % WARP == 0) partials[i / WARP] = sum;
    });
}
static_assert(WARP == HADAMARD_ORDER, "a warp sums 32 elements");

void kernel_muon_squares(Stream *s, const MuonPart *a, float *partials) {
    int64_t n = a->rows * a->columns;
    muon_squares_kernel<<<stride_blocks(s, n), CODEC_THREADS, 0, stream_handle(s)>>>(*a, partials, n);
    check_launch(s, "squares of Muon's momentum");
}

__global__ void __launch_bounds__(CODEC_THREADS)
    muon_normalize_kernel(const __grid_constant__ MuonPart a, const float *sum, floatX *x) {
    float clip = a.control->clip_coefficient, norm = muon_norm(*sum);
    for_own_elements(a.rows * a.columns,
                     [&](int64_t i) { x[i] = floatX_from_float(f32_div(direction_of(a, clip, i), norm)); });
}

void kernel_muon_normalize(Stream *s, const MuonPart *a, const float *sum, floatX *x) {
    muon_normalize_kernel<<<stride_blocks(s, a->rows * a->columns), CODEC_THREADS, 0, stream_handle(s)>>>(*a,
                                                                                                          sum,
                                                                                                          x);
    check_launch(s, "normalize Muon's momentum");
}

__global__ void __launch_bounds__(CODEC_THREADS)
    muon_apply_kernel(const __grid_constant__ MuonPart a, const floatX *o) {
    if (!a.control->applied) return;
    float learning_rate = a.control->learning_rate;
    for_own_elements(a.rows * a.columns, [&](int64_t i) {
        float update = floatX_to_float(o[muon_output_index(&a, i)]);
        if (!muon_element(&a, learning_rate, &a.master[muon_index(&a, i)], update)) mark_refused(a);
    });
}

void kernel_muon_apply(Stream *s, const MuonPart *a, const floatX *o) {
    muon_apply_kernel<<<stride_blocks(s, a->rows * a->columns), CODEC_THREADS, 0, stream_handle(s)>>>(*a, o);
    check_launch(s, "Muon's update");
}
