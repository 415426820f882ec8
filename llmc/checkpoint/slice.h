// A part of a parameter as stored in checkpoints. Included by checkpoint.h and manifest.h.
#pragma once
#include "llmc/state/tensor.h"
LLMC_BEGIN

// Columns [first, first + count) of a matrix; count 0: all of them.
typedef struct Columns {
    int64_t first, count;
} Columns;

// Elements [lo, hi) of the parameter `tensor`, or of a block of its columns, flattened row by row.
// A vector has one column.
typedef struct Slice {
    const char *tensor;
    SliceKind kind;
    int64_t lo, hi;
    Columns columns;
    int node;  // for per-node kinds; otherwise ignored
} Slice;

LLMC_END
