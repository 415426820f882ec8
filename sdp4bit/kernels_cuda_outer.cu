// Kernels of local steps on GPUs. Bit-identical to kernels_cpu.c. Called by outer.c and
// llmc/state/local_steps.c.
#include "sdp4bit/kernels_cuda.cuh"
#include "sdp4bit/outer_step.h"

__global__ void __launch_bounds__(CODEC_THREADS)
    pseudo_gradient_kernel(float *gradient, const float *outer, const float *master, int64_t n) {
    for_own_elements(n, [=](int64_t i) { gradient[i] = f32_sub(outer[i], master[i]); });
}

__global__ void __launch_bounds__(CODEC_THREADS)
    outer_step_kernel(float *outer, float *m, const float *gradient, float rate, float momentum, int64_t n,
                      const volatile int *lost) {
    if (lost && *lost) return;
    for_own_elements(n, [=](int64_t i) {
        outer[i] = outer_element(outer[i], &m[i], gradient[i], rate, momentum);
    });
}

__global__ void __launch_bounds__(CODEC_THREADS)
    mix_outer_kernel(float *master, const float *outer, float mix, int64_t n, const volatile int *lost) {
    if (lost && *lost) return;
    for_own_elements(n, [=](int64_t i) { master[i] = mix_element(master[i], outer[i], mix); });
}

__global__ void __launch_bounds__(CODEC_THREADS)
    add_weighted_kernel(float *sum, const float *x, float weight, bool first, int64_t n) {
    for_own_elements(n, [=](int64_t i) { sum[i] = add_weighted(sum[i], x[i], weight, first); });
}

__global__ void __launch_bounds__(CODEC_THREADS) merge_outer_kernel(MergeOuter a) {
    uint64_t hash = 0;
    for_own_elements(a.place.n, [&](int64_t i) { hash += merge_element(&a, i); });
    if (a.hash) add_warp_sum((unsigned long long *)a.hash, hash);
}

__global__ void __launch_bounds__(CODEC_THREADS)
    narrow_kernel(floatX *weights, const float *master, int64_t n) {
    for_own_elements(n, [=](int64_t i) { weights[i] = floatX_from_float(master[i]); });
}

// Number of blocks for about four elements per thread.
static unsigned blocks_for(Stream *s, int64_t n) { return (unsigned)stride_blocks(s, ceil_div64(n, 4)); }

void kernel_pseudo_gradient(Stream *s, float *gradient, const float *outer, const float *master, int64_t n) {
    if (n <= 0) return;
    pseudo_gradient_kernel<<<blocks_for(s, n), CODEC_THREADS, 0, stream_handle(s)>>>(gradient, outer, master,
                                                                                     n);
    check_launch(s, "pseudo-gradient");
}

void kernel_outer_step(Stream *s, float *outer, float *m, const float *gradient, float rate, float momentum,
                       int64_t n, const int *lost) {
    if (n <= 0) return;
    outer_step_kernel<<<blocks_for(s, n), CODEC_THREADS, 0, stream_handle(s)>>>(outer, m, gradient, rate,
                                                                                momentum, n, lost);
    check_launch(s, "outer step");
}

void kernel_mix_outer(Stream *s, float *master, const float *outer, float mix, int64_t n, const int *lost) {
    if (n <= 0) return;
    mix_outer_kernel<<<blocks_for(s, n), CODEC_THREADS, 0, stream_handle(s)>>>(master, outer, mix, n, lost);
    check_launch(s, "mix outer weights into master weights");
}

void kernel_add_weighted(Stream *s, float *sum, const float *x, float weight, bool first, int64_t n) {
    if (n <= 0) return;
    add_weighted_kernel<<<blocks_for(s, n), CODEC_THREADS, 0, stream_handle(s)>>>(sum, x, weight, first, n);
    check_launch(s, "weighted sum of pseudo-gradients");
}

void kernel_merge_outer(Stream *s, const MergeOuter *a) {
    if (a->place.n <= 0) return;
    merge_outer_kernel<<<blocks_for(s, a->place.n), CODEC_THREADS, 0, stream_handle(s)>>>(*a);
    check_launch(s, "outer step of a range");
}

void kernel_narrow(Stream *s, floatX *weights, const float *master, int64_t n) {
    if (n <= 0) return;
    narrow_kernel<<<blocks_for(s, n), CODEC_THREADS, 0, stream_handle(s)>>>(weights, master, n);
    check_launch(s, "rounded master weights");
}
