// All-reduce, reduce-scatter and all-gather among the GPUs of one node with one kernel each, which
// reads and writes the other ranks' memory. NCCL and copy engines need several launches for the
// same result, which costs more than the transfer for messages of a few megabytes.
//
// Each kernel spins until the matching kernels of the other ranks have started. Until then, and
// while it sums, it occupies up to a quarter of the SMs beside a GEMM, or half of them without one
// (peer_most_blocks in peer_layout.h). comm.cu calls these functions for comm_open_direct.
#pragma once
#include "llmc/comm.h"
#include "llmc/cuda/internal.h"
LLMC_BEGIN

typedef struct PeerReduce PeerReduce;

// Maps `piece` into all ranks of the group, and tests an all-reduce within a time limit. flags:
// COMM_FLAG_BYTES of device memory. collectives: NCCL collectives of other groups that may be
// pending at the same time as a kernel. Returns NULL with the same error on all ranks
// (EXIT_ENVIRONMENT) if the ranks run on several hosts, the GPUs cannot access each other, or the
// test fails. Overwrites and then zeroes the start of each piece. Collective; 2 to 8 ranks.
PeerReduce *peer_reduce_open(Device *device, MPI_Comm group, void *flags, const CommPiece *piece, int pieces,
                             int collectives, Error *err);
// Unmaps the memory and frees the object. No kernel may be pending. Collective.
void peer_reduce_close(PeerReduce *peers);
// Limits the thread blocks of every launch to 1 .. PEER_BLOCKS_MOST. All ranks must pass the same
// number. For benchmarks.
void peer_reduce_use_blocks(PeerReduce *peers, int blocks);

// Implement comm_reduce_direct, comm_gather_direct and comm_norm_direct (llmc/comm.h). Return false
// without effect if a buffer is not in shared memory, or more than PEER_LANES streams use the
// group. peer_reduce_norm has further conditions (can_normalize in peer_reduce.cu). All ranks must
// make the same calls in the same order, with the same sizes, offsets in shared memory, and
// addresses modulo 16 bytes.
bool peer_reduce_sum(PeerReduce *peers, const CommReduce *a, Stream *stream);
bool peer_reduce_gather(PeerReduce *peers, const CommGather *a, Stream *stream);
bool peer_reduce_norm(PeerReduce *peers, const CommNorm *a, Stream *stream);

// Returns the word in page-locked memory that the kernels poll while they wait. If it becomes
// nonzero, all waiting and later kernels end, and their results are undefined.
int *peer_reduce_abort_word(PeerReduce *peers);

LLMC_END
