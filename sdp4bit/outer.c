// Layout and exchange of pseudo-gradients between replica groups: see outer.h.
#include "sdp4bit/outer.h"

#include <assert.h>
#include <stdlib.h>

// --- layout --------------------------------------------------------------------------------------

// Copies the segments that overlap positions [lo, lo + n) and makes their starts relative to lo.
// Returns their number. Padding belongs to the tensor before it.
static int cut_segments(const Segment *from, int count, int64_t lo, int64_t n, Segment *to) {
    int cut = 0;
    for (int i = 0; i < count; i++) {
        bool ends_before = i + 1 < count && from[i + 1].start <= lo;
        if (ends_before || from[i].start >= lo + n) continue;
        to[cut] = from[i];
        to[cut++].start -= lo;
    }
    return cut;
}

// Returns one of `parts` equal parts of a bucket, as a bucket.
static Bucket part_of(const Bucket *bucket, int parts) {
    Bucket part = *bucket;
    part.matrix_elements /= parts;
    part.tail_elements /= parts;
    part.matrix_per_rank = part.matrix_elements;
    part.tail_per_rank = part.tail_elements;
    return part;
}

static void cut_part(OuterLayout *outer, Bucket *part, const Segment *from, int count, int64_t lo) {
    part->first_segment = outer->segments_total;
    part->segments = cut_segments(from, count, lo, part->matrix_elements,
                                  outer->segments + part->first_segment);
    outer->segments_total += part->segments;
}

void outer_layout(OuterLayout *outer, const BucketLayout *layout, int rank, int replica_groups,
                  int replica_group) {
    assert(layout->options.pieces == replica_groups && rank >= 0 && rank < layout->dp);
    assert(replica_group >= 0 && replica_group < replica_groups);
    size_t buckets = (size_t)layout->buckets, segments = 2 * (size_t)layout->segments_total;
    *outer = (OuterLayout){.replica_groups = replica_groups,
                           .replica_group = replica_group,
                           .buckets = layout->buckets};
    outer->shard = xcalloc(buckets, sizeof(Bucket), "the bucket layout");
    outer->piece = xcalloc(buckets, sizeof(Bucket), "the bucket layout");
    outer->segments = xcalloc(segments, sizeof(Segment), "the bucket layout");
    for (int b = 0; b < layout->buckets; b++) {
        const Bucket *bucket = &layout->bucket[b];
        Bucket *shard = &outer->shard[b], *piece = &outer->piece[b];
        *shard = part_of(bucket, layout->dp);
        cut_part(outer, shard, layout->segments + bucket->first_segment, bucket->segments,
                 rank * shard->matrix_elements);
        *piece = part_of(shard, replica_groups);
        cut_part(outer, piece, outer->segments + shard->first_segment, shard->segments,
                 replica_group * piece->matrix_elements);
        shard->matrix_per_rank = piece->matrix_elements;
        shard->tail_per_rank = piece->tail_elements;
    }
}

void outer_layout_free(OuterLayout *outer) {
    free(outer->shard);
    free(outer->piece);
    free(outer->segments);
}

MessageLayout outer_message(const OuterLayout *outer, int b, const GradFormat *format) {
    assert(b >= 0 && b < outer->buckets);
    const Bucket *piece = &outer->piece[b];
    return layout_sealed(piece,
                         message_layout(format->inter_codec, format->inter_group, piece->matrix_elements, 1,
                                        format->tail_codec, piece->tail_elements));
}

int64_t outer_wire_bytes(const OuterLayout *outer, int b, const GradFormat *format) {
    int peers = outer->replica_groups - 1;
    // With one replica group, shards need not be multiples of the group size (see outer_message).
    return peers ? 2 * peers * outer_message(outer, b, format).bytes : 0;
}

int64_t outer_largest_shard(const OuterLayout *outer) {
    int64_t largest = 0;
    for (int b = 0; b < outer->buckets; b++) {
        int64_t elements = bucket_elements(&outer->shard[b]);
        if (elements > largest) largest = elements;
    }
    return largest;
}

int64_t outer_largest_message(const OuterLayout *outer, const GradFormat *format) {
    int64_t largest = 0;
    for (int b = 0; b < outer->buckets; b++) {
        int64_t bytes = outer_message(outer, b, format).bytes;
        if (bytes > largest) largest = bytes;
    }
    return largest;
}

// --- the exchange --------------------------------------------------------------------------------

static SegmentTable table_of(const OuterStep *step, const Bucket *part) {
    SegmentTable table = {step->segments + part->first_segment, part->segments};
    return table;
}

static RoundingKey key_of(const OuterStep *step, uint32_t purpose, int source) {
    RoundingKey key = {step->seed, step->step, purpose, (uint32_t)source};
    return key;
}

// Describes the quantization of `part` with one partition per slot.
static QuantizePartitions quantize_of(const OuterStep *step, const Bucket *part, const float *values,
                                      const MessageLayout *message) {
    QuantizePartitions q = {0};
    q.grads = values;
    q.bucket = *part;
    q.table = table_of(step, part);
    q.hi = part->matrix_per_rank;
    q.scale = 1.0f;
    q.transform = step->format.transform;
    q.codec = step->format.inter_codec;
    q.group = step->format.inter_group;
    q.tail_codec = step->format.tail_codec;
    q.rounding = step->format.rounding;
    q.message = *message;
    return q;
}

// Sends each replica group its piece of this group's pseudo-gradient.
static void send_pieces(const OuterStep *step, int b, const float *gradient, const MessageLayout *message) {
    const OuterLayout *layout = step->layout;
    QuantizePartitions q = quantize_of(step, &layout->shard[b], gradient, message);
    q.scale = 1.0f / (float)layout->replica_groups;
    q.key = key_of(step, PURPOSE_OUTER, layout->replica_group);
    q.rotation = key_of(step, PURPOSE_OUTER_ROTATION, 0);
    q.slots = layout->replica_groups;
    q.self = layout->replica_group;
    q.send = step->send;
    q.self_slot = step->recv + q.self * message->bytes;
    kernel_quantize_partitions(step->stream, &q);
    wire_seal(step->checks, HOP_OUTER, b, 0, message, step->send, step->stream);
    wire_all_to_all(step->checks, HOP_OUTER, message, step->send, step->recv, step->stream);
    wire_check(step->checks, HOP_OUTER, b, 0, message, step->recv, step->stream);
}

// Sums the messages of piece p into `to`. received: (sources) messages.
static void sum_piece(const OuterStep *step, int b, int p, const uint8_t *received, int sources,
                      const MessageLayout *message, RoundingKey rotation, GradShard to) {
    const Bucket *shard = &step->layout->shard[b];
    SumFinal f = {0};
    f.received = received;
    f.sources = sources;
    f.in = *message;
    f.codec = step->format.inter_codec;
    f.group = step->format.inter_group;
    f.tail_codec = step->format.tail_codec;
    f.transform = step->format.transform;
    f.rotation = rotation;
    f.rank = p;
    f.bucket = *shard;
    f.table = table_of(step, shard);
    f.hi = shard->matrix_per_rank;
    f.own = to;
    f.matrix_partials = step->partials;
    f.tail_partials = step->partials + shard->matrix_per_rank / HADAMARD_ORDER;
    kernel_sum_final(step->stream, &f);
}

// All-gathers the means: sends this replica group's piece to all others.
static void send_mean(const OuterStep *step, int b, const MessageLayout *message) {
    const OuterLayout *layout = step->layout;
    QuantizePartitions q = quantize_of(step, &layout->piece[b], step->mean, message);
    q.key = key_of(step, PURPOSE_OUTER_MEAN, 0);
    q.rotation = key_of(step, PURPOSE_OUTER_MEAN_ROTATION, 0);
    q.slots = 1;
    q.self_slot = step->gathered + layout->replica_group * message->bytes;
    kernel_quantize_partitions(step->stream, &q);
    wire_seal_own(step->checks, b, layout->replica_group, message, step->gathered, step->stream);
    wire_all_gather(step->checks, HOP_OUTER_MEAN, 0, 1, message, step->gathered, step->stream);
    wire_check_gathered(step->checks, HOP_OUTER_MEAN, b, 0, 1, message, step->gathered, step->stream);
}

// --- error feedback ------------------------------------------------------------------------------

// Stores in step->next the rounding errors of the pieces that this replica group has sent.
// gradient: the pseudo-gradient with the earlier errors.
static void keep_piece_errors(const OuterStep *step, int b, const float *gradient,
                              const MessageLayout *message) {
    const OuterLayout *layout = step->layout;
    const Bucket *shard = &layout->shard[b];
    uint8_t *own = step->recv + layout->replica_group * message->bytes;
    for (int p = 0; p < layout->replica_groups; p++) {
        const uint8_t *sent = outgoing_message(step->send, own, layout->replica_group, p, message);
        sum_piece(step, b, p, sent, 1, message, key_of(step, PURPOSE_OUTER_ROTATION, 0),
                  grad_shard_of(shard, step->next, p));
    }
    // The messages hold shares of the mean.
    kernel_add_weighted(step->stream, step->next, step->next, -(float)layout->replica_groups, true,
                        bucket_elements(shard));
    kernel_add_weighted(step->stream, step->next, gradient, 1.0f, false, bucket_elements(shard));
}

// Adds the rounding error of the mean of this replica group's piece to step->next, weighted such
// that it adds once to the next mean. Overwrites step->mean. gradient: the decoded means.
static void keep_mean_errors(const OuterStep *step, int b, float *gradient, GradShard mean) {
    const OuterLayout *layout = step->layout;
    const Bucket *shard = &layout->shard[b];
    int64_t matrix = layout->replica_group * shard->matrix_per_rank,
            tail = shard->matrix_elements + layout->replica_group * shard->tail_per_rank;
    kernel_pseudo_gradient(step->stream, mean.matrix, mean.matrix, gradient + matrix, shard->matrix_per_rank);
    kernel_pseudo_gradient(step->stream, mean.tail, mean.tail, gradient + tail, shard->tail_per_rank);
    for (int i = 0; i < step->kept_count; i++) {
        OuterRange range = step->kept[i];
        const float *errors = range.at < shard->matrix_elements ? mean.matrix + (range.at - matrix)
                                                                : mean.tail + (range.at - tail);
        kernel_add_weighted(step->stream, step->next + range.at, errors, (float)layout->replica_groups, false,
                            range.n);
    }
}

// --- all-reduce ----------------------------------------------------------------------------------

void outer_exchange(const OuterStep *step, int b, float *gradient) {
    assert(b >= 0 && b < step->layout->buckets);
    const OuterLayout *layout = step->layout;
    const Bucket *shard = &layout->shard[b];
    if (layout->replica_groups == 1) return;
    bool feedback = step->residual && codec_grouped(step->format.inter_codec);
    int64_t n = bucket_elements(shard);
    step->checks->micro_batch = 0;
    MessageLayout message = outer_message(layout, b, &step->format);
    if (feedback) kernel_add_weighted(step->stream, gradient, step->residual, 1.0f, false, n);
    send_pieces(step, b, gradient, &message);
    if (feedback) keep_piece_errors(step, b, gradient, &message);
    GradShard mean = {step->mean, step->mean + layout->piece[b].matrix_elements};
    sum_piece(step, b, layout->replica_group, step->recv, layout->replica_groups, &message,
              key_of(step, PURPOSE_OUTER_ROTATION, 0), mean);
    send_mean(step, b, &message);
    for (int p = 0; p < layout->replica_groups; p++)
        sum_piece(step, b, p, step->gathered + p * message.bytes, 1, &message,
                  key_of(step, PURPOSE_OUTER_MEAN_ROTATION, 0), grad_shard_of(shard, gradient, p));
    if (!feedback) return;
    keep_mean_errors(step, b, gradient, mean);
    kernel_mix_outer(step->stream, step->residual, step->next, 0.0f, n, step->lost);
}

// --- whole buckets -------------------------------------------------------------------------------

void outer_encode(const OuterStep *step, int b, const float *gradient, uint32_t source, uint8_t *message) {
    assert(b >= 0 && b < step->layout->buckets && step->layout->replica_groups == 1);
    MessageLayout layout = outer_message(step->layout, b, &step->format);
    QuantizePartitions q = quantize_of(step, &step->layout->shard[b], gradient, &layout);
    q.key = key_of(step, PURPOSE_OUTER, 0);
    q.key.source = source;
    q.rotation = key_of(step, PURPOSE_OUTER_ROTATION, 0);
    q.slots = 1;
    q.self_slot = message;
    kernel_quantize_partitions(step->stream, &q);
}

void outer_decode(const OuterStep *step, int b, const uint8_t *message, float *gradient) {
    assert(b >= 0 && b < step->layout->buckets && step->layout->replica_groups == 1);
    MessageLayout layout = outer_message(step->layout, b, &step->format);
    sum_piece(step, b, 0, message, 1, &layout, key_of(step, PURPOSE_OUTER_ROTATION, 0),
              grad_shard_of(&step->layout->shard[b], gradient, 0));
}
