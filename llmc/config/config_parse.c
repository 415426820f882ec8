// Parses the command line into a Config: see config.h. Called by every rank of train_gpt.c before
// MPI starts.
#include "llmc/config/config.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/config/config_roles.h"
#include "sdp4bit/codec.h"

bool config_only_checks_data(const Config *config) {
    return config->check_data && config->inspect_data < 0 && !config->plan;
}

static void take_words(Words *words, const DataWords *read) {
    words->items = read->items;
    words->count = read->count;
}

// Replaces the shard lists with the lists in --data-args-path and --per-split-data-args-path.
static bool read_data_args(Config *c, Error *err) {
    if (c->mock_data) return true;
    bool per_split = c->train_data_path.count + c->valid_data_path.count + c->test_data_path.count > 0;
    if (c->data_args_path) {
        if (c->data_path.count) {
            return usage_error(err, "--data-path and --data-args-path both list shards; keep one");
        }
        if (!data_args_read(&c->data_words[0], c->data_args_path, err)) return false;
        take_words(&c->data_path, &c->data_words[0]);
    }
    if (!c->per_split_data_args_path) return true;
    if (per_split || c->data_args_path) {
        return usage_error(err, "--per-split-data-args-path and %s both list shards; keep one",
                           per_split ? "--train-data-path, --valid-data-path or --test-data-path"
                                     : "--data-args-path");
    }
    if (!data_args_read_splits(c->data_words, c->per_split_data_args_path, err)) return false;
    take_words(&c->train_data_path, &c->data_words[SPLIT_TRAIN]);
    take_words(&c->valid_data_path, &c->data_words[SPLIT_VALID]);
    take_words(&c->test_data_path, &c->data_words[SPLIT_TEST]);
    return true;
}

// --help and --version work even if other flags are invalid.
static bool wants_answer(Config *config) {
    int rows;
    const Option *table = config_options(&rows);
    config->help = options_ask(table, rows, config->words, config->words_count, "help");
    config->version = options_ask(table, rows, config->words, config->words_count, "version");
    return config->help || config->version;
}

// Writes JSON lines instead of using Weights & Biases: to --log-jsonl, or to NAME.jsonl in
// --wandb-save-dir or SAVE/wandb, where NAME is --wandb-exp-name.
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
    return options_parse(table, rows, config->words, config->words_count, config, &found, err) &&
           read_data_args(config, err) && config_check(config, given, notes, notes_bytes, err);
}

bool config_parse(Config *config, int argc, char **argv, char *notes, size_t notes_bytes, Error *err) {
    assert(config && argc > 0 && argv);
    int rows;
    const Option *table = config_options(&rows);
    memset(config, 0, sizeof *config);
    if (notes && notes_bytes) notes[0] = 0;
    options_defaults(table, rows, config);
    if (!options_read_words(argc, argv, &config->words, &config->words_count, err)) return false;
    if (wants_answer(config)) return true;
    bool *given = xcalloc((size_t)rows, sizeof *given, "options");
    bool ok = parse_words(config, given, notes, notes_bytes, err);
    free(given);
    if (!ok) {
        config_free(config);
        return false;
    }
    replace_wandb(config, notes, notes_bytes);
    if (config->gradient_quantization_method == GRADIENT_EDEN) config->gq_group_size_inter = EDEN_GROUP;
    return true;
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
            "Pretrains a GPT or Llama model. Flags are named as in Megatron-LM and SDP4Bit: --flag\n"
            "VALUE or --flag=VALUE. If a flag is repeated, the last one wins. Defaults are in\n"
            "[brackets]. @FILE inserts the flags in FILE: any number per line, # starts a comment, quotes\n"
            "work as in a shell. An @FILE within it is relative to its directory.\n",
            program);
    options_help(table, rows, file);
    fprintf(
        file,
        "\nExit codes: 0 done, 2 usage, 3 environment, 4 diverged, 5 data, 6 checkpoint, 7 communication,\n"
        "75 stopped by a signal after saving.\n");
}
