// The table of parameters: see tensor.h.
#include "llmc/state/tensor.h"

#include <stdio.h>
#include <stdlib.h>

#include "llmc/base/dtype.h"

const char *slice_kind_name(SliceKind kind) {
    static const char *const names[SLICE_KINDS] = {"master", "exp_avg", "exp_avg_sq", "weight"};
    return names[kind];
}

int slice_kind_bytes(SliceKind kind) { return kind == SLICE_WEIGHT ? (int)sizeof(floatX) : 4; }

Tensor tensor_row(const char *name, int64_t rows, int64_t columns, int split, int unit, double std) {
    Tensor t = {.dims = columns ? 2 : 1, .split = split, .unit = unit, .std = std, .counted = true};
    snprintf(t.name, sizeof t.name, "%s", name);
    t.whole[0] = t.local[0] = rows;
    t.whole[1] = t.local[1] = columns ? columns : 1;
    return t;
}

int64_t tensor_elements(const Tensor *tensor) { return tensor->local[0] * tensor->local[1]; }
int64_t tensor_whole_elements(const Tensor *tensor) { return tensor->whole[0] * tensor->whole[1]; }

// The rounding bits of a cut tensor: each part has positions of its own, part after part.
static void place_in_whole(PlanTensor *row, const Tensor *t) {
    int64_t part = round_up64(row->numel, 32), parts = 1, index = 0;
    if (t->split >= 0) {
        parts = t->whole[t->split] / t->local[t->split];
        index = t->offset / t->local[t->split];
    }
    row->before = index * part;
    row->after = parts * part - row->before - row->numel;
}

PlanTensor *tensors_for_plan(const Tensor *tensors, int count) {
    PlanTensor *out = (PlanTensor *)xcalloc((size_t)count, sizeof *out, "the parameter table");
    for (int i = 0; i < count; i++) {
        out[i].numel = tensor_elements(&tensors[i]);
        out[i].matrix = tensors[i].dims > 1;
        out[i].unit = tensors[i].unit;
        out[i].uncounted = !tensors[i].counted;
        place_in_whole(&out[i], &tensors[i]);
    }
    return out;
}
