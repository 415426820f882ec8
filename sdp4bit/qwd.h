// Weights: AdamW on the own shard fused with the quantisation of what changed (qWD, paper section 3.1), the hierarchical all-gather (between nodes first,
// then inside the node) and the update of every replica. qW and the bf16 baseline are choices of WeightWire. Called by llmc/zero.c, bucket by bucket.
#pragma once
#include "llmc/comm.h"
#include "sdp4bit/kernels.h"
#include "sdp4bit/wire.h"
LLMC_BEGIN

// Bytes of bucket b's gather buffer: (per_node, nodes) messages.
size_t qwd_buffer_bytes(const Plan *plan, int b, const WeightWire *wire);

typedef struct QwdStep {
    const Plan *plan;
    const Topology *topology;
    WeightWire wire;
    const Segment *segments;      // device copy of plan->segments
    const StepControl *control;   // device
    float beta1, beta2, epsilon, weight_decay;
    uint32_t seed, step;          // of the rounding bits
    Wire *check;                  // NULL: messages carry no checksum
} QwdStep;

// Updates the own shard of bucket b and writes its message to its slot of `buffer`. grads, weights: the bucket's (matrix + tail); master, exp_avg,
// exp_avg_sq: its (matrix_shard + tail_shard). dp = 1: the weights become the rounded masters at once, and gather and apply do nothing.
void qwd_update_bucket(const QwdStep *step, int b, const float *grads, floatX *weights, float *master, float *exp_avg, float *exp_avg_sq,
                       uint8_t *buffer, Stream *stream);
void qwd_gather_bucket(const QwdStep *step, int b, uint8_t *buffer, Comm *comm, Stream *stream);
void qwd_apply_bucket(const QwdStep *step, int b, floatX *weights, const uint8_t *buffer, Stream *stream);

LLMC_END
