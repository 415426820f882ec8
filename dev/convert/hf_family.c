// The model families, one row each. See hf_family.h.
#include "dev/convert/hf_family.h"

#include <string.h>

#define COUNT_OF(list) ((int)(sizeof(list) / sizeof(list)[0]))

// Macros for table rows. MEANT: affects only training, so a checkpoint may have a different value.
// REAL: written with a decimal point.
#define BLOCK(its_argument, its_value) \
    { .argument = its_argument, .value = its_value }
#define MEANT(its_argument, its_value) \
    { .argument = its_argument, .value = its_value, .of_training = true }
#define WHOLE(its_key, its_argument, otherwise) \
    { .key = its_key, .argument = its_argument, .missing = otherwise }
#define REAL(its_key, its_argument, otherwise) \
    { .key = its_key, .argument = its_argument, .missing = otherwise, .real = true }
#define OPPOSITE(its_key, its_argument, otherwise) \
    { .key = its_key, .argument = its_argument, .missing = otherwise, .negated = true }
#define WRITTEN(its_key, its_values, reason) \
    { .key = its_key, .values = its_values, .why = reason, .written = true }
#define CHECKED(its_key, its_values, reason) \
    { .key = its_key, .values = its_values, .why = reason }
#define PLAIN(trainer_name, hf_name) \
    { \
        .trainer = trainer_name, .hf = { hf_name } \
    }
#define TURNED(trainer_name, hf_name) \
    { .trainer = trainer_name, .hf = {hf_name}, .transposed = true }
#define WORDS(trainer_name, hf_name) \
    { .trainer = trainer_name, .hf = {hf_name}, .order = HF_WORDS }
#define HALVES(trainer_name, gate, up) \
    { .trainer = trainer_name, .hf = {gate, up}, .order = HF_HALVES }
#define HEADS(trainer_name, query, key, value) \
    { .trainer = trainer_name, .hf = {query, key, value}, .order = HF_HEADS }

#define LAYER "encoder.layers.*."
#define NO_WINDOW BLOCK("window_size", "null")

// --- GPT-2 ---------------------------------------------------------------------------------------

static const HfBlock GPT2_BLOCKS[] = {
    BLOCK("normalization", "LayerNorm"),
    BLOCK("position_embedding_type", "learned_absolute"),
    BLOCK("swiglu", "false"),
    BLOCK("disable_bias_linear", "false"),
    BLOCK("add_qkv_bias", "false"),
    NO_WINDOW,
    BLOCK("untie_embeddings_and_output_weights", "false"),
    BLOCK("group_query_attention", "false"),
    BLOCK("qk_layernorm", "false"),
};

static const HfKey GPT2_KEYS[] = {
    WHOLE("n_layer", "num_layers", NULL),
    WHOLE("n_embd", "hidden_size", NULL),
    WHOLE("n_head", "num_attention_heads", NULL),
    WHOLE("n_inner", "ffn_hidden_size", NULL),
    WHOLE("n_positions", "max_position_embeddings", NULL),
    REAL("layer_norm_epsilon", "norm_epsilon", "1e-5"),
    REAL("attn_pdrop", "attention_dropout", "0.1"),
    REAL("resid_pdrop", "hidden_dropout", "0.1"),
    {.key = "embd_pdrop", .argument = "hidden_dropout", .real = true, .written_only = true},
    REAL("initializer_range", "init_method_std", "0.02"),
};

static const HfFixed GPT2_FIXED[] = {
    WRITTEN("activation_function", "gelu_new|gelu_pytorch_tanh|gelu_fast",
            "the MLP uses the tanh form of GELU"),
    WRITTEN("scale_attn_weights", "true", "attention is always scaled by 1/sqrt(head size)"),
    WRITTEN("scale_attn_by_inverse_layer_idx", "false", "all layers use the same attention scale"),
    CHECKED("add_cross_attention", "false", "cross-attention is not supported"),
    WRITTEN("tie_word_embeddings", "true", "GPT-2 ties the output layer to the embedding"),
    CHECKED("is_encoder_decoder", "false", "encoders are not supported"),
};

static const HfRow GPT2_ROWS[] = {
    WORDS("embedding.word_embeddings.weight", "transformer.wte.weight"),
    PLAIN("embedding.position_embeddings.weight", "transformer.wpe.weight"),
    PLAIN(LAYER "input_norm.weight", "transformer.h.*.ln_1.weight"),
    PLAIN(LAYER "input_norm.bias", "transformer.h.*.ln_1.bias"),
    {.trainer = LAYER "self_attention.query_key_value.weight",
     .hf = {"transformer.h.*.attn.c_attn.weight"},
     .order = HF_HEADS,
     .transposed = true},
    {.trainer = LAYER "self_attention.query_key_value.bias",
     .hf = {"transformer.h.*.attn.c_attn.bias"},
     .order = HF_HEADS},
    TURNED(LAYER "self_attention.dense.weight", "transformer.h.*.attn.c_proj.weight"),
    PLAIN(LAYER "self_attention.dense.bias", "transformer.h.*.attn.c_proj.bias"),
    PLAIN(LAYER "post_attention_norm.weight", "transformer.h.*.ln_2.weight"),
    PLAIN(LAYER "post_attention_norm.bias", "transformer.h.*.ln_2.bias"),
    TURNED(LAYER "mlp.dense_h_to_4h.weight", "transformer.h.*.mlp.c_fc.weight"),
    PLAIN(LAYER "mlp.dense_h_to_4h.bias", "transformer.h.*.mlp.c_fc.bias"),
    TURNED(LAYER "mlp.dense_4h_to_h.weight", "transformer.h.*.mlp.c_proj.weight"),
    PLAIN(LAYER "mlp.dense_4h_to_h.bias", "transformer.h.*.mlp.c_proj.bias"),
    PLAIN("encoder.final_norm.weight", "transformer.ln_f.weight"),
    PLAIN("encoder.final_norm.bias", "transformer.ln_f.bias"),
};

// --- Llama ---------------------------------------------------------------------------------------

// Blocks shared by all Llama-like models.
static const HfBlock LLAMA_BLOCKS[] = {
    BLOCK("normalization", "RMSNorm"), BLOCK("position_embedding_type", "rope"),
    BLOCK("rotary_percent", "1"),      BLOCK("swiglu", "true"),
    MEANT("hidden_dropout", "0"),
};

static const HfKey LLAMA_KEYS[] = {
    WHOLE("num_hidden_layers", "num_layers", NULL),
    WHOLE("hidden_size", "hidden_size", NULL),
    WHOLE("num_attention_heads", "num_attention_heads", NULL),
    WHOLE("num_key_value_heads", "num_query_groups", NULL),
    WHOLE("intermediate_size", "ffn_hidden_size", NULL),
    WHOLE("max_position_embeddings", "max_position_embeddings", NULL),
    REAL("rms_norm_eps", "norm_epsilon", "1e-6"),
    REAL("rope_parameters.rope_theta", "rotary_base", NULL),
    REAL("rope_theta", "rotary_base", NULL),
    REAL("attention_dropout", "attention_dropout", "0"),
    REAL("initializer_range", "init_method_std", "0.02"),
    OPPOSITE("tie_word_embeddings", "untie_embeddings_and_output_weights", "true"),
};

#define ROTATIONS "rotary settings must be one flat object of numbers"
#define WHOLE_HEADS "rotary positions apply to whole heads"
static const HfFixed LLAMA_FIXED[] = {
    WRITTEN("hidden_act", "silu|swish", "the MLP is SwiGLU"),
    CHECKED("rope_scaling", "null|{}", ROTATIONS),
    CHECKED("rope_parameters", "null|{}", ROTATIONS),
    CHECKED("rope_parameters.partial_rotary_factor", "1", WHOLE_HEADS),
    CHECKED("partial_rotary_factor", "1", WHOLE_HEADS),
};

#define THEIRS "model.layers.*."
static const HfRow LLAMA_ROWS[] = {
    WORDS("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
    WORDS("output_layer.weight", "lm_head.weight"),
    PLAIN(LAYER "input_norm.weight", THEIRS "input_layernorm.weight"),
    HEADS(LAYER "self_attention.query_key_value.weight", THEIRS "self_attn.q_proj.weight",
          THEIRS "self_attn.k_proj.weight", THEIRS "self_attn.v_proj.weight"),
    PLAIN(LAYER "self_attention.dense.weight", THEIRS "self_attn.o_proj.weight"),
    PLAIN(LAYER "post_attention_norm.weight", THEIRS "post_attention_layernorm.weight"),
    HALVES(LAYER "mlp.dense_h_to_4h.weight", THEIRS "mlp.gate_proj.weight", THEIRS "mlp.up_proj.weight"),
    PLAIN(LAYER "mlp.dense_4h_to_h.weight", THEIRS "mlp.down_proj.weight"),
    PLAIN("encoder.final_norm.weight", "model.norm.weight"),
};

// Llama may have biases, in all linear layers or in none.
static const HfBlock LLAMA_ALONE_BLOCKS[] = {BLOCK("qk_layernorm", "false"), BLOCK("add_qkv_bias", "false"),
                                             NO_WINDOW};
static const HfKey LLAMA_ALONE_KEYS[] = {
    WHOLE("head_dim", "kv_channels", NULL),
    OPPOSITE("attention_bias", "disable_bias_linear", "true"),
    OPPOSITE("mlp_bias", "disable_bias_linear", "true"),
};
#define QKV_BIASES \
    HEADS(LAYER "self_attention.query_key_value.bias", THEIRS "self_attn.q_proj.bias", \
          THEIRS "self_attn.k_proj.bias", THEIRS "self_attn.v_proj.bias")
static const HfRow LLAMA_ALONE_ROWS[] = {
    QKV_BIASES,
    PLAIN(LAYER "self_attention.dense.bias", THEIRS "self_attn.o_proj.bias"),
    HALVES(LAYER "mlp.dense_h_to_4h.bias", THEIRS "mlp.gate_proj.bias", THEIRS "mlp.up_proj.bias"),
    PLAIN(LAYER "mlp.dense_4h_to_h.bias", THEIRS "mlp.down_proj.bias"),
};

// Qwen2 is Llama with biases of queries, keys and values. config.json does not mention them.
static const HfBlock QWEN2_BLOCKS[] = {BLOCK("qk_layernorm", "false"), BLOCK("disable_bias_linear", "true"),
                                       BLOCK("add_qkv_bias", "true")};
static const HfKey QWEN2_KEYS[] = {WHOLE("head_dim", "kv_channels", NULL)};
static const HfRow QWEN2_ROWS[] = {QKV_BIASES};

// Qwen3 is Llama with query and key norms.
static const HfBlock QWEN3_BLOCKS[] = {BLOCK("qk_layernorm", "true"), BLOCK("disable_bias_linear", "true"),
                                       BLOCK("add_qkv_bias", "false")};
static const HfKey QWEN3_KEYS[] = {WHOLE("head_dim", "kv_channels", "128")};
static const HfFixed QWEN3_FIXED[] = {
    WRITTEN("attention_bias", "false", "this family has no biases"),
};
static const HfRow QWEN3_ROWS[] = {
    PLAIN(LAYER "self_attention.q_layernorm.weight", THEIRS "self_attn.q_norm.weight"),
    PLAIN(LAYER "self_attention.k_layernorm.weight", THEIRS "self_attn.k_norm.weight"),
};

// Mistral is Llama without biases, in early versions with a sliding window. Exports without a
// window are labeled Llama.
static const HfBlock MISTRAL_BLOCKS[] = {BLOCK("disable_bias_linear", "true"), BLOCK("add_qkv_bias", "false"),
                                         BLOCK("qk_layernorm", "false"),
                                         BLOCK("window_attn_skip_freq", "null")};
static const HfKey MISTRAL_KEYS[] = {WHOLE("head_dim", "kv_channels", NULL)};

// --- All families -------------------------------------------------------------------------------

#define LIST(rows) rows, COUNT_OF(rows)

static const HfFamily LLAMA_LIKE = {.blocks = LIST(LLAMA_BLOCKS),
                                    .keys = LIST(LLAMA_KEYS),
                                    .fixed = LIST(LLAMA_FIXED),
                                    .rows = LIST(LLAMA_ROWS),
                                    .constants = {".rotary_emb.inv_freq"}};

static const HfFamily FAMILIES[] = {
    {.name = "GPT-2",
     .type = "gpt2",
     .architecture = "GPT2LMHeadModel",
     .blocks = LIST(GPT2_BLOCKS),
     .keys = LIST(GPT2_KEYS),
     .fixed = LIST(GPT2_FIXED),
     .rows = LIST(GPT2_ROWS),
     .prefix = "transformer.",
     .constants = {".attn.bias", ".attn.masked_bias"}},
    {.name = "Llama",
     .type = "llama",
     .architecture = "LlamaForCausalLM",
     .like = &LLAMA_LIKE,
     .blocks = LIST(LLAMA_ALONE_BLOCKS),
     .keys = LIST(LLAMA_ALONE_KEYS),
     .rows = LIST(LLAMA_ALONE_ROWS)},
    {.name = "Qwen2",
     .type = "qwen2",
     .architecture = "Qwen2ForCausalLM",
     .like = &LLAMA_LIKE,
     .blocks = LIST(QWEN2_BLOCKS),
     .keys = LIST(QWEN2_KEYS),
     .window = HF_WINDOW_SWITCHED,
     .rows = LIST(QWEN2_ROWS)},
    {.name = "Qwen3",
     .type = "qwen3",
     .architecture = "Qwen3ForCausalLM",
     .like = &LLAMA_LIKE,
     .blocks = LIST(QWEN3_BLOCKS),
     .keys = LIST(QWEN3_KEYS),
     .fixed = LIST(QWEN3_FIXED),
     .window = HF_WINDOW_SWITCHED,
     .rows = LIST(QWEN3_ROWS)},
    {.name = "Mistral",
     .type = "mistral",
     .architecture = "MistralForCausalLM",
     .like = &LLAMA_LIKE,
     .blocks = LIST(MISTRAL_BLOCKS),
     .keys = LIST(MISTRAL_KEYS),
     .window = HF_WINDOW_ALWAYS},
};

const HfFamily *hf_families(int *count) {
    *count = COUNT_OF(FAMILIES);
    return FAMILIES;
}

// Returns the first block in which the model differs from the family (NULL: none) and adds the
// number of such blocks to *count.
static const HfBlock *other_block(const HfFamily *family, const cJSON *arguments, int *count) {
    const HfBlock *first = family->like ? other_block(family->like, arguments, count) : NULL;
    for (int i = 0; i < family->block_count; i++) {
        const HfBlock *block = &family->blocks[i];
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(arguments, block->argument);
        char text[256];
        model_flag_text(item, text, sizeof text);
        if (block->of_training || strcmp(text, block->value) == 0) continue;
        if (strcmp(text, "yarn") == 0 && strcmp(block->value, "rope") == 0) continue;
        if (!first) first = block;
        ++*count;
    }
    return first;
}

static bool has_key(const HfFamily *family, const char *argument) {
    for (int i = 0; i < family->key_count; i++) {
        if (strcmp(family->keys[i].argument, argument) == 0) return true;
    }
    return family->like && has_key(family->like, argument);
}

// Checks the head size of families whose config.json cannot express one.
static bool check_heads(const HfFamily *family, const Config *c, Error *err) {
    bool usual = (int64_t)c->kv_channels * c->num_attention_heads == c->hidden_size;
    if (usual || has_key(family, "kv_channels")) return true;
    return ckpt_error(err,
                      "the checkpoint's model has kv_channels %d, but Hugging Face's %s requires hidden_size "
                      "/ num_attention_heads; load another checkpoint",
                      c->kv_channels, family->name);
}

const HfFamily *hf_family_of(const ImportedModel *model, Error *err) {
    cJSON *arguments = imported_arguments(&model->config);
    const HfFamily *nearest = &FAMILIES[0];
    const HfBlock *other = NULL;
    int least = 100;
    for (int i = 0; i < COUNT_OF(FAMILIES); i++) {
        int count = 0;
        const HfBlock *first = other_block(&FAMILIES[i], arguments, &count);
        if (count >= least) continue;
        least = count;
        nearest = &FAMILIES[i];
        other = first;
    }
    if (other) {
        char value[256];
        model_flag_text(cJSON_GetObjectItemCaseSensitive(arguments, other->argument), value, sizeof value);
        ckpt_error(err,
                   "the checkpoint's model has %s %s, but the closest Hugging Face family, %s, has %s; load "
                   "another checkpoint",
                   other->argument, value, nearest->name, other->value);
    }
    cJSON_Delete(arguments);
    return !other && check_heads(nearest, &model->config, err) ? nearest : NULL;
}
