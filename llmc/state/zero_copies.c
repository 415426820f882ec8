// A Zero's state to the host and back: see the end of zero.h. Called by llmc/checkpoint/.
#include <stdlib.h>
#include <string.h>

#include "llmc/state/zero_inside.h"

// Device address and size of a piece's elements of one kind.
static void *piece_memory(const Zero *zero, int i, SliceKind kind, size_t *bytes) {
    int count;
    const Piece *piece = &zero_pieces(zero, kind, &count)[i];
    const LocalSteps *local = &zero->local;
    *bytes = (size_t)(piece->hi - piece->lo) * (size_t)slice_kind_bytes(kind);
    switch (kind) {
        case SLICE_MASTER: return (local->outer ? local->outer : zero->master) + piece->state_at;
        case SLICE_LOCAL_MASTER: return zero->master + piece->state_at;
        case SLICE_EXP_AVG:
        case SLICE_LOCAL_EXP_AVG: return zero->exp_avg + piece->state_at;
        case SLICE_EXP_AVG_SQ:
        case SLICE_LOCAL_EXP_AVG_SQ: return zero->exp_avg_sq + piece->state_at;
        case SLICE_RESIDUAL: return zero->feedback.memory + piece->state_at;
        case SLICE_OUTER_MOMENTUM: return local->momentum + piece->state_at;
        case SLICE_WEIGHT:
            if (local->narrow) return local->narrow + piece->state_at;
            return zero_piece_weights(zero, piece);
        default: return zero_piece_weights(zero, piece);
    }
}

// Master weights and moments of an offloaded optimizer are on the host already.
static bool on_host(const Zero *zero, SliceKind kind) {
    return zero_offloads(zero) && kind != SLICE_WEIGHT && kind != SLICE_RESIDUAL;
}

bool zero_keeps(const Zero *zero, SliceKind kind) {
    bool local = kind >= SLICE_LOCAL_MASTER && kind <= SLICE_OUTER_MOMENTUM;
    return kind < FIRST_KINDS || (kind == SLICE_RESIDUAL && zero->feedback.on) ||
           (local && zero->config->local_steps > 1);
}

bool zero_saves_piece(const Zero *zero, SliceKind kind, const Piece *piece) {
    bool common = !slice_kind_per_node(kind);
    return zero->tensors[piece->tensor].counted && (!common || zero->mesh->replica_groups.rank == 0);
}

const Piece *zero_pieces(const Zero *zero, SliceKind kind, int *count) {
    if (kind == SLICE_RESIDUAL) {
        *count = zero->feedback.piece_count;
        return zero->feedback.pieces;
    }
    *count = zero_keeps(zero, kind) ? zero->piece_count : 0;
    return zero->pieces;
}

// A rail, or replica groups: there is one of them alone.
int zero_node(const Zero *zero) { return zero->mesh->rail.rank + zero->mesh->replica_groups.rank; }
int zero_nodes(const Zero *zero) { return zero->mesh->rail.size * zero->mesh->replica_groups.size; }

void zero_fetch(Zero *zero, int piece, SliceKind kind, void *host) {
    size_t bytes;
    void *memory = piece_memory(zero, piece, kind, &bytes);
    local_settle(zero);
    zero_weights_wait_all(zero);
    if (!on_host(zero, kind)) copy_to_host(zero->compute, host, memory, bytes);
    stream_synchronize(zero->compute);
    if (on_host(zero, kind)) memcpy(host, memory, bytes);
}

void zero_put(Zero *zero, int piece, SliceKind kind, const void *host) {
    size_t bytes;
    void *memory = piece_memory(zero, piece, kind, &bytes);
    if (on_host(zero, kind)) memcpy(memory, host, bytes);
    else copy_to_device(zero->compute, memory, host, bytes);
    stream_synchronize(zero->compute);
}

void zero_put_weights(Zero *zero, int tensor, const void *host) {
    KeptRun run;
    zero_weights_given(zero);
    for (int w = 0; w < zero->shared.kept.windows; w++) {
        if (!zero_kept_run(zero, tensor, w, &run)) continue;
        copy_to_device(zero->compute, run.memory, (const floatX *)host + run.first,
                       (size_t)run.count * sizeof(floatX));
    }
    stream_synchronize(zero->compute);
}

void *zero_staging(const Zero *zero, uint64_t *bytes) {
    *bytes = zero->staging_bytes;
    return zero->staging;
}

// After the applies of the step that is saved (zero_update's final wait on `last`), and before the
// next step's update, whose forward, backward and reductions run meanwhile. On a stream of its own:
// on `last` the sums of the reductions would wait for gigabytes. The residual cannot wait: these
// reductions write it.
void zero_stage(Zero *zero, int piece, SliceKind kind, void *pinned) {
    if (kind == SLICE_RESIDUAL) {
        zero_fetch(zero, piece, kind, pinned);
        return;
    }
    if (zero->to_copy_count == 0) local_settle(zero);
    if (zero->to_copy_count == 0) lanes_after(zero->lanes, zero->copies, zero->lanes->last);
    if (zero->to_copy_count == zero->to_copy_room) {
        zero->to_copy_room = 2 * zero->to_copy_room + 256;
        size_t bytes = (size_t)zero->to_copy_room * sizeof *zero->to_copy;
        zero->to_copy = (StagedCopy *)xrealloc(zero->to_copy, bytes, "a checkpoint's copies");
    }
    StagedCopy *copy = &zero->to_copy[zero->to_copy_count++];
    copy->pinned = pinned;
    copy->memory = piece_memory(zero, piece, kind, &copy->bytes);
    copy->on_host = on_host(zero, kind);
}

void zero_copy_staged(Zero *zero) {
    if (zero->to_copy_count == 0) return;
    for (int i = 0; i < zero->to_copy_count; i++) {
        const StagedCopy *copy = &zero->to_copy[i];
        if (copy->on_host) offload_copy(zero, zero->copies, copy->pinned, copy->memory, copy->bytes);
        else copy_to_pinned(zero->copies, copy->pinned, copy->memory, copy->bytes);
    }
    event_record(zero->staged, zero->copies);
    zero->to_copy_count = 0;
    zero->copying = true;
}

void zero_staged(Zero *zero) {
    zero_copy_staged(zero);
    event_synchronize(zero->staged);
}

uint64_t zero_own_checkpoint_bytes(const Zero *zero, bool optimizer) {
    uint64_t bytes = 0;
    for (int k = 0; k < SLICE_KINDS; k++) {
        int count = 0;
        SliceKind kind = (SliceKind)k;
        const Piece *pieces = zero_saves(zero, kind, optimizer) ? zero_pieces(zero, kind, &count) : NULL;
        for (int i = 0; i < count; i++) {
            if (!zero_saves_piece(zero, kind, &pieces[i])) continue;
            bytes += (uint64_t)(pieces[i].hi - pieces[i].lo) * (uint64_t)slice_kind_bytes(kind);
        }
    }
    return bytes;
}

uint64_t zero_checkpoint_bytes(const Zero *zero, const Tensor *whole, int count, bool optimizer) {
    uint64_t bytes = 0;
    for (int k = 0; k < SLICE_KINDS; k++) {
        SliceKind kind = (SliceKind)k;
        int copies = slice_kind_per_node(kind) ? zero_nodes(zero) : 1;
        for (int i = 0; i < count && zero_saves(zero, kind, optimizer); i++) {
            if (!slice_kind_holds(kind, whole[i].dims)) continue;
            bytes += (uint64_t)copies * (uint64_t)tensor_whole_elements(&whole[i]) *
                     (uint64_t)slice_kind_bytes(kind);
        }
    }
    return bytes;
}
