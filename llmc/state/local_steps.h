// --local-steps: every node is a replica group with its own master weights and trains
// independently. Every H steps an outer step synchronizes a bucket, as in DiLoCo.
//
// In addition to master weights and moments, a rank holds the outer weights of its shard and their
// momentum, equal in all replica groups. Every bucket has one sync slot in H steps; the slots are
// spread over these steps. At the end of step t, its slot, the bucket's pseudo-gradient (outer
// weights minus master weights) is averaged over the replica groups, and the outer optimizer
// updates the outer weights. At the end of step t + delay the master weights are set to the outer
// weights, or to a mix of both. The payload of the next update then carries the change to the model
// weights.
//
// The last step of a run synchronizes every bucket: the outer weights become the mean of the
// replica groups' master weights, without learning rate and momentum, and the master weights are
// set to them at once. So the final evaluation and checkpoint contain all steps of all replica
// groups.
//
// The exchange (sdp4bit/outer.h) has its own stream and overlaps with forward and backward. The
// update of step t + delay + 1 waits for the exchange of step t, and so do earlier reads of master
// or outer weights.
#pragma once
#include "llmc/base/memory_plan.h"
#include "llmc/state/state_base.h"
#include "llmc/state/optimizer.h"
#include "llmc/state/weights.h"
#include "sdp4bit/outer.h"
LLMC_BEGIN

enum { OUTER_SLOTS = 2 };

typedef struct OuterBucket {
    int64_t slot;      // the bucket is synchronized in steps t with t % H == slot
    int64_t applies;   // step at whose end the master weights become the outer weights; 0: done
    Event *exchanged;  // stream -> last: the bucket's outer weights are new
} OuterBucket;

typedef struct Outer {
    OuterLayout layout;
    OuterStep step;  // only its buffers are set
    // device memory
    float *outer, *momentum;       // (layout.shard_elements); NULL without local steps
    floatX *rounded;               // (layout.shard_elements) the outer weights in bf16: see outer_finish
    float *gradient[OUTER_SLOTS];  // (largest shard) pseudo-gradients; exchanges use the slots in turn
    Segment *segments;
    uint64_t *fault;                // (buckets) first fault found by the checks of a bucket's exchange
    WireChecks checks;              // checks of the exchange in progress
    Stream *stream;                 // stream of the exchanges
    Event *taken;                   // lanes->last -> stream: a pseudo-gradient has been computed
    Event *slot_free[OUTER_SLOTS];  // stream -> last: the slot may be written
    Event *finished;                // last -> compute: master and outer weights may be read
    // host
    OuterBucket *bucket;  // (buckets)
    unsigned exchanges;   // exchanges started so far
    int *lost;            // host memory: not 0 once a replica group is lost (comm_may_lose)
    bool in_place;        // outer_use: the outer weights replace the model weights
    bool finished_since;  // outer_finish has been called since the latest update
    floatX *kept;         // host memory: this group's model weights while they are replaced
} Outer;

// All of these are no-ops without --local-steps.
void outer_reserve(const Base *base, Outer *outer, const Weights *weights, MemoryPlan *memory_plan);
void outer_start(const Base *base, Outer *outer);
void outer_free(const Base *base, Outer *outer);
// Sets the outer weights to the master weights and clears their momentum.
void outer_from_master(const Base *base, Outer *outer, const Optimizer *optimizer);
// Sets the master weights of bucket b to the outer weights if that is due at the end of `step` or
// earlier. Called before the bucket's AdamW update.
void outer_apply(const Base *base, Outer *outer, const Optimizer *optimizer, int b, int64_t step);
// Starts the exchange of bucket b if the step is its sync slot. Called after the bucket's update.
void outer_sync(const Base *base, Outer *outer, const Optimizer *optimizer, int b);
// Completes the exchanges and applies those that are due at the end of the latest step. Later work
// on compute and on lanes->last may read master and outer weights. Called between steps.
void outer_finish(const Base *base, Outer *outer, const Optimizer *optimizer);
// *hash += hash of this rank's outer weights and momentum. On compute, after outer_finish.
void outer_hash(const Base *base, const Outer *outer, uint64_t *hash);
// Sets the master weights to the loaded outer weights. Blocks until done.
void outer_begin_group(const Base *base, const Outer *outer, const Optimizer *optimizer);
// Restores `applies` after a checkpoint of `step` has been loaded. Buckets synchronized after
// `applied_at` (RunState.outer_applied_at) still have to set their master weights.
void outer_resume_group(const Base *base, Outer *outer, int64_t step, int64_t applied_at);
// Replaces the model weights by the outer weights, or restores them. The caller has synchronized.
void outer_use(const Base *base, Outer *outer, const Optimizer *optimizer, Weights *weights, bool on);

LLMC_END
