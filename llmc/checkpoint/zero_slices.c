// ZeRO's state as slices of a checkpoint: see zero_slices.h.
#include "llmc/checkpoint/zero_slices.h"

#include <stdlib.h>

// Slices come kind by kind, each for all pieces. Without the optimiser the replica's alone.
static const SliceKind kind_order[SLICE_KINDS] = {SLICE_WEIGHT, SLICE_MASTER, SLICE_EXP_AVG,
                                                  SLICE_EXP_AVG_SQ};

Slice slice_of_part(const Tensor *t, SliceKind kind, int64_t lo, int64_t hi) {
    int64_t before = t->split == 0 ? t->offset * t->whole[1] : 0;
    Columns columns = {0, 0};
    if (t->split == 1) columns = (Columns){t->offset, t->local[1]};
    return (Slice){t->name, kind, before + lo, before + hi, columns, 0};
}

ZeroSlices zero_slices(const Zero *zero, bool optimizer) {
    int pieces, kinds = optimizer ? SLICE_KINDS : 1;
    const Piece *piece = zero_pieces(zero, &pieces);
    const Tensor *tensors = zero_tensors(zero, NULL);
    ZeroSlices out = {.count = pieces * kinds};
    out.slices = (Slice *)xcalloc((size_t)out.count + 1, sizeof(Slice), "the checkpoint's slices");
    for (int i = 0; i < out.count; i++) {
        const Piece *p = &piece[i % pieces];
        const Tensor *t = &tensors[p->tensor];
        // One of the ranks that hold the same elements saves them. The others' slices are empty.
        out.slices[i] = slice_of_part(t, kind_order[i / pieces], p->lo, t->counted ? p->hi : p->lo);
    }
    return out;
}

void zero_fetch_slice(void *context, int i, void *host) {
    Zero *zero = (Zero *)context;
    int pieces;
    zero_pieces(zero, &pieces);
    zero_fetch(zero, i % pieces, kind_order[i / pieces], host);
}

void zero_stage_slice(void *context, int i, void *pinned) {
    Zero *zero = (Zero *)context;
    int pieces;
    zero_pieces(zero, &pieces);
    zero_stage(zero, i % pieces, kind_order[i / pieces], pinned);
}

void zero_slices_staged(void *context) { zero_staged((Zero *)context); }

// Host memory that holds the slice, for free(); NULL with the error of checkpoint_read.
static void *read_slice(const Checkpoint *checkpoint, Slice slice, Error *err) {
    size_t bytes = (size_t)(slice.hi - slice.lo) * (size_t)slice_kind_bytes(slice.kind);
    void *host = xmalloc(bytes, "a checkpoint slice");
    if (checkpoint_read(checkpoint, &slice, host, err)) return host;
    free(host);
    return NULL;
}

static bool restore_weights(Zero *zero, const Checkpoint *checkpoint, Error *err) {
    int count;
    const Tensor *tensors = zero_tensors(zero, &count);
    for (int i = 0; i < count; i++) {
        void *host = read_slice(
            checkpoint, slice_of_part(&tensors[i], SLICE_WEIGHT, 0, tensor_elements(&tensors[i])), err);
        if (!host) return false;
        zero_put_weights(zero, i, host);
        free(host);
    }
    return true;
}

bool zero_restore(Zero *zero, const Checkpoint *checkpoint, bool optimizer, Error *err) {
    if (!restore_weights(zero, checkpoint, err)) return false;
    if (!optimizer) {
        zero_masters_from_weights(zero);
        return true;
    }
    int pieces;
    const Piece *piece = zero_pieces(zero, &pieces);
    const Tensor *tensors = zero_tensors(zero, NULL);
    for (int i = 0; i < pieces; i++) {
        for (int kind = SLICE_MASTER; kind <= SLICE_EXP_AVG_SQ; kind++) {
            Slice slice = slice_of_part(&tensors[piece[i].tensor], (SliceKind)kind, piece[i].lo, piece[i].hi);
            void *host = read_slice(checkpoint, slice, err);
            if (!host) return false;
            zero_put(zero, i, (SliceKind)kind, host);
            free(host);
        }
    }
    return true;
}
