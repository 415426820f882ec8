// sdp4bit.c: GPT pretraining with sharded data parallelism in (almost) 4 bits. This file is the
// story, top to bottom: the GPT, the training step, evaluation, the loop, main(). It is written in
// the common subset of C11 and CUDA C++ and holds no kernels: compiled as C it is the CPU program,
// compiled by nvcc the GPU program.

#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/version.h"
#include "llmc/ranks/heartbeat.h"    // ranks that hang are named
#include "llmc/ranks/parallel.h"     // initial weights on all cores
#include "llmc/run/plan_report.h"    // --plan
#include "llmc/run/run.h"            // what a run holds beside the model
#include "llmc/run/same_run.h"       // one set of flags on all machines
#include "llmc/state/probe.h"        // figures on what quantisation does
#include "train_gpt.h"               // GPT, ops, Zero

// ===== the GPT ===================================================================================================================
// GPT-2 as Megatron-LM trains it: learned positions, pre-LayerNorm, per-head interleaved QKV rows,
// tanh GELU, tied head.

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
    // Every rank draws all of its replica: what a tensor's numbers are depends on the seed and the
    // tensor alone.
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

// Layer l from its first LayerNorm's output to GELU's. The MLP's second linear and its sum into the
// residual stream are gpt_forward's, which fuses that sum with the next LayerNorm; a layer that is
// computed again needs nothing beyond GELU.
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
        // The MLP's sum is fused with the LayerNorm that follows it: the next layer's first, or the
        // final one.
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

// One layer, its last op first. In: dbranch, the gradient of the MLP's output, and gpt->dresidual,
// that of the layer's output (the same without dropout). Out: the same two for the layer below. A
// bias gradient is a column sum, taken by the op that writes those columns: of FC2_B by the
// LayerNorm above, of FC1_B by the second linear, of PROJ_B by the second LayerNorm; of QKV_B alone
// by its own linear.
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

// The logits of the token after ids[0..n), the pads' too; the last T tokens are the context. See
// write_sample.
static void gpt_next_logits(void *model, const int32_t *ids, int64_t n, floatX *logits) {
    GPT *gpt = (GPT *)model;
    int T = (int)(n < gpt->T ? n : gpt->T);
    Pass pass;
    memset(&pass, 0, sizeof pass);
    pass.B = 1;
    pass.T = T;
    int32_t *positions = (int32_t *)xcalloc((size_t)T, sizeof(int32_t), "the sample");
    for (int t = 0; t < T; t++) positions[t] = t;
    copy_to_device(gpt->stream, gpt->tokens, ids + n - T, (size_t)T * sizeof(int32_t));
    copy_to_device(gpt->stream, gpt->positions, positions, (size_t)T * sizeof(int32_t));
    gpt_forward(gpt, &pass);
    op_linear_forward(gpt->stream, gpt->logits, NULL, gpt->lnf + (int64_t)(T - 1) * gpt->C,
                      zero_weight(gpt->zero, GPT_WTE), NULL, 1, gpt->C, gpt->V, gpt->workspace);
    copy_to_host(gpt->stream, logits, gpt->logits, (size_t)gpt->V * sizeof(floatX));
    stream_synchronize(gpt->stream);
    free(positions);
}

// ===== the training step =======================================================================================
// What a run holds beside the model, its set-up, its log lines and its checkpoints: llmc/run/run.h.

// After each step and each part of an evaluation: run->stop, the same on every rank.
static void poll_stop(Run *run) {
    double minutes = run->config.exit_duration_in_mins;
    bool late = minutes > 0 && monotonic_seconds() - run->started > 60.0 * minutes;
    StopReason own = run->error.code == EXIT_DATA ? STOP_DATA : late ? STOP_DURATION : GO_ON;
    run->stop.busy = saver_busy(&run->saver);
    stop_poll(&run->stop, own, run_peers(run, run->launch.world));
}

// False when some rank could not read its data: the run ends, and nothing of the step is logged or
// saved.
static bool data_sound(Run *run) {
    if (run->stop.reason != STOP_DATA) return true;
    run->site.phase = "read data";
    return run_agreed(run, run->error.code != EXIT_DATA);
}

// Uploads the micro-batch of this rank that starts at global sample `consumed`. Data found broken
// in mid-run must not stop this rank at once: the others are already in this step's collectives. It
// goes on with zeros, and all ranks leave together at the step's end (data_sound).
static Batch next_batch(Run *run, GPT *gpt, int split, int64_t consumed) {
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

// Megatron's loss: the mean over the unmasked tokens of each micro-batch, averaged over `parts`
// micro-batches.
static float loss_scale_of(const GPT *gpt, const Batch *batch, int64_t parts) {
    int64_t N = (int64_t)gpt->B * gpt->T;
    double tokens = (double)N;
    if (batch->loss_mask) {
        tokens = 0.0;
        for (int64_t i = 0; i < N; i++) tokens += batch->loss_mask[i];
    }
    return tokens > 0 ? (float)(1.0 / (tokens * (double)parts)) : 0.0f;
}

// Over an uploaded batch, one of `parts` whose losses are averaged; without dropout and gradients
// as yet.
static Pass pass_over(const GPT *gpt, const Batch *batch, int64_t parts) {
    Pass pass;
    memset(&pass, 0, sizeof pass);
    pass.B = gpt->B;
    pass.T = gpt->T;
    pass.first_sample = batch->first_sample;
    pass.has_doc_start = batch->doc_start != NULL;
    pass.has_loss_mask = batch->loss_mask != NULL;
    pass.loss_scale = loss_scale_of(gpt, batch, parts);
    return pass;
}

// Micro-batch k of a step, which begins with global sample `consumed`.
static void micro_batch(Run *run, GPT *gpt, int64_t consumed, int k, int micro_batches) {
    Batch batch = next_batch(run, gpt, SPLIT_TRAIN, consumed);
    Pass pass = pass_over(gpt, &batch, micro_batches);
    pass.training = pass.backward = true;
    pass.first = k == 0;
    pass.last = k == micro_batches - 1;
    timer_start(run->timers, TIMER_FORWARD_COMPUTE, run->compute);
    gpt_forward(gpt, &pass);
    gpt_head(gpt, &pass);
    timer_stop(run->timers, TIMER_FORWARD_COMPUTE, run->compute);
    timer_start(run->timers, TIMER_BACKWARD_COMPUTE, run->compute);
    gpt_backward(gpt, &pass);
    timer_stop(run->timers, TIMER_BACKWARD_COMPUTE, run->compute);
}

// Launches one iteration. The host runs at most one step ahead of the verdicts.
static void train_step(Run *run, GPT *gpt) {
    const Config *c = &run->config;
    int batch = config_global_batch_size(c, run->consumed_train);
    int row = c->micro_batch_size * run->mesh.dp.size, micro_batches = batch / row;
    run->site.iteration = ++run->iteration;
    run->site.phase = "forward and backward";
    timer_start(run->timers, TIMER_FORWARD_BACKWARD, run->compute);
    zero_step_begins(run->zero, run->iteration);
    for (int k = 0; k < micro_batches; k++) {
        micro_batch(run, gpt, run->consumed_train + (int64_t)k * row, k, micro_batches);
        // The copies of the last --async-save: the device has work for a while beside them.
        if (k == 0) zero_copy_staged(run->zero);
    }
    timer_stop(run->timers, TIMER_FORWARD_BACKWARD, run->compute);

    run->site.phase = "update";
    // The verdict of the step before is not known to the host yet: the device picks one of two
    // learning rates.
    int64_t skipped_n = run->scheduled, applied_n = run->scheduled + (run->unsettled ? run->step_batch : 0);
    zero_update(run->zero, schedule_lr(&run->schedule, applied_n), schedule_lr(&run->schedule, skipped_n),
                schedule_weight_decay(&run->schedule, run->consumed_train));
    settle(run, 1);
    run->unsettled = true;
    run->step_batch = batch;
    run->consumed_train += batch;
    run->interval.iterations++;
    run->interval.samples += batch;
    run->flops_so_far += megatron_flops(c, batch);
}

// ===== evaluation ==============================================================================================

// The ranks' mean of the loss, added in rank order.
static double mean_loss(Run *run) {
    float own = 0.0f;
    copy_to_host(run->compute, &own, zero_loss_sum(run->zero), sizeof own);
    stream_synchronize(run->compute);
    float *all = (float *)xcalloc((size_t)run->mesh.dp.size, sizeof(float), "losses");
    peers_gather(run_peers(run, run->mesh.dp.mpi), &own, all, 1, MPI_FLOAT);
    double sum = 0.0;
    for (int r = 0; r < run->mesh.dp.size; r++) sum += all[r];
    free(all);
    return sum / run->mesh.dp.size;
}

// Mean loss over eval_iters global batches from sample `at`. The latest step's verdict must have
// been read, for its loss's place is used again. Cut short when run->stop says so.
static double evaluate(Run *run, GPT *gpt, int split, int64_t at, bool verbose) {
    const Config *c = &run->config;
    int row = c->micro_batch_size * run->mesh.dp.size, micro_batches = c->global_batch_size / row;
    long long iters = run_eval_iters(run, split);
    set_zero(run->compute, zero_loss_sum(run->zero), sizeof(float));
    if (verbose) log_line(run->log, "Evaluating on %lld samples", iters * c->global_batch_size);
    for (long long i = 0; i < iters && !run->stop.reason; i++) {
        if (verbose) log_line(run->log, "Evaluating iter %lld/%lld", i + 1, iters);
        for (int k = 0; k < micro_batches; k++) {
            Batch batch = next_batch(run, gpt, split, at + (int64_t)k * row);
            Pass pass = pass_over(gpt, &batch, iters * micro_batches);
            gpt_forward(gpt, &pass);
            gpt_head(gpt, &pass);
        }
        at += c->global_batch_size;
        poll_stop(run);
    }
    return mean_loss(run);
}

static const char *why_stopped(const Run *run) {
    switch (run->stop.reason) {
        case STOP_DURATION: return "timelimit reached";
        case STOP_SIGNAL: return "a signal came";
        default: return "data are broken";
    }
}

// The validation iterator goes on where it stopped, as Megatron's does; also after an evaluation
// that was cut short, so that a resumed run goes on with the same samples. False when data were
// found broken: the run ends.
static bool evaluate_and_log(Run *run, GPT *gpt, int split, const char *suffix, bool verbose) {
    const Config *c = &run->config;
    if (run_eval_iters(run, split) <= 0 || run->stop.reason) return true;
    bool anew = split == SPLIT_TEST || c->full_validation;
    int64_t from_start = 0, *consumed = anew ? &from_start : &run->consumed_valid, at = *consumed;
    *consumed += c->eval_iters * c->global_batch_size;
    run->site.phase = "evaluate";
    timer_start(run->timers, TIMER_EVALUATE, run->compute);
    double loss = evaluate(run, gpt, split, at, verbose);
    timer_stop(run->timers, TIMER_EVALUATE, run->compute);
    if (run->stop.reason) {
        log_line(run->log, "Exiting during evaluation, %s", why_stopped(run));
        return data_sound(run);
    }
    char where[80];
    snprintf(where, sizeof where, "iteration %lld%s", (long long)run->iteration, suffix);
    const Timer evaluated[] = {TIMER_EVALUATE};
    log_phase_timers(run->log, run->timers, evaluated, 1, run_peers(run, run->launch.world));
    log_validation(run->log, where, run->iteration, run->consumed_train, loss);
    return true;
}

static bool final_evaluation(Run *run, GPT *gpt) {
    return evaluate_and_log(run, gpt, SPLIT_VALID, " on validation set", true) &&
           evaluate_and_log(run, gpt, SPLIT_TEST, " on test set", true);
}

// ===== the loop ================================================================================================

// After a step that the sentry ends the run for: losses or gradients that are not finite, too many
// skipped steps, a message that did not arrive as it was sent.
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

// A reason to leave that is not an error. Asked twice after a step: before and after the save that
// is due.
static bool leaves(Run *run, bool after_save) {
    char why[96];
    int code = EXIT_DONE;
    if (!after_save) {
        if (run->stop.reason != STOP_SIGNAL) return false;
        snprintf(why, sizeof why, "exiting program after receiving %s.", stop_signal_name(&run->stop));
        code = EXIT_STOPPED;
    } else if (run->stop.reason == STOP_DURATION) {
        double minutes = (monotonic_seconds() - run->started) / 60.0;
        snprintf(why, sizeof why, "exiting program after %.1f minutes", minutes);
    } else if (due(run->iteration, run->config.exit_interval)) {
        snprintf(why, sizeof why, "exiting program at iteration %lld", (long long)run->iteration);
    } else {
        return false;
    }
    save_and_leave(run, why, code);
    return true;
}

// What Megatron checks after each iteration, in its order: evaluation, signal, save, duration, exit
// interval. True: leave the loop.
static bool after_step(Run *run, GPT *gpt) {
    const Config *c = &run->config;
    int64_t i = run->iteration;
    double since = monotonic_seconds();
    bool evaluating = due(i, c->eval_interval) && run_eval_iters(run, SPLIT_VALID) > 0;
    bool saving = c->save && due(i, c->save_interval), verifying = due(i, c->verify_replicas_interval);
    bool probing = probe_due(run->zero);
    bool sampling = due(i, c->sample_interval) && i < c->train_iters;  // the last one follows training
    // Replicas are repaired before anything measures them or writes with them.
    if (verifying && !replicas_sound(run)) return true;
    if (probing) probe_report(run->zero, run->log, run_peers(run, run->mesh.dp.mpi));
    if (evaluating && !evaluate_and_log(run, gpt, SPLIT_VALID, "", false)) return true;
    if (sampling) write_sample(run, gpt_next_logits, gpt);
    if (leaves(run, false)) return true;
    if (saving && !save_checkpoint(run)) return true;
    if (leaves(run, true)) return true;
    if (evaluating || saving || verifying || probing || sampling) interval_exclude(run, since);
    return false;
}

// The verdict of the latest step is needed at once when something is printed, saved, decided or
// computed from it. The lines of single steps (JSON, TensorBoard) follow a step late.
static bool needs_verdict(const Run *run) {
    const Config *c = &run->config;
    int64_t i = run->iteration;
    return due(i, c->log_interval) || due(i, c->eval_interval) || due(i, c->save_interval) ||
           due(i, c->exit_interval) || c->log_params_norm || c->log_num_zeros_in_grad || i >= c->train_iters;
}

// True when training reached its end; false when it was left early (run->exit_code says how).
static bool train(Run *run, GPT *gpt) {
    const Config *c = &run->config;
    if (run->iteration >= c->train_iters) {
        log_line(run->log, "the checkpoint is at iteration %lld of %lld: nothing is left to train",
                 (long long)run->iteration, (long long)c->train_iters);
    }
    log_datetime(run->log, "before the start of training step");
    interval_begin(run);
    while (run->iteration < c->train_iters) {
        train_step(run, gpt);
        poll_stop(run);
        if (!data_sound(run) || (!run->stop.busy && !advance_save(run, false))) return false;
        if (needs_verdict(run)) settle(run, 0);
        if (verdict_ends_run(run)) return false;
        if (due(run->iteration, c->log_interval)) interval_end(run);
        if (after_step(run, gpt)) return false;
    }
    log_datetime(run->log, "after training is done");
    return save_checkpoint(run);
}

// ===== main ====================================================================================================

// Everything that needs no device: where this rank stands, the model, its layout, the memory plan.
static bool plan_run(Run *run, GPT *gpt) {
    const Config *c = &run->config;
    if (!run_place(run)) return false;
    if (config_only_checks_data(c)) return true;
    gpt_describe(gpt, c);
    if (!op_check_model(gpt->C, gpt->NH, gpt->HD, gpt->F, gpt->V, &run->error)) return false;
    run->zero = zero_plan(c, &run->mesh, gpt->tensor, gpt->tensors, &run->memory_plan, &run->error);
    if (!run->zero) return false;
    gpt_reserve(gpt, &run->memory_plan);
    return true;
}

// The weights: of a checkpoint, or drawn.
static bool fill_weights(Run *run, GPT *gpt) {
    Loaded loaded = load_checkpoint(run);
    if (loaded != LOAD_FRESH) return loaded == LOAD_RESTORED;
    gpt_init_weights(gpt, (uint64_t)run->config.seed, run_peers(run, run->mesh.dp.mpi));
    zero_masters_from_weights(run->zero);
    return true;
}

// Device, groups, weights, data: everything up to the first iteration.
static bool start_run(Run *run, GPT *gpt) {
    if (!run_allocate(run, gpt_planned_bytes) || !run_connect(run)) return false;
    gpt->zero = run->zero;
    gpt->stream = run->compute;
    op_set_scratch(run->device, gpt->scratch);
    report_start(run);
    timer_start(run->timers, TIMER_SETUP, NULL);
    if (!fill_weights(run, gpt)) return false;
    timer_stop(run->timers, TIMER_SETUP, NULL);
    if (!run_setup_data(run)) return false;
    timer_start(run->timers, TIMER_SETUP, NULL);
    if (!run_prepare_saves(run)) return false;
    timer_stop(run->timers, TIMER_SETUP, NULL);
    const Timer setup[] = {TIMER_SETUP, TIMER_DATA_SETUP};
    log_phase_timers(run->log, run->timers, setup, 2, run_peers(run, run->launch.world));
    return true;
}

static void run_training(Run *run, GPT *gpt) {
    if (!start_run(run, gpt)) return;
    if (!run->config.skip_train && !train(run, gpt)) return;
    if (!final_evaluation(run, gpt)) return;
    // A signal now: the trained model is saved, and only the last figures are missing.
    if (run->stop.reason == STOP_SIGNAL) run->exit_code = EXIT_STOPPED;
    else write_sample(run, gpt_next_logits, gpt);
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
        printf("sdp4bit.c %s commit %s (%s; %s; %s)\n", version_number(), version_commit(), device_backend(), backend,
               libraries);
    }
    return EXIT_DONE;
}

// Plans what the flags say, and does it: --plan, a look at the data, or training.
static void run_as_told(Run *run, GPT *gpt, double limit) {
    bool ok = run_agreed(run, plan_run(run, gpt));
    run->site.rank = run->launch.rank;
    site_of_thread(&run->site);
    Peers world = run_peers(run, run->launch.world);
    ok = ok && run_agreed(run, same_flags(&run->config, world, &run->error));
    if (!ok) return;
    heartbeat_open(&run->site, run->launch.host, run->launch.size, limit);
    if (run->config.plan) {
        if (run->launch.rank == 0) plan_report(&run->config, run->zero, &run->memory_plan, gpt_planned_bytes, stdout);
    } else if (run->config.check_data || run->config.inspect_data >= 0) {
        run_look_at_data(run);
    } else {
        run_training(run, gpt);
        advance_save(run, true);  // one that is still being written in the background, whatever ended the run
    }
}

int main(int argc, char **argv) {
    Run run;
    GPT gpt;
    char notes[4096] = "";
    name_illegal_instructions();
    run_init(&run);
    memset(&gpt, 0, sizeof gpt);
    bool parsed = config_parse(&run.config, argc, argv, notes, sizeof notes, &run.error);
    if (parsed && (run.config.help || run.config.version)) return answer_without_training(&run.config, argv[0]);

    // Looking at data or at a plan has nothing to save: there a signal ends the process as usual.
    bool trains = parsed && !run.config.plan && !run.config.check_data && run.config.inspect_data < 0;
    if (trains) stop_catch_signals();
    signal(SIGXFSZ, SIG_IGN);  // a limit on file sizes is an error of write(2), which is told in words
    signal(SIGPIPE, SIG_IGN);  // nobody reads the log lines any more: no reason to lose a run
    setvbuf(stdout, NULL, _IOLBF, 0);  // lines come whole and at once, into a pipe or file too
    double limit = trains ? 60.0 * run.config.distributed_timeout_minutes : 0.0;
    heartbeat_starting(&run.site, limit);
    launch_init(&run.launch, &argc, &argv);
    if (run_agreed(&run, parsed)) {
        if (run.launch.rank == 0) fputs(notes, stdout);
        run_as_told(&run, &gpt, limit);
    }
    int code = run.exit_code;
    run_close(&run);
    gpt_free(&gpt);
    heartbeat_close(&run.site);
    site_of_thread(NULL);
    heartbeat_ending(&run.site, limit, code);
    launch_finalize(&run.launch);
    heartbeat_close(&run.site);
    return code;
}
