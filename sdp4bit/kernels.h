// The fused kernels of the exact regime: everything between a rank's local gradients and the
// replicas' weights, defined to the bit by codec.h and layout.h. kernels_cpu.c implements them for
// CPU ranks and is the reference. The kernels_cuda files implement them for GPUs with the same
// bits. Called by tlq_hs.c, qwd.c, wire.c, outer.c and the files of llmc/state. All pointers are
// device memory unless marked host. All calls are asynchronous on their stream.
#pragma once
#include "llmc/device.h"
#include "sdp4bit/step_status.h"
#include "sdp4bit/layout.h"
LLMC_BEGIN

// Maps positions of a bucket's matrix part to tensors: pads and logical offsets. count may be 0 (a
// bucket without matrices).
typedef struct SegmentTable {
    const Segment *segment;  // (count) ordered by start
    int count;
} SegmentTable;

// The message to peer `slot`, one of those that lie layout->bytes apart at `send`. The message to
// oneself is never sent: it is written to self_slot, in the receive buffer.
HD_FN uint8_t *outgoing_message(uint8_t *send, uint8_t *self_slot, int self, int slot,
                                const MessageLayout *layout) {
    return slot == self ? self_slot : send + slot * layout->bytes;
}

// A rank's own piece of each part of a bucket, of gradients: (matrix_per_rank) and (tail_per_rank).
typedef struct GradShard {
    float *matrix, *tail;
} GradShard;
// The same of weights.
typedef struct WeightShard {
    floatX *matrix, *tail;
} WeightShard;
// rank's windows of a whole bucket (matrix_elements + tail_elements).
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

// Level 1 of the gradient reduction (or the only level): scale by 1/dp, transform, quantize.
// Partition p = i * slots + slot goes to destination `slot` as its i-th partition. With two levels
// slots = D and i = node; with a single level slots = dp, and there is one partition per slot.
typedef struct QuantizePartitions {
    const float *grads;  // (bucket->matrix_elements + bucket->tail_elements) the local gradients
    Bucket bucket;
    SegmentTable table;
    int64_t lo, hi;        // chunk of every partition's matrix piece
    float scale;           // 1 / dp
    Transform transform;   // chunks and groups are whole blocks of it, or it is of whole groups
    RoundingKey rotation;  // of the signs of TRANSFORM_ROTATION
    Codec codec;
    int group;
    Codec tail_codec;  // plain
    Rounding rounding;
    RoundingKey key;
    int slots, self;
    int first, between;  // partition p is the shard of rank p * (1 + between) + first, which says
                         // where its matrix piece lies in the bucket. In `grads` it is piece p
    uint8_t *send;       // (slots) messages; slot `self` is left untouched
    uint8_t *self_slot;
    MessageLayout message;  // message.partitions per slot
} QuantizePartitions;
void kernel_quantize_partitions(Stream *s, const QuantizePartitions *a);
// Where partition p's matrix piece begins in the bucket.
HD_FN int64_t partition_position(const QuantizePartitions *a, int64_t p) {
    return (p * (1 + a->between) + a->first) * a->bucket.matrix_per_rank;
}

// Between the levels: sum the sources' level-1 messages in source order in fp32, quantize the sums
// for level 2. Stays in the transform domain.
typedef struct SumRequantize {
    const uint8_t *received;  // (sources) level-1 messages, in.bytes apart
    int sources;
    MessageLayout in;  // in.partitions = nodes
    Codec in_codec;
    int in_group;
    int local, per_node;  // partition i is the shard of rank i * per_node + local
    Bucket bucket;
    SegmentTable table;
    int64_t lo, hi;
    Codec codec;
    int group;
    Codec tail_codec;  // plain
    Rounding rounding;
    RoundingKey key;
    int self;       // own node
    uint8_t *send;  // (nodes) level-2 messages
    uint8_t *self_slot;
    MessageLayout out;  // out.partitions = 1
} SumRequantize;
void kernel_sum_requantize(Stream *s, const SumRequantize *a);
// The quantization whose values are the sums. send and self_slot are the caller's.
static inline QuantizePartitions quantization_of_sums(const SumRequantize *r) {
    QuantizePartitions q = {0};
    q.bucket = r->bucket;
    q.table = r->table;
    q.lo = r->lo;
    q.hi = r->hi;
    q.codec = r->codec;
    q.group = r->group;
    q.tail_codec = r->tail_codec;
    q.rounding = r->rounding;
    q.key = r->key;
    q.slots = r->in.partitions;
    q.self = r->self;
    q.first = r->local;
    q.between = r->per_node - 1;
    q.message = r->out;
    return q;
}

// Error feedback, of the hop between nodes. What its rounding partial sums of the matrices, the residual,
// is added to what the next message is made of. Where y is what would be quantized:
//   values = values + y           kernel_feed_sums or kernel_feed_grads
//   the message of values         kernel_quantize_partitions: grads = values, scale 1, no transform
//   values = values - message     kernel_keep_residual
// All in fp32, in the transform's domain.
typedef struct Residual {
    float *values;              // (partitions, bucket.matrix_per_rank) of one bucket
    const StepStatus *control;  // the step status on the step before: the values count as 0 where it was
                                // skipped. NULL: they count
    bool frozen;                // for a warm-up: the kernels run and leave the values as they are
} Residual;
// What a value of the residual becomes, of which the message says `sent`.
HD_FN float residual_rest(float value, float sent, bool pad) {
    float rest = f32_sub(value, sent);
    bool finite = (f32_bits(rest) & 0x7FFFFFFFu) < 0x7F800000u;
    return pad || !finite ? 0.0f : rest;
}
// y: the sums of the sources, as in kernel_sum_requantize. in.partitions.
void kernel_feed_sums(Stream *s, const SumRequantize *a, const Residual *residual);
// y: gradients, scaled and transformed as in kernel_quantize_partitions. One partition per slot.
void kernel_feed_grads(Stream *s, const QuantizePartitions *a, const Residual *residual);
// a: of the quantization, one partition per slot. Values become 0 in pads, and where they would not
// be finite.
void kernel_keep_residual(Stream *s, const QuantizePartitions *a, const Residual *residual);

// The last level: sum the sources in order, invert the transform, mask pads, store this rank's
// shard of the reduced gradient. Or add to the shard, in fp32: shard + sum. And the partial sums of the
// norm's tree, of the values that then stand in the shard: partial sum j of a piece is tree_sum32 of the
// squares of its elements 32j .. 32j+31.
typedef struct SumFinal {
    const uint8_t *received;  // (sources) messages, in.bytes apart, one partition each
    int sources;
    MessageLayout in;
    Codec codec;
    int group;
    Codec tail_codec;  // plain
    Transform transform;
    RoundingKey rotation;  // of the signs of TRANSFORM_ROTATION
    int rank;              // whose shard this is
    Bucket bucket;
    SegmentTable table;
    int64_t lo, hi;
    GradShard own;           // the rank's windows
    bool add;                // to what the windows hold; else they are overwritten
    float *matrix_partials;  // (matrix_per_rank / 32) the norm's partial sums of the matrix piece
    float *tail_partials;    // (ceil(tail_per_rank / 32)) written with the chunk that carries the tail
} SumFinal;
void kernel_sum_final(Stream *s, const SumFinal *a);

// dp = 1: the local gradients are the reduced ones. Only the partial sums of n values at x (n of any
// size, missing values are 0).
void kernel_square_partials(Stream *s, float *partials, const float *x, int64_t n);
// The same of n weights.
void kernel_square_weights(Stream *s, float *partials, const floatX *weights, int64_t n);
// *sum = the perfect binary tree over n partial sums (missing ones 0). Destroys the partial sums.
void kernel_tree_sum(Stream *s, float *sum, float *partials, int64_t n);
// step_status.h's step_record of piece_sums (pieces), *loss and *fault.
void kernel_step_record(Stream *s, StepRecord *record, const float *piece_sums, int pieces, const float *loss,
                        const uint64_t *fault);
// *fault = *found, unless *fault already says something or *found is 0. The write is atomic. lost:
// as below.
void kernel_mark_fault(Stream *s, uint64_t *fault, const uint64_t *found, const int *lost);
// step_status.h's step_status.
void kernel_step_status(Stream *s, StepStatus *control, const StatusInputs *a);

// AdamW on this rank's shard of one bucket, fused with what the gather sends. Update (Apex
// FusedAdam, adam_w mode), fp32:
//   g = grad * clip; m = b1 m + (1-b1) g; v = b2 v + (1-b2) g g;
//   p -= lr ((m / c1) / (sqrt(v / c2) + eps) + wd p), wd on matrices only.
// Then the matrices. A grouped codec sends codes of p - float(w) (difference) or of p (direct). A
// plain one sends p rounded. The tail is p rounded. A skipped step leaves everything as it is. It
// sends zero codes and zero scales, and leaves unquantized sections unwritten: nobody applies them.
// An element that adamw.h refuses keeps its p, m and v. Then *fault = code, unless it already says
// something; the write is atomic.
typedef struct UpdateShard {
    const StepStatus *control;
    float beta1, beta2, epsilon, weight_decay;
    int rank;
    Bucket bucket;
    SegmentTable table;
    const float *matrix_grads, *tail_grads;  // (matrix_per_rank), (tail_per_rank) reduced
    const floatX *matrix_weights;            // (matrix_per_rank) the replica's, for a difference
    float *master, *exp_avg, *exp_avg_sq;    // (matrix_per_rank + tail_per_rank)
    Codec codec;
    int group;
    Rounding rounding;
    bool difference;
    RoundingKey key;
    uint8_t *codes;         // (message.codes_stride) codes or rounded weights
    float *scales;          // (message.groups)
    uint8_t *tail;          // (tail_per_rank) floatX
    uint64_t *fault, code;  // step_status.h's faults
} UpdateShard;
void kernel_update_shard(Stream *s, const UpdateShard *a);

// Every replica, the owner's too, applies the gathered messages: w = floatX(float(w) + q * scale)
// (difference), floatX(q * scale) (direct), or the weights themselves. Nothing changes when the
// step was skipped.
typedef struct ApplyWeights {
    const StepStatus *control;
    Bucket bucket;
    const uint8_t *messages;  // (nodes * per_node) messages, message.bytes apart, as gather_slot says
    int nodes, per_node;
    MessageLayout message;
    Codec codec;
    int group;
    bool difference;
    floatX *weights;  // (bucket->matrix_elements + bucket->tail_elements)
} ApplyWeights;
void kernel_apply_weights(Stream *s, const ApplyWeights *a);

// Lossless weights (lossless.h). Codes the shard that kernel_update_shard has made in bf16 against
// the replica's old one. A group's words end where the group would end if it were not coded, and
// leave a gap before them. *bytes = the message's, once kernel_pack_weights has closed the gaps.
// After a skipped step `coded` holds a header alone.
typedef struct CodeWeights {
    const StepStatus *control;
    LosslessLayout layout;
    const uint8_t *old, *fresh;  // (elements) bf16: the replica's, and what it becomes
    const uint8_t *tail;         // (tail_elements) bf16
    uint8_t *coded;              // (layout.most) on 16 bytes
    uint32_t *bytes;
} CodeWeights;
void kernel_code_weights(Stream *s, const CodeWeights *a);
// message: (*bytes) on 16 bytes.
void kernel_pack_weights(Stream *s, const LosslessLayout *layout, const uint8_t *coded, uint8_t *message);
// Every replica, the owner's too, decodes the gathered messages: its weights become those that the
// senders coded. Safe on any bytes: nothing outside of messages and weights is touched. Where
// message i is none, or ends otherwise than its sender's did, *fault = code + i, unless *fault
// already says something; the write is atomic. Those weights are then of no use. Nothing changes
// when the step was skipped.
typedef struct DecodeWeights {
    const StepStatus *control;
    LosslessLayout layout;    // of each message
    const uint8_t *messages;  // (nodes * per_node) messages as gather_slot says, on 16 bytes
    int64_t stride, bytes;    // from one to the next; those of a message that may be read
    int nodes, per_node;
    uint8_t *weights;  // bf16: (nodes * per_node) windows of elements, then of tail_elements
    uint64_t *fault, code;
} DecodeWeights;
void kernel_decode_weights(Stream *s, const DecodeWeights *a);

// to = from, n bytes, a multiple of 16: a message that stands until the next one. Nothing when the
// step was skipped.
void kernel_keep_message(Stream *s, const StepStatus *control, uint8_t *to, const uint8_t *from, int64_t n);

// The checksum of a message: the sum of replica_mix(position, word) over its 32-bit words before
// the last MESSAGE_ALIGN bytes, plus replica_mix(key, id). Message i has the id first + i * stride.
// The checksum stands at the start of those bytes (seal_offset); the rest of them is 0.
typedef struct SealMessages {
    uint8_t *messages;  // (count) bytes apart, on 16 bytes
    int count;
    int skip;       // a message that is left alone, -1: none
    int64_t bytes;  // of a message, a multiple of 16
    uint64_t key;
    uint32_t first, stride;
} SealMessages;
void kernel_seal_messages(Stream *s, const SealMessages *a);
// Compares: for the first message that has another checksum, *fault = code + its index, unless
// *fault already says something. sums: (count) scratch. Checks on several streams may share fault
// (the write is atomic) but not sums.
void kernel_check_messages(Stream *s, const SealMessages *a, uint64_t *sums, uint64_t *fault, uint64_t code);

// *hash += sum of replica_mix(position, bits) over n weights whose first has arena position
// `first`.
void kernel_replica_hash(Stream *s, uint64_t *hash, const floatX *weights, int64_t first, int64_t n);
// master = float(weights): the first master weights, or those of a run that loads weights only. n
// elements.
void kernel_widen(Stream *s, float *master, const floatX *weights, int64_t n);
// Local steps (outer.h), n elements each. The pseudo-gradient of a replica group: outer weights
// minus master weights.
void kernel_pseudo_gradient(Stream *s, float *gradient, const float *outer, const float *master, int64_t n);
// The outer step, Nesterov's: m = momentum m + g, outer = outer - rate (g + momentum m).
// lost: where *lost is not 0 a replica group was lost, what came from it is undefined, and nothing
// happens (comm_may_lose). NULL: none can be.
void kernel_outer_step(Stream *s, float *outer, float *m, const float *gradient, float rate, float momentum,
                       int64_t n, const int *lost);
// The master weights meet the outer weights: master = mix master + (1 - mix) outer; the outer
// weights themselves where mix is 0. lost: as above.
void kernel_meet(Stream *s, float *master, const float *outer, float mix, int64_t n, const int *lost);
// weights = master weights, rounded.
void kernel_narrow(Stream *s, floatX *weights, const float *master, int64_t n);
// Counts zeros of n values into *count (accumulates), for --log-num-zeros-in-grad.
void kernel_count_zeros(Stream *s, int64_t *count, const float *x, int64_t n);

LLMC_END
