// Exchanges among the ranks of one node by the GPUs' copy engines, out of memory that the ranks
// have opened to each other (CUDA IPC). No multiprocessor works for them, so the products of the
// layers beside them keep theirs. dev/bench/node_hop.cu measures what NCCL's kernels take from
// products. Called by comm.cu, inside a node, where comm_share could be had; and by that bench.
#pragma once
#include "llmc/comm.h"
#include "llmc/cuda/internal.h"
LLMC_BEGIN

typedef struct Neighbors Neighbors;

// Collective over node, at least two ranks with a GPU each.
Neighbors *neighbors_open(Device *device, MPI_Comm node);
// Collective: lets go of what is still shared.
void neighbors_close(Neighbors *neighbors);

// comm_share and comm_unshare (llmc/comm.h). EXIT_ENVIRONMENT: the ranks are on several hosts, the
// GPUs are not connected, or CUDA IPC is refused.
bool neighbors_share(Neighbors *neighbors, void *flags, const CommPiece *piece, int pieces, Error *err);
void neighbors_unshare(Neighbors *neighbors);
// Whether anything is shared now.
bool neighbors_sharing(const Neighbors *neighbors);
// Whether this memory was shared.
bool neighbors_hold(const Neighbors *neighbors, const void *memory, size_t bytes);

// comm_all_to_all and comm_all_gather (llmc/comm.h) in stream order, always on the same stream.
// What is fetched (send, or buffer) was shared, and lies at the same place of what was shared on
// every rank.
void neighbors_all_to_all(Neighbors *neighbors, const void *send, void *recv, size_t bytes, Stream *stream);
void neighbors_all_gather(Neighbors *neighbors, void *buffer, size_t bytes, Stream *stream);

LLMC_END
