// How long a step takes over a given network: the best schedule that overlaps. plan_time.c fills
// the load from the traffic of each preset, for --plan. dev/bench/step_bound.c reads it from
// measured layers and links, for benchmarks.
//
// Each bucket's gradients start to travel when its backward pass is done. Each layer's forward pass
// waits for its own weights only. The links inside a node and those between nodes work at the same
// time. Messages of one step never meet those of another on the same link: gradients travel beside
// the backward pass and after it, weights beside the forward pass.
//
// A network may be a token bucket: after a pause it lets some bytes pass at once. `burst` is the
// time that they would take. It is full when gradients begin to travel, and again when weights do.
//
// All times are ms.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// The time that one bucket takes on each link of a rank.
typedef struct BucketLoad {
    int layers;                              // that a pass computes while it holds this bucket
    int reductions;                          // of gradients, in a step
    double grad_inside, grad_between;        // of one reduction: inside first
    double weight_between, weight_inside;    // of the update's gather: between nodes first
    bool gathered;                           // do passes gather its weights?
    double forward_gather, backward_gather;  // of one such gather, over both links
    double update;                           // of the optimizer
    double exchange;                         // with local steps: of one exchange between nodes
} BucketLoad;

typedef struct StepLoad {
    int buckets;
    BucketLoad *bucket;  // (buckets) in forward order
    int micro_batches;
    double forward, backward;  // of one layer and one micro-batch
    double head;               // of the output layer and the loss, both passes, one micro-batch
    double tail;               // of the embeddings' backward pass, one micro-batch
    double waits;              // of messages that passes wait for at once, one micro-batch
    double memory;             // of other passes over memory, once a step, beside nothing else
    double burst;              // how far the links between nodes may run ahead after a pause
} StepLoad;

// A step that repeats for ever, without exchanges.
double step_time(const StepLoad *load);
// The passes of a step alone, without messages and updates.
double step_compute(const StepLoad *load);
// step_time where every message takes no time. What a step takes beyond that is exposed
// communication.
double step_time_alone(const StepLoad *load);
// The mean step where nodes train alone and exchange each bucket every `steps` steps. The answer is
// awaited with the end of the step that follows `delay` others: it travels beside at least one
// step. alone: step_time of a step without exchanges. steps at least 1.
double step_time_local(const StepLoad *load, double alone, int steps, int delay);

LLMC_END
