// The GPT's buffers in the memory plan: see gpt.h.
#include <assert.h>

#include "llmc/model/gpt.h"

static size_t largest(size_t a, size_t b) { return a > b ? a : b; }

// Returns the number of vocabulary rows of a rank on the stage with the LM head.
static int vocabulary_rows(const GPT *gpt) { return gpt->V / gpt->mesh->tp.size; }

static size_t packed_bytes(const GPT *gpt, int B, int T) {
    return gpt->packs ? op_attention_pack_bytes(B, T, gpt->documents) : 0;
}

static size_t workspace_bytes(const GPT *gpt, bool training) {
    int64_t N = (int64_t)gpt->B * gpt->T;
    int widest = (int)largest(largest((size_t)gpt->FC1, (size_t)gpt->QKV), (size_t)gpt->C);
    size_t bytes = op_linear_workspace_bytes(N, widest, widest);
    for (int T = gpt->has_tasks ? gpt_shortest_length(gpt) : gpt->T; T <= gpt->T; T *= 2) {
        int B = gpt->B * (gpt->T / T);
        bool packed = training && packed_bytes(gpt, B, T) > 0;
        bytes = largest(bytes, op_attention_workspace_bytes(B, T, gpt->NH, gpt->HD, gpt->NG, packed));
    }
    if (!training)
        bytes = largest(bytes, op_cached_attention_workspace_bytes(gpt->T, gpt->T, gpt->NH, gpt->HD));
    if (!gpt->stage.heads) return bytes;
    int V = vocabulary_rows(gpt);
    bytes = largest(bytes, op_linear_workspace_bytes(1, gpt->C, V));  // one row of logits, for sampling
    return training ? largest(bytes, op_head_workspace_bytes(N, gpt->C, V)) : bytes;
}

// A row of the memory plan. target: address of the pointer to set.
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

static int64_t rows_planned(const GPT *gpt) { return (int64_t)gpt->B * gpt->T; }
static size_t own_rows_planned(const GPT *gpt) { return (size_t)tp_rows(&gpt->tp, rows_planned(gpt)).count; }

// Returns true if activations `i` of a slot are used by a layer that runs in FP8 (or in bf16). A
// slot serves all chunks of a pipeline stage, and with full recomputation all layers.
static bool used_by(const GPT *gpt, int i, bool in_fp8) {
    int step = gpt->recompute_full ? 1 : gpt->stage.layers;
    for (int l = i; l < gpt->L; l += step) {
        if (fp8_planned(gpt, l) == in_fp8) return true;
    }
    return false;
}

static void reserve_layer(const GPT *gpt, LayerActs *a, int i, MemoryPlan *plan) {
    const char *group = "activations";
    size_t N = (size_t)rows_planned(gpt), X = N * sizeof(floatX), C = (size_t)gpt->C;
    size_t R = own_rows_planned(gpt), XR = R * sizeof(floatX);
    size_t saved = op_attention_saved_bytes(gpt->B, gpt->T, gpt->NH, gpt->HD);
    size_t queries_keys = (size_t)(gpt->NH + gpt->NG) * (size_t)gpt->HD;
    size_t bf16 = used_by(gpt, i, false);
    const Buffer buffers[] = {
        {group, "first LayerNorm", bf16 * XR * C, &a->ln1.y},
        {group, "first LayerNorm means", R * sizeof(float), &a->ln1.mean},
        {group, "first LayerNorm deviations", R * sizeof(float), &a->ln1.rstd},
        {group, "queries, keys, values", X * (size_t)gpt->QKV, &a->qkv},
        {group, "queries, keys before their norms", gpt->qk_norm ? X * queries_keys : 0, &a->before_norm},
        {group, "attention statistics", saved, &a->att_saved},
        {group, "attention output", X * (size_t)gpt->A, &a->att},
        {group, "residual after attention", XR * C, &a->residual2},
        {group, "second LayerNorm", bf16 * XR * C, &a->ln2.y},
        {group, "second LayerNorm means", R * sizeof(float), &a->ln2.mean},
        {group, "second LayerNorm deviations", R * sizeof(float), &a->ln2.rstd},
        {group, gpt->swiglu ? "before SwiGLU" : "before GELU", X * (size_t)gpt->FC1, &a->pre},
        {group, gpt->swiglu ? "after SwiGLU" : "after GELU", bf16 * X * (size_t)gpt->F, &a->act},
    };
    reserve(plan, buffers, sizeof buffers / sizeof buffers[0]);
    if (used_by(gpt, i, true)) fp8_reserve_layer(gpt, a, plan);
}

static void reserve_slot(const GPT *gpt, MicroBatch *m, MemoryPlan *plan) {
    size_t N = (size_t)rows_planned(gpt), ids = N * sizeof(int32_t);
    const Buffer buffers[] = {
        {"batch", "tokens", ids, &m->tokens},
        {"batch", "targets", ids, &m->targets},
        {"batch", "positions", ids, &m->positions},
        {"batch", "document starts", ids, &m->doc_start},
        {"batch", "packed documents", packed_bytes(gpt, gpt->B, gpt->T), &m->packed},
        {"batch", "loss mask", N * sizeof(float), &m->loss_mask},
    };
    m->residual = xcalloc((size_t)gpt->stage.layers + 1, sizeof(floatX *), "the activation table");
    reserve(plan, buffers, sizeof buffers / sizeof buffers[0]);
}

// Returns the bytes of a buffer (B, T, C) that other ranks may map (comm_open_direct).
static size_t shared_bytes(const GPT *gpt) {
    size_t bytes = (size_t)rows_planned(gpt) * (size_t)gpt->C * sizeof(floatX);
    size_t unit = gpt->tp.peer ? COMM_ALIGNMENT : 1;
    return (bytes + unit - 1) / unit * unit;
}

// Reserves buffers of the final norm and the LM head, and buffers that all layers and micro-batches
// share. Without training, reserves only those for forward passes and the logits of one position.
static void reserve_shared(GPT *gpt, MemoryPlan *plan, bool training) {
    const char *group = "activations", *scratch = "scratch";
    size_t N = (size_t)rows_planned(gpt), X = N * sizeof(floatX), C = (size_t)gpt->C, A = (size_t)gpt->A;
    size_t R = own_rows_planned(gpt), XR = R * sizeof(floatX);
    size_t wide = largest((size_t)gpt->FC1, (size_t)gpt->QKV);
    size_t head = gpt->stage.heads, ranks = (size_t)gpt->mesh->tp.size, apart = ranks > 1;
    int64_t chunk = head ? op_head_chunk_rows((int64_t)N, vocabulary_rows(gpt)) : 0;
    gpt->scratch_bytes = op_scratch_bytes((int64_t)N, gpt->C);
    size_t X_back = training ? X : 0, XR_back = training ? XR : 0, shared = shared_bytes(gpt);
    gpt->dwide_bytes = X_back * wide;
    const Buffer buffers[] = {
        {group, "final LayerNorm", head * XR * C, &gpt->lnf.y},
        {group, "final LayerNorm means", head * R * sizeof(float), &gpt->lnf.mean},
        {group, "final LayerNorm deviations", head * R * sizeof(float), &gpt->lnf.rstd},
        {group, "losses", training * head * N * sizeof(float), &gpt->losses},
        {scratch, "branch of the residual stream", shared, &gpt->branch},
        {scratch, "gradient of the residual stream", XR_back * C, &gpt->dresidual[0]},
        {scratch, "gradient of a branch", gpt->hidden_dropout > 0 ? XR_back * C : 0, &gpt->dbranch},
        {scratch, "column sums of a branch gradient", training * C * sizeof(float), &gpt->branch_sum},
        {scratch, "gradient of a LayerNorm output", training * shared, &gpt->dx},
        {scratch, "gradient of the wide tensors", gpt->dwide_bytes, &gpt->dwide},
        {scratch, "gradient of the attention output", X_back * A, &gpt->datt},
        {scratch, gpt->swiglu ? "gradient of SwiGLU's output" : "gradient of queries, keys, values",
         X_back * largest(gpt->swiglu ? (size_t)gpt->F : 0, gpt->by_kind ? (size_t)gpt->QKV : 0), &gpt->dact},
        {scratch, "RoPE table", (size_t)gpt->T * (size_t)gpt->rotary * sizeof(float), &gpt->rope_table},
        {scratch, "logits of one position", head * (size_t)gpt->V * sizeof(floatX), &gpt->logits},
        {scratch, "op workspace", workspace_bytes(gpt, training), &gpt->workspace},
        {scratch, "op scratch", gpt->scratch_bytes, &gpt->scratch},
        {scratch, "--eval-tasks scores", gpt->has_tasks * head * ranks * (size_t)chunk * sizeof(HeadScore),
         &gpt->scores},
        {"tensor parallel", "partial sums", apart * X * C, &gpt->tp.parts},
        {"tensor parallel", "gathered rows", gpt->tp.sequence ? shared : 0, &gpt->gathered},
        {"tensor parallel", "flags of peer memory", gpt->tp.peer ? COMM_FLAG_BYTES : 0, &gpt->tp.flags},
        {"tensor parallel", "softmax statistics",
         head * apart * ranks * (size_t)chunk * sizeof(HeadStatistics), &gpt->statistics},
    };
    reserve(plan, buffers, sizeof buffers / sizeof buffers[0]);
}

// Reserves receive buffers. Each message needs its own, because it arrives while the stage
// computes.
static void reserve_pipeline(GPT *gpt, MemoryPlan *plan) {
    size_t bytes = own_rows_planned(gpt) * (size_t)gpt->C * sizeof(floatX);
    gpt->input = xcalloc((size_t)gpt->inputs + 1, sizeof(floatX *), "the activation table");
    for (int i = 0; i < gpt->inputs; i++) {
        memory_plan_reserve(plan, "pipeline", "received activations", bytes, (void **)&gpt->input[i]);
    }
    for (int i = 1; gpt->mesh->pp.size > 1 && i < GRADIENT_SLOTS; i++) {
        memory_plan_reserve(plan, "pipeline", "gradients in flight", bytes, (void **)&gpt->dresidual[i]);
    }
    messages_reserve(gpt, plan);
}

void gpt_reserve(GPT *gpt, MemoryPlan *plan) {
    size_t bytes = own_rows_planned(gpt) * (size_t)gpt->C * sizeof(floatX);
    int layers = gpt->recompute_full ? 1 : gpt->stage.layers;
    gpt->slot = xcalloc((size_t)gpt->slots, sizeof(MicroBatch), "the activation table");
    for (int i = 0; i < gpt->slots; i++) reserve_slot(gpt, &gpt->slot[i], plan);
    reserve_shared(gpt, plan, true);
    fp8_reserve(gpt, plan);
    lora_reserve(gpt, plan);
    for (int i = 0; i < gpt->slots; i++) {
        MicroBatch *m = &gpt->slot[i];
        size_t embedded = gpt->stage.embeds ? bytes : 0;
        memory_plan_reserve(plan, "activations", "residual stream", embedded, (void **)&m->embedded);
        for (int l = 1; l <= gpt->stage.layers; l++) {
            memory_plan_reserve(plan, "activations", "residual stream", bytes, (void **)&m->residual[l]);
        }
        if (gpt->recompute_full && i > 0) {
            m->acts = gpt->slot[0].acts;
            continue;
        }
        m->acts = xcalloc((size_t)layers, sizeof(LayerActs), "the activation table");
        for (int l = 0; l < layers; l++) reserve_layer(gpt, &m->acts[l], l, plan);
    }
    tp_reserve_codes(&gpt->tp, rows_planned(gpt), plan);
    reserve_pipeline(gpt, plan);
}

// All layers share one set of buffers; gpt_start lets all layers use one residual stream. Linears
// run in bf16. by_kind is off, because op_cache_append reads Megatron-LM's interleaved QKV layout.
void gpt_reserve_inference(GPT *gpt, MemoryPlan *plan) {
    assert(gpt->mesh->tp.size == 1 && gpt->mesh->pp.size == 1 && gpt->recompute_full && gpt->B == 1);
    gpt->by_kind = gpt->fp8.on = false;
    size_t stream = (size_t)rows_planned(gpt) * (size_t)gpt->C * sizeof(floatX);
    size_t cache = (size_t)(2 * gpt->L * gpt->NG * gpt->HD) * (size_t)gpt->T * sizeof(floatX);
    gpt->slot = xcalloc(1, sizeof(MicroBatch), "the activation table");
    gpt->slot->acts = xcalloc(1, sizeof(LayerActs), "the activation table");
    reserve_slot(gpt, gpt->slot, plan);
    reserve_layer(gpt, gpt->slot->acts, 0, plan);
    memory_plan_reserve(plan, "activations", "residual stream", stream, (void **)&gpt->slot->embedded);
    memory_plan_reserve(plan, "activations", "KV cache", cache, (void **)&gpt->cache);
    reserve_shared(gpt, plan, false);
}

size_t gpt_planned_bytes(const Config *config, const Mesh *mesh) {
    GPT gpt;
    MemoryPlan memory_plan = {0};
    gpt_describe(&gpt, config, mesh);
    gpt_reserve(&gpt, &memory_plan);
    size_t bytes = memory_plan_total(&memory_plan);
    memory_plan_free(&memory_plan, NULL);
    gpt_free(&gpt);
    return bytes;
}

Zero *gpt_plan(GPT *gpt, const Config *config, const Mesh *mesh, MemoryPlan *memory_plan, Error *err) {
    assert(config && mesh && memory_plan);
    GPT own = {0}, *g = gpt ? gpt : &own;
    Zero *zero = NULL;
    gpt_describe(g, config, mesh);
    Parameters trained = gpt_trained(g);
    if (gpt_check(g, err)) zero = zero_plan(config, mesh, trained.tensor, trained.tensors, memory_plan, err);
    if (zero) gpt_reserve(g, memory_plan);
    if (!gpt) gpt_free(&own);
    return zero;
}
