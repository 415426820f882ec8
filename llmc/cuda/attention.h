// The two attentions of the CUDA backend: attention_cudnn.cpp calls cuDNN, attention_plain.cu has
// this program's own kernels, attention.cu chooses. Both save the log-sum-exp of each query's
// scaled scores for backward.
#pragma once
#include <math.h>

#include "llmc/cuda/internal.h"
#include "llmc/ops.h"
LLMC_BEGIN

// Factor of the scores.
static inline float attention_scale(const Attention *a) { return 1.0f / sqrtf((float)a->HD); }

// Workspace bytes; op_attention_workspace_bytes is the larger of the two.
size_t attention_plain_workspace_bytes(int B, int T, int NH, int HD);
size_t attention_cudnn_workspace_bytes(int B, int T, int NH, int HD, int groups);

// Own kernels: any T, HD a multiple of 8 up to 256, document starts, counter-based dropout.
// Deterministic.
void attention_plain_forward(Stream *stream, const Attention *a);
void attention_plain_backward(Stream *stream, const Attention *a);

// cuDNN's fused attention, in place through strides. Returns false, having done nothing, if it has
// no plan for this call, and warns once per shape; forward and backward of a shape return the same.
// If a plan fails to run, the job ends.
//
// Dropout masks come from cuDNN's own Philox, keyed by (seed, site, first_sample, first_head), and
// also depend on B, T, NH and the slices of deterministic mode. So they agree between forward,
// recomputed forward and backward, and differ between tensor-parallel ranks; but they are not the
// masks of ops.h, and change with the layout.
bool attention_cudnn_forward(Stream *stream, const Attention *a);
bool attention_cudnn_backward(Stream *stream, const Attention *a);

// Stores seed and offset of cuDNN's dropout in device memory in stream order, by a kernel because
// host memory is not pinned.
void attention_store_seed(Stream *stream, int64_t *seed_and_offset, int64_t seed, int64_t offset);

LLMC_END
