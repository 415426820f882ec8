// Ways to implement an all-to-all among the GPUs of one node. node_hop.cu compares them. As in the
// trainer (llmc/comm.h), slot i of the send buffer goes to rank i, and slot j of the receive buffer
// comes from rank j.
#pragma once
#include <mpi.h>

#include "llmc/cuda/internal.h"
LLMC_BEGIN

typedef enum WayKind {
    // Grouped ncclSend and ncclRecv, as in llmc/cuda/comm.cu. blocks: maximum number of thread
    // blocks; 0: NCCL's choice.
    WAY_NCCL,
    WAY_SYMMETRIC,  // ncclAlltoAll on a window of symmetric memory; also copies the rank's own slot
    WAY_ENGINES,    // WAY_SYMMETRIC with copy engines instead of thread blocks
    WAY_COPIES      // copy engines that read peer memory (llmc/cuda/peer_memory.h)
} WayKind;

typedef struct WayForm {
    const char *name;
    WayKind kind;
    int blocks;
} WayForm;

typedef struct Way Way;

// Allocates the send and the receive buffer of `bytes` bytes each, a multiple of 4096. The receive
// buffer is at way_send(way) + bytes. If any rank does not support the way, returns NULL with the
// same error on all ranks. Collective over comm: at most 8 ranks on one host.
Way *way_open(const WayForm *form, Device *device, MPI_Comm comm, size_t bytes, Error *err);
// Frees the way. Collective; streams must be idle. broken: an exchange failed on some rank, and
// other ranks may still wait for it.
void way_close(Way *way, bool broken);
uint8_t *way_send(const Way *way);
// Issues an all-to-all on the stream. slot: size of a slot in bytes, a multiple of 256. Work that
// is issued later on the stream may overwrite the send buffer and read the receive buffer. Returns
// false if this rank could not issue the all-to-all. Collective.
bool way_exchange(Way *way, size_t slot, Stream *stream, Error *err);

LLMC_END
