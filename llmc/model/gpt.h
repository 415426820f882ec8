// The GPT as a rank holds it: its part of the parameters, the buffers that it works in. What the
// passes do with them is in train_gpt.c. gpt.c makes the table, gpt_memory.c reserves memory.
// Called by train_gpt.c, llmc/run/startup.c and tests.
//
// Letters in shape comments: B micro-batch, T sequence length, C hidden size, NH heads, HD head
// size (A = NH*HD), F ffn size, L layers, V padded vocabulary, P position table. NH, A, F, L and
// the rows of the vocabulary are those of this rank: tensor and pipeline parallelism cut them. R:
// the rows of B*T that this rank holds between products, all of them without --sequence-parallel.
#pragma once
#include "llmc/base/memory_plan.h"
#include "llmc/config/config.h"
#include "llmc/data/loader.h"
#include "llmc/log/timers.h"
#include "llmc/model/pipeline_schedule.h"
#include "llmc/model/tensor_parallel.h"
#include "llmc/ops.h"
#include "llmc/ranks/peers.h"
#include "llmc/state/zero.h"
LLMC_BEGIN

// The tensors of one layer, in Megatron's module order. A model need not have all: see `place`.
enum LayerTensor {
    LN1_W,
    LN1_B,
    QKV_W,
    QKV_B,
    Q_NORM_W,
    Q_NORM_B,
    K_NORM_W,
    K_NORM_B,
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
    floatX *y;           // (R, C)
    float *mean, *rstd;  // (R)
} NormActs;

// What one layer keeps for its backward.
typedef struct LayerActs {
    NormActs ln1, ln2;
    floatX *qkv;          // (B, T, NG, NH / NG + 2, HD), or by kind
    floatX *before_norm;  // (B, T, NG, NH / NG + 1, HD) queries and keys, with qk_norm
    void *att_saved;      // op_attention_saved_bytes
    floatX *att;          // (B, T, A)
    floatX *residual2;    // (R, C) after attention
    floatX *pre;          // (B, T, FC1) before GELU or SwiGLU
    floatX *act;          // (B, T, F) after it
} LayerActs;

// The part of the model that a pipeline stage holds: `chunks` runs of consecutive layers.
typedef struct Stage {
    PipelineShape shape;
    int layers;          // of a chunk
    bool embeds, heads;  // its first chunk begins with the embeddings; its last one ends with the
                         // final LayerNorm and the head
} Stage;

// One forward or backward pass of a micro-batch through a chunk of layers.
typedef enum PassDirection { FORWARD, BACKWARD } PassDirection;
typedef struct Pass {
    PassDirection direction;
    int micro_batch;  // of the step, from 0
    int B, T;         // sequences and their length, at most the planned ones
    int start;        // position of the first token; above 0 only with a KV cache
    int chunk;
    int slot, input, gradient;          // buffers of this pass (pipeline_schedule.h)
    int64_t first_sample;               // global index of the first sequence: key of its dropout
    bool has_doc_start, has_loss_mask;  // uploaded with the batch
    bool training;                      // dropout is on
    bool backward;                      // the LM head also computes its gradients
    bool first, last;   // micro-batch of the step. If gradients accumulate over a step, the first one
                        // overwrites the gradients of matrices, the others add to them, and the
                        // last one tells ZeRO of complete layers (zero_grads_accumulate)
    float loss_scale;   // weight of each token's loss, in loss_sum and in the gradients
    HeadScore *scores;  // host memory, (ranks of tp, B*T): the LM head returns the likelihoods of the
                        // targets here and computes no loss; NULL otherwise
} Pass;

// A micro-batch between its forward and its backward pass through a chunk of layers. A pipeline has
// several under way.
typedef struct MicroBatch {
    int32_t *tokens, *targets, *positions, *doc_start;  // (B, T)
    float *loss_mask;                                   // (B, T)
    floatX **residual;  // (layers + 1) of (R, C): input of each layer; the last one is the output
    floatX *embedded;   // (R, C) the input where that is the embedding; NULL where none is
    LayerActs *acts;    // (layers), or (1) for all slots together when recomputing
    Pass pass;          // what backward goes on with
    int64_t sent;       // the latest message out of this slot's output, of Pipeline.sent_ahead
} MicroBatch;

typedef struct GPT {
    int B, T, C, NH, HD, A, F, L, V, P;  // L: layers of the stage. P: 0 with rotary positions
    int words;                           // of V, the real ids: without padding
    int NG;                              // groups of heads that share keys and values; NH where none does
    int FC1;                             // rows of the MLP's first matrix: F, or 2 F with SwiGLU
    int QKV;                             // elements of a token's queries, keys and values
    bool rms, swiglu, biased, tied;      // RMSNorm; SwiGLU; linears have biases; the head's weights are
                                         // the word embeddings
    bool qk_norm;                        // queries and keys of each head are normalized
    bool by_kind;  // attention's qkv has all queries, then keys, then values: with rotary
                   // positions, which can write it so, where heads share keys
    double rotary_base;
    double rotary_stretch;  // of long wavelengths; 1: none
    int rotary;             // columns of a head that positions turn; 0: learned positions
    Stage stage;
    const Mesh *mesh;
    float epsilon, attention_dropout, hidden_dropout;
    uint32_t seed;
    bool recompute_full;  // layers keep only their input; the rest is computed again in backward
    bool training_warm, evaluation_warm;  // all kernels have been launched once (gpt_needs_warm_up)
    int tensors;
    Tensor *tensor;  // (tensors) WTE, WPE, output layer, layers in order, final LayerNorm: this
                     // rank's parts of those of the stage that the model has. A last stage
                     // that does not embed has a WTE too where that is the output layer
    int below;       // tensors of the stage before its first layer's
    int output;      // the row of the head's weights, of a stage that heads
    int place[LAYER_TENSORS], layer_tensors;  // a tensor's place in its layer, or -1; how many there are
    int whole_tensors;
    Tensor *whole;  // (whole_tensors) of the whole model
    Zero *zero;     // owns weights and gradients
    Stream *stream;
    Timers *timers;
    // device memory, reserved in the memory plan
    int slots;
    MicroBatch *slot;            // (slots)
    int inputs;                  // slots + 1 where the stage receives its input, else 0
    floatX **input;              // (inputs) of (R, C): what the stage before sent
    NormActs lnf;                // the final LayerNorm's
    float *losses;               // (B, T)
    HeadStatistics *statistics;  // (ranks of tp, a chunk's rows) of the head; NULL where there is one rank
    bool has_tasks;              // --eval-tasks
    HeadScore *scores;           // (ranks of tp, a chunk's rows) for them, else NULL
    floatX *branch;              // (B, T, C) what is being added to the residual stream
    floatX *gathered;  // (B, T, C) all rows of what is held by rows; NULL without sequence parallelism
    floatX *dresidual[GRADIENT_SLOTS];  // (R, C) gradient of the stream; one where there is no pipeline
    floatX *dbranch;                    // (R, C) gradient of a branch
    floatX *dx;                         // (B, T, C) gradient of a LayerNorm's output
    float *branch_sum;                  // (C) of the newest branch gradient, for op_bias_gradient
    floatX *dwide;                      // (B, T, max(FC1, QKV))
    floatX *dact;                       // (B, T, F) gradient of SwiGLU's output; then of qkv by kind
    float *turns;                       // (T, rotary) cosines and sines, for op_rope
    floatX *datt;                       // (B, T, A)
    size_t dwide_bytes;
    floatX *logits;  // (V) of one position, for sampling
    int threads;     // of the host, for ops of one row; 0: one
    floatX *cache;   // (L, 2, NG, T, HD) keys and values of a sequence; NULL: training
    TensorParallel tp;
    Pipeline pipeline;
    void *workspace;  // of the linear, attention and head ops
    void *scratch;    // (scratch_bytes) of ops without a workspace
    size_t scratch_bytes;
} GPT;

enum { GPT_WTE = 0, GPT_WPE = 1 };
// The number in the whole model of this rank's layer `layer`, from 0.
int gpt_layer_number(const GPT *gpt, int layer);
// The table's row of a tensor of this rank's layer `layer`; -1 where the model has none.
int gpt_layer_tensor(const GPT *gpt, int layer, enum LayerTensor which);
// The unit of that layer. Unit 0 is that of the word embeddings, where the stage has them.
int gpt_layer_unit(const GPT *gpt, int layer);
bool gpt_has_words(const GPT *gpt);

// The parameter table of this rank's part of the model. What a row is does not depend on the part:
// names, first weights and logical numbers are the whole model's. mesh must outlive it. Free with
// gpt_free.
void gpt_describe(GPT *gpt, const Config *config, const Mesh *mesh);
// Can this backend compute it? Error (EXIT_USAGE) names the flag to change.
bool gpt_check(const GPT *gpt, Error *err);
// Reserves activations and scratch in the memory plan.
void gpt_reserve(GPT *gpt, MemoryPlan *plan);
// The same for a program that trains nothing: what one sequence's forward passes need, and a cache
// of the keys and values of T positions. Of a model that is whole on this rank, described with
// RECOMPUTE_FULL.
void gpt_reserve_inference(GPT *gpt, MemoryPlan *plan);
// Bytes that gpt_reserve reserves under this configuration.
size_t gpt_planned_bytes(const Config *config, const Mesh *mesh);
void gpt_free(GPT *gpt);
// Fills gpt->turns, in device memory. The caller has set gpt->stream.
void gpt_upload_turns(GPT *gpt);

// start.c makes these.
//
// What the GPT works with, once the memory plan is allocated. All must outlive it.
void gpt_start(GPT *gpt, Zero *zero, Device *device, Stream *stream, Timers *timers);
// Megatron's initialization, drawn by the counter RNG: the same weights for any number of ranks and
// on every backend. The ranks of group, which call it together, share their hosts' cores where the
// host draws.
void gpt_init_weights(GPT *gpt, uint64_t seed, Peers group);
// Uploads a micro-batch of B rows of T tokens (B, T at most the planned ones) into a slot.
void gpt_upload(GPT *gpt, int slot, const Batch *batch);

// --- passes --------------------------------------------------------------------------------------

static inline int64_t pass_rows(const Pass *pass) { return (int64_t)pass->B * pass->T; }
// Of those, the rows that this rank holds between products.
Rows gpt_own_rows(const GPT *gpt, const Pass *pass);
// The layers of the pass's chunk, of this rank's: first .. end - 1.
int gpt_first_layer(const GPT *gpt, const Pass *pass);
int gpt_end_layer(const GPT *gpt, const Pass *pass);
// Does the chunk begin with the embeddings, or end with the head?
bool gpt_embeds(const GPT *gpt, const Pass *pass);
bool gpt_heads(const GPT *gpt, const Pass *pass);

// train_gpt.c makes these.
//
// Runs the stage's layers on the uploaded tokens, or on the slot's input. The final LayerNorm's
// output is in gpt->lnf.y; of a stage without a head the stream's new state is in residual[L].
void gpt_forward(GPT *gpt, const Pass *pass);
// Loss of the uploaded targets; *zero_loss_sum += loss_scale * sum. pass->backward: also the
// gradients of the head. Nothing on a stage without it.
void gpt_head(GPT *gpt, const Pass *pass);
// Gradients of everything below the head, in the gradient arena. A stage without a head takes the
// gradient of its output from dresidual, and every stage leaves that of its input there.
void gpt_backward(GPT *gpt, const Pass *pass);
// After the step's last backward pass. Gives the tied embedding's copies one gradient, and hands
// the embeddings' to ZeRO. Collective over mesh->embedding.
void gpt_end_backward(GPT *gpt);

// tied.c makes these, for a pipeline whose first and last stages both hold the words.
//
// On the first stage: adds the head's part of the words' gradient, from the last one.
void gpt_add_head_words(const GPT *gpt);
// After the step's last backward pass: the last stage hands over its part, the first one hands the
// sum back. Nothing where one stage has both. Collective over mesh->embedding.
void gpt_exchange_words(const GPT *gpt);

// tasks.c makes these.
//
// --eval-tasks has micro-batches of shorter sequences. They have as many tokens, so that all but
// attention computes what it always computes: halves of T, as long as they suit cuDNN's attention.
int gpt_shortest(const GPT *gpt);
// The head of a pass that has `scores`. They are there when the stream is synchronized. head: what
// a loss would be made from.
void gpt_head_scores(const GPT *gpt, const Pass *pass, const Head *head);

// --- the passes of a step: micro_batches.c -------------------------------------------------------
//
//   PassSchedule schedule = gpt_schedule(gpt, micro_batches, training);
//   for (Pass pass; gpt_next_pass(&schedule, &pass);) {
//       if (pass.direction == BACKWARD) gpt_backward_pass(gpt, &pass);
//       else { upload micro-batch pass.micro_batch; gpt_forward_pass(gpt, &pass); }
//   }
//   if (training) gpt_end_backward(gpt);
//
// Collective over the ranks of a model replica.

// The order of passes on this rank's pipeline stage: 1F1B, interleaved if a stage has several
// chunks. Without pipeline parallelism: forward and backward of each micro-batch in turn.
typedef struct PassSchedule {
    GPT *gpt;
    PipelineAction *action;  // (actions)
    int actions, next, micro_batches;
    bool training;
} PassSchedule;
PassSchedule gpt_schedule(GPT *gpt, int micro_batches, bool training);
// The next pass; false after the last one, when the schedule's memory has been freed. The caller
// uploads the micro-batch of a forward pass into pass->slot (gpt_upload) and sets the pass's
// samples, masks and loss scale.
bool gpt_next_pass(PassSchedule *schedule, Pass *pass);
// Receives the stage's input, runs its layers and the LM head with the loss, sends the output on.
void gpt_forward_pass(GPT *gpt, const Pass *pass);
// The same backward, for a micro-batch that has been through gpt_forward_pass.
void gpt_backward_pass(GPT *gpt, const Pass *pass);
// Receive, gpt_forward and send of one chunk, without the LM head.
void gpt_stage_forward(GPT *gpt, const Pass *pass);

// Pipelines on GPUs must launch every kernel once before the first step: a kernel's first launch
// may wait for all work that the GPU has been given, and with a receive pending that would be a
// deadlock (llmc/cuda/comm.cu). True if a warm-up is due; *pass is then a forward pass of
// micro-batch 0, to be uploaded by the caller.
bool gpt_needs_warm_up(GPT *gpt, bool training, Pass *pass);
// Runs all kernels of a step on that micro-batch, with a loss scale of 0 and zeros in place of
// received tensors, so that all gradients are 0.
void gpt_warm_up(GPT *gpt, const Pass *pass);

// next_logits.c makes these, for programs that write text.
//
// The logits of the token after ids[0..n), the pads' too, on the host of the last stage: (V). The
// last T tokens are the context. Called by all ranks of one replica.
void gpt_next_logits(GPT *gpt, const int32_t *ids, int64_t n, floatX *logits);
// With a cache (gpt_reserve_inference): runs tokens ids (n) at positions start .. start + n - 1 of
// one sequence. Their keys and values join those of the positions before in the cache. start 0
// begins a sequence anew. start + n is at most T. logits: (V) of the token that follows. Waits.
void gpt_go_on(GPT *gpt, const int32_t *ids, int start, int n, floatX *logits);

LLMC_END
