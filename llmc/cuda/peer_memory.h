// All-to-all and all-gather among the GPUs of one node with copy engines, which read the other
// ranks' memory through CUDA IPC mappings. Unlike NCCL's kernels, copy engines take no SMs from the
// matrix products that run at the same time; dev/bench/node_hop.cu measures the difference.
// comm.cu calls these functions after a successful comm_share.
#pragma once
#include "llmc/comm.h"
#include "llmc/cuda/internal.h"
LLMC_BEGIN

// Time limit of the first barrier and of the first all-reduce, which test peer memory.
#define PEER_TEST_SECONDS 2.0

typedef struct PeerMemory PeerMemory;

// node: communicator of at least two ranks, which may share GPUs. Collective.
PeerMemory *peer_memory_open(Device *device, MPI_Comm node);
// Unmaps all shared memory and frees the object. Collective.
void peer_memory_close(PeerMemory *peers);

// Implement comm_share and comm_unshare (llmc/comm.h). Sharing fails with EXIT_ENVIRONMENT if the
// ranks run on several hosts, the GPUs cannot access each other, or CUDA IPC is unavailable.
bool peer_memory_share(PeerMemory *peers, void *flags, const CommPiece *piece, int pieces, Error *err);
void peer_memory_unshare(PeerMemory *peers);
// Returns true between a successful peer_memory_share and peer_memory_unshare.
bool peer_memory_sharing(const PeerMemory *peers);
// Returns true if these bytes of device memory lie within one shared range.
bool peer_memory_hold(const PeerMemory *peers, const void *memory, size_t bytes);
// Returns this process's address of a rank's memory: the bytes at the offset of `memory` in the
// same shared range. NULL unless peer_memory_hold.
uint8_t *peer_memory_of(const PeerMemory *peers, int rank, const void *memory, size_t bytes);
// Returns this process's address of a rank's flags (COMM_FLAG_BYTES), of which peer_memory.cu uses
// the first 64 bytes.
uint8_t *peer_memory_flags(const PeerMemory *peers, int rank);

// Implement comm_all_to_all and comm_all_gather (llmc/comm.h). All calls must use the same stream.
// The memory that peers read (send or buffer) must be within a shared range, at the same offset on
// every rank.
void peer_memory_all_to_all(PeerMemory *peers, const void *send, void *recv, size_t bytes, Stream *stream);
void peer_memory_all_gather(PeerMemory *peers, void *buffer, size_t bytes, Stream *stream);

LLMC_END
