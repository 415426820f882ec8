// Message exchanges, with a checksum per message under --verify-wire. A kernel on the sender
// appends the checksum (seal), and a kernel on the receiver verifies it (check). Faults are
// reported with the next step status, so the host never waits. Seals and checks run on the kernel
// lanes (lanes.h), exchanges on the lanes of their hops. tlq_hs.c, qwd.c and outer.c exchange all
// messages through these functions. Set up by llmc/state/zero_plan.c.
#pragma once
#include "llmc/comm.h"
#include "llmc/base/fault.h"
#include "sdp4bit/kernels.h"
LLMC_BEGIN

// In the order in which corruption spreads: the second hop forwards messages that the first hop has
// corrupted. So the fault with the lowest code is closest to the cause.
typedef enum WireHop {
    HOP_WEIGHT_RAIL,
    HOP_WEIGHT_NODE,
    HOP_WEIGHT_LAYER,
    HOP_LAYER_RAIL,
    HOP_LAYER_NODE,
    HOP_GRAD_NODE,
    HOP_GRAD_RAIL,
    HOP_REDUCED_RAIL,  // reduced gradients, without sharding: all-gather
    HOP_REDUCED_NODE,
    HOP_OUTER,                 // pseudo-gradients between replica groups: all-to-all
    HOP_OUTER_MEAN,            // mean of the pseudo-gradients: all-gather
    HOP_ACTIVATIONS,           // hidden states, to the next pipeline stage
    HOP_ACTIVATION_GRADIENTS,  // their gradients, to the previous pipeline stage
    WIRE_HOPS
} WireHop;

// State of one rank's seals and checks.
typedef struct WireChecks {
    const Mesh *mesh;
    bool sealed;           // messages reserve bytes for a checksum (layout_seal)
    uint64_t *sums;        // device (WIRE_HOPS, wire_most_peers): scratch of the checks. All checks of a
                           // hop run on one stream
    uint8_t *parts;        // device (ranks of mesh->shards, WIRE_PART_BYTES): checksums of a gathered layer.
                           // NULL without checksums or if weights are not sharded
    uint64_t *fault;       // device (1): first fault found by this rank (step_status.h), 0: none. Also
                           // set by refused updates (kernel_update_shard), even without checksums
    const Faults *faults;  // faults injected by tests
    int64_t step;          // iteration
    int micro_batch;       // index of the bucket's gradient reduction in this step
    int exchange;          // index of the next exchange in this step, for injected faults
} WireChecks;

// Returns the maximum number of messages that one check covers.
int wire_most_peers(const Mesh *mesh);
// All-to-all of one message per peer, for chunk k of bucket b. Call wire_seal on the stream that
// wrote the messages, then wire_all_to_all, then wire_check on the stream that reads them.
void wire_seal(WireChecks *checks, WireHop hop, int b, int k, const MessageLayout *message, uint8_t *send,
               Stream *stream);
void wire_all_to_all(WireChecks *checks, WireHop hop, const MessageLayout *message, const uint8_t *send,
                     uint8_t *recv, Stream *stream);
void wire_check(WireChecks *checks, WireHop hop, int b, int k, const MessageLayout *message, uint8_t *recv,
                Stream *stream);
// All-gather of weights or reduced gradients, in at most two hops. buffer holds (per_node, nodes)
// messages. Call wire_seal_own before the first hop, wire_all_gather for each hop, and
// wire_check_gathered with the same arguments before the messages are used. Each member contributes
// `run` consecutive messages; member 0's start at slot `first` of the buffer.
void wire_seal_own(WireChecks *checks, int b, int slot, const MessageLayout *message, uint8_t *buffer,
                   Stream *stream);
void wire_all_gather(WireChecks *checks, WireHop hop, int first, int run, const MessageLayout *message,
                     uint8_t *buffer, Stream *stream);
void wire_check_gathered(WireChecks *checks, WireHop hop, int b, int first, int run,
                         const MessageLayout *message, uint8_t *buffer, Stream *stream);

// All-gathers the weights of one layer from the ranks that hold its shards (comm_gather_rows in
// mesh->shards). A row has one floatX part per rank. Each rank sends one checksum for its parts of
// all rows, after the rows. Everything runs on `stream`.
enum { WIRE_PART_BYTES = 2 * MESSAGE_ALIGN };
void wire_gather_rows(WireChecks *checks, int b, const CommRow *row, int rows, Stream *stream);

// A message of quantized activations on a link between pipeline stages.
typedef struct StageMessage {
    WireHop hop;
    int from, to;     // ranks in mesh->pp
    int micro_batch;  // index within the step
    int layer;        // the model's layer that the hidden states enter
} StageMessage;
// The sender calls wire_seal_stage before link_send, the receiver wire_check_stage after
// link_arrived.
void wire_seal_stage(WireChecks *checks, const StageMessage *which, const MessageLayout *message,
                     uint8_t *send, Stream *stream);
void wire_check_stage(WireChecks *checks, const StageMessage *which, const MessageLayout *message,
                      uint8_t *recv, Stream *stream);

// Returns the fault code for a lossless message of bucket b that cannot be decoded. hop: the last
// hop of the message. The kernel adds the slot.
uint64_t wire_coding_fault(WireHop hop, int b);

// Sets err to describe a fault (step_status.h) found by `rank`, and returns false. EXIT_DIVERGED:
// an update was refused. EXIT_COMMUNICATION: a damaged message, for example "message from rank 2 to
// rank 0, gradients inside the node, bucket 3".
bool fault_error(uint64_t fault, int rank, const Mesh *mesh, Error *err);

LLMC_END
