// Bucket layout: integer arithmetic for shards, groups, padding, message formats and the bytes sent
// per step. Needs no device, no MPI and no data, so --plan and the tests can use it alone.
// Called by zero_plan.c, tlq_hs.c, qwd.c, the kernels and --plan.
//
// One arena holds all parameters. A second one, of the same shape, holds the gradients. They are
// cut into buckets of whole layers:
//
//   bucket = [ matrix part, quantized                | tail, never quantized          ]
//              each tensor starts on a group border,   1-D tensors,
//              padded to dp x pieces x border          padded to dp x pieces x TAIL_ALIGN
//
// pieces is 1, but for replica groups (LayoutOptions).
// Rank r owns the r-th of dp equal pieces of each part of every bucket (ZeRO-1). With N nodes of D
// ranks, rank r = node * D + local.
#pragma once
#include "llmc/base/base.h"
#include "sdp4bit/codec.h"
#include "sdp4bit/lossless.h"
LLMC_BEGIN

enum { TAIL_ALIGN = 8 };      // elements; a rank's tail piece is a multiple of it
enum { MESSAGE_ALIGN = 16 };  // bytes; sections of a message start on it
enum { MOST_CHUNKS = 4096 };  // pipeline chunks of a bucket

typedef struct LayoutTensor {
    int64_t numel;          // that this rank holds
    bool matrix;            // 2-D or more: quantized and decayed; else it goes to the tail
    int unit;               // layers in forward order: 0 the embeddings, then one per transformer layer.
                            // Non-decreasing over the tensors
    int64_t before, after;  // elements of the whole model that other ranks hold before and after these,
                            // in the order of the rounding bits; before: a multiple of 32
    bool uncounted;         // another rank holds the same elements, and counts them in the norm
} LayoutTensor;

// Where one tensor lies inside its bucket's part. logical: offset of the tensor's first element for
// the rounding bits. It counts tensors in order, each rounded up to 32, and no padding that depends
// on dp or group sizes. A device copy of the table serves the kernels.
typedef struct Segment {
    int64_t start, numel, logical;
    int64_t tensor;
} Segment;
static_assert(sizeof(Segment) == 32, "the host's table is the device's");

typedef struct Bucket {
    int first_unit, end_unit;                // layers [first, end)
    int64_t arena_start;                     // first element in the arenas; the tail follows the
                                             // matrix part
    int64_t matrix_elements, tail_elements;  // padded lengths of the two parts
    int64_t matrix_per_rank, tail_per_rank;  // a rank's piece of each
    int64_t matrix_counted, tail_counted;    // of each part, from its start on: what the norm counts.
                                             // Uncounted tensors come last
    int64_t state_start;                     // first element in a rank's optimizer state: matrix
                                             // piece, then tail piece
    int first_segment, segments;             // plan->segments, matrices
    int first_tail, tails;                   // plan->segments, 1-D tensors
    bool sealed;                             // its messages end with a checksum: layout_seal
} Bucket;
HD_FN int64_t bucket_elements(const Bucket *b) { return b->matrix_elements + b->tail_elements; }
// Of one rank.
HD_FN int64_t bucket_shard(const Bucket *b) { return b->matrix_per_rank + b->tail_per_rank; }

typedef struct LayoutOptions {
    int nodes, per_node;      // N, D
    int64_t border;           // groups start and end on multiples of it: the lcm of 32 and the group
                              // sizes in use
    int64_t chunk_border;     // lcm(g_intra, g_inter), at least 32: where pipeline chunks may be cut
    int64_t bucket_elements;  // target size of a bucket
    int pieces;               // of equal size that each rank's part of a bucket divides into: replica groups
                              // exchange those (outer.h). 1 elsewhere
} LayoutOptions;

typedef struct BucketLayout {
    LayoutOptions options;
    int dp;
    int buckets;
    Bucket *bucket;  // (buckets)
    int segments_total;
    Segment *segments;  // (segments_total)
    int tensors;
    int64_t *tensor_arena;  // (tensors) arena position of each tensor's first element
    int *tensor_bucket;     // (tensors)
    int units;
    int *unit_bucket;            // (units)
    int64_t arena_elements;      // padded
    int64_t shard_elements;      // per rank
    int64_t parameters;          // without padding
    int64_t tail_parameters;     // of which 1-D
    int64_t counted_parameters;  // of which this rank counts
} BucketLayout;

// Cuts the tensors (in forward order) into buckets: whole units, merged up to
// options->bucket_elements, and at least 16 x dp x pieces x border elements. Paper section 3.1; the
// design of the buckets is ours. Error: EXIT_USAGE for non-positive sizes or decreasing units.
bool layout_build(BucketLayout *layout, const LayoutTensor *tensors, int count, const LayoutOptions *options,
                  Error *err);
void layout_free(BucketLayout *layout);
// Appends a checksum section of MESSAGE_ALIGN bytes to all messages (--verify-wire).
void layout_seal(BucketLayout *layout);
// Returns the lcm of 32 and the group sizes in use (0 = not in use), for LayoutOptions.border.
int64_t layout_border(int group_a, int group_b, int group_c);

// Elements of rank's matrix piece (matrix) or tail piece that the norm counts: the first ones.
int64_t layout_counted(const Bucket *bucket, bool matrix, int64_t rank);

// --- payload formats ----------------------------------------------------------------------------

// Gradients: level 1 runs inside a node, level 2 between nodes. One level alone when N = 1 or D =
// 1, none when dp = 1. Plain codecs have no groups: their group sizes are ignored.
typedef struct GradFormat {
    Codec intra_codec, inter_codec;
    int intra_group, inter_group;
    Codec tail_codec;     // plain: BF16 when the matrices are quantized, else as the matrices
    Transform transform;  // with TRANSFORM_ROTATION a group divides the rotation's order, or the
                          // other way round
    Rounding rounding;
    int chunks;  // pipeline chunks K of every bucket; 0: layout_chunks chooses for each
} GradFormat;

// Weights: own shard, gathered between nodes first, then inside each node.
typedef struct WeightFormat {
    Codec codec;
    int group;
    bool difference;  // grouped: codes of master - replica (qWD), else of the master (qW). bf16:
                      // the changes since the replica are coded without loss (lossless.h), and
                      // messages have no fixed length
    Rounding rounding;
} WeightFormat;
// Returns the format of unquantized weights.
static inline WeightFormat plain_weight_format(void) {
    WeightFormat format = {FLOATX_CODEC, HADAMARD_ORDER, false, ROUND_NEAREST};
    return format;
}
static inline bool format_is_lossless(const WeightFormat *format) {
    return format->difference && !codec_grouped(format->codec);
}

// One message: codes of `partitions` equal slices, one after the other; their fp32 scales likewise;
// their tails likewise. Each section starts on MESSAGE_ALIGN and the message is padded to it. All
// sizes in bytes.
typedef struct MessageLayout {
    int64_t elements;       // matrix elements of one partition's slice
    int64_t groups;         // of one partition's slice, plain: 0
    int64_t tail_elements;  // of one partition
    int partitions;
    int64_t codes_stride, scales_stride, tail_stride;  // of one partition in each section
    int64_t scales, tail, bytes;                       // section offsets (codes start at 0), total
    int64_t check;                                     // the checksum's offset, in a section of its own
                                                       // at the end; 0: there is none
} MessageLayout;
static_assert(MESSAGE_ALIGN % 16 == 0, "kernels load 16 bytes at a time");
static_assert(MESSAGE_ALIGN >= 2 * sizeof(uint64_t), "a checksum and its pad");

// Where partition i's sections begin in its message: the one place that says so.
typedef struct MessageSections {
    int64_t codes, scales, tail;
} MessageSections;
HD_FN MessageSections message_sections(const MessageLayout *m, int64_t i) {
    MessageSections at;
    at.codes = i * m->codes_stride;
    at.scales = m->scales + i * m->scales_stride;
    at.tail = m->tail + i * m->tail_stride;
    return at;
}
// Bytes of a message without its checksum.
HD_FN int64_t message_content(const MessageLayout *m) { return m->check ? m->check : m->bytes; }
// Where the checksum of a sealed message of so many bytes begins.
HD_FN int64_t seal_offset(int64_t bytes) { return bytes - MESSAGE_ALIGN; }

// All ranks' messages of a bucket's weights lie in one buffer as [local][node]: a rank's slot
// there, and the rank of a slot.
HD_FN int64_t gather_slot(int nodes, int per_node, int64_t rank) {
    return rank % per_node * nodes + rank / per_node;
}
HD_FN int64_t gather_rank(int nodes, int per_node, int64_t slot) {
    return slot % nodes * per_node + slot / nodes;
}

// elements, tail_elements: of one partition; elements a multiple of the group, or of 32 for a plain
// codec. tail_codec: plain. It has no checksum: layout_sealed adds that.
MessageLayout message_layout(Codec codec, int group, int64_t elements, int partitions, Codec tail_codec,
                             int64_t tail_elements);

// Chunks that this bucket travels in: the wire's number. Where that is 0, a chunk of all ranks'
// pieces is about as large as an ordinary bucket: the largest but the first, or the size that
// buckets are merged to. So only the embeddings are cut, and the buffers that all buckets share
// stay about as large as a layer's. More chunks would cost the host a dozen calls each.
int layout_chunks(const BucketLayout *layout, const Bucket *bucket, const GradFormat *format);
// Chunk k of K of a shard's matrix piece: [*lo, *hi), cut on chunk_border as evenly as it allows.
// It may be empty. The tail travels with chunk 0.
void layout_chunk(const BucketLayout *layout, const Bucket *bucket, int chunks, int k, int64_t *lo,
                  int64_t *hi);
// The layouts of chunk k's level-1 and level-2 messages (bytes 0 for a level that does not run).
void layout_grad_messages(const BucketLayout *layout, const Bucket *bucket, const GradFormat *format, int k,
                          MessageLayout *level1, MessageLayout *level2);
// Returns the message with a checksum section added if the bucket's messages have one.
MessageLayout layout_sealed(const Bucket *bucket, MessageLayout message);
// Of lossless weights: a message as long as it can become, without sections.
MessageLayout layout_weight_message(const Bucket *bucket, const WeightFormat *format);
// Its own layout, and its checksum's where it takes so many bytes without.
LosslessLayout layout_lossless(const Bucket *bucket);
MessageLayout layout_lossless_message(const Bucket *bucket, int64_t bytes);

// Bytes that one rank hands to the transport per step; lossless weights: at most.
typedef struct WireBytes {
    int64_t grad_intra, grad_inter, weight_intra, weight_inter;
} WireBytes;
WireBytes layout_bucket_wire_bytes(const BucketLayout *layout, int b, const GradFormat *grad,
                                   const WeightFormat *weight);
WireBytes layout_wire_bytes(const BucketLayout *layout, const GradFormat *grad, const WeightFormat *weight);
// The same by the formulas, for the matrices' unpadded elements alone: codes and scales, no tails,
// no padding. Bytes per step and rank as real numbers.
typedef struct WireFormula {
    double grad_intra, grad_inter, weight_intra, weight_inter;
} WireFormula;
WireFormula layout_wire_formula(const BucketLayout *layout, const GradFormat *grad,
                                const WeightFormat *weight);

LLMC_END
