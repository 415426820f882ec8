// Exchanges among the ranks of one node by the GPUs' copy engines, out of memory that the ranks
// have opened to each other (CUDA IPC). No multiprocessor works for them, so the products of the
// layers beside them keep theirs. dev/bench/node_hop.cu measures what NCCL's kernels take from
// products. Called by comm.cu, inside a node, where comm_share could be had; and by that bench.
#pragma once
#include "llmc/comm.h"
#include "llmc/cuda/internal.h"
LLMC_BEGIN

typedef struct PeerMemory PeerMemory;

// Collective over node, at least two ranks with a GPU each.
PeerMemory *peer_memory_open(Device *device, MPI_Comm node);
// Collective: lets go of what is still shared.
void peer_memory_close(PeerMemory *peers);

// comm_share and comm_unshare (llmc/comm.h). EXIT_ENVIRONMENT: the ranks are on several hosts, the
// GPUs are not connected, or CUDA IPC is refused.
bool peer_memory_share(PeerMemory *peers, void *flags, const CommPiece *piece, int pieces, Error *err);
void peer_memory_unshare(PeerMemory *peers);
// Whether anything is shared now.
bool peer_memory_sharing(const PeerMemory *peers);
// Whether this memory was shared.
bool peer_memory_hold(const PeerMemory *peers, const void *memory, size_t bytes);

// comm_all_to_all and comm_all_gather (llmc/comm.h) in stream order, always on the same stream.
// What is fetched (send, or buffer) was shared, and lies at the same place of what was shared on
// every rank.
void peer_memory_all_to_all(PeerMemory *peers, const void *send, void *recv, size_t bytes, Stream *stream);
void peer_memory_all_gather(PeerMemory *peers, void *buffer, size_t bytes, Stream *stream);

LLMC_END
