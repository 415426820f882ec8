// Checks that depend only on the flags, in the order of --help: see config_roles.h.
#include "llmc/config/config_checks.h"

#include <stdlib.h>
#include <string.h>

#include "sdp4bit/codec.h"

int config_row_of(size_t offset) {
    int rows;
    const Option *table = config_options(&rows);
    for (int i = 0; i < rows; i++) {
        if (table[i].name && table[i].offset == offset) return i;
    }
    fatal(NULL, EXIT_USAGE, "option table: no row stores offset %zu", offset);
}

// Adds a note for each given flag that has no effect because the condition in its row is not met.
static void note_idle(const Parsed *p) {
    const Config *c = p->config;
    bool rope = c->position_embedding_type != POSITIONS_LEARNED, sharded = c->sharding == SHARD_PARAMETERS;
    const struct {
        int need;
        bool met;
        const char *what;
    } conditions[] = {
        {NEEDS_ROPE, rope, "--position-embedding-type rope or yarn"},
        {NEEDS_ROPE_SCALING, c->use_rope_scaling, "--use-rope-scaling"},
        {NEEDS_LEARNED_POSITIONS, !rope, "learned positions"},
        {NEEDS_QUERY_GROUPS, c->group_query_attention, "--group-query-attention"},
        {NEEDS_TENSOR_RANKS, c->tensor_model_parallel_size > 1, "--tensor-model-parallel-size above 1"},
        {NEEDS_SHARDED_WEIGHTS, sharded, "--data-parallel-sharding-strategy optim_grads_params"},
        {NEEDS_WORLD_SHARDS, sharded && c->shard_scope == SHARD_IN_WORLD, "--shard-params-over world"},
        {NEEDS_WSD, c->lr_decay_style == LR_WSD, "--lr-decay-style WSD"},
        {NEEDS_QUANTIZED_GRADIENTS, c->quantized_gradients, "--quantized-gradients"},
        {NEEDS_QUANTIZED_WEIGHTS, c->quantized_weights, "--quantized-weights"},
        {NEEDS_WEIGHT_CODEC, c->weight_quantization_method != WEIGHT_LOSSLESS,
         "--weight-quantization-method difference or direct"},
        {NEEDS_SAVE, c->save != NULL, "--save"},
        {NEEDS_LOAD, c->load != NULL, "--load"},
        {NEEDS_PROMPT, c->sample_prompt != NULL, "--sample-prompt"},
        {NEEDS_TENSORBOARD, c->tensorboard_dir != NULL, "--tensorboard-dir"},
        {NEEDS_DELAYED_SCALES, c->fp8_recipe == FP8_DELAYED, "--fp8-recipe delayed"},
        {NEEDS_BF16_LAYERS, c->first_last_layers_bf16, "--first-last-layers-bf16"},
    };
    int rows;
    const Option *table = config_options(&rows);
    for (size_t i = 0; i < COUNT_OF(conditions); i++) {
        for (int row = 0; row < rows && !conditions[i].met; row++) {
            if (p->given[row] && table[row].roles & conditions[i].need)
                NOTE("--%s has no effect without %s", table[row].name, conditions[i].what);
        }
    }
}

static void add_missing(char *list, size_t bytes, bool missing, const char *name) {
    size_t used = strlen(list);
    if (missing) snprintf(list + used, bytes - used, "%s--%s", used ? ", " : "", name);
}

static bool check_required(const Parsed *p) {
    const Config *c = p->config;
    char list[512] = "";
    int rows;
    const Option *table = config_options(&rows);
    for (int i = 0; i < rows; i++)
        add_missing(list, sizeof list, table[i].roles & REQUIRED && !p->given[i], table[i].name);
    add_missing(list, sizeof list, !c->plan && c->inspect_data < 0 && !GIVEN(p, lr), "lr");
    add_missing(list, sizeof list, !c->plan && !GIVEN(p, train_iters) && !GIVEN(p, train_samples),
                "train-iters (or --train-samples)");
    if (!*list) return true;
    return REFUSE(
        "missing %s; add them, or a model config such as @configs/gpt_125m.args (--help lists all flags)",
        list);
}

// Weight differences are added to a full copy of the weights, which ZeRO-3 does not keep.
static const char *sharding_conflict(const Config *c) {
    bool world = c->sharding == SHARD_PARAMETERS && c->shard_scope == SHARD_IN_WORLD;
    if (world && c->quantized_weights && c->weight_quantization_method != WEIGHT_DIRECT) {
        return "--shard-params-over world keeps no full weights to add differences to; add "
               "--weight-quantization-method direct, or use --shard-params-over node";
    }
    if (c->sharding == SHARD_NOTHING && c->quantized_weights) {
        return "--quantized-weights has no effect with --data-parallel-sharding-strategy no_shard, whose "
               "ranks exchange only gradients; drop --quantized-weights, or use strategy optim";
    }
    return NULL;
}

// Megatron's rule: length and schedule are given either in iterations or in samples.
static bool check_length(const Parsed *p) {
    bool by_samples = GIVEN(p, train_samples);
    int rows, wrong = by_samples ? IN_ITERS : IN_SAMPLES;
    const Option *table = config_options(&rows);
    for (int i = 0; i < rows; i++) {
        if (!p->given[i] || !(table[i].roles & wrong)) continue;
        return REFUSE(
            "--%s cannot be combined with --train-%s; set length and schedule either in iterations or in "
            "samples",
            table[i].name, by_samples ? "samples" : "iters");
    }
    int count = p->config->rampup_batch_size.count;
    if (GIVEN(p, rampup_batch_size) && count != 3) {
        return REFUSE("--rampup-batch-size got %d values; use START INCREMENT SAMPLES", count);
    }
    return true;
}

// Flags that exclude or need each other, with the message.
typedef struct Rule {
    bool broken;
    const char *what;
} Rule;

static bool obeys(const Parsed *p, const Rule *rules, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (rules[i].broken) return REFUSE("%s", rules[i].what);
    }
    return true;
}

static bool check_rates(const Parsed *p) {
    const Config *c = p->config;
    if (GIVEN(p, lr) && c->min_lr > c->lr) {
        return REFUSE("--min-lr %g is larger than --lr %g; lower --min-lr or raise --lr", c->min_lr, c->lr);
    }
    if (GIVEN(p, lr) && c->lr_warmup_init > c->lr) {
        return REFUSE("--lr-warmup-init %g is larger than --lr %g; lower --lr-warmup-init", c->lr_warmup_init,
                      c->lr);
    }
    if (c->weight_decay_incr_style != WEIGHT_DECAY_CONSTANT && c->end_weight_decay < c->start_weight_decay) {
        return REFUSE(
            "--end-weight-decay %g is smaller than --start-weight-decay %g; weight decay can only increase, "
            "so raise --end-weight-decay",
            c->end_weight_decay, c->start_weight_decay);
    }
    return true;
}

static bool check_schedule(const Parsed *p) {
    const Config *c = p->config;
    bool wsd = c->lr_decay_style == LR_WSD, wsd_length = c->lr_wsd_decay_iters || c->lr_wsd_decay_samples;
    bool constant = c->weight_decay_incr_style == WEIGHT_DECAY_CONSTANT;
    bool start = GIVEN(p, start_weight_decay), end = GIVEN(p, end_weight_decay);
    const Rule rules[] = {
        {GIVEN(p, lr_warmup_fraction) && (c->lr_warmup_iters || c->lr_warmup_samples),
         "--lr-warmup-fraction and --lr-warmup-iters (or -samples) both set the warm-up; keep one"},
        {wsd && !wsd_length && !c->plan,
         "--lr-decay-style WSD needs --lr-wsd-decay-iters N (or --lr-wsd-decay-samples); add it"},
        {constant && (start || end),
         "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or cosine; add "
         "it"},
        {!constant && !(start && end),
         "--weight-decay-incr-style needs --start-weight-decay and --end-weight-decay; add them"},
        {c->override_opt_param_scheduler && c->use_checkpoint_opt_param_scheduler,
         "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler contradict each other; "
         "keep one"},
    };
    return obeys(p, rules, COUNT_OF(rules)) && check_rates(p);
}

static const char *local_steps_conflict(const Config *c) {
    if (c->local_steps == 1) return NULL;
    // An elastic replica group is a whole job, so it may span nodes.
    bool on_node = !c->replica_group;
    if (on_node && c->pipeline_model_parallel_size > 1) {
        return "--local-steps needs the whole model on every node; drop --pipeline-model-parallel-size";
    }
    if (c->optimizer_cpu_offload) {
        return "--local-steps needs the master weights on the device; drop --optimizer-cpu-offload";
    }
    if (c->optimizer_disk_offload) {
        return "--local-steps needs the master weights on the device; drop --optimizer-disk-offload";
    }
    if (on_node && c->sharding == SHARD_PARAMETERS && c->shard_scope == SHARD_IN_WORLD) {
        return "--local-steps needs the whole model on every node; drop --shard-params-over world";
    }
    if (on_node && config_fp8_on(c) && c->fp8_recipe == FP8_DELAYED) {
        return "--local-steps cannot be combined with --fp8-recipe delayed, whose scales all nodes share in "
               "every step; use --fp8-recipe tensorwise or blockwise";
    }
    if (c->sharding == SHARD_NOTHING) {
        return "--local-steps exchanges shards between nodes, but no_shard has none; drop "
               "--data-parallel-sharding-strategy no_shard";
    }
    return NULL;
}

const char *config_conflict(const Config *c) {
    const char *conflict = sharding_conflict(c);
    return conflict ? conflict : local_steps_conflict(c);
}

static bool check_local_steps(const Parsed *p) {
    const Config *c = p->config;
    const char *conflict = config_conflict(c);
    const Rule rules[] = {
        {c->local_steps == 1 && (GIVEN(p, outer_lr) || GIVEN(p, outer_momentum) ||
                                 GIVEN(p, local_steps_delay) || GIVEN(p, local_steps_mix)),
         "--outer-lr, --outer-momentum, --local-steps-delay and --local-steps-mix need --local-steps H "
         "with H at least 2; add it"},
        {c->local_steps > 1 && c->local_steps_delay >= c->local_steps,
         "--local-steps-delay must be less than --local-steps; lower --local-steps-delay"},
        {conflict, conflict},
    };
    return obeys(p, rules, COUNT_OF(rules));
}

// Returns true for names that messages and file names may contain.
static bool plain_group_name(const char *name) {
    size_t length = strlen(name);
    return length <= 32 && *name != '.' && *name != '-' &&
           strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.") == length;
}

static bool is_tcp_address(const char *url) {
    const char *port = strrchr(url, ':');
    size_t digits = strspn(port ? port + 1 : "", "0123456789");
    bool good = strncmp(url, "tcp://", 6) == 0 && port > url + 6 && digits > 0 && port[1 + digits] == '\0';
    long number = good ? strtol(port + 1, NULL, 10) : 0;
    return number >= 1 && number <= 65535;
}

static bool check_replica_group(const Parsed *p) {
    const Config *c = p->config;
    bool joins = c->replica_group != NULL;
    bool others = c->rendezvous || c->rendezvous_keys || c->rendezvous_listen || c->rendezvous_serve ||
                  GIVEN(p, min_replica_groups) || GIVEN(p, max_replica_groups) ||
                  GIVEN(p, sync_grace_seconds);
    const Rule rules[] = {
        {!joins && others,
         "--rendezvous, --rendezvous-keys, --rendezvous-listen, --rendezvous-serve, --min-replica-groups, "
         "--max-replica-groups and --sync-grace-seconds need --replica-group NAME; add it"},
        {joins && !plain_group_name(c->replica_group),
         "--replica-group must be 1 to 32 letters, digits, '-', '_' or '.', not beginning with '-' or '.'; "
         "choose another name"},
        {joins && c->local_steps == 1,
         "--replica-group needs --local-steps 2 or more, because groups exchange pseudo-gradients every so "
         "many steps; add --local-steps"},
        {joins && (!c->rendezvous || !c->rendezvous_keys) && !c->plan,
         "--replica-group needs --rendezvous tcp://host:port and --rendezvous-keys FOLDER; add them"},
        {joins && strcmp(c->replica_group, "server") == 0,
         "--replica-group server is the name of the rendezvous; choose another name"},
        {c->rendezvous && !is_tcp_address(c->rendezvous),
         "--rendezvous must be tcp://host:port with a port from 1 to 65535; correct it"},
        {c->rendezvous_listen && !is_tcp_address(c->rendezvous_listen),
         "--rendezvous-listen must be tcp://address:port with a port from 1 to 65535; correct it"},
        {joins && c->rampup_batch_size.count > 0,
         "--replica-group assigns samples in whole batches; drop --rampup-batch-size, which changes their "
         "size"},
        {joins && c->min_replica_groups > c->max_replica_groups,
         "--min-replica-groups must not exceed --max-replica-groups; raise --max-replica-groups"},
    };
    return obeys(p, rules, COUNT_OF(rules));
}

static bool check_data_sources(const Parsed *p) {
    const Config *c = p->config;
    bool one = c->data_path.count > 0;
    bool several = c->train_data_path.count + c->valid_data_path.count + c->test_data_path.count > 0;
    bool trains = !c->skip_train && !config_only_checks_data(c);
    if (c->mock_data && (one || several)) NOTE("--mock-data overrides the data paths, which are not read");
    const Rule rules[] = {
        {c->mock_data && c->full_validation,
         "--full-validation needs a validation split, which --mock-data lacks; drop one of them"},
        {!c->mock_data && one && several,
         "--data-path and shards given per split (--train-data-path, --valid-data-path, --test-data-path) "
         "exclude each other; keep one of them"},
        {!c->mock_data && several && GIVEN(p, split),
         "--split only applies to --data-path, but shards given per split are used in full; drop --split"},
        {!c->mock_data && several && !c->train_data_path.count && trains,
         "--valid-data-path and --test-data-path need --train-data-path; add it, or --skip-train"},
        {!c->mock_data && !one && !several && !c->plan && !(c->skip_train && config_scores(c)),
         "no training data; add --data-path PREFIX (shards made by preprocess_data) or --mock-data"},
    };
    return obeys(p, rules, COUNT_OF(rules));
}

static bool check_sft(const Parsed *p) {
    const Config *c = p->config;
    const Rule rules[] = {
        {c->sft && c->mock_data,
         "--sft needs loss masks, which --mock-data lacks; use shards of preprocess_data --chat"},
        {c->sft && (c->reset_position_ids || c->reset_attention_mask),
         "--sft already restarts positions and attention in each conversation; drop --reset-position-ids and "
         "--reset-attention-mask"},
        {c->sft && c->eod_mask_loss, "--sft reads the loss masks of the shards; drop --eod-mask-loss"},
    };
    return obeys(p, rules, COUNT_OF(rules));
}

static bool check_tokenizer(const Parsed *p) {
    const Config *c = p->config;
    bool null = c->tokenizer_type == TOKENIZER_NULL, bpe = c->tokenizer_type == TOKENIZER_GPT2_BPE;
    bool json = c->tokenizer_type == TOKENIZER_HUGGING_FACE;
    bool files = c->vocab_file && c->merge_file, some = c->vocab_file || c->merge_file;
    if (!null && c->vocab_size) NOTE("--vocab-size has no effect: only NullTokenizer uses it");
    if (!bpe && some) NOTE("--vocab-file and --merge-file have no effect: only GPT2BPETokenizer uses them");
    if (!json && c->tokenizer_model)
        NOTE("--tokenizer-model has no effect: only HuggingFaceTokenizer uses it");
    if (!json && !null && c->tokenizer_eod)
        NOTE("--tokenizer-eod has no effect: only HuggingFaceTokenizer and NullTokenizer use it");
    const Rule rules[] = {
        {json && !c->tokenizer_model,
         "--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model, a tokenizer.json or its "
         "folder; add it"},
        {null && !c->vocab_size, "--tokenizer-type NullTokenizer needs --vocab-size N; add it"},
        {bpe && c->vocab_file && !c->merge_file, "--vocab-file needs --merge-file; add it"},
        {bpe && c->merge_file && !c->vocab_file, "--merge-file needs --vocab-file; add it"},
        {bpe && !files && !c->plan && !c->mock_data,  // synthetic tokens need only GPT-2's vocabulary size
         "--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file; add them "
         "(dev/data/get_gpt2_vocab.sh downloads them), or use Byte or NullTokenizer if the data was made "
         "with it"},
    };
    return obeys(p, rules, COUNT_OF(rules));
}

// Checks bits and group sizes against the codec used between nodes.
static bool check_gradient_codec(const Parsed *p) {
    const Config *c = p->config;
    bool eden = c->gradient_quantization_method == GRADIENT_EDEN;
    const char *method = eden ? "eden" : "uniform", *bits = eden ? EDEN_BITS_CHOICES : CODEC_BITS_CHOICES;
    char inter[16];
    snprintf(inter, sizeof inter, "%d", c->gradient_quantization_bits_inter);
    if (options_choice(bits, inter) < 0) {
        return REFUSE("--gradient-quantization-method %s needs --gradient-quantization-bits-inter %s, not %s",
                      method, bits, inter);
    }
    if (!eden) return true;
    if (GIVEN(p, gq_group_size_inter) && c->gq_group_size_inter != EDEN_GROUP) {
        return REFUSE(
            "--gradient-quantization-method eden uses groups of %d between nodes; drop "
            "--gq-group-size-inter %d",
            EDEN_GROUP, c->gq_group_size_inter);
    }
    if (EDEN_GROUP % c->gq_group_size_intra && c->gq_group_size_intra % EDEN_GROUP) {
        return REFUSE(
            "--gq-group-size-intra %d must divide %d or be a multiple of it with "
            "--gradient-quantization-method eden",
            c->gq_group_size_intra, EDEN_GROUP);
    }
    if (c->hadamard_transform) {
        NOTE(
            "--hadamard-transform has no effect with --gradient-quantization-method eden, which already "
            "rotates gradients");
    }
    return true;
}

// Adds a note for each given flag whose name starts with `prefix`.
static void note_unused(const Parsed *p, const char *prefix, const char *needs) {
    int rows;
    const Option *table = config_options(&rows);
    for (int i = 0; i < rows; i++) {
        if (p->given[i] && table[i].use == OPTION_USED && strncmp(table[i].name, prefix, strlen(prefix)) == 0)
            NOTE("--%s has no effect without %s", table[i].name, needs);
    }
}

// A group is within a token, so that messages of any number of tokens have whole groups.
static bool check_activations(const Parsed *p) {
    const Config *c = p->config;
    bool stages = c->quantized_activations, tensors = c->quantized_tensor_parallel;
    const Rule rules[] = {
        {stages && c->pipeline_model_parallel_size == 1,
         "--quantized-activations needs --pipeline-model-parallel-size 2 or more, because only pipeline "
         "stages send activations; add it, or drop --quantized-activations"},
        {tensors && c->tensor_model_parallel_size == 1,
         "--quantized-tensor-parallel needs --tensor-model-parallel-size 2 or more; add it, or drop "
         "--quantized-tensor-parallel"},
    };
    if (!stages) {
        note_unused(p, "activation-quantization-", "--quantized-activations");
        note_unused(p, "aq-rounding", "--quantized-activations");
    }
    if (!stages && !tensors)
        note_unused(p, "aq-group-size", "--quantized-activations or --quantized-tensor-parallel");
    if (!obeys(p, rules, COUNT_OF(rules))) return false;
    if (tensors && c->tp_comm_backend == TP_COMM_PEER)
        NOTE("--tp-comm-backend peer affects only evaluation with --quantized-tensor-parallel");
    if ((!stages && !tensors) || c->hidden_size % c->aq_group_size == 0) return true;
    return REFUSE("--aq-group-size %d does not divide --hidden-size %d; use a multiple of 32 that does",
                  c->aq_group_size, c->hidden_size);
}

static bool check_quantization(const Parsed *p) {
    const Config *c = p->config;
    if ((c->quantized_weights || c->quantized_gradients) && !c->use_distributed_optimizer) {
        return REFUSE("--quantized-%s needs --use-distributed-optimizer; add it",
                      c->quantized_weights ? "weights" : "gradients");
    }
    if (!c->use_distributed_optimizer && c->sharding != SHARD_NOTHING) {
        NOTE("--use-distributed-optimizer was not given, but the optimizer is always sharded over the ranks");
    }
    bool lossless = c->quantized_weights && c->weight_quantization_method == WEIGHT_LOSSLESS;
    if (lossless && sizeof(floatX) != sizeof(uint16_t)) {
        return REFUSE(
            "--weight-quantization-method lossless needs bf16 weights, but this program was built with %s; "
            "use difference or direct",
            FLOATX_NAME);
    }
    if (!check_gradient_codec(p)) return false;
    bool uniform = c->gradient_quantization_method == GRADIENT_UNIFORM;
    int64_t common = lcm64(c->gq_group_size_intra, uniform ? c->gq_group_size_inter : EDEN_GROUP);
    if (common > LARGEST_GRAD_GROUP) {
        return REFUSE(
            "--gq-group-size-intra %d and --gq-group-size-inter %d have the least common multiple %lld, but "
            "at most %d is supported; change one of them",
            c->gq_group_size_intra, c->gq_group_size_inter, (long long)common, LARGEST_GRAD_GROUP);
    }
    if (c->error_feedback && c->replica_group)
        NOTE(
            "--error-feedback has no effect with --replica-group, whose offers always include the rounding "
            "errors of earlier offers");
    return check_activations(p);
}

// Without --fp8-format, the other FP8 flags would be ignored and the run slower than intended.
// `--fp8-format none` turns FP8 off even if they are given.
static bool check_fp8(const Parsed *p) {
    int rows;
    const Option *table = config_options(&rows);
    for (int i = 0; i < rows && !GIVEN(p, fp8_format); i++) {
        if (!p->given[i] || !(table[i].roles & NEEDS_FP8)) continue;
        return REFUSE("--%s needs --fp8-format hybrid or e4m3; add it, or drop --%s to train in bf16",
                      table[i].name, table[i].name);
    }
    return config_check_fp8(p->config, p->err);
}

static bool check_optimizer(const Parsed *p) {
    const Config *c = p->config;
    bool muon = c->optimizer == OPTIMIZER_MUON;
    if (!muon) note_unused(p, "muon-", "--optimizer muon");
    const Rule rules[] = {
        {!muon && c->exp_avg_dtype != MOMENT_FP32,
         "--exp-avg-dtype bf16 needs --optimizer muon, because AdamW keeps its moments in fp32; add it, or "
         "use --exp-avg-dtype fp32"},
        {muon && c->muon_coefficient_type == MUON_CUBIC5 && c->muon_num_ns_steps != 5,
         "--muon-coefficient-type cubic5 has coefficients for exactly 5 steps; use --muon-num-ns-steps 5"},
    };
    return obeys(p, rules, COUNT_OF(rules));
}

static bool check_lora(const Parsed *p) {
    const Config *c = p->config;
    if (!c->lora_rank) note_unused(p, "lora-", "--lora-rank");
    if (!c->lora_rank && c->pretrained_checkpoint) {
        return REFUSE("--pretrained-checkpoint needs --lora-rank N; add it, or use --load with --finetune");
    }
    if (c->pretrained_checkpoint_step >= 0 && !c->pretrained_checkpoint) {
        return REFUSE(
            "--pretrained-checkpoint-step needs --pretrained-checkpoint FOLDER; add it, or use --ckpt-step "
            "for the folder of --load");
    }
    return config_check_lora(c, p->err);
}

static bool check_checkpoints(const Parsed *p) {
    const Config *c = p->config;
    const Rule rules[] = {
        {c->save && !c->save_interval, "--save needs --save-interval N; add it"},
        {c->keep_checkpoint_interval && !c->keep_last_checkpoints,
         "--keep-checkpoint-interval needs --keep-last-checkpoints N, without which all checkpoints are "
         "kept; add it"},
        // Both imply that a checkpoint exists, so a fresh start would be a mistake.
        {!c->load && c->finetune, "--finetune needs --load FOLDER; add it"},
        {!c->load && c->exit_on_missing_checkpoint,
         "--exit-on-missing-checkpoint needs --load FOLDER; add it"},
    };
    return obeys(p, rules, COUNT_OF(rules));
}

// Returns true for implausibly low speeds. 0 means not given.
static bool too_slow(double speed) { return speed > 0 && speed < 1e-3; }

// Returns true if there is a tokenizer that can encode and decode text.
static bool has_tokenizer(const Config *c) {
    return c->vocab_file || c->tokenizer_type != TOKENIZER_GPT2_BPE;
}

static bool check_evaluation(const Parsed *p) {
    const Config *c = p->config;
    bool encodes = has_tokenizer(c) || c->plan;
    const Rule rules[] = {
        {c->eval_tasks.count && !encodes,
         "--eval-tasks needs --vocab-file and --merge-file, to tokenize text; add them"},
        {c->eval_text.count && !encodes,
         "--eval-text needs --vocab-file and --merge-file, to tokenize text; add them"},
        {c->log_eval_samples && (!config_scores(c) || !c->log_jsonl),
         "--log-eval-samples needs --eval-tasks or --eval-text, and --log-jsonl; add them"},
        {c->strict_lambada && !c->eval_tasks.count, "--strict-lambada needs --eval-tasks; add it"},
        {(GIVEN(p, overlapping_eval) || c->eval_text_detokenizer) && !c->eval_text.count,
         "--overlapping-eval and --eval-text-detokenizer need --eval-text; add it"},
    };
    if (!obeys(p, rules, COUNT_OF(rules))) return false;
    return !GIVEN(p, overlapping_eval) || c->overlapping_eval <= c->seq_length ||
           usage_error(p->err,
                       "--overlapping-eval %d exceeds --seq-length %d, so tokens would be left out; use 1 to "
                       "%d",
                       c->overlapping_eval, c->seq_length, c->seq_length);
}

static bool check_rest(const Parsed *p) {
    const Config *c = p->config;
    bool speeds = GIVEN(p, plan_network_inside) || GIVEN(p, plan_network_burst) || GIVEN(p, plan_gpu) ||
                  GIVEN(p, plan_lossless_bits) || c->plan_measure || GIVEN(p, plan_tflops) ||
                  GIVEN(p, plan_step_ms);
    bool speed_given = GIVEN(p, plan_tflops) || c->plan_step_ms > 0;
    const Rule rules[] = {
        {c->recompute_activations && c->recompute_granularity == RECOMPUTE_FULL,
         "--recompute-activations means --recompute-granularity selective, which contradicts full; keep one"},
        {c->on_nan == ON_NAN_SKIP && !c->check_for_nan_in_loss_and_grad,
         "--on-nan skip needs the check that --no-check-for-nan-in-loss-and-grad disables; keep one"},
        {c->emulate_nodes && !c->gpus_per_node, "--emulate-nodes needs --gpus-per-node N; add it"},
        {!c->dump_distributions != !c->dump_distributions_interval,
         "--dump-distributions FOLDER and --dump-distributions-interval N need each other; set both"},
        {c->plan_world_size && !c->plan,
         "--plan-world-size needs --plan; add it, or start that many ranks with mpirun"},
        {c->plan_network > 0 && !c->plan, "--plan-network needs --plan; add it"},
        {speeds && c->plan_network <= 0,
         "--plan-network-inside, --plan-network-burst, --plan-lossless-bits, --plan-gpu, --plan-measure, "
         "--plan-tflops and --plan-step-ms need --plan-network; add it"},
        {c->optimizer_cpu_offload && c->optimizer_disk_offload,
         "--optimizer-cpu-offload and --optimizer-disk-offload both move the optimizer state; keep one"},
        {GIVEN(p, plan_disk_bandwidth) && (!c->plan || !c->optimizer_disk_offload),
         "--plan-disk-bandwidth needs --plan and --optimizer-disk-offload; add them"},
        {GIVEN(p, plan_disk_bandwidth) && c->plan_measure,
         "--plan-measure measures the speed that --plan-disk-bandwidth sets; keep one"},
        {too_slow(c->plan_network), "--plan-network must be at least 0.001 Gb/s"},
        {too_slow(c->plan_network_inside), "--plan-network-inside must be at least 0.001 Gb/s"},
        {too_slow(c->plan_tflops), "--plan-tflops must be at least 0.001 TFLOP/s"},
        {c->plan_step_ms > 0 && GIVEN(p, plan_tflops),
         "--plan-step-ms and --plan-tflops both set a GPU's speed; keep one"},
        {c->plan_measure && speed_given,
         "--plan-measure measures the speed that --plan-tflops or --plan-step-ms sets; keep one"},
        {c->wandb_project && *c->wandb_project && (!c->wandb_exp_name || !*c->wandb_exp_name),
         "--wandb-project needs --wandb-exp-name to name the file of JSON lines; add it"},
        {c->sample_interval && !c->sample_prompt, "--sample-interval needs --sample-prompt TEXT; add it"},
        {c->sample_interval && !has_tokenizer(c),
         "--sample-interval needs --vocab-file and --merge-file, to decode tokens; add them"},
    };
    if (!obeys(p, rules, COUNT_OF(rules))) return false;
    if (c->sample_prompt && !has_tokenizer(c)) {
        NOTE("--sample-prompt has no effect without --vocab-file and --merge-file");
    }
    return true;
}

bool config_check(const Config *config, const bool *given, char *notes, size_t notes_bytes, Error *err) {
    const Parsed parsed = {config, given, notes, notes_bytes, err}, *p = &parsed;
    if (config_only_checks_data(config)) return check_data_sources(p) && check_sft(p) && check_tokenizer(p);
    note_idle(p);
    return check_required(p) && config_check_model(p) && config_check_tensor_parallel(p) &&
           config_check_pipeline(p) && check_local_steps(p) && check_replica_group(p) && check_length(p) &&
           check_schedule(p) && check_data_sources(p) && check_sft(p) && check_tokenizer(p) &&
           check_quantization(p) && check_fp8(p) && check_optimizer(p) && check_lora(p) &&
           check_checkpoints(p) && check_evaluation(p) && check_rest(p);
}
