// The outer step of one element, inline for host and device, part of the exact regime. Included by
// kernels_cpu.c and kernels_cuda_outer.cu.
#pragma once
#include "sdp4bit/kernels.h"

// SGD with Nesterov momentum, as in PyTorch. Updates *m. Returns the new outer weight.
HD_FN float outer_element(float outer, float *m, float gradient, float rate, float momentum) {
    *m = f32_add(f32_mul(momentum, *m), gradient);
    float step = f32_add(gradient, f32_mul(momentum, *m));
    return f32_sub(outer, f32_mul(rate, step));
}

// Returns the master weight after mixing in the outer weight.
HD_FN float mix_element(float master, float outer, float mix) {
    if (mix == 0.0f) return outer;
    return f32_add(f32_mul(mix, master), f32_mul(f32_sub(1.0f, mix), outer));
}
