// The two implementations of attention on GPUs: attention_cudnn.cpp calls cuDNN, attention_plain.cu
// has this program's own kernels. attention.cu chooses one. Both save the log-sum-exp of each
// query's scaled scores for backward.
#pragma once
#include <math.h>

#include "llmc/cuda/internal.h"
#include "llmc/ops.h"
LLMC_BEGIN

static inline float attention_scale(const Attention *a) { return 1.0f / sqrtf((float)a->HD); }

// Workspace sizes; op_attention_workspace_bytes is the larger one.
size_t attention_plain_workspace_bytes(int B, int T, int NH, int HD);
size_t attention_cudnn_workspace_bytes(int B, int T, int NH, int HD, int groups, bool packed);

// Own kernels. They support any T, any HD that is a multiple of 8 up to 256, and document starts,
// and apply the dropout masks of ops.h. Deterministic.
void attention_plain_forward(Stream *stream, const Attention *a);
void attention_plain_backward(Stream *stream, const Attention *a);

// cuDNN's fused attention. Returns false without doing anything if cuDNN has no plan for this call,
// and warns once per shape. Forward and backward of a shape return the same value. Ends the job if
// a plan fails to run.
//
// Dropout masks come from cuDNN's own random numbers, with a key computed from (seed, site,
// first_sample, first_head). They also depend on B, T, NH and the slices of deterministic mode.
// Forward, recomputed forward and backward therefore use the same masks, but these are not the
// masks of ops.h, and they change with the parallel layout.
bool attention_cudnn_forward(Stream *stream, const Attention *a);
bool attention_cudnn_backward(Stream *stream, const Attention *a);

// Stores seed and offset of cuDNN's dropout in device memory, in stream order. A kernel does this,
// because a copy from pageable host memory would be synchronous.
void attention_store_seed(Stream *stream, int64_t *seed_and_offset, int64_t seed, int64_t offset);

LLMC_END
