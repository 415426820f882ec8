// Predicts the time of a step over a given network, with the best possible overlap of compute and
// communication. plan_time.c computes the load from the traffic of each preset, for --plan.
// dev/bench/step_bound.c reads it from measurements, for benchmarks.
//
// Model: the gradients of a bucket are sent as soon as its backward is done. The forward of a layer
// waits only for its own weights. Intra-node and inter-node links work concurrently. Messages of
// different steps never share a link: gradients overlap with backward, weights with forward.
//
// The network may be a token bucket: after a pause some bytes pass at once. `burst` is the time
// that they would take. The bucket is full when the first gradients, and when the first weights are
// sent.
//
// All times are ms.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// Times of one bucket.
typedef struct BucketLoad {
    int layers;                              // layers in this bucket
    int reductions;                          // gradient reductions per step
    double grad_inside, grad_between;        // one reduction: first inside the node, then between nodes
    double weight_between, weight_inside;    // gather after the update: first between nodes
    bool gathered;                           // forward and backward gather the weights (ZeRO-3)
    double forward_gather, backward_gather;  // one such gather, over both links
    double update;                           // optimizer
    double exchange;                         // local steps: one outer all-reduce between nodes
} BucketLoad;

typedef struct StepLoad {
    int buckets;
    BucketLoad *bucket;  // (buckets) in forward order
    int micro_batches;
    double forward, backward;  // per layer and micro-batch
    double head;               // LM head and loss, forward and backward, per micro-batch
    double tail;               // backward of the embeddings, per micro-batch
    double waits;              // communication without overlap (tensor parallelism), per micro-batch
    double memory;             // other memory traffic, per step, without overlap
    double burst;              // burst of the inter-node links
} StepLoad;

// Returns the time of a step in the steady state, without outer syncs.
double step_time(const StepLoad *load);
// Returns the time of forward and backward, without communication and updates.
double step_compute(const StepLoad *load);
// Returns step_time if messages took no time. The difference from step_time is exposed
// communication.
double step_time_alone(const StepLoad *load);
// Returns the mean step time with local steps: each bucket has an outer sync every `steps` (>= 1)
// steps, whose result is needed `delay` + 1 steps later, so it overlaps with at least one step.
// alone: step_time without outer syncs.
double step_time_local(const StepLoad *load, double alone, int steps, int delay);

LLMC_END
