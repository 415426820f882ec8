// Scratch memory of the ops that get no workspace: see scratch.cu. Included by layernorm.cu and
// embedding.cu.
#pragma once
#include "llmc/cuda/internal.h"
LLMC_BEGIN

// At least `bytes` of GPU memory, aligned to 256 bytes, contents undefined, valid in stream order
// until the next op asks for it. op names the caller in the message that ends the job when there is
// less.
void *op_scratch(Stream *stream, size_t bytes, const char *op);

LLMC_END
