// Gradients of a rank: the buffers that backward writes, and this rank's reduced shard. Each bucket
// has a store, chosen when the run is planned; grads.c lists the stores. Called by the files of
// llmc/state.
#pragma once
#include "llmc/base/memory_plan.h"
#include "llmc/state/state_base.h"
#include "sdp4bit/tlq_hs.h"
LLMC_BEGIN

enum { GRAD_SLOTS = 2 };

typedef struct Grads Grads;

typedef struct GradStore {
    bool accumulates;  // reduced once per step; else in every micro-batch
    // Local gradients of the whole bucket: (matrix_elements + tail_elements).
    float *(*full)(const Base *base, const Grads *grads, int b);
    // This rank's reduced gradients.
    GradShard (*shard)(const Base *base, const Grads *grads, int b);
    // Gradients of the optimizer state that this rank holds. Valid after the gather, if any.
    GradShard (*held)(const Base *base, const Grads *grads, int b);
    // First reduced gradient of a range of this rank's shard.
    float *(*of_range)(const Base *base, const Grads *grads, const Range *range);
    // All-gathers the reduced shards, in the order of lanes->last. buffer: (grads_gather_bytes).
    // NULL if this rank needs only its own shard.
    void (*gather)(const Base *base, const Grads *grads, const TlqStep *step, int b, uint8_t *buffer);
} GradStore;

typedef struct GradBucket {
    const GradStore *store;
    int64_t start;      // first element in `whole` or `shard`
    bool begun;         // the backward pass has started to write it
    int reductions;     // in this step so far
    int units_missing;  // layers without complete gradients in this backward pass
    Event *ready;       // the gradients are complete
} GradBucket;

struct Grads {
    GradBucket *bucket;       // (buckets)
    float *whole;             // (whole_elements) device: accumulated buckets
    float *slot[GRAD_SLOTS];  // (slot_elements) device: bucket b uses slot b % GRAD_SLOTS
    float *shard;             // (shard_elements) device: this rank's shards of the other buckets. If the
                              // optimizer copies gradients to the host: two windows, used in turn
    int64_t whole_elements, slot_elements, shard_elements;
    bool warming_up;               // zero_warm_up
    Event *slot_read[GRAD_SLOTS];  // the slot's gradients have been quantized
};

// windows: the optimizer copies reduced gradients to the host at once, so two windows serve all
// shards.
void grads_reserve(const Base *base, Grads *grads, bool windows, MemoryPlan *memory_plan);
void grads_start(const Base *base, Grads *grads);
void grads_free(const Base *base, Grads *grads);

static inline float *grads_full(const Base *base, const Grads *grads, int b) {
    return grads->bucket[b].store->full(base, grads, b);
}
static inline GradShard grads_shard(const Base *base, const Grads *grads, int b) {
    return grads->bucket[b].store->shard(base, grads, b);
}
static inline GradShard grads_held(const Base *base, const Grads *grads, int b) {
    return grads->bucket[b].store->held(base, grads, b);
}
float *grads_tensor(const Base *base, const Grads *grads, int tensor);
// Returns true if some buckets are reduced in every micro-batch.
bool grads_use_slots(const Base *base, const Grads *grads);
// Bytes of the buffer that buckets use in turn for the gather; 0 if no bucket is gathered.
size_t grads_gather_bytes(const Base *base, const Grads *grads);

// Starts a step.
void grads_new_step(const Base *base, Grads *grads);
// Makes compute wait until the bucket's slot may be written. Called before backward of the unit.
void grads_begin(const Base *base, Grads *grads, int unit);
// Marks the unit's gradients complete. Returns true for the last unit of a bucket; the lanes then
// wait for compute, and the bucket may be reduced.
bool grads_complete(const Base *base, Grads *grads, int unit);
// Called when the bucket's reduction has been queued.
void grads_reduced(const Base *base, Grads *grads, int b);
// The update has used the bucket's gradients: clears what the next step adds to.
void grads_consumed(const Base *base, Grads *grads, int b);

// --- --error-feedback ----------------------------------------------------------------------------

// The residual of the gradient hop between nodes (sdp4bit/README.md). sdp4bit/tlq_hs.c reads and
// writes the memory.

// A rank holds the residual of the matrix shards it quantizes for the other nodes: the shards of
// the ranks on its rail. Together the ranks of a node hold each element once.
typedef struct Feedback {
    float *memory;   // device: bucket by bucket, (nodes, matrix_per_rank); NULL without error feedback
    int64_t *start;  // (buckets) first element of a bucket
    Range *ranges;   // (range_count) state_at: in `memory`
    int range_count;
} Feedback;

void feedback_reserve(const Base *base, Feedback *feedback, MemoryPlan *memory_plan);
// Sets the residual in `step`, a reduction of bucket b whose grad_format and micro_batch are set.
// frozen: the reduction must not change the residual.
void feedback_step(const Base *base, const Feedback *feedback, int b, bool frozen, TlqStep *step);
static inline bool feedback_on(const Feedback *feedback) { return feedback->start != NULL; }

LLMC_END
