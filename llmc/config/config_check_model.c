// Checks of the model's shape, and of tensor and pipeline parallelism: see config_checks.h.
#include "llmc/config/config_checks.h"

// Requires that `by` divides a value. The names are flags or descriptions.
static bool divides(const Parsed *p, const char *by_name, int64_t by, const char *name, int64_t value) {
    return value % by == 0 || REFUSE("%s %lld is not divisible by %s %lld; change one of them", name,
                                     (long long)value, by_name, (long long)by);
}

static int ffn_width(const Config *c) {
    return c->ffn_hidden_size ? c->ffn_hidden_size : config_default_ffn(c);
}

static void note_idle_yarn(const Parsed *p) {
    static const size_t fields[] = {offsetof(Config, rotary_scaling_factor),
                                    offsetof(Config, yarn_original_max_position_embeddings),
                                    offsetof(Config, yarn_beta_fast),
                                    offsetof(Config, yarn_beta_slow),
                                    offsetof(Config, no_yarn_correction_range_round_to_int),
                                    offsetof(Config, yarn_attention_factor)};
    int rows;
    for (size_t i = 0; i < COUNT_OF(fields) && p->config->position_embedding_type != POSITIONS_YARN; i++) {
        int row = config_row_of(fields[i]);
        if (p->given[row])
            NOTE("--%s has no effect without --position-embedding-type yarn",
                 config_options(&rows)[row].name);
    }
}

// The scalings of rotary positions exclude each other.
static bool check_rope_scaling(const Parsed *p) {
    const Config *c = p->config;
    bool yarn = c->position_embedding_type == POSITIONS_YARN,
         rope = c->position_embedding_type == POSITIONS_ROPE;
    bool linear = (rope || yarn) && c->rotary_seq_len_interpolation_factor > 1;
    const char *other = yarn ? "--position-embedding-type yarn" : "--rotary-seq-len-interpolation-factor";
    if (c->use_rope_scaling && (yarn || (rope && linear)))
        return REFUSE("--use-rope-scaling and %s both scale the rotation frequencies; use one of them",
                      other);
    if (yarn && linear)
        return REFUSE(
            "--rotary-seq-len-interpolation-factor and %s both scale the rotation frequencies; use "
            "one of them",
            other);
    if (yarn && c->yarn_beta_slow > c->yarn_beta_fast)
        return REFUSE("--yarn-beta-slow %g is larger than --yarn-beta-fast %g; lower it", c->yarn_beta_slow,
                      c->yarn_beta_fast);
    if (yarn && c->rotary_base <= 1)
        return REFUSE("--position-embedding-type yarn needs a --rotary-base above 1, not %g", c->rotary_base);
    note_idle_yarn(p);
    return true;
}

static bool check_positions(const Parsed *p, int head) {
    const Config *c = p->config;
    bool rope = c->position_embedding_type != POSITIONS_LEARNED;
    int columns = (int)(head * c->rotary_percent);
    if (rope && (columns < 2 || columns % 2)) {
        return REFUSE(
            "--rotary-percent %g rotates %d of the %d columns of a head; choose a value that rotates an even "
            "number of at least 2",
            c->rotary_percent, columns, head);
    }
    if (c->seq_length > c->max_position_embeddings) {
        return REFUSE(
            "--seq-length %d is larger than --max-position-embeddings %d; raise --max-position-embeddings",
            c->seq_length, c->max_position_embeddings);
    }
    if (c->add_qkv_bias && !c->disable_bias_linear)
        NOTE("--add-qkv-bias has no effect without --disable-bias-linear");
    if (c->window_attn_skip_freq && !c->window_size)
        NOTE("--window-attn-skip-freq has no effect without --window-size");
    if (!config_check_window(c, p->err)) return false;
    return check_rope_scaling(p);
}

// The same limit as for ffn-hidden-size, so that the width of Q, K and V together fits an int.
enum { MOST_ATTENTION_WIDTH = 1 << 22 };

bool config_check_model(const Parsed *p) {
    const Config *c = p->config;
    if (!c->kv_channels && c->hidden_size % c->num_attention_heads) {
        return REFUSE(
            "--hidden-size %d is not divisible by --num-attention-heads %d; change one of them, or set "
            "--kv-channels",
            c->hidden_size, c->num_attention_heads);
    }
    int head = c->kv_channels ? c->kv_channels : c->hidden_size / c->num_attention_heads;
    if (c->kv_channels % 8) {
        return REFUSE("--kv-channels %d must be a multiple of 8", c->kv_channels);
    }
    if (head % 8) {
        return REFUSE(
            "--hidden-size %d / --num-attention-heads %d gives heads of size %d, which must be a multiple of "
            "8; change one of them",
            c->hidden_size, c->num_attention_heads, head);
    }
    if ((int64_t)c->num_attention_heads * head > MOST_ATTENTION_WIDTH) {
        return REFUSE(
            "--num-attention-heads %d with heads of size %d is too wide; all heads together may have at most "
            "%d columns",
            c->num_attention_heads, head, MOST_ATTENTION_WIDTH);
    }
    if (!divides(p, "--num-query-groups", config_query_groups(c), "--num-attention-heads",
                 c->num_attention_heads))
        return false;
    if (c->ffn_hidden_size % 8) {
        return REFUSE("--ffn-hidden-size %d must be a multiple of 8", c->ffn_hidden_size);
    }
    if (ffn_width(c) == 0) {
        return REFUSE("--swiglu gives an MLP of width 0 for --hidden-size %d; add --ffn-hidden-size",
                      c->hidden_size);
    }
    return check_positions(p, head);
}

bool config_check_tensor_parallel(const Parsed *p) {
    const Config *c = p->config;
    int T = c->tensor_model_parallel_size;
    int64_t tokens = (int64_t)c->micro_batch_size * c->seq_length;
    const char *by = "--tensor-model-parallel-size";
    if (!divides(p, by, T, "--num-attention-heads", c->num_attention_heads) ||
        !divides(p, by, T, "--num-query-groups", config_query_groups(c)))
        return false;
    if (ffn_width(c) % (8 * T)) {
        return REFUSE(
            "--ffn-hidden-size %d is not a multiple of 8 x --tensor-model-parallel-size %d; change "
            "one of them",
            ffn_width(c), T);
    }
    if (T > 1 && c->swiglu && !c->disable_bias_linear) {
        return REFUSE("--swiglu with --tensor-model-parallel-size %d needs --disable-bias-linear; add it", T);
    }
    if (c->sequence_parallel && !divides(p, by, T, "--sequence-parallel: --seq-length", c->seq_length))
        return false;
    if (tokens % T == 0) return true;
    return REFUSE(
        "--micro-batch-size %d x --seq-length %d = %lld tokens is not divisible by "
        "--tensor-model-parallel-size %d; change one of them",
        c->micro_batch_size, c->seq_length, (long long)tokens, T);
}

bool config_check_pipeline(const Parsed *p) {
    const Config *c = p->config;
    int P = c->pipeline_model_parallel_size, chunk = c->num_layers_per_virtual_pipeline_stage;
    if (!divides(p, "--pipeline-model-parallel-size", P, "--num-layers", c->num_layers)) return false;
    if (chunk == 0) return true;
    if (P == 1) {
        return REFUSE(
            "--num-layers-per-virtual-pipeline-stage %d needs --pipeline-model-parallel-size 2 or more; add "
            "it",
            chunk);
    }
    if (c->num_layers / P % chunk == 0) return true;
    return REFUSE(
        "the %d layers of a pipeline stage are not divisible by --num-layers-per-virtual-pipeline-stage %d; "
        "change one of them",
        c->num_layers / P, chunk);
}
