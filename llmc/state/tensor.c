// The table of parameters: see tensor.h.
#include "llmc/state/tensor.h"

#include <assert.h>
#include <stdio.h>

#include "llmc/base/dtype.h"

static const struct {
    const char *name;
    int bytes;      // per element
    bool per_node;  // every node has different values
    bool matrices;  // only matrices have this kind
} KINDS[] = {
    [SLICE_MASTER] = {"master", 4, false, false},
    [SLICE_EXP_AVG] = {"exp_avg", 4, false, false},
    [SLICE_EXP_AVG_SQ] = {"exp_avg_sq", 4, false, false},
    [SLICE_WEIGHT] = {"weight", (int)sizeof(floatX), false, false},
    [SLICE_RESIDUAL] = {"residual", 4, true, true},
    [SLICE_LOCAL_MASTER] = {"local_master", 4, true, false},
    [SLICE_LOCAL_EXP_AVG] = {"local_exp_avg", 4, true, false},
    [SLICE_LOCAL_EXP_AVG_SQ] = {"local_exp_avg_sq", 4, true, false},
    [SLICE_LOCAL_WEIGHT] = {"local_weight", (int)sizeof(floatX), true, false},
    [SLICE_OUTER_MOMENTUM] = {"outer_momentum", 4, false, false},
    [SLICE_LOCAL_RESIDUAL] = {"local_residual", 4, true, false},
};
_Static_assert(sizeof KINDS / sizeof *KINDS == SLICE_KINDS, "every kind has a row");

const char *slice_kind_name(SliceKind kind) { return KINDS[kind].name; }
int slice_kind_bytes(SliceKind kind) { return KINDS[kind].bytes; }
bool slice_kind_per_node(SliceKind kind) { return KINDS[kind].per_node; }
bool slice_kind_of_weights(SliceKind kind) { return kind == SLICE_WEIGHT || kind == SLICE_LOCAL_WEIGHT; }
bool slice_kind_of_squares(SliceKind kind) {
    return kind == SLICE_EXP_AVG_SQ || kind == SLICE_LOCAL_EXP_AVG_SQ;
}
bool slice_kind_holds(SliceKind kind, int dims) { return dims > 1 || !KINDS[kind].matrices; }

Tensor tensor_row(const char *name, int64_t rows, int64_t columns, int split, int unit, double std) {
    assert(rows >= 1 && columns >= 0 && split >= -1 && split < 2 && unit >= 0);
    Tensor t = {.dims = columns ? 2 : 1, .split = split, .unit = unit, .std = std, .counted = true};
    snprintf(t.name, sizeof t.name, "%s", name);
    t.whole[0] = t.local[0] = rows;
    t.whole[1] = t.local[1] = columns ? columns : 1;
    return t;
}

// Returns a rank's part of a matrix that tensor parallelism splits along `split`.
static MuonShape muon_part(MuonShape shape, const Tensor *whole, int ranks) {
    bool by_columns = whole->split == 1 && shape.columns == whole->whole[1];
    if (shape.columns == 0) return shape;
    if (by_columns) {
        shape.columns /= ranks;
        shape.column_ranks = ranks;
        return shape;
    }
    if (shape.groups > 1) shape.groups /= ranks;
    else shape.part[0] /= ranks;
    shape.row_ranks = ranks;
    return shape;
}

MuonShape muon_orthogonalized(const MuonShape *shape) {
    MuonShape all = *shape;
    if (!shape->duplicated) return all;
    if (shape->row_ranks) all.groups *= shape->row_ranks;
    if (shape->column_ranks) all.columns *= shape->column_ranks;
    all.row_ranks = all.column_ranks = 0;
    return all;
}

Tensor tensor_part(const Tensor *whole, int rank, int ranks) {
    assert(rank >= 0 && rank < ranks && (whole->split < 0 || whole->whole[whole->split] % ranks == 0));
    Tensor part = *whole;
    part.counted = rank == 0;
    part.muon.duplicated = false;
    if (whole->split < 0 || ranks == 1) return part;
    part.counted = true;
    part.muon = muon_part(whole->muon, whole, ranks);
    part.local[whole->split] = whole->whole[whole->split] / ranks;
    part.offset = rank * part.local[whole->split];
    return part;
}

int64_t tensor_elements(const Tensor *tensor) { return tensor->local[0] * tensor->local[1]; }
int64_t tensor_whole_elements(const Tensor *tensor) { return tensor->whole[0] * tensor->whole[1]; }

bool tensor_holds(const Tensor *tensor, SliceKind kind) {
    return slice_kind_holds(kind, tensor->dims) && !(tensor->muon.columns && slice_kind_of_squares(kind));
}

// Returns the floating-point operations of a Newton-Schulz step on a matrix; 0 with AdamW.
static int64_t orthogonalization_work(const MuonShape *part) {
    MuonShape shape = muon_orthogonalized(part);
    int64_t work = 0, columns = shape.columns;
    for (int i = 0; i < MUON_PARTS; i++) {
        int64_t rows = shape.groups * shape.part[i], m = rows < columns ? rows : columns;
        work += 4 * m * rows * columns + 2 * m * m * m;
    }
    return work;
}

// Number of logical offsets (layout.h) used by one tensor-parallel part of a tensor.
static int64_t positions_of_part(const Tensor *t) { return round_up64(tensor_elements(t), HADAMARD_ORDER); }

static int64_t positions_of_whole(const Tensor *t) {
    int64_t parts = t->split < 0 ? 1 : t->whole[t->split] / t->local[t->split];
    return parts * positions_of_part(t);
}

LayoutTensor *tensors_for_plan(const Tensor *tensors, int count) {
    assert(count >= 1);
    LayoutTensor *out = xcalloc((size_t)count, sizeof *out, "the parameter table");
    int64_t next = 0;
    for (int i = 0; i < count; i++) {
        const Tensor *t = &tensors[i];
        int64_t index = t->split < 0 ? 0 : t->offset / t->local[t->split];
        int64_t first = t->logical + index * positions_of_part(t);
        out[i].numel = tensor_elements(t);
        out[i].matrix = t->dims > 1;
        out[i].unit = t->unit;
        out[i].work = orthogonalization_work(&t->muon);
        out[i].uncounted = !t->counted;
        out[i].before = first - next;
        next = t->logical + positions_of_whole(t);
        out[i].after = next - first - out[i].numel;
    }
    return out;
}

void tensors_number(Tensor *tensors, int count, int ranks) {
    assert(count >= 1 && ranks >= 1);
    int64_t logical = 0;
    for (int i = 0; i < count; i++) {
        tensors[i].number = i;
        tensors[i].logical = logical;
        Tensor part = tensor_part(&tensors[i], 0, ranks);
        logical += positions_of_whole(&part);
    }
}
