// Streams of the communication pipeline: while one chunk is sent between nodes, the next one is
// quantized and exchanged inside the node. Each stage ("lane") has its own stream; events order
// the stages. tlq_hs.c and qwd.c issue the stages.
//
//   gradients, chunk by chunk   first: quantize -> node: all-to-all -> middle: sum, quantize
//                               -> rail: all-to-all -> last: sum, norm
//   weights, bucket by bucket   last: AdamW, quantize -> rail: gather -> node: gather
//                               -> middle: apply
//
// Buffers between stages are double-buffered (two slots): a stage fills one slot while the next
// stage reads the other. Opened by llmc/run/setup.c, owned by llmc/state/zero.c.
#pragma once
#include "llmc/device.h"
LLMC_BEGIN

enum { LANE_SLOTS = 2 };

// Events of a buffer slot. X -> Y: lane X records the event, lane Y waits for it. Without a hop
// (one node, or one rank per node) the lanes before and after it are ordered directly; parentheses
// name the lane in that case.
typedef enum LaneEvent {
    LANE_QUANTIZED,      // first -> node (rail)     level-1 messages are ready
    LANE_NODE_ARRIVED,   // node -> middle (last)    they have arrived; the send buffer may be reused
    LANE_NODE_FREE,      // middle (last) -> first   the receive buffer may be reused too
    LANE_REQUANTIZED,    // middle -> rail           level-2 messages, likewise
    LANE_RAIL_ARRIVED,   // rail -> last
    LANE_RAIL_FREE,      // last -> middle (first)
    LANE_UPDATED,        // last -> rail (node)      a bucket's own shard is ready for the gather
    LANE_RAIL_GATHERED,  // rail -> node (middle)
    LANE_NODE_GATHERED,  // node -> middle
    LANE_APPLIED,        // middle -> last           the gather buffer may be reused
    LANE_EVENTS
} LaneEvent;

typedef struct Lanes {
    bool apart;                     // five streams; if false, all are `last` and no events are needed
    Stream *first, *middle, *last;  // kernels
    Stream *node, *rail;            // collectives only, one stream per communicator. Collectives of
                                    // the world use `last`
    Event *event[LANE_EVENTS][LANE_SLOTS];
    Event *joint;     // lanes_after
    unsigned chunks;  // gradient chunks issued so far, over all steps; its parity is the next slot
} Lanes;

// apart false: a single stream, for runs of one rank and for --no-overlap. The five streams have a
// higher priority than the device's other streams.
void lanes_open(Lanes *lanes, Device *device, bool apart);
void lanes_close(Lanes *lanes);
void lanes_synchronize(const Lanes *lanes);

// lane_done records the event of a slot on `stream`; lane_wait makes later work of `stream` wait
// for it.
void lane_done(const Lanes *lanes, LaneEvent event, int slot, Stream *stream);
void lane_wait(const Lanes *lanes, LaneEvent event, int slot, Stream *stream);
// Makes later work of lane `after` wait for everything issued to lane `before` so far.
void lanes_after(const Lanes *lanes, Stream *after, Stream *before);

LLMC_END
