// The backend boundary, part 3: collectives within a group of ranks, in stream order on device
// memory. llmc/cpu/comm.c sends by MPI. llmc/cuda/comm.cu sends by NCCL, and inside a node by copy
// engines. Opened by llmc/run/setup.c. Gradients and weights pass through sdp4bit/wire.c, a step's
// records through llmc/state/zero.c.
// A collective that fails ends the job through fatal() with EXIT_COMMUNICATION, but for
// comm_may_lose.
#pragma once
#include "llmc/device.h"
#include "llmc/ranks/mesh.h"
LLMC_BEGIN

// Prepares each group of several ranks for messages. Not dp: what dp exchanges travels by its two
// levels, node and rail. pp and embedding have links alone, and no collectives. Collective over the
// world, after mesh_open. Nothing can be sent before comm_connect.
// limit: seconds that a collective of CPU ranks may take; 0: no limit. A longer one ends the job
// and names the rank that did not answer. On GPUs collectives do not hold the host. There the
// watchdog (heartbeat.h) limits what waits for them, and asks NCCL for errors of its threads.
void comm_open(Mesh *mesh, Device *device, double limit);
// Collective over the world. Nothing without comm_open. Links are closed too, once what is under
// way in them has passed.
void comm_close(Mesh *mesh);

// Device memory out of which messages leave inside a node.
typedef struct CommPiece {
    void *memory;
    size_t bytes;
} CommPiece;
// COMM_ALIGNMENT: processes share a GPU's memory in blocks of so many bytes. Smaller pieces may not
// be shareable one by one.
enum { COMM_PIECES = 4, COMM_ALIGNMENT = 2 << 20, COMM_FLAG_BYTES = COMM_ALIGNMENT };
// From now on the ranks of a node fetch messages out of these pieces of each other's memory. Copy
// engines do it, which take no multiprocessor from other work. This serves every comm_all_to_all
// in `node` whose whole send buffer lies in a piece, and every comm_all_gather whose whole buffer
// does. The buffer must lie at the same offset on every rank. All such calls must be on one stream.
// piece: (pieces), of the same lengths on every rank. One of 0 bytes is left out. The first bytes
// of the others are overwritten here, then cleared.
// flags: COMM_FLAG_BYTES of device memory for the backend.
// Collective over the node. False on all of its ranks, with why in err, where one of them cannot
// reach another's memory. Then messages travel as between nodes. CPU ranks cannot share.
bool comm_share(const Group *node, void *flags, const CommPiece *piece, int pieces, Error *err);
// Ends that. All of the memory may then be freed. Collective over the node, while no collective is
// under way. Nothing where nothing was shared.
void comm_unshare(const Group *node);
// Makes all connections that are wanted and not there yet, and sends a first small message through
// each. So a fault that a restart would meet again ends the job before training, with
// EXIT_ENVIRONMENT: no network, or too little memory for its buffers. What NCCL's own threads meet
// meanwhile, or nobody notices until the time limit, is still EXIT_COMMUNICATION.
// Collective over the world. It comes after comm_share, which spares the node's ranks theirs, and
// again when sharing has ended since. CPU ranks: nothing, MPI has connected them.
// memory: COMM_TRIAL_BYTES of device memory for every rank of the world. Overwritten.
enum { COMM_TRIAL_BYTES = 16 };
void comm_connect(const Mesh *mesh, void *memory);

// A member of this group may be lost without an end of the job (node_failure.h). *lost, in memory
// of host_alloc, then becomes 1 before the collectives under way end, and later ones do nothing.
// What they had to receive is undefined: kernels that use it must look at *lost. After comm_open.
void comm_may_lose(const Group *group, int *lost);
// A member is lost: the main thread has learned it elsewhere. Nothing without comm_may_lose, or the
// second time.
void comm_lose(const Group *group);

// The collectives do nothing in a group of one, or without comm_open.
//
// Slot i of send (bytes each) goes to member i of the group. Slot j of recv comes from member j.
// The own slots are neither read nor written.
void comm_all_to_all(const Group *group, const void *send, void *recv, size_t bytes, Stream *stream);
// In place: on entry the own slot (rank * bytes) of buffer is filled, on exit all are.
void comm_all_gather(const Group *group, void *buffer, size_t bytes, Stream *stream);
// One member's part of a row, and where all parts of the row go, (size) in the members' order. The
// parts of a row have one length.
typedef struct CommRow {
    const void *own;
    void *all;
    size_t bytes;  // of a part
} CommRow;
// All-gathers of several rows at once. Unlike above the own part lies elsewhere, and is copied.
void comm_gather_rows(const Group *group, const CommRow *row, int rows, Stream *stream);
// Bytes that this rank has handed to the transport in this group, through links too, without
// comm_connect's.
uint64_t comm_sent(const Group *group);

// Messages from one rank of a group to another, one way, in the order of link_send. Each link has a
// communicator and a stream of its own, so links do not wait for each other. Pipeline stages use
// them. A rank may have several messages under way in both roles; time limits, watchdog and errors
// are those of collectives.
typedef struct Link Link;
// from, to: members of the group, not equal. name: what travels, for messages ("hidden states"); it
// must live as long as the link. Called by both ends, in one order on all ranks. Else two ranks
// could wait for each other. NULL on other ranks, which need not call. After comm_open and before
// comm_connect, which connects links as it connects groups.
Link *link_open(const Group *group, int from, int to, Device *device, const char *name);
// The sender. The message leaves when the stream's work so far is done. Memory must stay as it is
// until link_sent. Both ends give the same number of bytes for a message; 0 is allowed.
void link_send(Link *link, const void *memory, size_t bytes, Stream *stream);
// Later work of stream waits until all messages have left, except the newest `behind`. CPU ranks:
// the caller waits.
void link_sent(Link *link, int behind, Stream *stream);
// The receiver. The next message will go to this memory, once the stream's work so far is done.
// Any number may be expected ahead.
void link_expect(Link *link, void *memory, size_t bytes, Stream *stream);
// Later work of stream waits for the oldest message that is expected and was not waited for. CPU
// ranks: the caller waits. Nothing when there is none.
void link_arrived(Link *link, Stream *stream);

LLMC_END
