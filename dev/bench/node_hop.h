// Implementations of an all-to-all among the GPUs of one node ("ways"), compared by node_hop.cu and
// implemented in node_hop_ways.cu. As in the trainer (llmc/comm.h), slot i of the send buffer goes
// to rank i, and slot j of the receive buffer comes from rank j.
#pragma once
#include <mpi.h>

#include "llmc/cuda/internal.h"
LLMC_BEGIN

typedef enum WayKind {
    // Grouped ncclSend and ncclRecv, as in llmc/cuda/comm.cu. blocks: maximum number of thread
    // blocks; 0: NCCL's choice.
    WAY_NCCL,
    WAY_SYMMETRIC,  // ncclAlltoAll on a window of symmetric memory; also copies the rank's own slot
    WAY_ENGINES,    // the same with copy engines instead of thread blocks
    WAY_COPIES      // copy engines read from memory shared by all ranks: llmc/cuda/peer_memory.h
} WayKind;

typedef struct WayForm {
    const char *name;
    WayKind kind;
    int blocks;
} WayForm;

typedef struct Way Way;

// Collective over the ranks of one host, at most 8. bytes: size of each buffer, a multiple of 4096.
// Returns NULL and the same Error on every rank if one of them does not support the way. The
// receive buffer is at way_send(way) + bytes.
Way *way_open(const WayForm *form, Device *device, MPI_Comm comm, size_t bytes, Error *err);
// Collective; streams must be idle. broken: an exchange failed on some rank, so others may still be
// waiting for it.
void way_close(Way *way, bool broken);
uint8_t *way_send(const Way *way);
// Issues an all-to-all on the stream. Collective. slot: bytes, a multiple of 256. Work issued later
// on the stream may overwrite the send buffer and read the receive buffer. Returns false if this
// rank could not issue it.
bool way_exchange(Way *way, size_t slot, Stream *stream, Error *err);

LLMC_END
