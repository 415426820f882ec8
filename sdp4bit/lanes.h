// The streams of the communication pipeline: while one chunk crosses between nodes, the next one is
// quantized and crosses inside the node. Each stage has a stream of its own, and events lie
// between. tlq_hs.c and qwd.c, which use this, tell the order of the stages.
//
//   gradients, chunk by chunk   first: quantize -> node: all-to-all -> middle: sum, quantize
//                               -> rail: all-to-all -> last: sum, norm
//   weights, bucket by bucket   last: AdamW, quantize -> rail: gather -> node: gather
//                               -> middle: apply
//
// Every buffer between stages exists twice (its slots): a stage fills one while the next still
// reads the other. Opened by llmc/run/setup.c, held by llmc/state/zero.c.
#pragma once
#include "llmc/device.h"
LLMC_BEGIN

enum { LANE_SLOTS = 2 };

// What a stage has finished with a slot. X -> Y names the lanes of who says it and who waits. A hop
// that does not exist (one node, or one rank per node) drops out; its neighbors then speak to each
// other.
typedef enum LaneEvent {
    LANE_QUANTIZED,      // first -> node (rail)     messages of level 1 are ready
    LANE_NODE_ARRIVED,   // node -> middle (last)    and have arrived; the send buffer has served
    LANE_NODE_FREE,      // middle (last) -> first   the receive buffer has served: both may be filled again
    LANE_REQUANTIZED,    // middle -> rail           messages of level 2, likewise
    LANE_RAIL_ARRIVED,   // rail -> last
    LANE_RAIL_FREE,      // last -> middle (first)
    LANE_UPDATED,        // last -> rail (node)      a bucket's own shard is ready to be gathered
    LANE_RAIL_GATHERED,  // rail -> node (middle)
    LANE_NODE_GATHERED,  // node -> middle
    LANE_APPLIED,        // middle -> last           the gather buffer has served
    LANE_EVENTS
} LaneEvent;

typedef struct Lanes {
    bool apart;                     // five streams; otherwise all are `last`, and nothing need wait
    Stream *first, *middle, *last;  // kernels
    Stream *node, *rail;            // nothing but collectives: each communicator has one stream. The
                                    // whole group's is `last`
    Event *event[LANE_EVENTS][LANE_SLOTS];
    Event *joint;     // lanes_after
    unsigned chunks;  // of gradients so far, over all steps: a chunk's slot alternates
} Lanes;

// apart false: one stream, for one rank, which sends nothing, and for --no-overlap. The five take
// precedence over other streams of the device.
void lanes_open(Lanes *lanes, Device *device, bool apart);
void lanes_close(Lanes *lanes);
void lanes_synchronize(const Lanes *lanes);

// `stream` has done what the event says with the slot; the later work of `stream` waits for that.
void lane_done(const Lanes *lanes, LaneEvent event, int slot, Stream *stream);
void lane_wait(const Lanes *lanes, LaneEvent event, int slot, Stream *stream);
// Later work of lane `after` waits for all that lane `before` has been given so far.
void lanes_after(const Lanes *lanes, Stream *after, Stream *before);

LLMC_END
