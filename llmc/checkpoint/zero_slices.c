// A Zero's part in a checkpoint: what this rank saves as slices of the named tensors, and how it comes back. See zero.h; called by saver.c and train_gpt.cu.
#include <stdlib.h>

#include "llmc/state/zero.h"

// Slices come kind by kind, each for all pieces; the replica's alone without the optimiser.
static const SliceKind kind_order[SLICE_KINDS] = {SLICE_WEIGHT, SLICE_MASTER, SLICE_EXP_AVG, SLICE_EXP_AVG_SQ};

ZeroSlices zero_slices(const Zero *zero, const CheckpointTensor *tensors, bool optimizer) {
    int kinds = optimizer ? SLICE_KINDS : 1;
    ZeroSlices out;
    out.count = zero->piece_count * kinds;
    out.slices = (Slice *)xcalloc((size_t)out.count + 1, sizeof(Slice), "the checkpoint's slices");
    for (int k = 0; k < kinds; k++) {
        for (int i = 0; i < zero->piece_count; i++) {
            Slice *slice = &out.slices[k * zero->piece_count + i];
            slice->tensor = tensors[zero->pieces[i].tensor].name;
            slice->kind = kind_order[k];
            slice->lo = zero->pieces[i].lo;
            slice->hi = zero->pieces[i].hi;
        }
    }
    return out;
}

// Device address and size of a piece's slice of one kind.
static void *slice_memory(const Zero *zero, const Piece *piece, SliceKind kind, size_t *bytes) {
    *bytes = (size_t)(piece->hi - piece->lo) * (size_t)slice_kind_bytes(kind);
    switch (kind) {
        case SLICE_MASTER: return zero->master + piece->state_at;
        case SLICE_EXP_AVG: return zero->exp_avg + piece->state_at;
        case SLICE_EXP_AVG_SQ: return zero->exp_avg_sq + piece->state_at;
        default: return zero->weights + piece->arena_at;
    }
}

static void *fetched_memory(const Zero *zero, int i, size_t *bytes) {
    return slice_memory(zero, &zero->pieces[i % zero->piece_count], kind_order[i / zero->piece_count], bytes);
}

void zero_fetch_slice(void *context, int i, void *host) {
    Zero *zero = (Zero *)context;
    size_t bytes;
    void *memory = fetched_memory(zero, i, &bytes);
    zero_weights_wait_all(zero);
    copy_to_host(zero->compute, host, memory, bytes);
    stream_synchronize(zero->compute);
}

// Behind the applies of the step that is saved (zero_update's final wait on `last`), before the update of the next one, whose forward, backward and reductions
// run meanwhile: a stream of their own, because the sums of the reductions on `last` would wait for gigabytes.
void zero_stage_slice(void *context, int i, void *pinned) {
    Zero *zero = (Zero *)context;
    if (zero->to_copy_count == 0) lanes_after(zero->lanes, zero->copies, zero->lanes->last);
    if (zero->to_copy_count == zero->to_copy_room) {
        zero->to_copy_room = 2 * zero->to_copy_room + 256;
        zero->to_copy = (StagedCopy *)xrealloc(zero->to_copy, (size_t)zero->to_copy_room * sizeof *zero->to_copy, "a checkpoint's copies");
    }
    StagedCopy *copy = &zero->to_copy[zero->to_copy_count++];
    copy->pinned = pinned;
    copy->memory = fetched_memory(zero, i, &copy->bytes);
}

void zero_copy_staged(Zero *zero) {
    if (zero->to_copy_count == 0) return;
    for (int i = 0; i < zero->to_copy_count; i++) copy_to_pinned(zero->copies, zero->to_copy[i].pinned, zero->to_copy[i].memory, zero->to_copy[i].bytes);
    event_record(zero->staged, zero->copies);
    zero->to_copy_count = 0;
    zero->copying = true;
}

void zero_staged(void *context) {
    Zero *zero = (Zero *)context;
    zero_copy_staged(zero);
    event_synchronize(zero->staged);
}

static bool restore_slice(Zero *zero, const Checkpoint *checkpoint, const char *name, SliceKind kind, int64_t lo, int64_t hi, void *memory, Error *err) {
    Slice slice = {name, kind, lo, hi};
    size_t bytes = (size_t)(hi - lo) * (size_t)slice_kind_bytes(kind);
    void *host = xmalloc(bytes, "a checkpoint slice");
    bool ok = checkpoint_read(checkpoint, &slice, host, err);
    if (ok) copy_to_device(zero->compute, memory, host, bytes);
    stream_synchronize(zero->compute);
    free(host);
    return ok;
}

bool zero_restore(Zero *zero, const Checkpoint *checkpoint, const CheckpointTensor *tensors, bool optimizer, Error *err) {
    for (int i = 0; i < zero->plan.tensors; i++) {
        int64_t numel = tensors[i].shape[0] * (tensors[i].dims > 1 ? tensors[i].shape[1] : 1);
        if (!restore_slice(zero, checkpoint, tensors[i].name, SLICE_WEIGHT, 0, numel, zero_weight(zero, i), err)) return false;
    }
    if (!optimizer) {
        zero_masters_from_weights(zero);
        return true;
    }
    for (int i = 0; i < zero->piece_count; i++) {
        const Piece *piece = &zero->pieces[i];
        for (int kind = SLICE_MASTER; kind <= SLICE_EXP_AVG_SQ; kind++) {
            size_t bytes;
            void *memory = slice_memory(zero, piece, (SliceKind)kind, &bytes);
            if (!restore_slice(zero, checkpoint, tensors[piece->tensor].name, (SliceKind)kind, piece->lo, piece->hi, memory, err)) return false;
        }
    }
    return true;
}
