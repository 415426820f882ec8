// Exchanges of messages, with a checksum on each under --verify-wire. The sender seals a message on
// its device, the receiver checks it on its own. What it finds travels with the next verdict, so
// nothing waits for the host. Seals and checks are kernels and run on the lanes of kernels
// (lanes.h). The exchanges between them run on the lanes of the hops. Called by tlq_hs.c and qwd.c
// instead of comm.h; set up by llmc/state/zero_plan.c.
#pragma once
#include "llmc/comm.h"
#include "llmc/base/fault.h"
#include "sdp4bit/kernels.h"
LLMC_BEGIN

// In the order in which a corruption spreads: a row of weights that is wrong after the first hop is
// passed on wrong by the second.
typedef enum WireHop {
    HOP_WEIGHT_RAIL,
    HOP_WEIGHT_NODE,
    HOP_WEIGHT_LAYER,
    HOP_LAYER_RAIL,
    HOP_LAYER_NODE,
    HOP_GRAD_NODE,
    HOP_GRAD_RAIL,
    HOP_OUTER,       // pseudo-gradients between replica groups, all-to-all
    HOP_OUTER_MEAN,  // and their mean, gathered
    WIRE_HOPS
} WireHop;

// The state of a rank's seals and checks.
typedef struct WireChecks {
    const Mesh *mesh;
    bool sealed;           // layout_seal: messages have room for a checksum
    uint64_t *sums;        // device (WIRE_HOPS, wire_most_peers): scratch of the checks. Those of one
                           // hop are all on one stream
    uint8_t *parts;        // device (ranks of mesh->shards, WIRE_PART_BYTES): checksums of a layer's parts.
                           // NULL where nothing is gathered so, or nothing is checked
    uint64_t *fault;       // device (1): the first fault this rank has found (step_status.h), 0: none. Also
                           // what kernel_update_shard refused, sealed or not
    const Faults *faults;  // for tests
    int64_t step;          // iteration
    int micro_batch;       // of the gradients that travel: the number of the bucket's reduction in this step
    int exchange;          // number of the next exchange in this step
} WireChecks;

// The most messages that a check of one hop looks at.
int wire_most_peers(const Mesh *mesh);
// comm_all_to_all of one message per peer, for chunk k of bucket b. Before it wire_seal, on the
// stream that wrote the messages. After it wire_check, on the stream that will read them.
void wire_seal(WireChecks *checks, WireHop hop, int b, int k, const MessageLayout *message, uint8_t *send,
               Stream *stream);
void wire_all_to_all(WireChecks *checks, WireHop hop, const MessageLayout *message, const uint8_t *send,
                     uint8_t *recv, Stream *stream);
void wire_check(WireChecks *checks, WireHop hop, int b, int k, const MessageLayout *message, uint8_t *recv,
                Stream *stream);
// The gather of weights, in two hops at most. buffer holds (per_node, nodes) messages. Before the
// first hop comes wire_seal_own. Then comm_all_gather, whose slots are runs of `run` messages; the
// first run begins at slot `first` of the buffer. Before they are applied comes
// wire_check_gathered, with the same values.
void wire_seal_own(WireChecks *checks, int b, int slot, const MessageLayout *message, uint8_t *buffer,
                   Stream *stream);
void wire_all_gather(WireChecks *checks, WireHop hop, int first, int run, const MessageLayout *message,
                     uint8_t *buffer, Stream *stream);
void wire_check_gathered(WireChecks *checks, WireHop hop, int b, int first, int run,
                         const MessageLayout *message, uint8_t *buffer, Stream *stream);

// The gather of a layer's weights from the ranks that share them out: comm_gather_rows in
// mesh->shards. Every row is (size) parts of floatX. What tells wrong parts is a checksum of each
// rank's parts of all rows, gathered behind them. Seal, gather and check are on one stream.
enum { WIRE_PART_BYTES = 2 * MESSAGE_ALIGN };
void wire_gather_rows(WireChecks *checks, int b, const CommRow *row, int rows, Stream *stream);

// The fault of lossless weights of bucket b that cannot be decoded, of slot 0; the hop that brought
// them last.
uint64_t wire_coding_fault(WireHop hop, int b);

// The error of a fault (step_status.h) that `rank` found. EXIT_DIVERGED: an update was refused.
// EXIT_COMMUNICATION: "message from rank 2 to rank 0, gradients inside the node, bucket 3".
bool fault_error(uint64_t fault, int rank, const Mesh *mesh, Error *err);

LLMC_END
