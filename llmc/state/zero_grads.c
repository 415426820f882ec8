// A rank's gradients: where they lie, and their reduction as backward completes them. Called by
// train_gpt.c through zero.h, and by the files of this room. What travels is sdp4bit/tlq_hs.h.
//
// Under ZeRO-1, and for the buckets that hold the embeddings, a bucket's gradients stay: backward
// adds a step's micro-batches in place, and they are reduced once. Under ZeRO-2 the other buckets
// have no memory of their own. Two slots serve them in turn: bucket b+1 travels out of one while
// backward writes bucket b into the other.
#include <stdlib.h>

#include "llmc/state/zero_inside.h"

// --- memory --------------------------------------------------------------------------------------

// A pass works with the embeddings at both of its ends, and pipeline stages exchange their gradient
// once a step. A bucket with layers of several chunks gets its gradients in several passes.
static bool in_one_pass(const Zero *zero, int b) {
    int chunk = ANY_CHUNK;
    for (int t = 0; t < zero->plan.tensors; t++) {
        if (zero->plan.tensor_bucket[t] != b) continue;
        if (chunk == ANY_CHUNK) chunk = zero->tensors[t].chunk;
        if (zero->tensors[t].chunk == ANY_CHUNK || zero->tensors[t].chunk != chunk) return false;
    }
    return true;
}

// With offload the reduced gradients lie on the host. On the device two windows serve the buckets
// in turn.
static void place_passing(Zero *zero) {
    Gradients *g = &zero->gradients;
    int64_t largest = 0;
    for (int b = 0; b < zero->plan.buckets; b++) {
        const Bucket *bucket = &zero->plan.bucket[b];
        int64_t own = round_up64(bucket_shard(bucket), 64);
        if (!g->stays[b] && own > largest) largest = own;
    }
    for (int b = 0; b < zero->plan.buckets; b++) {
        if (!g->stays[b]) g->start[b] = b % GRAD_SLOTS * largest;
    }
    g->shard_elements = GRAD_SLOTS * largest;
}

static void place_buckets(Zero *zero) {
    Gradients *g = &zero->gradients;
    bool shared_out = zero->config->sharding != SHARD_OPTIMIZER && zero->plan.dp > 1;
    for (int b = 0; b < zero->plan.buckets; b++) {
        const Bucket *bucket = &zero->plan.bucket[b];
        int64_t elements = bucket_elements(bucket);
        int64_t own = bucket_shard(bucket);
        g->stays[b] = !shared_out || !in_one_pass(zero, b);
        g->start[b] = g->stays[b] ? g->whole_elements : g->shard_elements;
        // As the layout rounds: whole lines of the caches.
        if (g->stays[b]) g->whole_elements += round_up64(elements, 128);
        else g->shard_elements += round_up64(own, 64);
        if (!g->stays[b] && elements > g->slot_elements) g->slot_elements = elements;
    }
    if (zero_offloads(zero)) place_passing(zero);
}

void zero_grads_reserve(Zero *zero, MemoryPlan *memory_plan) {
    Gradients *g = &zero->gradients;
    size_t buckets = (size_t)zero->plan.buckets;
    g->stays = (bool *)xcalloc(buckets, sizeof(bool), "the bucket table");
    g->start = (int64_t *)xcalloc(buckets, sizeof(int64_t), "the bucket table");
    g->begun = (bool *)xcalloc(buckets, sizeof(bool), "the bucket table");
    g->reductions = (int *)xcalloc(buckets, sizeof(int), "the bucket table");
    place_buckets(zero);
    const char *group = "gradients";
    memory_plan_reserve(memory_plan, group, "fp32 accumulated", (size_t)g->whole_elements * sizeof(float),
                        (void **)&g->whole);
    for (int slot = 0; slot < GRAD_SLOTS; slot++)
        memory_plan_reserve(memory_plan, group, "fp32, a bucket in backward",
                            (size_t)g->slot_elements * sizeof(float), (void **)&g->slot[slot]);
    memory_plan_reserve(memory_plan, group,
                        zero_offloads(zero) ? "fp32, a bucket's own window" : "fp32 accumulated, own shard",
                        (size_t)g->shard_elements * sizeof(float), (void **)&g->shard);
}

void zero_grads_start(Zero *zero) {
    for (int slot = 0; slot < GRAD_SLOTS; slot++)
        zero->gradients.slot_read[slot] = event_create(zero->device);
}

void zero_grads_free(Zero *zero) {
    Gradients *g = &zero->gradients;
    for (int slot = 0; zero->device && slot < GRAD_SLOTS; slot++) event_destroy(g->slot_read[slot]);
    free(g->stays);
    free(g->start);
    free(g->begun);
    free(g->reductions);
}

float *zero_bucket_grads(const Zero *zero, int b) {
    const Gradients *g = &zero->gradients;
    return g->stays[b] ? g->whole + g->start[b] : g->slot[b % GRAD_SLOTS];
}

float *zero_grad(const Zero *zero, int tensor) {
    if (!zero->gradients.stays) return NULL;
    int b = zero->plan.tensor_bucket[tensor];
    return zero_bucket_grads(zero, b) + zero->plan.tensor_arena[tensor] - zero->plan.bucket[b].arena_start;
}

Windows zero_own_grads(const Zero *zero, int b) {
    const Gradients *g = &zero->gradients;
    const Bucket *bucket = &zero->plan.bucket[b];
    if (g->stays[b]) return windows_of(bucket, g->whole + g->start[b], zero->mesh->dp.rank);
    Windows own = {g->shard + g->start[b], g->shard + g->start[b] + bucket->matrix_per_rank};
    return own;
}

float *zero_piece_grads(const Zero *zero, const Piece *piece) {
    const Gradients *g = &zero->gradients;
    const Bucket *bucket = &zero->plan.bucket[piece->bucket];
    if (g->stays[piece->bucket])
        return g->whole + g->start[piece->bucket] + piece->arena_at - bucket->arena_start;
    return g->shard + g->start[piece->bucket] + piece->state_at - bucket->state_start;
}

// --- backward ------------------------------------------------------------------------------------

bool zero_grads_stay(const Zero *zero, int unit) {
    return zero->gradients.stays[zero->plan.unit_bucket[unit]];
}

int zero_reductions(const Zero *zero, int bucket, int micro_batches) {
    return zero->gradients.stays[bucket] ? 1 : micro_batches;
}

static void expect_units(Zero *zero, int b) {
    zero->units_missing[b] = zero->plan.bucket[b].end_unit - zero->plan.bucket[b].first_unit;
    zero->gradients.begun[b] = false;
}

void zero_grads_new_step(Zero *zero) {
    for (int b = 0; b < zero->plan.buckets; b++) {
        expect_units(zero, b);
        zero->gradients.reductions[b] = 0;
    }
}

// Clears what backward does not overwrite: the tail, to which it adds, and pads between matrices.
// The slot's last bucket may have had matrices there.
static void clear_rest(Zero *zero, int b) {
    const Bucket *bucket = &zero->plan.bucket[b];
    float *grads = zero_bucket_grads(zero, b);
    int64_t at = 0;
    for (int i = 0; i < bucket->segments; i++) {
        const Segment *segment = &zero->plan.segments[bucket->first_segment + i];
        if (segment->start > at)
            set_zero(zero->compute, grads + at, (size_t)(segment->start - at) * sizeof(float));
        at = segment->start + segment->numel;
    }
    int64_t end = bucket_elements(bucket);
    if (end > at) set_zero(zero->compute, grads + at, (size_t)(end - at) * sizeof(float));
}

void zero_grads_begin(Zero *zero, int unit) {
    Gradients *g = &zero->gradients;
    int b = zero->plan.unit_bucket[unit];
    if (g->stays[b] || g->begun[b]) return;
    g->begun[b] = true;
    timer_start(zero->timers, TIMER_EXPOSED_GRADIENTS, zero->compute);
    stream_wait(zero->compute, g->slot_read[b % GRAD_SLOTS]);
    timer_stop(zero->timers, TIMER_EXPOSED_GRADIENTS, zero->compute);
    clear_rest(zero, b);
}

// --- reduction -----------------------------------------------------------------------------------

const GradWire *zero_wire_at(const Zero *zero, int64_t iteration) {
    // Megatron's iteration counter is 0-based when the flag is compared.
    bool quantize = zero->config->quantized_gradients &&
                    iteration - 1 >= zero->config->gradients_quantization_start_iteration;
    return quantize ? &zero->grad_wire : &zero->plain_grad_wire;
}

static TlqStep tlq_step(Zero *zero, int b) {
    TlqStep step = {0};
    step.plan = &zero->plan;
    step.mesh = zero->mesh;
    step.grad_wire = *zero_wire_at(zero, zero->step);
    step.workspace = zero->tlq;
    step.checks = &zero->wire_checks;
    step.segments = zero->segments;
    step.seed = (uint32_t)zero->config->seed;
    step.step = (uint32_t)zero->step;
    step.micro_batch = zero->gradients.reductions[b];
    step.add = step.micro_batch > 0;
    feedback_step(zero, b, &step);
    return step;
}

static void count_zeros(Zero *zero, int b) {
    for (int i = 0; i < zero->piece_count; i++) {
        const Piece *piece = &zero->pieces[i];
        if (piece->bucket != b || !zero->tensors[piece->tensor].counted) continue;
        kernel_count_zeros(zero->lanes->last, zero->zeros, zero_piece_grads(zero, piece),
                           piece->hi - piece->lo);
    }
}

bool zero_quantizes_first(const Zero *zero) {
    bool shared_out = false;
    for (int b = 0; b < zero->plan.buckets; b++) shared_out |= !zero->gradients.stays[b];
    return shared_out && zero_wire_at(zero, zero->step) != zero_wire_at(zero, zero->step - 1);
}

void zero_rehearse(Zero *zero, bool on) {
    zero->gradients.rehearsal = on;
    zero_grads_new_step(zero);
    zero->wire_checks.exchange = 0;
}

// With the step's last reduction the own windows hold its gradient.
static void reduce_bucket(Zero *zero, int b, bool last) {
    TlqStep step = tlq_step(zero, b);
    const Bucket *bucket = &zero->plan.bucket[b];
    float *matrix_leaves = zero->leaves + zero->leaf_start[b];
    float *tail_leaves = matrix_leaves + bucket->matrix_per_rank / HADAMARD_ORDER;
    Windows own = zero_own_grads(zero, b);
    if (!zero->gradients.rehearsal) probe_gradients(zero, &step, b);
    offload_expect(zero, b, step.add);
    tlq_reduce_bucket(&step, b, zero_bucket_grads(zero, b), own, matrix_leaves, tail_leaves, zero->lanes);
    zero->gradients.reductions[b]++;
    if (last) {
        probe_reduced(zero, b);
        tlq_sum_squares(&step, b, own, matrix_leaves, tail_leaves, zero->piece_sums + 2 * b, zero->lanes);
        if (zero->config->log_num_zeros_in_grad) count_zeros(zero, b);
    }
    offload_reduced(zero, b, last);
}

void zero_reduce_unit(Zero *zero, int unit, bool last) {
    int b = zero->plan.unit_bucket[unit];
    if (--zero->units_missing[b] > 0) return;
    timer_start(zero->timers, TIMER_EXPOSED_GRADIENTS, zero->compute);
    event_record(zero->ready[b], zero->compute);
    if (zero->lanes->apart) stream_wait(zero->lanes->first, zero->ready[b]);
    stream_wait(zero->lanes->last, zero->ready[b]);
    // From the bucket's readiness, or its predecessor's end, to its own end. Spans of one stream do
    // not overlap, so nothing counts twice.
    timer_start(zero->timers, TIMER_ALL_GRADS_SYNC, zero->lanes->last);
    reduce_bucket(zero, b, last);
    timer_stop(zero->timers, TIMER_ALL_GRADS_SYNC, zero->lanes->last);
    if (!zero->gradients.stays[b]) {
        event_record(zero->gradients.slot_read[b % GRAD_SLOTS], zero->lanes->first);
        expect_units(zero, b);  // of the next micro-batch
    }
    if (zero->config->no_overlap) lanes_synchronize(zero->lanes);
    timer_stop(zero->timers, TIMER_EXPOSED_GRADIENTS, zero->compute);
}
