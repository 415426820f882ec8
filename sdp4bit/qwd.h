// Weights, one bucket at a time:
//   update  AdamW on the rank's shard and quantization of weight differences (paper section 3.1)
//   gather  all-gather between nodes, then inside the node
//   apply   update of the model weights
// WeightFormat selects qWD, qW, bf16 or lossless weights. Called by llmc/state/zero.c.
#pragma once
#include "llmc/comm.h"
#include "sdp4bit/kernels.h"
#include "sdp4bit/lanes.h"
#include "sdp4bit/wire.h"
LLMC_BEGIN

// Returns the layout of a rank's message of bucket b; unquantized if dp = 1.
MessageLayout qwd_message(const BucketLayout *layout, int b, const WeightFormat *format);
// Destination of the all-gather: (per_node, nodes) messages with the shards that this rank keeps.
// These are all shards, the shards of its rail (per_node = 1), or only its own (nodes = 1 as well).
// Hops of size 1 are skipped.
typedef struct GatherBuffer {
    uint8_t *messages;
    int nodes, per_node;
    uint8_t *keep;  // if not NULL, receives a copy of the first message, kept until the next update
} GatherBuffer;
// Returns the size of a gather buffer for `messages` messages of bucket b, assuming the maximum
// length for lossless weights. Returns 0 if dp = 1, unless AdamW runs on the host. Buckets
// alternate between two buffers; bucket b uses buffer qwd_slot(b).
size_t qwd_buffer_bytes(const BucketLayout *layout, int b, const WeightFormat *format, bool host,
                        int messages);
int qwd_slot(int b);
// Returns the layout of a rank's bf16 message of bucket b before lossless coding.
MessageLayout qwd_plain_message(const BucketLayout *layout, int b);

// Buffers and message sizes of lossless weights. Sizes are known only after coding. So all buckets
// are coded first; then the ranks exchange the sizes, and the host waits for them.
typedef struct QwdLossless {
    uint8_t *plain;        // device: bf16 message before coding; used by one bucket at a time
    uint8_t *coded;        // device: this rank's coded messages of all buckets, with gaps
    int64_t *coded_start;  // (buckets) offsets in coded
    uint32_t *bytes;       // device (per_node, nodes, buckets) message sizes of all ranks
    uint32_t *landed;      // host copy of bytes
    int64_t *slot;         // (buckets) slot size in this step's gather: size of the longest message
                           // without its checksum
} QwdLossless;

// Updates bucket b on the host if the optimizer state is not in memory: sets master, exp_avg and
// exp_avg_sq of `shard` and calls update_range_host.
typedef void (*HostUpdater)(void *store, int b, const UpdateShard *shard, int threads, const Site *site);

// Queues the update of bucket b on QwdHost.stream, if it is more than one host call. `shard` has
// host pointers.
typedef void (*HostQueue)(void *context, int b, const UpdateShard *shard);

// The optimizer on the host: its stream, threads and pinned memory (device.h).
typedef struct QwdHost {
    Stream *stream;  // runs all host work, in the order of the buckets
    int threads;
    HostUpdater update;            // NULL: update_shard_host
    void *store;                   // argument of `update`
    HostQueue queue;               // of buckets of whole matrices; NULL: one call of `update`
    void *queue_context;           // argument of `queue`
    const Segment *segments;       // layout->segments
    StepStatus *control;           // (1) copy of the step status, valid on `stream`
    uint64_t *fault;               // (1) set by refused updates; lanes->last reads it after each update
    uint8_t *message[LANE_SLOTS];  // this rank's message, sized for the largest bucket of the slot
    Event *made[LANE_SLOTS];       // stream -> last: the message is complete
    Event *sent[LANE_SLOTS];       // last -> stream: the message is uploaded, the slot may be reused
} QwdHost;

typedef struct QwdStep {
    const BucketLayout *layout;  // layout of the optimizer state; dp = 1 if every rank holds all of it
    const Mesh *mesh;
    WeightFormat weight_format;
    const Segment *segments;    // device copy of layout->segments
    const StepStatus *control;  // device
    float beta1, beta2, epsilon, weight_decay;
    uint32_t seed, step;          // keys of the rounding bits
    WireChecks *checks;           // checksums; its fault is also set by refused updates
    const QwdHost *host;          // NULL: AdamW runs on the device
    const QwdLossless *lossless;  // with lossless weights and dp > 1; else NULL
} QwdStep;

// Training state of one bucket, in device memory, or in host memory if AdamW runs on the host.
typedef struct BucketState {
    GradShard grads;                       // this rank's reduced gradient
    WeightShard weights;                   // this rank's shard of the model weights
    float *master, *exp_avg, *exp_avg_sq;  // as in UpdateShard
    const floatX *replica;                 // device: this rank's matrix shard of the model weights
    uint16_t *momentum_bf16;               // as in UpdateShard
} BucketState;

// Updates this rank's shard of bucket b and writes the message to its slot in `buffer` (lossless
// messages are copied there later, by qwd_gather_bucket). With dp = 1 and AdamW on the device,
// writes the model weights directly, and gather and apply are no-ops. Runs on lanes->last. With
// AdamW on the host, the update runs on the host's stream, and lanes->last uploads the message.
void qwd_update_bucket(const QwdStep *step, int b, const BucketState *state, const GatherBuffer *buffer,
                       const Lanes *lanes);
// Exchanges the sizes of lossless messages and waits for them. Call it after the updates of all
// buckets and before the first gather. No-op for other formats. Collective over dp.
void qwd_agree_lengths(const QwdStep *step, const Lanes *lanes);
// All-gathers bucket b on the lanes of the hops, after all earlier work of lanes->last.
void qwd_gather_bucket(const QwdStep *step, int b, const GatherBuffer *buffer, const Lanes *lanes);
// Verifies all gathered messages and applies them to the weights. Runs on lanes->middle. weights:
// the whole bucket, or the shards that this rank keeps in rank order: (nodes * per_node,
// matrix_per_rank), then (nodes * per_node, tail_per_rank).
void qwd_apply_bucket(const QwdStep *step, int b, floatX *weights, const GatherBuffer *buffer,
                      const Lanes *lanes);

LLMC_END
