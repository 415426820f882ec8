// What a rank sends in a step of data parallelism, by the strategy that shares out gradients and
// weights. Called by plan_report.c and dev/bench/sync_only.c.
//
// Under `optim` every bucket's gradients are reduced once per step, and its weights gathered once,
// between nodes and inside each. Where gradients are shared out, most buckets' are reduced with
// every micro-batch (zero_reductions). Where weights are shared out, two slots hold whole buckets
// in turn, and a pass gathers a bucket that its slot does not hold. The first bucket's stay. With
// local steps replica groups exchange a bucket every H steps: a step counts one H-th of that as
// gradients between nodes.
#pragma once
#include "llmc/state/zero.h"
LLMC_BEGIN

// How often a bucket travels in a step. No pass gathers weights that are not shared out.
typedef struct Trips {
    int reductions;
    int forward, backward;  // gathers by passes
} Trips;

// Of a step with config->micro_batches micro-batches. Config and Zero must outlive it.
typedef struct StepTraffic {
    const Config *config;
    const Zero *zero;
    const BucketLayout *plan;
    int replica_groups;
    Trips *trips;  // (plan->buckets)
} StepTraffic;

// Of the rank whose Zero it is, and who sees the ranks as `mesh`.
StepTraffic traffic_make(const Config *config, const Mesh *mesh, const Zero *zero);
void traffic_free(StepTraffic *traffic);
// Bytes that one reduction of bucket b's gradients and the step's update of its weights send.
WireBytes traffic_of_update(const StepTraffic *traffic, int b, const GradFormat *grad,
                            const WeightFormat *weight);
// Bytes that one gather of bucket b sends, by a forward or a backward pass. 0 where none is made.
WireBytes traffic_of_gather(const StepTraffic *traffic, int b, bool backward, const WeightFormat *weight);
// Bytes that the rank sends of bucket b in a step, and of all.
WireBytes traffic_of_bucket(const StepTraffic *traffic, int b, const GradFormat *grad,
                            const WeightFormat *weight);
WireBytes traffic_of_step(const StepTraffic *traffic, const GradFormat *grad, const WeightFormat *weight);
// The same by the formulas: see WireFormula of layout.h.
WireFormula traffic_formula(const StepTraffic *traffic, const GradFormat *grad, const WeightFormat *weight);

LLMC_END
