// Where a rank's gradients lie. Called by the files of this room, and by train_gpt.cu through
// zero.h.
#include "llmc/state/zero_inside.h"

float *zero_grad(const Zero *zero, int tensor) { return zero->grads + zero->plan.tensor_arena[tensor]; }

Windows zero_own_grads(const Zero *zero, int b) {
    const Bucket *bucket = &zero->plan.bucket[b];
    return windows_of(bucket, zero->grads + bucket->arena_start, zero->mesh->dp.rank);
}

float *zero_piece_grads(const Zero *zero, const Piece *piece) { return zero->grads + piece->arena_at; }
