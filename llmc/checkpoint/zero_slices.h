// Maps ZeRO's state to checkpoint slices and back. Called by saver.c and by the restore of a run.
#pragma once
#include "llmc/checkpoint/checkpoint.h"
#include "llmc/state/zero.h"
LLMC_BEGIN

// Converts elements [lo, hi) of a rank's part of a tensor to a slice of the whole tensor.
// Column-parallel parts become a block of columns, row-parallel parts an offset range.
Slice slice_of_part(const Tensor *tensor, SliceKind kind, int64_t lo, int64_t hi);

// Reads this rank's part of a tensor: (tensor_elements) of the kind, to be freed by the caller.
// Returns NULL with the error of checkpoint_read.
void *checkpoint_read_tensor(const Checkpoint *checkpoint, const Tensor *tensor, SliceKind kind, int node,
                             Error *err);

// Slices saved by this rank: the weights of its shard and, if `optimizer`, master weights and
// moments.
typedef struct ZeroSlices {
    Slice *slices;  // (count), malloc'ed
    int count;
} ZeroSlices;
ZeroSlices zero_slices(const Zero *zero, bool optimizer);

// Callbacks for CheckpointSave: context is the Zero, i an index into zero_slices.
void zero_fetch_slice(void *zero, int i, void *host);
void zero_stage_slice(void *zero, int i, void *pinned);
void zero_slices_staged(void *zero);

// Loads the bf16 model weights and, if `optimizer`, master weights and moments. Otherwise master
// weights become float(model weights) and moments 0. Errors: as checkpoint_read.
bool zero_restore(Zero *zero, const Checkpoint *checkpoint, bool optimizer, Error *err);
// Loads only the model weights, from slices of that kind.
bool zero_restore_weights(Zero *zero, const Checkpoint *checkpoint, SliceKind kind, Error *err);
// Loads the error-feedback residual of this node, if the checkpoint has one. kind: SLICE_RESIDUAL,
// or SLICE_LOCAL_RESIDUAL with local steps.
bool zero_restore_residual(Zero *zero, const Checkpoint *checkpoint, SliceKind kind, Error *err);

LLMC_END
