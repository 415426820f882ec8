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

// ===== the GPT ===================================================================================
// GPT-2 as Megatron-LM trains it: learned positions, pre-LayerNorm, per-head interleaved QKV rows,
// tanh GELU, tied head.
//
// The hidden state between layers is the residual stream. A layer begins with the sum of the stream
// and the branch of the layer below, which is fused with the layer's first LayerNorm. It ends with
// a branch of its own. The final LayerNorm begins like one more layer, in the table too.

int gpt_layer_tensor(const GPT *gpt, int layer, enum LayerTensor which) {
    return (gpt->stage.embeds ? 2 : 0) + layer * LAYER_TENSORS + (int)which;
}

static void add_tensor(GPT *gpt, const char *name, int64_t rows, int64_t columns, int split, int unit,
                       double std) {
    gpt->tensor[gpt->tensors++] = tensor_row(name, rows, columns, split, unit, std);
}

static void add_layer(GPT *gpt, int l, double std, int layers) {
    int64_t C = gpt->C, A = gpt->A, F = gpt->F;
    double scaled = std / sqrt(2.0 * layers);  // outputs onto the residual stream
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

Stage gpt_stage(const Config *config, int rank, int size) {
    int layers = config->num_layers / size;
    Stage stage = {rank * layers, (rank + 1) * layers, rank == 0, rank == size - 1};
    return stage;
}

// All rows of the whole model, of which a stage then keeps its own.
static void describe_whole(GPT *gpt, const Config *config) {
    int layers = config->num_layers;
    double std = config->init_method_std;
    gpt->tensor =
        (Tensor *)xcalloc((size_t)(4 + layers * LAYER_TENSORS), sizeof(Tensor), "the parameter table");
    add_tensor(gpt, "embedding.word_embeddings.weight", gpt->V, gpt->C, 0, 0, std);
    add_tensor(gpt, "embedding.position_embeddings.weight", gpt->P, gpt->C, -1, 0, std);
    for (int l = 0; l < layers; l++) add_layer(gpt, l, std, layers);
    add_tensor(gpt, "encoder.final_norm.weight", gpt->C, 0, -1, layers, -1);
    add_tensor(gpt, "encoder.final_norm.bias", gpt->C, 0, -1, layers, 0);
    tensors_number(gpt->tensor, gpt->tensors);
}

static void keep_stage(GPT *gpt) {
    const Stage *stage = &gpt->stage;
    int from = stage->embeds ? 0 : 2 + stage->first_layer * LAYER_TENSORS;
    int to = stage->heads ? gpt->tensors : 2 + stage->end_layer * LAYER_TENSORS;
    int units_before = stage->embeds ? 0 : stage->first_layer + 1;
    memmove(gpt->tensor, gpt->tensor + from, (size_t)(to - from) * sizeof(Tensor));
    gpt->tensors = to - from;
    for (int i = 0; i < gpt->tensors; i++) gpt->tensor[i].unit -= units_before;
}

void gpt_describe(GPT *gpt, const Config *config, Stage stage) {
    memset(gpt, 0, sizeof *gpt);
    gpt->B = config->micro_batch_size;
    gpt->T = config->seq_length;
    gpt->C = config->hidden_size;
    gpt->NH = config->num_attention_heads;
    gpt->HD = config->kv_channels;
    gpt->A = gpt->NH * gpt->HD;
    gpt->F = config->ffn_hidden_size;
    gpt->stage = stage;
    gpt->L = stage.end_layer - stage.first_layer;
    gpt->V = config->vocab_size_padded;
    gpt->P = config->max_position_embeddings;
    gpt->epsilon = (float)config->norm_epsilon;
    gpt->attention_dropout = (float)config->attention_dropout;
    gpt->hidden_dropout = (float)config->hidden_dropout;
    gpt->seed = (uint32_t)config->seed;
    gpt->recompute_full = config->recompute_granularity == RECOMPUTE_FULL;
    describe_whole(gpt, config);
    keep_stage(gpt);
}

bool gpt_check(const GPT *gpt, Error *err) {
    return op_check_model(gpt->C, gpt->NH, gpt->HD, gpt->F, gpt->V, (int64_t)gpt->B * gpt->T, err);
}

static size_t largest(size_t a, size_t b) { return a > b ? a : b; }

static size_t workspace_bytes(const GPT *gpt) {
    int64_t N = (int64_t)gpt->B * gpt->T;
    int widest = (int)largest(largest((size_t)gpt->F, 3 * (size_t)gpt->A), (size_t)gpt->C);
    size_t bytes = op_linear_workspace_bytes(N, widest, widest);
    bytes = largest(bytes, op_linear_workspace_bytes(1, gpt->C, gpt->V));  // one row of logits, for sampling
    bytes = largest(bytes, op_attention_workspace_bytes(gpt->B, gpt->T, gpt->NH, gpt->HD));
    return largest(bytes, op_head_workspace_bytes(N, gpt->C, (int)gpt->tensor[GPT_WTE].local[0]));
}

// A line of the memory plan. target: of a pointer.
typedef struct Buffer {
    const char *group, *purpose;
    size_t bytes;
    void *target;
} Buffer;

static void reserve(MemoryPlan *plan, const Buffer *buffers, size_t count) {
    for (const Buffer *b = buffers; b < buffers + count; b++) {
        memory_plan_reserve(plan, b->group, b->purpose, b->bytes, (void **)b->target);
    }
}

static void reserve_layer(const GPT *gpt, LayerActs *a, MemoryPlan *plan) {
    const char *group = "activations";
    size_t N = (size_t)gpt->B * (size_t)gpt->T, X = N * sizeof(floatX), C = (size_t)gpt->C;
    size_t saved = op_attention_saved_bytes(gpt->B, gpt->T, gpt->NH, gpt->HD);
    const Buffer buffers[] = {
        {group, "first LayerNorm", X * C, &a->ln1.y},
        {group, "first LayerNorm means", N * sizeof(float), &a->ln1.mean},
        {group, "first LayerNorm deviations", N * sizeof(float), &a->ln1.rstd},
        {group, "queries, keys, values", X * 3 * (size_t)gpt->A, &a->qkv},
        {group, "attention statistics", saved, &a->att_saved},
        {group, "attention output", X * (size_t)gpt->A, &a->att},
        {group, "residual after attention", X * C, &a->residual2},
        {group, "second LayerNorm", X * C, &a->ln2.y},
        {group, "second LayerNorm means", N * sizeof(float), &a->ln2.mean},
        {group, "second LayerNorm deviations", N * sizeof(float), &a->ln2.rstd},
        {group, "before GELU", X * (size_t)gpt->F, &a->pre},
        {group, "after GELU", X * (size_t)gpt->F, &a->gelu},
    };
    reserve(plan, buffers, sizeof buffers / sizeof buffers[0]);
}

void gpt_reserve(GPT *gpt, MemoryPlan *plan) {
    size_t N = (size_t)gpt->B * (size_t)gpt->T, X = N * sizeof(floatX), ids = N * sizeof(int32_t);
    size_t C = (size_t)gpt->C, A = (size_t)gpt->A, wide = largest((size_t)gpt->F, 3 * A);
    size_t layers = gpt->recompute_full ? 1 : (size_t)gpt->L;
    gpt->residual = (floatX **)xcalloc((size_t)gpt->L + 1, sizeof(floatX *), "the activation table");
    gpt->acts = (LayerActs *)xcalloc(layers, sizeof(LayerActs), "the activation table");
    gpt->scratch_bytes = op_scratch_bytes((int64_t)N, gpt->C);
    const Buffer buffers[] = {
        {"batch", "tokens", ids, &gpt->tokens},
        {"batch", "targets", ids, &gpt->targets},
        {"batch", "positions", ids, &gpt->positions},
        {"batch", "document starts", ids, &gpt->doc_start},
        {"batch", "loss mask", N * sizeof(float), &gpt->loss_mask},
        {"activations", "final LayerNorm", X * C, &gpt->lnf.y},
        {"activations", "final LayerNorm means", N * sizeof(float), &gpt->lnf.mean},
        {"activations", "final LayerNorm deviations", N * sizeof(float), &gpt->lnf.rstd},
        {"activations", "losses", N * sizeof(float), &gpt->losses},
        {"scratch", "branch of the residual stream", X * C, &gpt->branch},
        {"scratch", "gradient of the residual stream", X * C, &gpt->dresidual},
        {"scratch", "gradient of a branch", gpt->hidden_dropout > 0 ? X * C : 0, &gpt->dbranch},
        {"scratch", "sum of a branch's gradient", C * sizeof(float), &gpt->branch_sum},
        {"scratch", "gradient of a LayerNorm output", X * C, &gpt->dx},
        {"scratch", "gradient of the wide tensors", X * wide, &gpt->dwide},
        {"scratch", "gradient of the attention output", X * A, &gpt->datt},
        {"scratch", "logits of one position", (size_t)gpt->V * sizeof(floatX), &gpt->logits},
        {"scratch", "workspace of the ops", workspace_bytes(gpt), &gpt->workspace},
        {"scratch", "of ops without a workspace", gpt->scratch_bytes, &gpt->scratch},
    };
    reserve(plan, buffers, sizeof buffers / sizeof buffers[0]);
    for (int l = 0; l <= gpt->L; l++) {
        memory_plan_reserve(plan, "activations", "residual stream", X * C, (void **)&gpt->residual[l]);
    }
    for (size_t l = 0; l < layers; l++) reserve_layer(gpt, &gpt->acts[l], plan);
}

size_t gpt_planned_bytes(const Config *config) {
    GPT gpt;
    MemoryPlan memory_plan = {0};
    gpt_describe(&gpt, config, gpt_stage(config, 0, 1));
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

void gpt_start(GPT *gpt, Zero *zero, Device *device, Stream *stream) {
    gpt->zero = zero;
    gpt->stream = stream;
    op_set_scratch(device, gpt->scratch, gpt->scratch_bytes);
}

void gpt_init_weights(GPT *gpt, uint64_t seed, Peers group) {
    int threads = parallel_share(group);
    // Every rank draws all of its replica: a tensor's numbers depend on the seed and the tensor
    // alone.
    for (int i = 0; i < gpt->tensors; i++) {
        const Tensor *t = &gpt->tensor[i];
        InitWeights init = {.weights = zero_weight(gpt->zero, i),
                            .rows = t->local[0], .columns = t->local[1],
                            .first_row = t->split == 0 ? t->offset : 0,
                            .first_column = t->split == 1 ? t->offset : 0,
                            .whole_columns = t->whole[1], .std = t->std, .seed = seed,
                            .tensor = (uint32_t)t->number, .threads = threads};
        op_init_weights(gpt->stream, &init);
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

static const floatX *weight(const GPT *gpt, int l, enum LayerTensor which) {
    return zero_weight(gpt->zero, gpt_layer_tensor(gpt, l, which));
}
static float *grad(const GPT *gpt, int l, enum LayerTensor which) {
    return zero_grad(gpt->zero, gpt_layer_tensor(gpt, l, which));
}
static LayerActs *layer_acts(const GPT *gpt, int l) { return &gpt->acts[gpt->recompute_full ? 0 : l]; }
static int64_t rows_of(const Pass *p) { return (int64_t)p->B * p->T; }

static Dropout dropout_at(const GPT *gpt, const Pass *p, int l, int where) {
    float rate = where == DROPOUT_ATTENTION ? gpt->attention_dropout : gpt->hidden_dropout;
    Dropout d = {p->training ? rate : 0.0f, gpt->seed, (uint32_t)((gpt->stage.first_layer + l) * 4 + where),
                 p->first_sample};
    return d;
}

static Embedding embedding_of(const GPT *gpt, const Pass *p) {
    const Tensor *words = &gpt->tensor[GPT_WTE];
    Embedding e = {.B = p->B, .T = p->T, .C = gpt->C,
                   .first_row = (int)words->offset, .rows = (int)words->local[0],
                   .tokens = gpt->tokens, .positions = gpt->positions,
                   .dropout = dropout_at(gpt, p, 0, DROPOUT_EMBEDDING),
                   .wte = zero_weight(gpt->zero, GPT_WTE), .wpe = zero_weight(gpt->zero, GPT_WPE),
                   .x = gpt->residual[0], .dx = gpt->dresidual,
                   .dwte = zero_grad(gpt->zero, GPT_WTE), .dwpe = zero_grad(gpt->zero, GPT_WPE)};
    return e;
}

// The LayerNorm `which` of layer l, LN1_W or LN2_W, without the sum before it.
static LayerNorm norm_of(const GPT *gpt, const Pass *p, const NormActs *acts, int l, enum LayerTensor which) {
    enum LayerTensor bias = (enum LayerTensor)(which + 1);
    LayerNorm n = {.B = p->B, .T = p->T, .C = gpt->C, .epsilon = gpt->epsilon,
                   .gamma = weight(gpt, l, which), .beta = weight(gpt, l, bias),
                   .y = acts->y, .mean = acts->mean, .rstd = acts->rstd,
                   .dy = gpt->dx, .dresidual = gpt->dresidual,
                   .dgamma = grad(gpt, l, which), .dbeta = grad(gpt, l, bias)};
    return n;
}

// Puts the sum of the residual stream and gpt->branch before a LayerNorm, and its gradients behind.
static void add_branch(const GPT *gpt, LayerNorm *n, const floatX *residual, Dropout dropout) {
    n->residual = residual;
    n->branch = gpt->branch;
    n->dropout = dropout;
    n->dbranch = gpt->hidden_dropout > 0 ? gpt->dbranch : NULL;
    n->branch_sum = gpt->branch_sum;
}

// The first LayerNorm of layer l with the sum before it; l = L: the final LayerNorm, which follows
// the last layer in the table. Layer 0 has the embedding below it and no sum.
static LayerNorm first_norm(const GPT *gpt, const Pass *p, int l) {
    LayerNorm n = norm_of(gpt, p, l < gpt->L ? &layer_acts(gpt, l)->ln1 : &gpt->lnf, l, LN1_W);
    n.x = gpt->residual[l];
    if (l > 0) add_branch(gpt, &n, layer_acts(gpt, l - 1)->residual2, dropout_at(gpt, p, l - 1, DROPOUT_FFN));
    return n;
}

// The linear of layer l with weight `which`, followed by its bias in the table. x -> y, dy -> dx.
static Linear linear_of(const GPT *gpt, const Pass *p, int l, enum LayerTensor which, const floatX *x,
                        floatX *y, const floatX *dy, floatX *dx) {
    const Tensor *t = &gpt->tensor[gpt_layer_tensor(gpt, l, which)];
    Linear linear = {.N = rows_of(p),
                     .C = (int)t->local[1],
                     .OC = (int)t->local[0],
                     .x = x,
                     .w = weight(gpt, l, which),
                     .bias = weight(gpt, l, (enum LayerTensor)(which + 1)),
                     .y = y,
                     .dy = dy,
                     .dx = dx,
                     .dw = grad(gpt, l, which),
                     .overwrite = p->first,
                     .workspace = gpt->workspace};
    return linear;
}

// The ops of one layer, each in both directions.
typedef struct LayerOps {
    LayerNorm norm1, norm2;
    Linear qkv, projection, fc1, fc2;
    Attention attention;
} LayerOps;

static LayerOps layer_ops(const GPT *gpt, int l, const Pass *p) {
    const LayerActs *a = layer_acts(gpt, l);
    const floatX *dbranch = gpt->hidden_dropout > 0 ? gpt->dbranch : gpt->dresidual;
    Attention attention = {.B = p->B, .T = p->T, .NH = gpt->NH, .HD = gpt->HD,
                           .dropout = dropout_at(gpt, p, l, DROPOUT_ATTENTION),
                           .qkv = a->qkv, .doc_start = p->has_doc_start ? gpt->doc_start : NULL,
                           .out = a->att, .saved = a->att_saved, .dout = gpt->datt, .dqkv = gpt->dwide,
                           .workspace = gpt->workspace};
    LayerOps o;
    o.norm1 = first_norm(gpt, p, l);
    o.qkv = linear_of(gpt, p, l, QKV_W, a->ln1.y, a->qkv, gpt->dwide, gpt->dx);
    o.attention = attention;
    o.projection = linear_of(gpt, p, l, PROJ_W, a->att, gpt->branch, dbranch, gpt->datt);
    o.norm2 = norm_of(gpt, p, &a->ln2, l, LN2_W);
    o.norm2.x = a->residual2;
    add_branch(gpt, &o.norm2, gpt->residual[l], dropout_at(gpt, p, l, DROPOUT_PROJECTION));
    o.fc1 = linear_of(gpt, p, l, FC1_W, a->ln2.y, a->gelu, gpt->dwide, gpt->dx);
    o.fc1.pre = a->pre;
    o.fc2 = linear_of(gpt, p, l, FC2_W, a->gelu, gpt->branch, dbranch, gpt->dwide);
    o.fc2.x_pre = a->pre;
    o.fc2.dpre_bias = grad(gpt, l, FC1_B);
    return o;
}

// From the residual stream and the branch below to GELU's output, all that backward wants.
static void layer_to_gelu(Stream *s, const LayerOps *o) {
    op_layernorm_forward(s, &o->norm1);
    op_linear_forward(s, &o->qkv);
    op_attention_forward(s, &o->attention);
    op_linear_forward(s, &o->projection);
    op_layernorm_forward(s, &o->norm2);
    op_linear_forward(s, &o->fc1);
}

void gpt_forward(GPT *gpt, const Pass *p) {
    Stream *s = gpt->stream;
    Embedding embedding = embedding_of(gpt, p);
    LayerNorm final = first_norm(gpt, p, gpt->L);
    zero_weights_wait(gpt->zero, 0);
    op_embedding_forward(s, &embedding);
    for (int l = 0; l < gpt->L; l++) {
        LayerOps o = layer_ops(gpt, l, p);
        zero_weights_wait(gpt->zero, l + 1);
        layer_to_gelu(s, &o);
        op_linear_forward(s, &o.fc2);
    }
    op_layernorm_forward(s, &final);
}

void gpt_head(GPT *gpt, const Pass *p) {
    const Tensor *words = &gpt->tensor[GPT_WTE];
    Head h = {.N = rows_of(p), .C = gpt->C, .first_row = (int)words->offset, .rows = (int)words->local[0],
              .x = gpt->lnf.y, .wte = zero_weight(gpt->zero, GPT_WTE),
              .targets = gpt->targets, .loss_mask = p->has_loss_mask ? gpt->loss_mask : NULL,
              .loss_scale = p->loss_scale, .losses = gpt->losses, .loss_sum = zero_loss_sum(gpt->zero),
              .dx = p->backward ? gpt->dx : NULL, .dwte = p->backward ? zero_grad(gpt->zero, GPT_WTE) : NULL,
              .overwrite = p->first, .workspace = gpt->workspace};
    op_head(gpt->stream, &h);
}

// sum: of dy over its rows, where a LayerNorm's backward has made it.
static void bias_backward(const GPT *gpt, int l, enum LayerTensor bias, const Linear *a, const float *sum) {
    op_bias_gradient(gpt->stream, grad(gpt, l, bias), a->dy, sum, a->N, a->OC, gpt->workspace);
}

// In and out: gpt->dresidual, the gradient of the residual stream above the layer and below it, and
// that of the branch that was added there (gpt->dbranch with dropout, else the same). Only
// gradients of this layer are written. FC1_B's is summed where GELU' is applied.
static void layer_backward(GPT *gpt, int l, const Pass *p) {
    LayerOps o = layer_ops(gpt, l, p);
    Stream *s = gpt->stream;
    if (gpt->recompute_full) {
        LayerOps again = o;
        again.norm1.branch = NULL;  // the sum is in gpt->residual[l]
        layer_to_gelu(s, &again);
    }
    op_linear_backward(s, &o.fc2);
    bias_backward(gpt, l, FC2_B, &o.fc2, gpt->branch_sum);
    op_linear_backward(s, &o.fc1);
    op_layernorm_backward(s, &o.norm2);
    op_linear_backward(s, &o.projection);
    bias_backward(gpt, l, PROJ_B, &o.projection, gpt->branch_sum);
    op_attention_backward(s, &o.attention);
    bias_backward(gpt, l, QKV_B, &o.qkv, NULL);
    op_linear_backward(s, &o.qkv);
    op_layernorm_backward(s, &o.norm1);
}

void gpt_backward(GPT *gpt, const Pass *p) {
    Stream *s = gpt->stream;
    Embedding embedding = embedding_of(gpt, p);
    LayerNorm final = first_norm(gpt, p, gpt->L);
    set_zero(s, gpt->dresidual, (size_t)rows_of(p) * (size_t)gpt->C * sizeof(floatX));
    op_layernorm_backward(s, &final);
    for (int l = gpt->L - 1; l >= 0; l--) {
        layer_backward(gpt, l, p);
        if (p->last) zero_reduce_unit(gpt->zero, l + 1);
    }
    if (p->first) set_zero(s, embedding.dwpe, (size_t)gpt->P * (size_t)gpt->C * sizeof(float));
    op_embedding_backward(s, &embedding);
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
    Linear linear = {.N = 1, .C = gpt->C, .OC = gpt->V, .x = gpt->lnf.y + (int64_t)(T - 1) * gpt->C,
                     .w = zero_weight(gpt->zero, GPT_WTE), .y = gpt->logits, .workspace = gpt->workspace};
    op_linear_forward(gpt->stream, &linear);
    copy_to_host(gpt->stream, logits, gpt->logits, (size_t)gpt->V * sizeof(floatX));
    stream_synchronize(gpt->stream);
    free(positions);
}

// ===== the training step =========================================================================
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

// ===== evaluation ================================================================================

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

// ===== the loop ==================================================================================

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

// ===== main ======================================================================================

// Everything that needs no device: where this rank stands, the model, its layout, the memory plan.
static bool plan_run(Run *run, GPT *gpt) {
    const Config *c = &run->config;
    if (!run_place(run)) return false;
    if (config_only_checks_data(c)) return true;
    gpt_describe(gpt, c, gpt_stage(c, run->mesh.pp.rank, run->mesh.pp.size));
    if (!gpt_check(gpt, &run->error)) return false;
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
    gpt_start(gpt, run->zero, run->device, run->compute);
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
        printf("sdp4bit.c %s commit %s (%s; %s; %s)\n", version_number(), version_commit(), device_backend(),
               backend, libraries);
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
        if (run->launch.rank == 0)
            plan_report(&run->config, run->zero, &run->memory_plan, gpt_planned_bytes, stdout);
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
    if (parsed && (run.config.help || run.config.version))
        return answer_without_training(&run.config, argv[0]);

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
