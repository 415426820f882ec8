// Predicts the time of a step over a given network, with the best possible overlap of compute and
// communication. For --plan, plan_time.c computes the StepLoad from the traffic of each preset. For
// benchmarks, dev/bench/step_bound.c reads it from measurements.
//
// Model: parts of a bucket's gradients are sent as soon as the backward pass of a layer completes
// them (BucketLoad.sent). The forward pass of a layer waits only for its own weights. Intra-node
// and inter-node links work concurrently. Messages of different steps never share a link: gradients
// overlap with backward, weights with forward. Forward also overlaps with the optimizer step, but
// not with its matrix products (Muon), because both need the GPU's matrix units.
//
// The network may be a token bucket, which lets some bytes pass at once after a pause. `burst` is
// the time that these bytes would take otherwise. The token bucket is full at the start of the
// gradient messages and at the start of the weight messages.
//
// All times are in ms.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// Times of one bucket.
typedef struct BucketLoad {
    int layers;                              // layers in this bucket
    int reductions;                          // number of gradient reductions per step
    double grad_inside, grad_between;        // one reduction: hop inside the node, then between nodes
    const double *sent;                      // (layers) part of the gradients that is complete after
                                             // backward of each layer, last layer first;
                                             // NULL: all of them after the first layer
    double weight_between, weight_inside;    // gather after the update: between nodes, then inside
    bool gathered;                           // forward and backward gather the weights (ZeRO-3)
    double forward_gather, backward_gather;  // one of these gathers, over both links
    double update;                           // optimizer step
    double products;                         // matrix products of the optimizer step, also in `update`
    double exchange;                         // outer all-reduce between nodes, for local steps
} BucketLoad;

typedef struct StepLoad {
    int buckets;
    BucketLoad *bucket;  // (buckets) in forward order
    int micro_batches;
    double forward, backward;  // passes of one layer and micro-batch
    double head;               // LM head and loss, forward and backward, per micro-batch
    double tail;               // backward pass of the embeddings, per micro-batch
    double waits;              // exposed communication of tensor parallelism, per micro-batch
    double memory;             // memory traffic after backward, per step; overlaps with nothing
    double burst;              // token bucket of the inter-node links (see above)
    bool waits_for_update;     // forward begins after the whole update, not bucket by bucket
} StepLoad;

// Returns the time of a step in the steady state, without outer syncs.
double step_time(const StepLoad *load);
// Returns the time of the forward and backward passes alone.
double step_compute(const StepLoad *load);
// Returns the step time if messages took no time. step_time minus this is exposed communication.
double step_time_alone(const StepLoad *load);
// Returns the mean step time with local steps. Each bucket has an outer sync every `steps` (>= 1)
// steps; its result is needed `delay` + 1 steps later, so it overlaps with at least one step.
// alone: result of step_time.
double step_time_local(const StepLoad *load, double alone, int steps, int delay);

LLMC_END
