// Converts between ZeRO's training state and checkpoint slices. See zero_slices.h.
#include "llmc/checkpoint/zero_slices.h"

#include <assert.h>
#include <stdlib.h>

// Slices are ordered by kind. Without the optimizer only the model weights are saved.
static const SliceKind KIND_ORDER[] = {SLICE_WEIGHT,         SLICE_MASTER,           SLICE_EXP_AVG,
                                       SLICE_EXP_AVG_SQ,     SLICE_RESIDUAL,         SLICE_LOCAL_MASTER,
                                       SLICE_LOCAL_EXP_AVG,  SLICE_LOCAL_EXP_AVG_SQ, SLICE_LOCAL_WEIGHT,
                                       SLICE_OUTER_MOMENTUM, SLICE_LOCAL_RESIDUAL};
_Static_assert(sizeof KIND_ORDER / sizeof *KIND_ORDER == SLICE_KINDS, "KIND_ORDER must list every kind");

Slice slice_of_part(const Tensor *t, SliceKind kind, int64_t lo, int64_t hi) {
    assert(0 <= lo && lo <= hi && hi <= tensor_elements(t));
    int64_t before = t->split == 0 ? t->offset * t->whole[1] : 0;
    Columns columns = {0, 0};
    if (t->split == 1) columns = (Columns){t->offset, t->local[1]};
    return (Slice){t->name, kind, before + lo, before + hi, columns, 0};
}

static Slice slice_of_range(const Zero *zero, SliceKind kind, const Range *range) {
    const Tensor *t = &zero_tensors(zero, NULL)[range->tensor];
    Slice slice = slice_of_part(t, kind, range->lo, range->hi);
    slice.node = slice_kind_per_node(kind) ? zero_node(zero) : 0;
    return slice;
}

ZeroSlices zero_slices(const Zero *zero, bool optimizer) {
    ZeroSlices out = {NULL, 0};
    for (int k = 0; k < SLICE_KINDS; k++) {
        SliceKind kind = KIND_ORDER[k];
        int count;
        const Range *ranges = zero_ranges(zero, kind, &count);
        if (!zero_saves(zero, kind, optimizer)) continue;
        size_t room = ((size_t)out.count + (size_t)count + 1) * sizeof(Slice);
        out.slices = xrealloc(out.slices, room, "the checkpoint's slices");
        for (int i = 0; i < count; i++) {
            Slice *slice = &out.slices[out.count++];
            *slice = slice_of_range(zero, kind, &ranges[i]);
            // If several ranks hold the same elements, only one saves them; the slices of the
            // others are empty.
            if (!zero_saves_range(zero, kind, &ranges[i])) slice->hi = slice->lo;
        }
    }
    return out;
}

// Identifies the kind and range of slice i of zero_slices.
typedef struct SliceSource {
    SliceKind kind;
    int range;
} SliceSource;

static SliceSource source_of(const Zero *zero, int i) {
    SliceSource source = {KIND_ORDER[0], i};
    for (int k = 0; k < SLICE_KINDS; k++) {
        int count;
        source.kind = KIND_ORDER[k];
        zero_ranges(zero, source.kind, &count);
        if (source.range < count) break;
        source.range -= count;
    }
    return source;
}

void zero_fetch_slice(void *context, int i, void *host) {
    SliceSource source = source_of((Zero *)context, i);
    zero_fetch((Zero *)context, source.range, source.kind, host);
}

void zero_stage_slice(void *context, int i, void *pinned) {
    SliceSource source = source_of((Zero *)context, i);
    zero_stage((Zero *)context, source.range, source.kind, pinned);
}

void zero_slices_staged(void *context) { zero_staged((Zero *)context); }

// Reads a slice into host memory (for free()). Returns NULL with the error of checkpoint_read.
static void *read_slice(const Checkpoint *checkpoint, Slice slice, Error *err) {
    size_t bytes = (size_t)(slice.hi - slice.lo) * (size_t)slice_kind_bytes(slice.kind);
    void *host = xmalloc(bytes, "a checkpoint slice");
    if (checkpoint_read(checkpoint, &slice, host, err)) return host;
    free(host);
    return NULL;
}

void *checkpoint_read_tensor(const Checkpoint *checkpoint, const Tensor *tensor, SliceKind kind, int node,
                             Error *err) {
    Slice slice = slice_of_part(tensor, kind, 0, tensor_elements(tensor));
    slice.node = node;
    return read_slice(checkpoint, slice, err);
}

bool zero_restore_weights(Zero *zero, const Checkpoint *checkpoint, SliceKind kind, Error *err) {
    int count;
    const Tensor *tensors = zero_tensors(zero, &count);
    for (int i = 0; i < count; i++) {
        int node = slice_kind_per_node(kind) ? zero_node(zero) : 0;
        void *host = checkpoint_read_tensor(checkpoint, &tensors[i], kind, node, err);
        if (!host) return false;
        zero_put_weights(zero, i, host);
        free(host);
    }
    return true;
}

// Restores all ranges of a kind that this rank holds.
static bool restore_kind(Zero *zero, const Checkpoint *checkpoint, SliceKind kind, Error *err) {
    int owned, held = zero_held_ranges(zero, kind);
    const Range *ranges = zero_ranges(zero, kind, &owned);
    for (int i = 0; i < held; i++) {
        if (!tensor_holds(&zero_tensors(zero, NULL)[ranges[i].tensor], kind)) continue;
        void *host = read_slice(checkpoint, slice_of_range(zero, kind, &ranges[i]), err);
        if (!host) return false;
        zero_put(zero, i, kind, host);
        free(host);
    }
    return true;
}

// Restores this replica group's local-step state, after the outer weights. A group without saved
// state starts from the outer weights and the average of the moments.
static bool restore_replica_group(Zero *zero, const Checkpoint *checkpoint, bool known, Error *err) {
    if (!zero_keeps(zero, SLICE_LOCAL_MASTER)) return true;
    if (checkpoint_nodes(checkpoint, SLICE_OUTER_MOMENTUM) &&
        !restore_kind(zero, checkpoint, SLICE_OUTER_MOMENTUM, err))
        return false;
    if (!known) {
        zero_begin_replica_group(zero);
        return true;
    }
    const RunState *run = checkpoint_state(checkpoint);
    zero_resume_replica_group(zero, run->iteration, run->outer_applied_at);
    return restore_kind(zero, checkpoint, SLICE_LOCAL_MASTER, err) &&
           restore_kind(zero, checkpoint, SLICE_LOCAL_EXP_AVG, err) &&
           restore_kind(zero, checkpoint, SLICE_LOCAL_EXP_AVG_SQ, err);
}

bool zero_restore(Zero *zero, const Checkpoint *checkpoint, bool optimizer, Error *err) {
    bool known = optimizer && zero_keeps(zero, SLICE_LOCAL_MASTER) &&
                 zero_node(zero) < checkpoint_nodes(checkpoint, SLICE_LOCAL_MASTER);
    if (!zero_restore_weights(zero, checkpoint, known ? SLICE_LOCAL_WEIGHT : SLICE_WEIGHT, err)) return false;
    if (!optimizer) {
        zero_init_master_weights(zero);
        return true;
    }
    return restore_kind(zero, checkpoint, SLICE_MASTER, err) &&
           restore_kind(zero, checkpoint, SLICE_EXP_AVG, err) &&
           restore_kind(zero, checkpoint, SLICE_EXP_AVG_SQ, err) &&
           restore_replica_group(zero, checkpoint, known, err);
}

bool zero_restore_residual(Zero *zero, const Checkpoint *checkpoint, SliceKind kind, Error *err) {
    assert(kind == SLICE_RESIDUAL || kind == SLICE_LOCAL_RESIDUAL);
    return zero_node(zero) >= checkpoint_nodes(checkpoint, kind) || restore_kind(zero, checkpoint, kind, err);
}
