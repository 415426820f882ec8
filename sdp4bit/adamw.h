// AdamW of one element and the judge's scalar arithmetic, inline for host and device, part of the exact regime. Included by kernels_cpu.c and its CUDA twin.
#pragma once
#include "sdp4bit/codec.h"

typedef struct AdamScalars {
    float clip;                    // clip coefficient
    float beta1, one_minus_beta1;  // 1 - beta in fp32
    float beta2, one_minus_beta2;
    float correction1, correction2;  // 1 - beta^t
    float epsilon, learning_rate, weight_decay;
} AdamScalars;

// Apex FusedAdam in adam_w mode: epsilon outside the root, decay decoupled and scaled by the learning rate. Updates m and v, returns the new p.
HD_FN float adamw_element(float p, float *m, float *v, float grad, AdamScalars a) {
    float g = f32_mul(grad, a.clip);
    *m = f32_add(f32_mul(a.beta1, *m), f32_mul(a.one_minus_beta1, g));
    *v = f32_add(f32_mul(a.beta2, *v), f32_mul(f32_mul(a.one_minus_beta2, g), g));
    float m_hat = f32_div(*m, a.correction1);
    float v_hat = f32_div(*v, a.correction2);
    float step = f32_add(f32_div(m_hat, f32_add(f32_sqrt(v_hat), a.epsilon)), f32_mul(a.weight_decay, p));
    return f32_sub(p, f32_mul(a.learning_rate, step));
}

// Megatron's clip coefficient: clip / (norm + 1e-6) where that is below 1, else 1; clip = 0 switches clipping off.
HD_FN float clip_coefficient(float clip, float norm) {
    if (!(clip > 0.0f)) return 1.0f;
    float coefficient = f32_div(clip, f32_add(norm, 1e-6f));
    return coefficient < 1.0f ? coefficient : 1.0f;
}
