// Reads and writes tokenizer files. See hf_tokenizer.h.
#include "dev/convert/hf_tokenizer.h"

#include <dirent.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/durable.h"
#include "llmc/base/json.h"
#include "llmc/base/json_line.h"
#include "llmc/base/utf8.h"
#include "llmc/data/symbols.h"
#include "llmc/data/vocabulary.h"

// As in llmc/data/vocabulary.c: larger files cannot be vocabularies.
enum { MOST_BYTES = 1 << 28, BYTES = 256 };
#define VERSION_LINE "#version: 0.2\n"

bool hf_tokenizer_given(const HfTokenizerOptions *options, TokenizerChoice *choice) {
    bool pairs = options->vocab_file || options->merge_file;
    if (options->eod) choice->eod_token = options->eod;
    if (!pairs && !options->model) return false;
    choice->type = pairs ? TOKENIZER_GPT2_BPE : TOKENIZER_HUGGING_FACE;
    choice->vocab_file = options->vocab_file;
    choice->merge_file = options->merge_file;
    choice->model = options->model;
    return true;
}

static HfTokenizerFile *add_file(HfTokenizer *t, const char *name) {
    HfTokenizerFile *file = &t->file[t->files++];
    file->name = name;
    return file;
}

static bool read_file(HfTokenizer *t, const char *name, const char *path, Error *err) {
    HfTokenizerFile *file = add_file(t, name);
    file->text = durable_read_file(path, MOST_BYTES, &file->bytes, err);
    return file->text != NULL;
}

static bool read_object(HfTokenizer *t, const char *name, const char *path, Error *err) {
    if (!read_file(t, name, path, err)) return false;
    const HfTokenizerFile *file = &t->file[t->files - 1];
    cJSON *object = json_parse_object(file->text, (size_t)file->bytes);
    cJSON_Delete(object);
    return object || data_error(err, "%s is not a JSON object; repair or remove it", path);
}

// Reads the files next to tokenizer.json, if they exist.
static bool read_neighbors(HfTokenizer *t, const char *folder, Error *err) {
    static const char *const names[] = {HF_TOKENIZER_CONFIG, "special_tokens_map.json", HF_GENERATION_CONFIG};
    bool ok = true;
    for (size_t i = 0; i < sizeof names / sizeof *names && ok; i++) {
        char *path = text_format("%s/%s", folder, names[i]);
        if (durable_exists(path)) ok = read_object(t, names[i], path, err);
        free(path);
    }
    return ok;
}

// model: path of a tokenizer.json (any file name) or of its folder.
static bool read_model(HfTokenizer *t, const char *model, Error *err) {
    DIR *open = opendir(model);
    const char *slash = strrchr(model, '/');
    char *path = open ? text_format("%s/" HF_TOKENIZER, model) : xstrdup(model);
    char *folder = open    ? xstrdup(model)
                   : slash ? text_format("%.*s", (int)(slash - model) + (slash == model), model)
                           : xstrdup(".");
    bool ok = read_file(t, HF_TOKENIZER, path, err) && read_neighbors(t, folder, err);
    if (open) closedir(open);
    free(path);
    free(folder);
    return ok;
}

bool hf_tokenizer_read(HfTokenizer *t, const TokenizerChoice *choice, Error *err) {
    size_t bytes;
    *t = (HfTokenizer){.type = choice->type};
    Tokenizer *tokenizer = tokenizer_open(choice, err);
    if (!tokenizer) return false;
    t->size = tokenizer_vocab_size(tokenizer);
    t->eod = tokenizer_eod(tokenizer);
    bool whole = choice->type == TOKENIZER_HUGGING_FACE;
    if (whole) {
        const char *text = tokenizer_decode(tokenizer, t->eod, &bytes);
        t->eod_text = text_format("%.*s", (int)bytes, text);
    }
    tokenizer_close(tokenizer);
    bool ok = whole ? read_model(t, choice->model, err)
                    : read_file(t, HF_VOCAB, choice->vocab_file, err) &&
                          read_file(t, HF_MERGES, choice->merge_file, err);
    if (!ok) hf_tokenizer_free(t);
    return ok;
}

void hf_tokenizer_of_bytes(HfTokenizer *t) {
    Alphabet alphabet = byte_alphabet();
    Text text = {0};
    *t = (HfTokenizer){.type = TOKENIZER_GPT2_BPE, .size = BYTES + 1, .eod = BYTES};
    HfTokenizerFile *vocab = add_file(t, HF_VOCAB), *merges = add_file(t, HF_MERGES);
    merges->text = xstrdup(VERSION_LINE);
    merges->bytes = strlen(merges->text);
    text_add(&text, "{");
    for (int byte = 0; byte < BYTES; byte++) {
        char symbol[5];
        symbol[utf8_write(alphabet.code_point[byte], symbol)] = 0;
        text_add_quoted(&text, symbol);
        text_add(&text, ": %d, ", byte);
    }
    text_add(&text, "\"" END_OF_TEXT "\": %d}\n", BYTES);
    vocab->text = text.data;
    vocab->bytes = text.length;
}

const HfTokenizerFile *hf_tokenizer_file(const HfTokenizer *t, const char *name) {
    for (int i = 0; i < t->files; i++) {
        if (strcmp(t->file[i].name, name) == 0) return &t->file[i];
    }
    return NULL;
}

bool hf_tokenizer_write(const HfTokenizer *t, const char *folder, Error *err) {
    for (int i = 0; i < t->files; i++) {
        char *path = text_format("%s/%s", folder, t->file[i].name);
        bool ok = durable_write_file(path, t->file[i].text, t->file[i].bytes, err);
        free(path);
        if (!ok) return false;
    }
    return true;
}

void hf_tokenizer_free(HfTokenizer *t) {
    for (int i = 0; i < t->files; i++) free(t->file[i].text);
    free(t->eod_text);
    *t = (HfTokenizer){0};
}
