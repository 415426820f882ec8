// sdp4bit.c: GPT pretraining with sharded data parallelism in (almost) 4 bits. This file is the
// story, top to bottom: the GPT, the training step, evaluation, the loop, main(). It is written in
// the common subset of C11 and CUDA C++ and holds no kernels: compiled as C it is the CPU program,
// compiled by nvcc the GPU program.

#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/ranks/heartbeat.h"      // progress reports to the watchdog
#include "llmc/ranks/watchdog.h"       // ends a job that hangs and names the late rank
#include "llmc/ranks/node_recovery.h"  // saves when a node is lost
#include "llmc/run/eval_tasks.h"       // --eval-tasks
#include "llmc/run/measure.h"          // --plan-measure
#include "llmc/plan/report.h"          // --plan
#include "llmc/run/run.h"              // what a run holds beside the model
#include "llmc/run/same_run.h"         // one set of flags on all machines
#include "llmc/run/start.h"            // from flags to the first step
#include "llmc/state/probe.h"          // figures on what quantization does
#include "train_gpt.h"                 // GPT, ops, Zero

// ===== the GPT ===================================================================================
// GPT-2 and Llama as Megatron-LM trains them: pre-LayerNorm or RMSNorm, per-head interleaved QKV
// rows, learned or rotary positions, tanh GELU or SwiGLU, the head tied to the embedding or not.
// What a rank holds of it: llmc/model/gpt.h.
//
// Tensor parallelism cuts heads, the feed-forward layer and the vocabulary. A rank then makes a
// part of the sums over what is cut, and the parts are added up (llmc/model/tensor_parallel.h).
// Where nothing is cut, none of that runs. A pipeline's stages hold some of the layers each.
//
// The hidden state between layers is the residual stream. A layer begins with the sum of the stream
// and the branch of the layer below, which is fused with the layer's first LayerNorm. It ends with
// a branch of its own. The final LayerNorm begins like one more layer, in the table too.

// --- what the ops work on ------------------------------------------------------------------------

// NULL of a tensor that the model has not.
static const floatX *weight(const GPT *gpt, int l, enum LayerTensor which) {
    int tensor = gpt_layer_tensor(gpt, l, which);
    return tensor < 0 ? NULL : zero_weight(gpt->zero, tensor);
}
static float *grad(const GPT *gpt, int l, enum LayerTensor which) {
    int tensor = gpt_layer_tensor(gpt, l, which);
    return tensor < 0 ? NULL : zero_grad(gpt->zero, tensor);
}
static const MicroBatch *slot_of(const GPT *gpt, const Pass *p) { return &gpt->slot[p->slot]; }
static LayerActs *layer_acts(const GPT *gpt, const Pass *p, int l) {
    return &slot_of(gpt, p)->acts[gpt->recompute_full ? 0 : l - gpt_first_layer(gpt, p)];
}
static floatX *residual_of(const GPT *gpt, const Pass *p, int l) {
    return slot_of(gpt, p)->residual[l - gpt_first_layer(gpt, p)];
}
static floatX *dresidual_of(const GPT *gpt, const Pass *p) { return gpt->dresidual[p->gradient]; }
static bool is_cut(const GPT *gpt) { return gpt->mesh->tp.size > 1; }

// Layer l's weights are wanted now, and after them those of the next layer of the pass.
static void want_layer(const GPT *gpt, const Pass *p, int l, bool backward) {
    int next = backward ? l - 1 : l + 1;
    bool more = next >= gpt_first_layer(gpt, p) && next < gpt_end_layer(gpt, p);
    zero_weights_wait(gpt->zero, gpt_layer_unit(gpt, l), more ? gpt_layer_unit(gpt, next) : -1, backward);
}

static Dropout dropout_at(const GPT *gpt, const Pass *p, int l, int where) {
    float rate = where == DROPOUT_ATTENTION ? gpt->attention_dropout : gpt->hidden_dropout;
    Dropout d = {p->training ? rate : 0.0f, gpt->seed, (uint32_t)(gpt_layer_number(gpt, l) * 4 + where),
                 p->first_sample};
    return d;
}

static Embedding embedding_of(const GPT *gpt, const Pass *p) {
    const Tensor *words = &gpt->tensor[GPT_WTE];
    const MicroBatch *m = slot_of(gpt, p);
    Embedding e = {.B = p->B,
                   .T = p->T,
                   .C = gpt->C,
                   .first_row = (int)words->offset,
                   .rows = (int)words->local[0],
                   .tokens = m->tokens,
                   .positions = m->positions,
                   .dropout = dropout_at(gpt, p, 0, DROPOUT_EMBEDDING),
                   .wte = zero_weight(gpt->zero, GPT_WTE),
                   .x = m->residual[0],
                   .dx = dresidual_of(gpt, p),
                   .dwte = zero_grad(gpt->zero, GPT_WTE)};
    if (!gpt->P) return e;
    e.wpe = zero_weight(gpt->zero, GPT_WPE);
    e.dwpe = zero_grad(gpt->zero, GPT_WPE);
    return e;
}

// The LayerNorm `which` of layer l, LN1_W or LN2_W, without the sum before it.
static LayerNorm norm_of(const GPT *gpt, const Pass *p, const NormActs *acts, int l, enum LayerTensor which) {
    enum LayerTensor bias = (enum LayerTensor)(which + 1);
    LayerNorm n = {.B = p->B,
                   .T = p->T,
                   .C = gpt->C,
                   .epsilon = gpt->epsilon,
                   .gamma = weight(gpt, l, which),
                   .beta = weight(gpt, l, bias),
                   .y = acts->y,
                   .mean = acts->mean,
                   .rstd = acts->rstd,
                   .dy = gpt->dx,
                   .dresidual = dresidual_of(gpt, p),
                   .dgamma = grad(gpt, l, which),
                   .dbeta = grad(gpt, l, bias),
                   .rows = gpt_own_rows(gpt, p),
                   .rms = gpt->rms};
    return n;
}

// Puts the sum of the residual stream and gpt->branch before a LayerNorm, and its gradients behind.
static void add_branch(const GPT *gpt, LayerNorm *n, const floatX *residual, Dropout dropout) {
    n->residual = residual;
    n->branch = gpt->branch;
    n->dropout = dropout;
    n->dbranch = gpt->hidden_dropout > 0 ? gpt->dbranch : NULL;
    n->branch_sum = gpt->biased ? gpt->branch_sum : NULL;
}

// What stands at the border to the next stage in the place of a LayerNorm: the sum alone.
static LayerNorm border_of(const GPT *gpt, const Pass *p) {
    LayerNorm n = {
        .B = p->B, .T = p->T, .C = gpt->C, .dresidual = dresidual_of(gpt, p), .rows = gpt_own_rows(gpt, p)};
    return n;
}

// The first LayerNorm of layer l with the sum before it; at the chunk's end: the final LayerNorm,
// which follows the last layer in the table, or the border to the next stage. The chunk's first
// layer has no sum: the embedding, or the stage before, has made it.
static LayerNorm first_norm(const GPT *gpt, const Pass *p, int l) {
    bool end = l == gpt_end_layer(gpt, p);
    LayerNorm n = end && !gpt_heads(gpt, p)
                      ? border_of(gpt, p)
                      : norm_of(gpt, p, end ? &gpt->lnf : &layer_acts(gpt, p, l)->ln1, l, LN1_W);
    n.x = residual_of(gpt, p, l);
    if (l > gpt_first_layer(gpt, p)) {
        add_branch(gpt, &n, layer_acts(gpt, p, l - 1)->residual2, dropout_at(gpt, p, l - 1, DROPOUT_FFN));
    }
    return n;
}

// The linear of layer l with weight `which`, followed by its bias in the table. x -> y, dy -> dx.
// SwiGLU's first matrix has another shape in the table: see add_layer.
static Linear linear_of(const GPT *gpt, const Pass *p, int l, enum LayerTensor which, const floatX *x,
                        floatX *y, const floatX *dy, floatX *dx) {
    const Tensor *t = &gpt->tensor[gpt_layer_tensor(gpt, l, which)];
    int64_t columns = which == FC1_W ? gpt->C : t->local[1];
    Linear linear = {.N = pass_rows(p),
                     .C = (int)columns,
                     .OC = (int)(tensor_elements(t) / columns),
                     .x = x,
                     .w = weight(gpt, l, which),
                     .bias = weight(gpt, l, (enum LayerTensor)(which + 1)),
                     .y = y,
                     .dy = dy,
                     .dx = dx,
                     .dw = grad(gpt, l, which),
                     .overwrite = p->first || !zero_grads_stay(gpt->zero, gpt_layer_unit(gpt, l)),
                     .workspace = gpt->workspace,
                     .threads = gpt->threads};
    return linear;
}

// The ops of one layer, each in both directions.
typedef struct LayerOps {
    LayerNorm norm1, norm2;
    Linear qkv, projection, fc1, fc2;
    HeadNorm heads;  // with norms of queries and keys
    Rope rope;       // with rotary positions
    Attention attention;
    CachedAttention cached;  // with a cache: keeps keys and values, and takes the place of attention
                             // where there are some before the pass
    Swiglu swiglu;           // in the place of fc1's and fc2's GELU
} LayerOps;

// The MLP between its LayerNorm x and gpt->branch. GELU is a part of the linears around it, SwiGLU
// stands between them.
static void mlp_ops(const GPT *gpt, const Pass *p, int l, const floatX *x, const floatX *dbranch,
                    LayerOps *o) {
    const LayerActs *a = layer_acts(gpt, p, l);
    if (gpt->swiglu) {
        Swiglu swiglu = {
            .N = pass_rows(p), .F = gpt->F, .pre = a->pre, .y = a->act, .dy = gpt->dact, .dpre = gpt->dwide};
        o->swiglu = swiglu;
        o->fc1 = linear_of(gpt, p, l, FC1_W, x, a->pre, gpt->dwide, gpt->dx);
        o->fc2 = linear_of(gpt, p, l, FC2_W, a->act, gpt->branch, dbranch, gpt->dact);
        return;
    }
    o->fc1 = linear_of(gpt, p, l, FC1_W, x, a->act, gpt->dwide, gpt->dx);
    o->fc1.pre = a->pre;
    o->fc2 = linear_of(gpt, p, l, FC2_W, a->act, gpt->branch, dbranch, gpt->dwide);
    o->fc2.x_pre = a->pre;
    o->fc2.dpre_bias = grad(gpt, l, FC1_B);
}

// Queries, keys and values as the first linear leaves them. They lie where their gradient will.
static floatX *linear_qkv(const GPT *gpt, const LayerActs *a) { return gpt->by_kind ? gpt->dwide : a->qkv; }

static Rope rope_of(const GPT *gpt, const Pass *p, const LayerActs *a) {
    int heads = gpt->NH / gpt->NG;
    Rope rope = {.B = p->B,
                 .T = p->T,
                 .groups = gpt->NG,
                 .heads = heads + 2,
                 .turned = heads + 1,
                 .HD = gpt->HD,
                 .columns = gpt->rotary,
                 .table = gpt->turns + (int64_t)p->start * gpt->rotary,
                 .x = linear_qkv(gpt, a),
                 .by_kind = gpt->by_kind ? a->qkv : NULL};
    return rope;
}

// Attention behind the positions that the cache holds: keys (NG, T, HD) of each layer, then values.
static CachedAttention cached_attention_of(const GPT *gpt, const Pass *p, int l) {
    const LayerActs *a = layer_acts(gpt, p, l);
    int64_t part = (int64_t)gpt->NG * gpt->T * gpt->HD;
    CachedAttention attention = {.T = p->T,
                                 .start = p->start,
                                 .room = gpt->T,
                                 .NH = gpt->NH,
                                 .HD = gpt->HD,
                                 .groups = gpt->NG,
                                 .qkv = a->qkv,
                                 .keys = gpt->cache + 2 * l * part,
                                 .values = gpt->cache + (2 * l + 1) * part,
                                 .out = a->att,
                                 .workspace = gpt->workspace};
    return attention;
}

static HeadNorm head_norm_of(const GPT *gpt, const Pass *p, int l) {
    const LayerActs *a = layer_acts(gpt, p, l);
    HeadNorm n = {.N = pass_rows(p),
                  .groups = gpt->NG,
                  .queries = gpt->NH / gpt->NG,
                  .HD = gpt->HD,
                  .epsilon = gpt->epsilon,
                  .rms = gpt->rms,
                  .x = linear_qkv(gpt, a),
                  .before = a->before_norm};
    for (int i = 0; i < 2; i++) {
        enum LayerTensor w = i ? K_NORM_W : Q_NORM_W, b = i ? K_NORM_B : Q_NORM_B;
        n.gamma[i] = weight(gpt, l, w), n.beta[i] = weight(gpt, l, b);
        n.dgamma[i] = grad(gpt, l, w), n.dbeta[i] = grad(gpt, l, b);
    }
    return n;
}

static LayerOps layer_ops(const GPT *gpt, int l, const Pass *p) {
    const LayerActs *a = layer_acts(gpt, p, l);
    const MicroBatch *m = slot_of(gpt, p);
    const floatX *dbranch = gpt->hidden_dropout > 0 ? gpt->dbranch : dresidual_of(gpt, p);
    const floatX *x1 = a->ln1.y, *x2 = a->ln2.y;
    if (gpt->tp.sequence) x1 = x2 = dbranch = gpt->gathered;
    Attention attention = {.B = p->B,
                           .T = p->T,
                           .NH = gpt->NH,
                           .HD = gpt->HD,
                           .dropout = dropout_at(gpt, p, l, DROPOUT_ATTENTION),
                           .qkv = a->qkv,
                           .doc_start = p->has_doc_start ? m->doc_start : NULL,
                           .out = a->att,
                           .saved = a->att_saved,
                           .dout = gpt->datt,
                           .dqkv = gpt->by_kind ? gpt->dact : gpt->dwide,
                           .workspace = gpt->workspace,
                           .first_head = gpt->mesh->tp.rank * gpt->NH,
                           .groups = gpt->NG,
                           .by_kind = gpt->by_kind};
    LayerOps o;
    memset(&o, 0, sizeof o);
    o.norm1 = first_norm(gpt, p, l);
    o.qkv = linear_of(gpt, p, l, QKV_W, x1, linear_qkv(gpt, a), gpt->dwide, gpt->dx);
    o.heads = head_norm_of(gpt, p, l);
    o.rope = rope_of(gpt, p, a);
    o.attention = attention;
    if (gpt->cache) o.cached = cached_attention_of(gpt, p, l);
    o.projection = linear_of(gpt, p, l, PROJ_W, a->att, gpt->branch, dbranch, gpt->datt);
    o.norm2 = norm_of(gpt, p, &a->ln2, l, LN2_W);
    o.norm2.x = a->residual2;
    add_branch(gpt, &o.norm2, residual_of(gpt, p, l), dropout_at(gpt, p, l, DROPOUT_PROJECTION));
    mlp_ops(gpt, p, l, x2, dbranch, &o);
    return o;
}

// --- forward -------------------------------------------------------------------------------------

// All rows of what this rank holds some rows of (sequence parallelism), for a product. Without it
// `own` has all rows already.
static const floatX *gather(const GPT *gpt, const Pass *p, const floatX *own) {
    return tp_gather(&gpt->tp, own, gpt->gathered, pass_rows(p));
}

// A linear whose input is cut. Each rank makes a part of the sum, and the bias is added once.
static void summed_linear_forward(const GPT *gpt, const Linear *a) {
    if (!is_cut(gpt)) {
        op_linear_forward(gpt->stream, a);
        return;
    }
    Linear part = *a;
    part.bias = NULL;
    op_linear_forward(gpt->stream, &part);
    tp_reduce(&gpt->tp, part.y, a->bias, part.y, a->N);
}

// From the residual stream and the branch below to the activation's output, all that backward
// wants.
static void layer_to_activation(const GPT *gpt, const Pass *p, const LayerOps *o) {
    Stream *s = gpt->stream;
    op_layernorm_forward(s, &o->norm1);
    gather(gpt, p, o->norm1.y);
    op_linear_forward(s, &o->qkv);
    if (gpt->qk_norm) op_head_norm_forward(s, &o->heads);
    if (gpt->rotary) op_rope(s, &o->rope);
    if (gpt->cache) op_cache_append(s, &o->cached);
    if (p->start) op_cached_attention(s, &o->cached);
    else op_attention_forward(s, &o->attention);
    summed_linear_forward(gpt, &o->projection);
    op_layernorm_forward(s, &o->norm2);
    gather(gpt, p, o->norm2.y);
    op_linear_forward(s, &o->fc1);
    if (gpt->swiglu) op_swiglu_forward(s, &o->swiglu);
}

// Where the vocabulary is cut, each rank looks up its own rows, and the sum is the embedding.
static void embed(const GPT *gpt, const Pass *p) {
    Embedding embedding = embedding_of(gpt, p);
    if (is_cut(gpt)) {
        Embedding words = embedding;
        words.part = true;
        words.x = gpt->branch;
        op_embedding_forward(gpt->stream, &words);
        tp_reduce(&gpt->tp, words.x, NULL, embedding.x, pass_rows(p));
        embedding.wte = NULL;
        embedding.x_rows = gpt_own_rows(gpt, p);
    }
    op_embedding_forward(gpt->stream, &embedding);
}

void gpt_forward(GPT *gpt, const Pass *p) {
    MicroBatch *m = &gpt->slot[p->slot];
    if (gpt_embeds(gpt, p)) m->residual[0] = m->embedded;
    LayerNorm final = first_norm(gpt, p, gpt_end_layer(gpt, p));
    if (gpt_embeds(gpt, p)) {
        zero_weights_wait(gpt->zero, 0, gpt_layer_unit(gpt, gpt_first_layer(gpt, p)), false);
        embed(gpt, p);
    }
    for (int l = gpt_first_layer(gpt, p); l < gpt_end_layer(gpt, p); l++) {
        LayerOps o = layer_ops(gpt, l, p);
        want_layer(gpt, p, l, false);
        layer_to_activation(gpt, p, &o);
        summed_linear_forward(gpt, &o.fc2);
    }
    op_layernorm_forward(gpt->stream, &final);
}

// --- the head ------------------------------------------------------------------------------------

// Where the vocabulary is cut, each rank has some columns of a chunk's logits. The ranks exchange
// each row's statistics over their columns.
static void head_of_parts(const GPT *gpt, Head *h) {
    int64_t chunk = op_head_chunk_rows(h->N, h->rows);
    h->all = gpt->statistics;
    h->ranks = gpt->mesh->tp.size;
    for (int64_t row = 0; row < h->N; row += chunk) {
        int64_t rows = h->N - row < chunk ? h->N - row : chunk;
        h->own = gpt->statistics + gpt->mesh->tp.rank * rows;
        op_head_logits(gpt->stream, h, row, rows);
        tp_exchange(&gpt->tp, gpt->statistics, (size_t)rows * sizeof(HeadStatistics));
        op_head_gradients(gpt->stream, h, row, rows);
    }
    op_loss_sum(gpt->stream, h);
    if (h->dx) tp_reduce(&gpt->tp, h->dx, NULL, h->dx, h->N);
}

void gpt_head(GPT *gpt, const Pass *p) {
    if (!gpt_heads(gpt, p)) return;
    const Tensor *words = &gpt->tensor[gpt->output];
    const MicroBatch *m = slot_of(gpt, p);
    zero_weights_wait(gpt->zero, 0, -1, false);
    Head h = {.N = pass_rows(p),
              .C = gpt->C,
              .first_row = (int)words->offset,
              .rows = (int)words->local[0],
              .x = gather(gpt, p, gpt->lnf.y),
              .wte = zero_weight(gpt->zero, gpt->output),
              .targets = m->targets,
              .loss_mask = p->has_loss_mask ? m->loss_mask : NULL,
              .loss_scale = p->loss_scale,
              .losses = gpt->losses,
              .loss_sum = zero_loss_sum(gpt->zero),
              .dx = p->backward ? gpt->dx : NULL,
              .dwte = p->backward ? zero_grad(gpt->zero, gpt->output) : NULL,
              .overwrite = p->first,
              .workspace = gpt->workspace};
    if (p->scores) gpt_head_scores(gpt, p, &h);
    else if (is_cut(gpt)) head_of_parts(gpt, &h);
    else op_head(gpt->stream, &h);
}

// --- backward ------------------------------------------------------------------------------------

// sum: of dy over its rows, where a LayerNorm's backward has made it.
static void bias_backward(const GPT *gpt, int l, enum LayerTensor bias, const Linear *a, const float *sum) {
    if (!gpt->biased) return;
    op_bias_gradient(gpt->stream, grad(gpt, l, bias), a->dy, sum, a->N, a->OC, gpt->workspace);
}

// Of a linear whose input is cut. The sum that a LayerNorm's backward has made of dy is that of all
// rows only where nothing is cut.
static void summed_linear_backward(const GPT *gpt, const Pass *p, int l, enum LayerTensor bias,
                                   const Linear *a) {
    gather(gpt, p, gpt->hidden_dropout > 0 ? gpt->dbranch : dresidual_of(gpt, p));
    op_linear_backward(gpt->stream, a);
    bias_backward(gpt, l, bias, a, is_cut(gpt) ? NULL : gpt->branch_sum);
}

// Of a linear that follows a LayerNorm. Each rank makes a part of the gradient of its input. The
// parts are added up beside the weights' product, whose input is gathered beside this one.
static void first_linear_backward(const GPT *gpt, const Pass *p, const LayerNorm *norm, const Linear *a) {
    if (!is_cut(gpt)) {
        op_linear_backward(gpt->stream, a);
        return;
    }
    Linear input = *a, weights = *a;
    input.dw = NULL;
    weights.dx = NULL;
    tp_gather_begin(&gpt->tp, norm->y, gpt->gathered, pass_rows(p));
    op_linear_backward(gpt->stream, &input);
    tp_reduce_begin(&gpt->tp, gpt->dx, NULL, gpt->dx, pass_rows(p));
    tp_gather_wait(&gpt->tp);
    op_linear_backward(gpt->stream, &weights);
    tp_reduce_wait(&gpt->tp);
}

// In and out: the gradient of the residual stream above the layer and below it, and that of the
// branch that was added there (gpt->dbranch with dropout, else the same). Only gradients of this
// layer are written. FC1_B's is summed where GELU' is applied, or behind SwiGLU.
static void layer_backward(GPT *gpt, int l, const Pass *p) {
    LayerOps o = layer_ops(gpt, l, p);
    Stream *s = gpt->stream;
    // Backward these two work on the gradient of queries, keys and values.
    Rope turn_back = o.rope;
    HeadNorm heads = o.heads;
    turn_back.x = heads.x = gpt->dwide;
    turn_back.by_kind = gpt->by_kind ? o.attention.dqkv : NULL;
    turn_back.back = true;
    if (gpt->recompute_full) {
        LayerOps again = o;
        again.norm1.branch = NULL;  // the sum is in residual[l]
        layer_to_activation(gpt, p, &again);
    }
    summed_linear_backward(gpt, p, l, FC2_B, &o.fc2);
    if (gpt->swiglu) {
        op_swiglu_backward(s, &o.swiglu);
        bias_backward(gpt, l, FC1_B, &o.fc1, NULL);
    }
    first_linear_backward(gpt, p, &o.norm2, &o.fc1);
    op_layernorm_backward(s, &o.norm2);
    summed_linear_backward(gpt, p, l, PROJ_B, &o.projection);
    op_attention_backward(s, &o.attention);
    if (gpt->rotary) op_rope(s, &turn_back);
    if (gpt->qk_norm) op_head_norm_backward(s, &heads);
    bias_backward(gpt, l, QKV_B, &o.qkv, NULL);
    first_linear_backward(gpt, p, &o.norm1, &o.qkv);
    op_layernorm_backward(s, &o.norm1);
}

// The gradients of a norm's weight and bias are those of this rank's rows or heads alone.
static void sum_over_ranks(const GPT *gpt, int l, enum LayerTensor which) {
    int tensor = gpt_layer_tensor(gpt, l, which);
    for (int i = tensor; tensor >= 0 && i < tensor + (gpt->rms ? 1 : 2); i++) {
        tp_sum(&gpt->tp, zero_grad(gpt->zero, i), tensor_elements(&gpt->tensor[i]), gpt->dwide,
               gpt->dwide_bytes);
    }
}

// The gradients of layer l are complete. With sequence parallelism each rank has summed those of
// the LayerNorms over its own rows. The final LayerNorm goes with the last layer.
static void layer_is_complete(const GPT *gpt, int l, const Pass *p) {
    bool final = gpt->stage.heads && l == gpt->L - 1;
    if (gpt->tp.sequence) {
        sum_over_ranks(gpt, l, LN1_W);
        sum_over_ranks(gpt, l, LN2_W);
        if (final) sum_over_ranks(gpt, l + 1, LN1_W);
    }
    sum_over_ranks(gpt, l, Q_NORM_W);
    sum_over_ranks(gpt, l, K_NORM_W);
    zero_reduce_unit(gpt->zero, gpt_layer_unit(gpt, l), p->last);
}

// After the pass has been through layer l: are its gradients to be reduced?
static bool is_complete(const GPT *gpt, int l, const Pass *p) {
    return p->last || !zero_grads_stay(gpt->zero, gpt_layer_unit(gpt, l));
}

static void embedding_backward(const GPT *gpt, const Pass *p) {
    Embedding embedding = embedding_of(gpt, p);
    size_t row = (size_t)gpt->C * sizeof(float);
    embedding.dx = gather(gpt, p, embedding.dx);
    bool head_began = gpt->stage.heads && gpt->tied;  // it has overwritten dwte
    if (gpt->P && p->first) set_zero(gpt->stream, embedding.dwpe, (size_t)gpt->P * row);
    if (!head_began && p->first) {
        set_zero(gpt->stream, embedding.dwte, (size_t)gpt->tensor[GPT_WTE].local[0] * row);
    }
    if (!head_began && gpt->tied && p->last) gpt_add_head_words(gpt);
    op_embedding_backward(gpt->stream, &embedding);
}

void gpt_backward(GPT *gpt, const Pass *p) {
    LayerNorm final = first_norm(gpt, p, gpt_end_layer(gpt, p));
    size_t bytes = (size_t)gpt_own_rows(gpt, p).count * (size_t)gpt->C * sizeof(floatX);
    if (gpt_heads(gpt, p)) set_zero(gpt->stream, dresidual_of(gpt, p), bytes);
    want_layer(gpt, p, gpt_end_layer(gpt, p) - 1, true);
    // The final LayerNorm's gradients go with those of the last layer.
    zero_grads_begin(gpt->zero, gpt_layer_unit(gpt, gpt_end_layer(gpt, p) - 1));
    op_layernorm_backward(gpt->stream, &final);
    for (int l = gpt_end_layer(gpt, p) - 1; l >= gpt_first_layer(gpt, p); l--) {
        want_layer(gpt, p, l, true);
        zero_grads_begin(gpt->zero, gpt_layer_unit(gpt, l));
        layer_backward(gpt, l, p);
        if (is_complete(gpt, l, p)) layer_is_complete(gpt, l, p);
    }
    if (gpt_embeds(gpt, p)) embedding_backward(gpt, p);
}

void gpt_end_backward(GPT *gpt) {
    if (!gpt_has_words(gpt)) return;
    if (gpt->tied) gpt_exchange_words(gpt);
    zero_reduce_unit(gpt->zero, 0, true);
}

// ===== the training step =========================================================================
// What a run holds beside the model, its set-up, its log lines and its checkpoints: llmc/run/run.h.

// False when some rank could not read its data: the run ends, and nothing of the step is logged or
// saved.
static bool data_sound(Run *run) {
    if (run->stop.reason != STOP_DATA) return true;
    run->site.phase = "read data";
    return run_agreed(run, run->error.code != EXIT_DATA);
}

// Uploads the micro-batch of this rank that starts at global sample `consumed` into a slot. Data
// found broken in mid-run must not stop this rank at once: the others are already in this step's
// collectives. It goes on with zeros, and all ranks leave together at the step's end (data_sound).
static Batch next_batch(Run *run, GPT *gpt, int slot, int split, int64_t consumed) {
    Batch batch;
    Error err;
    memset(&batch, 0, sizeof batch);
    heartbeat_waiting(&run->site, false);
    timer_start(run->timers, TIMER_BATCH_GENERATOR, run->compute);
    if (loader_batch(run->loader, split, consumed, &batch, &err)) {
        gpt_upload(gpt, slot, &batch);
    } else {
        size_t bytes = (size_t)gpt->B * (size_t)gpt->T * sizeof(int32_t);
        MicroBatch *m = &gpt->slot[slot];
        set_zero(run->compute, m->tokens, bytes);
        set_zero(run->compute, m->targets, bytes);
        set_zero(run->compute, m->positions, bytes);
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

// What a step or a part of an evaluation reads.
typedef struct Feed {
    Run *run;
    int split;
    int64_t first, row;  // sample of micro-batch 0; samples from one micro-batch to the next
    int64_t parts;       // micro-batches whose losses are averaged
} Feed;

// Uploads micro-batch k of a Feed.
static void load_micro_batch(void *context, GPT *gpt, int k, Pass *pass) {
    const Feed *feed = (const Feed *)context;
    Batch batch = next_batch(feed->run, gpt, pass->slot, feed->split, feed->first + (int64_t)k * feed->row);
    pass->first_sample = batch.first_sample;
    pass->has_doc_start = batch.doc_start != NULL;
    pass->has_loss_mask = batch.loss_mask != NULL;
    pass->loss_scale = loss_scale_of(gpt, &batch, feed->parts);
}

// Launches one iteration. The host runs at most one step ahead of the verdicts.
static void train_step(Run *run, GPT *gpt) {
    const Config *c = &run->config;
    int batch = config_global_batch_size(c, run->consumed_train);
    int row = c->micro_batch_size * c->dp_size, micro_batches = batch / row;
    run->site.iteration = ++run->iteration;
    run->site.phase = "forward and backward";
    timer_start(run->timers, TIMER_FORWARD_BACKWARD, run->compute);
    zero_step_begins(run->zero, run->iteration);
    Feed feed = {run, SPLIT_TRAIN, run->consumed_train, row, micro_batches};
    gpt_micro_batches(gpt, micro_batches, true, load_micro_batch, &feed);
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

// The data-parallel ranks' mean of the loss, added in their order. The last stage has the losses,
// and its tensor-parallel ranks the same ones.
static double mean_loss(Run *run) {
    float own = 0.0f;
    int T = run->mesh.tp.size, D = run->config.dp_size, world = run->mesh.world.size;
    copy_to_host(run->compute, &own, zero_loss_sum(run->zero), sizeof own);
    stream_synchronize(run->compute);
    float *all = (float *)xcalloc((size_t)world, sizeof(float), "losses");
    peers_gather(run_peers(run, run->launch.world), &own, all, 1, MPI_FLOAT);
    double sum = 0.0;
    for (int d = 0; d < D; d++) sum += all[world - T * D + T * d];
    free(all);
    return sum / D;
}

// Mean loss over eval_iters global batches from sample `at`. The latest step's verdict must have
// been read, for its loss's place is used again. Cut short when run->stop says so.
static double evaluate(Run *run, GPT *gpt, int split, int64_t at, bool verbose) {
    const Config *c = &run->config;
    int row = c->micro_batch_size * c->dp_size, micro_batches = c->global_batch_size / row;
    long long iters = run_eval_iters(run, split);
    set_zero(run->compute, zero_loss_sum(run->zero), sizeof(float));
    if (verbose) log_line(run->log, "Evaluating on %lld samples", iters * c->global_batch_size);
    for (long long i = 0; i < iters && !run->stop.reason; i++) {
        if (verbose) log_line(run->log, "Evaluating iter %lld/%lld", i + 1, iters);
        Feed feed = {run, split, at, row, iters * micro_batches};
        gpt_micro_batches(gpt, micro_batches, false, load_micro_batch, &feed);
        at += c->global_batch_size;
        run_poll_stop(run);
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
    zero_use_outer(run->zero, true);
    double loss = evaluate(run, gpt, split, at, verbose);
    zero_use_outer(run->zero, false);
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
    bool sound = evaluate_and_log(run, gpt, SPLIT_VALID, " on validation set", true) &&
                 evaluate_and_log(run, gpt, SPLIT_TEST, " on test set", true);
    if (sound) eval_tasks(run, gpt);
    return sound;
}

// ===== the loop ==================================================================================

// After a step that the sentry ends the run for: losses or gradients that are not finite, too many
// skipped steps, a message that did not arrive as it was sent.
//
// Replica groups judge by themselves. What one has found is news to the others: they ask each other
// when run_poll_stop has said so, or the verdict of the latest step is known (settled).
static bool verdict_ends_run(Run *run, bool settled) {
    bool asks = run->mesh.replica_groups.size > 1 && (settled || run->stop.reason == STOP_VERDICT);
    if (asks) return !run_agreed(run, !run->sentry.ended_at);
    if (!run->sentry.ended_at || run->mesh.replica_groups.size > 1) return false;
    run->exit_code = run->error.code;
    run->site.iteration = run->sentry.ended_at;
    run->site.phase = "update";
    if (run->launch.rank == 0) error_print(&run->site, run->error.what);
    return true;
}

static void save_and_leave(Run *run, const char *why, int exit_code) {
    if (run->stop.reason == STOP_SIGNAL) stop_ignore_launcher_signal(run_peers(run, run->launch.world));
    settle(run, 0);
    if (verdict_ends_run(run, true)) return;
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
    Interruption from = interval_interrupt(run);
    bool scoring = due(i, c->eval_interval) && c->eval_tasks.count > 0;
    bool evaluating = due(i, c->eval_interval) && run_eval_iters(run, SPLIT_VALID) > 0;
    bool saving = c->save && due(i, c->save_interval), verifying = due(i, c->verify_replicas_interval);
    bool probing = probe_due(run->zero);
    bool sampling = due(i, c->sample_interval) && i < c->train_iters;  // the last one follows training
    // Replicas are repaired before anything measures them or writes with them.
    if (verifying && !replicas_sound(run)) return true;
    if (probing) probe_report(run->zero, run->log, run_peers(run, run->launch.world));
    if (evaluating && !evaluate_and_log(run, gpt, SPLIT_VALID, "", false)) return true;
    if (scoring) eval_tasks(run, gpt);
    if (sampling) write_sample(run, gpt);
    if (leaves(run, false)) return true;
    if (saving && !save_checkpoint(run)) return true;
    if (leaves(run, true)) return true;
    if (evaluating || scoring || saving || verifying || probing || sampling) interval_exclude(run, &from);
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
    survivors_save(run);
    while (run->iteration < c->train_iters) {
        train_step(run, gpt);
        run_poll_stop(run);
        if (!data_sound(run) || (!run->stop.busy && !advance_save(run, false))) return false;
        bool settled = needs_verdict(run);
        if (settled) settle(run, 0);
        if (verdict_ends_run(run, settled)) return false;
        if (due(run->iteration, c->log_interval)) interval_end(run);
        if (after_step(run, gpt)) return false;
    }
    log_datetime(run->log, "after training is done");
    return save_checkpoint(run);
}

// ===== main ======================================================================================

static void run_training(Run *run, GPT *gpt) {
    if (!start_run(run, gpt)) return;
    if (!run->config.skip_train && !train(run, gpt)) return;
    if (!final_evaluation(run, gpt)) return;
    // A signal now: the trained model is saved, and only the last figures are missing.
    if (run->stop.reason == STOP_SIGNAL) run->exit_code = EXIT_STOPPED;
    else write_sample(run, gpt);
}

// Plans what the flags say, and does it: --plan, a look at the data, or training.
static void run_as_told(Run *run, GPT *gpt, double limit) {
    bool ok = run_agreed(run, plan_run(run, gpt));
    run->site.rank = run->launch.rank;
    site_of_thread(&run->site);
    Peers world = run_peers(run, run->launch.world);
    ok = ok && run_agreed(run, same_flags(&run->config, world, &run->error));
    if (!ok) return;
    watchdog_open(&run->site, run->launch.host, run->launch.size, limit);
    if (run->config.plan_measure && !run_agreed(run, measure_passes(run, train_step))) return;
    if (run->config.plan) {
        run_agreed(run, run->launch.rank != 0 || plan_report(&run->config, &run->mesh, plan_rank,
                                                             gpt_planned_bytes, stdout, &run->error));
    } else if (run->config.check_data || run->config.inspect_data >= 0) {
        run_look_at_data(run);
    } else {
        run_training(run, gpt);
        advance_save(run, true);  // one that is still being written in the background, whatever ended the run
        node_recovery_disarm(&run->site);
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
    if (parsed && (run.config.help || run.config.version)) return run_answer(&run.config, argv[0]);

    // Looking at data or at a plan has nothing to save: there a signal ends the process as usual.
    bool trains = parsed && !run.config.plan && !run.config.check_data && run.config.inspect_data < 0;
    if (trains) stop_catch_signals();
    signal(SIGXFSZ, SIG_IGN);  // a limit on file sizes is an error of write(2), which is told in words
    signal(SIGPIPE, SIG_IGN);  // nobody reads the log lines any more: no reason to lose a run
    setvbuf(stdout, NULL, _IOLBF, 0);  // lines come whole and at once, into a pipe or file too
    double limit = trains ? 60.0 * run.config.distributed_timeout_minutes : 0.0;
    watchdog_mpi_starting(&run.site, limit);
    launch_init(&run.launch, &argc, &argv);
    if (run_agreed(&run, parsed)) {
        if (run.launch.rank == 0) fputs(notes, stdout);
        run_as_told(&run, &gpt, limit);
    }
    int code = run.exit_code;
    tp_close(&gpt.tp);
    run_close(&run);
    gpt_free(&gpt);
    site_of_thread(NULL);
    watchdog_mpi_ending(&run.site, limit, code);
    launch_finalize(&run.launch);
    watchdog_close(&run.site);
    node_failure_free(run.site.node_failure);
    return code;
}
