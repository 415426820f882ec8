// Weights, bucket by bucket: AdamW on the own shard, fused with the quantization of what changed
// (qWD, paper section 3.1); the gather, between nodes first, then inside the node; the update of
// every replica. qW and the bf16 baseline are choices of WeightFormat. Called by llmc/state/zero.c.
#pragma once
#include "llmc/comm.h"
#include "sdp4bit/kernels.h"
#include "sdp4bit/lanes.h"
#include "sdp4bit/wire.h"
LLMC_BEGIN

// A rank's message of bucket b. With one replica nothing is quantized: the weights themselves.
MessageLayout qwd_message(const BucketLayout *layout, int b, const WeightFormat *format);
// Where the messages of those windows are gathered that this rank keeps: (per_node, nodes)
// messages. Those of all ranks; of its rail, with per_node 1; or its own alone. Nothing travels on
// a level where it keeps one.
typedef struct GatherBuffer {
    uint8_t *messages;
    int nodes, per_node;
    uint8_t *keep;  // where the first message stays until the next update; NULL: nowhere
} GatherBuffer;
// Bytes of a buffer for so many messages of bucket b. There are two, which the buckets use in turn;
// bucket b uses that of slot qwd_slot(b). 0 where nothing is sent: with one replica, unless the
// host makes its message (host). Lossless weights: at most.
size_t qwd_buffer_bytes(const BucketLayout *layout, int b, const WeightFormat *format, bool host,
                        int messages);
int qwd_slot(int b);
// A rank's message of bucket b before it is coded: bf16.
MessageLayout qwd_plain_message(const BucketLayout *layout, int b);

// Lossless weights: where they are coded, and how long messages turn out. A rank learns that from
// its device. So all buckets are coded first, then the ranks tell each other the lengths, then the
// host, which waits for these, asks for the gathers.
typedef struct QwdLossless {
    uint8_t *plain;        // device: a bucket's weights as bf16, the buckets' one after the other
    uint8_t *coded;        // device: this rank's messages of all buckets, with gaps
    int64_t *coded_start;  // (buckets) where a bucket's begins
    uint32_t *bytes;       // device (per_node, nodes, buckets) of every rank's messages
    uint32_t *landed;      // (per_node, nodes, buckets) the same on the host
    int64_t *slot;         // (buckets) of a message in this step's gather: the longest one's, without
                           // a checksum
} QwdLossless;

// AdamW on the host: where it runs, and its page-locked memory (device.h).
typedef struct QwdHost {
    Stream *stream;  // of its work. A bucket's gradients and weights are there in its order
    int threads;
    const Segment *segments;       // plan->segments
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
    const Segment *segments;    // device copy of plan->segments
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

// Updates the own shard of bucket b and writes its message to its slot of `buffer`. With dp = 1 and
// no host it writes the weights: they become the rounded master weights at once, and gather and
// apply do nothing. Runs on lanes->last; with a host on its stream, and lanes->last takes the
// message up. Lossless weights are coded, and reach the buffer with their gather.
void qwd_update_bucket(const QwdStep *step, int b, const BucketState *state, const GatherBuffer *buffer,
                       const Lanes *lanes);
// Of lossless weights, between the updates of all buckets and the first gather: the ranks agree on
// the lengths of messages. Waits for them. Nothing for others. Collective over dp.
void qwd_agree_lengths(const QwdStep *step, const Lanes *lanes);
// Gathers what lanes->last has made, on the lanes of the hops. Everything that lanes->last was
// given before comes before it.
void qwd_gather_bucket(const QwdStep *step, int b, const GatherBuffer *buffer, const Lanes *lanes);
// The kept weights take what was gathered. Sealed messages are checked before. Runs on
// lanes->middle. weights: the whole bucket, or the kept windows in the order of their ranks:
// (nodes * per_node) of matrix_per_rank, then as many of tail_per_rank.
void qwd_apply_bucket(const QwdStep *step, int b, floatX *weights, const GatherBuffer *buffer,
                      const Lanes *lanes);

LLMC_END
