// Weights, bucket by bucket: AdamW on the own shard, fused with the quantisation of what changed
// (qWD, paper section 3.1); the gather, between nodes first, then inside the node; the update of
// every replica. qW and the bf16 baseline are choices of WeightWire. Called by llmc/state/zero.c.
#pragma once
#include "llmc/comm.h"
#include "sdp4bit/kernels.h"
#include "sdp4bit/lanes.h"
#include "sdp4bit/wire.h"
LLMC_BEGIN

// Bytes of bucket b's gather buffer: (per_node, nodes) messages. There are two buffers, which the
// buckets use in turn; bucket b uses that of slot qwd_slot(b).
size_t qwd_buffer_bytes(const Plan *plan, int b, const WeightWire *wire);
int qwd_slot(int b);

typedef struct QwdStep {
    const Plan *plan;
    const Mesh *mesh;
    WeightWire weight_wire;
    const Segment *segments;      // device copy of plan->segments
    const StepControl *control;   // device
    float beta1, beta2, epsilon, weight_decay;
    uint32_t seed, step;          // of the rounding bits
    WireChecks *checks;           // of the messages; and where a refused update is marked
} QwdStep;

// A bucket's part of the training state, in device memory.
typedef struct BucketState {
    Windows grads;                         // this rank's, reduced
    WeightWindows weights;                 // this rank's of the replica
    float *master, *exp_avg, *exp_avg_sq;  // (matrix_per_rank + tail_per_rank) the own shard
} BucketState;

// Updates the own shard of bucket b and writes its message to its slot of `buffer`. Only with dp =
// 1 does it write the weights: they become the rounded masters at once, and gather and apply do
// nothing. Runs on lanes->last.
void qwd_update_bucket(const QwdStep *step, int b, const BucketState *state, uint8_t *buffer,
                       const Lanes *lanes);
// Gathers what lanes->last has made, on the lanes of the hops. Everything that lanes->last was
// given before comes before it.
void qwd_gather_bucket(const QwdStep *step, int b, uint8_t *buffer, const Lanes *lanes);
// The replica takes what was gathered. Sealed messages are checked before. Runs on lanes->middle.
void qwd_apply_bucket(const QwdStep *step, int b, floatX *weights, uint8_t *buffer, const Lanes *lanes);

LLMC_END
