// AdamW of one element, inline for host and device, part of the exact regime. Included by
// update_host.c and kernels_cuda_weight.cu.
#pragma once
#include "sdp4bit/kernels.h"

typedef struct AdamScalars {
    float clip;                    // clip coefficient
    float beta1, one_minus_beta1;  // 1 - beta in fp32
    float beta2, one_minus_beta2;
    float correction1, correction2;  // 1 - beta^t
    float epsilon, learning_rate, weight_decay;
} AdamScalars;

// weight_decay: a->weight_decay for matrices, 0 for tails.
HD_FN AdamScalars adam_scalars(const UpdateShard *a, float weight_decay) {
    AdamScalars scalars;
    scalars.clip = a->control->clip_coefficient;
    scalars.beta1 = a->beta1;
    scalars.one_minus_beta1 = f32_sub(1.0f, a->beta1);
    scalars.beta2 = a->beta2;
    scalars.one_minus_beta2 = f32_sub(1.0f, a->beta2);
    scalars.correction1 = a->control->bias_correction1;
    scalars.correction2 = a->control->bias_correction2;
    scalars.epsilon = a->epsilon;
    scalars.learning_rate = a->control->learning_rate;
    scalars.weight_decay = weight_decay;
    return scalars;
}

// Upper limit of |p|. Below it, weight differences and decoded weights are finite.
#define MASTER_LIMIT 0x7E800000u  // the bits of 2^126

// AdamW as in Apex's FusedAdam (adam_w mode): epsilon is added after the square root, and decoupled
// weight decay is scaled by the learning rate. Updates p, m and v. Returns false if v is not finite
// or |p| reaches MASTER_LIMIT (p is not finite if m is not).
HD_FN bool adamw_step(float *p, float *m, float *v, float grad, AdamScalars a) {
    float g = f32_mul(grad, a.clip);
    *m = f32_add(f32_mul(a.beta1, *m), f32_mul(a.one_minus_beta1, g));
    *v = f32_add(f32_mul(a.beta2, *v), f32_mul(f32_mul(a.one_minus_beta2, g), g));
    float m_hat = f32_div(*m, a.correction1);
    float v_hat = f32_div(*v, a.correction2);
    float decay = f32_mul(a.weight_decay, *p);
    float step = f32_add(f32_div(m_hat, f32_add(f32_sqrt(v_hat), a.epsilon)), decay);
    *p = f32_sub(*p, f32_mul(a.learning_rate, step));
    // No branches, so that compilers vectorize the caller's loop.
    int small = (f32_bits(*p) & 0x7FFFFFFFu) < MASTER_LIMIT;
    int finite = (f32_bits(*v) & 0x7FFFFFFFu) < 0x7F800000u;
    return small & finite;
}

// The same, but leaves p, m and v unchanged if it returns false.
HD_FN bool adamw_element(float *p, float *m, float *v, float grad, AdamScalars a) {
    float p_new = *p, m_new = *m, v_new = *v;
    bool sound = adamw_step(&p_new, &m_new, &v_new, grad, a);
    *p = sound ? p_new : *p;
    *m = sound ? m_new : *m;
    *v = sound ? v_new : *v;
    return sound;
}
