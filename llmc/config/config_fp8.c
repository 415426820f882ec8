// Which layers run in FP8, and what FP8 products require: see config.h and llmc/ops_fp8.h.
#include <assert.h>

#include "llmc/config/config_roles.h"
#include "llmc/ops_fp8.h"

bool config_fp8_on(const Config *config) { return config->fp8_format != FP8_FORMAT_NONE; }

static int bf16_at_start(const Config *c) {
    return c->first_last_layers_bf16 ? c->num_layers_at_start_in_bf16 : 0;
}

static int bf16_at_end(const Config *c) {
    return c->first_last_layers_bf16 ? c->num_layers_at_end_in_bf16 : 0;
}

bool config_layer_in_fp8(const Config *config, int layer) {
    assert(layer >= 0 && layer < config->num_layers);
    return config_fp8_on(config) && layer >= bf16_at_start(config) &&
           layer < config->num_layers - bf16_at_end(config);
}

int config_fp8_layers(const Config *config) {
    int layers = 0;
    for (int l = 0; l < config->num_layers; l++) layers += config_layer_in_fp8(config, l);
    return layers;
}

static bool check_layers(const Config *c, Error *err) {
    if (!c->first_last_layers_bf16) return true;
    if (c->fp8_recipe == FP8_DELAYED) {
        return usage_error(err,
                           "--first-last-layers-bf16 cannot be combined with --fp8-recipe delayed; use "
                           "--fp8-recipe tensorwise or blockwise, or drop --first-last-layers-bf16");
    }
    if (config_fp8_layers(c) > 0) return true;
    return usage_error(err,
                       "--num-layers-at-start-in-bf16 %d and --num-layers-at-end-in-bf16 %d leave none of "
                       "the %d layers in FP8; lower them, or drop --first-last-layers-bf16",
                       c->num_layers_at_start_in_bf16, c->num_layers_at_end_in_bf16, c->num_layers);
}

// Checks the sizes of one rank's matrices. Each is a dimension over which some product sums, or the
// row length of an operand.
static bool check_sizes(const Config *c, Error *err) {
    int unit = c->fp8_recipe == FP8_BLOCKWISE ? FP8_BLOCK : FP8_MULTIPLE, T = c->tensor_model_parallel_size;
    int64_t head = c->kv_channels ? c->kv_channels : c->hidden_size / c->num_attention_heads;
    int64_t queries = c->num_attention_heads * head / T, keys = config_query_groups(c) * head / T;
    int64_t mlp = c->ffn_hidden_size ? c->ffn_hidden_size : config_default_ffn(c);
    // With sequence parallelism, each rank quantizes its rows and gathers the codes. Blocks span
    // the rows of several ranks, so they are quantized after a gather in bf16.
    int parts = c->sequence_parallel && c->fp8_recipe != FP8_BLOCKWISE ? T : 1;
    int64_t tokens = (int64_t)c->micro_batch_size * c->seq_length / parts;
    const struct {
        const char *what, *flags;
        int64_t size;
    } sizes[] = {
        {parts > 1 ? "the number of tokens of a micro-batch per rank"
                   : "the number of tokens of a micro-batch",
         "--micro-batch-size or --seq-length", tokens},
        {"the hidden size", "--hidden-size", c->hidden_size},
        {"the width of the attention per rank", "--kv-channels or --num-attention-heads", queries},
        {"the width of Q, K and V per rank", "--kv-channels or --num-query-groups", queries + 2 * keys},
        {"the width of the MLP per rank", "--ffn-hidden-size", mlp / T},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        if (sizes[i].size % unit == 0) continue;
        return usage_error(err,
                           "--fp8-format with --fp8-recipe %s needs multiples of %d, but %s is %lld; "
                           "change %s, or drop --fp8-format",
                           unit == FP8_BLOCK                 ? "blockwise"
                           : c->fp8_recipe == FP8_TENSORWISE ? "tensorwise"
                                                             : "delayed",
                           unit, sizes[i].what, (long long)sizes[i].size, sizes[i].flags);
    }
    return true;
}

bool config_check_fp8(const Config *config, Error *err) {
    if (!config_fp8_on(config)) return true;
    if (sizeof(floatX) != sizeof(uint16_t)) {
        return usage_error(
            err, "--fp8-format needs bf16 weights, but this program was built with %s; drop --fp8-format",
            FLOATX_NAME);
    }
    return check_layers(config, err) && check_sizes(config, err);
}
