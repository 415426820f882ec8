// The backend boundary, part 3: collectives among the data-parallel ranks, in stream order on device memory. llmc/cpu/comm.c implements them with MPI;
// a CUDA file with NCCL. Opened by train_gpt.cu; gradients and weights go through sdp4bit/wire.c, the records of a step are
// zero.c's. Failures end the job through fatal() with EXIT_COMMUNICATION, those of comm_connect with EXIT_ENVIRONMENT.
#pragma once
#include <mpi.h>

#include "llmc/device.h"
#include "llmc/ranks/topology.h"
LLMC_BEGIN

// A node's ranks (ordered by local index), the rail of ranks with the same local index (ordered by node), or the whole group (ordered by dp rank).
typedef enum CommScope { COMM_NODE, COMM_RAIL, COMM_GROUP, COMM_SCOPES } CommScope;

typedef struct Comm Comm;

// Collective over dp_group, whose rank order is the dp rank. Nothing can be sent before comm_connect.
// NULL and EXIT_ENVIRONMENT where its ranks do not stand as the topology says (comm_disagreement).
Comm *comm_create(Device *device, const Topology *topology, MPI_Comm dp_group, Error *err);
void comm_destroy(Comm *comm);
// CPU ranks: a collective that takes longer than this ends the job and names the rank that did not answer; 0 (the default) waits for ever. On GPUs
// collectives are asynchronous: the watchdog of heartbeat.h limits what waits for them, and asks NCCL meanwhile whether its threads have met an error.
void comm_set_timeout(Comm *comm, double seconds);

// Device memory out of which messages leave inside a node.
typedef struct CommPiece {
    void *memory;
    size_t bytes;
} CommPiece;
// COMM_GRAIN: processes share a GPU's memory in blocks of so many bytes; smaller pieces may not be shareable one by one.
enum { COMM_PIECES = 4, COMM_GRAIN = 2 << 20, COMM_FLAG_BYTES = COMM_GRAIN };
// From now on the node's ranks read messages straight out of these pieces of each other's memory, by copy engines, which take no multiprocessor from other work.
// Serves, in COMM_NODE, every comm_all_to_all whose whole send buffer lies in a piece and every comm_all_gather whose whole buffer does, at the same offset on
// every rank; all such calls are on one stream. Pieces of 0 bytes are left out; the first bytes of the others are overwritten here, then cleared. flags:
// COMM_FLAG_BYTES of device memory for the backend. Collective over the node; every rank's pieces are as long. False on all of its ranks, with why in err, where
// one cannot reach another's memory: messages travel as between nodes. CPU ranks cannot.
bool comm_share(Comm *comm, void *flags, const CommPiece *piece, int pieces, Error *err);
// Ends that; all of it may then be freed. Collective over the node; no collective is under way. Nothing where nothing was shared.
void comm_unshare(Comm *comm);
// Makes all connections that are wanted and not there yet, and sends a first small message through each, so that what a restart would meet again (a network that is
// missing or refuses, too little memory for its buffers) ends the job before training. What NCCL's own threads meet meanwhile, or nobody notices until the time
// limit, still is EXIT_COMMUNICATION. Collective over the group, after comm_share, which spares the node's ranks theirs; again when that has ended, or failed,
// since. CPU ranks: nothing, MPI has connected them.
// memory: COMM_TRIAL_BYTES of device memory for every rank of the group, overwritten.
enum { COMM_TRIAL_BYTES = 16 };
void comm_connect(Comm *comm, void *memory);
int comm_size(const Comm *comm, CommScope scope);
int comm_rank(const Comm *comm, CommScope scope);

// Slot i of send (bytes each) goes to peer i; slot j of recv comes from peer j. The own slots are neither read nor written.
void comm_all_to_all(Comm *comm, CommScope scope, const void *send, void *recv, size_t bytes, Stream *stream);
// In place: on entry the own slot (rank * bytes) of buffer is filled, on exit all are.
void comm_all_gather(Comm *comm, CommScope scope, void *buffer, size_t bytes, Stream *stream);

// Bytes handed to the transport by this rank since creation.
typedef struct CommTraffic {
    uint64_t sent[COMM_SCOPES];
} CommTraffic;
CommTraffic comm_traffic(const Comm *comm);

// For the backends. A scope in words: "inside the node", "between nodes", "in the data-parallel group".
const char *comm_scope_name(CommScope scope);
// False, with the error of comm_create where groups are not as the topology says: the ranks were started with different flags.
bool comm_disagreement(Error *err);

LLMC_END
