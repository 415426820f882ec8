// Gradients of a rank: the buffers that backward writes, and this rank's reduced shard. Each bucket
// has a store, chosen when the run is planned; grads.c lists the stores.
#pragma once
#include "llmc/base/memory_plan.h"
#include "llmc/state/state_base.h"
#include "sdp4bit/tlq_hs.h"
LLMC_BEGIN

enum { GRAD_SLOTS = 2 };

typedef struct Grads Grads;

typedef struct GradStore {
    bool accumulates;  // true: reduced once per step; false: in every micro-batch
    // Returns the local gradients of the whole bucket: (matrix_elements + tail_elements).
    float *(*full)(const Base *base, const Grads *grads, int b);
    // Returns this rank's shard of the reduced gradients.
    GradShard (*shard)(const Base *base, const Grads *grads, int b);
    // Returns the gradients for this rank's optimizer state; valid after `gather`, if it is set.
    GradShard (*held)(const Base *base, const Grads *grads, int b);
    // Returns the first reduced gradient of a range of this rank's shard.
    float *(*of_range)(const Base *base, const Grads *grads, const Range *range);
    // All-gathers the reduced shards; the result is complete on lanes->last. buffer:
    // (grads_gather_bytes). NULL if ranks need only their own shard.
    void (*gather)(const Base *base, const Grads *grads, const TlqStep *step, int b, uint8_t *buffer);
} GradStore;

typedef struct GradBucket {
    const GradStore *store;
    int64_t start;      // first element in `whole` or `shard`
    bool begun;         // the backward pass has begun to write the bucket
    int reductions;     // number of reductions in this step so far
    int complete_from;  // gradients of this and all later units of the bucket are complete
    int chunks_left;    // chunks [0, chunks_left) have not been reduced in this backward pass
    Event *ready;       // the gradients of the next chunks are complete
} GradBucket;

struct Grads {
    GradBucket *bucket;       // (buckets)
    bool *complete;           // (units) the gradients are complete in this backward pass
    float *whole;             // (whole_elements) device: accumulated buckets
    float *slot[GRAD_SLOTS];  // (slot_elements) device: bucket b uses slot b % GRAD_SLOTS
    float *shard;             // (shard_elements) device: this rank's shards of the other buckets. With
                              // --optimizer-cpu-offload: two windows that these buckets use in turn
    int64_t whole_elements, slot_elements, shard_elements;
    bool warming_up;               // set by zero_warm_up
    Event *slot_read[GRAD_SLOTS];  // the slot's gradients have been quantized
};

// Chooses the stores and reserves their memory. windows: the optimizer copies reduced gradients to
// the host at once, so the shards of all buckets share two windows.
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
// Returns the size of the buffer for `gather`; 0 if no bucket is gathered.
size_t grads_gather_bytes(const Base *base, const Grads *grads);

// Returns the number of chunks in which a bucket is reduced in this step; 1 on a single rank, which
// sends nothing.
int grads_chunks(const Base *base, int b);
// Starts a step.
void grads_new_step(const Base *base, Grads *grads);
// Makes compute wait until backward may write the bucket's slot.
void grads_begin(const Base *base, Grads *grads, int unit);
// Marks the unit's gradients as complete. Returns the chunks of its bucket that are complete and
// not yet reduced, or an empty range. If there are some, the lanes wait for compute, and the caller
// must reduce them. at_once: returns no chunks until all units of the bucket are complete.
ChunkRange grads_complete(const Base *base, Grads *grads, int unit, bool at_once);
// Called when the reduction of these chunks has been queued.
void grads_reduced(const Base *base, Grads *grads, int b, ChunkRange chunks);
// Zeros the gradients that the next step adds to. Called when the update has been queued.
void grads_consumed(const Base *base, Grads *grads, int b);

// --- --error-feedback ----------------------------------------------------------------------------

// The residual of the gradient hop between nodes (sdp4bit/README.md), updated by sdp4bit/tlq_hs.c.

// A rank holds the residual of the matrix shards that it quantizes for the nodes, which are the
// shards of the ranks on its rail. Together the ranks of a node hold each element once.
typedef struct Feedback {
    float *memory;   // device: bucket by bucket, (nodes, matrix_per_rank); NULL without error feedback
    int64_t *start;  // (buckets) first element of a bucket
    Range *ranges;   // (range_count) state_at: position in `memory`
    int range_count;
} Feedback;

void feedback_reserve(const Base *base, Feedback *feedback, MemoryPlan *memory_plan);
// Sets the residual of a reduction of bucket b. step: grad_format and micro_batch must be set.
// frozen: the reduction must not change the residual.
void feedback_step(const Base *base, const Feedback *feedback, int b, bool frozen, TlqStep *step);
static inline bool feedback_on(const Feedback *feedback) { return feedback->start != NULL; }

LLMC_END
