// Completes a Config once the number of ranks and the vocabulary are known: see config.h. Called by
// every rank of train_gpt.c after MPI has started.
#include "llmc/config/config.h"

#include <assert.h>
#include <stdlib.h>

TokenizerChoice config_tokenizer(const Config *c) {
    return (TokenizerChoice){.type = c->tokenizer_type,
                             .vocab_file = c->vocab_file,
                             .merge_file = c->merge_file,
                             .model = c->tokenizer_model,
                             .eod_token = c->tokenizer_eod,
                             .null_vocab_size = c->vocab_size};
}

static bool finish_vocabulary(Config *c, int vocab_size, int eod, Error *err) {
    if (vocab_size == 0) {
        vocab_size = c->tokenizer_type == TOKENIZER_NULL   ? (int)c->vocab_size + 1
                     : c->tokenizer_type == TOKENIZER_BYTE ? 257
                                                           : 50257;
        eod = vocab_size - 1;
    }
    int64_t padded = round_up64(vocab_size,
                                (int64_t)c->make_vocab_size_divisible_by * c->tensor_model_parallel_size);
    if (padded > INT32_MAX) {
        return usage_error(
            err,
            "the vocabulary of %d padded by --make-vocab-size-divisible-by %d is too large; lower that flag",
            vocab_size, c->make_vocab_size_divisible_by);
    }
    c->vocab_size_unpadded = vocab_size;
    c->vocab_size_padded = (int)padded;
    c->eod = eod;
    return true;
}

bool config_loads_optimizer(const Config *c) { return !c->finetune && !c->no_load_optim && !c->skip_train; }

bool config_scores(const Config *c) { return c->eval_tasks.count || c->eval_text.count; }

int config_pipeline_chunks(const Config *c) {
    int chunk = c->num_layers_per_virtual_pipeline_stage;
    return chunk ? c->num_layers / c->pipeline_model_parallel_size / chunk : 1;
}

// Returns the number of sequences that batch sizes must be a multiple of. With interleaved
// pipelining, stages process micro-batches in groups of P.
static int64_t batch_unit(const Config *c) {
    int group = config_pipeline_chunks(c) > 1 ? c->pipeline_model_parallel_size : 1;
    return (int64_t)c->micro_batch_size * c->dp_size * group;
}

static bool whole_groups(const Config *c, Error *err) {
    int P = c->pipeline_model_parallel_size;
    if (config_pipeline_chunks(c) == 1 || c->micro_batches % P == 0) return true;
    return usage_error(err,
                       "%d micro-batches per step are not divisible by --pipeline-model-parallel-size %d, "
                       "which --num-layers-per-virtual-pipeline-stage requires; choose a --global-batch-size "
                       "that is a multiple of %lld",
                       c->micro_batches, P, (long long)batch_unit(c));
}

static bool finish_batch(Config *c, Error *err) {
    int64_t unit = (int64_t)c->micro_batch_size * c->dp_size;
    if (batch_unit(c) > 1 << 30) {
        return usage_error(
            err, "--micro-batch-size %d x %d ranks is more than 2^30 sequences; lower --micro-batch-size",
            c->micro_batch_size, c->dp_size);
    }
    if (!c->global_batch_size) c->global_batch_size = (int)batch_unit(c);
    if (c->global_batch_size % unit) {
        return usage_error(err,
                           "--global-batch-size %d is not divisible by --micro-batch-size %d x data-parallel "
                           "size %d = %lld; choose a multiple of %lld or a different number of ranks",
                           c->global_batch_size, c->micro_batch_size, c->dp_size, (long long)unit,
                           (long long)unit);
    }
    c->micro_batches = (int)(c->global_batch_size / unit);
    return whole_groups(c, err);
}

static bool parse_count(const char *word, int64_t low, int64_t *value) {
    char *end;
    if (word[0] < '0' || word[0] > '9') return false;
    *value = strtoll(word, &end, 10);
    return !*end && *value >= low && *value <= 1000000000000000;
}

static bool finish_rampup(Config *c, Error *err) {
    c->rampup_start = c->rampup_increment = c->rampup_samples = 0;
    if (!c->rampup_batch_size.count) return true;
    const char *const *words = c->rampup_batch_size.items;
    int64_t start, increment, samples, unit = batch_unit(c);
    if (!parse_count(words[0], 1, &start) || !parse_count(words[1], 1, &increment) ||
        !parse_count(words[2], 0, &samples)) {
        return usage_error(err,
                           "--rampup-batch-size %s %s %s: use three integers, START and INCREMENT at least 1",
                           words[0], words[1], words[2]);
    }
    if (start > c->global_batch_size || (c->global_batch_size - start) % increment) {
        return usage_error(err,
                           "--rampup-batch-size: %lld does not reach --global-batch-size %d in steps of "
                           "%lld; choose an increment that divides the difference",
                           (long long)start, c->global_batch_size, (long long)increment);
    }
    if (start % unit || (start < c->global_batch_size && increment % unit)) {
        return usage_error(err,
                           "--rampup-batch-size start %lld and increment %lld must be multiples of %lld, the "
                           "smallest batch of a step",
                           (long long)start, (long long)increment, (long long)unit);
    }
    if (samples > c->train_samples) {
        return usage_error(
            err,
            "--rampup-batch-size lasts %lld samples, longer than --train-samples %lld; shorten the ramp-up",
            (long long)samples, (long long)c->train_samples);
    }
    c->rampup_start = start;
    c->rampup_increment = increment;
    c->rampup_samples = samples;
    return true;
}

// Returns the number of ramp-up increments made after n samples. *steps: their total.
static int64_t rampup_step(const Config *c, int64_t n, int64_t *steps) {
    *steps = (c->global_batch_size - c->rampup_start) / c->rampup_increment;
    if (n > c->rampup_samples || *steps == 0 || c->rampup_samples == 0) return *steps;
    int64_t step = (int64_t)((double)n / ((double)c->rampup_samples / (double)*steps));
    return step < *steps ? step : *steps;
}

int config_global_batch_size(const Config *config, int64_t consumed_samples) {
    assert(consumed_samples >= 0);
    if (!config->rampup_start) return config->global_batch_size;
    int64_t steps;
    return (int)(config->rampup_start +
                 config->rampup_increment * rampup_step(config, consumed_samples, &steps));
}

static bool in_rampup(const Config *c, int64_t consumed) {
    return c->rampup_start && consumed <= c->rampup_samples;
}

// Advances by up to `most` iterations of the ramp-up: all iterations of one increment at once, but
// the last few one by one, since the floating-point rounding of rampup_step decides where an
// increment ends.
static void rampup_on(const Config *c, int64_t most, int64_t *consumed, int64_t *iterations) {
    int64_t steps, step = rampup_step(c, *consumed, &steps), batch = config_global_batch_size(c, *consumed);
    double boundary = step < steps ? (double)(step + 1) * ((double)c->rampup_samples / (double)steps)
                                   : (double)c->rampup_samples;
    int64_t at_once = ((int64_t)boundary - 2 - *consumed) / batch;
    if (at_once < 1) at_once = 1;
    if (at_once > most) at_once = most;
    *consumed += at_once * batch;
    *iterations += at_once;
}

// Returns the iterations left of --train-samples after `consumed` samples. As in Megatron,
// iterations of the ramp-up are counted one by one, then whole global batches.
static int64_t iterations_of_samples(const Config *c, int64_t consumed) {
    int64_t iterations = 0;
    while (in_rampup(c, consumed)) rampup_on(c, INT64_MAX, &consumed, &iterations);
    int64_t left = c->train_samples - consumed;
    return iterations + (left > 0 ? left / c->global_batch_size : 0);
}

void config_resume_length(Config *config, int64_t iteration, int64_t consumed_samples, char *notes,
                          size_t notes_bytes) {
    assert(config && iteration >= 0 && consumed_samples >= 0);
    if (!config->train_samples) return;
    int64_t end = iteration + iterations_of_samples(config, consumed_samples);
    if (end != config->train_iters) {
        options_note(notes, notes_bytes,
                     "the checkpoint consumed %lld of --train-samples %lld in %lld iterations with other "
                     "batch sizes, so training ends at iteration %lld",
                     (long long)consumed_samples, (long long)config->train_samples, (long long)iteration,
                     (long long)end);
    }
    config->train_iters = end;
}

int64_t config_samples_at_end(const Config *config, int64_t iteration, int64_t consumed_samples) {
    assert(config && iteration >= 0 && consumed_samples >= 0);
    while (in_rampup(config, consumed_samples) && iteration < config->train_iters) {
        rampup_on(config, config->train_iters - iteration, &consumed_samples, &iteration);
    }
    int64_t left = config->train_iters > iteration ? config->train_iters - iteration : 0;
    return consumed_samples + left * config->global_batch_size;
}

static bool finish_length(Config *c, Error *err) {
    if (c->train_samples) {
        c->train_iters = iterations_of_samples(c, 0);
        if (c->train_iters < 1) {
            return usage_error(err, "--train-samples %lld is less than --global-batch-size %d; raise it",
                               (long long)c->train_samples, c->global_batch_size);
        }
        c->total_samples = c->train_samples;
    } else if (__builtin_mul_overflow(c->train_iters, (int64_t)c->global_batch_size, &c->total_samples)) {
        return usage_error(err,
                           "--train-iters %lld x --global-batch-size %d is too large; lower --train-iters",
                           (long long)c->train_iters, c->global_batch_size);
    }
    int64_t evaluations = c->train_iters / c->eval_interval + 1, samples;
    if (__builtin_mul_overflow(evaluations, c->eval_iters, &samples) ||
        __builtin_mul_overflow(samples, (int64_t)c->global_batch_size, &samples)) {
        return usage_error(
            err, "--eval-iters %lld every --eval-interval %lld needs too many samples; lower --eval-iters",
            (long long)c->eval_iters, (long long)c->eval_interval);
    }
    return true;
}

// Converts the schedule to samples, as Megatron's scheduler does.
static bool finish_schedule(Config *c, Error *err) {
    if (c->weight_decay_incr_style == WEIGHT_DECAY_CONSTANT) {
        c->start_weight_decay = c->end_weight_decay = c->weight_decay;
    }
    c->weight_decay_samples = c->total_samples;
    if (!c->total_samples) return true;  // --plan without a length
    int64_t warmup;
    if (c->train_samples) {
        if (!c->lr_decay_samples) c->lr_decay_samples = c->train_samples;
        c->decay_samples_dn = c->lr_decay_samples;
        c->wsd_samples = c->lr_wsd_decay_samples;
        warmup = c->lr_warmup_samples;
    } else {
        if (!c->lr_decay_iters) c->lr_decay_iters = c->train_iters;
        int64_t batch = c->global_batch_size;
        if (__builtin_mul_overflow(c->lr_decay_iters, batch, &c->decay_samples_dn) ||
            __builtin_mul_overflow(c->lr_wsd_decay_iters, batch, &c->wsd_samples) ||
            __builtin_mul_overflow(c->lr_warmup_iters, batch, &warmup)) {
            return usage_error(err,
                               "--lr-decay-iters, --lr-wsd-decay-iters or --lr-warmup-iters x "
                               "--global-batch-size %d is too large; lower it",
                               c->global_batch_size);
        }
    }
    c->warmup_samples_wn = c->lr_warmup_fraction > 0 ? c->lr_warmup_fraction * (double)c->decay_samples_dn
                                                     : (double)warmup;
    if (c->skip_train) return true;  // no schedule is used
    // Lengths in messages have the unit of the flags.
    const char *unit = c->train_samples ? "samples" : "iterations";
    double samples_per_unit = c->train_samples ? 1 : c->global_batch_size;
    double decay = (double)c->decay_samples_dn / samples_per_unit;
    if (c->lr_decay_style == LR_WSD && c->wsd_samples > c->decay_samples_dn) {
        return usage_error(err,
                           "--lr-wsd-decay-* lasts %.10g %s, longer than the whole decay of %.10g; "
                           "shorten it or lengthen --lr-decay-*",
                           (double)c->wsd_samples / samples_per_unit, unit, decay);
    }
    if (c->warmup_samples_wn >= (double)c->decay_samples_dn) {
        return usage_error(err,
                           "the warm-up of %.10g %s is not shorter than the decay of %.10g; "
                           "shorten --lr-warmup-* or lengthen --lr-decay-*",
                           c->warmup_samples_wn / samples_per_unit, unit, decay);
    }
    return true;
}

// Refuses models that no machine could hold, so that the memory plan can count bytes in 64 bits.
// Estimates an upper bound in floating point.
static bool finish_sizes(const Config *c, Error *err) {
    const double most = 0x1p60, C = c->hidden_size, F = c->ffn_hidden_size, L = c->num_layers,
                 V = c->vocab_size_padded, T = c->seq_length, heads = c->num_attention_heads,
                 A = heads * c->kv_channels;
    double tokens = (double)c->micro_batch_size * T;
    double layer = 4 * C * A + 3 * C * F + 6 * C + 3 * A + 2 * F;
    double parameters = (2 * V + c->max_position_embeddings) * C + L * layer;
    double activations = tokens * (L + 2) * (12 * C + 4 * A + 6 * F) + tokens * (V + heads * T);
    if (16 * parameters < most && 4 * activations < most) return true;
    return usage_error(err,
                       "a model of %.3g parameters on micro-batches of %.3g tokens is too large to plan; "
                       "lower --hidden-size, --num-layers, --seq-length or --micro-batch-size",
                       parameters, tokens);
}

// Megatron-LM's default. With SwiGLU's third matrix, the MLP keeps about the same number of
// parameters.
int config_default_ffn(const Config *c) {
    return c->swiglu ? (int)(4.0 * c->hidden_size * 2 / 3 / 64) * 64 : 4 * c->hidden_size;
}

int config_query_groups(const Config *c) {
    return c->group_query_attention ? c->num_query_groups : c->num_attention_heads;
}

int config_rotary_columns(const Config *c) {
    if (c->position_embedding_type == POSITIONS_LEARNED) return 0;
    return (int)(c->kv_channels * c->rotary_percent);
}

bool config_finish(Config *config, int world_size, int vocab_size, int eod, Error *err) {
    assert(config && world_size > 0 && vocab_size >= 0);
    if (!finish_vocabulary(config, vocab_size, eod, err)) return false;
    if (config_only_checks_data(config)) return true;
    config->world_size = world_size;
    config->dp_size = world_size /
                      (config->tensor_model_parallel_size * config->pipeline_model_parallel_size);
    if (!config->ffn_hidden_size) config->ffn_hidden_size = config_default_ffn(config);
    if (!config->kv_channels) config->kv_channels = config->hidden_size / config->num_attention_heads;
    config->add_qkv_bias = config->add_qkv_bias && config->disable_bias_linear;
    config->sequence_parallel = config->sequence_parallel && config->tensor_model_parallel_size > 1;
    if (config->sft) config->calculate_per_token_loss = true;
    if (config->recompute_activations) config->recompute_granularity = RECOMPUTE_SELECTIVE;
    return finish_sizes(config, err) && finish_batch(config, err) && finish_rampup(config, err) &&
           finish_length(config, err) && finish_schedule(config, err);
}

double megatron_flops(const Config *config, double batch_sequences) {
    double L = config->num_layers, S = config->seq_length, h = config->hidden_size,
           F = config->ffn_hidden_size * (config->swiglu ? 1.5 : 1.0);  // SwiGLU has three matrices
    // Width of the attention; usually h.
    double a = (double)config->kv_channels * config->num_attention_heads;
    // Width of keys (or values) relative to queries.
    double shared = (double)config_query_groups(config) / config->num_attention_heads;
    double attention = (1 + shared + S / h) * a / h;  // projections, scores and score-value product
    double unit = 12 * batch_sequences * S * L * h * h, head = config->vocab_size_padded / (2 * L * h);
    double trained = unit * (attention + F / h + head);
    if (!config->lora_rank) return trained;
    double frozen = unit * ((1 + shared) * a / h + F / h + head);
    return trained - frozen / 3 + 6 * batch_sequences * S * config_lora_parameters(config);
}

double config_visible_keys(const Config *config) {
    double T = config->seq_length, sum = 0;
    for (int l = 0; l < config->num_layers; l++) {
        double window = config_window(config, l);
        sum += window > 0 && window < T ? window - window * window / (2 * T) : T / 2;
    }
    return sum;
}

double causal_flops(const Config *config, double batch_sequences, double trained, double frozen) {
    double T = config->seq_length, a = (double)config->kv_channels * config->num_attention_heads;
    // Untied word embeddings are looked up, not multiplied.
    if (config->untie_embeddings_and_output_weights) {
        *(config->lora_rank ? &frozen : &trained) -= (double)config->vocab_size_padded * config->hidden_size;
    }
    return batch_sequences * T * (6 * trained + 4 * frozen + 12 * a * config_visible_keys(config));
}
