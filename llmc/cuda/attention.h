// The two attentions of the CUDA backend. attention.cu chooses, attention_cudnn.cpp calls cuDNN,
// attention_plain.cu has our own kernels. Both keep the same for backward: the log-sum-exp of each
// query's scaled scores.
#pragma once
#include <math.h>

#include "llmc/cuda/internal.h"
#include "llmc/ops.h"
LLMC_BEGIN

// What the scores are multiplied with.
static inline float attention_scale(const Attention *a) { return 1.0f / sqrtf((float)a->HD); }

// Bytes of workspace: op_attention_workspace_bytes is the larger of the two.
size_t attention_plain_workspace_bytes(int B, int T, int NH, int HD);
size_t attention_cudnn_workspace_bytes(int B, int T, int NH, int HD, int groups);

// Our own kernels: any T, any HD that is a multiple of 8 up to 256, document starts, dropout by the
// counter RNG. Deterministic.
void attention_plain_forward(Stream *stream, const Attention *a);
void attention_plain_backward(Stream *stream, const Attention *a);

// cuDNN's fused attention on the same tensors, through strides and without copies. False when it
// has no plan for this call: nothing was done then, and stderr says why, once per shape. Forward
// and backward of one shape answer alike. A plan that was built and fails ends the job.
//
// Dropout's mask comes from cuDNN's own Philox, keyed by (seed, site, first_sample, first_head).
// Inside a call the mask depends on the shape too: B, T, NH, and the slices of deterministic mode.
// So it is the same in forward, in a recomputed forward and in backward, and tensor-parallel ranks
// draw masks of their own. But it is not the mask of ops.h, and another layout draws another one.
bool attention_cudnn_forward(Stream *stream, const Attention *a);
bool attention_cudnn_backward(Stream *stream, const Attention *a);

// Writes two numbers to device memory in stream order: the seed and offset of cuDNN's dropout. A
// kernel, since the host's memory is not pinned.
void attention_store_seed(Stream *stream, int64_t *seed_and_offset, int64_t seed, int64_t offset);

LLMC_END
