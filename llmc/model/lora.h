// LoRA (arXiv 2106.09685): the model's weights W are frozen, and low-rank adapters A (rank, in) and
// B (out, rank) are trained:
//
//   y = x W^T + (alpha / rank) (x A^T) B^T
//
// The adapters are the run's parameter table: gradients, optimizer state and communication exist
// only for them. Every rank holds the whole frozen weights of its pipeline stage. A matrix of the
// model that fuses several of PEFT's (queries, keys and values; gate and up projection) has one A
// for all of them.
//
//   lora.c      frozen weights
//   adapters.c  parameter table and passes of the adapters
//
// Included by gpt.h.
#pragma once
#include "llmc/base/memory_plan.h"
#include "llmc/config/config.h"
#include "llmc/ops.h"
#include "llmc/state/tensor.h"
LLMC_BEGIN

struct GPT;
struct Pass;

// The frozen weights. With --lora-base-format int8 or nf4, the matrices of the layers are
// quantized, and each is dequantized before a GEMM reads it.
typedef struct FrozenTensor {
    bool quantized;
    int64_t elements;
    floatX *weight;  // device memory, unless quantized
    uint8_t *codes;  // device memory, if quantized
    floatX *scales;
} FrozenTensor;
typedef struct Frozen {
    FrozenFormat format;
    bool loaded;  // from a checkpoint, so gpt_init_weights keeps them
    int tensors;
    FrozenTensor *tensor;  // (tensors) of gpt->tensor; NULL without LoRA
    floatX *matrix;        // device memory: the quantized matrix in use
} Frozen;
// Reserves the weights in the memory plan. Matrices from tensor `first` on are quantized.
void frozen_reserve(Frozen *frozen, FrozenFormat format, const Tensor *tensors, int count, int first,
                    MemoryPlan *plan);
void frozen_free(Frozen *frozen);
// Copies a tensor from host memory, and quantizes it. Blocks until done.
void frozen_put(const Frozen *frozen, int tensor, const floatX *host, Stream *stream);
// Returns the weights of a tensor. A quantized matrix is valid from frozen_use to the next call.
static inline floatX *frozen_weight(const Frozen *frozen, int tensor) {
    const FrozenTensor *t = &frozen->tensor[tensor];
    return t->quantized ? frozen->matrix : t->weight;
}
// Dequantizes a tensor if it is quantized.
void frozen_use(const Frozen *frozen, int tensor, Stream *stream);
// Quantizes n values, rounded to the nearest code. NaN or infinity in a group makes the group NaN.
void frozen_quantize(FrozenFormat format, const floatX *values, int64_t n, uint8_t *codes, floatX *scales);

enum { LORA_LINEARS = 4 };  // LAYER_LINEARS

// The adapters.
typedef struct Lora {
    int rank;     // 0: no LoRA
    int targets;  // LORA_* bits: linears with adapters
    float scale, dropout;
    int place[LORA_LINEARS];     // index of A among the adapters of a layer; B follows
    int layer_tensors;           // per layer
    int tensors, whole_tensors;  // parameter tables of the adapters, like the GPT's
    Tensor *tensor, *whole;
    Frozen frozen;
    // Device memory: a linear's input (N, widest) after dropout, x A^T (N, rank) and its gradient,
    // and the adapter's part of y or dx (N, widest)
    floatX *input, *low, *dlow, *sum;
} Lora;

// The parameters that a run trains: the adapters, or without LoRA the whole model.
typedef struct Parameters {
    const Tensor *tensor, *whole;  // of this rank, and of the unsplit model
    int tensors, whole_tensors;
} Parameters;
Parameters gpt_trained(const struct GPT *gpt);
// Number of frozen parameters of the whole model and of this rank's part of it; 0 without LoRA.
typedef struct FrozenCount {
    int64_t whole, own;
} FrozenCount;
FrozenCount gpt_frozen_parameters(const struct GPT *gpt);

// Builds the adapters' tables. No-op without --lora-rank, like the next functions. Called by
// gpt_describe.
void lora_describe(struct GPT *gpt, const Config *config);
// Reserves frozen weights and scratch buffers.
void lora_reserve(struct GPT *gpt, MemoryPlan *plan);
void lora_free(Lora *lora);
// Computes the adapter's part of the output of linear `which` (LayerLinear) of layer l, which
// op_linear_forward then adds: sets a->add. Also makes the frozen matrix ready, as lora_backward.
void lora_forward(const struct GPT *gpt, const struct Pass *pass, int l, int which, Linear *a);
// Computes the adapter's gradients and its part of dx: sets a->dx_add. a->x must be the linear's
// input.
void lora_backward(const struct GPT *gpt, const struct Pass *pass, int l, int which, Linear *a);

LLMC_END
