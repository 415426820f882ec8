// Geometry of the training state: see state_base.h.
#include "llmc/state/state_base.h"

#include <assert.h>

const GradFormat *base_grad_format(const Base *base, int64_t iteration) {
    assert(iteration >= 0);
    // As in Megatron-LM, the flag counts iterations from 0.
    bool quantized = base->config->quantized_gradients &&
                     iteration - 1 >= base->config->gradients_quantization_start_iteration;
    return quantized ? &base->grad_format : &base->plain_grad_format;
}

bool base_cut_segment(const BucketLayout *layout, int b, int i, int owner, Range *range, int64_t *in_shard) {
    assert(b >= 0 && b < layout->buckets && i >= 0 && owner >= 0 && owner < layout->dp);
    const Bucket *bucket = &layout->bucket[b];
    const Segment *segment = &layout->segments[bucket->first_segment + i];
    bool matrix = i < bucket->segments;
    int64_t size = matrix ? bucket->matrix_per_rank : bucket->tail_per_rank, shard = owner * size;
    int64_t from = segment->start, to = segment->start + segment->numel;
    if (from < shard) from = shard;
    if (to > shard + size) to = shard + size;
    if (from >= to) return false;
    range->tensor = (int)segment->tensor;
    range->bucket = b;
    range->lo = from - segment->start;
    range->hi = to - segment->start;
    range->arena_at = bucket->arena_start + (matrix ? 0 : bucket->matrix_elements) + from;
    *in_shard = from - shard;
    return true;
}

// Returns the index of a bucket's element in this rank's optimizer state.
static int64_t state_index(const Base *base, const Bucket *state, int64_t at) {
    int shard = base_state_shard(base);
    if (at < state->matrix_elements) return state->state_start + at - shard * state->matrix_per_rank;
    at -= state->matrix_elements;
    return state->state_start + state->matrix_per_rank + at - shard * state->tail_per_rank;
}

int64_t base_squares_start(const Base *base, int b) { return layout_squares_start(base->state, b); }

static void list_shard(Base *base, int owner) {
    for (int b = 0; b < base->layout.buckets; b++) {
        const Bucket *bucket = &base->layout.bucket[b], *state = &base->state->bucket[b];
        int64_t squares = base_squares_start(base, b) - state->state_start;
        if (state->whole) squares -= state->matrix_per_rank;
        for (int i = 0; i < bucket->segments + bucket->tails; i++) {
            Range *range = &base->ranges[base->held_count];
            int64_t in_shard;
            if (!base_cut_segment(&base->layout, b, i, owner, range, &in_shard)) continue;
            range->state_at = state_index(base, state, range->arena_at - bucket->arena_start);
            range->squares_at = range->state_at + squares;
            base->held_count++;
        }
    }
}

void base_list_ranges(Base *base) {
    int dp = base->layout.dp, shards = dp / base->state->dp;
    base->ranges = xcalloc((size_t)(shards * base->layout.segments_total), sizeof(Range),
                           "the shard's ranges");
    list_shard(base, base->mesh->dp.rank);
    base->range_count = base->held_count;
    for (int i = 1; i < shards; i++) list_shard(base, (base->mesh->dp.rank + i) % dp);
}

int64_t base_alignment(const Base *base) {
    bool mapped = base->config->node_exchange != NODE_EXCHANGE_NCCL && base->mesh->node.size > 1;
    return mapped ? COMM_ALIGNMENT : 1;
}
