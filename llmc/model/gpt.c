// The parameter tables of the whole model and of one rank: see gpt.h. Tensor names, order and
// shapes are Megatron-LM's, with QKV rows interleaved per query group. The final norm directly
// follows the last layer, at the index that the first norm of another layer would have.
#include "llmc/model/gpt.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

int gpt_layer_tensor(const GPT *gpt, int layer, enum LayerTensor which) {
    assert(layer >= 0 && layer <= gpt->L);
    int place = gpt->place[which];
    return place < 0 ? -1 : gpt->below + layer * gpt->layer_tensors + place;
}

bool gpt_trains_words(const GPT *gpt) { return (gpt->stage.embeds || gpt->stage.heads) && !gpt->lora.rank; }

int gpt_layer_unit(const GPT *gpt, int layer) { return layer + gpt_trains_words(gpt); }

// Returns how Muon orthogonalizes a matrix of a layer.
static MuonShape muon_shape(const GPT *gpt, const Config *config, int which, int64_t rows, int64_t columns) {
    int64_t groups = config_query_groups(config), queries = config->num_attention_heads / groups;
    MuonShape shape = {.columns = columns, .groups = 1, .part = {rows, 0, 0}};
    shape.duplicated = config->muon_tp_mode == MUON_DUPLICATED;
    if (which == QKV_W && !config->muon_no_split_qkv) {
        shape.groups = groups;
        shape.part[0] = queries * gpt->HD;
        shape.part[1] = shape.part[2] = gpt->HD;
    }
    // Gate and up projection together, as one matrix (2F, C).
    if (which == FC1_W && gpt->swiglu) shape.columns = gpt->C, shape.part[0] = rows * columns / gpt->C;
    return shape;
}

static void add_tensor(GPT *gpt, const char *name, int64_t rows, int64_t columns, int split, int unit,
                       double std) {
    gpt->whole[gpt->whole_tensors++] = tensor_row(name, rows, columns, split, unit, std);
}

// Assigns each tensor its index within a layer. RMSNorm has no bias, and linear layers have none
// with --disable-bias-linear, except QKV's with --add-qkv-bias. A bias follows its weight.
static void place_tensors(GPT *gpt) {
    for (int i = 0; i < LAYER_TENSORS; i++) {
        int weight = i / 2 * 2;
        bool of_heads = weight == Q_NORM_W || weight == K_NORM_W, bias = i != weight;
        bool biased = weight == QKV_W ? gpt->qkv_biased : gpt->biased;
        bool of_norm = of_heads || weight == LN1_W || weight == LN2_W;
        bool absent = (of_heads && !gpt->qk_norm) || (bias && (of_norm ? gpt->rms : !biased));
        gpt->place[i] = absent ? -1 : gpt->layer_tensors++;
    }
}

// SwiGLU's first matrix has Megatron-LM's layout: F rows of the gate projection, then F rows of the
// up projection. Tensor parallelism splits both halves. The table therefore describes the same
// elements as a matrix (2, F * C) that is split by columns.
static void add_layer(GPT *gpt, const Config *config, int l) {
    int layers = config->num_layers;
    int64_t C = gpt->C, HD = gpt->HD, A = config->num_attention_heads * HD, F = config->ffn_hidden_size;
    int64_t QKV = A + 2 * config_query_groups(config) * HD;
    bool halves = gpt->swiglu;
    double std = config->init_method_std;
    double scaled = std / sqrt(2.0 * layers);  // for layers that write to the residual stream
    struct {
        const char *name;
        int64_t rows, columns;
        int split;
        double std;
    } row[LAYER_TENSORS] = {
        {"input_norm.weight", C, 0, -1, -1},
        {"input_norm.bias", C, 0, -1, 0},
        {"self_attention.query_key_value.weight", QKV, C, 0, std},
        {"self_attention.query_key_value.bias", QKV, 0, 0, 0},
        {"self_attention.q_layernorm.weight", HD, 0, -1, -1},
        {"self_attention.q_layernorm.bias", HD, 0, -1, 0},
        {"self_attention.k_layernorm.weight", HD, 0, -1, -1},
        {"self_attention.k_layernorm.bias", HD, 0, -1, 0},
        {"self_attention.dense.weight", C, A, 1, scaled},
        {"self_attention.dense.bias", C, 0, -1, 0},
        {"post_attention_norm.weight", C, 0, -1, -1},
        {"post_attention_norm.bias", C, 0, -1, 0},
        {"mlp.dense_h_to_4h.weight", halves ? 2 : F, halves ? F * C : C, halves ? 1 : 0, std},
        {"mlp.dense_h_to_4h.bias", halves ? 2 * F : F, 0, 0, 0},
        {"mlp.dense_4h_to_h.weight", C, F, 1, scaled},
        {"mlp.dense_4h_to_h.bias", C, 0, -1, 0},
    };
    for (int i = 0; i < LAYER_TENSORS; i++) {
        char name[96];
        if (gpt->place[i] < 0) continue;
        snprintf(name, sizeof name, "encoder.layers.%d.%s", l, row[i].name);
        add_tensor(gpt, name, row[i].rows, row[i].columns, row[i].split, l + 1, row[i].std);
        if (config->optimizer == OPTIMIZER_MUON && row[i].columns > 0)
            gpt->whole[gpt->whole_tensors - 1].muon = muon_shape(gpt, config, i, row[i].rows, row[i].columns);
    }
}

// Like Megatron-LM, assigns chunks of layers to the stages round-robin.
static Stage stage_of(const Config *config, const Group *pp) {
    int virtual_stage = config->num_layers_per_virtual_pipeline_stage;
    int layers = config->num_layers / pp->size, chunks = virtual_stage ? layers / virtual_stage : 1;
    Stage stage = {{pp->size, pp->rank, chunks}, layers / chunks, pp->rank == 0, pp->rank == pp->size - 1};
    return stage;
}

int gpt_layer_number(const GPT *gpt, int layer) {
    assert(layer >= 0 && layer < gpt->L);
    const Stage *s = &gpt->stage;
    int chunk = layer / s->layers * s->shape.stages + s->shape.stage;
    return chunk * s->layers + layer % s->layers;
}

// A window of the whole sequence is none.
static void describe_attention(GPT *gpt, const Config *config) {
    gpt->documents = config->reset_attention_mask || config->sft;
    gpt->packs = !config->deterministic_mode && gpt->mesh->pp.size == 1;
    gpt->window = xcalloc((size_t)config->num_layers, sizeof *gpt->window, "the windows of the layers");
    for (int l = 0; l < config->num_layers; l++) {
        int window = config_window(config, l);
        gpt->window[l] = window < gpt->T ? window : 0;
    }
}

int gpt_window(const GPT *gpt, int layer) { return gpt->window[gpt_layer_number(gpt, layer)]; }

// Packed attention needs a new cuDNN plan when the number of documents grows. In a pipeline, its
// first launch could wait for a message that a rank sends only after this launch.
const char *gpt_unpacked(const GPT *gpt, const Config *config) {
    if (config->deterministic_mode) return "--deterministic-mode";
    if (gpt->mesh->pp.size > 1) return "--pipeline-model-parallel-size";
    if (!(gpt->attention_dropout > 0)) return NULL;
    for (int l = 0; l < config->num_layers; l++) {
        if (gpt->window[l]) return "--attention-dropout in layers with windows";
    }
    return NULL;
}

static void describe_whole(GPT *gpt, const Config *config) {
    int layers = config->num_layers;
    double std = config->init_method_std;
    place_tensors(gpt);
    gpt->whole = xcalloc((size_t)(5 + layers * LAYER_TENSORS), sizeof(Tensor), "the parameter table");
    add_tensor(gpt, "embedding.word_embeddings.weight", gpt->V, gpt->C, 0, 0, std);
    if (gpt->P) add_tensor(gpt, "embedding.position_embeddings.weight", gpt->P, gpt->C, -1, 0, std);
    if (!gpt->tied) add_tensor(gpt, "output_layer.weight", gpt->V, gpt->C, 0, 0, std);
    for (int l = 0; l < layers; l++) add_layer(gpt, config, l);
    add_tensor(gpt, "encoder.final_norm.weight", gpt->C, 0, -1, layers, -1);
    if (!gpt->rms) add_tensor(gpt, "encoder.final_norm.bias", gpt->C, 0, -1, layers, 0);
    tensors_number(gpt->whole, gpt->whole_tensors, gpt->mesh->tp.size);
}

static void keep_part(GPT *gpt, const Tensor *whole, int unit, bool counted) {
    Tensor *part = &gpt->tensor[gpt->tensors++];
    *part = tensor_part(whole, gpt->mesh->tp.rank, gpt->mesh->tp.size);
    part->unit = unit;
    bool words = gpt_trains_words(gpt);
    part->chunk = unit < words ? ANY_CHUNK : (unit - words) / gpt->stage.layers;
    part->counted = part->counted && counted;
}

// Builds this rank's table. With tied embeddings the last stage has a copy of the word embeddings,
// which only the first stage counts in norms and parameter totals.
static void keep_own(GPT *gpt) {
    const Stage *stage = &gpt->stage;
    size_t most = 5 + (size_t)gpt->L * LAYER_TENSORS;
    int learned = gpt->P > 0, below = 1 + learned + !gpt->tied;
    gpt->tensor = xcalloc(most, sizeof(Tensor), "the parameter table");
    if (stage->embeds || (stage->heads && gpt->tied)) {
        keep_part(gpt, &gpt->whole[GPT_WTE], 0, stage->embeds);
    }
    if (stage->embeds && learned) keep_part(gpt, &gpt->whole[GPT_WPE], 0, true);
    gpt->output = gpt->tied ? GPT_WTE : gpt->tensors;
    if (stage->heads && !gpt->tied) keep_part(gpt, &gpt->whole[1 + learned], 0, true);
    gpt->below = gpt->tensors;
    for (int l = 0; l < gpt->L; l++) {
        const Tensor *layer = &gpt->whole[below + gpt_layer_number(gpt, l) * gpt->layer_tensors];
        for (int i = 0; i < gpt->layer_tensors; i++) keep_part(gpt, &layer[i], gpt_layer_unit(gpt, l), true);
    }
    for (int i = gpt->whole_tensors - (gpt->rms ? 1 : 2); stage->heads && i < gpt->whole_tensors; i++) {
        keep_part(gpt, &gpt->whole[i], gpt_layer_unit(gpt, gpt->L - 1), true);
    }
}

static Yarn yarn_of(const Config *c) {
    double factor = c->rotary_scaling_factor, gain = c->yarn_attention_factor;
    if (gain == 0) gain = 0.1 * log(factor) + 1;
    return (Yarn){.factor = factor,
                  .positions = c->yarn_original_max_position_embeddings,
                  .fast = c->yarn_beta_fast,
                  .slow = c->yarn_beta_slow,
                  .gain = gain,
                  .rounded = !c->no_yarn_correction_range_round_to_int};
}

static TensorParallel tensor_parallel_of(const Config *c, const Group *group) {
    bool several = group->size > 1;
    return (TensorParallel){.group = group,
                            .sequence = c->sequence_parallel && several,
                            .C = c->hidden_size,
                            .peer = c->tp_comm_backend != TP_COMM_NCCL && several,
                            .may_share_gpu = c->tp_comm_backend == TP_COMM_PEER,
                            .block_bytes = tp_splits_rows(c) ? TP_BLOCK_BYTES : 0,
                            .coded = c->quantized_tensor_parallel && several,
                            .format = tp_format(c)};
}

void gpt_describe(GPT *gpt, const Config *config, const Mesh *mesh) {
    int ranks = mesh->tp.size;
    assert(config->num_attention_heads % ranks == 0 && config->num_layers % mesh->pp.size == 0);
    memset(gpt, 0, sizeof *gpt);
    gpt->mesh = mesh;
    gpt->B = config->micro_batch_size;
    gpt->T = config->seq_length;
    gpt->C = config->hidden_size;
    gpt->NH = config->num_attention_heads / ranks;
    gpt->HD = config->kv_channels;
    gpt->A = gpt->NH * gpt->HD;
    gpt->F = config->ffn_hidden_size / ranks;
    gpt->stage = stage_of(config, &mesh->pp);
    gpt->L = gpt->stage.layers * gpt->stage.shape.chunks;
    gpt->V = config->vocab_size_padded;
    gpt->words = config->vocab_size_unpadded;
    gpt->has_tasks = config_scores(config);
    gpt->rotary_base = config->rotary_base;
    gpt->rotary_stretch = config->use_rope_scaling ? config->rope_scaling_factor : 1;
    describe_attention(gpt, config);
    gpt->rotary_interpolation = config->rotary_seq_len_interpolation_factor;
    if (config->position_embedding_type == POSITIONS_YARN) gpt->yarn = yarn_of(config);
    gpt->rotary = config_rotary_columns(config);
    gpt->P = gpt->rotary ? 0 : config->max_position_embeddings;
    gpt->rms = config->normalization == RMSNORM;
    gpt->swiglu = config->swiglu;
    gpt->biased = !config->disable_bias_linear;
    gpt->qkv_biased = gpt->biased || config->add_qkv_bias;
    gpt->tied = !config->untie_embeddings_and_output_weights;
    gpt->qk_norm = config->qk_layernorm;
    gpt->FC1 = gpt->swiglu ? 2 * gpt->F : gpt->F;
    gpt->NG = config_query_groups(config) / ranks;
    gpt->QKV = gpt->A + 2 * gpt->NG * gpt->HD;
    gpt->by_kind = gpt->rotary > 0 && gpt->NG < gpt->NH;
    gpt->epsilon = (float)config->norm_epsilon;
    gpt->attention_dropout = (float)config->attention_dropout;
    gpt->hidden_dropout = (float)config->hidden_dropout;
    gpt->seed = (uint32_t)config->seed;
    gpt->recompute_full = config->recompute_granularity == RECOMPUTE_FULL;
    gpt->slots = pipeline_in_flight(gpt->stage.shape, config->micro_batches);
    gpt->inputs = gpt->stage.embeds && gpt->stage.shape.chunks == 1 ? 0 : gpt->slots + 1;
    gpt->tp = tensor_parallel_of(config, &mesh->tp);
    fp8_describe(gpt, config);
    messages_describe(gpt, config);
    describe_whole(gpt, config);
    keep_own(gpt);
    lora_describe(gpt, config);
}

Rows gpt_own_rows(const GPT *gpt, const Pass *pass) { return tp_rows(&gpt->tp, pass_rows(pass)); }

int gpt_first_layer(const GPT *gpt, const Pass *pass) { return pass->chunk * gpt->stage.layers; }
int gpt_end_layer(const GPT *gpt, const Pass *pass) { return gpt_first_layer(gpt, pass) + gpt->stage.layers; }

bool gpt_embeds(const GPT *gpt, const Pass *pass) { return gpt->stage.embeds && pass->chunk == 0; }
bool gpt_heads(const GPT *gpt, const Pass *pass) {
    return gpt->stage.heads && gpt_end_layer(gpt, pass) == gpt->L;
}

bool gpt_check(const GPT *gpt, Error *err) {
    int V = gpt->V / gpt->mesh->tp.size;
    return op_check_model(gpt->C, gpt->NH, gpt->HD, gpt->F, V, (int64_t)gpt->B * gpt->T, err);
}

void gpt_free(GPT *gpt) {
    for (int i = 0; gpt->slot && i < gpt->slots; i++) {
        free(gpt->slot[i].residual);
        if (i == 0 || !gpt->recompute_full) free(gpt->slot[i].acts);
    }
    free(gpt->slot);
    free(gpt->input);
    messages_free(gpt);
    free(gpt->fp8.weight);
    lora_free(&gpt->lora);
    free(gpt->tensor);
    free(gpt->whole);
    free(gpt->window);
    memset(gpt, 0, sizeof *gpt);
}
