// Local steps: the exchange between replica groups. A replica group is a node that trains by itself
// for a while. Of a bucket whose turn it is, each rank takes its shard's pseudo-gradient, outer
// weights minus master weights, and the replica groups make the mean of it, in two hops of the
// codec between nodes:
//   quantize -> all-to-all between replica groups: each gets its piece of the shard from all -> mean
//   -> quantize the piece -> gather from all replica groups -> decode
// Every replica group decodes the same messages, its own too, so all get the same bits. Called by
// llmc/state/zero_local.c; uses kernels.h and wire.h.
#pragma once
#include "sdp4bit/kernels.h"
#include "sdp4bit/wire.h"
LLMC_BEGIN

// The layout: a rank's shard of a bucket as a bucket of its own, which divides into a piece per
// replica group; and this replica group's piece, likewise.
typedef struct OuterLayout {
    int replica_groups, replica_group;
    int buckets;
    Bucket *shard, *piece;  // (buckets)
    Segment *segments;      // (segments_total) of both; a first one may start before its window
    int segments_total;
} OuterLayout;

// Cuts rank's shards of the plan, which has a piece per replica group.
void outer_layout(OuterLayout *outer, const BucketLayout *layout, int rank, int replica_groups,
                  int replica_group);
void outer_layout_free(OuterLayout *outer);

// A message of bucket b: of one piece. Both hops have the same.
MessageLayout outer_message(const OuterLayout *outer, int b, const GradFormat *format);
// Bytes that a rank hands to the transport at bucket b's turn, both hops together.
int64_t outer_wire_bytes(const OuterLayout *outer, int b, const GradFormat *format);
// Elements of the largest shard, and bytes of the largest message.
int64_t outer_largest_shard(const OuterLayout *outer);
int64_t outer_largest_message(const OuterLayout *outer, const GradFormat *format);

typedef struct OuterStep {
    const OuterLayout *layout;
    GradFormat format;                // of which the hop between nodes counts
    const Segment *segments;          // device copy of plan->segments
    uint8_t *send, *recv, *gathered;  // (replica groups) of the largest message
    float *mean;                      // (outer_largest_shard / replica groups) of this replica group's piece
    float *partials;                  // (outer_largest_shard / 32 + 2) scratch
    uint32_t seed, step;              // of the rounding bits
    WireChecks *checks;
    Stream *stream;  // of everything here
} OuterStep;

// gradient: (matrix piece + tail piece of rank's shard of bucket b). The replica groups' mean takes
// its place. With one replica group nothing is sent, and it stays as it is.
void outer_exchange(const OuterStep *step, int b, float *gradient);

LLMC_END
