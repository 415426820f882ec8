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

// Bits of a value in the replica hash. Processors give NaN different bits.
HD_FN uint32_t hashed_bits(float x) { return x == x ? f32_bits(x) : 0x7FC00000u; }

// Outer step of element i of a range. Returns its share of the replica hash.
HD_FN uint64_t merge_element(const MergeOuter *a, int64_t i) {
    int64_t at = chunk_position(&a->place, i);
    float old = a->outer[i], gradient = a->mean[at];
    float m = f32_add(f32_mul(a->decay, a->momentum[i]), f32_mul(a->damping, gradient));
    float fresh = f32_sub(old, f32_mul(a->rate, f32_add(gradient, f32_mul(a->decay, m))));
    float shift = f32_sub(fresh, old);
    if (a->own) shift = f32_add(shift, a->own[at]);
    a->outer[i] = fresh;
    a->momentum[i] = m;
    a->master[i] = f32_add(a->master[i], f32_mul(a->share, shift));
    return replica_mix((uint64_t)at * 2, hashed_bits(fresh)) +
           replica_mix((uint64_t)at * 2 + 1, hashed_bits(m));
}

// Returns the new weighted sum of contributions.
HD_FN float add_weighted(float sum, float x, float weight, bool first) {
    bool finite = (f32_bits(x) & 0x7FFFFFFFu) < 0x7F800000u;
    float term = finite ? f32_mul(weight, x) : 0.0f;
    return first ? term : f32_add(sum, term);
}

// Returns the master weight after mixing in the outer weight.
HD_FN float mix_element(float master, float outer, float mix) {
    if (mix == 0.0f) return outer;
    return f32_add(f32_mul(mix, master), f32_mul(f32_sub(1.0f, mix), outer));
}
