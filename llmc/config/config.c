// From the command line to a checked Config: see config.h. Called once by every rank of
// train_gpt.cu, before and after MPI starts.
#include "llmc/config/config.h"

#include <stdlib.h>
#include <string.h>

#include "sdp4bit/codec.h"

// What the checks of the command line share.
typedef struct Parsed {
    const Config *config;
    const bool *given;  // (rows of the table)
    char *notes;
    size_t notes_bytes;
    Error *err;
} Parsed;

// The row whose value lies at this offset of Config.
static int row_of(size_t offset) {
    int rows;
    const Option *table = config_options(&rows);
    for (int i = 0; i < rows; i++) {
        if (table[i].name && table[i].offset == offset) return i;
    }
    fatal(NULL, EXIT_USAGE, "option table: no row stores offset %zu", offset);
}

#define COUNT_OF(list) (sizeof(list) / sizeof((list)[0]))
// A usage error, or a note, from a function that has a Parsed *p.
#define REFUSE(...) error_set(p->err, EXIT_USAGE, __VA_ARGS__)
#define NOTE(...) options_note(p->notes, p->notes_bytes, __VA_ARGS__)
#define GIVEN(parsed, field) ((parsed)->given[row_of(offsetof(Config, field))])

bool config_only_checks_data(const Config *config) {
    return config->check_data && config->inspect_data < 0 && !config->plan;
}

// --- checks of the flags alone, in the order of the help -----------------------------------------

static bool check_required(const Parsed *p) {
    const Config *c = p->config;
    struct {
        bool missing;
        const char *name;
    } needs[] = {
        {!GIVEN(p, num_layers), "--num-layers"},
        {!GIVEN(p, hidden_size), "--hidden-size"},
        {!GIVEN(p, num_attention_heads), "--num-attention-heads"},
        {!GIVEN(p, seq_length), "--seq-length"},
        {!GIVEN(p, max_position_embeddings), "--max-position-embeddings"},
        {!GIVEN(p, micro_batch_size), "--micro-batch-size"},
        {!c->plan && c->inspect_data < 0 && !GIVEN(p, lr), "--lr"},
        {!c->plan && !GIVEN(p, train_iters) && !GIVEN(p, train_samples),
         "--train-iters (or --train-samples)"},
    };
    char missing[512] = "";
    for (size_t i = 0; i < COUNT_OF(needs); i++) {
        if (!needs[i].missing) continue;
        size_t used = strlen(missing);
        snprintf(missing + used, sizeof missing - used, "%s%s", used ? ", " : "", needs[i].name);
    }
    if (!*missing) return true;
    return REFUSE(
        "missing %s; give them, or a model card such as @configs/gpt_125m.args (--help lists all flags)",
        missing);
}

static bool check_model(const Parsed *p) {
    const Config *c = p->config;
    if (c->tensor_model_parallel_size > 1 || c->pipeline_model_parallel_size > 1) {
        return REFUSE(
            "--tensor-model-parallel-size %d and --pipeline-model-parallel-size %d: sizes above 1 are not "
            "yet supported; use 1 for both",
            c->tensor_model_parallel_size, c->pipeline_model_parallel_size);
    }
    if (c->hidden_size % c->num_attention_heads) {
        return REFUSE("--hidden-size %d is not divisible by --num-attention-heads %d; change one of them",
                      c->hidden_size, c->num_attention_heads);
    }
    int head = c->hidden_size / c->num_attention_heads;
    if (head % 8) {
        return REFUSE(
            "--hidden-size %d / --num-attention-heads %d gives heads of %d; the size of a head must be a "
            "multiple of 8",
            c->hidden_size, c->num_attention_heads, head);
    }
    if (c->kv_channels && c->kv_channels != head) {
        return REFUSE(
            "--kv-channels %d is not --hidden-size / --num-attention-heads = %d; other head sizes are not "
            "supported, drop the flag",
            c->kv_channels, head);
    }
    if (c->ffn_hidden_size % 8) {
        return REFUSE("--ffn-hidden-size %d is not a multiple of 8; choose one that is", c->ffn_hidden_size);
    }
    if (c->seq_length > c->max_position_embeddings) {
        return REFUSE("--seq-length %d is larger than --max-position-embeddings %d; raise the latter",
                      c->seq_length, c->max_position_embeddings);
    }
    return true;
}

// Megatron's rule: a run is measured in iterations or in samples, never in both.
static bool check_length(const Parsed *p) {
    struct {
        bool by_samples, given;
        const char *name;
    } lengths[] = {
        {false, GIVEN(p, train_iters), "--train-iters"},
        {false, GIVEN(p, lr_decay_iters), "--lr-decay-iters"},
        {false, GIVEN(p, lr_warmup_iters), "--lr-warmup-iters"},
        {false, GIVEN(p, lr_wsd_decay_iters), "--lr-wsd-decay-iters"},
        {true, GIVEN(p, lr_wsd_decay_samples), "--lr-wsd-decay-samples"},
        {true, GIVEN(p, lr_decay_samples), "--lr-decay-samples"},
        {true, GIVEN(p, lr_warmup_samples), "--lr-warmup-samples"},
        {true, GIVEN(p, rampup_batch_size), "--rampup-batch-size"},
    };
    bool by_samples = GIVEN(p, train_samples);
    for (size_t i = 0; i < COUNT_OF(lengths); i++) {
        if (!lengths[i].given || lengths[i].by_samples == by_samples) continue;
        return REFUSE(
            "%s does not go with --train-%s; give the whole length and schedule in iterations, or all of it "
            "in samples",
            lengths[i].name, by_samples ? "samples" : "iters");
    }
    int count = p->config->rampup_batch_size.count;
    if (GIVEN(p, rampup_batch_size) && count != 3) {
        return REFUSE("--rampup-batch-size has %d values; give START INCREMENT SAMPLES", count);
    }
    return true;
}

// Notes each given flag of a list that only means something together with `needed`.
static void note_idle(const Parsed *p, bool active, const char *needed, const size_t *offsets, size_t count) {
    int rows;
    const Option *table = config_options(&rows);
    for (size_t i = 0; i < count && !active; i++) {
        int row = row_of(offsets[i]);
        if (p->given[row]) NOTE("--%s has no effect without %s", table[row].name, needed);
    }
}

// Things that do not go together, each with its own sentence.
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
        return REFUSE("--min-lr %g is larger than --lr %g; swap or lower it", c->min_lr, c->lr);
    }
    if (GIVEN(p, lr) && c->lr_warmup_init > c->lr) {
        return REFUSE("--lr-warmup-init %g is larger than --lr %g; lower it", c->lr_warmup_init, c->lr);
    }
    if (c->weight_decay_incr_style != WEIGHT_DECAY_CONSTANT && c->end_weight_decay < c->start_weight_decay) {
        return REFUSE(
            "--end-weight-decay %g is smaller than --start-weight-decay %g; weight decay can only grow",
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
         "--lr-warmup-fraction and --lr-warmup-iters or -samples both set the warm-up; keep one"},
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
    static const size_t of_wsd[] = {offsetof(Config, lr_wsd_decay_iters),
                                    offsetof(Config, lr_wsd_decay_samples),
                                    offsetof(Config, lr_wsd_decay_style)};
    note_idle(p, wsd, "--lr-decay-style WSD", of_wsd, COUNT_OF(of_wsd));
    return obeys(p, rules, COUNT_OF(rules)) && check_rates(p);
}

static bool check_data_sources(const Parsed *p) {
    const Config *c = p->config;
    bool one = c->data_path.count > 0;
    bool several = c->train_data_path.count + c->valid_data_path.count + c->test_data_path.count > 0;
    bool trains = !c->skip_train && !config_only_checks_data(c);
    if (c->mock_data && (one || several)) NOTE("--mock-data wins: the given data paths are not read");
    const Rule rules[] = {
        {c->mock_data && c->full_validation,
         "--full-validation needs a validation split, which --mock-data has not; drop one of them"},
        {!c->mock_data && one && several,
         "--data-path and shards given per split (--train-data-path, --valid-data-path, --test-data-path) "
         "exclude "
         "each other; keep one kind"},
        {!c->mock_data && several && GIVEN(p, split),
         "--split cuts --data-path; shards given per split are used whole: drop --split"},
        {!c->mock_data && several && !c->train_data_path.count && trains,
         "shards for validation or test without --train-data-path; add it, or --skip-train"},
        {!c->mock_data && !one && !several && !c->plan,
         "no data; give --data-path PREFIX of shards made by preprocess_data, or --mock-data"},
    };
    return obeys(p, rules, COUNT_OF(rules));
}

static void take_words(Words *words, const DataWords *read) {
    words->items = read->items;
    words->count = read->count;
}

// Lists of shards from files take the place of those on the command line.
static bool read_data_args(Config *c, Error *err) {
    if (c->mock_data) return true;
    bool per_split = c->train_data_path.count + c->valid_data_path.count + c->test_data_path.count > 0;
    if (c->data_args_path) {
        if (c->data_path.count) {
            return error_set(err, EXIT_USAGE,
                             "--data-path and --data-args-path both list the shards; keep one");
        }
        if (!data_args_read(&c->data_words[0], c->data_args_path, err)) return false;
        take_words(&c->data_path, &c->data_words[0]);
    }
    if (!c->per_split_data_args_path) return true;
    if (per_split || c->data_args_path) {
        return error_set(err, EXIT_USAGE, "--per-split-data-args-path and %s both list the shards; keep one",
            per_split ? "--train-data-path, --valid-data-path or --test-data-path" : "--data-args-path");
    }
    if (!data_args_read_splits(c->data_words, c->per_split_data_args_path, err)) return false;
    take_words(&c->train_data_path, &c->data_words[SPLIT_TRAIN]);
    take_words(&c->valid_data_path, &c->data_words[SPLIT_VALID]);
    take_words(&c->test_data_path, &c->data_words[SPLIT_TEST]);
    return true;
}

static bool check_tokenizer(const Parsed *p) {
    const Config *c = p->config;
    bool null = c->tokenizer_type == TOKENIZER_NULL, bpe = c->tokenizer_type == TOKENIZER_GPT2_BPE;
    bool files = c->vocab_file && c->merge_file, some = c->vocab_file || c->merge_file;
    if (!null && c->vocab_size) NOTE("--vocab-size has no effect: only NullTokenizer reads it");
    if (!bpe && some) NOTE("--vocab-file and --merge-file have no effect: only GPT2BPETokenizer reads them");
    const Rule rules[] = {
        {null && !c->vocab_size, "--tokenizer-type NullTokenizer needs --vocab-size N; add it"},
        {bpe && c->vocab_file && !c->merge_file, "--vocab-file without --merge-file; give both"},
        {bpe && c->merge_file && !c->vocab_file, "--merge-file without --vocab-file; give both"},
        {bpe && !files && !c->plan && !c->mock_data,  // made-up tokens need GPT-2's sizes only
         "--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file; add them "
         "(dev/data/get_gpt2_vocab.sh gets them), or choose Byte or NullTokenizer as the data were made"},
    };
    return obeys(p, rules, COUNT_OF(rules));
}

static void note_idle_quantisation(const Parsed *p) {
    static const size_t gradient[] = {offsetof(Config, hadamard_transform),
                                      offsetof(Config, gradient_quantization_bits_inter),
                                      offsetof(Config, gradient_quantization_bits_intra),
                                      offsetof(Config, gq_group_size_inter),
                                      offsetof(Config, gq_group_size_intra),
                                      offsetof(Config, gq_rounding),
                                      offsetof(Config, gradients_quantization_start_iteration)};
    static const size_t weight[] = {
        offsetof(Config, weight_quantization_bits), offsetof(Config, wq_group_size),
        offsetof(Config, weight_quantization_method), offsetof(Config, wq_rounding)};
    note_idle(p, p->config->quantized_gradients, "--quantized-gradients", gradient, COUNT_OF(gradient));
    note_idle(p, p->config->quantized_weights, "--quantized-weights", weight, COUNT_OF(weight));
}

static bool check_quantisation(const Parsed *p) {
    const Config *c = p->config;
    if ((c->quantized_weights || c->quantized_gradients) && !c->use_distributed_optimizer) {
        return REFUSE("--quantized-%s needs --use-distributed-optimizer; add it",
                      c->quantized_weights ? "weights" : "gradients");
    }
    if (!c->use_distributed_optimizer) {
        NOTE(
            "the optimiser is sharded over the ranks although --use-distributed-optimizer was not given: "
            "there is "
            "no other");
    }
    int64_t common = lcm64(c->gq_group_size_intra, c->gq_group_size_inter);
    if (common > LARGEST_GRAD_GROUP) {
        return REFUSE(
            "--gq-group-size-intra %d and --gq-group-size-inter %d have the least common multiple %lld; it "
            "must be at most %d",
            c->gq_group_size_intra, c->gq_group_size_inter, (long long)common, LARGEST_GRAD_GROUP);
    }
    note_idle_quantisation(p);
    return true;
}

static bool check_checkpoints(const Parsed *p) {
    const Config *c = p->config;
    const Rule rules[] = {
        {c->save && !c->save_interval, "--save needs --save-interval N; add it"},
        {c->keep_checkpoint_interval && !c->keep_last_checkpoints,
         "--keep-checkpoint-interval needs --keep-last-checkpoints N, without which all checkpoints stay; "
         "add it"},
        // Both ask for a checkpoint to begin with: a fresh start would not be what was meant.
        {!c->load && c->finetune, "--finetune needs --load FOLDER; add it"},
        {!c->load && c->exit_on_missing_checkpoint,
         "--exit-on-missing-checkpoint needs --load FOLDER; add it"},
    };
    if (!obeys(p, rules, COUNT_OF(rules))) return false;
    static const size_t saving[] = {
        offsetof(Config, save_interval),         offsetof(Config, async_save),
        offsetof(Config, keep_last_checkpoints), offsetof(Config, keep_checkpoint_interval),
        offsetof(Config, no_save_optim),         offsetof(Config, log_progress)};
    static const size_t loading[] = {offsetof(Config, no_load_optim)};
    note_idle(p, c->save != NULL, "--save", saving, COUNT_OF(saving));
    note_idle(p, c->load != NULL, "--load", loading, COUNT_OF(loading));
    return true;
}

static bool check_rest(const Parsed *p) {
    const Config *c = p->config;
    bool speaks = c->vocab_file || c->tokenizer_type != TOKENIZER_GPT2_BPE;
    const Rule rules[] = {
        {c->recompute_activations && c->recompute_granularity == RECOMPUTE_FULL,
         "--recompute-activations means --recompute-granularity selective, which contradicts full; keep one"},
        {c->on_nan == ON_NAN_SKIP && !c->check_for_nan_in_loss_and_grad,
         "--on-nan skip looks for what --no-check-for-nan-in-loss-and-grad does not; keep one"},
        {c->emulate_nodes && !c->gpus_per_node,
         "--emulate-nodes needs --gpus-per-node N, which says where the nodes' borders are; add it"},
        {!c->dump_distributions != !c->dump_distributions_interval,
         "--dump-distributions FOLDER and --dump-distributions-interval N go together; give both"},
        {c->plan_world_size && !c->plan,
         "--plan-world-size needs --plan; add it, or start that many ranks with mpirun"},
        {c->wandb_project && *c->wandb_project && (!c->wandb_exp_name || !*c->wandb_exp_name),
         "--wandb-project needs --wandb-exp-name to name the file of JSON lines; add it"},
        {c->sample_interval && !c->sample_prompt, "--sample-interval needs --sample-prompt TEXT; add it"},
        {c->sample_interval && !speaks,
         "--sample-interval needs --vocab-file and --merge-file, to turn tokens into text; add them"},
    };
    if (!obeys(p, rules, COUNT_OF(rules))) return false;
    if (c->sample_prompt && !speaks) {
        NOTE("--sample-prompt has no effect without --vocab-file and --merge-file");
    }
    static const size_t sampling[] = {offsetof(Config, sample_tokens), offsetof(Config, sample_temperature)};
    static const size_t events[] = {
        offsetof(Config, log_timers_to_tensorboard),     offsetof(Config, log_validation_ppl_to_tensorboard),
        offsetof(Config, log_batch_size_to_tensorboard), offsetof(Config, log_world_size_to_tensorboard),
        offsetof(Config, log_memory_to_tensorboard),     offsetof(Config, tensorboard_log_interval)};
    note_idle(p, c->sample_prompt != NULL, "--sample-prompt", sampling, COUNT_OF(sampling));
    note_idle(p, c->tensorboard_dir != NULL, "--tensorboard-dir", events, COUNT_OF(events));
    return true;
}

// --- parsing -------------------------------------------------------------------------------------

// --help and --version answer whatever else is on the command line.
static bool wants_answer(Config *config) {
    int rows;
    const Option *table = config_options(&rows);
    config->help = options_ask(table, rows, config->words, config->words_count, "help");
    config->version = options_ask(table, rows, config->words, config->words_count, "version");
    return config->help || config->version;
}

// Weights & Biases is replaced by JSON lines: <wandb-save-dir or
// save/wandb>/<wandb-exp-name>.jsonl, unless --log-jsonl says where.
static void replace_wandb(Config *config, char *notes, size_t notes_bytes) {
    if (!config->wandb_project || !*config->wandb_project) return;
    if (!config->log_jsonl) {
        bool own = config->wandb_save_dir && *config->wandb_save_dir;
        const char *folder = own ? config->wandb_save_dir : config->save ? config->save : ".";
        config->wandb_jsonl = text_format("%s%s/%s.jsonl", folder, own ? "" : "/wandb",
                                          config->wandb_exp_name);
        config->log_jsonl = config->wandb_jsonl;
    }
    options_note(notes, notes_bytes, "--wandb-project: Weights & Biases is not used; JSON lines go to %s",
                 config->log_jsonl);
}

static bool parse_words(Config *config, bool *given, char *notes, size_t notes_bytes, Error *err) {
    int rows;
    const Option *table = config_options(&rows);
    OptionsFound found = {given, notes, notes_bytes};
    if (!options_parse(table, rows, config->words, config->words_count, config, &found, err))
        return false;
    if (!read_data_args(config, err)) return false;
    Parsed parsed = {config, given, notes, notes_bytes, err};
    if (config_only_checks_data(config)) return check_data_sources(&parsed) && check_tokenizer(&parsed);
    return check_required(&parsed) && check_model(&parsed) && check_length(&parsed) &&
           check_schedule(&parsed) && check_data_sources(&parsed) && check_tokenizer(&parsed) &&
           check_quantisation(&parsed) && check_checkpoints(&parsed) && check_rest(&parsed);
}

bool config_parse(Config *config, int argc, char **argv, char *notes, size_t notes_bytes, Error *err) {
    int rows;
    const Option *table = config_options(&rows);
    memset(config, 0, sizeof *config);
    if (notes && notes_bytes) notes[0] = 0;
    options_defaults(table, rows, config);
    if (!options_read_words(argc, argv, &config->words, &config->words_count, err)) return false;
    if (wants_answer(config)) return true;
    bool *given = (bool *)xcalloc((size_t)rows, sizeof *given, "options");
    bool ok = parse_words(config, given, notes, notes_bytes, err);
    free(given);
    if (ok) replace_wandb(config, notes, notes_bytes);
    else config_free(config);
    return ok;
}

void config_free(Config *config) {
    options_free_words(config->words, config->words_count);
    free(config->wandb_jsonl);
    for (int s = 0; s < SPLITS; s++) data_words_free(&config->data_words[s]);
    memset(config, 0, sizeof *config);
}

void config_help(const char *program, FILE *file) {
    int rows;
    const Option *table = config_options(&rows);
    fprintf(file,
            "usage: [mpirun -np RANKS] %s @configs/gpt_125m.args --data-path PREFIX [flags]\n\n"
            "Pretrains a GPT. Flags are Megatron-LM's and SDP4Bit's: --flag VALUE or --flag=VALUE.\n"
            "Of a repeated flag the last one counts. Defaults are in [brackets].\n"
            "@FILE stands for the flags in FILE: one or more per line, # begins a comment, quotes as in a\n"
            "shell. An @FILE inside it is relative to its folder.\n",
            program);
    options_help(table, rows, file);
    fprintf(
        file,
        "\nExit codes: 0 done, 2 usage, 3 environment, 4 diverged, 5 data, 6 checkpoint, 7 communication,\n"
        "75 stopped by a signal after saving.\n");
}

// --- completion, once the number of ranks and the vocabulary are known ---------------------------

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
        return error_set(err, EXIT_USAGE,
                         "the vocabulary of %d padded by --make-vocab-size-divisible-by %d is too large",
                         vocab_size, c->make_vocab_size_divisible_by);
    }
    c->vocab_size_unpadded = vocab_size;
    c->vocab_size_padded = (int)padded;
    c->eod = eod;
    return true;
}

static bool finish_batch(Config *c, Error *err) {
    int64_t unit = (int64_t)c->micro_batch_size * c->dp_size;
    if (unit > 1 << 30) {
        return error_set(err, EXIT_USAGE,
                         "--micro-batch-size %d x %d ranks is more than 2^30 sequences; lower it",
                         c->micro_batch_size, c->dp_size);
    }
    if (!c->global_batch_size) c->global_batch_size = (int)unit;
    if (c->global_batch_size % unit) {
        return error_set(err, EXIT_USAGE,
                         "--global-batch-size %d is not divisible by --micro-batch-size %d x data-parallel "
                         "size %d = %lld; choose a multiple of %lld or "
                         "another number of ranks",
                         c->global_batch_size, c->micro_batch_size, c->dp_size, (long long)unit,
                         (long long)unit);
    }
    c->micro_batches = (int)(c->global_batch_size / unit);
    return true;
}

// A whole number in [low, 10^15] with nothing behind it.
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
    int64_t start, increment, samples, unit = (int64_t)c->micro_batch_size * c->dp_size;
    if (!parse_count(words[0], 1, &start) || !parse_count(words[1], 1, &increment) ||
        !parse_count(words[2], 0, &samples)) {
        return error_set(err, EXIT_USAGE,
            "--rampup-batch-size %s %s %s: give three whole numbers, START and INCREMENT at least 1",
            words[0], words[1], words[2]);
    }
    if (start > c->global_batch_size || (c->global_batch_size - start) % increment) {
        return error_set(err, EXIT_USAGE,
                         "--rampup-batch-size: %lld does not grow to --global-batch-size %d in steps of "
                         "%lld; choose an increment that divides the difference",
                         (long long)start, c->global_batch_size, (long long)increment);
    }
    if (start % unit || (start < c->global_batch_size && increment % unit)) {
        return error_set(err, EXIT_USAGE,
                         "--rampup-batch-size start %lld and increment %lld must be multiples of "
                         "--micro-batch-size %d x data-parallel size %d = %lld; choose such",
                         (long long)start, (long long)increment, c->micro_batch_size, c->dp_size,
                         (long long)unit);
    }
    if (samples > c->train_samples) {
        return error_set(err, EXIT_USAGE,
            "--rampup-batch-size lasts %lld samples, longer than --train-samples %lld; shorten it",
            (long long)samples, (long long)c->train_samples);
    }
    c->rampup_start = start;
    c->rampup_increment = increment;
    c->rampup_samples = samples;
    return true;
}

// Steps of the ramp that lie behind after n samples; steps == all of them once the ramp is over.
static int64_t rampup_step(const Config *c, int64_t n, int64_t *steps) {
    *steps = (c->global_batch_size - c->rampup_start) / c->rampup_increment;
    if (n > c->rampup_samples || *steps == 0 || c->rampup_samples == 0) return *steps;
    int64_t step = (int64_t)((double)n / ((double)c->rampup_samples / (double)*steps));
    return step < *steps ? step : *steps;
}

int config_global_batch_size(const Config *config, int64_t consumed_samples) {
    if (!config->rampup_start) return config->global_batch_size;
    int64_t steps;
    return (int)(config->rampup_start +
                 config->rampup_increment * rampup_step(config, consumed_samples, &steps));
}

static bool in_rampup(const Config *c, int64_t consumed) {
    return c->rampup_start && consumed <= c->rampup_samples;
}

// Inside the ramp, on by `most` iterations at most: those of one of its steps at once, but the last
// few singly, so that rounding at the border of a step is the same as in training itself.
static void rampup_on(const Config *c, int64_t most, int64_t *consumed, int64_t *iterations) {
    int64_t steps, step = rampup_step(c, *consumed, &steps), batch = config_global_batch_size(c, *consumed);
    double border = step < steps ? (double)(step + 1) * ((double)c->rampup_samples / (double)steps)
                                 : (double)c->rampup_samples;
    int64_t at_once = ((int64_t)border - 2 - *consumed) / batch;
    if (at_once < 1) at_once = 1;
    if (at_once > most) at_once = most;
    *consumed += at_once * batch;
    *iterations += at_once;
}

// Iterations that --train-samples gives once `consumed` of them are taken: Megatron counts the ramp
// iteration by iteration, then whole global batches.
static int64_t iterations_of_samples(const Config *c, int64_t consumed) {
    int64_t iterations = 0;
    while (in_rampup(c, consumed)) rampup_on(c, INT64_MAX, &consumed, &iterations);
    int64_t left = c->train_samples - consumed;
    return iterations + (left > 0 ? left / c->global_batch_size : 0);
}

void config_go_on(Config *config, int64_t iteration, int64_t consumed_samples, char *notes,
                  size_t notes_bytes) {
    if (!config->train_samples) return;
    int64_t end = iteration + iterations_of_samples(config, consumed_samples);
    if (end != config->train_iters) {
        options_note(notes, notes_bytes,
                     "the checkpoint has taken %lld of --train-samples %lld in %lld iterations, with other "
                     "batch sizes: the rest ends at iteration %lld",
                     (long long)consumed_samples, (long long)config->train_samples, (long long)iteration,
                     (long long)end);
    }
    config->train_iters = end;
}

int64_t config_samples_at_end(const Config *config, int64_t iteration, int64_t consumed_samples) {
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
            return error_set(err, EXIT_USAGE,
                             "--train-samples %lld is less than one --global-batch-size %d; raise it",
                             (long long)c->train_samples, c->global_batch_size);
        }
        c->total_samples = c->train_samples;
    } else if (__builtin_mul_overflow(c->train_iters, (int64_t)c->global_batch_size, &c->total_samples)) {
        return error_set(err, EXIT_USAGE,
                         "--train-iters %lld x --global-batch-size %d is too large; lower --train-iters",
                         (long long)c->train_iters, c->global_batch_size);
    }
    int64_t evaluations = c->train_iters / c->eval_interval + 1, samples;
    if (__builtin_mul_overflow(evaluations, c->eval_iters, &samples) ||
        __builtin_mul_overflow(samples, (int64_t)c->global_batch_size, &samples)) {
        return error_set(err, EXIT_USAGE,
            "--eval-iters %lld every --eval-interval %lld needs too many samples; lower --eval-iters",
            (long long)c->eval_iters, (long long)c->eval_interval);
    }
    return true;
}

// Everything in samples, as Megatron's scheduler counts.
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
            return error_set(err, EXIT_USAGE,
                "--lr-decay-iters, --lr-wsd-decay-iters or --lr-warmup-iters x --global-batch-size %d is "
                "too large; lower it",
                c->global_batch_size);
        }
    }
    if (c->lr_decay_style == LR_WSD && c->wsd_samples > c->decay_samples_dn) {
        return error_set(err, EXIT_USAGE,
            "--lr-wsd-decay-* lasts %lld samples, longer than the decay of %lld samples of which it is the "
            "end; shorten it or lengthen --lr-decay-*",
            (long long)c->wsd_samples, (long long)c->decay_samples_dn);
    }
    c->warmup_samples_wn = c->lr_warmup_fraction > 0 ? c->lr_warmup_fraction * (double)c->decay_samples_dn
                                                     : (double)warmup;
    if (c->warmup_samples_wn >= (double)c->decay_samples_dn) {
        return error_set(err, EXIT_USAGE,
                         "the warm-up of %.10g samples is not shorter than the decay of %lld samples; "
                         "shorten --lr-warmup-* or lengthen --lr-decay-*",
                         c->warmup_samples_wn, (long long)c->decay_samples_dn);
    }
    return true;
}

// The memory plan counts bytes in 64 bits. An estimate from above, in real numbers: what it refuses
// no machine could hold.
static bool finish_sizes(const Config *c, Error *err) {
    const double most = 0x1p60, C = c->hidden_size, F = c->ffn_hidden_size, L = c->num_layers,
                 V = c->vocab_size_padded, T = c->seq_length;
    double tokens = (double)c->micro_batch_size * T;
    double parameters = (V + c->max_position_embeddings) * C + L * (4 * C * C + 2 * C * F + 9 * C + F);
    double activations = tokens * (L + 2) * (16 * C + 4 * F) + tokens * (V + c->num_attention_heads * T);
    if (16 * parameters < most && 4 * activations < most) return true;
    return error_set(err, EXIT_USAGE,
                     "a model of %.3g parameters on micro-batches of %.3g tokens needs more memory than can "
                     "be counted; make --hidden-size, "
                     "--num-layers, --seq-length or --micro-batch-size smaller",
                     parameters, tokens);
}

bool config_finish(Config *config, int world_size, int vocab_size, int eod, Error *err) {
    if (!finish_vocabulary(config, vocab_size, eod, err)) return false;
    if (config_only_checks_data(config)) return true;
    config->dp_size = world_size /
                      (config->tensor_model_parallel_size * config->pipeline_model_parallel_size);
    if (!config->ffn_hidden_size) config->ffn_hidden_size = 4 * config->hidden_size;
    config->kv_channels = config->hidden_size / config->num_attention_heads;
    if (config->recompute_activations) config->recompute_granularity = RECOMPUTE_SELECTIVE;
    return finish_sizes(config, err) && finish_batch(config, err) && finish_rampup(config, err) &&
           finish_length(config, err) && finish_schedule(config, err);
}
