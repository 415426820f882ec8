// ZeRO's state as slices of a checkpoint, and back. Called by saver.c, which saves, and by the
// restore of a run.
#pragma once
#include "llmc/checkpoint/checkpoint.h"
#include "llmc/state/zero.h"
LLMC_BEGIN

// Elements [lo, hi) of a rank's part of a tensor, as a slice of the whole. A part that is cut by
// columns is a block of them, one that is cut by rows begins further down.
Slice slice_of_part(const Tensor *tensor, SliceKind kind, int64_t lo, int64_t hi);

// What this rank saves: the weights of its shard, and with `optimizer` master weights and moments.
typedef struct ZeroSlices {
    Slice *slices;  // (count), for free()
    int count;
} ZeroSlices;
ZeroSlices zero_slices(const Zero *zero, bool optimizer);

// For CheckpointSave: context is the Zero, i a number of zero_slices.
void zero_fetch_slice(void *zero, int i, void *host);
void zero_stage_slice(void *zero, int i, void *pinned);
void zero_slices_staged(void *zero);

// Loads the replica, and master weights and moments when `optimizer`. Without it master weights
// become float(replica) and moments 0. Errors: checkpoint_read's.
bool zero_restore(Zero *zero, const Checkpoint *checkpoint, bool optimizer, Error *err);
// Loads the replica alone, which is the weights of that kind.
bool zero_restore_weights(Zero *zero, const Checkpoint *checkpoint, SliceKind kind, Error *err);
// Loads the residual of error feedback, of as many nodes as there are here.
bool zero_restore_residual(Zero *zero, const Checkpoint *checkpoint, Error *err);

LLMC_END
