// A rank's gradients: see grads.h. The stores:
//   accumulated  ZeRO-1, and buckets with embeddings. Gradients of the whole bucket, summed over
//                the micro-batches of a step and reduced once per step. replicated no_shard. Like
//                accumulated, but every rank then gathers the reduced bucket.
//   slots        ZeRO-2 and 3. All buckets share two slots: bucket b+1 is reduced from one slot
//                while backward writes bucket b to the other. Every micro-batch is reduced at once,
//                and this rank's shard accumulates the micro-batches of a step.
#include "llmc/state/grads.h"

#include <assert.h>
#include <stdlib.h>

// --- stores --------------------------------------------------------------------------------------

static float *full_accumulated(const Base *base, const Grads *grads, int b) {
    return grads->whole + grads->bucket[b].start;
}

static GradShard shard_accumulated(const Base *base, const Grads *grads, int b) {
    return grad_shard_of(&base->layout.bucket[b], full_accumulated(base, grads, b), base->mesh->dp.rank);
}

static float *range_accumulated(const Base *base, const Grads *grads, const Range *range) {
    return full_accumulated(base, grads, range->bucket) + range->arena_at -
           base->layout.bucket[range->bucket].arena_start;
}

static GradShard held_accumulated(const Base *base, const Grads *grads, int b) {
    return grad_shard_of(&base->state->bucket[b], full_accumulated(base, grads, b), base_state_shard(base));
}

static void gather_replicated(const Base *base, const Grads *grads, const TlqStep *step, int b,
                              uint8_t *buffer) {
    tlq_gather_bucket(step, b, grads_full(base, grads, b), buffer, base->lanes);
}

#define ACCUMULATED \
    .accumulates = true, .full = full_accumulated, .shard = shard_accumulated, .held = held_accumulated, \
    .of_range = range_accumulated
static const GradStore accumulated = {ACCUMULATED};
static const GradStore replicated = {ACCUMULATED, .gather = gather_replicated};

static float *full_slot(const Base *base, const Grads *grads, int b) { return grads->slot[b % GRAD_SLOTS]; }

static GradShard shard_slots(const Base *base, const Grads *grads, int b) {
    float *own = grads->shard + grads->bucket[b].start;
    GradShard shard = {own, own + base->layout.bucket[b].matrix_per_rank};
    return shard;
}

static float *range_slots(const Base *base, const Grads *grads, const Range *range) {
    return grads->shard + grads->bucket[range->bucket].start + range->state_at -
           base->layout.bucket[range->bucket].state_start;
}

static const GradStore slots = {.full = full_slot,
                                .shard = shard_slots,
                                .held = shard_slots,
                                .of_range = range_slots};

// --- memory --------------------------------------------------------------------------------------

// Returns true if each backward pass of a micro-batch completes all gradients of the bucket. False
// for embeddings, which get gradients at both ends of a pass and are exchanged by pipeline stages
// once per step. Also false for buckets with layers of several model chunks.
static bool in_one_pass(const Base *base, int b) {
    int chunk = ANY_CHUNK;
    for (int t = 0; t < base->layout.tensors; t++) {
        if (base->layout.tensor_bucket[t] != b) continue;
        if (chunk == ANY_CHUNK) chunk = base->tensors[t].chunk;
        if (base->tensors[t].chunk == ANY_CHUNK || base->tensors[t].chunk != chunk) return false;
    }
    return true;
}

static void choose_stores(const Base *base, Grads *grads) {
    bool sharded = (base->config->sharding == SHARD_GRADIENTS ||
                    base->config->sharding == SHARD_PARAMETERS) &&
                   base->layout.dp > 1;
    const GradStore *whole = base->state->dp == base->layout.dp ? &accumulated : &replicated;
    for (int b = 0; b < base->layout.buckets; b++)
        grads->bucket[b].store = sharded && in_one_pass(base, b) ? &slots : whole;
}

size_t grads_gather_bytes(const Base *base, const Grads *grads) {
    size_t most = 0;
    for (int b = 0; b < base->layout.buckets; b++) {
        size_t bytes = (size_t)(base->layout.dp * layout_reduced_message(&base->layout.bucket[b]).bytes);
        if (grads->bucket[b].store->gather && bytes > most) most = bytes;
    }
    return most;
}

static void place_buckets(const Base *base, Grads *grads, bool windows) {
    int64_t largest = 0;
    for (int b = 0; b < base->layout.buckets; b++) {
        const Bucket *bucket = &base->layout.bucket[b];
        int64_t elements = bucket_elements(bucket), own = round_up64(bucket_shard(bucket), 64);
        bool accumulates = grads->bucket[b].store->accumulates;
        grads->bucket[b].start = accumulates ? grads->whole_elements : grads->shard_elements;
        // Buckets are aligned as in the bucket layout.
        if (accumulates) grads->whole_elements += round_up64(elements, 128);
        else grads->shard_elements += own;
        if (!accumulates && elements > grads->slot_elements) grads->slot_elements = elements;
        if (!accumulates && own > largest) largest = own;
    }
    if (!windows) return;
    for (int b = 0; b < base->layout.buckets; b++) {
        if (!grads->bucket[b].store->accumulates) grads->bucket[b].start = b % GRAD_SLOTS * largest;
    }
    grads->shard_elements = GRAD_SLOTS * largest;
}

void grads_reserve(const Base *base, Grads *grads, bool windows, MemoryPlan *memory_plan) {
    size_t buckets = (size_t)base->layout.buckets;
    grads->bucket = xcalloc(buckets, sizeof *grads->bucket, "the bucket table");
    grads->complete = xcalloc((size_t)base->layout.units, sizeof *grads->complete, "the bucket table");
    choose_stores(base, grads);
    place_buckets(base, grads, windows);
    const char *group = "gradients";
    memory_plan_reserve(memory_plan, group, "fp32 accumulated", (size_t)grads->whole_elements * sizeof(float),
                        (void **)&grads->whole);
    for (int slot = 0; slot < GRAD_SLOTS; slot++)
        memory_plan_reserve(memory_plan, group, "fp32, a bucket in backward",
                            (size_t)grads->slot_elements * sizeof(float), (void **)&grads->slot[slot]);
    memory_plan_reserve(memory_plan, group,
                        windows ? "fp32, own shard of a bucket" : "fp32 accumulated, own shard",
                        (size_t)grads->shard_elements * sizeof(float), (void **)&grads->shard);
}

void grads_start(const Base *base, Grads *grads) {
    for (int b = 0; b < base->layout.buckets; b++) grads->bucket[b].ready = event_create(base->device);
    for (int slot = 0; slot < GRAD_SLOTS; slot++) grads->slot_read[slot] = event_create(base->device);
}

void grads_free(const Base *base, Grads *grads) {
    for (int b = 0; base->device && grads->bucket && b < base->layout.buckets; b++)
        event_destroy(grads->bucket[b].ready);
    for (int slot = 0; base->device && grads->bucket && slot < GRAD_SLOTS; slot++)
        event_destroy(grads->slot_read[slot]);
    free(grads->bucket);
    free(grads->complete);
}

float *grads_tensor(const Base *base, const Grads *grads, int tensor) {
    assert(tensor >= 0 && tensor < base->layout.tensors);
    if (!grads->bucket) return NULL;
    int b = base->layout.tensor_bucket[tensor];
    return grads_full(base, grads, b) + base->layout.tensor_arena[tensor] -
           base->layout.bucket[b].arena_start;
}

bool grads_use_slots(const Base *base, const Grads *grads) {
    for (int b = 0; b < base->layout.buckets; b++) {
        if (!grads->bucket[b].store->accumulates) return true;
    }
    return false;
}

// --- backward ------------------------------------------------------------------------------------

int grads_chunks(const Base *base, int b) {
    const GradFormat *format = base_grad_format(base, base->step);
    return base->layout.dp > 1 ? layout_chunks(&base->layout, &base->layout.bucket[b], format) : 1;
}

static void expect_units(const Base *base, Grads *grads, int b) {
    const Bucket *bucket = &base->layout.bucket[b];
    for (int u = bucket->first_unit; u < bucket->end_unit; u++) grads->complete[u] = false;
    grads->bucket[b].complete_from = bucket->end_unit;
    grads->bucket[b].chunks_left = grads_chunks(base, b);
    grads->bucket[b].begun = false;
}

void grads_new_step(const Base *base, Grads *grads) {
    for (int b = 0; b < base->layout.buckets; b++) {
        expect_units(base, grads, b);
        grads->bucket[b].reductions = 0;
    }
}

// Zeros the elements of a slot that backward does not overwrite: the tail, to which it adds, and
// the padding between matrices, which may hold gradients of the slot's previous bucket.
static void clear_rest(const Base *base, Grads *grads, int b) {
    const Bucket *bucket = &base->layout.bucket[b];
    float *full = grads_full(base, grads, b);
    int64_t at = 0;
    for (int i = 0; i < bucket->segments; i++) {
        const Segment *segment = &base->layout.segments[bucket->first_segment + i];
        if (segment->start > at)
            set_zero(base->compute, full + at, (size_t)(segment->start - at) * sizeof(float));
        at = segment->start + segment->numel;
    }
    int64_t end = bucket_elements(bucket);
    if (end > at) set_zero(base->compute, full + at, (size_t)(end - at) * sizeof(float));
}

void grads_begin(const Base *base, Grads *grads, int unit) {
    assert(unit >= 0 && unit < base->layout.units);
    int b = base->layout.unit_bucket[unit];
    if (grads->bucket[b].store->accumulates || grads->bucket[b].begun) return;
    grads->bucket[b].begun = true;
    timer_start(base->timers, TIMER_EXPOSED_GRADIENTS, base->compute);
    stream_wait(base->compute, grads->slot_read[b % GRAD_SLOTS]);
    timer_stop(base->timers, TIMER_EXPOSED_GRADIENTS, base->compute);
    clear_rest(base, grads, b);
}

// Backward usually completes units in descending order. With several model chunks of a pipeline it
// may not; then chunks wait until all later units of the bucket are complete too.
ChunkRange grads_complete(const Base *base, Grads *grads, int unit, bool at_once) {
    assert(unit >= 0 && unit < base->layout.units);
    int b = base->layout.unit_bucket[unit], chunks = grads_chunks(base, b);
    const Bucket *bucket = &base->layout.bucket[b];
    GradBucket *state = &grads->bucket[b];
    grads->complete[unit] = true;
    while (state->complete_from > bucket->first_unit && grads->complete[state->complete_from - 1])
        state->complete_from--;
    bool all = state->complete_from == bucket->first_unit;
    if (at_once && !all) return (ChunkRange){0, 0};
    int first = layout_first_complete(&base->layout, bucket, chunks, state->complete_from);
    if (first >= state->chunks_left) return (ChunkRange){0, 0};
    ChunkRange range = {first, state->chunks_left};
    state->chunks_left = first;
    timer_start(base->timers, TIMER_EXPOSED_GRADIENTS, base->compute);
    event_record(state->ready, base->compute);
    if (base->lanes->apart) stream_wait(base->lanes->first, state->ready);
    stream_wait(base->lanes->last, state->ready);
    return range;
}

void grads_reduced(const Base *base, Grads *grads, int b, ChunkRange chunks) {
    assert(b >= 0 && b < base->layout.buckets);
    if (!grads->bucket[b].store->accumulates && chunks.first == 0) {
        event_record(grads->slot_read[b % GRAD_SLOTS], base->lanes->first);
        expect_units(base, grads, b);  // for the next micro-batch
    }
    if (base->config->no_overlap) lanes_synchronize(base->lanes);
    timer_stop(base->timers, TIMER_EXPOSED_GRADIENTS, base->compute);
}

void grads_consumed(const Base *base, Grads *grads, int b) {
    assert(b >= 0 && b < base->layout.buckets);
    const Bucket *bucket = &base->layout.bucket[b];
    // The next step overwrites the gradients of matrices and adds to the gradients of the tail.
    if (grads->bucket[b].store->accumulates)
        set_zero(base->lanes->last, grads_full(base, grads, b) + bucket->matrix_elements,
                 (size_t)bucket->tail_elements * sizeof(float));
}

// --- error feedback ------------------------------------------------------------------------------

static int64_t shards_of_rank(const Base *base) { return base->layout.options.nodes; }

static void list_bucket(const Base *base, Feedback *f, int b) {
    const Bucket *bucket = &base->layout.bucket[b];
    for (int k = 0; k < shards_of_rank(base); k++) {
        int owner = k * base->layout.options.per_node + base->mesh->node.rank;
        for (int i = 0; i < bucket->segments; i++) {
            Range range;
            int64_t in_shard;
            if (!base_cut_segment(&base->layout, b, i, owner, &range, &in_shard)) continue;
            range.state_at = f->start[b] + k * bucket->matrix_per_rank + in_shard;
            f->ranges[f->range_count++] = range;
        }
    }
}

void feedback_reserve(const Base *base, Feedback *f, MemoryPlan *memory_plan) {
    const Config *c = base->config;
    if (!c->error_feedback || !c->quantized_gradients || base->mesh->rail.size == 1 || c->replica_group)
        return;
    int64_t elements = 0, most = shards_of_rank(base) * base->layout.segments_total;
    f->start = xcalloc((size_t)base->layout.buckets, sizeof *f->start, "the bucket table");
    f->ranges = xcalloc((size_t)most, sizeof(Range), "the residual's ranges");
    for (int b = 0; b < base->layout.buckets; b++) {
        f->start[b] = elements;
        elements += shards_of_rank(base) * base->layout.bucket[b].matrix_per_rank;
        list_bucket(base, f, b);
    }
    memory_plan_reserve(memory_plan, "gradients", "residual of error feedback",
                        (size_t)elements * sizeof(float), (void **)&f->memory);
}

// The first reduction of a step reads the status of the previous step. If that step was skipped,
// its residual is discarded like its gradients.
void feedback_step(const Base *base, const Feedback *f, int b, bool frozen, TlqStep *step) {
    assert(b >= 0 && b < base->layout.buckets);
    step->error_feedback = feedback_on(f) && codec_grouped(step->grad_format.inter_codec);
    if (!step->error_feedback) return;
    step->residual.values = f->memory + f->start[b];
    step->residual.control = step->micro_batch == 0 ? base->control : NULL;
    step->residual.frozen = frozen;
}
