// Weights: AdamW on the own shard fused with the quantisation of what changed (qWD, paper section 3.1), the hierarchical all-gather (between nodes first,
// then inside the node) and the update of every replica. qW and the bf16 baseline are choices of WeightWire. Called by llmc/state/zero.c, bucket by bucket.
#pragma once
#include "llmc/comm.h"
#include "sdp4bit/kernels.h"
#include "sdp4bit/lanes.h"
#include "sdp4bit/wire.h"
LLMC_BEGIN

// Bytes of bucket b's gather buffer: (per_node, nodes) messages. There are two buffers, which the buckets use in turn: bucket b that of slot qwd_slot(b).
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
    WireChecks *checks;           // of the messages: whether they carry a checksum
} QwdStep;

// Updates the own shard of bucket b and writes its message to its slot of `buffer`. grads, weights: the bucket's (matrix_elements + tail_elements); master, exp_avg,
// exp_avg_sq: its (matrix_per_rank + tail_per_rank). dp = 1: the weights become the rounded masters at once, and gather and apply do nothing. Runs on lanes->last.
void qwd_update_bucket(const QwdStep *step, int b, const float *grads, floatX *weights, float *master, float *exp_avg, float *exp_avg_sq,
                       uint8_t *buffer, const Lanes *lanes);
// Gathers what lanes->last has made, on the lanes of the hops; everything that lanes->last was given before comes before it.
void qwd_gather_bucket(const QwdStep *step, int b, uint8_t *buffer, const Lanes *lanes);
// The replica takes what was gathered; checked before, if messages are sealed. Runs on lanes->middle.
void qwd_apply_bucket(const QwdStep *step, int b, floatX *weights, uint8_t *buffer, const Lanes *lanes);

LLMC_END
