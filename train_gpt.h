// The GPT as train_gpt.cu builds it, for the tests that link the same file without its main().
//
// Letters in shape comments: B micro-batch, T sequence length, C hidden size, NH heads, HD head
// size (A = NH*HD), F ffn size, L layers, V padded vocabulary, P position table.
#pragma once
#include "llmc/data/loader.h"
#include "llmc/ops.h"
#include "llmc/ranks/peers.h"
#include "llmc/state/zero.h"
LLMC_BEGIN

// The tensors of one layer, in Megatron's module order.
enum LayerTensor {
    LN1_W,
    LN1_B,
    QKV_W,
    QKV_B,
    PROJ_W,
    PROJ_B,
    LN2_W,
    LN2_B,
    FC1_W,
    FC1_B,
    FC2_W,
    FC2_B,
    LAYER_TENSORS
};

// What a LayerNorm keeps for its backward.
typedef struct NormActs {
    floatX *y;           // (B, T, C)
    float *mean, *rstd;  // (B, T)
} NormActs;

// What one layer keeps for its backward.
typedef struct LayerActs {
    NormActs ln1, ln2;
    floatX *qkv;                  // (B, T, NH, 3, HD)
    void *att_saved;              // op_attention_saved_bytes
    floatX *att;                  // (B, T, A)
    floatX *residual2;            // (B, T, C) after attention
    floatX *pre;                  // (B, T, F) before GELU
    floatX *gelu;                 // (B, T, F)
} LayerActs;

// The part of the model that a pipeline stage holds: layers [first_layer, end_layer) of the whole.
typedef struct Stage {
    int first_layer, end_layer;
    bool embeds, heads;      // it begins with the embeddings; it ends with the final LayerNorm and the head
} Stage;

typedef struct GPT {
    int B, T, C, NH, HD, A, F, L, V, P;  // L: layers of the stage
    Stage stage;
    float epsilon, attention_dropout, hidden_dropout;
    uint32_t seed;
    bool recompute_full;     // layers keep only their input; the rest is computed again in backward
    int tensors;
    Tensor *tensor;          // (tensors) WTE, WPE, layers in order, final LayerNorm: those of the stage
    Zero *zero;              // owns weights and gradients
    Stream *stream;
    // device memory, reserved in the memory plan
    int32_t *tokens, *targets, *positions, *doc_start;  // (B, T)
    float *loss_mask;        // (B, T)
    floatX **residual;       // (L + 1) of (B, T, C): input of layer l; the last one is the output
    LayerActs *acts;         // (L), or (1) when recomputing
    NormActs lnf;            // the final LayerNorm's
    float *losses;           // (B, T)
    floatX *branch;          // (B, T, C) what is being added to the residual stream
    floatX *dresidual, *dbranch, *dx;  // (B, T, C) gradients of the stream, a branch, a LayerNorm's output
    float *branch_sum;       // (C) of the newest branch gradient, for op_bias_gradient
    floatX *dwide;           // (B, T, max(F, 3A))
    floatX *datt;            // (B, T, A)
    floatX *logits;          // (V) of one position, for sampling
    void *workspace;         // of the linear, attention and head ops
    void *scratch;           // (scratch_bytes) of ops without a workspace
    size_t scratch_bytes;
} GPT;

// One forward or backward pass over the uploaded micro-batch.
typedef struct Pass {
    int B, T;               // rows and tokens of each, at most the planned ones
    int64_t first_sample;   // global number of the first row's sample, which keys dropout
    bool has_doc_start, has_loss_mask;  // uploaded with the batch
    bool training;          // dropout is on
    bool backward;          // gpt_head begins the gradients
    bool first, last;       // of the step's micro-batches. The first overwrites the matrices' gradients,
                            // the others add to them. With the last ZeRO is told as layers complete
    float loss_scale;       // of each target's loss, in loss_sum and in the gradients
} Pass;

enum { GPT_WTE = 0, GPT_WPE = 1 };
// The table's row of a tensor of the stage's layer `layer`, from 0.
int gpt_layer_tensor(const GPT *gpt, int layer, enum LayerTensor which);

// Stage `rank` of a pipeline of `size`, which divides the number of layers (Megatron-LM's
// --pipeline-model-parallel-size).
Stage gpt_stage(const Config *config, int rank, int size);
// The parameter table of one stage of this configuration. What a row is does not depend on the
// stage: names, first weights and logical numbers are the whole model's. Free with gpt_free.
void gpt_describe(GPT *gpt, const Config *config, Stage stage);
// Can this backend compute it? Error (EXIT_USAGE) names the flag to change.
bool gpt_check(const GPT *gpt, Error *err);
// Reserves activations and scratch in the memory plan.
void gpt_reserve(GPT *gpt, MemoryPlan *plan);
// Bytes that gpt_reserve reserves under this configuration.
size_t gpt_planned_bytes(const Config *config);
// Once the memory plan is allocated: what the GPT works with. zero and stream must outlive it.
void gpt_start(GPT *gpt, Zero *zero, Device *device, Stream *stream);
// Megatron's initialisation, drawn by the counter RNG: the same weights for any number of ranks and
// on every backend. The ranks of group, which call it together, share their hosts' cores where the
// host draws.
void gpt_init_weights(GPT *gpt, uint64_t seed, Peers group);
// Uploads a micro-batch of B rows of T tokens (B, T at most the planned ones).
void gpt_upload(GPT *gpt, const Batch *batch);
// Runs the layers on the uploaded tokens: the final LayerNorm's output is in gpt->lnf.y.
void gpt_forward(GPT *gpt, const Pass *pass);
// Loss of the uploaded targets; *zero_loss_sum += loss_scale * sum. pass->backward: also the
// gradients of the head.
void gpt_head(GPT *gpt, const Pass *pass);
// Gradients of everything below the head, in the gradient arena.
void gpt_backward(GPT *gpt, const Pass *pass);
void gpt_free(GPT *gpt);
// The trainer's main() where it was compiled with -Dmain=train_gpt_main. May be called again and
// again: every call is a run of its own. MPI is started and ended by the call, unless it runs
// already.
int train_gpt_main(int argc, char **argv);

LLMC_END
