// The ways in which node_hop.cu exchanges messages among the GPUs of one node; node_hop_ways.cu
// implements them. Each does the trainer's all-to-all (llmc/comm.h): slot i of the send buffer goes
// to rank i, slot j of the receive buffer comes from rank j.
#pragma once
#include <mpi.h>

#include "llmc/cuda/internal.h"
LLMC_BEGIN

typedef enum WayKind {
    // A group of ncclSend and ncclRecv, as in llmc/cuda/comm.cu. blocks: at most so many; 0: as
    // NCCL likes.
    WAY_NCCL,
    WAY_SYMMETRIC,  // ncclAlltoAll on a window of symmetric memory; moves the own slot too
    WAY_ENGINES,    // the same, with NCCL asked for copy engines in place of blocks
    WAY_COPIES  // fetched by copy engines out of memory that all ranks have opened: llmc/cuda/peer_memory.h
} WayKind;

typedef struct WayForm {
    const char *name;
    WayKind kind;
    int blocks;
} WayForm;

typedef struct Way Way;

// Collective over the ranks of one host, at most 8. bytes: of each buffer, a multiple of 4096. NULL
// and the same Error on every rank where one of them lacks what the way needs. The receive buffer
// is way_send(way) + bytes.
Way *way_open(const WayForm *form, Device *device, MPI_Comm comm, size_t bytes, Error *err);
// Collective, with idle streams. broken: an exchange was refused on some rank, so that others may
// wait for it.
void way_close(Way *way, bool broken);
uint8_t *way_send(const Way *way);
// Collective in stream order. slot: bytes, a multiple of 256. After it, in stream order, the send
// buffer may be overwritten and the receive buffer read. False: this rank could not issue it.
bool way_exchange(Way *way, size_t slot, Stream *stream, Error *err);

LLMC_END
