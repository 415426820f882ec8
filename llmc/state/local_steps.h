// --local-steps: every node is a replica group that trains on its own master weights. Every H steps
// a bucket is synchronized: an outer step, as in DiLoCo.
//
// Besides master weights and moments a rank holds outer weights and their momentum for its shard,
// equal in all replica groups. Every bucket has its sync slot once in H steps, and the slots are
// spread over these steps. At the end of step t, its slot, the bucket's pseudo-gradient (outer
// weights minus master weights) is averaged over the replica groups, and the outer weights take a
// step along it. `delay` steps later, at the end of step t + delay, the master weights become the
// outer weights, or a mix of both. The model weights follow with the payload of the next update.
//
// In the run's last step every bucket is synchronized. The outer weights then become the mean of
// the replica groups' master weights, without learning rate and momentum, and the master weights
// follow at once. So what is evaluated and saved at the end contains all steps of all replica
// groups.
//
// The exchange (sdp4bit/outer.h) runs on a stream of its own, overlapped with forward and backward.
// What was sent at the end of step t is waited for before the update of step t + delay + 1, or by
// whoever reads master or outer weights earlier.
#pragma once
#include "llmc/base/memory_plan.h"
#include "llmc/state/base.h"
#include "llmc/state/optimizer.h"
#include "llmc/state/weights.h"
#include "sdp4bit/outer.h"
LLMC_BEGIN

enum { OUTER_SLOTS = 2 };

typedef struct Outer {
    OuterLayout plan;
    OuterStep step;  // its buffers alone
    // device memory
    float *outer, *momentum;       // (plan.shard_elements); NULL without local steps
    floatX *rounded;               // (plan.shard_elements) the outer weights in bf16: see outer_finish
    float *gradient[OUTER_SLOTS];  // (largest shard) pseudo-gradients, which exchanges use in turn
    Segment *segments;
    uint64_t *fault;                // (buckets) first fault found by the checks of a bucket's exchange
    WireChecks checks;              // of the exchange in progress
    Stream *stream;                 // of the exchanges
    Event *taken;                   // lanes->last -> stream: a pseudo-gradient has been computed
    Event *slot_free[OUTER_SLOTS];  // stream -> last: the slot may be written
    Event **exchanged;              // (buckets) stream -> last: the bucket's outer weights are new
    Event *finished;                // last -> compute: master and outer weights may be read
    // host
    int64_t *slot;     // (buckets) synchronized in steps that leave this remainder when divided by H
    int64_t *applies;  // (buckets) the master weights take the outer weights at the end of this step; 0: done
    unsigned exchanges;   // so far
    int *lost;            // host memory: not 0 once a replica group is lost (comm_may_lose)
    bool in_place;        // outer_use: the model weights are the outer ones
    bool finished_since;  // outer_finish has been called since the latest update
    floatX *kept;         // host memory: this group's model weights while the outer ones are in place
} Outer;

// All of these are no-ops without --local-steps.
void outer_reserve(const Base *base, Outer *outer, const Weights *weights, MemoryPlan *memory_plan);
void outer_start(const Base *base, Outer *outer);
void outer_free(const Base *base, Outer *outer);
// The outer weights become the master weights, without momentum.
void outer_from_master(const Base *base, Outer *outer, const Optimizer *optimizer);
// Before the AdamW update of bucket b: its master weights take the outer weights if that is due at
// the end of `step` or earlier.
void outer_apply(const Base *base, Outer *outer, const Optimizer *optimizer, int b, int64_t step);
// After the update of bucket b: starts its exchange if the step is its sync slot.
void outer_sync(const Base *base, Outer *outer, const Optimizer *optimizer, int b);
// Between steps: does what is due at the end of the latest step. Later work of compute and of
// lanes->last may read master and outer weights.
void outer_finish(const Base *base, Outer *outer, const Optimizer *optimizer);
// *hash += hash of this rank's outer weights and momentum. On compute, after outer_finish.
void outer_hash(const Base *base, const Outer *outer, uint64_t *hash);
// The master weights become the loaded outer weights. Waits.
void outer_begin_group(const Base *base, const Outer *outer, const Optimizer *optimizer);
// After loading a checkpoint of `step`: buckets synchronized after `applied_at`
// (RunState.outer_applied_at) whose master weights have not taken the outer weights yet will do so.
void outer_resume_group(const Base *base, Outer *outer, int64_t step, int64_t applied_at);
// Puts the outer weights in place of the model weights, and back. The caller has synchronized.
void outer_use(const Base *base, Outer *outer, const Optimizer *optimizer, Weights *weights, bool on);
// Bytes sent to other replica groups in a bucket's exchange; 0 without local steps.
int64_t outer_bytes(const Base *base, const Outer *outer, int bucket, const GradFormat *format);

LLMC_END
