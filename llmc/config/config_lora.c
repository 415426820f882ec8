// LoRA: the matrices with adapters, and the checkpoints of the frozen model and of the adapters.
#include <string.h>

#include "llmc/config/config_roles.h"

// A name of --lora-targets: a module of Megatron-LM, of Megatron Core, or of PEFT's models.
// Queries, keys and values are one matrix here, and so are the gate and up projections of SwiGLU.
// Their PEFT names must therefore be given together.
typedef struct TargetName {
    const char *name;
    int target;
    int part, parts;  // bits: this part of the matrix, and all its parts; 0: the whole matrix
} TargetName;
static const TargetName target_names[] = {
    {"all-linear", LORA_ALL, 0, 0},
    {"query_key_value", LORA_QKV, 0, 0},
    {"dense", LORA_PROJ, 0, 0},
    {"dense_h_to_4h", LORA_FC1, 0, 0},
    {"dense_4h_to_h", LORA_FC2, 0, 0},
    {"linear_qkv", LORA_QKV, 0, 0},
    {"linear_proj", LORA_PROJ, 0, 0},
    {"linear_fc1", LORA_FC1, 0, 0},
    {"linear_fc2", LORA_FC2, 0, 0},
    {"q_proj", LORA_QKV, 1, 7},
    {"k_proj", LORA_QKV, 2, 7},
    {"v_proj", LORA_QKV, 4, 7},
    {"o_proj", LORA_PROJ, 0, 0},
    {"gate_proj", LORA_FC1, 8, 24},
    {"up_proj", LORA_FC1, 16, 24},
    {"down_proj", LORA_FC2, 0, 0},
    {"c_attn", LORA_QKV, 0, 0},
    {"c_fc", LORA_FC1, 0, 0},
    {"c_proj", LORA_PROJ | LORA_FC2, 0, 0},
};
enum { TARGET_NAMES = sizeof target_names / sizeof target_names[0] };

static const TargetName *find_target(const char *name, size_t length) {
    for (int i = 0; i < TARGET_NAMES; i++) {
        const char *known = target_names[i].name;
        if (strlen(known) == length && strncmp(known, name, length) == 0) return &target_names[i];
    }
    return NULL;
}

bool config_lora_targets(const Config *config, int *targets, Error *err) {
    int parts = 0, wanted = 0;
    *targets = 0;
    for (const char *at = config->lora_targets; *at;) {
        size_t length = strcspn(at, ",");
        const TargetName *t = find_target(at, length);
        if (!t) {
            return usage_error(err,
                               "--lora-targets has the unknown name '%.*s'; use all-linear, or "
                               "query_key_value, dense, dense_h_to_4h, dense_4h_to_h",
                               (int)(length < 60 ? length : 60), at);
        }
        *targets |= t->target;
        parts |= t->part;
        wanted |= t->parts;
        at += length + (at[length] == ',');
    }
    for (int i = 0; i < TARGET_NAMES; i++) {
        if (!(target_names[i].part & wanted & ~parts)) continue;
        return usage_error(
            err,
            "--lora-targets %.200s lacks %s, which belongs to the same matrix; add it: q_proj, "
            "k_proj and v_proj share an adapter, and so do gate_proj and up_proj",
            config->lora_targets, target_names[i].name);
    }
    return *targets || usage_error(err, "--lora-targets names no matrix; use all-linear");
}

LoraWidths config_lora_widths(const Config *c) {
    double h = c->hidden_size, F = c->ffn_hidden_size, a = (double)c->kv_channels * c->num_attention_heads;
    double keys = (double)c->kv_channels * config_query_groups(c);
    // Bit i of the targets is linear i.
    const LoraWidths linear[] = {{h, a + 2 * keys}, {a, h}, {h, c->swiglu ? 2 * F : F}, {F, h}};
    LoraWidths sum = {0, 0};
    int targets;
    Error err;
    if (!c->lora_rank || !config_lora_targets(c, &targets, &err)) return sum;
    for (int i = 0; i < (int)(sizeof linear / sizeof linear[0]); i++) {
        if (!(targets >> i & 1)) continue;
        sum.inputs += linear[i].inputs;
        sum.outputs += linear[i].outputs;
    }
    return sum;
}

double config_lora_parameters(const Config *config) {
    LoraWidths layer = config_lora_widths(config);
    return (double)config->num_layers * config->lora_rank * (layer.inputs + layer.outputs);
}

const char *config_lora_base(const Config *config) {
    if (config->pretrained_checkpoint) return config->pretrained_checkpoint;
    return config->finetune ? config->load : NULL;
}

int64_t config_lora_base_step(const Config *config, const char **flag) {
    *flag = config->pretrained_checkpoint ? "--pretrained-checkpoint-step" : "--ckpt-step";
    return config->pretrained_checkpoint ? config->pretrained_checkpoint_step : config->ckpt_step;
}

const char *config_lora_adapters(const Config *config) {
    return config->pretrained_checkpoint || !config->finetune ? config->load : NULL;
}

bool config_check_lora(const Config *config, Error *err) {
    int targets;
    const char *why = NULL;
    if (!config->lora_rank) return true;
    if (config->optimizer == OPTIMIZER_MUON)
        why = "--optimizer muon orthogonalizes whole weight matrices, which LoRA freezes; use adam";
    else if (config->tensor_model_parallel_size > 1)
        why =
            "LoRA adapters are not split, so --tensor-model-parallel-size must be 1; use "
            "--pipeline-model-parallel-size";
    else if (config->fp8_format != FP8_FORMAT_NONE)
        why = "LoRA adds the adapters in bf16, so --fp8-format is not supported; drop it";
    else if (config->replica_group)
        why =
            "elastic replica groups exchange whole models, so --replica-group excludes --lora-rank; drop one";
    if (why) return usage_error(err, "%s", why);
    if (config->lora_rank > config->hidden_size) {
        return usage_error(err, "--lora-rank %d exceeds --hidden-size %d, so it is not low-rank; use 8 to %d",
                           config->lora_rank, config->hidden_size, config->hidden_size / 8 * 8);
    }
    return config_lora_targets(config, &targets, err);
}
