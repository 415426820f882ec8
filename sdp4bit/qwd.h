// Weights, bucket by bucket: AdamW on the rank's shard, fused with the quantization of weight
// differences (qWD, paper section 3.1); the all-gather, between nodes first, then inside the node;
// the update of the model weights. WeightFormat selects qWD, qW or the bf16 baseline. Called by
// llmc/state/zero.c.
#pragma once
#include "llmc/comm.h"
#include "sdp4bit/kernels.h"
#include "sdp4bit/lanes.h"
#include "sdp4bit/wire.h"
LLMC_BEGIN

// Returns the layout of a rank's message of bucket b. With dp = 1 it holds unquantized weights.
MessageLayout qwd_message(const BucketLayout *layout, int b, const WeightFormat *format);
// Destination of the all-gather: (per_node, nodes) messages of the shards this rank keeps. These
// are all ranks' shards, those of its rail (per_node 1), or only its own. A level of size 1 is
// skipped.
typedef struct GatherBuffer {
    uint8_t *messages;
    int nodes, per_node;
    uint8_t *keep;  // copy of the first message until the next update, or NULL
} GatherBuffer;
// Returns the bytes of a buffer for `messages` messages of bucket b; for lossless weights the
// maximum. Buckets alternate between two buffers: b uses slot qwd_slot(b). 0 with dp = 1, unless
// AdamW runs on the host (host).
size_t qwd_buffer_bytes(const BucketLayout *layout, int b, const WeightFormat *format, bool host,
                        int messages);
int qwd_slot(int b);
// Returns the layout of a rank's bf16 message of bucket b before lossless coding.
MessageLayout qwd_plain_message(const BucketLayout *layout, int b);

// Buffers and message sizes of lossless weights. Sizes are known only after coding: all buckets are
// coded first, then the ranks exchange the sizes, the host waits for them and issues the gathers.
typedef struct QwdLossless {
    uint8_t *plain;        // device: a bucket's weights as bf16, the buckets' one after the other
    uint8_t *coded;        // device: this rank's messages of all buckets, with gaps
    int64_t *coded_start;  // (buckets) where a bucket's begins
    uint32_t *bytes;       // device (per_node, nodes, buckets) of every rank's messages
    uint32_t *landed;      // (per_node, nodes, buckets) the same on the host
    int64_t *slot;         // (buckets) of a message in this step's gather: the longest one's, without
                           // a checksum
} QwdLossless;

// AdamW on the host: its stream, threads and pinned memory (device.h).
typedef struct QwdHost {
    Stream *stream;  // of its work. A bucket's gradients and weights are there in its order
    int threads;
    const Segment *segments;       // layout->segments
    StepStatus *control;           // (1) the step status, there in the stream's order
    uint64_t *fault;               // (1) what was refused, in the order of lanes->last after each update
    uint8_t *message[LANE_SLOTS];  // this rank's, of the largest bucket of the slot
    Event *made[LANE_SLOTS];       // stream -> last: the message is there
    Event *sent[LANE_SLOTS];       // last -> stream: and has gone up, so the next may be made
} QwdHost;

typedef struct QwdStep {
    const BucketLayout *layout;
    const Mesh *mesh;
    WeightFormat weight_format;
    const Segment *segments;    // device copy of layout->segments
    const StepStatus *control;  // device
    float beta1, beta2, epsilon, weight_decay;
    uint32_t seed, step;          // of the rounding bits
    WireChecks *checks;           // of the messages; and where a refused update is marked
    const QwdHost *host;          // NULL: AdamW runs on the device
    const QwdLossless *lossless;  // of lossless weights with several replicas; else NULL
} QwdStep;

// A bucket's part of the training state: in device memory, or in the host's where AdamW runs there.
typedef struct BucketState {
    GradShard grads;                       // this rank's, reduced
    WeightShard weights;                   // this rank's of the replica
    float *master, *exp_avg, *exp_avg_sq;  // (matrix_per_rank + tail_per_rank) the own shard
    const floatX *replica;                 // device: this rank's matrix window, always
} BucketState;

// Updates this rank's shard of bucket b and writes its message to its slot of `buffer`. With dp = 1
// and AdamW on the device it writes the model weights directly; gather and apply are then no-ops.
// Runs on lanes->last; with AdamW on the host on its stream, and lanes->last uploads the message.
// Lossless messages are copied to the buffer by qwd_gather_bucket.
void qwd_update_bucket(const QwdStep *step, int b, const BucketState *state, const GatherBuffer *buffer,
                       const Lanes *lanes);
// Exchanges the sizes of lossless messages and waits for them. Call it after the updates of all
// buckets and before the first gather. No-op for other formats. Collective over dp.
void qwd_agree_lengths(const QwdStep *step, const Lanes *lanes);
// All-gathers bucket b on the lanes of the hops, ordered after all work issued to lanes->last so
// far.
void qwd_gather_bucket(const QwdStep *step, int b, const GatherBuffer *buffer, const Lanes *lanes);
// Checks sealed messages and applies all gathered ones to the weights. Runs on lanes->middle.
// weights: the whole bucket, or the kept shards in rank order: (nodes * per_node) of
// matrix_per_rank, then as many of tail_per_rank.
void qwd_apply_bucket(const QwdStep *step, int b, floatX *weights, const GatherBuffer *buffer,
                      const Lanes *lanes);

LLMC_END
