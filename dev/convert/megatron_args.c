// Converts Megatron-LM's arguments to flags of the trainer. See megatron_args.h. Most have the same
// names.
#include "dev/convert/megatron_args.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/config/options.h"

#define COUNT_OF(list) (sizeof(list) / sizeof(list)[0])

static bool refuse(const char *path, const char *what, const char *name, Error *err) {
    return ckpt_error(err, "%s: %s %s; import another checkpoint", path, what, name);
}

// Returns true for missing, None, False, 0 and empty values: the flag was not given.
static bool is_neutral(const PickleValue *value) {
    if (!value) return true;
    switch (value->kind) {
        case PICKLE_NONE: return true;
        case PICKLE_BOOL: return !value->truth;
        case PICKLE_INT: return value->integer == 0;
        case PICKLE_REAL: return value->real == 0;
        case PICKLE_TEXT: return !*value->text;
        case PICKLE_LIST: return value->count == 0;
        default: return false;
    }
}

static bool is_false(const PickleValue *value) {
    return value && value->kind == PICKLE_BOOL && !value->truth;
}

// --- Unsupported features -----------------------------------------------------------------------

// Arguments that change the computation in ways that the trainer does not support.
typedef struct Refused {
    const char *name, *why;
} Refused;
static const Refused REFUSED[] = {
    {"num_experts", "has a mixture of experts"},
    {"multi_latent_attention", "has multi-latent attention"},
    {"apply_residual_connection_post_layernorm", "adds residuals after the norm"},
    {"apply_layernorm_1p", "has norms with gains relative to 1"},
    {"squared_relu", "has squared ReLU"},
    {"quick_geglu", "has GEGLU"},
    {"onnx_safe", "uses the erf form of GELU"},
    {"rotary_interleaved", "applies rotary positions to neighboring columns"},
    {"window_size", "uses sliding-window attention"},
    {"mtp_num_layers", "predicts several tokens"},
    {"no_rope_freq", "has layers without rotary positions"},
    {"heterogeneous_layers_config_path", "has heterogeneous layers"},
    {"hybrid_override_pattern", "has heterogeneous layers"},
    {"attention_output_gate", "gates the attention output"},
    {"experimental_attention_variant", "uses an unsupported attention variant"},
    {"qk_l2_norm", "normalizes queries and keys to length 1"},
    {"num_moe_experts", "has a mixture of experts"},
    {"layernorm_zero_centered_gamma", "has norms with gains relative to 1"},
    {"glu_linear_offset", "adds an offset to the linear half of SwiGLU"},
    {"activation_func_clamp_value", "clamps the input of the activation function"},
    {"softmax_scale", "sets the scale of attention scores"},
    {"head_wise_attn_gate", "gates the attention output"},
    {"rotary_base_per_layer", "has a rotary base per layer"},
    {"linear_attention_type", "has linear attention"},
    {"linear_attention_freq", "has linear attention"},
    {"hybrid_layer_pattern", "has heterogeneous layers"},
    {"hybrid_attention_ratio", "has heterogeneous layers"},
    {"hybrid_mlp_ratio", "has heterogeneous layers"},
    {"is_hybrid_model", "has heterogeneous layers"},
    {"heterogeneous_layers_config_encoded_json", "has heterogeneous layers"},
    {"enable_hyper_connections", "has several residual streams"},
    {"use_mup", "scales activations by the maximal update parametrization"},
    {"retro_add_retriever", "retrieves chunks of text"},
};
// Arguments that only matter for formats that locate layers by pipeline stage.
static const Refused REFUSED_BY_RANK[] = {
    {"decoder_first_pipeline_num_layers", "has a first stage of a different size"},
    {"decoder_last_pipeline_num_layers", "has a last stage of a different size"},
    {"num_layers_in_first_pipeline_stage", "has a first stage of a different size"},
    {"num_layers_in_last_pipeline_stage", "has a last stage of a different size"},
    {"standalone_embedding_stage", "has a first stage of a different size"},
    {"pipeline_model_parallel_layout", "has stages of different sizes"},
    {"account_for_embedding_in_pipeline_split", "has a first stage of a different size"},
    {"account_for_loss_in_pipeline_split", "has a last stage of a different size"},
};

// Accepts SwiGLU and the tanh form of GELU, which is what Megatron-LM uses if it fuses the bias.
static bool check_activation(const PickleValue *args, const char *path, Error *err) {
    if (!is_neutral(pickle_member(args, "swiglu")) || !is_neutral(pickle_member(args, "openai_gelu")))
        return true;
    if (!is_false(pickle_member(args, "bias_gelu_fusion"))) return true;
    return refuse(path, "its model", "uses the erf form of GELU (bias_gelu_fusion is off)", err);
}

static bool check_neutral(const PickleValue *args, const Refused *rows, size_t count, const char *path,
                          Error *err) {
    for (size_t i = 0; i < count; i++) {
        if (!is_neutral(pickle_member(args, rows[i].name)))
            return refuse(path, "its model", rows[i].why, err);
    }
    return true;
}

static bool check_computed(const PickleValue *args, bool by_rank, const char *path, Error *err) {
    if (!check_neutral(args, REFUSED, COUNT_OF(REFUSED), path, err)) return false;
    if (by_rank && !check_neutral(args, REFUSED_BY_RANK, COUNT_OF(REFUSED_BY_RANK), path, err)) return false;
    const char *softmax = pickle_text(pickle_member(args, "softmax_type"));
    if (softmax && strcmp(softmax, "vanilla") != 0)
        return refuse(path, "its model", "uses an unsupported attention softmax", err);
    const char *positions = pickle_text(pickle_member(args, "position_embedding_type"));
    if (positions && strcmp(positions, "yarn") == 0)
        return refuse(path, "its model", "scales rotary positions by YaRN", err);
    return check_activation(args, path, err);
}

// --- Flags ---------------------------------------------------------------------------------------

// An argument, and its flag if that has a different name.
typedef struct Row {
    const char *name, *flag;
    bool needed;
} Row;
static const Row ALWAYS[] = {
    {"num_layers", NULL, true},
    {"hidden_size", NULL, true},
    {"num_attention_heads", NULL, true},
    {"max_position_embeddings", NULL, true},
    {"ffn_hidden_size", NULL, false},
    {"kv_channels", NULL, false},
    {"norm_epsilon", NULL, false},
    {"layernorm_epsilon", "norm_epsilon", false},
    {"init_method_std", NULL, false},
    {"attention_dropout", NULL, false},
    {"hidden_dropout", NULL, false},
    {"normalization", NULL, false},
    {"swiglu", NULL, false},
    {"untie_embeddings_and_output_weights", NULL, false},
    {"qk_layernorm", NULL, false},
};
static const Row OF_GROUPS[] = {{"group_query_attention", NULL, true}, {"num_query_groups", NULL, true}};
static const Row OF_ROTATIONS[] = {{"rotary_base", NULL, false},
                                   {"rotary_percent", NULL, false},
                                   {"rotary_seq_len_interpolation_factor", NULL, false}};
static const Row OF_SCALING[] = {{"use_rope_scaling", NULL, true}, {"rope_scaling_factor", NULL, false}};

// Adds a flag with a number, a string or True. Neutral values add nothing.
static bool add_flag(MegatronArgs *a, const PickleValue *args, const Row *row, const char *path, Error *err) {
    const PickleValue *value = pickle_member(args, row->name);
    const char *flag = row->flag ? row->flag : row->name;
    char number[40];
    bool zero = value && (value->kind == PICKLE_INT || value->kind == PICKLE_REAL);
    if (is_neutral(value) && !zero) return !row->needed || refuse(path, "its arguments lack", row->name, err);
    if (value->kind == PICKLE_BOOL) model_flags_add(&a->flags, flag, NULL);
    else if (value->kind == PICKLE_TEXT) model_flags_add(&a->flags, flag, value->text);
    else if (!zero) return refuse(path, "its arguments have no valid", row->name, err);
    if (!zero) return true;
    if (value->kind == PICKLE_REAL) format_real(value->real, number, sizeof number);
    else snprintf(number, sizeof number, "%" PRId64, value->integer);
    model_flags_add(&a->flags, flag, number);
    return true;
}

static bool add_flags(MegatronArgs *a, const PickleValue *args, const Row *rows, size_t count,
                      const char *path, Error *err) {
    for (size_t i = 0; i < count; i++) {
        if (!add_flag(a, args, &rows[i], path, err)) return false;
    }
    return true;
}

static bool add_positions(MegatronArgs *a, const PickleValue *args, const char *path, Error *err) {
    const char *type = pickle_text(pickle_member(args, "position_embedding_type"));
    if (!is_neutral(pickle_member(args, "use_rotary_position_embeddings"))) type = "rope";
    if (!type) return true;
    model_flags_add(&a->flags, "position_embedding_type", type);
    if (strcmp(type, "rope") != 0) return true;
    // Megatron-LM saves a factor even if scaling is off.
    bool scaled = !is_neutral(pickle_member(args, "use_rope_scaling"));
    return add_flags(a, args, OF_ROTATIONS, COUNT_OF(OF_ROTATIONS), path, err) &&
           (!scaled || add_flags(a, args, OF_SCALING, COUNT_OF(OF_SCALING), path, err));
}

static bool read_flags(MegatronArgs *a, const PickleValue *args, const char *path, Error *err) {
    bool groups = !is_neutral(pickle_member(args, "group_query_attention"));
    if (is_false(pickle_member(args, "add_bias_linear"))) {
        model_flags_add(&a->flags, "disable_bias_linear", NULL);
        if (!is_neutral(pickle_member(args, "add_qkv_bias")))
            model_flags_add(&a->flags, "add_qkv_bias", NULL);
    }
    return add_flags(a, args, ALWAYS, COUNT_OF(ALWAYS), path, err) && add_positions(a, args, path, err) &&
           (!groups || add_flags(a, args, OF_GROUPS, COUNT_OF(OF_GROUPS), path, err));
}

// Since version 2, the queries, keys and values of a head are contiguous, as in this program.
static bool check_version(const PickleValue *saved, const char *path, Error *err) {
    const PickleValue *version = pickle_member(saved, "checkpoint_version");
    int64_t whole;
    bool real = version && version->kind == PICKLE_REAL;
    if (real ? version->real >= 2 : pickle_int(version, 2, 1000, &whole)) return true;
    return refuse(path, "its checkpoint_version is not 2 or 3:",
                  "rows of queries, keys and values are in a different order", err);
}

static bool read_number(const PickleValue *args, const char *name, int64_t most, int64_t absent, int64_t *out,
                        const char *path, Error *err) {
    const PickleValue *value = pickle_member(args, name);
    *out = absent;
    if (absent >= 0 && (!value || value->kind == PICKLE_NONE)) return true;
    return pickle_int(value, 1, most, out) || refuse(path, "its arguments have no valid", name, err);
}

static char *copy_text(const PickleValue *args, const char *name) {
    const char *text = pickle_text(pickle_member(args, name));
    return text ? xstrdup(text) : NULL;
}

static bool read_args(MegatronArgs *a, const PickleValue *args, bool by_rank, const char *path, Error *err) {
    MegatronRanks *r = &a->ranks;
    a->tokenizer_type = copy_text(args, "tokenizer_type");
    a->vocab_file = copy_text(args, "vocab_file");
    a->merge_file = copy_text(args, "merge_file");
    a->tokenizer_model = copy_text(args, "tokenizer_model");
    return check_computed(args, by_rank, path, err) && read_flags(a, args, path, err) &&
           read_number(args, "padded_vocab_size", 1 << 30, -1, &a->rows, path, err) &&
           read_number(args, "vocab_size", 1 << 30, 0, &a->vocab_size, path, err) &&
           read_number(args, "make_vocab_size_divisible_by", 1 << 20, 1, &a->divisible, path, err) &&
           read_number(args, "tensor_model_parallel_size", 4096, 1, &r->tensor, path, err) &&
           read_number(args, "pipeline_model_parallel_size", 4096, 1, &r->stages, path, err) &&
           read_number(args, "virtual_pipeline_model_parallel_size", 4096, 1, &r->chunks, path, err);
}

bool megatron_args_read(MegatronArgs *a, const PickleValue *saved, bool by_rank, const char *path,
                        Error *err) {
    const PickleValue *args = pickle_member(saved, "args");
    *a = (MegatronArgs){0};
    bool ok = args || ckpt_error(err,
                                 "%s has no 'args' like those saved by Megatron-LM, so the model is unknown; "
                                 "import a checkpoint saved by Megatron-LM's trainer",
                                 path);
    pickle_int(pickle_member(saved, "iteration"), 0, INT64_MAX, &a->iteration);
    ok = ok && check_version(saved, path, err) && read_args(a, args, by_rank, path, err);
    if (!ok) megatron_args_free(a);
    return ok;
}

void megatron_args_free(MegatronArgs *a) {
    model_flags_free(&a->flags);
    free(a->tokenizer_type);
    free(a->vocab_file);
    free(a->merge_file);
    free(a->tokenizer_model);
    *a = (MegatronArgs){0};
}
