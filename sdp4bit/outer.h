// Local steps: the all-reduce between replica groups. A replica group is a node that trains
// independently between outer steps. At a bucket's outer step each rank computes the
// pseudo-gradient of its shard (outer weights minus master weights). Two hops average it over the
// replica groups, with the codec of the hop between nodes:
//   quantize -> all-to-all between replica groups (one piece of the shard each) -> mean
//   -> quantize the piece -> all-gather between replica groups -> decode
// Every replica group decodes the same messages, including its own, so the results are bitwise
// identical. Called by llmc/state/local_steps.c; uses kernels.h and wire.h.
//
// With error feedback, each replica group adds the rounding errors of its earlier messages to the
// pseudo-gradient. The messages of both hops count (README.md, "Local steps").
#pragma once
#include "sdp4bit/kernels.h"
#include "sdp4bit/wire.h"
LLMC_BEGIN

// Layout of the exchange. A rank's shard of a bucket is divided into one piece per replica group.
// shard[b] describes the whole shard, piece[b] this replica group's piece of it.
typedef struct OuterLayout {
    int replica_groups, replica_group;
    int buckets;
    Bucket *shard, *piece;  // (buckets)
    Segment *segments;      // (segments_total) starts are relative to the shard or piece; may be negative
    int segments_total;
} OuterLayout;

// Computes the layout for the shards of `rank`. layout->options.pieces must equal replica_groups.
void outer_layout(OuterLayout *outer, const BucketLayout *layout, int rank, int replica_groups,
                  int replica_group);
void outer_layout_free(OuterLayout *outer);

// Returns the layout of bucket b's messages, which hold one piece each in both hops.
MessageLayout outer_message(const OuterLayout *outer, int b, const GradFormat *format);
// Returns the bytes that a rank sends for bucket b in both hops.
int64_t outer_wire_bytes(const OuterLayout *outer, int b, const GradFormat *format);
// Return the elements of the largest shard and the bytes of the largest message.
int64_t outer_largest_shard(const OuterLayout *outer);
int64_t outer_largest_message(const OuterLayout *outer, const GradFormat *format);

// Elements [at, at + n) of a rank's shard of a bucket, which is (matrix_elements + tail_elements).
typedef struct OuterRange {
    int64_t at, n;
} OuterRange;

typedef struct OuterStep {
    const OuterLayout *layout;
    GradFormat format;                // only the hop between nodes is used
    const Segment *segments;          // device copy of layout->segments
    uint8_t *send, *recv, *gathered;  // (replica groups, outer_largest_message) messages
    float *mean;                      // (outer_largest_shard / replica groups) mean of this group's piece
    float *partials;                  // (outer_largest_shard / 32 + 2) scratch
    float *residual;                  // error feedback: (matrix_elements + tail_elements of shard[b]) sum of
                                      // rounding errors, in and out; NULL: no error feedback
    float *next;                      // error feedback: (outer_largest_shard) scratch
    const OuterRange *kept;           // error feedback: (kept_count) ranges of this group's piece whose error
    int kept_count;                   // of the mean enters the residual; none spans matrix and tail
    const int *lost;                  // see kernel_outer_step; then the residual is kept
    uint32_t seed, step;              // keys of the rounding bits
    WireChecks *checks;
    Stream *stream;  // all work is issued here
} OuterStep;

// Replaces `gradient` with its mean over the replica groups. gradient: (matrix_elements +
// tail_elements) of shard[b]. No-op with one replica group. Formats without group scales neither
// use nor change the residual.
void outer_exchange(const OuterStep *step, int b, float *gradient);

// Elastic replica groups: encode the pseudo-gradient of a whole bucket to one message, and decode
// it. The layout has one replica group and shards that are whole buckets. source: distinguishes the
// rounding of groups. gradient: (matrix_elements + tail_elements).
void outer_encode(const OuterStep *step, int b, const float *gradient, uint32_t source, uint8_t *message);
void outer_decode(const OuterStep *step, int b, const uint8_t *message, float *gradient);

LLMC_END
