// Reads lists of shards from files. See data_args.h.
#include "llmc/data/data_args.h"

#include <stdlib.h>
#include <string.h>

#include "llmc/base/durable.h"
#include "llmc/base/json.h"
#include "llmc/base/json_line.h"

enum { MAX_BYTES = 1 << 24 };
#define SPACE " \t\r\n\v\f"

static char *read_text(const char *path, uint64_t *bytes, Error *err) {
    char *text = durable_read_file(path, MAX_BYTES, bytes, err);
    if (!text && err) err->code = EXIT_USAGE;
    if (text && strlen(text) != *bytes) {
        usage_error(err, "%s contains NUL bytes; use a text file", path);
        free(text);
        return NULL;
    }
    return text;
}

// Splits the text at white space and takes ownership of it.
static void cut_words(DataWords *words, char *text) {
    char *rest = text;
    *words = (DataWords){.text = text};
    for (char *word; (word = strtok_r(rest, SPACE, &rest));) {
        words->items = grow_array(words->items, words->count, sizeof *words->items, "the list of shards");
        words->items[words->count++] = word;
    }
}

bool data_args_read(DataWords *words, const char *path, Error *err) {
    uint64_t bytes;
    char *text = read_text(path, &bytes, err);
    if (!text) return false;
    cut_words(words, text);
    if (words->count) return true;
    data_words_free(words);
    return usage_error(err, "--data-args-path %s is empty; list shards as for --data-path", path);
}

// Joins the elements of a list, each followed by a space (malloc'ed). Returns NULL if an element is
// not a single word or number.
static char *join(const cJSON *list) {
    Text text = {0};
    const cJSON *item;
    text_add(&text, "%s", "");
    cJSON_ArrayForEach(item, list) {
        const char *word = cJSON_IsString(item) ? item->valuestring : "";
        if (cJSON_IsNumber(item)) {
            text_add(&text, "%.17g ", item->valuedouble);
        } else if (*word && !strpbrk(word, SPACE)) {
            text_add(&text, "%s ", word);
        } else {
            text_free(&text);
            return NULL;
        }
    }
    return text.data;
}

static bool read_member(DataWords *words, const cJSON *object, const char *name, const char *path,
                        Error *err) {
    const cJSON *member = cJSON_GetObjectItemCaseSensitive(object, name);
    char *text = cJSON_IsString(member)  ? xstrdup(member->valuestring)
                 : cJSON_IsArray(member) ? join(member)
                                         : NULL;
    if (text) cut_words(words, text);
    if (text || cJSON_IsNull(member)) return true;
    return usage_error(err,
                       "--per-split-data-args-path %s: \"%s\" is %s; write a list of prefixes, with or "
                       "without weights before them",
                       path, name, member ? "not a list of words" : "missing");
}

bool data_args_read_splits(DataWords words[SPLITS], const char *path, Error *err) {
    static const char *const names[SPLITS] = {"train", "valid", "test"};
    uint64_t bytes;
    char *text = read_text(path, &bytes, err);
    if (!text) return false;
    cJSON *object = json_parse_object(text, bytes);
    free(text);
    for (int s = 0; s < SPLITS; s++) words[s] = (DataWords){0};
    bool ok = object || usage_error(err,
                                    "--per-split-data-args-path %s is not a JSON object; use one with "
                                    "\"train\", \"valid\" and \"test\"",
                                    path);
    for (int s = 0; ok && s < SPLITS; s++) ok = read_member(&words[s], object, names[s], path, err);
    cJSON_Delete(object);
    for (int s = 0; !ok && s < SPLITS; s++) data_words_free(&words[s]);
    return ok;
}

void data_words_free(DataWords *words) {
    free(words->items);
    free(words->text);
    *words = (DataWords){0};
}
