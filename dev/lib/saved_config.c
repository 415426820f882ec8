// Builds a Config from a checkpoint: see saved_config.h. Converts the saved flags back to a command
// line, so that config_parse checks them.
#include "dev/lib/saved_config.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/durable.h"
#include "llmc/base/json.h"
#include "llmc/config/config_roles.h"

#define COUNT_OF(list) (sizeof(list) / sizeof((list)[0]))

// A command line under construction.
typedef struct Line {
    char **words;
    int count, capacity;
} Line;

static void add_word(Line *line, char *word) {
    if (line->count == line->capacity) {
        line->capacity = 2 * line->capacity + 64;
        line->words = (char **)xrealloc(line->words, (size_t)line->capacity * sizeof *line->words, "options");
    }
    line->words[line->count++] = word;
}

static void free_line(Line *line) {
    for (int i = 0; i < line->count; i++) free(line->words[i]);
    free(line->words);
}

// Adds a saved flag, unless its value is null or missing.
static void add_saved(Line *line, const Option *row, const cJSON *saved) {
    char name[OPTION_KEY_BYTES];
    option_key(row, name);
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(saved, name);
    if (cJSON_IsTrue(item)) add_word(line, text_format("--%s", row->name));
    if (cJSON_IsString(item)) add_word(line, text_format("--%s=%s", row->name, item->valuestring));
    if (!cJSON_IsNumber(item)) return;
    char *digits = cJSON_PrintUnformatted(item);
    if (digits) add_word(line, text_format("--%s=%s", row->name, digits));
    cJSON_free(digits);
}

static void add_model(Line *line, const cJSON *saved) {
    int rows;
    const Option *table = config_options(&rows);
    for (int i = 0; i < rows; i++) {
        if (table[i].roles & (MODEL | LOADED)) add_saved(line, &table[i], saved);
    }
}

static bool saved_null_tokenizer(const cJSON *saved) {
    const char *type = json_member_string(saved, "tokenizer_type");
    return type && strcmp(type, "NullTokenizer") == 0;
}

// Adds flags that imported checkpoints lack: the sequence length, which is the number of positions,
// and for NullTokenizer the vocabulary size without the end-of-document id. This id replaces
// NullTokenizer's saved --tokenizer-eod, which older programs ignored.
static void add_implied(Line *line, const cJSON *saved) {
    const struct {
        const char *flag, *name, *from;
        int64_t less;
    } implied[] = {
        {"seq-length", "seq_length", "max_position_embeddings", 0},
        {"vocab-size", "vocab_size", "unpadded_vocab_size", 1},
    };
    for (size_t i = 0; i < COUNT_OF(implied); i++) {
        int64_t value;
        if (cJSON_IsNumber(cJSON_GetObjectItemCaseSensitive(saved, implied[i].name))) continue;
        if (json_member_int64(saved, implied[i].from, 1, INT32_MAX, &value))
            add_word(line, text_format("--%s=%lld", implied[i].flag, (long long)(value - implied[i].less)));
    }
    int64_t eod;
    if (saved_null_tokenizer(saved) && json_member_int64(saved, "eod", 0, INT32_MAX, &eod))
        add_word(line, text_format("--tokenizer-eod=%lld", (long long)eod));
}

// Takes the vocabulary sizes from the checkpoint, because padding depends on the parallel layout of
// the saved run.
static bool adopt_vocabulary(Config *config, const cJSON *saved, Error *err) {
    int64_t words, rows, eod;
    if (!json_member_int64(saved, "unpadded_vocab_size", 1, INT32_MAX, &words) ||
        !json_member_int64(saved, "padded_vocab_size", words, INT32_MAX, &rows) ||
        !json_member_int64(saved, "eod", 0, words - 1, &eod))
        return ckpt_error(err, "the vocabulary sizes are missing or invalid");
    if (!config_finish(config, 1, (int)words, (int)eod, err)) return false;
    config->vocab_size_padded = (int)rows;
    return true;
}

bool config_of_checkpoint(Config *config, const char *saved_json, const Words *own, Error *err) {
    assert(config && saved_json && own);
    // Required flags, which do not affect the model.
    static const char *const fixed[] = {"--micro-batch-size=1", "--lr=0", "--train-iters=1", "--mock-data"};
    Line line = {NULL, 0, 0};
    Error why = {0};
    cJSON *saved = json_parse_object(saved_json, strlen(saved_json));
    memset(config, 0, sizeof *config);
    add_word(&line, xstrdup("checkpoint"));
    if (saved) add_model(&line, saved);
    if (saved) add_implied(&line, saved);
    for (size_t i = 0; i < COUNT_OF(fixed); i++) add_word(&line, xstrdup(fixed[i]));
    for (int i = 0; i < own->count; i++) add_word(&line, xstrdup(own->items[i]));
    bool ok = saved ? config_parse(config, line.count, line.words, NULL, 0, &why)
                    : ckpt_error(&why, "they are not a JSON object");
    free_line(&line);
    // The id of a NullTokenizer is not a token's text, which other tokenizers expect.
    if (ok && saved_null_tokenizer(saved) && config->tokenizer_type != TOKENIZER_NULL)
        config->tokenizer_eod = NULL;
    if (ok && !adopt_vocabulary(config, saved, &why)) {
        config_free(config);
        ok = false;
    }
    cJSON_Delete(saved);
    if (!ok) {
        return ckpt_error(
            err, "the checkpoint's arguments don't describe a valid model: %.*s; load another checkpoint",
            (int)strcspn(why.what, ";"), why.what);
    }
    return true;
}

const char *config_keep(Config *c, char *text) {
    c->words = (char **)xrealloc(c->words, ((size_t)c->words_count + 1) * sizeof *c->words, "options");
    return c->words[c->words_count++] = text;
}

bool tokenizer_files_exist(const TokenizerChoice *c) {
    if (c->type == TOKENIZER_HUGGING_FACE) return c->model && durable_exists(c->model);
    return c->type == TOKENIZER_GPT2_BPE && c->vocab_file && c->merge_file && durable_exists(c->vocab_file) &&
           durable_exists(c->merge_file);
}

bool config_use_tokenizer_in(Config *c, const char *folder) {
    TokenizerChoice files = {.type = c->tokenizer_type,
                             .vocab_file = config_keep(c, text_format("%s/vocab.json", folder)),
                             .merge_file = config_keep(c, text_format("%s/merges.txt", folder)),
                             .model = config_keep(c, text_format("%s/tokenizer.json", folder))};
    if (!tokenizer_files_exist(&files)) return false;
    bool whole = files.type == TOKENIZER_HUGGING_FACE;
    if (whole) c->tokenizer_model = files.model;
    if (!whole) c->vocab_file = files.vocab_file;
    if (!whole) c->merge_file = files.merge_file;
    return true;
}

bool config_check_tokenizer(const Config *c, int size, int eod, Error *err) {
    if (size == c->vocab_size_unpadded && eod == c->eod) return true;
    return data_error(err,
                      "the tokenizer has %d ids and end-of-document id %d, but the checkpoint's model has %d "
                      "and %d; pass the model's --vocab-file and --merge-file, or --tokenizer-model",
                      size, eod, c->vocab_size_unpadded, c->eod);
}
