// The elementwise part of Muon: momentum, normalization and update of one matrix, part of the exact
// regime. The Newton-Schulz iteration between them (llmc/ops.h) is not. Called by
// llmc/state/muon.c; muon_cpu.c and kernels_cuda_muon.cu implement the kernels, and muon_host.c
// what runs on host cores if the optimizer state is not on the device.
//
//   M = mu M + (1 - mu) g                  g = grad * clip; the moving average of Megatron-LM,
//                                          rounded to bf16 with --exp-avg-dtype bf16
//   U = M, or (1 - mu) g + mu M            with Nesterov momentum
//   X = U / max(|U|, 1e-15)                Frobenius norm, rounded to floatX
//   O = Newton-Schulz(X)
//   W = (1 - lr wd) W - (lr scale) O
#pragma once
#include "sdp4bit/adamw.h"
LLMC_BEGIN

// A tensor (rows, whole) whose columns are divided among tensor-parallel ranks.
typedef struct MuonColumns {
    int64_t whole, own;  // elements of a row of the tensor, and of a rank's slice; 0: not divided
    int64_t slice;       // elements of a slice
} MuonColumns;

// One matrix, or one part of its rows: queries, keys and values of the fused QKV matrix are
// interleaved by group. Row i of the part is row i / part_rows * group_rows + first_row + i %
// part_rows of the tensor. Pointers to state refer to the tensor's first element.
typedef struct MuonPart {
    const StepStatus *control;
    const float *grads;
    float *momentum, *master;
    uint16_t *momentum_bf16;  // used instead of momentum if not NULL
    float mu, one_minus_mu;   // 1 - mu in fp32
    bool nesterov;
    float scale, weight_decay;
    int64_t rows, columns;  // of the part
    int64_t group_rows, first_row, part_rows;
    // All 0 unless columns are divided. `gathered`: the state pointers refer to the slices of all
    // ranks, one after another. `sliced`: they refer to one slice, and O is of the whole tensor,
    // starting with the slice's first element.
    MuonColumns gathered, sliced;
    uint64_t *fault, code;  // set by refused elements, as in UpdateShard
} MuonPart;

// Updates the momentum of `elements` consecutive elements, which are the whole tensor. An element
// that would not be finite is refused. direction: receives U (elements), or NULL. No-op if the step
// is skipped.
void kernel_muon_momentum(Stream *s, const MuonPart *a, int64_t elements, float *direction);
// Computes the sums of squares of U over each 32 consecutive elements of the part, (ceil(rows *
// columns / 32)), padded with 0.
void kernel_muon_squares(Stream *s, const MuonPart *a, float *partials);
// Computes x (rows, columns) from the sum of squares.
void kernel_muon_normalize(Stream *s, const MuonPart *a, const float *sum, floatX *x);
// Updates the part's master weights by O (rows, columns). Refuses elements that reach MASTER_LIMIT.
// No-op if the step is skipped.
void kernel_muon_apply(Stream *s, const MuonPart *a, const floatX *o);

// kernel_muon_momentum and kernel_muon_apply on `threads` host threads, with host pointers and
// bitwise identical results. They report progress to the watchdog of `site`, which may be NULL.
void muon_momentum_host(const MuonPart *a, int64_t elements, float *direction, int threads, const Site *site);
void muon_apply_host(const MuonPart *a, const floatX *o, int threads, const Site *site);

// Returns the index in the tensor of element i of the part.
HD_FN int64_t muon_index(const MuonPart *a, int64_t i) {
    const MuonColumns *columns = &a->gathered;
    if (columns->own) {  // such tensors have only one part
        int64_t row = i / columns->whole, column = i - row * columns->whole, rank = column / columns->own;
        return rank * (columns->slice - columns->own) + row * columns->own + column;
    }
    if (a->part_rows == a->group_rows) return i;
    int64_t row = i / a->columns, column = i - row * a->columns, group = row / a->part_rows;
    return (group * (a->group_rows - a->part_rows) + a->first_row + row) * a->columns + column;
}
// Returns the index in O of element i of the part.
HD_FN int64_t muon_output_index(const MuonPart *a, int64_t i) {
    const MuonColumns *columns = &a->sliced;
    return columns->own ? i + i / columns->own * (columns->whole - columns->own) : i;
}

HD_FN float muon_load(const MuonPart *a, int64_t at) {
    return a->momentum_bf16 ? bf16_to_float(a->momentum_bf16[at]) : a->momentum[at];
}
HD_FN void muon_store(const MuonPart *a, int64_t at, float momentum) {
    if (a->momentum_bf16) a->momentum_bf16[at] = bf16_from_float(momentum);
    else a->momentum[at] = momentum;
}
HD_FN float muon_momentum(const MuonPart *a, float clip, float momentum, float grad) {
    return f32_add(f32_mul(a->mu, momentum), f32_mul(a->one_minus_mu, f32_mul(grad, clip)));
}
// momentum: already updated.
HD_FN float muon_direction(const MuonPart *a, float clip, float momentum, float grad) {
    return a->nesterov ? muon_momentum(a, clip, momentum, grad) : momentum;
}
HD_FN bool muon_finite(float x) { return (f32_bits(x) & 0x7FFFFFFFu) < 0x7F800000u; }
// Returns NaN if the sum overflowed, so that the update is refused instead of being 0.
HD_FN float muon_norm(float sum) {
    float norm = f32_sqrt(sum);
    if (!muon_finite(norm)) return f32_from_bits(0x7FC00000u);
    return norm < 1e-15f ? 1e-15f : norm;
}
// Updates M of the tensor's element `at` and returns true if it stays finite, also after rounding.
HD_FN bool muon_update_momentum(const MuonPart *a, float clip, int64_t at) {
    float old = muon_load(a, at), next = muon_momentum(a, clip, old, a->grads[at]);
    bool finite = muon_finite(a->momentum_bf16 ? bf16_to_float(bf16_from_float(next)) : next);
    muon_store(a, at, finite ? next : old);  // no branch, so that compilers vectorize the caller's loop
    return finite;
}
// Updates *p unless it returns false.
HD_FN bool muon_element(const MuonPart *a, float learning_rate, float *p, float o) {
    float decay = f32_sub(1.0f, f32_mul(learning_rate, a->weight_decay));
    float next = f32_sub(f32_mul(*p, decay), f32_mul(f32_mul(learning_rate, a->scale), o));
    bool sound = (f32_bits(next) & 0x7FFFFFFFu) < MASTER_LIMIT;
    if (sound) *p = next;
    return sound;
}

LLMC_END
