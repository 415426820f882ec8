// One rank's part of the GPT: parameter table, activation buffers and the forward and backward
// passes.
//
//   gpt.c              parameter table
//   gpt_memory.c       buffers in the memory plan
//   gpt_init.c         startup, initial weights, batch upload
//   transformer.c      forward and backward of the layers
//   lora.c, adapters.c frozen weights and adapters of LoRA (lora.h)
//   fp8_linear.c       linear layers in FP8
//   fp8_scaling.c      scales and histories of delayed scaling
//   tensor_parallel.c  reductions and gathers of tensor and sequence parallelism
//                      (tensor_parallel.h)
//   tensor_codes.c     the same in 8 bits
//   micro_batches.c    the passes of a step in pipeline order
//   stage_messages.c   messages between pipeline stages
//   tied_embedding.c   gradient of tied embeddings across pipeline stages
//   lm_head.c          LM head and loss, log-likelihoods for --eval-tasks
//   next_logits.c      logits of the next token, for sampling
//
// Called by train_gpt.c, llmc/run, dev/ and tests.
//
// Letters in shape comments:
//   B   sequences per micro-batch      C   hidden size
//   T   sequence length                F   FFN size
//   NH  attention heads                L   layers
//   HD  head size; A = NH*HD           V   padded vocabulary
//   P   rows of the position table     R   rows that a rank holds between GEMMs: B*T, or an equal
//                                          block of them with --sequence-parallel
// NH, A, F, L and the vocabulary rows are this rank's part under tensor and pipeline parallelism.
#pragma once
#include "llmc/comm.h"
#include "llmc/base/memory_plan.h"
#include "llmc/config/config.h"
#include "llmc/data/loader.h"
#include "llmc/log/timers.h"
#include "llmc/model/lora.h"
#include "llmc/model/pipeline_schedule.h"
#include "llmc/model/tensor_parallel.h"
#include "llmc/ops_fp8.h"
#include "llmc/ranks/peers.h"
#include "llmc/state/fp8_state.h"
#include "llmc/state/zero.h"
#include "sdp4bit/activations.h"
LLMC_BEGIN

// --- state of FP8 linear layers (functions below) ------------------------------------------------

// A layer's linears. Each has three operands that are quantized with scales of their own.
typedef enum LayerLinear { LINEAR_QKV, LINEAR_PROJ, LINEAR_FC1, LINEAR_FC2, LAYER_LINEARS } LayerLinear;
typedef enum Fp8Operand { FP8_INPUT, FP8_WEIGHT, FP8_GRADIENT, FP8_OPERANDS } Fp8Operand;

// A quantized matrix in device memory.
typedef struct Fp8Codes {
    uint8_t *codes;
    float *block_scales;  // blockwise recipe only
} Fp8Codes;

// Quantized weights of a linear: w (OC, C) for y, and transposed (C, OC) for dx.
typedef struct Fp8Weight {
    Fp8Codes w, transposed;
} Fp8Weight;

typedef struct Fp8 {
    bool on;
    int recipe;      // enum Fp8Recipe
    int first, end;  // the whole model's layers first .. end - 1 run in FP8
    Fp8Type type[FP8_OPERANDS];
    Fp8Blocks blocks[FP8_OPERANDS];
    // Scales of all layers of the model, of which this rank uses its own: fp8_scale_index
    int scales;
    Fp8Scale *scale;  // (scales)
    // Delayed recipe only:
    Fp8Scale *all;    // (ranks, scales) the scales of all ranks of mesh_status_group
    float *history;   // (scales, history_length) largest absolute values of past steps, oldest first
    uint8_t *format;  // (scales) Fp8Type
    int history_length, margin;
    bool most_recent;   // scales follow the newest entry of the history, else the largest
    bool calibrates;    // histories are empty: the first micro-batch sets its own scales
    Fp8Weight *weight;  // (L, LAYER_LINEARS); (1, LAYER_LINEARS) if the weights are sharded
    bool weight_shared;
    // Scratch: operands of the current linear.
    Fp8Codes input;                 // (N, C)
    Fp8Codes input_t;               // (C, N) only if fp8_gathers
    uint32_t *maxima;               // (TP ranks) only if fp8_gathers
    Fp8Codes gradient, gradient_t;  // (N, OC), (OC, N)
} Fp8;

// --- the model -----------------------------------------------------------------------------------

// All tensors that a layer may have, in Megatron-LM's module order. GPT.place shows which of them
// the model has.
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

// Activations that a LayerNorm saves for backward.
typedef struct NormActs {
    floatX *y;           // (R, C); NULL in FP8 layers, which use GPT.norm_output
    float *mean, *rstd;  // (R)
} NormActs;

// Activations that a layer saves for backward.
typedef struct LayerActs {
    NormActs ln1, ln2;
    floatX *qkv;          // (B, T, NG, NH / NG + 2, HD), or all Q, then K, then V (GPT.by_kind)
    floatX *before_norm;  // (B, T, NG, NH / NG + 1, HD) Q and K before qk_norm
    void *att_saved;      // op_attention_saved_bytes
    floatX *att;          // (B, T, A)
    floatX *residual2;    // (R, C) after attention
    floatX *pre;          // (B, T, FC1) before GELU or SwiGLU
    floatX *act;          // (B, T, F) after GELU or SwiGLU; NULL in FP8 layers
    // FP8 layers keep the inputs of their linears only as codes, for the weight gradients.
    Fp8Codes input[LAYER_LINEARS];  // (C, B * T) transposed input; (R, C) of QKV and FC1 if fp8_gathers
    Fp8Scale *input_scale;          // (LAYER_LINEARS) tensorwise recipe only
} LayerActs;

// A pipeline stage: `chunks` chunks of consecutive layers.
typedef struct Stage {
    PipelineShape shape;
    int layers;   // number of layers per chunk
    bool embeds;  // the first chunk starts with the embeddings
    bool heads;   // the last chunk ends with the final norm and the LM head
} Stage;

// One forward or backward pass of a micro-batch through a chunk of layers.
typedef enum PassDirection { FORWARD, BACKWARD } PassDirection;
typedef struct Pass {
    PassDirection direction;
    int micro_batch;  // index within the step
    int B, T;         // number of sequences and their length, at most GPT.B and GPT.T
    int start;        // position of the first token; nonzero only with a KV cache
    int chunk;
    int slot, input, gradient;          // buffers of this pass (pipeline_schedule.h)
    int64_t first_sample;               // global index of the first sequence; seeds dropout
    bool has_doc_start, has_loss_mask;  // whether the batch has document starts and a loss mask
    int sequences;                      // of packed attention, 0: none
    bool training;                      // dropout is on, and linears of FP8 layers run in FP8
    bool backward;                      // the LM head also computes its gradients
    bool first, last;    // first or last micro-batch of the step. If gradients accumulate over a step
                         // (zero_grads_accumulate), the first micro-batch overwrites the gradients
                         // of matrices, and the last one hands complete layers to ZeRO
    float loss_scale;    // weight of each token's loss, in loss_sum and in the gradients
    float report_scale;  // weight in loss_sum only, if not 0
    HeadScore *scores;   // (TP ranks, B*T) host memory. If not NULL, the LM head writes statistics
                         // for the log-likelihoods of the targets here instead of computing the
                         // loss
} Pass;

// Buffers that a micro-batch occupies from its forward pass through a chunk until its backward
// pass. Pipelines have several micro-batches in flight, so a GPT has several of these slots.
typedef struct MicroBatch {
    int32_t *tokens, *targets, *positions, *doc_start;  // (B, T)
    float *loss_mask;                                   // (B, T)
    void *packed;       // op_attention_pack_bytes: the sequences of the batch, or NULL
    int sequences;      // Attention.sequences
    floatX **residual;  // (layers + 1) of (R, C): input of each layer; the last one is the output
    floatX *embedded;   // (R, C) output of the embedding; NULL on stages without it
    LayerActs *acts;    // (layers); with full recomputation (1), shared by all slots
    Pass pass;          // the forward pass, which the backward pass copies
    int64_t sent;       // value of Pipeline.sent_ahead after the latest send of this slot's output
} MicroBatch;

// Messages that pipeline stages send in one direction: hidden states to the next stage, or their
// gradients to the previous one. Training passes quantize them if `quantized` is set. Evaluation
// always sends bf16, so that losses measure the model and not the messages.
enum { MESSAGES_EXPECTED = 2 };  // receives that may be posted before the first is decoded
typedef struct StageMessages {
    ActivationFormat format;
    bool quantized;
    MessageLayout layout;            // of a quantized message
    int sends;                       // 0: this stage sends nothing in this direction
    uint8_t **out;                   // (sends) messages of GPT.slot, or of GPT.dresidual
    uint8_t *in[MESSAGES_EXPECTED];  // received messages, in turn; NULL: this stage receives nothing
    int64_t expected, arrived;       // numbers of messages
} StageMessages;

// Scaling of rotary frequencies with --position-embedding-type yarn. factor 0: not used.
typedef struct Yarn {
    double factor, positions;  // the context was `positions` long before and is now factor times that
    double fast, slow;         // turns in the original context above | below which the frequency is
                               // kept | divided by factor
    double gain;               // factor of cosines and sines
    bool rounded;              // to whole columns
} Yarn;

typedef struct GPT {
    int B, T, C, NH, HD, A, F, L, V, P;  // L: layers of the stage. P: 0 with rotary positions
    int words;                           // vocabulary size without padding
    int NG;                              // query groups (GQA); NH for plain multi-head attention
    int FC1;                             // rows of the MLP's first matrix: F, or 2 F with SwiGLU
    int QKV;                             // elements of a token's queries, keys and values
    bool rms, swiglu;                    // RMSNorm instead of LayerNorm, SwiGLU instead of GELU
    bool biased;                         // linear layers have biases
    bool qkv_biased;                     // the linear layer of queries, keys and values has one
    bool tied;                           // the LM head shares the word embeddings
    bool documents, packs;               // tokens attend only to their document; attention packs it
    bool qk_norm;                        // per-head norm of queries and keys
    bool by_kind;                        // qkv holds all queries, then all keys, then all values;
                                         // op_rope writes this layout for models with RoPE and GQA
    double rotary_base;
    int *window;                  // (num_layers) keys that a query sees, see gpt_window
    double rotary_stretch;        // --rope-scaling-factor; 1: no scaling
    double rotary_interpolation;  // --rotary-seq-len-interpolation-factor; 1: none
    Yarn yarn;
    int rotary;  // rotated columns of a head; 0: learned positions
    Stage stage;
    const Mesh *mesh;
    float epsilon, attention_dropout, hidden_dropout;
    uint32_t seed;
    bool recompute_full;                  // layers save only their input; backward recomputes the rest
    bool training_warm, evaluation_warm;  // all kernels have been launched once (gpt_needs_warm_up)
    int tensors;
    Tensor *tensor;            // (tensors) this rank's shards of the stage's tensors: WTE, WPE, output layer,
                               // layers in order, final norm. With tied embeddings the last stage
                               // also has a WTE
    int below;                 // number of tensors before the first layer
    int output;                // index of the LM head's weights, on the stage that has the LM head
    int place[LAYER_TENSORS];  // index of each tensor within its layer; -1 if the model lacks it
    int layer_tensors;         // number of tensors per layer
    int whole_tensors;
    Tensor *whole;  // (whole_tensors) parameter table of the unsplit model
    Lora lora;
    Zero *zero;  // owns weights and gradients; with LoRA the adapters'
    Stream *stream;
    Timers *timers;
    // Device memory, reserved in the memory plan:
    int slots;
    MicroBatch *slot;            // (slots)
    int inputs;                  // slots + 1 if the stage receives hidden states, else 0
    floatX **input;              // (inputs) of (R, C): hidden states received from the previous stage
    NormActs lnf;                // final norm
    float *losses;               // (B, T)
    HeadStatistics *statistics;  // (TP ranks, rows of an LM head chunk) only with tensor parallelism
    bool has_tasks;              // --eval-tasks
    HeadScore *scores;           // (TP ranks, rows of an LM head chunk) only with --eval-tasks
    Fp8 fp8;
    floatX *norm_output;                // (R, C) output of the norms of FP8 layers
    floatX *branch;                     // (B, T, C) output of attention or MLP, added to the residual stream
    floatX *gathered;                   // (B, T, C) all-gathered rows; only with sequence parallelism
    floatX *dresidual[GRADIENT_SLOTS];  // (R, C) gradient of the residual stream; only [0] is used
                                        // without pipeline parallelism
    floatX *dbranch;                    // (R, C) gradient of a branch
    floatX *dx;                         // (B, T, C) gradient of a LayerNorm's output
    float *branch_sum;                  // (C) branch gradient summed over its rows (op_bias_gradient)
    floatX *dwide;                      // (B, T, max(FC1, QKV)) gradient of `pre` or of qkv
    floatX *dact;                       // (B, T, F) gradient of SwiGLU's output, then of qkv if by_kind
    float *rope_table;                  // (T, rotary) cosines and sines, for op_rope
    floatX *datt;                       // (B, T, A) gradient of the attention output
    size_t dwide_bytes;
    floatX *logits;  // (V) logits of one position, for sampling
    int threads;     // Linear.threads: host threads for generation on CPUs; 0 means one
    floatX *cache;   // (L, 2, NG, T, HD) KV cache of one sequence; NULL in training
    TensorParallel tp;
    Pipeline pipeline;
    StageMessages messages[2];  // by PassDirection
    ActivationScratch message_scratch;
    void *workspace;  // workspace of the linear, attention and LM head ops
    void *scratch;    // (scratch_bytes) for ops without a workspace
    size_t scratch_bytes;
} GPT;

enum { GPT_WTE = 0, GPT_WPE = 1 };
// Converts the index of a layer on this rank to its index in the whole model.
int gpt_layer_number(const GPT *gpt, int layer);
// Returns the index in gpt->tensor of a tensor of this rank's layer `layer`; -1: there is none.
int gpt_layer_tensor(const GPT *gpt, int layer, enum LayerTensor which);
// Returns the number of keys that a query of this rank's layer `layer` sees; 0: all.
int gpt_window(const GPT *gpt, int layer);
// Returns the flag because of which sequences are not packed for attention, or NULL.
const char *gpt_unpacked(const GPT *gpt, const Config *config);
// Returns the ZeRO unit of a layer. Unit 0 is the word embeddings if the stage trains them.
int gpt_layer_unit(const GPT *gpt, int layer);
// Returns true if this stage trains the embeddings or the LM head.
bool gpt_trains_words(const GPT *gpt);
// Return weights and gradient of gpt->tensor[tensor]. The gradient of frozen weights is NULL.
static inline floatX *gpt_weight(const GPT *gpt, int tensor) {
    return gpt->lora.rank ? frozen_weight(&gpt->lora.frozen, tensor) : zero_weight(gpt->zero, tensor);
}
static inline float *gpt_grad(const GPT *gpt, int tensor) {
    return gpt->lora.rank ? NULL : zero_grad(gpt->zero, tensor);
}

// Fills in the sizes and the parameter table of this rank. Names and initial values of tensors do
// not depend on how the model is split. Keeps a pointer to mesh. Free with gpt_free.
void gpt_describe(GPT *gpt, const Config *config, const Mesh *mesh);
// Returns true if the backend supports the model's shapes. The error (EXIT_USAGE) names the flag to
// change.
bool gpt_check(const GPT *gpt, Error *err);
// Reserves activations and scratch buffers for training in the memory plan.
void gpt_reserve(GPT *gpt, MemoryPlan *plan);
// Reserves buffers for generation: the forward pass of one sequence, and a KV cache of T positions.
// The model must be unsplit and described with RECOMPUTE_FULL.
void gpt_reserve_inference(GPT *gpt, MemoryPlan *plan);
// Plans the rank that `mesh` describes: its part of the model (gpt), its bucket layout (the result)
// and every buffer that it allocates (memory_plan). Needs no device. mesh must outlive the result.
// gpt may be NULL; otherwise free it with gpt_free, even after an error. Returns NULL with the
// error of gpt_check or zero_plan if the configuration cannot run.
Zero *gpt_plan(GPT *gpt, const Config *config, const Mesh *mesh, MemoryPlan *memory_plan, Error *err);
// Returns the bytes that gpt_reserve would reserve.
size_t gpt_planned_bytes(const Config *config, const Mesh *mesh);
void gpt_free(GPT *gpt);
// Computes gpt->rope_table and uploads it. gpt->stream must be set.
void gpt_upload_rope_table(GPT *gpt);

// --- gpt_init.c ----------------------------------------------------------------------------------

// Attaches the GPT to ZeRO, device, stream and timers, all of which must outlive it. Call after the
// memory plan has been allocated.
void gpt_start(GPT *gpt, Zero *zero, Device *device, Stream *stream, Timers *timers);
// Initializes the weights, except loaded frozen ones, from Megatron-LM's distributions, with a
// counter-based RNG: bitwise identical for any number of ranks and on every backend. group: ranks
// that initialize at the same time; on CPUs, they share a host's cores. Collective over group.
void gpt_init_weights(GPT *gpt, uint64_t seed, Peers group);
// Uploads a micro-batch of gpt->B * gpt->T tokens into a slot.
void gpt_upload(GPT *gpt, int slot, const Batch *batch);

// --- transformer.c -------------------------------------------------------------------------------

static inline int64_t pass_rows(const Pass *pass) { return (int64_t)pass->B * pass->T; }
// Returns the rows of the pass that this rank holds between GEMMs.
Rows gpt_own_rows(const GPT *gpt, const Pass *pass);
// The chunk of a pass has this rank's layers gpt_first_layer .. gpt_end_layer - 1.
int gpt_first_layer(const GPT *gpt, const Pass *pass);
int gpt_end_layer(const GPT *gpt, const Pass *pass);
// gpt_embeds: the chunk starts with the embeddings. gpt_heads: it ends with the LM head.
bool gpt_embeds(const GPT *gpt, const Pass *pass);
bool gpt_heads(const GPT *gpt, const Pass *pass);

// Runs the layers of a chunk on the uploaded tokens, or on the hidden states received from the
// previous stage. The output is gpt->lnf.y (after the final norm) if the chunk ends with the LM
// head, else the last residual[] of the slot.
void gpt_forward(GPT *gpt, const Pass *pass);
// Backpropagates through the chunk, from the gradients of gpt_head or, if the LM head is in a later
// chunk, from the output's gradient in dresidual. Leaves the input's gradient in dresidual.
void gpt_backward(GPT *gpt, const Pass *pass);
// Sums the gradients of tied embeddings over the first and last stage and hands the embedding
// gradients to ZeRO, and gathers the maxima for delayed FP8 scales. Call after the step's last
// backward pass.
// Collective over mesh->embedding, and with delayed scales over mesh_status_group.
void gpt_end_backward(GPT *gpt);

// --- fp8_linear.c: linear layers in FP8 ----------------------------------------------------------
//
// FP8 layers run the three GEMMs of their four linears in FP8 (Megatron-LM's --fp8-format). An
// operand is quantized by one function and used by the next GEMMs:
//
//   fp8_quantize_input      x: codes for y = x w^T, transposed codes for dw. Also saves the latter.
//   fp8_linear_forward      y; quantizes the weights first, once per step
//   fp8_quantize_gradient   dy: codes for dx = dy w, transposed codes for dw = dy^T x
//   fp8_linear_backward     dx and dw
//
// Model weights stay bf16. All ranks with the same weights compute the same codes, so that nothing
// else of the run depends on FP8.

// Sets gpt->fp8 from the config.
void fp8_describe(GPT *gpt, const Config *config);
// Returns true if the linears of this rank's layer l run in FP8 in this pass: only in training.
bool fp8_layer(const GPT *gpt, const Pass *pass, int l);
// Returns true if layer l is an FP8 layer, for the memory plan.
bool fp8_planned(const GPT *gpt, int l);
// Reserve what FP8 needs in the memory plan: of a layer's activations, and of the whole rank.
void fp8_reserve_layer(const GPT *gpt, LayerActs *acts, MemoryPlan *plan);
void fp8_reserve(GPT *gpt, MemoryPlan *plan);
// Returns where the op that computes an operand accumulates its absolute maximum (tensorwise
// recipe), which saves a pass over the operand. NULL: not needed.
uint32_t *fp8_absmax(const GPT *gpt, const Pass *pass, int l, LayerLinear which, Fp8Operand operand);
// Quantizes the input of a linear: x (N, C), or a function of it. No-op in bf16 layers.
void fp8_quantize_input(const GPT *gpt, const Pass *pass, int l, LayerLinear which, const Linear *a,
                        const floatX *x, Fp8Source source);
// Returns true if sequence parallelism gathers codes instead of bf16: half the bytes. The blockwise
// recipe gathers bf16, because its transposed blocks span the rows of several ranks.
bool fp8_gathers(const GPT *gpt, const Pass *pass, int l);
// Quantize this rank's rows `own` (R, C) with a scale for the rows of all tensor-parallel ranks and
// all-gather the codes. Only if fp8_gathers.
void fp8_gather_input(const GPT *gpt, const Pass *pass, int l, LayerLinear which, const Linear *a,
                      const floatX *own);
void fp8_gather_gradient(const GPT *gpt, const Pass *pass, int l, LayerLinear which, const Linear *a,
                         const floatX *own);
// All-gathers the input that fp8_gather_input has saved, which dw needs. Ends with tp_gather_wait.
void fp8_gather_saved_begin(const GPT *gpt, const Pass *pass, int l, LayerLinear which, const Linear *a);
// Computes a->y from the quantized input.
void fp8_linear_forward(const GPT *gpt, const Pass *pass, int l, LayerLinear which, const Linear *a);
// Quantizes a->dy. No-op in bf16 layers.
void fp8_quantize_gradient(const GPT *gpt, const Pass *pass, int l, LayerLinear which, const Linear *a);
// Computes a->dx and a->dw, as far as they are not NULL, from the quantized gradient.
void fp8_linear_backward(const GPT *gpt, const Pass *pass, int l, LayerLinear which, const Linear *a);

// --- fp8_scaling.c: delayed scaling (--fp8-recipe delayed) ---------------------------------------
//
// Every pass of a training step accumulates the largest absolute value of each operand in
// Fp8Scale.absmax. Once the step has been applied, the maxima over all ranks enter the histories,
// from which the scales of the next step follow. The maxima of skipped steps are dropped. All ranks
// hold the scales and histories of all layers, so they are bitwise identical and a checkpoint loads
// into any layout.

// Index of a scale. layer: index in the whole model.
static inline int fp8_scale_index(int layer, LayerLinear which, Fp8Operand operand) {
    return (layer * LAYER_LINEARS + (int)which) * FP8_OPERANDS + (int)operand;
}
// Reserves scales and histories in the memory plan.
void fp8_reserve_scales(GPT *gpt, MemoryPlan *plan);
// Sets histories to 0, and scales to 1 until the first micro-batch. No-op without FP8.
void fp8_start_scales(GPT *gpt);
// All-gathers the maxima after the last pass of a training step. Collective over mesh_status_group.
// No-op unless the recipe is delayed.
void fp8_gather_maxima(GPT *gpt);
// Updates histories and scales from the gathered maxima, unless the step is skipped. Call it after
// zero_update. No-op unless the recipe is delayed.
void fp8_update_scales(GPT *gpt);
// Encloses gpt_warm_up (begins: before it, else after it), which leaves the histories alone.
void fp8_warm_up(GPT *gpt, bool begins);
// Copies histories and scales to host memory. Free with fp8_state_free. Empty unless the recipe is
// delayed.
Fp8State fp8_get_state(const GPT *gpt);
// Continues with the histories and scales of a checkpoint. Histories of another length lose their
// oldest entries, or are extended by zeros; the scales follow from this run's flags. Returns false
// if the state is empty or has another number of scales; then nothing changes.
bool fp8_set_state(GPT *gpt, const Fp8State *state);

// --- stage_messages.c: messages between pipeline stages ------------------------------------------

// Returns the format of messages in one direction, and the bytes of one message with `rows` rows.
ActivationFormat messages_format(const Config *config, PassDirection direction);
int64_t messages_bytes(const Config *config, PassDirection direction, int64_t rows);
// Sets gpt->messages from the config.
void messages_describe(GPT *gpt, const Config *config);
// Reserves buffers in the memory plan. No-op without quantized messages.
void messages_reserve(GPT *gpt, MemoryPlan *plan);
// Uploads tables. No-op without quantized messages.
void messages_start(GPT *gpt);
void messages_free(GPT *gpt);
// Posts the receive of the pass's input: of hidden states, or of the gradient of its output.
void messages_expect(GPT *gpt, const Pass *p);
// Waits for this input, and decodes it.
void messages_receive(GPT *gpt, const Pass *p);
// Sends the pass's output. The caller has waited until its previous message from the same buffer
// has been sent.
void messages_send(GPT *gpt, const Pass *p);
// Launches the kernels once, on zeros: see gpt_needs_warm_up.
void messages_warm_up(GPT *gpt, const Pass *p);

// --- tied_embedding.c: tied embeddings on two pipeline stages ------------------------------------

// On the first stage: receives the LM head's gradient of the word embeddings and adds it.
void gpt_add_head_words(const GPT *gpt);
// Makes the gradient of the word embeddings identical on both stages: the last stage sends its
// gradient to the first one and receives the sum. Call after the step's last backward pass. No-op
// if one stage has both the embeddings and the LM head. Collective over mesh->embedding.
void gpt_exchange_words(const GPT *gpt);

// --- lm_head.c -----------------------------------------------------------------------------------

// Computes logits and losses and adds loss_scale * (sum of the losses) to the loss accumulator of
// ZeRO. If pass->backward is set, also computes the gradients of the LM head. No-op unless the
// chunk ends with the LM head.
void gpt_head(GPT *gpt, const Pass *pass);
// Returns the shortest sequence length of --eval-tasks micro-batches: T, halved as long as the
// result stays a multiple of 64, which cuDNN's attention requires. A micro-batch of shorter
// sequences has more of them, so that its number of tokens, B * T, stays the same.
int gpt_shortest_length(const GPT *gpt);

// --- micro_batches.c: the passes of a step -------------------------------------------------------
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
// chunks. Without pipeline parallelism, each micro-batch runs forward, then backward.
typedef struct PassSchedule {
    GPT *gpt;
    PipelineAction *action;  // (actions)
    int actions, next, micro_batches;
    bool training;
} PassSchedule;
PassSchedule gpt_schedule(GPT *gpt, int micro_batches, bool training);
// Returns the next pass. After the last one, frees the schedule and returns false. The caller
// uploads the micro-batch of a forward pass into pass->slot (gpt_upload) and sets the pass's
// samples, masks and loss scale.
bool gpt_next_pass(PassSchedule *schedule, Pass *pass);
// Receives the chunk's input, runs gpt_forward and gpt_head, and sends the output to the next
// stage.
void gpt_forward_pass(GPT *gpt, const Pass *pass);
// Receives the gradient of the chunk's output, runs gpt_backward, and sends the gradient of its
// input to the previous stage.
void gpt_backward_pass(GPT *gpt, const Pass *pass);
// gpt_forward_pass without the LM head, for generation.
void gpt_stage_forward(GPT *gpt, const Pass *pass);

// Returns true if a pipeline stage must call gpt_warm_up before its next step. *pass is then a
// forward pass; the caller uploads micro-batch 0 for it.
//
// The first launch of a kernel may wait for all work queued on the GPU, which deadlocks if a
// receive is pending (llmc/cuda/comm.cu). So every kernel is launched once before the first step.
bool gpt_needs_warm_up(GPT *gpt, bool training, Pass *pass);
// Runs all kernels of a step on the uploaded micro-batch, with a loss scale of 0 and zeros in place
// of received tensors, so that all gradients are 0.
void gpt_warm_up(GPT *gpt, const Pass *pass);

// --- next_logits.c: text generation --------------------------------------------------------------

// Computes the logits of the token after ids[0..n), with the last T ids as context. Writes them to
// `logits` (V, including padding) in host memory, on the last stage only. Collective over one model
// replica.
void gpt_next_logits(GPT *gpt, const int32_t *ids, int64_t n, floatX *logits);
// Computes the logits (V) of the token that follows ids[0..n), which are at positions start ..
// start + n - 1 of the sequence in the KV cache (gpt_reserve_inference). Appends their keys and
// values to the cache. start 0 begins a new sequence; start + n <= T. Synchronous.
void gpt_continue(GPT *gpt, const int32_t *ids, int start, int n, floatX *logits);

LLMC_END
