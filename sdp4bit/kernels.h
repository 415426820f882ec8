// Fused kernels of the exact regime: all computation between a rank's local gradients and the model
// weights of all replicas. codec.h and layout.h define the results bit by bit. kernels_cpu.c is the
// CPU implementation and the reference; the kernels_cuda files compute bitwise identical results on
// GPUs. Called by tlq_hs.c, qwd.c, wire.c, outer.c and llmc/state. Pointers are device memory
// unless marked host. All calls are asynchronous on their stream.
#pragma once
#include "llmc/device.h"
#include "sdp4bit/step_status.h"
#include "sdp4bit/layout.h"
LLMC_BEGIN

// Maps positions in a bucket's matrix part to tensors, to find padding and logical offsets. count
// is 0 for a bucket without matrices.
typedef struct SegmentTable {
    const Segment *segment;  // (count) ordered by start
    int count;
} SegmentTable;

// Returns where to write the message to peer `slot`. Messages are layout->bytes apart in `send`;
// the message to the rank itself is written directly to self_slot in the receive buffer.
HD_FN uint8_t *outgoing_message(uint8_t *send, uint8_t *self_slot, int self, int slot,
                                const MessageLayout *layout) {
    return slot == self ? self_slot : send + slot * layout->bytes;
}

// A rank's gradient shard of a bucket: matrix (matrix_per_rank), tail (tail_per_rank).
typedef struct GradShard {
    float *matrix, *tail;
} GradShard;
// A rank's weight shard of a bucket, with the same shapes.
typedef struct WeightShard {
    floatX *matrix, *tail;
} WeightShard;
// Return the shard of `rank` within a whole bucket of (matrix_elements + tail_elements).
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

// Level 1 of the gradient reduction (or its only level): scales by 1/dp, transforms and quantizes.
// Partition p = i * slots + slot is the i-th partition of the message to peer `slot`. Two levels:
// slots = D and i is the node. A single level: slots = dp, one partition per message.
typedef struct QuantizePartitions {
    const float *grads;  // (bucket->matrix_elements + bucket->tail_elements) the local gradients
    Bucket bucket;
    SegmentTable table;
    int64_t lo, hi;        // chunk: elements [lo, hi) of every partition's matrix shard
    float scale;           // 1 / dp
    Transform transform;   // its order divides the chunk size; of order and group size, one divides the other
    RoundingKey rotation;  // signs of TRANSFORM_ROTATION
    Codec codec;
    int group;
    Codec tail_codec;  // plain
    Rounding rounding;
    RoundingKey key;
    int slots, self;
    int first, between;  // partition p is the shard of rank p * (1 + between) + first. Its matrix starts at
                         // grads[p * bucket.matrix_per_rank]
    uint8_t *send;       // (slots) messages; slot `self` is not written
    uint8_t *self_slot;
    MessageLayout message;  // message.partitions per slot
} QuantizePartitions;
void kernel_quantize_partitions(Stream *s, const QuantizePartitions *a);
// Returns the position of partition p's matrix shard in the bucket.
HD_FN int64_t partition_position(const QuantizePartitions *a, int64_t p) {
    return (p * (1 + a->between) + a->first) * a->bucket.matrix_per_rank;
}

// Between the levels: sums the level-1 messages in fp32 in source order and quantizes the sums for
// level 2. Values stay in the transform domain.
typedef struct SumRequantize {
    const uint8_t *received;  // (sources) level-1 messages, in.bytes apart
    int sources;
    MessageLayout in;  // in.partitions = out.slots = nodes
    Codec in_codec;
    int in_group;
    QuantizePartitions out;  // one partition per node; grads, scale and transform are unused
} SumRequantize;
void kernel_sum_requantize(Stream *s, const SumRequantize *a);

// Error feedback on the hop between nodes. The residual is the quantization error of earlier
// messages; it is added to the values y that are quantized next. fp32, in the transform domain:
//   values += y                  kernel_feed_sums or kernel_feed_grads
//   message = quantize(values)   kernel_quantize_partitions: grads = values, scale 1, no transform
//   values -= decoded message    kernel_keep_residual
typedef struct Residual {
    float *values;              // (partitions, bucket.matrix_per_rank) residual of one bucket
    const StepStatus *control;  // status of the previous step. If that step was skipped, values are read as
                                // 0. NULL: they are always used
    bool frozen;                // during warm-up: kernels run but do not change the values
} Residual;
// Returns the new residual of a value that the message represents as `sent`.
HD_FN float residual_rest(float value, float sent, bool pad) {
    float rest = f32_sub(value, sent);
    bool finite = (f32_bits(rest) & 0x7FFFFFFFu) < 0x7F800000u;
    return pad || !finite ? 0.0f : rest;
}
// y: sums over the sources, as in kernel_sum_requantize. values has in.partitions partitions.
void kernel_feed_sums(Stream *s, const SumRequantize *a, const Residual *residual);
// y: gradients as quantized by kernel_quantize_partitions. values has one partition per slot.
void kernel_feed_grads(Stream *s, const QuantizePartitions *a, const Residual *residual);
// a: the message, one partition per slot. Residuals of padding and non-finite residuals become 0.
void kernel_keep_residual(Stream *s, const QuantizePartitions *a, const Residual *residual);

// The last level: sums the messages in source order, inverts the transform and sets padding to 0.
// Stores the result in this rank's shard of the reduced gradient, or adds it (fp32, shard + sum).
// Also computes partial sums of the norm over the resulting shard: partial sum j is tree_sum32 of
// the squares of elements 32j .. 32j+31.
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

// Computes only the partial sums of n values, padded with 0. Used if dp = 1.
void kernel_square_partials(Stream *s, float *partials, const float *x, int64_t n);
// The same for n weights.
void kernel_square_weights(Stream *s, float *partials, const floatX *weights, int64_t n);
// Sums n partial sums, padded with 0, as a perfect binary tree into *sum. Destroys them.
void kernel_tree_sum(Stream *s, float *sum, float *partials, int64_t n);
// Stores step_record(piece_sums, pieces, *loss, *fault) of step_status.h.
void kernel_step_record(Stream *s, StepRecord *record, const float *piece_sums, int pieces, const float *loss,
                        const uint64_t *fault);
// Copies *found to *fault (atomically) if *fault is 0. lost: see kernel_outer_step.
void kernel_mark_fault(Stream *s, uint64_t *fault, const uint64_t *found, const int *lost);
// Runs step_status (step_status.h).
void kernel_step_status(Stream *s, StepStatus *control, const StatusInputs *a);

// AdamW on this rank's shard of one bucket, fused with writing its message. The update (Apex's
// FusedAdam, adam_w mode) in fp32:
//   g = grad * clip; m = b1 m + (1-b1) g; v = b2 v + (1-b2) g g;
//   p -= lr ((m / c1) / (sqrt(v / c2) + eps) + wd p), wd on matrices only.
// The message: grouped codecs send matrices as codes of p - float(w) (difference) or of p (direct);
// plain codecs send p rounded. Tails are always p rounded.
// A skipped step changes no state and sends zero codes and scales. Its plain sections are not
// written, since no rank applies them. If adamw.h refuses an element, its p, m and v are kept, and
// *fault is set to `code` if *fault is 0 (atomically).
//
// matrix_grads NULL: another optimizer has updated the master weights of matrices (muon.h), which
// are only coded. Then exp_avg_sq has only the tail, and so has exp_avg if there is momentum_bf16.
typedef struct UpdateShard {
    const StepStatus *control;
    float beta1, beta2, epsilon, weight_decay;
    int rank;
    Bucket bucket;
    SegmentTable table;
    const float *matrix_grads, *tail_grads;  // reduced: (matrix_per_rank) or NULL, (tail_per_rank)
    const floatX *matrix_weights;            // (matrix_per_rank) model weights, if difference
    float *master, *exp_avg, *exp_avg_sq;    // (matrix_per_rank + tail_per_rank)
    uint16_t *momentum_bf16;                 // (matrix_per_rank) of the other optimizer; or NULL
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
// Return the position of the tail in exp_avg and in exp_avg_sq.
HD_FN int64_t update_tail_averages(const UpdateShard *a) {
    return a->momentum_bf16 ? 0 : a->bucket.matrix_per_rank;
}
HD_FN int64_t update_tail_squares(const UpdateShard *a) {
    return a->matrix_grads ? a->bucket.matrix_per_rank : 0;
}
// kernel_update_shard on the host (update_host.c): host pointers, bitwise identical results. It is
// the kernel of CPU ranks; with --optimizer-cpu-offload qwd.c calls it while the GPU computes.
// `threads` threads share the work; their number does not change the result. Reports progress to
// the watchdog of `site`, which may be NULL.
void update_shard_host(const UpdateShard *a, int threads, const Site *site);
// The same for elements [lo, hi) of the shard, the matrices first. lo must be the first element of
// a group. master, exp_avg and exp_avg_sq hold these elements only; if matrix_grads is NULL,
// exp_avg_sq holds only elements of the tail, and so does exp_avg with momentum_bf16.
void update_range_host(const UpdateShard *a, int64_t lo, int64_t hi, int threads, const Site *site);

// Applies the gathered messages to all model weights, including this rank's shard:
//   difference      w = floatX(float(w) + q * scale)
//   direct          w = floatX(q * scale)
//   plain codecs    w = the received weights
// No-op if the step was skipped.
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

// Lossless weights (lossless.h): codes the bf16 shard that kernel_update_shard wrote, relative to
// the old model weights. In `coded` each group has space for its weights without coding. Its words
// are at the end of this space, and kernel_pack_weights removes the gaps. *bytes: size of the
// message without gaps. After a skipped step `coded` holds only a header.
typedef struct CodeWeights {
    const StepStatus *control;
    LosslessLayout layout;
    const uint8_t *old, *fresh;  // (elements) bf16: old and new model weights
    const uint8_t *tail;         // (tail_elements) bf16
    uint8_t *coded;              // (layout.most) 16-byte aligned
    uint32_t *bytes;
} CodeWeights;
void kernel_code_weights(Stream *s, const CodeWeights *a);
// Copies `coded` to `message` without the gaps. message: (*bytes) 16-byte aligned.
void kernel_pack_weights(Stream *s, const LosslessLayout *layout, const uint8_t *coded, uint8_t *message);
// Decodes the gathered messages into all model weights, including this rank's shard. Never accesses
// memory outside messages and weights, even if a message is corrupt. If message i is invalid, sets
// *fault to code + i if *fault is 0 (atomically), and the weights of this message are undefined.
// No-op if the step was skipped.
typedef struct DecodeWeights {
    const StepStatus *control;
    LosslessLayout layout;    // layout of each message
    const uint8_t *messages;  // (nodes * per_node) messages in gather_slot's order, 16-byte aligned
    int64_t stride, bytes;    // distance between messages, readable bytes of each
    int nodes, per_node;
    uint8_t *weights;  // bf16, in rank order: all matrix shards, then all tail shards
    uint64_t *fault, code;
} DecodeWeights;
void kernel_decode_weights(Stream *s, const DecodeWeights *a);

// Copies a message of n bytes, a multiple of 16. No-op if the step was skipped.
void kernel_keep_message(Stream *s, const StepStatus *control, uint8_t *to, const uint8_t *from, int64_t n);

// The checksum of a message is the sum of replica_mix(position, word) over its 32-bit words, plus
// replica_mix(key, id). The id of message i is first + i * stride. The last MESSAGE_ALIGN bytes of
// the message hold the checksum (at seal_offset), then zeros; the sum excludes them.
typedef struct SealMessages {
    uint8_t *messages;  // (count) bytes apart, 16-byte aligned
    int count;
    int skip;       // index of a message to ignore, -1: none
    int64_t bytes;  // size of a message, a multiple of 16
    uint64_t key;
    uint32_t first, stride;
} SealMessages;
void kernel_seal_messages(Stream *s, const SealMessages *a);
// Verifies checksums. If message i is the first with a wrong checksum, sets *fault to code + i if
// *fault is 0 (atomically). sums: (count) scratch; each stream needs its own.
void kernel_check_messages(Stream *s, const SealMessages *a, uint64_t *sums, uint64_t *fault, uint64_t code);

// Adds replica_mix(position, bits) of n weights to *hash. first: arena position of weight 0.
void kernel_replica_hash(Stream *s, uint64_t *hash, const floatX *weights, int64_t first, int64_t n);
// Initializes n master weights from model weights.
void kernel_widen(Stream *s, float *master, const floatX *weights, int64_t n);
// Local steps (outer.h). Computes n pseudo-gradients: outer weights minus master weights. gradient
// may be outer.
void kernel_pseudo_gradient(Stream *s, float *gradient, const float *outer, const float *master, int64_t n);
// Outer optimizer step (Nesterov): m = momentum m + g, outer = outer - rate (g + momentum m). lost:
// if *lost is not 0, a replica group was lost and its data is undefined (comm_may_lose), so the
// kernel is a no-op. NULL if replica groups cannot be lost.
void kernel_outer_step(Stream *s, float *outer, float *m, const float *gradient, float rate, float momentum,
                       int64_t n, const int *lost);
// Mixes outer weights into master weights: master = mix master + (1 - mix) outer, or a copy of the
// outer weights if mix is 0. lost: as above.
void kernel_mix_outer(Stream *s, float *master, const float *outer, float mix, int64_t n, const int *lost);
// Elastic replica groups, and error feedback of local steps. sum += weight * x, or sum = weight * x
// if `first`; x may be sum. Values of x that are not finite count as 0, so that a group that has
// diverged does not spread.
void kernel_add_weighted(Stream *s, float *sum, const float *x, float weight, bool first, int64_t n);
// Position of a range of a rank's part of a tensor in the chunk of whole tensors that contains it.
// Element i of the range is element j = first + i of the part, whose rows have `width` elements.
typedef struct ChunkPlace {
    int64_t n, first, width;
    int64_t pitch, base;  // elements of a row of the whole tensor, position of the part's element 0
} ChunkPlace;
HD_FN int64_t chunk_position(const ChunkPlace *p, int64_t i) {
    int64_t j = p->first + i;
    return p->width == p->pitch ? p->base + j : p->base + j / p->width * p->pitch + j % p->width;
}
// Outer step of a range: updates outer weights and momentum like kernel_outer_step, and adds
// share * (new - old outer weight + own) to the master weight. own: the decoded pseudo-gradient
// that this group has contributed; NULL: the group did not take part. Then the difference between
// outer and master weights does not change.
typedef struct MergeOuter {
    float *outer, *momentum, *master;  // (place.n)
    const float *mean, *own;           // the chunk
    ChunkPlace place;
    float rate, decay, share;  // outer learning rate and momentum, 1 - --local-steps-mix
    float damping;             // factor of `mean` in the momentum; 1: as kernel_outer_step
    uint64_t *hash;            // adds the replica hash of the new state; NULL: another rank counts it
} MergeOuter;
void kernel_merge_outer(Stream *s, const MergeOuter *a);
// Rounds master weights to model weights.
void kernel_narrow(Stream *s, floatX *weights, const float *master, int64_t n);
// Adds the number of zeros among n values to *count, for --log-num-zeros-in-grad.
void kernel_count_zeros(Stream *s, int64_t *count, const float *x, int64_t n);

LLMC_END
