// Local steps: the exchange between islands. An island is a node that trains by itself for a while.
// Of a bucket whose turn it is, each rank takes its shard's pseudo-gradient, outer weights minus
// masters, and the islands make the mean of it, in two hops of the codec between nodes:
//   quantise -> all-to-all between islands: each gets its piece of the shard from all -> mean
//   -> quantise the piece -> gather from all islands -> decode
// Every island decodes the same messages, its own too, so all get the same bits. Called by
// llmc/state/zero_local.c; uses kernels.h and wire.h.
#pragma once
#include "sdp4bit/kernels.h"
#include "sdp4bit/wire.h"
LLMC_BEGIN

// The layout: a rank's shard of a bucket as a bucket of its own, which divides into a piece per
// island; and this island's piece, likewise.
typedef struct OuterPlan {
    int islands, island;
    int buckets;
    Bucket *shard, *piece;    // (buckets)
    Segment *segments;        // (segments_total) of both; a first one may start before its window
    int segments_total;
} OuterPlan;

// Cuts rank's shards of the plan, which has a piece per island.
void outer_plan(OuterPlan *outer, const Plan *plan, int rank, int islands, int island);
void outer_plan_free(OuterPlan *outer);

// A message of bucket b: of one piece. Both hops have the same.
MessageLayout outer_message(const OuterPlan *outer, int b, const GradWire *wire);
// Bytes that a rank hands to the transport at bucket b's turn, both hops together.
int64_t outer_wire_bytes(const OuterPlan *outer, int b, const GradWire *wire);
// Elements of the largest shard, and bytes of the largest message.
int64_t outer_largest_shard(const OuterPlan *outer);
int64_t outer_largest_message(const OuterPlan *outer, const GradWire *wire);

typedef struct OuterStep {
    const OuterPlan *plan;
    GradWire wire;                       // of which the hop between nodes counts
    const Segment *segments;             // device copy of plan->segments
    uint8_t *send, *recv, *gathered;     // (islands) of the largest message
    float *mean;                         // (outer_largest_shard / islands) of this island's piece
    float *leaves;                       // (outer_largest_shard / 32 + 2) scratch
    uint32_t seed, step;                 // of the rounding bits
    WireChecks *checks;
    Stream *stream;                      // of everything here
} OuterStep;

// gradient: (matrix piece + tail piece of rank's shard of bucket b). The islands' mean takes its
// place. With one island nothing is sent, and it stays as it is.
void outer_exchange(const OuterStep *step, int b, float *gradient);

LLMC_END
