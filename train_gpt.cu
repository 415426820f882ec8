// sdp4bit.c: GPT pretraining with sharded data parallelism in (almost) 4 bits. This file is the whole story, top to bottom: the GPT, the training step,
// evaluation, checkpoints, sampling, main(). It is written in the common subset of C11 and CUDA C++ and holds no kernels: compiled as C it
// is the CPU program, compiled by nvcc the GPU program. What it calls:

#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/run/data_options.h"
#include "llmc/data/check.h"      // --check-data
#include "llmc/base/durable.h"     // the folder of --save is tried before training
#include "llmc/ranks/emulate.h"     // nodes inside one machine
#include "llmc/ranks/heartbeat.h"   // ranks that hang are named
#include "llmc/ranks/launch.h"      // MPI start and end
#include "llmc/ranks/limit_timer.h" // ranks that hang before and after the heartbeat
#include "llmc/log/log.h"         // Megatron's log lines, JSON lines, TensorBoard
#include "llmc/state/memory.h"      // the memory plan against the memory that is there
#include "llmc/ranks/parallel.h"    // initial weights on all cores
#include "llmc/ranks/placement.h"
#include "llmc/run/node_exchange.h"   // each rank its device, and its way to the others of its node
#include "llmc/run/plan_report.h" // --plan
#include "llmc/log/progress.h"    // --log-progress
#include "llmc/state/probe.h"       // figures on quantisation
#include "llmc/state/replicas.h"    // the ranks' weights compared and repaired
#include "llmc/run/sample.h"      // tokens from logits, text from tokens
#include "llmc/run/same_run.h"    // one program, one set of flags, one set of data on all machines
#include "llmc/checkpoint/saver.h"       // checkpoints, in the background or not
#include "llmc/config/schedule.h"    // learning rate in samples
#include "llmc/state/sentry.h"      // verdicts: what was skipped, what ends the run
#include "llmc/ranks/stop.h"        // signals and time limits, polled
#include "llmc/data/tokenizer.h"   // vocabulary size, EOD, decoding
#include "llmc/base/version.h"
#include "train_gpt.h"        // GPT, Zero, Loader, Peers, ops

// ===== the GPT ===================================================================================================================
// GPT-2 as Megatron-LM trains it: learned positions, pre-LayerNorm, per-head interleaved QKV rows, tanh GELU, tied head.

int gpt_layer_tensor(int layer, enum LayerTensor which) { return 2 + layer * LAYER_TENSORS + (int)which; }

static void add_tensor(GPT *gpt, const char *name, int64_t rows, int64_t columns, int split, int unit, double std) {
    gpt->tensor[gpt->tensors++] = tensor_row(name, rows, columns, split, unit, std);
}

static void add_layer(GPT *gpt, int l, double std) {
    int64_t C = gpt->C, A = gpt->A, F = gpt->F;
    double scaled = std / sqrt(2.0 * gpt->L);  // outputs onto the residual stream
    struct { const char *name; int64_t rows, columns; int split; double std; } row[LAYER_TENSORS] = {
        {"input_norm.weight", C, 0, -1, -1},
        {"input_norm.bias", C, 0, -1, 0},
        {"self_attention.query_key_value.weight", 3 * A, C, 0, std},
        {"self_attention.query_key_value.bias", 3 * A, 0, 0, 0},
        {"self_attention.dense.weight", C, A, 1, scaled},
        {"self_attention.dense.bias", C, 0, -1, 0},
        {"post_attention_norm.weight", C, 0, -1, -1},
        {"post_attention_norm.bias", C, 0, -1, 0},
        {"mlp.dense_h_to_4h.weight", F, C, 0, std},
        {"mlp.dense_h_to_4h.bias", F, 0, 0, 0},
        {"mlp.dense_4h_to_h.weight", C, F, 1, scaled},
        {"mlp.dense_4h_to_h.bias", C, 0, -1, 0},
    };
    for (int i = 0; i < LAYER_TENSORS; i++) {
        char name[96];
        snprintf(name, sizeof name, "encoder.layers.%d.%s", l, row[i].name);
        add_tensor(gpt, name, row[i].rows, row[i].columns, row[i].split, l + 1, row[i].std);
    }
}

void gpt_describe(GPT *gpt, const Config *config) {
    memset(gpt, 0, sizeof *gpt);
    gpt->B = config->micro_batch_size;
    gpt->T = config->seq_length;
    gpt->C = config->hidden_size;
    gpt->NH = config->num_attention_heads;
    gpt->HD = config->kv_channels;
    gpt->A = gpt->NH * gpt->HD;
    gpt->F = config->ffn_hidden_size;
    gpt->L = config->num_layers;
    gpt->V = config->vocab_size_padded;
    gpt->P = config->max_position_embeddings;
    gpt->epsilon = (float)config->norm_epsilon;
    gpt->attention_dropout = (float)config->attention_dropout;
    gpt->hidden_dropout = (float)config->hidden_dropout;
    gpt->seed = (uint32_t)config->seed;
    gpt->recompute_full = config->recompute_granularity == RECOMPUTE_FULL;
    gpt->tensor = (Tensor *)xcalloc((size_t)(4 + gpt->L * LAYER_TENSORS), sizeof(Tensor), "the parameter table");
    double std = config->init_method_std;
    add_tensor(gpt, "embedding.word_embeddings.weight", gpt->V, gpt->C, 0, 0, std);
    add_tensor(gpt, "embedding.position_embeddings.weight", gpt->P, gpt->C, -1, 0, std);
    for (int l = 0; l < gpt->L; l++) add_layer(gpt, l, std);
    add_tensor(gpt, "encoder.final_norm.weight", gpt->C, 0, -1, gpt->L, -1);
    add_tensor(gpt, "encoder.final_norm.bias", gpt->C, 0, -1, gpt->L, 0);
}

static void reserve_layer(GPT *gpt, LayerActs *a, MemoryPlan *memory_plan) {
    size_t N = (size_t)gpt->B * (size_t)gpt->T, X = sizeof(floatX), C = (size_t)gpt->C, A = (size_t)gpt->A, F = (size_t)gpt->F;
    const char *group = "activations";
    memory_plan_reserve(memory_plan, group, "first LayerNorm", N * C * X, (void **)&a->ln1);
    memory_plan_reserve(memory_plan, group, "first LayerNorm means", N * sizeof(float), (void **)&a->ln1_mean);
    memory_plan_reserve(memory_plan, group, "first LayerNorm deviations", N * sizeof(float), (void **)&a->ln1_rstd);
    memory_plan_reserve(memory_plan, group, "queries, keys, values", N * 3 * A * X, (void **)&a->qkv);
    memory_plan_reserve(memory_plan, group, "attention statistics", op_attention_saved_bytes(gpt->B, gpt->T, gpt->NH, gpt->HD), &a->att_saved);
    memory_plan_reserve(memory_plan, group, "attention output", N * A * X, (void **)&a->att);
    memory_plan_reserve(memory_plan, group, "residual after attention", N * C * X, (void **)&a->residual2);
    memory_plan_reserve(memory_plan, group, "second LayerNorm", N * C * X, (void **)&a->ln2);
    memory_plan_reserve(memory_plan, group, "second LayerNorm means", N * sizeof(float), (void **)&a->ln2_mean);
    memory_plan_reserve(memory_plan, group, "second LayerNorm deviations", N * sizeof(float), (void **)&a->ln2_rstd);
    memory_plan_reserve(memory_plan, group, "before GELU", N * F * X, (void **)&a->pre);
    memory_plan_reserve(memory_plan, group, "after GELU", N * F * X, (void **)&a->gelu);
}

static size_t largest(size_t a, size_t b) { return a > b ? a : b; }

static size_t workspace_bytes(const GPT *gpt) {
    int64_t N = (int64_t)gpt->B * gpt->T;
    int widest = (int)largest(largest((size_t)gpt->F, 3 * (size_t)gpt->A), (size_t)gpt->C);
    size_t bytes = op_linear_workspace_bytes(N, widest, widest);
    bytes = largest(bytes, op_linear_workspace_bytes(1, gpt->C, gpt->V));  // one row of logits, for sampling
    bytes = largest(bytes, op_attention_workspace_bytes(gpt->B, gpt->T, gpt->NH, gpt->HD));
    return largest(bytes, op_head_workspace_bytes(N, gpt->C, gpt->V));
}

void gpt_reserve(GPT *gpt, MemoryPlan *memory_plan) {
    size_t N = (size_t)gpt->B * (size_t)gpt->T, X = sizeof(floatX), C = (size_t)gpt->C, A = (size_t)gpt->A, F = (size_t)gpt->F;
    memory_plan_reserve(memory_plan, "batch", "tokens", N * sizeof(int32_t), (void **)&gpt->tokens);
    memory_plan_reserve(memory_plan, "batch", "targets", N * sizeof(int32_t), (void **)&gpt->targets);
    memory_plan_reserve(memory_plan, "batch", "positions", N * sizeof(int32_t), (void **)&gpt->positions);
    memory_plan_reserve(memory_plan, "batch", "document starts", N * sizeof(int32_t), (void **)&gpt->doc_start);
    memory_plan_reserve(memory_plan, "batch", "loss mask", N * sizeof(float), (void **)&gpt->loss_mask);
    int layers = gpt->recompute_full ? 1 : gpt->L;
    gpt->residual = (floatX **)xcalloc((size_t)gpt->L + 1, sizeof(floatX *), "the activation table");
    gpt->acts = (LayerActs *)xcalloc((size_t)layers, sizeof(LayerActs), "the activation table");
    for (int l = 0; l <= gpt->L; l++) memory_plan_reserve(memory_plan, "activations", "residual stream", N * C * X, (void **)&gpt->residual[l]);
    for (int l = 0; l < layers; l++) reserve_layer(gpt, &gpt->acts[l], memory_plan);
    memory_plan_reserve(memory_plan, "activations", "final LayerNorm", N * C * X, (void **)&gpt->lnf);
    memory_plan_reserve(memory_plan, "activations", "final LayerNorm means", N * sizeof(float), (void **)&gpt->lnf_mean);
    memory_plan_reserve(memory_plan, "activations", "final LayerNorm deviations", N * sizeof(float), (void **)&gpt->lnf_rstd);
    memory_plan_reserve(memory_plan, "activations", "losses", N * sizeof(float), (void **)&gpt->losses);
    memory_plan_reserve(memory_plan, "scratch", "branch of the residual stream", N * C * X, (void **)&gpt->branch);
    memory_plan_reserve(memory_plan, "scratch", "gradient of the residual stream", N * C * X, (void **)&gpt->dresidual);
    memory_plan_reserve(memory_plan, "scratch", "gradient of a branch", gpt->hidden_dropout > 0 ? N * C * X : 0, (void **)&gpt->dbranch);
    memory_plan_reserve(memory_plan, "scratch", "gradient of a LayerNorm output", N * C * X, (void **)&gpt->dx);
    memory_plan_reserve(memory_plan, "scratch", "gradient of the wide tensors", N * largest(F, 3 * A) * X, (void **)&gpt->dwide);
    memory_plan_reserve(memory_plan, "scratch", "gradient of the attention output", N * A * X, (void **)&gpt->datt);
    memory_plan_reserve(memory_plan, "scratch", "logits of one position", (size_t)gpt->V * X, (void **)&gpt->logits);
    memory_plan_reserve(memory_plan, "scratch", "workspace of the ops", workspace_bytes(gpt), &gpt->workspace);
    memory_plan_reserve(memory_plan, "scratch", "of ops without a workspace", op_scratch_bytes(), &gpt->scratch);
}

size_t gpt_planned_bytes(const Config *config) {
    GPT gpt;
    MemoryPlan memory_plan = {0};
    gpt_describe(&gpt, config);
    gpt_reserve(&gpt, &memory_plan);
    size_t bytes = memory_plan_total(&memory_plan);
    memory_plan_free(&memory_plan, NULL);
    gpt_free(&gpt);
    return bytes;
}

void gpt_free(GPT *gpt) {
    free(gpt->tensor);
    free(gpt->residual);
    free(gpt->acts);
    memset(gpt, 0, sizeof *gpt);
}

void gpt_init_weights(GPT *gpt, uint64_t seed, Peers group) {
    int threads = parallel_share(group);
    // Every rank draws all of its replica: what a tensor's numbers are depends on the seed and the tensor alone.
    for (int i = 0; i < gpt->tensors; i++) {
        const Tensor *t = &gpt->tensor[i];
        op_init_weights(gpt->stream, zero_weight(gpt->zero, i), tensor_elements(t), t->std, seed, (uint32_t)i, threads);
    }
    stream_synchronize(gpt->stream);  // the other streams may read them
}

void gpt_upload(GPT *gpt, const Batch *batch) {
    size_t N = (size_t)gpt->B * (size_t)gpt->T;
    copy_to_device(gpt->stream, gpt->tokens, batch->tokens, N * sizeof(int32_t));
    copy_to_device(gpt->stream, gpt->targets, batch->targets, N * sizeof(int32_t));
    copy_to_device(gpt->stream, gpt->positions, batch->positions, N * sizeof(int32_t));
    if (batch->doc_start) copy_to_device(gpt->stream, gpt->doc_start, batch->doc_start, N * sizeof(int32_t));
    if (batch->loss_mask) copy_to_device(gpt->stream, gpt->loss_mask, batch->loss_mask, N * sizeof(float));
}

static const floatX *weight(const GPT *gpt, int l, enum LayerTensor which) { return zero_weight(gpt->zero, gpt_layer_tensor(l, which)); }
static float *grad(const GPT *gpt, int l, enum LayerTensor which) { return zero_grad(gpt->zero, gpt_layer_tensor(l, which)); }
// The final LayerNorm follows the last layer in the table: which 0 is its weight, 1 its bias.
static const floatX *final_norm(const GPT *gpt, int which) { return zero_weight(gpt->zero, 2 + gpt->L * LAYER_TENSORS + which); }
static float *final_norm_grad(const GPT *gpt, int which) { return zero_grad(gpt->zero, 2 + gpt->L * LAYER_TENSORS + which); }
static LayerActs *layer_acts(const GPT *gpt, int l) { return &gpt->acts[gpt->recompute_full ? 0 : l]; }

static Dropout dropout_site(const GPT *gpt, int l, int where, float p, int64_t first_sample, bool training) {
    Dropout d = {training ? p : 0.0f, gpt->seed, (uint32_t)(l * 4 + where), first_sample};
    return d;
}

static int64_t rows_of(const Pass *p) { return (int64_t)p->B * p->T; }
static const int32_t *doc_start_of(const GPT *gpt, const Pass *p) { return p->has_doc_start ? gpt->doc_start : NULL; }

// Layer l from its first LayerNorm's output to GELU's. The MLP's second linear and its sum into the residual stream are gpt_forward's, which fuses that sum with
// the next LayerNorm; a layer that is computed again needs nothing beyond GELU.
static void layer_forward(GPT *gpt, int l, const Pass *p) {
    LayerActs *a = layer_acts(gpt, l);
    Stream *s = gpt->stream;
    Dropout attention = dropout_site(gpt, l, DROPOUT_ATTENTION, gpt->attention_dropout, p->first_sample, p->training);
    Dropout projection = dropout_site(gpt, l, DROPOUT_PROJECTION, gpt->hidden_dropout, p->first_sample, p->training);
    op_linear_forward(s, a->qkv, NULL, a->ln1, weight(gpt, l, QKV_W), weight(gpt, l, QKV_B), rows_of(p), gpt->C, 3 * gpt->A, gpt->workspace);
    op_attention_forward(s, a->att, a->att_saved, a->qkv, doc_start_of(gpt, p), p->B, p->T, gpt->NH, gpt->HD, attention, gpt->workspace);
    op_linear_forward(s, gpt->branch, NULL, a->att, weight(gpt, l, PROJ_W), weight(gpt, l, PROJ_B), rows_of(p), gpt->A, gpt->C, gpt->workspace);
    op_residual_layernorm_forward(s, a->residual2, a->ln2, a->ln2_mean, a->ln2_rstd, gpt->residual[l], gpt->branch, weight(gpt, l, LN2_W),
                                  weight(gpt, l, LN2_B), p->B, p->T, gpt->C, gpt->epsilon, projection);
    op_linear_forward(s, a->gelu, a->pre, a->ln2, weight(gpt, l, FC1_W), weight(gpt, l, FC1_B), rows_of(p), gpt->C, gpt->F, gpt->workspace);
}

void gpt_forward(GPT *gpt, const Pass *p) {
    Stream *s = gpt->stream;
    zero_weights_wait(gpt->zero, 0);
    op_embedding_forward(s, gpt->residual[0], gpt->tokens, gpt->positions, zero_weight(gpt->zero, GPT_WTE), zero_weight(gpt->zero, GPT_WPE), p->B,
                         p->T, gpt->C, dropout_site(gpt, 0, DROPOUT_EMBEDDING, gpt->hidden_dropout, p->first_sample, p->training));
    zero_weights_wait(gpt->zero, 1);
    LayerActs *first = layer_acts(gpt, 0);
    op_layernorm_forward(s, first->ln1, first->ln1_mean, first->ln1_rstd, gpt->residual[0], weight(gpt, 0, LN1_W), weight(gpt, 0, LN1_B), rows_of(p), gpt->C,
                         gpt->epsilon);
    for (int l = 0; l < gpt->L; l++) {
        layer_forward(gpt, l, p);
        LayerActs *a = layer_acts(gpt, l), *next = l + 1 < gpt->L ? layer_acts(gpt, l + 1) : NULL;
        op_linear_forward(s, gpt->branch, NULL, a->gelu, weight(gpt, l, FC2_W), weight(gpt, l, FC2_B), rows_of(p), gpt->F, gpt->C, gpt->workspace);
        if (next) zero_weights_wait(gpt->zero, l + 2);
        // The MLP's sum is fused with the LayerNorm that follows it: the next layer's first, or the final one.
        op_residual_layernorm_forward(s, gpt->residual[l + 1], next ? next->ln1 : gpt->lnf, next ? next->ln1_mean : gpt->lnf_mean,
                                      next ? next->ln1_rstd : gpt->lnf_rstd, a->residual2, gpt->branch,
                                      next ? weight(gpt, l + 1, LN1_W) : final_norm(gpt, 0), next ? weight(gpt, l + 1, LN1_B) : final_norm(gpt, 1), p->B,
                                      p->T, gpt->C, gpt->epsilon, dropout_site(gpt, l, DROPOUT_FFN, gpt->hidden_dropout, p->first_sample, p->training));
    }
}

void gpt_head(GPT *gpt, const Pass *p) {
    op_head(gpt->stream, gpt->losses, zero_loss_sum(gpt->zero), p->backward ? gpt->dx : NULL, p->backward ? zero_grad(gpt->zero, GPT_WTE) : NULL, gpt->lnf,
            zero_weight(gpt->zero, GPT_WTE), gpt->targets, p->has_loss_mask ? gpt->loss_mask : NULL, p->loss_scale, rows_of(p), gpt->C, gpt->V, p->first,
            gpt->workspace);
}

static void layer_recompute(GPT *gpt, int l, const Pass *p) {
    LayerActs *a = layer_acts(gpt, l);
    op_layernorm_forward(gpt->stream, a->ln1, a->ln1_mean, a->ln1_rstd, gpt->residual[l], weight(gpt, l, LN1_W), weight(gpt, l, LN1_B), rows_of(p), gpt->C,
                         gpt->epsilon);
    layer_forward(gpt, l, p);
}

// One layer, its last op first. In: dbranch, the gradient of the MLP's output, and gpt->dresidual, that of the layer's output (the same without dropout). Out:
// the same two for the layer below. A bias gradient is a column sum, taken by the op that writes those columns: of FC2_B by the LayerNorm above, of FC1_B by the
// second linear, of PROJ_B by the second LayerNorm; of QKV_B alone by its own linear.
static void layer_backward(GPT *gpt, int l, const Pass *p, const floatX *dbranch) {
    LayerActs *a = layer_acts(gpt, l);
    Stream *s = gpt->stream;
    bool dropping = gpt->hidden_dropout > 0;
    Dropout attention = dropout_site(gpt, l, DROPOUT_ATTENTION, gpt->attention_dropout, p->first_sample, true);
    Dropout projection = dropout_site(gpt, l, DROPOUT_PROJECTION, gpt->hidden_dropout, p->first_sample, true);
    Dropout below = dropout_site(gpt, l - 1, DROPOUT_FFN, gpt->hidden_dropout, p->first_sample, l > 0);
    op_linear_backward(s, gpt->dwide, grad(gpt, l, FC2_W), NULL, dbranch, a->gelu, weight(gpt, l, FC2_W), a->pre, grad(gpt, l, FC1_B), rows_of(p), gpt->F,
                       gpt->C, p->first, gpt->workspace);
    op_linear_backward(s, gpt->dx, grad(gpt, l, FC1_W), NULL, gpt->dwide, a->ln2, weight(gpt, l, FC1_W), NULL, NULL, rows_of(p), gpt->C, gpt->F, p->first,
                       gpt->workspace);
    op_layernorm_backward(s, gpt->dresidual, dropping ? gpt->dbranch : NULL, grad(gpt, l, LN2_W), grad(gpt, l, LN2_B), grad(gpt, l, PROJ_B), gpt->dx,
                          a->residual2, weight(gpt, l, LN2_W), a->ln2_mean, a->ln2_rstd, p->B, p->T, gpt->C, projection);
    op_linear_backward(s, gpt->datt, grad(gpt, l, PROJ_W), NULL, dropping ? gpt->dbranch : gpt->dresidual, a->att, weight(gpt, l, PROJ_W), NULL, NULL,
                       rows_of(p), gpt->A, gpt->C, p->first, gpt->workspace);
    op_attention_backward(s, gpt->dwide, gpt->datt, a->att, a->att_saved, a->qkv, doc_start_of(gpt, p), p->B, p->T, gpt->NH, gpt->HD, attention, gpt->workspace);
    op_linear_backward(s, gpt->dx, grad(gpt, l, QKV_W), grad(gpt, l, QKV_B), gpt->dwide, a->ln1, weight(gpt, l, QKV_W), NULL, NULL, rows_of(p), gpt->C,
                       3 * gpt->A, p->first, gpt->workspace);
    op_layernorm_backward(s, gpt->dresidual, dropping && l > 0 ? gpt->dbranch : NULL, grad(gpt, l, LN1_W), grad(gpt, l, LN1_B),
                          l > 0 ? grad(gpt, l - 1, FC2_B) : NULL, gpt->dx, gpt->residual[l], weight(gpt, l, LN1_W), a->ln1_mean, a->ln1_rstd, p->B, p->T,
                          gpt->C, below);
}

void gpt_backward(GPT *gpt, const Pass *p) {
    Stream *s = gpt->stream;
    bool dropping = gpt->hidden_dropout > 0;
    Dropout ffn = dropout_site(gpt, gpt->L - 1, DROPOUT_FFN, gpt->hidden_dropout, p->first_sample, true);
    set_zero(s, gpt->dresidual, (size_t)rows_of(p) * (size_t)gpt->C * sizeof(floatX));
    op_layernorm_backward(s, gpt->dresidual, dropping ? gpt->dbranch : NULL, final_norm_grad(gpt, 0), final_norm_grad(gpt, 1), grad(gpt, gpt->L - 1, FC2_B), gpt->dx,
                          gpt->residual[gpt->L], final_norm(gpt, 0), gpt->lnf_mean, gpt->lnf_rstd, p->B, p->T, gpt->C, ffn);
    for (int l = gpt->L - 1; l >= 0; l--) {
        if (gpt->recompute_full) layer_recompute(gpt, l, p);
        layer_backward(gpt, l, p, dropping ? gpt->dbranch : gpt->dresidual);
        if (p->last) zero_reduce_unit(gpt->zero, l + 1);
    }
    if (p->first) set_zero(s, zero_grad(gpt->zero, GPT_WPE), (size_t)gpt->P * (size_t)gpt->C * sizeof(float));
    op_embedding_backward(s, zero_grad(gpt->zero, GPT_WTE), zero_grad(gpt->zero, GPT_WPE), gpt->dresidual, gpt->tokens, gpt->positions, p->B, p->T, gpt->C,
                          dropout_site(gpt, 0, DROPOUT_EMBEDDING, gpt->hidden_dropout, p->first_sample, true));
    if (p->last) zero_reduce_unit(gpt->zero, 0);
}

// ===== a run =====================================================================================================================

// What happened since the last log line.
typedef struct Interval {
    int64_t iterations, samples, skipped, nan;
    double loss_sum;        // over applied steps
    double seconds_start;   // moved forward by what is not training: evaluation, checkpoints
    CommTraffic traffic;    // at the start
} Interval;

typedef struct Run {
    Config config;
    Launch launch;
    Topology topology;
    Site site;
    Error error;              // why the run ends early
    int exit_code;
    Tokenizer *tokenizer;
    Device *device;
    Stream *compute;
    Lanes lanes;              // of communication
    MPI_Comm dp_group;
    Comm *comm;
    Timers *timers;
    MemoryPlan memory_plan;
    Zero *zero;
    GPT gpt;
    Loader *loader;
    Log *log;
    Progress *progress;
    Schedule schedule;
    // counters of the whole run, saved in checkpoints
    int64_t iteration, consumed_train, consumed_valid;
    int64_t split_samples[2];  // of SPLIT_TRAIN and SPLIT_VALID as built; 0: not known
    int64_t scheduled;        // samples of applied steps: what the schedule counts
    Sentry sentry;
    double flops_so_far;
    // the step whose verdict the host has not read yet
    bool unsettled;
    int step_batch;           // samples of the latest step launched: the one that is settled next, or was last
    StepControl last;         // the newest verdict read
    StepReport report;        // what was told of it
    Interval interval;
    double started;           // wall clock of the process's start
    int64_t last_saved;
    int64_t went_on_from;   // the checkpoint in the --save folder that this run went on from; -1: none
    int save_lock;            // of rank 0 on the folder of --save
    Saver saver;
    Stop stop;                // why the run is to be left early
    Memory memory;            // the plan against what was there
} Run;

// Seconds that a collective may take: --distributed-timeout-minutes (0: for ever), and a little more the higher the rank.
static double time_limit(const Run *run) {
    if (run->config.check_data || run->config.inspect_data >= 0) return 0.0;  // rank 0 reads, for as long as it takes
    double limit = 60.0 * run->config.distributed_timeout_minutes;
    return limit > 0 ? limit + launch_rank_delay(run->launch.rank) : 0.0;
}

static Peers peers_of(Run *run, MPI_Comm comm) {
    Peers peers = {comm, time_limit(run), &run->site};
    return peers;
}

// A barrier of all ranks, with that limit.
static void meet(Run *run) { peers_meet(peers_of(run, run->launch.world)); }

// True when ok on every rank; else run->error holds the first failing rank's error, on every rank, and that rank prints it.
static bool agreed(Run *run, bool ok) {
    int who = 0;
    if (peers_agree(peers_of(run, run->launch.world), ok, &run->error, &who)) return true;
    run->exit_code = run->error.code;
    int origin = run->error.rank >= 0 ? run->error.rank : who;  // what some ranks had agreed on before is one rank's all the same
    if (run->launch.rank == origin) error_print(&run->site, run->error.what);
    return false;
}

// ===== leaving early =============================================================================================================

// After each step and each part of an evaluation: run->stop, the same on every rank.
static void poll_stop(Run *run) {
    double minutes = run->config.exit_duration_in_mins;
    bool late = minutes > 0 && monotonic_seconds() - run->started > 60.0 * minutes;
    StopReason own = run->error.code == EXIT_DATA ? STOP_DATA : late ? STOP_DURATION : GO_ON;
    run->stop.busy = saver_busy(&run->saver);
    stop_poll(&run->stop, own, peers_of(run, run->launch.world));
}

// False when some rank could not read its data: the run ends, and nothing of the step is logged or saved.
static bool data_sound(Run *run) {
    if (run->stop.reason != STOP_DATA) return true;
    run->site.phase = "read data";
    return agreed(run, run->error.code != EXIT_DATA);
}

// ===== the training step =========================================================================================================

// Uploads the micro-batch of this rank that starts at global sample `consumed`. Data found broken in mid-run must not stop this rank at once: the
// others are already in this step's collectives. It goes on with zeros, and all ranks leave together at the step's end (data_sound).
static Batch next_batch(Run *run, int split, int64_t consumed) {
    GPT *gpt = &run->gpt;
    Batch batch;
    Error err;
    memset(&batch, 0, sizeof batch);
    heartbeat_waits(&run->site, false);
    timer_start(run->timers, TIMER_BATCH_GENERATOR, run->compute);
    if (loader_batch(run->loader, split, consumed, &batch, &err)) {
        gpt_upload(gpt, &batch);
    } else {
        size_t bytes = (size_t)gpt->B * (size_t)gpt->T * sizeof(int32_t);
        set_zero(run->compute, gpt->tokens, bytes);
        set_zero(run->compute, gpt->targets, bytes);
        set_zero(run->compute, gpt->positions, bytes);
        if (!run->error.code) run->error = err;
    }
    timer_stop(run->timers, TIMER_BATCH_GENERATOR, run->compute);
    return batch;
}

// Megatron's loss: the mean over the unmasked tokens of each micro-batch, averaged over `parts` micro-batches.
static float loss_scale_of(const Run *run, const Batch *batch, int64_t parts) {
    int64_t N = (int64_t)run->gpt.B * run->gpt.T;
    double tokens = (double)N;
    if (batch->loss_mask) {
        tokens = 0.0;
        for (int64_t i = 0; i < N; i++) tokens += batch->loss_mask[i];
    }
    return tokens > 0 ? (float)(1.0 / (tokens * (double)parts)) : 0.0f;
}

// Over an uploaded batch, one of `parts` whose losses are averaged; without dropout and gradients as yet.
static Pass pass_over(const Run *run, const Batch *batch, int64_t parts) {
    Pass pass;
    memset(&pass, 0, sizeof pass);
    pass.B = run->gpt.B;
    pass.T = run->gpt.T;
    pass.first_sample = batch->first_sample;
    pass.has_doc_start = batch->doc_start != NULL;
    pass.has_loss_mask = batch->loss_mask != NULL;
    pass.loss_scale = loss_scale_of(run, batch, parts);
    return pass;
}

// Micro-batch k of a step, which begins with global sample `consumed`.
static void micro_batch(Run *run, int64_t consumed, int k, int micro_batches) {
    Batch batch = next_batch(run, SPLIT_TRAIN, consumed);
    Pass pass = pass_over(run, &batch, micro_batches);
    pass.training = pass.backward = true;
    pass.first = k == 0;
    pass.last = k == micro_batches - 1;
    timer_start(run->timers, TIMER_FORWARD_COMPUTE, run->compute);
    gpt_forward(&run->gpt, &pass);
    gpt_head(&run->gpt, &pass);
    timer_stop(run->timers, TIMER_FORWARD_COMPUTE, run->compute);
    timer_start(run->timers, TIMER_BACKWARD_COMPUTE, run->compute);
    gpt_backward(&run->gpt, &pass);
    timer_stop(run->timers, TIMER_BACKWARD_COMPUTE, run->compute);
}

static void report_step(Run *run, int64_t iteration);

// Reads the verdict of a step: `which` 0 for the latest one launched, 1 for the one before.
static void settle(Run *run, int which) {
    if (!run->unsettled) return;
    run->last = zero_verdict(run->zero, which);
    run->unsettled = false;
    if (run->last.applied) {
        run->scheduled += run->step_batch;
        run->interval.loss_sum += run->last.loss;
    }
    int64_t iteration = run->iteration - which, nan = run->sentry.nan;
    sentry_judge(&run->sentry, &run->last, iteration, run->log, &run->error);
    run->interval.skipped += !run->last.applied;
    run->interval.nan += run->sentry.nan - nan;
    report_step(run, iteration);
}

// Launches one iteration. The host runs at most one step ahead of the verdicts.
static void train_step(Run *run) {
    const Config *c = &run->config;
    int batch = config_global_batch_size(c, run->consumed_train);
    int row = c->micro_batch_size * run->topology.dp_size, micro_batches = batch / row;
    run->site.iteration = ++run->iteration;
    run->site.phase = "forward and backward";
    timer_start(run->timers, TIMER_FORWARD_BACKWARD, run->compute);
    zero_step_begins(run->zero, run->iteration);
    for (int k = 0; k < micro_batches; k++) {
        micro_batch(run, run->consumed_train + (int64_t)k * row, k, micro_batches);
        if (k == 0) zero_copy_staged(run->zero);  // the copies of the last --async-save: the device has work for a while beside them
    }
    timer_stop(run->timers, TIMER_FORWARD_BACKWARD, run->compute);

    run->site.phase = "update";
    int64_t skipped_n = run->scheduled, applied_n = run->scheduled + (run->unsettled ? run->step_batch : 0);
    zero_update(run->zero, schedule_lr(&run->schedule, applied_n), schedule_lr(&run->schedule, skipped_n),
                schedule_weight_decay(&run->schedule, run->consumed_train));  // a ramp of the decay does not pause for skipped steps
    settle(run, 1);
    run->unsettled = true;
    run->step_batch = batch;
    run->consumed_train += batch;
    run->interval.iterations++;
    run->interval.samples += batch;
    run->flops_so_far += megatron_flops(c, batch);
}

// ===== logs ======================================================================================================================

static void begin_interval(Run *run) {
    memset(&run->interval, 0, sizeof run->interval);
    run->interval.traffic = probe_traffic(run->zero);
    stream_synchronize(run->compute);
    meet(run);
    run->interval.seconds_start = monotonic_seconds();
}

// Takes the time since `since` out of the interval.
static void exclude_since(Run *run, double since) {
    stream_synchronize(run->compute);
    meet(run);
    run->interval.seconds_start += monotonic_seconds() - since;
}

// Bytes per step out of a node and inside one: each node's ranks together, the largest node.
static void node_traffic(Run *run, double *inter, double *intra) {
    CommTraffic now = probe_traffic(run->zero);
    double own[2] = {(double)(now.sent[COMM_RAIL] - run->interval.traffic.sent[COMM_RAIL]), (double)(now.sent[COMM_NODE] - run->interval.traffic.sent[COMM_NODE])};
    double *all = (double *)xcalloc(2 * (size_t)run->topology.dp_size, sizeof(double), "the traffic table");
    peers_gather(peers_of(run, run->dp_group), own, all, 2, MPI_DOUBLE);
    *inter = *intra = 0.0;
    for (int node = 0; node < run->topology.nodes; node++) {
        double sums[2] = {0.0, 0.0};
        for (int i = 0; i < run->topology.per_node; i++) {
            sums[0] += all[2 * (node * run->topology.per_node + i)];
            sums[1] += all[2 * (node * run->topology.per_node + i) + 1];
        }
        *inter = fmax(*inter, sums[0]);
        *intra = fmax(*intra, sums[1]);
    }
    double steps = (double)(run->interval.iterations > 0 ? run->interval.iterations : 1);
    *inter /= steps;
    *intra /= steps;
    free(all);
}

// What is known of every iteration once it is settled. Collective, and synchronises, where zeros or norms are wanted: once per iteration.
static void report_step(Run *run, int64_t iteration) {
    const Config *c = &run->config;
    StepReport *r = &run->report;
    r->iteration = iteration;
    r->consumed_samples = run->consumed_train;
    r->learning_rate = schedule_lr(&run->schedule, run->scheduled);
    r->global_batch_size = run->step_batch;
    r->loss = run->last.loss;
    r->skipped = !run->last.applied;
    r->grad_norm = c->clip_grad > 0 ? run->last.grad_norm : -1.0;
    r->num_zeros = c->log_num_zeros_in_grad ? (double)zero_zeros(run->zero, peers_of(run, run->dp_group)) : -1.0;
    r->params_norm = c->log_params_norm ? zero_params_norm(run->zero, peers_of(run, run->dp_group)) : -1.0;
    r->reserved_bytes = r->allocated_bytes = (double)memory_plan_total(&run->memory_plan);
    log_step_scalars(run->log, r);
}

// After the verdict of the interval's last iteration.
static void end_interval(Run *run) {
    const Config *c = &run->config;
    stream_synchronize(run->compute);
    meet(run);
    int64_t n = run->interval.iterations, applied = n - run->interval.skipped;
    double seconds = (monotonic_seconds() - run->interval.seconds_start) / (double)n;
    IntervalReport r;
    memset(&r, 0, sizeof r);
    r.last = run->report;
    r.train_iters = c->train_iters;
    r.iterations = n;
    r.elapsed_ms = 1000.0 * seconds;
    r.lm_loss = applied > 0 ? run->interval.loss_sum / (double)applied : isfinite(run->last.loss) ? 0.0 : run->last.loss;  // skipped steps have no mean; a NaN is shown
    r.skipped = run->interval.skipped;
    r.nan = run->interval.nan;
    r.epoch = loader_epoch(run->loader, run->consumed_train);
    double batch = (double)run->interval.samples / (double)n, ranks = run->launch.size;  // the interval's mean: --rampup-batch-size changes it
    r.tflops_per_gpu = megatron_flops(c, batch) / (seconds * 1e12 * ranks);
    double peak = device_peak_flops(run->device);
    r.mfu = peak > 0 ? causal_flops(c, batch, (double)zero_layout(run->zero)->parameters) / (seconds * ranks * peak) : -1.0;
    r.tokens_per_second = batch * c->seq_length / seconds;
    node_traffic(run, &r.inter_node_bytes, &r.intra_node_bytes);
    Exposed exposed = zero_take_exposed(run->zero, (double)n, peers_of(run, run->launch.world));
    r.exposed_gradients_ms = exposed.gradients_ms;
    r.exposed_weights_ms = exposed.weights_ms;
    r.exposed_comm_ms = r.exposed_gradients_ms + r.exposed_weights_ms;
    r.exposed_most_ms = exposed.most_ms;
    r.seconds_left = seconds * (double)(c->train_iters - run->iteration);
    log_iteration(run->log, &r);
    meet(run);  // rank 0 may hang in writing its lines
    log_timers(run->log, run->timers, run->iteration, n, peers_of(run, run->launch.world));
    memory_report(&run->memory, run->log, run->iteration);
    begin_interval(run);
}

// ===== evaluation ================================================================================================================

// The ranks' mean of loss_sum, added in rank order.
static double mean_loss(Run *run) {
    float own = 0.0f;
    copy_to_host(run->compute, &own, zero_loss_sum(run->zero), sizeof own);
    stream_synchronize(run->compute);
    float *all = (float *)xcalloc((size_t)run->topology.dp_size, sizeof(float), "losses");
    peers_gather(peers_of(run, run->dp_group), &own, all, 1, MPI_FLOAT);
    double sum = 0.0;
    for (int r = 0; r < run->topology.dp_size; r++) sum += all[r];
    free(all);
    return sum / run->topology.dp_size;
}

// Mean loss over eval_iters global batches. The latest step's verdict must have been read, for its zero.loss_sum is used again. The validation iterator goes on
// where it stopped, as Megatron's does. False when it was interrupted: run->stop says why.
static bool evaluate(Run *run, int split, int64_t *consumed, bool verbose, double *loss) {
    const Config *c = &run->config;
    int row = c->micro_batch_size * run->topology.dp_size, micro_batches = c->global_batch_size / row;
    run->site.phase = "evaluate";
    timer_start(run->timers, TIMER_EVALUATE, run->compute);
    if (verbose) log_line(run->log, "Evaluating on %lld samples", (long long)(c->eval_iters * c->global_batch_size));
    set_zero(run->compute, zero_loss_sum(run->zero), sizeof(float));
    int64_t at = *consumed;
    *consumed += c->eval_iters * c->global_batch_size;  // also when it is interrupted: a resumed run goes on with the same samples
    for (int64_t i = 0; i < c->eval_iters && !run->stop.reason; i++) {
        if (verbose) log_line(run->log, "Evaluating iter %lld/%lld", (long long)i + 1, (long long)c->eval_iters);
        for (int k = 0; k < micro_batches; k++) {
            Batch batch = next_batch(run, split, at + (int64_t)k * row);
            Pass pass = pass_over(run, &batch, c->eval_iters * micro_batches);
            gpt_forward(&run->gpt, &pass);
            gpt_head(&run->gpt, &pass);
        }
        at += c->global_batch_size;
        poll_stop(run);
    }
    *loss = mean_loss(run);
    timer_stop(run->timers, TIMER_EVALUATE, run->compute);
    return !run->stop.reason;
}

// False when data were found broken: the run ends.
static bool evaluate_and_log(Run *run, int split, const char *suffix, bool verbose) {
    if (run->config.eval_iters <= 0 || run->stop.reason || !loader_has_split(run->loader, split)) return true;
    int64_t test_consumed = 0;
    double loss;
    if (!evaluate(run, split, split == SPLIT_TEST ? &test_consumed : &run->consumed_valid, verbose, &loss)) {
        log_line(run->log, "Exiting during evaluation, %s", run->stop.reason == STOP_DURATION ? "timelimit reached" : run->stop.reason == STOP_SIGNAL ? "a signal came" : "data are broken");
        return data_sound(run);
    }
    char where[80];
    snprintf(where, sizeof where, "iteration %lld%s", (long long)run->iteration, suffix);
    const Timer evaluated[] = {TIMER_EVALUATE};
    log_phase_timers(run->log, run->timers, evaluated, 1, peers_of(run, run->launch.world));
    log_validation(run->log, where, run->iteration, run->consumed_train, loss);
    return true;
}

// ===== checkpoints ===============================================================================================================

static RunState current_state(const Run *run) {
    RunState state;
    memset(&state, 0, sizeof state);
    state.iteration = run->iteration;
    state.consumed_train_samples = run->consumed_train;
    state.consumed_valid_samples = run->consumed_valid;
    state.scheduler_samples = run->scheduled;
    state.adam_steps = run->last.adam_steps;
    state.beta1_power = run->last.beta1_power;
    state.beta2_power = run->last.beta2_power;
    sentry_save(&run->sentry, &run->last, &state);
    state.flops_so_far = run->flops_so_far;
    state.train_split_samples = run->split_samples[SPLIT_TRAIN];
    state.valid_split_samples = run->split_samples[SPLIT_VALID];
    return state;
}

// The save in the background one part further, or to its end. False when it failed, on every rank.
static bool advance_save(Run *run, bool to_the_end) {
    if (!run->saver.job) return true;
    run->site.phase = "save checkpoint";
    return agreed(run, saver_advance(&run->saver, to_the_end, &run->error));
}

// Compares all ranks' weights and repairs what differs.
static bool replicas_sound(Run *run) { return agreed(run, replicas_verify(run->zero, peers_of(run, run->dp_group), run->log, &run->sentry.repairs, &run->error)); }

static bool save_checkpoint(Run *run) {
    settle(run, 0);
    if (!agreed(run, zero_wire_sound(run->zero, peers_of(run, run->dp_group), &run->error))) return false;
    if (!run->config.save || run->last_saved == run->iteration) return true;
    if (run->config.verify_replicas_interval && !replicas_sound(run)) return false;
    run->site.phase = "save checkpoint";
    timer_start(run->timers, TIMER_SAVE_CHECKPOINT, NULL);
    RunState state = current_state(run);
    bool ok = agreed(run, saver_save(&run->saver, &state, &run->error));
    timer_stop(run->timers, TIMER_SAVE_CHECKPOINT, NULL);
    const Timer saved[] = {TIMER_SAVE_CHECKPOINT};
    if (ok) log_phase_timers(run->log, run->timers, saved, 1, peers_of(run, run->launch.world));
    if (ok) run->last_saved = run->iteration;
    return ok;
}

static bool tensors_match(Run *run, const Checkpoint *checkpoint) {
    int count;
    CheckpointTensor *tensors = zero_checkpoint_tensors(run->zero, &count);
    bool ok = checkpoint_check_tensors(checkpoint, tensors, count, &run->error);
    free(tensors);
    return ok;
}

// Takes counters, schedule, weights and moments from an opened checkpoint, as the flags say.
static bool restore(Run *run, const Checkpoint *checkpoint) {
    Config *c = &run->config;
    const RunState *state = checkpoint_state(checkpoint);
    bool optimizer = !c->finetune && !c->no_load_optim;
    char notes[2048] = "";
    if (!config_match_checkpoint(c, checkpoint_arguments(checkpoint), notes, sizeof notes, &run->error) ||
        !tensors_match(run, checkpoint)) return false;
    if (!c->finetune) config_go_on(c, state->iteration, state->consumed_train_samples, notes, sizeof notes);
    if (run->launch.rank == 0) fputs(notes, stdout);
    if (optimizer && !checkpoint_has(checkpoint, SLICE_MASTER)) {
        return error_set(&run->error, EXIT_CHECKPOINT, "the checkpoint in %s was saved without the optimizer; add --no-load-optim or --finetune", c->load);
    }
    if (!zero_restore(run->zero, checkpoint, optimizer, &run->error)) return false;
    if (c->finetune) return true;
    run->iteration = state->iteration;
    run->consumed_train = state->consumed_train_samples;
    run->consumed_valid = c->skip_train ? 0 : state->consumed_valid_samples;
    run->split_samples[SPLIT_TRAIN] = state->train_split_samples;
    run->split_samples[SPLIT_VALID] = state->valid_split_samples;
    sentry_restore(&run->sentry, &run->last, state);
    run->flops_so_far = state->flops_so_far;
    if (!optimizer) return true;  // Adam and the schedule start anew, as in Megatron: fresh moments want a warm-up
    run->scheduled = state->scheduler_samples;
    run->last.adam_steps = state->adam_steps;
    run->last.beta1_power = state->beta1_power;
    run->last.beta2_power = state->beta2_power;
    zero_set_counters(run->zero, &run->last);
    return true;
}

static void fresh_weights(Run *run) {
    gpt_init_weights(&run->gpt, (uint64_t)run->config.seed, peers_of(run, run->dp_group));
    zero_masters_from_weights(run->zero);
}

// Fills the weights. --load: Megatron's rules. No tracker and no checkpoints mean a fresh start, so that the same script starts and resumes a run.
static bool load_checkpoint(Run *run) {
    Config *c = &run->config;
    run->site.phase = "load checkpoint";
    run->last.beta1_power = run->last.beta2_power = 1.0;
    run->went_on_from = -1;
    if (!c->load) {
        fresh_weights(run);
        return true;
    }
    char lost[1400] = "", fallback[1400];
    int64_t iteration = run->launch.rank == 0 ? checkpoint_find(c->load, lost, sizeof lost, &run->error) : 0;  // one answer for all ranks
    if (!agreed(run, iteration != CHECKPOINT_UNREADABLE)) return false;
    Peers peers = peers_of(run, run->launch.world);
    peers_broadcast(peers, &iteration, sizeof iteration, 0);
    peers_broadcast(peers, lost, sizeof lost, 0);
    if (iteration == NO_CHECKPOINT) {
        log_line(run->log, "WARNING: could not find the metadata file %s/latest_checkpointed_iteration.txt: starting from scratch", c->load);
        if (!c->exit_on_missing_checkpoint) {
            fresh_weights(run);
            return true;
        }
        log_line(run->log, ">> '--exit-on-missing-checkpoint' set ... exiting. <<");
        run->exit_code = EXIT_DONE;
        return false;
    }
    if (*lost) log_line(run->log, "%s", lost);
    if (!agreed(run, same_checkpoint(c->load, iteration, peers, &run->error))) return false;
    log_line(run->log, " loading checkpoint from %s at iteration %lld", c->load, (long long)iteration);
    timer_start(run->timers, TIMER_LOAD_CHECKPOINT, run->compute);
    Checkpoint *checkpoint = checkpoint_open_sound(c->load, &iteration, peers, fallback, sizeof fallback, &run->error);
    if (*fallback) log_line(run->log, "%s", fallback);
    bool ok = agreed(run, checkpoint != NULL) && agreed(run, restore(run, checkpoint));
    if (checkpoint) checkpoint_close(checkpoint);
    timer_stop(run->timers, TIMER_LOAD_CHECKPOINT, run->compute);
    if (ok) log_line(run->log, "  successfully loaded checkpoint from %s at iteration %lld", c->load, (long long)iteration);
    // Counts as saved only where it lies in --save and the tracker names it; else the end of the run saves again, which puts the tracker right.
    run->last_saved = c->save && !strcmp(c->save, c->load) && !*lost && !*fallback ? run->iteration : 0;
    run->went_on_from = c->save && !c->finetune && save_folder_same(c->save, c->load) ? iteration : -1;
    return ok;
}

// ===== sampling ==================================================================================================================

// The prompt's ids, or EOD alone for an empty one.
static TokenBuffer prompt_ids(const Run *run) {
    TokenBuffer ids = {NULL, 0, 0};
    int64_t replaced = 0;
    Encoder *encoder = encoder_create(run->tokenizer);
    encoder_encode(encoder, run->config.sample_prompt, strlen(run->config.sample_prompt), &ids, &replaced);
    encoder_free(encoder);
    if (replaced) log_line(run->log, "WARNING: --sample-prompt has %lld places that this tokenizer cannot encode; they are left out or replaced", (long long)replaced);
    if (ids.count == 0) token_buffer_append(&ids, tokenizer_eod(run->tokenizer));
    return ids;
}

// The token after ids[0..n), drawn from its logits (V, the pads left out): the last T tokens are the context.
static int next_token(Run *run, const int32_t *ids, int64_t n, const int32_t *positions, floatX *logits) {
    GPT *gpt = &run->gpt;
    int T = (int)(n < gpt->T ? n : gpt->T), words = run->config.vocab_size_unpadded;
    Pass pass;
    memset(&pass, 0, sizeof pass);
    pass.B = 1;
    pass.T = T;
    copy_to_device(run->compute, gpt->tokens, ids + n - T, (size_t)T * sizeof(int32_t));
    copy_to_device(run->compute, gpt->positions, positions, (size_t)T * sizeof(int32_t));
    gpt_forward(gpt, &pass);
    op_linear_forward(run->compute, gpt->logits, NULL, gpt->lnf + (int64_t)(T - 1) * gpt->C, zero_weight(run->zero, GPT_WTE), NULL, 1, gpt->C, gpt->V,
                      gpt->workspace);
    copy_to_host(run->compute, logits, gpt->logits, (size_t)words * sizeof(floatX));
    stream_synchronize(run->compute);
    return sample_token(logits, words, run->config.sample_temperature, (uint64_t)run->config.seed, n);
}

// --sample-prompt: rank 0 writes text with the model as it is; every replica could, they are equal. Needs no random state and no batch: training goes on as without.
static void write_sample(Run *run) {
    const Config *c = &run->config;
    if (!c->sample_prompt || !run->tokenizer) return;
    zero_weights_wait_all(run->zero);
    run->site.phase = "sample";
    TokenBuffer prompt = prompt_ids(run);
    int64_t total = prompt.count + c->sample_tokens, n = prompt.count;
    int32_t *ids = (int32_t *)xcalloc((size_t)total + 1, sizeof(int32_t), "the sample");
    int32_t *positions = (int32_t *)xcalloc((size_t)run->gpt.T, sizeof(int32_t), "the sample");
    floatX *logits = (floatX *)xcalloc((size_t)run->gpt.V, sizeof(floatX), "the sample");
    for (int t = 0; t < run->gpt.T; t++) positions[t] = t;
    for (int64_t i = 0; i < n; i++) ids[i] = prompt.ids[i];
    for (; n < total; n++) {
        if (run->launch.rank == 0) ids[n] = next_token(run, ids, n, positions, logits);
        meet(run);  // at each token: the others wait for rank 0, and a single wait has a limit
    }
    if (run->launch.rank == 0) sample_log(run->log, run->iteration, run->tokenizer, ids, n);
    free(ids);
    free(positions);
    free(logits);
    token_buffer_free(&prompt);
}

// ===== the loop ==================================================================================================================

// After a step that the sentry ends the run for: losses or gradients not finite, too many skipped steps, a message that did not arrive as it was sent.
static bool verdict_ends_run(Run *run) {
    if (!run->sentry.ended_at) return false;
    run->exit_code = run->error.code;
    run->site.iteration = run->sentry.ended_at;
    run->site.phase = "update";
    if (run->launch.rank == 0) error_print(&run->site, run->error.what);
    return true;
}

static void save_and_leave(Run *run, const char *why, int exit_code) {
    settle(run, 0);
    if (verdict_ends_run(run)) return;
    run->exit_code = exit_code;
    if (save_checkpoint(run) && advance_save(run, true)) log_datetime(run->log, "%s", why);
}

// What Megatron checks after each iteration, in its order: evaluation, signal, save, duration, exit interval. True: leave the loop.
static bool after_step(Run *run) {
    const Config *c = &run->config;
    char why[96];
    double since = monotonic_seconds();
    bool evaluating = due(run->iteration, c->eval_interval) && c->eval_iters > 0 && loader_has_split(run->loader, SPLIT_VALID);
    bool saving = c->save && due(run->iteration, c->save_interval), verifying = due(run->iteration, c->verify_replicas_interval);
    bool probing = probe_due(run->zero);
    // Replicas are repaired before anything measures them or writes with them.
    if (verifying && !replicas_sound(run)) return true;
    if (probing) probe_report(run->zero, run->log, peers_of(run, run->dp_group));
    if (evaluating && !evaluate_and_log(run, SPLIT_VALID, "", false)) return true;
    bool sampling = due(run->iteration, c->sample_interval) && run->iteration < c->train_iters;  // the last one follows training
    if (sampling) write_sample(run);
    if (run->stop.reason == STOP_SIGNAL) {
        snprintf(why, sizeof why, "exiting program after receiving %s.", stop_signal_name(&run->stop));
        save_and_leave(run, why, EXIT_STOPPED);
        return true;
    }
    if (saving && !save_checkpoint(run)) return true;
    if (run->stop.reason == STOP_DURATION) {
        snprintf(why, sizeof why, "exiting program after %.1f minutes", (monotonic_seconds() - run->started) / 60.0);
        save_and_leave(run, why, EXIT_DONE);
        return true;
    }
    if (due(run->iteration, c->exit_interval)) {
        snprintf(why, sizeof why, "exiting program at iteration %lld", (long long)run->iteration);
        save_and_leave(run, why, EXIT_DONE);
        return true;
    }
    if (evaluating || saving || verifying || probing || sampling) exclude_since(run, since);
    return false;
}

// The verdict of the latest step is needed at once when something is printed, saved, decided or computed from it; the lines of single
// steps (JSON, TensorBoard) follow a step late.
static bool needs_verdict(const Run *run) {
    const Config *c = &run->config;
    int64_t i = run->iteration;
    return due(i, c->log_interval) || due(i, c->eval_interval) || due(i, c->save_interval) || due(i, c->exit_interval) || c->log_params_norm ||
           c->log_num_zeros_in_grad || i >= c->train_iters;
}

// True when training reached its end; false when it was left early (run->exit_code says how).
static bool train(Run *run) {
    const Config *c = &run->config;
    if (run->iteration >= c->train_iters) log_line(run->log, "the checkpoint is at iteration %lld of %lld: nothing is left to train", (long long)run->iteration,
                                                   (long long)c->train_iters);
    log_datetime(run->log, "before the start of training step");
    begin_interval(run);
    while (run->iteration < c->train_iters) {
        train_step(run);
        poll_stop(run);
        if (!data_sound(run) || (!run->stop.busy && !advance_save(run, false))) return false;
        if (needs_verdict(run)) settle(run, 0);
        if (verdict_ends_run(run)) return false;
        if (due(run->iteration, c->log_interval)) end_interval(run);
        if (after_step(run)) return false;
    }
    log_datetime(run->log, "after training is done");
    return save_checkpoint(run);
}

static bool final_evaluation(Run *run) {
    return evaluate_and_log(run, SPLIT_VALID, " on validation set", true) && evaluate_and_log(run, SPLIT_TEST, " on test set", true);
}

// ===== setup =====================================================================================================================

// Sizes of the vocabulary: the tokenizer's, unless it would need files and there are none; 0 then, for which config_finish knows GPT-2's.
static bool open_tokenizer(Run *run, int *vocab, int *eod) {
    const Config *c = &run->config;
    if (c->tokenizer_type == TOKENIZER_GPT2_BPE && (!c->vocab_file || c->plan)) return true;
    run->tokenizer = tokenizer_open(c->tokenizer_type, c->vocab_file, c->merge_file, c->vocab_size, &run->error);
    if (!run->tokenizer) return false;
    *vocab = tokenizer_vocab_size(run->tokenizer);
    *eod = tokenizer_eod(run->tokenizer);
    return true;
}

// Everything that needs no device: topology, tokenizer, model, layout, memory plan.
static bool plan_run(Run *run) {
    Config *c = &run->config;
    int vocab = 0, eod = 0, ranks = c->plan_world_size ? c->plan_world_size : run->launch.size;
    int *hosts = c->plan_world_size ? (int *)xcalloc((size_t)ranks, sizeof(int), "the host table") : run->launch.host_of_rank;
    bool ok = topology_build(&run->topology, ranks == run->launch.size ? run->launch.rank : 0, ranks, hosts, c->gpus_per_node,
                             c->tensor_model_parallel_size, c->pipeline_model_parallel_size, &run->error);
    if (hosts != run->launch.host_of_rank) free(hosts);
    if (!ok || !open_tokenizer(run, &vocab, &eod) || !config_finish(c, ranks, vocab, eod, &run->error)) return false;
    run->site.node = run->topology.node;
    run->site.gpu = device_is_host() ? -1 : run->topology.device;
    if (config_only_checks_data(c)) return true;
    gpt_describe(&run->gpt, c);
    if (!op_check_model(run->gpt.C, run->gpt.NH, run->gpt.HD, run->gpt.F, run->gpt.V, &run->error)) return false;
    run->zero = zero_plan(c, &run->topology, run->gpt.tensor, run->gpt.tensors, &run->memory_plan, &run->error);
    if (!run->zero) return false;
    gpt_reserve(&run->gpt, &run->memory_plan);
    run->sentry.config = c;
    run->sentry.topology = &run->topology;
    return true;
}

// Once it is known where the run goes on: the order of the data depends on how often they are read in all.
static bool open_data(Run *run) {
    const Config *c = &run->config;
    LoaderOptions o = loader_options(c, run->topology.dp_rank, run->topology.dp_size);
    loader_options_go_on(&o, c, run->iteration, run->consumed_train, run->consumed_valid);
    run->site.phase = "load data";
    run->loader = loader_open(&o, peers_of(run, run->launch.host), &run->error);
    return run->loader != NULL;
}

static bool setup_data(Run *run) {
    timer_start(run->timers, TIMER_DATA_SETUP, NULL);
    if (!agreed(run, open_data(run)) || !agreed(run, same_data(run->loader, peers_of(run, run->launch.world), &run->error))) return false;
    if (run->launch.rank == 0) loader_print_summary(run->loader, stdout);
    for (int split = SPLIT_TRAIN; split <= SPLIT_VALID && !run->config.mock_data; split++) {
        int64_t samples = loader_samples(run->loader, split), before = run->split_samples[split];
        if (samples && before && samples != before) log_line(run->log, "the %s split has %lld samples and had %lld in the checkpoint: the data go on in another order",
                                                             split_name(split), (long long)samples, (long long)before);
        if (samples) run->split_samples[split] = samples;
    }
    run->site.phase = "setup";
    timer_stop(run->timers, TIMER_DATA_SETUP, NULL);
    return true;
}

static void print_start(Run *run) {
    const Config *c = &run->config;
    char libraries[512], backend[512];
    Error why;
    bool shared = zero_node_shares(run->zero, &why);
    version_libraries(libraries, sizeof libraries);
    device_libraries(backend, sizeof backend);
    log_line(run->log, "sdp4bit.c %s commit %s on %s (%s); %s", version_number(), version_commit(), device_name(run->device), backend, libraries);
    log_line(run->log, "using world size: %d, data-parallel size: %d, context-parallel size: 1 tensor-model-parallel size: %d, pipeline-model-parallel size: %d ",
             run->launch.size, run->topology.dp_size, run->topology.tp_size, run->topology.pp_size);
    log_line(run->log, "using %d nodes x %d data-parallel ranks%s", run->topology.nodes, run->topology.per_node, run->topology.borders_by_flag ? " (--gpus-per-node)" : "");
    if (c->emulate_nodes && device_is_host()) log_line(run->log, "WARNING: --emulate-nodes has no effect: CPU ranks send everything through MPI; it is for GPUs");
    node_exchange_report(run->log, peers_of(run, run->launch.world), &why, shared, c->node_exchange == NODE_EXCHANGE_COPIES);
    device_environment(backend, sizeof backend);
    if (*backend && run->topology.dp_size > 1) log_line(run->log, "WARNING: %s", backend);
    log_line(run->log, "using torch.bfloat16 for parameters ...");
    if (run->launch.rank == 0) config_print(c, stdout);
    log_line(run->log, "Weight Quantization: %s, group size = %d, bits = %d", c->quantized_weights ? "True" : "False", c->wq_group_size, c->weight_quantization_bits);
    log_line(run->log, "Gradient Quantization: %s, gradient quantization intra-node group size = %d, bits = %d; inter-node group size = %d, bits = %d.",
             c->quantized_gradients ? "True" : "False", c->gq_group_size_intra, c->gradient_quantization_bits_intra, c->gq_group_size_inter,
             c->gradient_quantization_bits_inter);
    if (run->topology.dp_size == 1) log_idle_flags(run->log);
    if (c->rampup_samples) log_line(run->log, "will use batch size rampup starting from global batch size %lld to global batch size %d with batch size increments %lld over %lld samples.",
                                    (long long)c->rampup_start, c->global_batch_size, (long long)c->rampup_increment, (long long)c->rampup_samples);
    else log_line(run->log, "setting number of micro-batches to constant %d", c->micro_batches);
    log_line(run->log, " > padded vocab (size: %d) with %d dummy tokens (new size: %d)", c->vocab_size_unpadded, c->vocab_size_padded - c->vocab_size_unpadded,
             c->vocab_size_padded);
    log_line(run->log, " > number of parameters on (tensor, pipeline) model parallel rank (0, 0): %lld", (long long)zero_layout(run->zero)->parameters);
    log_line(run->log, "memory plan: %.1f MiB per rank, %.1f MiB were free", (double)run->memory.planned / 0x1p20, (double)run->memory.share_before / 0x1p20);
}

static bool open_device(Run *run) {
    run->site.phase = "setup";
    placement_choose_device(peers_of(run, run->launch.host), &run->topology, run->config.emulate_nodes);
    // Error lines name a GPU by the rank's place on its host, for a rank that is shown its own GPU alone would say 0; by its index where ranks share GPUs.
    if (run->topology.device_sharers > 1 && !device_is_host()) run->site.gpu = run->topology.device;
    run->device = device_open(run->topology.device, &run->site, &run->error);
    if (!run->device) return false;
    device_set_deterministic(run->device, run->config.deterministic_mode);
    run->compute = stream_create(run->device, "compute");
    lanes_open(&run->lanes, run->device, run->topology.dp_size > 1 && !run->config.no_overlap);
    run->timers = timers_create(run->device, run->config.timing_log_level);
    run->log = log_open(&run->config, run->launch.size, run->launch.rank == 0, &run->site, &run->error);
    return run->log != NULL && probe_folder(&run->config, &run->error);
}

// In two steps: every rank looks at what is free before any of those that share it takes its part. CPU ranks of one host draw on the same memory.
static bool allocate(Run *run) {
    if (!agreed(run, open_device(run))) return false;
    bool nccl_in_node = run->config.node_exchange == NODE_EXCHANGE_NCCL && run->topology.per_node > 1;
    memory_measure(&run->memory, &run->memory_plan, run->device, device_is_host() ? run->topology.host_ranks : run->topology.device_sharers, run->launch.size, nccl_in_node);
    return agreed(run, true) && agreed(run, memory_allocate(&run->memory, &run->memory_plan, &run->config, gpt_planned_bytes, &run->error));
}

// Device, weights, data: everything up to the first iteration.
static bool start_run(Run *run) {
    if (!allocate(run)) return false;
    bool writes = run->config.save && run->launch.rank == 0;
    double limit = time_limit(run), patience = limit > 0 ? fmin(0.5 * limit, 20.0) : 20.0;
    bool ok = !writes || (durable_writable_folder(run->config.save, &run->error) && save_folder_lock(run->config.save, patience, &run->save_lock, &run->error));
    if (!agreed(run, ok) || (run->config.save && !agreed(run, same_save_folder(run->config.save, peers_of(run, run->launch.world), &run->error)))) return false;
    run->dp_group = peers_split(peers_of(run, run->launch.world), run->topology.pp_rank * run->topology.tp_size + run->topology.tp_rank, run->topology.dp_rank);
    if (run->config.emulate_nodes) emulate_nodes(&run->topology, &run->launch);
    run->comm = comm_create(run->device, &run->topology, run->dp_group, &run->error);
    if (!agreed(run, run->comm != NULL)) return false;
    comm_set_timeout(run->comm, time_limit(run));
    zero_start(run->zero, run->device, run->comm, run->compute, &run->lanes, run->timers);
    run->gpt.zero = run->zero;
    run->gpt.stream = run->compute;
    op_set_scratch(run->device, run->gpt.scratch);
    print_start(run);
    log_start(run->log, zero_layout(run->zero)->parameters, run->topology.nodes, device_name(run->device));
    timer_start(run->timers, TIMER_SETUP, NULL);
    if (!load_checkpoint(run)) return false;
    timer_stop(run->timers, TIMER_SETUP, NULL);
    if (!setup_data(run)) return false;
    timer_start(run->timers, TIMER_SETUP, NULL);
    run->schedule = schedule_from_config(&run->config);  // only now: a loaded checkpoint may bring its own
    const Config *c = &run->config;
    run->progress = progress_open(c->save, run->launch.size, run->flops_so_far, run->launch.rank == 0 && c->log_progress && c->save, &run->error);
    if (!agreed(run, run->progress != NULL)) return false;
    run->saver = saver_open(c, run->zero, run->log, run->progress, peers_of(run, run->launch.world), run->went_on_from, &run->save_lock);
    if (c->save && !agreed(run, saver_has_room(&run->saver, run->iteration, &run->error))) return false;
    timer_stop(run->timers, TIMER_SETUP, NULL);
    const Timer setup[] = {TIMER_SETUP, TIMER_DATA_SETUP};
    log_phase_timers(run->log, run->timers, setup, 2, peers_of(run, run->launch.world));
    return true;
}

static void close_run(Run *run) {
    zero_stop(run->zero);
    if (run->loader) loader_close(run->loader);
    memory_plan_free(&run->memory_plan, run->device);  // before the owners of the addresses it clears
    zero_free(run->zero);
    run->zero = NULL;
    gpt_free(&run->gpt);
    if (run->comm) comm_destroy(run->comm);
    if (run->dp_group != MPI_COMM_NULL) MPI_Comm_free(&run->dp_group);
    if (run->timers) timers_destroy(run->timers);
    if (run->compute) stream_destroy(run->compute);
    lanes_close(&run->lanes);
    if (run->device) device_close(run->device);
    if (run->progress) progress_close(run->progress);
    if (run->log) log_close(run->log);
    if (run->tokenizer) tokenizer_close(run->tokenizer);
    save_folder_unlock(run->save_lock);
    saver_close(&run->saver);
    config_free(&run->config);
}

// ===== main ======================================================================================================================

static const char *decode_token(const void *tokenizer, int id, size_t *bytes) { return tokenizer_decode((const Tokenizer *)tokenizer, id, bytes); }

// --inspect-data and --check-data: rank 0 looks at the data, nobody trains.
static void look_at_data(Run *run) {
    const Config *c = &run->config;
    LoaderOptions o = loader_options(c, run->topology.dp_rank, run->topology.dp_size);
    if (!agreed(run, run->launch.rank > 0 || !c->check_data || check_data(&o, stdout, &run->error))) return;
    if (c->inspect_data < 0 || !agreed(run, open_data(run))) return;
    bool ok = true;
    if (run->launch.rank == 0) {
        ok = loader_inspect(run->loader, c->inspect_data, stdout, run->tokenizer ? decode_token : NULL, run->tokenizer, &run->error);
    }
    agreed(run, ok);
}

static void run_training(Run *run) {
    if (!start_run(run)) return;
    if (!run->config.skip_train && !train(run)) return;
    if (!final_evaluation(run)) return;
    if (run->stop.reason == STOP_SIGNAL) run->exit_code = EXIT_STOPPED;  // the trained model is saved; only the last figures are missing
    else write_sample(run);
}

// --help and --version need neither MPI nor ranks; under mpirun the first rank answers for all.
static int answer_without_training(const Config *config, char *program) {
    if (launch_rank_guess() > 0) return EXIT_DONE;
    if (config->help) {
        config_help(program, stdout);
    } else {
        char libraries[512], backend[512];
        version_libraries(libraries, sizeof libraries);
        device_libraries(backend, sizeof backend);
        printf("sdp4bit.c %s commit %s (%s; %s; %s)\n", version_number(), version_commit(), device_backend(), backend, libraries);
    }
    return EXIT_DONE;
}

int main(int argc, char **argv) {
    Run run;
    char notes[4096] = "";
    memset(&run, 0, sizeof run);
    run.save_lock = -1;
    run.dp_group = MPI_COMM_NULL;
    run.site.rank = -1;
    run.started = monotonic_seconds();
    bool parsed = config_parse(&run.config, argc, argv, notes, sizeof notes, &run.error);
    if (parsed && (run.config.help || run.config.version)) return answer_without_training(&run.config, argv[0]);

    // Looking at data or at a plan has nothing to save: there a signal ends the process as usual.
    bool trains = parsed && !run.config.plan && !run.config.check_data && run.config.inspect_data < 0;
    if (trains) stop_catch_signals();
    signal(SIGXFSZ, SIG_IGN);  // a limit on file sizes is an error of write(2), which is told in words
    signal(SIGPIPE, SIG_IGN);  // nobody reads the log lines any more: no reason to lose a run
    setvbuf(stdout, NULL, _IOLBF, 0);  // lines come whole and at once, into a pipe or file too
    double limit = trains ? 60.0 * run.config.distributed_timeout_minutes : 0.0;
    LimitTimer *timer = limit_timer_starting(limit);
    launch_init(&run.launch, &argc, &argv);
    bool ok = agreed(&run, parsed);
    if (ok && run.launch.rank == 0) fputs(notes, stdout);
    ok = ok && agreed(&run, plan_run(&run));
    run.site.rank = run.launch.rank;
    site_of_thread(&run.site);
    ok = ok && agreed(&run, same_flags(&run.config, peers_of(&run, run.launch.world), &run.error));
    if (ok) heartbeat_open(&run.site, run.launch.host, run.launch.size, limit);
    limit_timer_off(timer);
    if (ok && run.config.plan) {
        if (run.launch.rank == 0) plan_report(&run.config, run.zero, &run.memory_plan, gpt_planned_bytes, stdout);
    } else if (ok && (run.config.check_data || run.config.inspect_data >= 0)) {
        look_at_data(&run);
    } else if (ok) {
        run_training(&run);
        advance_save(&run, true);  // one that is still being written in the background, whatever ended the run
    }
    int code = run.exit_code;
    close_run(&run);
    heartbeat_close(&run.site);
    site_of_thread(NULL);
    timer = limit_timer_ending(limit, code);
    launch_finalize(&run.launch);
    limit_timer_off(timer);
    return code;
}
