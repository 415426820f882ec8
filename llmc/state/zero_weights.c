// Where a rank's weights lie. Called by the files of this room, and by train_gpt.cu through zero.h.
#include "llmc/state/zero_inside.h"

floatX *zero_weight(const Zero *zero, int tensor) { return zero->weights + zero->plan.tensor_arena[tensor]; }

WeightWindows zero_own_weights(const Zero *zero, int b) {
    const Bucket *bucket = &zero->plan.bucket[b];
    return weight_windows_of(bucket, zero->weights + bucket->arena_start, zero->mesh->dp.rank);
}

floatX *zero_piece_weights(const Zero *zero, const Piece *piece) { return zero->weights + piece->arena_at; }
