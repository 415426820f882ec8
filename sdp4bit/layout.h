// Bucket layout: shards, groups, padding, message formats and bytes sent per step. Pure integer
// arithmetic, without device or MPI. Used by zero_plan.c, tlq_hs.c, qwd.c, the kernels and --plan.
//
// One arena holds all parameters, a second one of the same shape the gradients. Both are divided
// into buckets of whole layers:
//
//   bucket = [ matrix part, quantized               | tail, never quantized             ]
//              each tensor starts on a multiple of    1-D tensors, padded to
//              alignment; padded to                   dp x pieces x TAIL_ALIGN
//              dp x pieces x alignment
//
// pieces is 1 except with replica groups (LayoutOptions). Rank r owns the r-th of dp equal shards
// of each part of every bucket (ZeRO-1). With N nodes of D ranks, rank r = node * D + local.
//
// Some optimizers need whole matrices (LayoutTensor.work). Then each matrix is in one shard, and
// every shard is padded to the size of the fullest. Such matrices share no bucket with others.
#pragma once
#include "llmc/base/base.h"
#include "sdp4bit/codec.h"
#include "sdp4bit/layout_tensor.h"
#include "sdp4bit/lossless.h"
LLMC_BEGIN

enum { TAIL_ALIGN = 8 };      // elements; tail shards are multiples of it
enum { MESSAGE_ALIGN = 16 };  // bytes; sections of a message are aligned to it
enum { MOST_CHUNKS = 4096 };  // maximum number of pipeline chunks per bucket

// Position of a tensor within the matrix part or tail of its bucket. logical: offset of its first
// element for the rounding bits. It counts the elements of all earlier tensors, each rounded up to
// 32, so it does not depend on dp and group sizes. Kernels read a device copy of the table.
typedef struct Segment {
    int64_t start, numel, logical;
    int64_t tensor;
} Segment;
static_assert(sizeof(Segment) == 32, "host and device share the table");

typedef struct Bucket {
    int first_unit, end_unit;                // units [first, end)
    int64_t arena_start;                     // first element in the arenas
    int64_t matrix_elements, tail_elements;  // padded lengths of the two parts
    int64_t matrix_per_rank, tail_per_rank;  // shard sizes of the two parts
    int64_t matrix_counted, tail_counted;    // elements of each part that count in the norm; they
                                             // precede the uncounted tensors
    int64_t state_start;                     // first element in a rank's optimizer state, which holds
                                             // the matrix shard, then the tail shard
    int first_segment, segments;             // matrices: range of layout->segments
    int first_tail, tails;                   // 1-D tensors: range of layout->segments
    bool whole;                              // each matrix is in one shard
    bool sealed;                             // messages end with a checksum (layout_seal)
} Bucket;
HD_FN int64_t bucket_elements(const Bucket *b) { return b->matrix_elements + b->tail_elements; }
// Elements per rank.
HD_FN int64_t bucket_shard(const Bucket *b) { return b->matrix_per_rank + b->tail_per_rank; }

typedef struct LayoutOptions {
    int nodes, per_node;      // N, D
    int64_t alignment;        // group boundaries are multiples of it: lcm of 32 and the group sizes
    int64_t chunk_alignment;  // chunk boundaries are multiples of it: lcm(g_intra, g_inter), at least 32
    int64_t bucket_elements;  // target size of a bucket
    int pieces;               // parts of a shard that replica groups exchange (outer.h); else 1
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
    int *tensor_unit;       // (tensors)
    int units;
    int *unit_bucket;            // (units)
    int64_t *rank_work;          // (dp) work of the whole matrices that each rank owns
    int64_t arena_elements;      // padded
    int64_t shard_elements;      // per rank
    int64_t parameters;          // without padding
    int64_t tail_parameters;     // elements of 1-D tensors
    int64_t counted_parameters;  // elements that this rank counts in the norm
} BucketLayout;

// Divides the tensors (in forward order) into buckets of whole units. Merges units up to
// options->bucket_elements, but at least to 16 x dp x pieces x alignment elements. (The paper does
// not specify buckets.) Units whose matrices must be whole are merged further, to reduce padding.
// Error: EXIT_USAGE for non-positive sizes, decreasing units, or units with matrices of both kinds.
bool layout_build(BucketLayout *layout, const LayoutTensor *tensors, int count, const LayoutOptions *options,
                  Error *err);
void layout_free(BucketLayout *layout);
// Sets *whole to a layout of the same buckets for dp = 1: a shard is a whole bucket, while arena
// positions and segments are unchanged. Borrows all tables of `layout`; the caller frees only
// whole->bucket.
void layout_unshard(BucketLayout *whole, const BucketLayout *layout);
// Adds a checksum section of MESSAGE_ALIGN bytes to the format of all messages (--verify-wire).
void layout_seal(BucketLayout *layout);
// Returns the lcm of 32 and the group sizes in use (0 = not in use), for LayoutOptions.alignment.
int64_t layout_alignment(int group_a, int group_b, int group_c);

// Returns the number of elements of the rank's matrix or tail shard that count in the norm; they
// come first in the shard.
int64_t layout_counted(const Bucket *bucket, bool matrix, int64_t rank);

// Returns the index of a bucket's first second moment in a rank's optimizer state. Buckets of whole
// matrices have second moments of their tails only.
int64_t layout_squares_start(const BucketLayout *layout, int b);
// Returns the number of elements that a rank's optimizer state has in whole matrices before bucket
// b, a multiple of 64.
int64_t layout_whole_start(const BucketLayout *layout, int b);

// --- payload formats ----------------------------------------------------------------------------

// Gradients: level 1 reduces within a node, level 2 between nodes. If N = 1 or D = 1, only one
// level runs, and none if dp = 1. Plain codecs ignore group sizes.
typedef struct GradFormat {
    Codec intra_codec, inter_codec;
    int intra_group, inter_group;
    Codec tail_codec;     // BF16 if matrices are quantized, else the codec of the matrices
    Transform transform;  // a group must be a multiple of the transform's order, or divide it
    Rounding rounding;
    int chunks;  // pipeline chunks K per bucket; 0: layout_chunks chooses
} GradFormat;

// Weights: shards are gathered between nodes first, then within each node.
typedef struct WeightFormat {
    Codec codec;
    int group;
    bool difference;  // grouped codecs: code master minus model weights (qWD), else master weights (qW).
                      // bf16: code the changes of the model weights in lossless messages of
                      // variable length (lossless.h)
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

// Chunks [first, end) of a bucket.
typedef struct ChunkRange {
    int first, end;
} ChunkRange;

// A message has three sections: the codes of `partitions` shard ranges of equal size, their fp32
// scales, and their tails. Sections start at multiples of MESSAGE_ALIGN, and the message is padded
// to a multiple of it. Strides and offsets are in bytes.
typedef struct MessageLayout {
    int64_t elements;       // matrix elements per partition
    int64_t groups;         // per partition; 0 for plain codecs
    int64_t tail_elements;  // per partition
    int partitions;
    int64_t codes_stride, scales_stride, tail_stride;  // distance between partitions in each section
    int64_t scales, tail;                              // section offsets; codes start at 0
    int64_t bytes;                                     // size of the message
    int64_t check;                                     // offset of the checksum section, 0: none
} MessageLayout;
static_assert(MESSAGE_ALIGN % 16 == 0, "kernels load 16 bytes at a time");
static_assert(MESSAGE_ALIGN >= 2 * sizeof(uint64_t), "a checksum and its padding");

// Offsets of partition i's slices in the message.
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
// Size of a message without its checksum.
HD_FN int64_t message_content(const MessageLayout *m) { return m->check ? m->check : m->bytes; }
// Offset of the checksum in a sealed message.
HD_FN int64_t seal_offset(int64_t bytes) { return bytes - MESSAGE_ALIGN; }

// The gather buffer holds the messages of all ranks as [local][node]. Convert a rank to its slot,
// and a slot to its rank.
HD_FN int64_t gather_slot(int nodes, int per_node, int64_t rank) {
    return rank % per_node * nodes + rank / per_node;
}
HD_FN int64_t gather_rank(int nodes, int per_node, int64_t slot) {
    return slot % nodes * per_node + slot / nodes;
}

// Returns the layout without a checksum (layout_sealed adds it). elements: a multiple of the group
// size, or of 32 for plain codecs. tail_codec: plain.
MessageLayout message_layout(Codec codec, int group, int64_t elements, int partitions, Codec tail_codec,
                             int64_t tail_elements);

// Returns format->chunks. If it is 0, divides only bucket 0 (the embeddings) and buckets of whole
// matrices: the chunks of the embeddings, over all ranks, are about as large as the largest other
// bucket, but at least the target size, and buckets of whole matrices get a chunk per unit. So the
// buffers shared by all buckets are not sized for the embeddings. More chunks would cost host time,
// because each chunk takes a dozen host calls.
int layout_chunks(const BucketLayout *layout, const Bucket *bucket, const GradFormat *format);
// Sets [*lo, *hi) to chunk k of a matrix shard. Chunks are as equal as multiples of chunk_alignment
// allow; some may be empty. Chunk 0 also carries the tail.
void layout_chunk(const BucketLayout *layout, const Bucket *bucket, int chunks, int k, int64_t *lo,
                  int64_t *hi);
// Returns the first chunk k such that chunks k, k + 1, ... hold only elements of units >= `unit`,
// in every shard; `chunks` if there is none. When backward has completed these units, the chunks
// may be reduced. Chunk 0 has the tail, so it also needs the bucket's first unit.
int layout_first_complete(const BucketLayout *layout, const Bucket *bucket, int chunks, int unit);
// Returns the layouts of chunk k's level-1 and level-2 messages; bytes is 0 for an unused level.
void layout_grad_messages(const BucketLayout *layout, const Bucket *bucket, const GradFormat *format, int k,
                          MessageLayout *level1, MessageLayout *level2);
// Returns the message with a checksum section added if the bucket's messages have one.
MessageLayout layout_sealed(const Bucket *bucket, MessageLayout message);
// Returns the layout of a message with one rank's reduced gradients in fp32.
MessageLayout layout_reduced_message(const Bucket *bucket);
// Returns the layout of a weight message. Lossless: the maximum length, without sections.
MessageLayout layout_weight_message(const Bucket *bucket, const WeightFormat *format);
// Return the layout inside a lossless message, and the layout of a lossless message of `bytes`
// bytes as it is sent, with a checksum if the bucket is sealed.
LosslessLayout layout_lossless(const Bucket *bucket);
MessageLayout layout_lossless_message(const Bucket *bucket, int64_t bytes);

// Bytes that a rank sends per step; an upper bound for lossless weights.
typedef struct WireBytes {
    int64_t grad_intra, grad_inter, weight_intra, weight_inter;
} WireBytes;
WireBytes layout_bucket_wire_bytes(const BucketLayout *layout, int b, const GradFormat *grad,
                                   const WeightFormat *weight);
// Estimates the same bytes by the formula of README.md, section 10: only codes and scales of
// matrices, without padding.
typedef struct WireFormula {
    double grad_intra, grad_inter, weight_intra, weight_inter;
} WireFormula;
WireFormula layout_wire_formula(const BucketLayout *layout, const GradFormat *grad,
                                const WeightFormat *weight);

LLMC_END
