// Fused kernels of the exact regime: everything between a rank's local gradients and the model
// weights of all replicas. codec.h and layout.h define their results bit by bit. kernels_cpu.c is
// the CPU implementation and the reference; the kernels_cuda files compute bitwise identical
// results on GPUs. Called by tlq_hs.c, qwd.c, wire.c, outer.c and the files of llmc/state. All
// pointers are device memory unless marked host. All calls are asynchronous on their stream.
#pragma once
#include "llmc/device.h"
#include "sdp4bit/step_status.h"
#include "sdp4bit/layout.h"
LLMC_BEGIN

// Maps positions of a bucket's matrix part to tensors, for padding and logical offsets. count is 0
// for a bucket without matrices.
typedef struct SegmentTable {
    const Segment *segment;  // (count) ordered by start
    int count;
} SegmentTable;

// Returns the message to peer `slot`; messages start layout->bytes apart in `send`. The message to
// the rank itself is written directly to self_slot, in the receive buffer.
HD_FN uint8_t *outgoing_message(uint8_t *send, uint8_t *self_slot, int self, int slot,
                                const MessageLayout *layout) {
    return slot == self ? self_slot : send + slot * layout->bytes;
}

// A rank's gradient shard of a bucket: (matrix_per_rank) and (tail_per_rank).
typedef struct GradShard {
    float *matrix, *tail;
} GradShard;
// A rank's weight shard of a bucket, likewise.
typedef struct WeightShard {
    floatX *matrix, *tail;
} WeightShard;
// Return the shard of `rank` in a whole bucket (matrix_elements + tail_elements).
static inline GradShard grad_shard_of(const Bucket *bucket, float *grads, int64_t rank) {
    GradShard own = {grads + rank * bucket->matrix_per_rank,
                     grads + bucket->matrix_elements + rank * bucket->tail_per_rank};
    return own;
}
static inline WeightShard weight_shard_of(const Bucket *bucket, floatX *weights, int64_t rank) {
    WeightShard own = {weights + rank * bucket->matrix_per_rank,
                       weights + bucket->matrix_elements + rank * bucket->tail_per_rank};
    return own;
}

// Level 1 of the gradient reduction (or the only level): scales by 1/dp, transforms and quantizes.
// Partition p = i * slots + slot goes to destination `slot` as its i-th partition. Two levels:
// slots = D and i = node; a single level: slots = dp and one partition per slot.
typedef struct QuantizePartitions {
    const float *grads;  // (bucket->matrix_elements + bucket->tail_elements) the local gradients
    Bucket bucket;
    SegmentTable table;
    int64_t lo, hi;        // chunk, as a range of every partition's matrix shard
    float scale;           // 1 / dp
    Transform transform;   // chunks and groups are multiples of its order, or divide it
    RoundingKey rotation;  // signs of TRANSFORM_ROTATION
    Codec codec;
    int group;
    Codec tail_codec;  // plain
    Rounding rounding;
    RoundingKey key;
    int slots, self;
    int first, between;  // partition p is the shard of rank p * (1 + between) + first, which gives its
                         // position in the bucket; in `grads` its matrix shard is the p-th
    uint8_t *send;       // (slots) messages; slot `self` is not written
    uint8_t *self_slot;
    MessageLayout message;  // message.partitions per slot
} QuantizePartitions;
void kernel_quantize_partitions(Stream *s, const QuantizePartitions *a);
// Returns the position of partition p's matrix shard in the bucket.
HD_FN int64_t partition_position(const QuantizePartitions *a, int64_t p) {
    return (p * (1 + a->between) + a->first) * a->bucket.matrix_per_rank;
}

// Between the levels: sums the level-1 messages in source order in fp32 and quantizes the sums for
// level 2, in the transform domain.
typedef struct SumRequantize {
    const uint8_t *received;  // (sources) level-1 messages, in.bytes apart
    int sources;
    MessageLayout in;  // in.partitions = out.slots = nodes
    Codec in_codec;
    int in_group;
    QuantizePartitions out;  // one partition per node. grads, scale and transform are not used
} SumRequantize;
void kernel_sum_requantize(Stream *s, const SumRequantize *a);

// Error feedback for the hop between nodes. The residual is the rounding error of earlier messages;
// it is added to the values y that are quantized next. fp32, in the transform domain:
//   values += y                   kernel_feed_sums or kernel_feed_grads
//   message of values             kernel_quantize_partitions: grads = values, scale 1, no transform
//   values -= decoded message     kernel_keep_residual
typedef struct Residual {
    float *values;              // (partitions, bucket.matrix_per_rank) residual of one bucket
    const StepStatus *control;  // previous step's status: if it was skipped, values count as 0. NULL: they
                                // count
    bool frozen;                // for a warm-up: kernels run but do not change the values
} Residual;
// Returns the new residual of a value that the message represents as `sent`.
HD_FN float residual_rest(float value, float sent, bool pad) {
    float rest = f32_sub(value, sent);
    bool finite = (f32_bits(rest) & 0x7FFFFFFFu) < 0x7F800000u;
    return pad || !finite ? 0.0f : rest;
}
// y: sums of the sources, as in kernel_sum_requantize. One partition per in.partitions.
void kernel_feed_sums(Stream *s, const SumRequantize *a, const Residual *residual);
// y: gradients, scaled and transformed as in kernel_quantize_partitions. One partition per slot.
void kernel_feed_grads(Stream *s, const QuantizePartitions *a, const Residual *residual);
// a: the quantization, one partition per slot. Padding and non-finite results become 0.
void kernel_keep_residual(Stream *s, const QuantizePartitions *a, const Residual *residual);

// The last level: sums the sources in order, inverts the transform, masks padding, and stores this
// rank's shard of the reduced gradient or adds to it (fp32, shard + sum). Also computes the norm's
// partial sums over the resulting shard: partial sum j is tree_sum32 of the squares of elements 32j
// .. 32j+31.
typedef struct SumFinal {
    const uint8_t *received;  // (sources) messages, in.bytes apart, one partition each
    int sources;
    MessageLayout in;
    Codec codec;
    int group;
    Codec tail_codec;  // plain
    Transform transform;
    RoundingKey rotation;  // signs of TRANSFORM_ROTATION
    int rank;              // owner of the shard
    Bucket bucket;
    SegmentTable table;
    int64_t lo, hi;
    GradShard own;
    bool add;                // add to the shard instead of overwriting it
    float *matrix_partials;  // (matrix_per_rank / 32) partial sums of the norm
    float *tail_partials;    // (ceil(tail_per_rank / 32)) written with the chunk that carries the tail
} SumFinal;
void kernel_sum_final(Stream *s, const SumFinal *a);

// Computes only the partial sums of n values; missing ones count as 0. Used with dp = 1, where
// local gradients need no reduction.
void kernel_square_partials(Stream *s, float *partials, const float *x, int64_t n);
// The same for n weights.
void kernel_square_weights(Stream *s, float *partials, const floatX *weights, int64_t n);
// Stores the perfect binary tree sum of n partial sums (missing ones 0) in *sum. Destroys them.
void kernel_tree_sum(Stream *s, float *sum, float *partials, int64_t n);
// Stores step_record (step_status.h) of piece_sums (pieces), *loss and *fault.
void kernel_step_record(Stream *s, StepRecord *record, const float *piece_sums, int pieces, const float *loss,
                        const uint64_t *fault);
// Copies *found to *fault (atomically) unless *fault is set or *found is 0. lost: see below.
void kernel_mark_fault(Stream *s, uint64_t *fault, const uint64_t *found, const int *lost);
// Runs step_status (step_status.h).
void kernel_step_status(Stream *s, StepStatus *control, const StatusInputs *a);

// AdamW on this rank's shard of one bucket, fused with packing its message. Update (Apex FusedAdam,
// adam_w mode), fp32:
//   g = grad * clip; m = b1 m + (1-b1) g; v = b2 v + (1-b2) g g;
//   p -= lr ((m / c1) / (sqrt(v / c2) + eps) + wd p), wd on matrices only.
// Matrices: grouped codecs send codes of p - float(w) (difference) or of p (direct), plain ones p
// rounded. Tails: p rounded. A skipped step changes no state, sends zero codes and scales, and
// leaves unquantized sections unwritten: no rank applies them. Elements that adamw.h refuses keep
// p, m and v, and set *fault to code if it is 0 (atomically).
typedef struct UpdateShard {
    const StepStatus *control;
    float beta1, beta2, epsilon, weight_decay;
    int rank;
    Bucket bucket;
    SegmentTable table;
    const float *matrix_grads, *tail_grads;  // (matrix_per_rank), (tail_per_rank) reduced
    const floatX *matrix_weights;            // (matrix_per_rank) model weights, if difference
    float *master, *exp_avg, *exp_avg_sq;    // (matrix_per_rank + tail_per_rank)
    Codec codec;
    int group;
    Rounding rounding;
    bool difference;
    RoundingKey key;
    uint8_t *codes;         // (message.codes_stride) codes or rounded weights
    float *scales;          // (message.groups)
    uint8_t *tail;          // (tail_per_rank) floatX
    uint64_t *fault, code;  // see step_status.h
} UpdateShard;
void kernel_update_shard(Stream *s, const UpdateShard *a);
// kernel_update_shard on host cores (update_host.c), with host pointers and bitwise identical. CPU
// ranks run it as that kernel; with --optimizer-cpu-offload qwd.c runs it on several threads while
// the GPU computes. Divides the shard at group boundaries among `threads` threads; their number
// does not change the result. Each part counts as progress for the watchdog of `site` (or NULL).
void update_shard_host(const UpdateShard *a, int threads, const Site *site);

// Applies the gathered messages to all model weights, including this rank's own: w =
// floatX(float(w) + q
// * scale) (difference), floatX(q * scale) (direct), or the received weights. No-op if the step was
// skipped.
typedef struct ApplyWeights {
    const StepStatus *control;
    Bucket bucket;
    const uint8_t *messages;  // (nodes * per_node), message.bytes apart, in gather_slot's order
    int nodes, per_node;
    MessageLayout message;
    Codec codec;
    int group;
    bool difference;
    floatX *weights;  // (bucket->matrix_elements + bucket->tail_elements)
} ApplyWeights;
void kernel_apply_weights(Stream *s, const ApplyWeights *a);

// Lossless weights (lossless.h): codes the bf16 shard written by kernel_update_shard relative to
// the old model weights. Each group's words are stored at the end of the group's uncoded size, so
// gaps precede them. *bytes: message size once kernel_pack_weights has closed the gaps. After a
// skipped step `coded` holds only a header.
typedef struct CodeWeights {
    const StepStatus *control;
    LosslessLayout layout;
    const uint8_t *old, *fresh;  // (elements) bf16: old and new model weights
    const uint8_t *tail;         // (tail_elements) bf16
    uint8_t *coded;              // (layout.most) 16-byte aligned
    uint32_t *bytes;
} CodeWeights;
void kernel_code_weights(Stream *s, const CodeWeights *a);
// Closes the gaps in `coded`. message: (*bytes) 16-byte aligned.
void kernel_pack_weights(Stream *s, const LosslessLayout *layout, const uint8_t *coded, uint8_t *message);
// Decodes the gathered messages into all model weights, including this rank's own. Safe on any
// input: accesses nothing outside messages and weights. If message i is invalid or differs in size
// from the sender's, sets *fault to code + i if it is 0 (atomically) and leaves its weights
// undefined. No-op if the step was skipped.
typedef struct DecodeWeights {
    const StepStatus *control;
    LosslessLayout layout;    // layout of each message
    const uint8_t *messages;  // (nodes * per_node) messages in gather_slot's order, 16-byte aligned
    int64_t stride, bytes;    // between messages; readable size of a message
    int nodes, per_node;
    uint8_t *weights;  // bf16: (nodes * per_node) shards of elements, then of tail_elements
    uint64_t *fault, code;
} DecodeWeights;
void kernel_decode_weights(Stream *s, const DecodeWeights *a);

// Copies a message of n bytes, a multiple of 16. No-op if the step was skipped.
void kernel_keep_message(Stream *s, const StepStatus *control, uint8_t *to, const uint8_t *from, int64_t n);

// Checksum of a message: the sum of replica_mix(position, word) over its 32-bit words before the
// last MESSAGE_ALIGN bytes, plus replica_mix(key, id). The id of message i is first + i * stride.
// The checksum is stored at the start of those bytes (seal_offset), followed by zeros.
typedef struct SealMessages {
    uint8_t *messages;  // (count) bytes apart, 16-byte aligned
    int count;
    int skip;       // index of a message to ignore, -1: none
    int64_t bytes;  // size of a message, a multiple of 16
    uint64_t key;
    uint32_t first, stride;
} SealMessages;
void kernel_seal_messages(Stream *s, const SealMessages *a);
// Verifies checksums: sets *fault (atomically) to code + the index of the first wrong message, if
// it is 0. sums: (count) scratch, not to be shared between streams.
void kernel_check_messages(Stream *s, const SealMessages *a, uint64_t *sums, uint64_t *fault, uint64_t code);

// Adds replica_mix(position, bits) of n weights to *hash. first: arena position of weight 0.
void kernel_replica_hash(Stream *s, uint64_t *hash, const floatX *weights, int64_t first, int64_t n);
// Initializes n master weights from model weights: at the start, or if only weights were loaded.
void kernel_widen(Stream *s, float *master, const floatX *weights, int64_t n);
// Local steps (outer.h), n elements each. Computes pseudo-gradients: outer minus master weights.
void kernel_pseudo_gradient(Stream *s, float *gradient, const float *outer, const float *master, int64_t n);
// Outer optimizer step (Nesterov): m = momentum m + g, outer = outer - rate (g + momentum m).
// lost: no-op if *lost is not 0, because data of a lost replica group is undefined (comm_may_lose).
// NULL if replica groups cannot be lost.
void kernel_outer_step(Stream *s, float *outer, float *m, const float *gradient, float rate, float momentum,
                       int64_t n, const int *lost);
// Mixes outer weights into master weights: master = mix master + (1 - mix) outer; exactly the outer
// weights if mix is 0. lost: as above.
void kernel_mix_outer(Stream *s, float *master, const float *outer, float mix, int64_t n, const int *lost);
// Rounds master weights to model weights.
void kernel_narrow(Stream *s, floatX *weights, const float *master, int64_t n);
// Adds the number of zeros among n values to *count, for --log-num-zeros-in-grad.
void kernel_count_zeros(Stream *s, int64_t *count, const float *x, int64_t n);

LLMC_END
