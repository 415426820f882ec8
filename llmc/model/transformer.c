// Forward and backward pass of the transformer: GPT-2 and Llama as Megatron-LM trains them.
//
//   embedding -> L x layer -> final norm -> LM head and loss (lm_head.c)
//   layer: x += attention(norm1(x)); x += mlp(norm2(x))
//
// Variants: LayerNorm or RMSNorm, learned or rotary positions, tanh GELU or SwiGLU, tied or untied
// embeddings. gpt.h describes this rank's part of the model and defines the letters used in shape
// comments.
//
// Tensor parallelism splits the heads, the feed-forward layer and the vocabulary. A rank then
// computes partial sums, which the functions of tensor_parallel.c reduce: in forward together with
// the norm that follows, or with --tp-comm-overlap one block of rows at a time. Pipeline
// parallelism splits the layers.
//
// The hidden state between layers is the residual stream. The addition x += branch is fused into
// the norm that follows it: a layer leaves its MLP output in gpt->branch, and the first norm of the
// next layer adds it to the stream. The final norm therefore acts as the first norm of a layer L,
// and its tensors follow the last layer's tensors in the tensor table.
//
// Called by micro_batches.c, next_logits.c and tests.
#include <assert.h>
#include <string.h>

#include "llmc/model/gpt.h"

// --- arguments of the ops ------------------------------------------------------------------------

// Return the weight, or the gradient, of a layer's tensor; NULL if the model has no such tensor.
static const floatX *weight(const GPT *gpt, int l, enum LayerTensor which) {
    int tensor = gpt_layer_tensor(gpt, l, which);
    return tensor < 0 ? NULL : gpt_weight(gpt, tensor);
}
static float *grad(const GPT *gpt, int l, enum LayerTensor which) {
    int tensor = gpt_layer_tensor(gpt, l, which);
    return tensor < 0 ? NULL : gpt_grad(gpt, tensor);
}
static const MicroBatch *slot_of(const GPT *gpt, const Pass *p) { return &gpt->slot[p->slot]; }
static LayerActs *layer_acts(const GPT *gpt, const Pass *p, int l) {
    return &slot_of(gpt, p)->acts[gpt->recompute_full ? 0 : l - gpt_first_layer(gpt, p)];
}
static floatX *residual_of(const GPT *gpt, const Pass *p, int l) {
    return slot_of(gpt, p)->residual[l - gpt_first_layer(gpt, p)];
}
static floatX *dresidual_of(const GPT *gpt, const Pass *p) { return gpt->dresidual[p->gradient]; }
static bool is_tensor_parallel(const GPT *gpt) { return gpt->mesh->tp.size > 1; }

// Waits for the weights of layer l, and prefetches the weights of the next layer in this direction.
static void wait_for_layer(const GPT *gpt, const Pass *p, int l, bool backward) {
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
                   .wte = gpt_weight(gpt, GPT_WTE),
                   .x = m->residual[0],
                   .dx = dresidual_of(gpt, p),
                   .dwte = gpt_grad(gpt, GPT_WTE)};
    if (!gpt->P) return e;
    e.wpe = gpt_weight(gpt, GPT_WPE);
    e.dwpe = gpt_grad(gpt, GPT_WPE);
    return e;
}

static floatX *norm_output(const GPT *gpt, const NormActs *acts) {
    return acts->y ? acts->y : gpt->norm_output;
}

// Returns norm `which` (LN1_W or LN2_W) of layer l, without the residual addition.
static LayerNorm norm_of(const GPT *gpt, const Pass *p, const NormActs *acts, int l, enum LayerTensor which) {
    enum LayerTensor bias = (enum LayerTensor)(which + 1);
    LayerNorm n = {.B = p->B,
                   .T = p->T,
                   .C = gpt->C,
                   .epsilon = gpt->epsilon,
                   .gamma = weight(gpt, l, which),
                   .beta = weight(gpt, l, bias),
                   .y = norm_output(gpt, acts),
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

// Fuses x = residual + dropout(gpt->branch) into the forward pass of a norm, and the gradients of
// this sum into its backward pass.
static void add_branch(const GPT *gpt, LayerNorm *n, const floatX *residual, Dropout dropout) {
    n->residual = residual;
    n->branch = gpt->branch;
    n->dropout = dropout;
    n->dbranch = gpt->hidden_dropout > 0 ? gpt->dbranch : NULL;
    n->branch_sum = gpt->biased ? gpt->branch_sum : NULL;
}

// Returns the residual addition at the end of a pipeline stage, which no norm follows.
static LayerNorm stage_output(const GPT *gpt, const Pass *p) {
    return (LayerNorm){
        .B = p->B, .T = p->T, .C = gpt->C, .dresidual = dresidual_of(gpt, p), .rows = gpt_own_rows(gpt, p)};
}

// Returns the first norm of layer l, which also adds the previous layer's branch. If l is past the
// last layer of the chunk: the final norm, or stage_output if the LM head is on a later stage. The
// first layer of a chunk adds nothing; its input is the embedding or comes from the previous stage.
static LayerNorm first_norm(const GPT *gpt, const Pass *p, int l) {
    bool end = l == gpt_end_layer(gpt, p);
    LayerNorm n = end && !gpt_heads(gpt, p)
                      ? stage_output(gpt, p)
                      : norm_of(gpt, p, end ? &gpt->lnf : &layer_acts(gpt, p, l)->ln1, l, LN1_W);
    n.x = residual_of(gpt, p, l);
    if (l > gpt_first_layer(gpt, p)) {
        add_branch(gpt, &n, layer_acts(gpt, p, l - 1)->residual2, dropout_at(gpt, p, l - 1, DROPOUT_FFN));
    }
    return n;
}

// Returns linear `which` of layer l: y = x W^T + b, and dx from dy. Does not read the shape from
// the tensor table, which has another shape for SwiGLU's first matrix (add_layer in gpt.c).
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
                     .overwrite = p->first || !zero_grads_accumulate(gpt->zero, gpt_layer_unit(gpt, l)),
                     .workspace = gpt->workspace,
                     .threads = gpt->threads};
    return linear;
}

// Arguments of all ops of one layer, for the forward and the backward pass.
typedef struct LayerOps {
    LayerNorm norm1, norm2;
    Linear qkv, projection, fc1, fc2;
    HeadNorm heads;  // --qk-layernorm
    Rope rope;       // rotary positions
    Attention attention;
    CachedAttention cached;  // for generation: appends to the KV cache, and replaces `attention` if
                             // the cache already contains earlier positions
    Swiglu swiglu;           // replaces the GELU fused into fc1 and fc2
} LayerOps;

// Fills in the ops of the MLP, which computes gpt->branch from x, the output of norm2. GELU is
// fused into fc1 and fc2; SwiGLU is a separate op between them. In FP8 both are fused into the
// quantization of fc2's input, so fc1 computes only a->pre.
static void mlp_ops(const GPT *gpt, const Pass *p, int l, const floatX *x, const floatX *dbranch,
                    LayerOps *o) {
    const LayerActs *a = layer_acts(gpt, p, l);
    floatX *act = a->act ? a->act : gpt->dwide;  // an FP8 layer in bf16; dwide is free in forward
    floatX *dact = gpt->swiglu ? gpt->dact : gpt->dwide;
    bool fused = !gpt->swiglu && !fp8_layer(gpt, p, l);
    o->fc1 = linear_of(gpt, p, l, FC1_W, x, fused ? act : a->pre, gpt->dwide, gpt->dx);
    o->fc1.pre = fused ? a->pre : NULL;
    o->fc2 = linear_of(gpt, p, l, FC2_W, act, gpt->branch, dbranch, dact);
    if (gpt->swiglu) {
        o->swiglu =
            (Swiglu){.N = pass_rows(p), .F = gpt->F, .pre = a->pre, .y = act, .dy = dact, .dpre = gpt->dwide};
        return;
    }
    o->fc2.x_pre = a->pre;
    o->fc2.dpre_bias = grad(gpt, l, FC1_B);
}

// Returns the output buffer of the QKV linear. If op_rope reorders the output (by_kind), this is
// dwide, which is free in the forward pass.
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
                 .table = gpt->rope_table + (int64_t)p->start * gpt->rotary,
                 .x = linear_qkv(gpt, a),
                 .by_kind = gpt->by_kind ? a->qkv : NULL};
    return rope;
}

// Returns attention over the KV cache, which has keys (NG, T, HD), then values (NG, T, HD) for each
// layer.
static CachedAttention cached_attention_of(const GPT *gpt, const Pass *p, int l) {
    const LayerActs *a = layer_acts(gpt, p, l);
    int64_t part = (int64_t)gpt->NG * gpt->T * gpt->HD;
    CachedAttention attention = {.T = p->T,
                                 .start = p->start,
                                 .room = gpt->T,
                                 .NH = gpt->NH,
                                 .HD = gpt->HD,
                                 .groups = gpt->NG,
                                 .window = gpt_window(gpt, l),
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
    const floatX *x1 = norm_output(gpt, &a->ln1), *x2 = norm_output(gpt, &a->ln2);
    if (gpt->tp.sequence) x1 = x2 = dbranch = gpt->gathered;
    Attention attention = {.B = p->B,
                           .T = p->T,
                           .NH = gpt->NH,
                           .HD = gpt->HD,
                           .dropout = dropout_at(gpt, p, l, DROPOUT_ATTENTION),
                           .qkv = a->qkv,
                           .doc_start = p->has_doc_start ? m->doc_start : NULL,
                           .sequences = p->sequences,
                           .packed = m->packed,
                           .window = gpt_window(gpt, l),
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

// Returns the ops of forward for row block i. Attention and the ops before it keep all rows.
static LayerOps ops_of_block(const LayerOps *all, const RowBlocks *blocks, int i) {
    LayerOps o = *all;
    Rows rows = blocks->rows[i];
    if (blocks->count == 1) return o;
    tp_norm_rows(&o.norm1, rows);
    tp_norm_rows(&o.norm2, rows);
    tp_linear_rows(&o.qkv, rows);
    tp_linear_rows(&o.projection, rows);
    tp_linear_rows(&o.fc1, rows);
    tp_linear_rows(&o.fc2, rows);
    if (o.swiglu.N) tp_swiglu_rows(&o.swiglu, rows);
    return o;
}

// --- forward -------------------------------------------------------------------------------------

// All-gathers the rows of `own` before a GEMM with sequence parallelism; otherwise returns `own`.
static const floatX *gather(const GPT *gpt, const Pass *p, const floatX *own) {
    return tp_gather(&gpt->tp, own, gpt->gathered, pass_rows(p));
}

static void linear_forward(const GPT *gpt, const Pass *p, int l, LayerLinear which, const Linear *a) {
    Linear linear = *a;
    lora_forward(gpt, p, l, which, &linear);
    if (fp8_layer(gpt, p, l)) fp8_linear_forward(gpt, p, l, which, &linear);
    else op_linear_forward(gpt->stream, &linear);
}

// Runs a row-parallel linear (projection, fc2) for a row block. Every rank computes a partial sum
// over its input columns. The partial sums are all-reduced (or reduce-scattered) and the bias is
// added once, by the tp_norm that follows. If tp_reduces_early, starts the reduction here.
static void row_parallel_begin(const GPT *gpt, const Pass *p, int l, LayerLinear which, const Linear *a,
                               int block) {
    if (!is_tensor_parallel(gpt)) {
        linear_forward(gpt, p, l, which, a);
        return;
    }
    Linear part = *a;
    part.bias = NULL;
    linear_forward(gpt, p, l, which, &part);
    if (tp_reduces_early(&gpt->tp, pass_rows(p)))
        tp_reduce_begin(&gpt->tp, part.y, a->bias, part.y, a->N, block);
}

// Runs a norm and makes its output the input of column-parallel linear `which` of layer l. With
// tensor parallelism, first reduces the branch that the norm adds, with the bias of its linear.
// With sequence parallelism, all-gathers the output. Quantizes it in FP8 layers.
static void column_parallel_input(const GPT *gpt, const Pass *p, int l, LayerLinear which,
                                  const LayerNorm *norm, const floatX *bias, const Linear *a) {
    LayerNorm n = *norm;
    bool gathers_codes = fp8_gathers(gpt, p, l);
    n.absmax = fp8_absmax(gpt, p, l, which, FP8_INPUT);
    tp_norm(&gpt->tp, &n, n.branch ? gpt->branch : NULL, bias, gathers_codes ? NULL : gpt->gathered);
    if (gathers_codes) fp8_gather_input(gpt, p, l, which, a, n.y);
    else fp8_quantize_input(gpt, p, l, which, a, a->x, FP8_OF_X);
}

// Computes the MLP's activation, or quantizes it, from the output of fc1.
static void activate(const GPT *gpt, const Pass *p, int l, const LayerOps *o) {
    const floatX *pre = layer_acts(gpt, p, l)->pre;
    Fp8Source source = gpt->swiglu ? FP8_OF_SWIGLU : FP8_OF_GELU;
    if (fp8_layer(gpt, p, l)) fp8_quantize_input(gpt, p, l, LINEAR_FC2, &o->fc2, pre, source);
    else if (gpt->swiglu) op_swiglu_forward(gpt->stream, &o->swiglu);
}

// Returns the bias of the branch that first_norm of layer l adds, or NULL.
static const floatX *first_bias(const GPT *gpt, const Pass *p, int l) {
    return l > gpt_first_layer(gpt, p) ? weight(gpt, l - 1, FC2_B) : NULL;
}

// Runs norm1 and QKV. The reductions of the previous layer's output read its bias. So the prefetch
// of the next layer's weights, which take the same memory, is queued after the last of them.
static void qkv_forward(const GPT *gpt, const Pass *p, int l, const LayerOps *o, const RowBlocks *blocks,
                        bool recomputes) {
    for (int i = 0; i < blocks->count; i++) {
        LayerOps b = ops_of_block(o, blocks, i);
        tp_reduce_wait(&gpt->tp, i);
        column_parallel_input(gpt, p, l, LINEAR_QKV, &b.norm1, first_bias(gpt, p, l), &b.qkv);
        if (!recomputes && i == blocks->count - 1) wait_for_layer(gpt, p, l, false);
        linear_forward(gpt, p, l, LINEAR_QKV, &b.qkv);
    }
}

// Runs a layer, up to the partial sums of its output; if tp_reduces_early, also starts their
// reductions. Recomputation for the backward pass leaves out the last GEMM (fc2), which computes no
// activation that backward needs.
static void layer_forward(const GPT *gpt, const Pass *p, int l, const LayerOps *o, bool recomputes) {
    Stream *s = gpt->stream;
    RowBlocks blocks = tp_row_blocks(&gpt->tp, pass_rows(p));
    qkv_forward(gpt, p, l, o, &blocks, recomputes);
    if (gpt->qk_norm) op_head_norm_forward(s, &o->heads);
    if (gpt->rotary) op_rope(s, &o->rope);
    if (gpt->cache) op_cache_append(s, &o->cached);
    if (p->start) op_cached_attention(s, &o->cached);
    else op_attention_forward(s, &o->attention);
    fp8_quantize_input(gpt, p, l, LINEAR_PROJ, &o->projection, o->projection.x, FP8_OF_X);
    for (int i = 0; i < blocks.count; i++) {
        LayerOps b = ops_of_block(o, &blocks, i);
        row_parallel_begin(gpt, p, l, LINEAR_PROJ, &b.projection, i);
    }
    for (int i = 0; i < blocks.count; i++) {
        LayerOps b = ops_of_block(o, &blocks, i);
        tp_reduce_wait(&gpt->tp, i);
        column_parallel_input(gpt, p, l, LINEAR_FC1, &b.norm2, b.projection.bias, &b.fc1);
        linear_forward(gpt, p, l, LINEAR_FC1, &b.fc1);
        activate(gpt, p, l, &b);
        if (!recomputes) row_parallel_begin(gpt, p, l, LINEAR_FC2, &b.fc2, i);
    }
}

// Runs the vocabulary-parallel embedding: every rank looks up the rows that it holds, and the
// results are summed.
static void embed(const GPT *gpt, const Pass *p) {
    Embedding embedding = embedding_of(gpt, p);
    if (is_tensor_parallel(gpt)) {
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
    assert(p->chunk >= 0 && p->chunk < gpt->stage.shape.chunks);
    MicroBatch *m = &gpt->slot[p->slot];
    tp_begin_pass(&gpt->tp, p->training);
    if (gpt_embeds(gpt, p)) m->residual[0] = m->embedded;
    LayerNorm final = first_norm(gpt, p, gpt_end_layer(gpt, p));
    if (gpt_embeds(gpt, p)) {
        zero_weights_wait(gpt->zero, 0, gpt_layer_unit(gpt, gpt_first_layer(gpt, p)), false);
        embed(gpt, p);
    }
    for (int l = gpt_first_layer(gpt, p); l < gpt_end_layer(gpt, p); l++) {
        LayerOps o = layer_ops(gpt, l, p);
        zero_weights_wait(gpt->zero, gpt_layer_unit(gpt, l), -1, false);
        layer_forward(gpt, p, l, &o, false);
    }
    for (int i = 0; i < TP_BLOCKS; i++) tp_reduce_wait(&gpt->tp, i);
    tp_norm(&gpt->tp, &final, final.branch ? gpt->branch : NULL, first_bias(gpt, p, gpt_end_layer(gpt, p)),
            NULL);
}

// --- backward ------------------------------------------------------------------------------------

// Adds the bias gradient. sum: column sums of dy if the norm's backward has computed them, or NULL.
// absmax: accumulates the absolute maximum of dy, or NULL.
static void bias_backward(const GPT *gpt, int l, enum LayerTensor bias, const Linear *a, const float *sum,
                          uint32_t *absmax) {
    if (!grad(gpt, l, bias)) return;
    op_bias_gradient(gpt->stream, grad(gpt, l, bias), a->dy, sum, a->N, a->OC, gpt->workspace, absmax);
}

// Runs the backward pass of a norm that adds the branch of linear `which` of layer l.
static void norm_backward(const GPT *gpt, const Pass *p, int l, LayerLinear which, const LayerNorm *norm) {
    LayerNorm n = *norm;
    n.absmax = l < gpt_first_layer(gpt, p) ? NULL : fp8_absmax(gpt, p, l, which, FP8_GRADIENT);
    op_layernorm_backward(gpt->stream, &n);
}

static void linear_backward(const GPT *gpt, const Pass *p, int l, LayerLinear which, const Linear *a) {
    Linear linear = *a;
    lora_backward(gpt, p, l, which, &linear);
    if (fp8_layer(gpt, p, l)) fp8_linear_backward(gpt, p, l, which, &linear);
    else op_linear_backward(gpt->stream, &linear);
}

// Backward pass of a row-parallel linear. Without tensor parallelism, the norm's backward pass has
// left the column sums of dy in gpt->branch_sum. With it, they might not include all rows. If codes
// are gathered, only this rank's rows of dy exist in bf16; finish_layer_gradients then sums the
// bias gradients.
static void row_parallel_backward(const GPT *gpt, const Pass *p, int l, LayerLinear which, const Linear *a) {
    enum LayerTensor bias = which == LINEAR_FC2 ? FC2_B : PROJ_B;
    const floatX *own = gpt->hidden_dropout > 0 ? gpt->dbranch : dresidual_of(gpt, p);
    Linear rows = *a;
    if (fp8_gathers(gpt, p, l)) {
        fp8_gather_gradient(gpt, p, l, which, a, own);
        rows.dy = own;
        rows.N = gpt_own_rows(gpt, p).count;
    } else {
        gather(gpt, p, own);
        fp8_quantize_gradient(gpt, p, l, which, a);
    }
    linear_backward(gpt, p, l, which, a);
    bool summed = !is_tensor_parallel(gpt) || fp8_gathers(gpt, p, l);
    bias_backward(gpt, l, bias, &rows, summed ? gpt->branch_sum : NULL, NULL);
}

// Backward pass of a column-parallel linear (QKV, fc1), which follows a norm. Every rank computes a
// partial sum of dx, whose all-reduce overlaps with the GEMM for dW. The all-gather of x, which the
// GEMM for dW needs, overlaps with the GEMM for dx.
static void column_parallel_backward(const GPT *gpt, const Pass *p, int l, LayerLinear which,
                                     const LayerNorm *norm, const Linear *a) {
    fp8_quantize_gradient(gpt, p, l, which, a);
    if (!is_tensor_parallel(gpt)) {
        linear_backward(gpt, p, l, which, a);
        return;
    }
    Linear input = *a, weights = *a;
    input.dw = NULL;
    weights.dx = NULL;
    weights.beside_collective = true;
    if (fp8_gathers(gpt, p, l)) fp8_gather_saved_begin(gpt, p, l, which, a);
    else if (!fp8_layer(gpt, p, l)) tp_gather_begin(&gpt->tp, norm->y, gpt->gathered, pass_rows(p));
    linear_backward(gpt, p, l, which, &input);
    tp_reduce_begin(&gpt->tp, gpt->dx, NULL, gpt->dx, pass_rows(p), 0);
    tp_gather_wait(&gpt->tp);
    linear_backward(gpt, p, l, which, &weights);
    tp_reduce_wait(&gpt->tp, 0);
}

// Backpropagates through layer l. On entry dresidual contains the gradient of the residual stream
// after the layer, on return the one before it. gpt->dbranch likewise contains the gradient of the
// branch added at that point; without dropout this is dresidual itself.
static void layer_backward(GPT *gpt, int l, const Pass *p) {
    LayerOps o = layer_ops(gpt, l, p);
    Stream *s = gpt->stream;
    // In the backward pass, RoPE and the norms of queries and keys process the gradient of QKV.
    Rope rope_back = o.rope;
    HeadNorm heads = o.heads;
    rope_back.x = heads.x = gpt->dwide;
    rope_back.by_kind = gpt->by_kind ? o.attention.dqkv : NULL;
    rope_back.back = true;
    if (!gpt->qkv_biased && !gpt->qk_norm) rope_back.absmax = fp8_absmax(gpt, p, l, LINEAR_QKV, FP8_GRADIENT);
    if (gpt->recompute_full) {
        LayerOps again = o;
        again.norm1.branch = NULL;  // residual[l] already holds the sum
        layer_forward(gpt, p, l, &again, true);
    }
    row_parallel_backward(gpt, p, l, LINEAR_FC2, &o.fc2);
    if (gpt->swiglu) {
        o.swiglu.absmax = fp8_absmax(gpt, p, l, LINEAR_FC1, FP8_GRADIENT);
        op_swiglu_backward(s, &o.swiglu);
        bias_backward(gpt, l, FC1_B, &o.fc1, NULL, NULL);
    }
    column_parallel_backward(gpt, p, l, LINEAR_FC1, &o.norm2, &o.fc1);
    norm_backward(gpt, p, l, LINEAR_PROJ, &o.norm2);
    row_parallel_backward(gpt, p, l, LINEAR_PROJ, &o.projection);
    op_attention_backward(s, &o.attention);
    if (gpt->rotary) op_rope(s, &rope_back);
    if (gpt->qk_norm) op_head_norm_backward(s, &heads);
    bias_backward(gpt, l, QKV_B, &o.qkv, NULL, fp8_absmax(gpt, p, l, LINEAR_QKV, FP8_GRADIENT));
    column_parallel_backward(gpt, p, l, LINEAR_QKV, &o.norm1, &o.qkv);
    norm_backward(gpt, p, l - 1, LINEAR_FC2, &o.norm1);
}

// Gradients of a layer to be summed over the tensor-parallel ranks.
typedef struct PartialGradients {
    TpSum sum[LAYER_TENSORS];
    int count;
} PartialGradients;

// Adds a gradient of which each rank has a partial sum, over its own rows or heads. No-op if the
// model has no such tensor, or it is frozen.
static void add_partial(const GPT *gpt, int l, enum LayerTensor which, PartialGradients *partial) {
    float *values = grad(gpt, l, which);
    if (!values) return;
    int64_t n = tensor_elements(&gpt->tensor[gpt_layer_tensor(gpt, l, which)]);
    partial->sum[partial->count++] = (TpSum){values, n};
}
// The same for a norm's weight and bias.
static void add_partial_norm(const GPT *gpt, int l, enum LayerTensor weight, PartialGradients *partial) {
    add_partial(gpt, l, weight, partial);
    if (!gpt->rms) add_partial(gpt, l, (enum LayerTensor)(weight + 1), partial);
}

// Hands the complete gradients of layer l to ZeRO, which reduces them. The final norm belongs to
// the last layer.
static void finish_layer_gradients(const GPT *gpt, int l, const Pass *p) {
    bool final = gpt->stage.heads && l == gpt->L - 1;
    PartialGradients partial = {.count = 0};
    if (gpt->tp.sequence) {
        add_partial_norm(gpt, l, LN1_W, &partial);
        add_partial_norm(gpt, l, LN2_W, &partial);
        if (final) add_partial_norm(gpt, l + 1, LN1_W, &partial);
    }
    if (fp8_gathers(gpt, p, l)) {
        add_partial(gpt, l, PROJ_B, &partial);
        add_partial(gpt, l, FC2_B, &partial);
    }
    add_partial_norm(gpt, l, Q_NORM_W, &partial);
    add_partial_norm(gpt, l, K_NORM_W, &partial);
    tp_sum(&gpt->tp, partial.sum, partial.count, gpt->dwide, gpt->dwide_bytes);
    zero_reduce_unit(gpt->zero, gpt_layer_unit(gpt, l), p->last);
}

static void embedding_backward(const GPT *gpt, const Pass *p) {
    Embedding embedding = embedding_of(gpt, p);
    size_t row = (size_t)gpt->C * sizeof(float);
    embedding.dx = gather(gpt, p, embedding.dx);
    bool head_began = gpt->stage.heads && gpt->tied;  // the LM head has overwritten dwte
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
    tp_begin_pass(&gpt->tp, true);
    if (gpt_heads(gpt, p)) set_zero(gpt->stream, dresidual_of(gpt, p), bytes);
    wait_for_layer(gpt, p, gpt_end_layer(gpt, p) - 1, true);
    // The final norm's gradients belong to the last layer's unit.
    zero_grads_begin(gpt->zero, gpt_layer_unit(gpt, gpt_end_layer(gpt, p) - 1));
    norm_backward(gpt, p, gpt_end_layer(gpt, p) - 1, LINEAR_FC2, &final);
    for (int l = gpt_end_layer(gpt, p) - 1; l >= gpt_first_layer(gpt, p); l--) {
        wait_for_layer(gpt, p, l, true);
        zero_grads_begin(gpt->zero, gpt_layer_unit(gpt, l));
        layer_backward(gpt, l, p);
        // ZeRO-2 and ZeRO-3 reduce gradients in every micro-batch, other strategies in the last
        // one.
        if (p->last || !zero_grads_accumulate(gpt->zero, gpt_layer_unit(gpt, l)))
            finish_layer_gradients(gpt, l, p);
    }
    if (gpt_embeds(gpt, p) && gpt_trains_words(gpt)) embedding_backward(gpt, p);
}

void gpt_end_backward(GPT *gpt) {
    if (gpt_trains_words(gpt)) {
        if (gpt->tied) gpt_exchange_words(gpt);
        zero_reduce_unit(gpt->zero, 0, true);
    }
    fp8_gather_maxima(gpt);
}
