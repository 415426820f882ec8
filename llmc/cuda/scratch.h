// Scratch memory of ops without a workspace: see scratch.cu. Included by layernorm.cu,
// embedding.cu.
#pragma once
#include "llmc/cuda/internal.h"
LLMC_BEGIN

// Returns at least `bytes` of GPU memory, 256-byte aligned and undefined, valid in stream order
// until the next op calls it. op: name for the fatal error if it is too small.
void *op_scratch(Stream *stream, size_t bytes, const char *op);

LLMC_END
