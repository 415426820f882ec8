// Reads and writes tokenizer files. See hf_tokenizer.h.
#include "dev/convert/hf_tokenizer.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <libgen.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/durable.h"
#include "llmc/base/json.h"
#include "llmc/base/utf8.h"
#include "llmc/data/symbols.h"
#include "llmc/data/tokenizer_json.h"
#include "llmc/data/vocabulary.h"

// As in llmc/data/vocabulary.c: larger files cannot be vocabularies.
enum { MOST_BYTES = 1 << 28, BYTES = 256 };
#define VERSION_LINE "#version: 0.2\n"
#define TEMPLATES "additional_chat_templates"

bool hf_tokenizer_given(const HfTokenizerOptions *options, TokenizerChoice *choice) {
    bool pairs = options->vocab_file || options->merge_file;
    if (choice->type == TOKENIZER_NULL) choice->eod_token = NULL;  // an id, not a token's text
    if (options->eod) choice->eod_token = options->eod;
    if (!pairs && !options->model) return false;
    choice->type = pairs ? TOKENIZER_GPT2_BPE : TOKENIZER_HUGGING_FACE;
    choice->vocab_file = options->vocab_file;
    choice->merge_file = options->merge_file;
    choice->model = options->model;
    return true;
}

static HfTokenizerFile *find_file(const HfTokenizer *t, const char *name) {
    for (int i = 0; i < t->files; i++) {
        if (strcmp(t->file[i].name, name) == 0) return &t->file[i];
    }
    return NULL;
}

void hf_tokenizer_put(HfTokenizer *t, const char *name, Text *text) {
    HfTokenizerFile *file = find_file(t, name);
    if (!file) {
        t->file = (HfTokenizerFile *)xrealloc(t->file, (size_t)(t->files + 1) * sizeof *file, "file names");
        file = &t->file[t->files++];
        *file = (HfTokenizerFile){.name = xstrdup(name)};
    }
    free(file->text);
    file->text = text->data;
    file->bytes = text->length;
    *text = (Text){0};
}

cJSON *hf_tokenizer_object(const HfTokenizer *t, const char *name) {
    const HfTokenizerFile *file = find_file(t, name);
    return file ? json_parse_object(file->text, (size_t)file->bytes) : NULL;
}

static bool read_file(HfTokenizer *t, const char *name, const char *path, Error *err) {
    uint64_t bytes;
    Text text = {.data = durable_read_file(path, MOST_BYTES, &bytes, err)};
    if (!text.data) return false;
    text.length = (size_t)bytes;
    hf_tokenizer_put(t, name, &text);
    cJSON *object = hf_tokenizer_object(t, name);
    cJSON_Delete(object);
    return object || strcmp(name + strlen(name) - strlen(".json"), ".json") != 0 ||
           data_error(err, "%s is not a JSON object; repair or remove it", path);
}

// Adds files of the directory that exist and were not added before. names: ends with NULL.
static bool read_present(HfTokenizer *t, const char *folder, const char *const *names, Error *err) {
    bool ok = true;
    for (; *names && ok; names++) {
        char *path = text_format("%s/%s", folder, *names);
        if (!find_file(t, *names) && (durable_exists(path) || errno == EACCES))
            ok = read_file(t, *names, path, err);
        free(path);
    }
    return ok;
}

// Returns the path of tokenizer.json or vocab.json, or NULL for other tokenizers. malloc'ed.
static char *main_file(const TokenizerChoice *choice) {
    return choice->type == TOKENIZER_HUGGING_FACE ? tokenizer_json_path(choice->model)
           : choice->type == TOKENIZER_GPT2_BPE   ? xstrdup(choice->vocab_file)
                                                  : NULL;
}

bool hf_tokenizer_add_configs(HfTokenizer *t, const TokenizerChoice *choice, const char *folder, Error *err) {
    static const char *const names[] = {HF_CONFIG, HF_GENERATION_CONFIG, NULL};
    char *path = folder ? NULL : main_file(choice);
    if (path) folder = dirname(path);
    bool ok = !folder || read_present(t, folder, names, err);
    free(path);
    return ok;
}

// Reads the files next to those that the trainer uses, if they exist.
static bool read_neighbors(HfTokenizer *t, const char *folder, Error *err) {
    static const char *const names[] = {HF_TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json",
                                        "chat_template.jinja", NULL};
    char *path = text_format("%s/" TEMPLATES, folder);
    DIR *list = opendir(path);
    bool ok = (list || errno == ENOENT || data_error(err, "cannot read %s: %s", path, strerror(errno))) &&
              read_present(t, folder, names, err);
    for (const struct dirent *entry; ok && list && (entry = readdir(list));) {
        char *name = text_format(TEMPLATES "/%s", entry->d_name), *end = strrchr(name, '.');
        if (strcmp(end ? end : "", ".jinja") == 0)
            ok = read_present(t, folder, (const char *const[]){name, NULL}, err);
        free(name);
    }
    if (list) closedir(list);
    free(path);
    return ok;
}

// Returns the id of a special token of tokenizer_config.json, or -1 if it is not in the vocabulary.
static int special_id(const Tokenizer *tokenizer, const cJSON *token) {
    const char *text = cJSON_IsObject(token) ? json_member_string(token, "content")
                                             : cJSON_GetStringValue(token);
    size_t bytes;
    for (int id = text ? tokenizer_vocab_size(tokenizer) - 1 : -1; id >= 0; id--) {
        const char *other = tokenizer_decode(tokenizer, id, &bytes);
        if (strlen(text) == bytes && memcmp(text, other, bytes) == 0) return id;
    }
    return -1;
}

bool hf_tokenizer_eod_used(const HfTokenizerOptions *options, const TokenizerChoice *choice, Error *err) {
    return !options->eod || (choice->type == TOKENIZER_HUGGING_FACE && !options->none) ||
           usage_error(err, "--tokenizer-eod has no effect without a tokenizer.json; remove it");
}

bool hf_tokenizer_fits(int size, int64_t rows, Error *err) {
    return size <= rows ||
           data_error(err,
                      "the tokenizer has %d ids, but the model's embedding has %" PRId64
                      " rows; pass the model's --vocab-file and --merge-file, or --tokenizer-model",
                      size, rows);
}

bool hf_tokenizer_read(HfTokenizer *t, const TokenizerChoice *choice, Error *err) {
    size_t bytes;
    Tokenizer *tokenizer = tokenizer_open(choice, err);
    if (!tokenizer) return false;
    bool pair = choice->type == TOKENIZER_GPT2_BPE;
    char *path = main_file(choice);
    bool ok = read_file(t, pair ? HF_VOCAB : HF_TOKENIZER, path, err) &&
              (!pair || read_file(t, HF_MERGES, choice->merge_file, err)) &&
              read_neighbors(t, dirname(path), err);
    t->type = choice->type;
    t->size = tokenizer_vocab_size(tokenizer);
    t->eod = tokenizer_eod(tokenizer);
    const char *text = tokenizer_decode(tokenizer, t->eod, &bytes);
    t->eod_text = text_format("%.*s", (int)bytes, text);
    cJSON *config = hf_tokenizer_object(t, HF_TOKENIZER_CONFIG);
    const cJSON *bos = cJSON_GetObjectItemCaseSensitive(config, "bos_token");
    t->bos = bos || !pair ? special_id(tokenizer, bos) : t->eod;
    t->pad = special_id(tokenizer, cJSON_GetObjectItemCaseSensitive(config, "pad_token"));
    cJSON_Delete(config);
    tokenizer_close(tokenizer);
    free(path);
    return ok;
}

void hf_tokenizer_of_bytes(HfTokenizer *t) {
    Alphabet alphabet = byte_alphabet();
    Text vocab = {0}, merges = {0};
    t->type = TOKENIZER_GPT2_BPE;
    t->size = BYTES + 1;
    t->eod = t->bos = BYTES;
    t->pad = -1;
    t->eod_text = xstrdup(END_OF_TEXT);
    text_add(&merges, VERSION_LINE);
    text_add(&vocab, "{");
    for (int byte = 0; byte < BYTES; byte++) {
        char symbol[5];
        symbol[utf8_write(alphabet.code_point[byte], symbol)] = 0;
        text_add_quoted(&vocab, symbol);
        text_add(&vocab, ": %d, ", byte);
    }
    text_add(&vocab, "\"" END_OF_TEXT "\": %d}\n", BYTES);
    hf_tokenizer_put(t, HF_VOCAB, &vocab);
    hf_tokenizer_put(t, HF_MERGES, &merges);
}

bool hf_tokenizer_write(const HfTokenizer *t, const char *folder, Error *err) {
    bool ok = true;
    for (int i = 0; i < t->files && ok; i++) {
        const HfTokenizerFile *file = &t->file[i];
        char *path = text_format("%s/%s", folder, file->name);
        char *parent = text_format("%.*s", (int)(strrchr(path, '/') - path), path);
        ok = durable_make_folders(parent, err) && durable_write_file(path, file->text, file->bytes, err) &&
             durable_sync_folder(parent, err);
        free(path);
        free(parent);
    }
    return ok;
}

void hf_tokenizer_free(HfTokenizer *t) {
    for (int i = 0; i < t->files; i++) {
        free(t->file[i].name);
        free(t->file[i].text);
    }
    free(t->file);
    free(t->eod_text);
    *t = (HfTokenizer){0};
}
