// Streams of the communication pipeline: while one chunk is sent between nodes, the next one is
// quantized and exchanged inside the node. Each stage runs on its own stream, its lane, and events
// order the stages. tlq_hs.c and qwd.c issue the work.
//
//   gradients, chunk by chunk   first: quantize -> node: all-to-all -> middle: sum, quantize
//                               -> rail: all-to-all -> last: sum, norm
//   weights, bucket by bucket   last: AdamW, quantize -> rail: gather -> node: gather
//                               -> middle: apply
// Buffers between stages have two slots: a stage fills one slot while the next stage reads the
// other. Opened by llmc/run/setup.c, owned by llmc/state/zero.c.
#pragma once
#include "llmc/device.h"
LLMC_BEGIN

enum { LANE_SLOTS = 2 };

// Events of a buffer slot. X -> Y: lane X records the event and lane Y waits for it. With one node
// or one rank per node a hop is skipped; parentheses name the lane that then takes its place.
typedef enum LaneEvent {
    LANE_QUANTIZED,      // first -> node (rail)     level-1 messages are ready
    LANE_NODE_ARRIVED,   // node -> middle (last)    level-1 messages have arrived
    LANE_NODE_FREE,      // middle (last) -> first   level-1 buffers may be reused
    LANE_REQUANTIZED,    // middle -> rail           level-2 messages are ready
    LANE_RAIL_ARRIVED,   // rail -> last             level-2 messages have arrived
    LANE_RAIL_FREE,      // last -> middle (first)   level-2 buffers may be reused
    LANE_UPDATED,        // last -> rail (node)      this rank's weight message is ready
    LANE_RAIL_GATHERED,  // rail -> node (middle)    this rank's row of messages is complete
    LANE_NODE_GATHERED,  // node -> middle           all messages are complete
    LANE_APPLIED,        // middle -> last           the gather buffer may be reused
    LANE_EVENTS
} LaneEvent;

typedef struct Lanes {
    bool apart;                     // true: five streams. false: all lanes are `last`, without events
    Stream *first, *middle, *last;  // kernels; `last` also runs collectives of the world
    Stream *node, *rail;            // only the collectives of the node and of the rail
    Event *event[LANE_EVENTS][LANE_SLOTS];
    Event *joint;     // lanes_after
    unsigned chunks;  // gradient chunks issued so far, over all steps; its parity is the next slot
} Lanes;

// Opens five streams with a higher priority than the device's other streams. apart false: opens a
// single stream, for runs of one rank and for --no-overlap.
void lanes_open(Lanes *lanes, Device *device, bool apart);
void lanes_close(Lanes *lanes);
void lanes_synchronize(const Lanes *lanes);

// lane_done records the event of a slot on `stream`; lane_wait makes `stream` wait for it.
void lane_done(const Lanes *lanes, LaneEvent event, int slot, Stream *stream);
void lane_wait(const Lanes *lanes, LaneEvent event, int slot, Stream *stream);
// Makes later work of stream `after` wait for everything issued to stream `before` so far.
void lanes_after(const Lanes *lanes, Stream *after, Stream *before);

LLMC_END
