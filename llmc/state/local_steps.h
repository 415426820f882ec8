// --local-steps H: every node is a replica group that trains independently, with its own master
// weights. As in DiLoCo, an outer step synchronizes each bucket every H steps.
//
// In addition to master weights and moments, a rank holds the outer weights of its shard and their
// momentum, which are equal in all replica groups. The outer steps of the buckets (their sync
// slots) are spread over the H steps:
//   end of step t          The bucket's pseudo-gradient (outer weights minus master weights) is
//                          averaged over the replica groups. The outer optimizer then updates the
//                          outer weights.
//   end of step t + delay  The master weights are set to the outer weights, or to a mix of both.
//                          The next update sends the change to the model weights.
//
// The last step of a run synchronizes all buckets with an outer learning rate of 1 and no momentum.
// The outer weights become the mean of all master weights, and the master weights are set to them
// at once. So the final evaluation and checkpoint include all steps of all replica groups.
//
// With --error-feedback a rank also keeps the rounding errors of its messages, one fp32 value per
// element of its shard, which differ between replica groups. Its next pseudo-gradient includes
// them. Elastic replica groups need no residual: after a sync, the difference between their outer
// and master weights still contains the rounding error of their offer (kernel_merge_outer).
//
// The exchange (sdp4bit/outer.h) has its own stream and overlaps with forward and backward. The
// update of step t + delay + 1 waits for it, as does any earlier read of master or outer weights.
#pragma once
#include "llmc/base/memory_plan.h"
#include "llmc/state/state_base.h"
#include "llmc/state/optimizer.h"
#include "llmc/state/weights.h"
#include "sdp4bit/outer.h"
LLMC_BEGIN

enum { OUTER_SLOTS = 2 };

typedef struct OuterBucket {
    int64_t slot;          // the bucket is synchronized in steps t with t % H == slot
    int64_t applies;       // the outer weights are applied to the master weights at the end of this step;
                           // 0: nothing to apply
    int first_kept, kept;  // ranges in Outer.kept_means
    Event *exchanged;      // stream -> last: the bucket's outer weights are up to date
} OuterBucket;

typedef struct Outer {
    OuterLayout layout;
    OuterStep step;  // only the buffers are set
    // device memory
    float *outer, *momentum;       // (layout.shard_elements); NULL without local steps
    float *residual;               // (layout.shard_elements) error feedback; NULL unless `feeds`
    floatX *rounded;               // (layout.shard_elements) outer weights in bf16, set by outer_finish
    float *gradient[OUTER_SLOTS];  // (largest shard) pseudo-gradients; exchanges alternate
    Segment *segments;
    uint64_t *fault;                // (buckets) first fault found in a bucket's exchange
    WireChecks checks;              // checksums of the exchange in progress
    Stream *stream;                 // stream of the exchanges
    Event *taken;                   // last -> stream: a pseudo-gradient has been computed
    Event *slot_free[OUTER_SLOTS];  // stream -> last: the slot may be written
    Event *finished;                // last -> compute: master and outer weights may be read
    // host
    OuterBucket *bucket;     // (buckets)
    unsigned exchanges;      // number of exchanges started so far
    int *lost;               // host memory (1): not 0 once a replica group is lost (comm_may_lose)
    OuterRange *kept_means;  // with error feedback: see OuterStep.kept
    bool feeds;              // the exchange has error feedback; known when memory is planned
    bool in_place;           // the outer weights currently replace the model weights (outer_use)
    bool finished_since;     // outer_finish has been called since the latest update
    floatX *kept;            // host memory: the model weights while outer weights replace them
} Outer;

// No-ops without --local-steps, except outer_hash and outer_begin_group, which require it.
void outer_reserve(const Base *base, Outer *outer, const Weights *weights, MemoryPlan *memory_plan);
void outer_start(const Base *base, Outer *outer);
void outer_free(const Base *base, Outer *outer);
// Sets the outer weights to the master weights and zeros their momentum and the residual.
void outer_from_master(const Base *base, Outer *outer, const Optimizer *optimizer);
// Applies the outer weights of bucket b to the master weights if that is due at the end of `step`
// or earlier. Called before the bucket's AdamW update.
void outer_apply(const Base *base, Outer *outer, const Optimizer *optimizer, int b, int64_t step);
// Starts the exchange of bucket b if the step is its sync slot. Called after the bucket's update.
void outer_sync(const Base *base, Outer *outer, const Optimizer *optimizer, int b);
// Waits for all exchanges and applies outer weights that are due at the end of the latest step.
// Later work on compute and on lanes->last may then read them. Called between steps.
void outer_finish(const Base *base, Outer *outer, const Optimizer *optimizer);
// Adds the hash of this rank's outer weights and momentum to *hash, after outer_finish.
void outer_hash(const Base *base, const Outer *outer, uint64_t *hash);
// Sets the master weights to the loaded outer weights. Blocks until done.
void outer_begin_group(const Base *base, const Outer *outer, const Optimizer *optimizer);
// Restores `applies` of all buckets for a checkpoint of `step`. Outer steps after `applied_at`
// (RunState.outer_applied_at) must still be applied to the master weights.
void outer_resume_group(const Base *base, Outer *outer, int64_t step, int64_t applied_at);
// on: replaces the model weights with the outer weights; otherwise restores them. All streams must
// be idle.
void outer_use(const Base *base, Outer *outer, const Optimizer *optimizer, Weights *weights, bool on);

LLMC_END
