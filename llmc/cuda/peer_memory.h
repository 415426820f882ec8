// Exchanges among the ranks of one node by the GPUs' copy engines, reading peer memory mapped
// through CUDA IPC. They take no SMs from the matrix products that run at the same time;
// dev/bench/node_hop.cu measures how much NCCL's kernels slow those down. Called by comm.cu after a
// successful comm_share, and by that benchmark.
#pragma once
#include "llmc/comm.h"
#include "llmc/cuda/internal.h"
LLMC_BEGIN

typedef struct PeerMemory PeerMemory;

// Collective over node, which has at least two ranks, each with its own GPU.
PeerMemory *peer_memory_open(Device *device, MPI_Comm node);
// Unmaps what is still shared, and frees the object. Collective.
void peer_memory_close(PeerMemory *peers);

// Implement comm_share and comm_unshare (llmc/comm.h). Error (EXIT_ENVIRONMENT): the ranks are on
// several hosts, the GPUs are not connected, or CUDA IPC is unavailable.
bool peer_memory_share(PeerMemory *peers, void *flags, const CommPiece *piece, int pieces, Error *err);
void peer_memory_unshare(PeerMemory *peers);
// Returns true while any memory is shared.
bool peer_memory_sharing(const PeerMemory *peers);
// Returns true if this memory is within a shared range.
bool peer_memory_hold(const PeerMemory *peers, const void *memory, size_t bytes);

// Implement comm_all_to_all and comm_all_gather (llmc/comm.h) in stream order, always on the same
// stream. The memory that peers read (send, or buffer) must be shared, at the same offset of its
// shared range on every rank.
void peer_memory_all_to_all(PeerMemory *peers, const void *send, void *recv, size_t bytes, Stream *stream);
void peer_memory_all_gather(PeerMemory *peers, void *buffer, size_t bytes, Stream *stream);

LLMC_END
