// Scratch memory of the ops that get no workspace: see scratch.cu. Included by layernorm.cu and embedding.cu.
#pragma once
#include "llmc/cuda/internal.h"
#include "llmc/ops.h"
LLMC_BEGIN

#define OP_SCRATCH_BYTES ((size_t)64 << 20)

// At least `bytes` of GPU memory, aligned to 256 bytes, contents undefined, valid in stream order until the next op asks for it.
// op names the caller in the message that ends the job when more than OP_SCRATCH_BYTES are wanted.
void *op_scratch(Stream *stream, size_t bytes, const char *op);

LLMC_END
