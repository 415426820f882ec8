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

// Returns the layout of a rank's message of bucket b; unquantized if dp = 1.
MessageLayout qwd_message(const BucketLayout *layout, int b, const WeightFormat *format);
// Destination of the all-gather: (per_node, nodes) messages of the shards this rank keeps: all
// shards, the shards of its rail (per_node 1), or only its own. Levels of size 1 are skipped.
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
    uint8_t *plain;        // device: bf16 messages of all buckets
    uint8_t *coded;        // device: this rank's coded messages of all buckets, with gaps
    int64_t *coded_start;  // (buckets) offsets in coded
    uint32_t *bytes;       // device (per_node, nodes, buckets) message sizes of all ranks
    uint32_t *landed;      // host copy of bytes
    int64_t *slot;         // (buckets) slot size in this step's gather: of the longest message, without
                           // checksum
} QwdLossless;

// AdamW on the host: its stream, threads and pinned memory (device.h).
typedef struct QwdHost {
    Stream *stream;  // all host work, in the order of the buckets
    int threads;
    const Segment *segments;       // layout->segments
    StepStatus *control;           // (1) copy of the step status, in the order of `stream`
    uint64_t *fault;               // (1) refused updates, in the order of lanes->last after each update
    uint8_t *message[LANE_SLOTS];  // this rank's message, sized for the largest bucket of the slot
    Event *made[LANE_SLOTS];       // stream -> last: the message is complete
    Event *sent[LANE_SLOTS];       // last -> stream: it is uploaded, the slot may be reused
} QwdHost;

typedef struct QwdStep {
    const BucketLayout *layout;  // layout of the optimizer state; dp = 1 if every rank holds all of it
    const Mesh *mesh;
    WeightFormat weight_format;
    const Segment *segments;    // device copy of layout->segments
    const StepStatus *control;  // device
    float beta1, beta2, epsilon, weight_decay;
    uint32_t seed, step;          // keys of the rounding bits
    WireChecks *checks;           // checksums, and the mark of refused updates
    const QwdHost *host;          // NULL: AdamW runs on the device
    const QwdLossless *lossless;  // with lossless weights and dp > 1; else NULL
} QwdStep;

// A bucket's part of the training state, in device memory, or host memory if AdamW runs there.
typedef struct BucketState {
    GradShard grads;                       // this rank's reduced gradient
    WeightShard weights;                   // this rank's shard of the model weights
    float *master, *exp_avg, *exp_avg_sq;  // (matrix_per_rank + tail_per_rank)
    const floatX *replica;                 // device: this rank's matrix shard of the model weights
} BucketState;

// Updates this rank's shard of bucket b and writes its message to its slot of `buffer`. With dp = 1
// and AdamW on the device it writes the model weights directly, and gather and apply are no-ops.
// Runs on lanes->last, or on the host's stream with lanes->last uploading the message.
// qwd_gather_bucket copies lossless messages to the buffer.
void qwd_update_bucket(const QwdStep *step, int b, const BucketState *state, const GatherBuffer *buffer,
                       const Lanes *lanes);
// Exchanges the sizes of lossless messages and waits for them, between the updates of all buckets
// and the first gather. No-op for other formats. Collective over dp.
void qwd_agree_lengths(const QwdStep *step, const Lanes *lanes);
// All-gathers bucket b on the lanes of the hops, after all work issued to lanes->last so far.
void qwd_gather_bucket(const QwdStep *step, int b, const GatherBuffer *buffer, const Lanes *lanes);
// Verifies and applies all gathered messages to the weights. Runs on lanes->middle. weights: the
// whole bucket, or the kept shards in rank order: (nodes * per_node) of matrix_per_rank, then as
// many of tail_per_rank.
void qwd_apply_bucket(const QwdStep *step, int b, floatX *weights, const GatherBuffer *buffer,
                      const Lanes *lanes);

LLMC_END
