// Copies of the training state to the host and back, for checkpoints: see the end of zero.h.
#include <assert.h>
#include <string.h>

#include "llmc/state/zero.h"
#include "llmc/state/zero_parts.h"

static const Range *range_of(const Zero *zero, int i, SliceKind kind) {
    int owned;
    assert(i >= 0 && i < zero_held_ranges(zero, kind));
    return &zero_ranges(zero, kind, &owned)[i];
}

static int64_t range_elements(const Range *range) { return range->hi - range->lo; }

static size_t range_bytes(const Range *range, SliceKind kind) {
    return (size_t)range_elements(range) * (size_t)slice_kind_bytes(kind);
}

// Returns the position of a range in a part of the optimizer state.
static int64_t range_start(const Range *range, StatePart part) {
    return part == STATE_EXP_AVG_SQ ? range->squares_at : range->state_at;
}

// Returns true if the optimizer store holds this kind of state. *part: its part.
static bool in_store(const Zero *zero, SliceKind kind, StatePart *part) {
    switch (kind) {
        case SLICE_MASTER:
        case SLICE_LOCAL_MASTER: *part = STATE_MASTER; break;
        case SLICE_EXP_AVG:
        case SLICE_LOCAL_EXP_AVG: *part = STATE_EXP_AVG; break;
        case SLICE_EXP_AVG_SQ:
        case SLICE_LOCAL_EXP_AVG_SQ: *part = STATE_EXP_AVG_SQ; break;
        default: return false;
    }
    return kind != SLICE_MASTER || !zero->outer.outer;
}

// Returns the device address of a range of state that is not in the optimizer store.
static void *range_memory(const Zero *zero, const Range *range, SliceKind kind) {
    const Outer *outer = &zero->outer;
    switch (kind) {
        case SLICE_MASTER: return outer->outer + range->state_at;
        case SLICE_RESIDUAL: return zero->feedback.memory + range->state_at;
        case SLICE_OUTER_MOMENTUM: return outer->momentum + range->state_at;
        case SLICE_LOCAL_RESIDUAL: return outer->residual + range->state_at;
        case SLICE_WEIGHT:
            if (outer->rounded) return outer->rounded + range->state_at;
            return weights_of_range(&zero->base, &zero->weights, range);
        default: return weights_of_range(&zero->base, &zero->weights, range);
    }
}

bool zero_keeps(const Zero *zero, SliceKind kind) {
    assert(kind >= 0 && kind < SLICE_KINDS);
    bool local = kind >= SLICE_LOCAL_MASTER && kind <= SLICE_OUTER_MOMENTUM;
    return kind < FIRST_KINDS || (kind == SLICE_RESIDUAL && feedback_on(&zero->feedback)) ||
           (kind == SLICE_LOCAL_RESIDUAL && zero->outer.feeds) ||
           (local && zero->base.config->local_steps > 1);
}

bool zero_saves_range(const Zero *zero, SliceKind kind, const Range *range) {
    bool common = !slice_kind_per_node(kind);
    const Tensor *tensor = &zero->base.tensors[range->tensor];
    return tensor->counted && tensor_holds(tensor, kind) &&
           (!common || zero->base.mesh->replica_groups.rank == 0);
}

const Range *zero_ranges(const Zero *zero, SliceKind kind, int *count) {
    if (kind == SLICE_RESIDUAL) {
        *count = zero->feedback.range_count;
        return zero->feedback.ranges;
    }
    *count = zero_keeps(zero, kind) ? zero->base.range_count : 0;
    return zero->base.ranges;
}

int zero_held_ranges(const Zero *zero, SliceKind kind) {
    if (kind == SLICE_RESIDUAL) return zero->feedback.range_count;
    return zero_keeps(zero, kind) ? zero->base.held_count : 0;
}

// At most one of rail and replica_groups has several members; it contains a rank of every node. An
// elastic replica group has one state, even if it spans nodes.
int zero_node(const Zero *zero) {
    const Mesh *mesh = zero->base.mesh;
    return zero->base.config->replica_group ? 0 : mesh->rail.rank + mesh->replica_groups.rank;
}
int zero_nodes(const Zero *zero) {
    const Mesh *mesh = zero->base.mesh;
    return zero->base.config->replica_group ? 1 : mesh->rail.size * mesh->replica_groups.size;
}

void zero_fetch(Zero *zero, int i, SliceKind kind, void *host) {
    StatePart part;
    const Range *range = range_of(zero, i, kind);
    Stream *stream = zero->base.compute;
    outer_finish(&zero->base, &zero->outer, &zero->optimizer);
    weights_wait_all(&zero->base, &zero->weights);
    if (in_store(zero, kind, &part)) {
        zero->optimizer.store->read(&zero->optimizer, stream, (float *)host, part, range_start(range, part),
                                    range_elements(range));
    } else {
        copy_to_host(stream, host, range_memory(zero, range, kind), range_bytes(range, kind));
        stream_synchronize(stream);
    }
}

void zero_put(Zero *zero, int i, SliceKind kind, const void *host) {
    StatePart part;
    const Range *range = range_of(zero, i, kind);
    Stream *stream = zero->base.compute;
    if (in_store(zero, kind, &part)) {
        zero->optimizer.store->write(&zero->optimizer, stream, part, range_start(range, part),
                                     (const float *)host, range_elements(range));
    } else {
        copy_to_device(stream, range_memory(zero, range, kind), host, range_bytes(range, kind));
        stream_synchronize(stream);
    }
}

void zero_put_weights(Zero *zero, int tensor, const void *host) {
    assert(tensor >= 0 && tensor < zero->base.layout.tensors && host);
    const Base *base = &zero->base;
    weights_replaced(base, &zero->weights);
    for (int i = 0; i < zero->weights.kept.shards; i++) {
        int64_t first, count;
        floatX *kept = weights_of_tensor(base, &zero->weights, tensor, i, &first, &count);
        if (kept)
            copy_to_device(base->compute, kept, (const floatX *)host + first, (size_t)count * sizeof(floatX));
    }
    stream_synchronize(base->compute);
}

void *zero_staging(const Zero *zero, uint64_t *bytes) {
    *bytes = zero->slices.staging_bytes;
    return zero->slices.staging;
}

// The copies run between the update of the saved step and the next update, and overlap with
// forward, backward and reductions. They have their own stream, because on lanes->last the final
// sums of the reductions would wait for gigabytes of copies. The residual is copied at once,
// because the next reduction overwrites it.
void zero_stage(Zero *zero, int range, SliceKind kind, void *pinned) {
    assert(pinned);
    Slices *s = &zero->slices;
    if (kind == SLICE_RESIDUAL) {
        zero_fetch(zero, range, kind, pinned);
        return;
    }
    if (s->count == 0) outer_finish(&zero->base, &zero->outer, &zero->optimizer);
    if (s->count == 0) lanes_after(zero->base.lanes, s->stream, zero->base.lanes->last);
    if (s->count == s->room) {
        s->room = 2 * s->room + 256;
        s->copy = xrealloc(s->copy, (size_t)s->room * sizeof *s->copy, "a checkpoint's copies");
    }
    s->copy[s->count++] = (StagedCopy){pinned, range_of(zero, range, kind), kind};
}

void zero_copy_staged(Zero *zero) {
    Slices *s = &zero->slices;
    if (s->count == 0) return;
    for (int i = 0; i < s->count; i++) {
        StatePart part;
        const StagedCopy *copy = &s->copy[i];
        const Range *range = copy->range;
        if (in_store(zero, copy->kind, &part))
            zero->optimizer.store->queue(&zero->base, &zero->optimizer, s->stream, copy->pinned, part,
                                         range_start(range, part), range_elements(range));
        else
            copy_to_pinned(s->stream, copy->pinned, range_memory(zero, range, copy->kind),
                           range_bytes(range, copy->kind));
    }
    event_record(s->staged, s->stream);
    s->count = 0;
    s->copying = true;
}

void zero_staged(Zero *zero) {
    zero_copy_staged(zero);
    event_synchronize(zero->slices.staged);
}

uint64_t zero_own_checkpoint_bytes(const Zero *zero, bool optimizer) {
    uint64_t bytes = 0;
    for (int k = 0; k < SLICE_KINDS; k++) {
        int count = 0;
        SliceKind kind = (SliceKind)k;
        const Range *ranges = zero_saves(zero, kind, optimizer) ? zero_ranges(zero, kind, &count) : NULL;
        for (int i = 0; i < count; i++) {
            if (!zero_saves_range(zero, kind, &ranges[i])) continue;
            bytes += (uint64_t)(ranges[i].hi - ranges[i].lo) * (uint64_t)slice_kind_bytes(kind);
        }
    }
    return bytes;
}

uint64_t zero_checkpoint_bytes(const Zero *zero, const Tensor *whole, int count, bool optimizer) {
    assert(count >= 0);
    uint64_t bytes = 0;
    for (int k = 0; k < SLICE_KINDS; k++) {
        SliceKind kind = (SliceKind)k;
        int copies = slice_kind_per_node(kind) ? zero_nodes(zero) : 1;
        for (int i = 0; i < count && zero_saves(zero, kind, optimizer); i++) {
            if (!tensor_holds(&whole[i], kind)) continue;
            bytes += (uint64_t)copies * (uint64_t)tensor_whole_elements(&whole[i]) *
                     (uint64_t)slice_kind_bytes(kind);
        }
    }
    return bytes;
}
