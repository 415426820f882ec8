// Description of a tensor for the bucket layout. Used by layout.h and layout_whole.h.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

typedef struct LayoutTensor {
    int64_t numel;          // elements held by this rank
    bool matrix;            // 2-D or more: quantized, with weight decay; 1-D tensors go to the tail
    int unit;               // index in forward order: 0 for embeddings, then one per transformer
                            // layer; non-decreasing over the tensors
    int64_t before, after;  // elements of the same tensor that other ranks hold, before and after
                            // this rank's part; before: a multiple of 32
    int64_t work;           // > 0: one rank must own the whole matrix, and spends this work on it
    bool uncounted;         // duplicate: another rank holds the same elements and counts their norm
} LayoutTensor;

LLMC_END
