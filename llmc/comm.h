// Backend interface, part 3: collectives within a group of ranks, on device memory and in stream
// order. llmc/cpu/comm.c implements them with MPI; llmc/cuda/comm.cu uses NCCL, and copy engines
// within a node. llmc/run/setup.c opens the communicators. sdp4bit/wire.c exchanges gradients and
// weights, llmc/state/zero.c exchanges step records.
// A failed collective ends the job with EXIT_COMMUNICATION, except in groups of comm_may_lose.
#pragma once
#include "llmc/base/dtype.h"
#include "llmc/device.h"
#include "llmc/ops.h"
#include "llmc/ranks/mesh.h"
LLMC_BEGIN

// Creates a communicator for each group of several ranks. Exceptions: exchanges in dp use the
// communicators of its two levels, node and rail; pp and embedding use links instead of
// collectives. Collective over the world. Call it after mesh_open; call comm_connect next.
// limit: timeout of a CPU rank's collective in seconds, 0 for none. On timeout the job ends and the
// message names the rank that did not answer. GPU collectives do not block the host; there the
// watchdog (heartbeat.h) enforces the timeout and polls NCCL for asynchronous errors.
void comm_open(Mesh *mesh, Device *device, double limit);
// Closes all communicators, and links once their pending messages are delivered. Collective over
// the world. No-op without comm_open.
void comm_close(Mesh *mesh);

// A range of device memory that is mapped by the other ranks of the node.
typedef struct CommPiece {
    void *memory;
    size_t bytes;
} CommPiece;
// COMM_ALIGNMENT: granularity in bytes at which processes can share GPU memory.
// COMM_DIRECT_RANKS: most ranks of a group that uses it.
enum { COMM_PIECES = 4, COMM_ALIGNMENT = 2 << 20, COMM_FLAG_BYTES = COMM_ALIGNMENT, COMM_DIRECT_RANKS = 8 };
// Maps ranges of device memory in all ranks of the node. From then on, comm_all_to_all and
// comm_all_gather calls in `node` whose send buffer is in one of these ranges use copy engines and
// occupy no SM. The buffer must have the same offset on every rank, and all these calls must be on
// one stream.
// piece: (pieces) ranges of the same sizes on every rank; ranges of 0 bytes are ignored. The first
// bytes of each range are overwritten, then zeroed.
// flags: COMM_FLAG_BYTES of device memory for the backend.
// Collective over the node. If a rank cannot access another rank's memory, returns false on all
// ranks with the reason in err, and exchanges use NCCL. Always false on CPU ranks.
bool comm_share(const Group *node, void *flags, const CommPiece *piece, int pieces, Error *err);
// Unmaps the shared memory, which may then be freed. Collective over the node; no collective may be
// pending. No-op unless memory is shared.
void comm_unshare(const Group *node);
// Opens all missing connections and sends a small message through each. So faults that a restart
// would not fix (no network, too little memory for buffers) end the job before training, with
// EXIT_ENVIRONMENT. Timeouts and errors in NCCL's own threads still end it with EXIT_COMMUNICATION.
// Collective over the world. Call it after comm_share, which makes NCCL connections within the node
// unnecessary, and again after comm_unshare. No-op on CPU ranks.
// memory: device memory of COMM_TRIAL_BYTES per rank of the world; overwritten.
enum { COMM_TRIAL_BYTES = 16 };
void comm_connect(const Mesh *mesh, void *memory);

// Lets the job survive the loss of a member of this group (node_failure.h). After a loss, *lost
// (allocated by host_alloc) becomes 1, then pending collectives complete with undefined results,
// and later ones are no-ops. Kernels that use the results must test *lost. Call after comm_open.
void comm_may_lose(const Group *group, int *lost);
// Marks a member as lost after the main thread has detected the loss by other means. No-op without
// comm_may_lose and on repeated calls.
void comm_lose(const Group *group);

// Collectives are no-ops in a group of one, and without comm_open.
//
// Sends slot i of send (bytes each) to member i and receives slot j of recv from member j. The
// caller's own slots are neither read nor written.
void comm_all_to_all(const Group *group, const void *send, void *recv, size_t bytes, Stream *stream);
// All-gathers in place. The caller fills its own slot, at rank * bytes.
void comm_all_gather(const Group *group, void *buffer, size_t bytes, Stream *stream);
// A row of an all-gather: the caller's part, and the destination of the parts of all members in
// rank order. All parts of a row have the same size.
typedef struct CommRow {
    const void *own;
    void *all;
    size_t bytes;  // size of a part
} CommRow;
// All-gathers several rows at once. Not in place: the caller's parts are copied.
void comm_gather_rows(const Group *group, const CommRow *row, int rows, Stream *stream);

// --- direct collectives --------------------------------------------------------------------------

// Collectives of one kernel each, which reads and writes the other ranks' memory. For tensor
// parallelism inside a node, where launches and copies take longer than the transfer.

// Returns true if no rank of the group shares its GPU with another rank of the job. Otherwise
// returns false on all ranks of the group with the reason in err. Direct collectives of ranks that
// share a GPU give the same results, but each takes several time slices of the GPU, because the
// ranks' kernels wait for each other and the GPU runs one process at a time. Always true on CPU
// ranks. Collective over all ranks.
bool comm_own_gpus(const Group *group, Error *err);
// Maps ranges of device memory in all ranks of the group; piece and flags are as for comm_share.
// If a rank cannot access another rank's memory, returns false on all ranks with the reason in err,
// and the functions below return false too. Always false on CPU ranks. Collective over the group.
bool comm_open_direct(const Group *group, void *flags, const CommPiece *piece, int pieces, Error *err);
// Unmaps the memory, which may then be freed. Collective over the group; no collective may be
// pending. No-op unless the memory is mapped.
void comm_close_direct(const Group *group);
// Whether a GEMM runs at the same time as a direct collective, which limits the SMs that it may
// occupy. COMM_BESIDES: number of values.
typedef enum CommBeside { COMM_BESIDE_GEMM, COMM_WITHOUT_GEMM, COMM_BESIDES } CommBeside;
// A sum over the ranks, in fp32 and in rank order, rounded once: bitwise identical to op_sum_parts
// (op_add_parts if fp32) of gathered parts.
typedef struct CommReduce {
    const void *partial;  // (total) in mapped memory
    void *out;            // may be `partial`, else must not overlap it. All-reduce: (total) in mapped
                          // memory; reduce-scatter: (total / ranks), the sums of this rank's range
    void *scratch;        // (total / ranks), used by a reduce-scatter if out is partial
    const void *bias;     // (C) added to each of the rows of C elements; NULL: none
    int C;
    int64_t total;  // number of elements; for a reduce-scatter a multiple of the ranks
    bool fp32;      // elements are float; false: floatX
    bool scatter;   // reduce-scatter; false: all-reduce
    CommBeside beside;
} CommReduce;
// Return false without effect if a buffer is not in mapped memory; use other collectives then. All
// ranks must make the same calls in the same order, with equal sizes and offsets in the mapped
// ranges, and equal alignments modulo 16. Up to four streams per group.
bool comm_reduce_direct(const Group *group, const CommReduce *a, Stream *stream);
// An all-gather: copies `own` of every rank r into slot r of `whole` on all ranks.
typedef struct CommGather {
    const void *own;  // (bytes) this rank's slot of `whole`, or memory that does not overlap it
    void *whole;      // (ranks, bytes) in mapped memory
    size_t bytes;
    CommBeside beside;
} CommGather;
bool comm_gather_direct(const Group *group, const CommGather *a, Stream *stream);
// A sum over the ranks and the norm that adds it to the residual stream. Bitwise identical to
// comm_reduce_direct into norm->branch, then op_layernorm_forward and comm_gather_direct, but
// neither reads nor writes norm->branch.
typedef struct CommNorm {
    const floatX *partial;  // (B, T, C) in mapped memory; must not overlap an output
    const floatX *bias;     // (C), or NULL
    const LayerNorm *norm;  // rows: this rank's share of equal blocks of rows, or all
    floatX *whole;          // (B, T, C) in mapped memory: receives y of all ranks; NULL: not needed
} CommNorm;
// Computes it in one kernel. Returns false without effect if the kernel does not support the norm:
// with dropout, without gamma or residual, with all rows on more than two ranks or on too few free
// SMs, or if a buffer is not 16-byte aligned, not in mapped memory or overlaps `partial`. All ranks
// must make the same calls, as for comm_reduce_direct.
bool comm_norm_direct(const Group *group, const CommNorm *a, Stream *stream);

// Returns the bytes this rank has sent in this group, with links but without comm_connect.
uint64_t comm_sent(const Group *group);

// A one-way, ordered channel from one rank of a group to another, used by pipeline stages. Each
// link has its own communicator and stream, so links do not block each other. Several messages may
// be pending at both ends. Timeouts, watchdog and errors are as for collectives.
typedef struct Link Link;
// Opens a link. from, to: different members of the group. name: describes the messages in errors
// ("hidden states"); must outlive the link. Both ends must call it, and all ranks must open their
// links in the same order to avoid deadlock. Other ranks may call it and get NULL. Call it after
// comm_open and before comm_connect, which connects the links.
Link *link_open(const Group *group, int from, int to, Device *device, const char *name);
// Sends a message once the stream's work so far is done. Memory must not change before link_sent.
// Both ends pass the same number of bytes; 0 is allowed.
void link_send(Link *link, const void *memory, size_t bytes, Stream *stream);
// Makes later work of stream wait until at most `pending` messages are still being sent. On CPU
// ranks the caller waits.
void link_sent(Link *link, int pending, Stream *stream);
// Posts a receive of the next message into memory, once the stream's work so far is done. Any
// number of receives may be posted ahead.
void link_expect(Link *link, void *memory, size_t bytes, Stream *stream);
// Makes later work of stream wait for the oldest posted receive not yet waited for. On CPU ranks
// the caller waits. No-op if there is none.
void link_arrived(Link *link, Stream *stream);

LLMC_END
