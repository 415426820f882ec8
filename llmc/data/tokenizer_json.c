// Reads tokenizer.json. See tokenizer_json.h. Unsupported features are refused with one line,
// because ignoring them would change the ids.
#include "llmc/data/tokenizer_json.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "llmc/base/durable.h"
#include "llmc/base/json.h"
#include "llmc/base/utf8.h"
#include "llmc/data/symbols.h"
#include "llmc/data/tokenizer_parser.h"

typedef TokenizerParser Parser;

// Returns the file's JSON object, or NULL with err set.
static cJSON *read_object(const char *path, Error *err) {
    size_t bytes;
    char *text = vocabulary_file(path, "--tokenizer-model must be a tokenizer.json or its directory", &bytes,
                                 err);
    if (!text) return NULL;
    bool zero = json_has_zero(text, bytes), good = !zero && utf8_valid_prefix(text, bytes) == bytes;
    cJSON *root = good ? json_parse_object(text, bytes) : NULL;
    free(text);
    if (root) return root;
    if (zero) data_error(err, "%s contains U+0000, which is not supported in tokens", path);
    else data_error(err, "%s is not a JSON object in UTF-8; download it again", path);
    return NULL;
}

// ---- the vocabulary and the added tokens ----

static const char *content_of(const cJSON *added) { return json_member_string(added, "content"); }

static int added_id(const Parser *r, const char *text) {
    const cJSON *entry;
    int64_t id;
    cJSON_ArrayForEach(entry, r->added) {
        const char *content = content_of(entry);
        if (content && !strcmp(content, text) && json_member_int64(entry, "id", 0, r->size - 1, &id))
            return (int)id;
    }
    return -1;
}

static int token_id(const Parser *r, const char *text) {
    int id = added_id(r, text);
    return id >= 0 ? id : symbols_find(&r->symbols, text, strlen(text));
}

// Assigns the id of an added token: the vocabulary's id of its text, or else the next id after the
// vocabulary in list order. `tokenizers` assigns these ids whatever the file says, so a file with
// other ids is refused.
static bool assign_added_id(Parser *r, const cJSON *entry, int most) {
    const char *text = content_of(entry);
    int64_t id;
    if (!text || !*text) return REFUSE("%s: an added token has no \"content\"", r->path);
    if (!json_member_int64(entry, "id", 0, most - 1, &id)) {
        return REFUSE(
            "%s: the id of the added token \"%.80s\" is not an integer from 0 to %d; use a "
            "vocabulary with ids 0..n-1",
            r->path, text, most - 1);
    }
    int own = symbols_find(&r->symbols, text, strlen(text));
    if (own >= 0 && own != id) {
        return REFUSE("%s: the added token \"%.80s\" has id %d, but %d in the vocabulary", r->path, text,
                      (int)id, own);
    }
    const char *other = r->of_id[id] ? content_of(r->of_id[id]) : own < 0 ? r->symbols.of_id[id] : NULL;
    if (other) {
        return REFUSE("%s: \"%.80s\" and \"%.80s\" have the same id %d; every token needs its own", r->path,
                      other, text, (int)id);
    }
    if (own < 0 && id != r->size) {
        return REFUSE("%s: the added token \"%.80s\" has id %d, but the next id is %d; sort the list by id",
                      r->path, text, (int)id, r->size);
    }
    r->of_id[id] = entry;
    r->size += own < 0;
    return true;
}

static bool add_token(Parser *r, const cJSON *entry, int id) {
    const char *text = content_of(entry);
    bool special, normalized, single, left, right;
    bool good = json_flag(entry, "special", false, &special) &&
                json_flag(entry, "normalized", !special, &normalized) &&
                json_flag(entry, "single_word", false, &single) && json_flag(entry, "lstrip", false, &left) &&
                json_flag(entry, "rstrip", false, &right);
    if (!good)
        return REFUSE("%s: the added token \"%.80s\" has a flag that is not true or false", r->path, text);
    if (single)
        return REFUSE("%s: the added token \"%.80s\" has single_word, which is not supported", r->path, text);
    size_t bytes = strlen(text);
    TextBuffer buffers[2] = {0};
    if (normalized) text = normalizer_apply(&r->out->normalizer, text, &bytes, buffers);
    AddedToken token = {(char *)text, bytes, id, left, right, -1};
    if (bytes) added_tokens_add(normalized ? &r->out->normalized : &r->out->raw, token);
    for (int i = 0; i < 2; i++) free(buffers[i].text);
    return bytes ||
           REFUSE("%s: the normalizer removes the added token \"%.80s\"", r->path, content_of(entry));
}

static bool read_added(Parser *r) {
    const char *twice = NULL;
    for (int id = 0; id < r->size; id++) {
        if (r->of_id[id] && !add_token(r, r->of_id[id], id)) return false;
    }
    if (added_tokens_complete(&r->out->raw, &twice) && added_tokens_complete(&r->out->normalized, &twice))
        return true;
    return REFUSE("%s: the added token \"%.80s\" occurs twice; remove one", r->path, twice);
}

static const char *text_of(const Parser *r, int id) {
    return r->symbols.of_id[id] ? r->symbols.of_id[id] : r->of_id[id] ? content_of(r->of_id[id]) : NULL;
}

// Returns the byte of "<0xE9>", or -1 for other texts.
static int byte_of(const char *text, size_t length) {
    unsigned byte;
    bool good = length == 6 && !memcmp(text, "<0x", 3) && text[5] == '>' && isxdigit((uint8_t)text[3]) &&
                isxdigit((uint8_t)text[4]) && sscanf(text + 3, "%2x", &byte) == 1;
    return good ? (int)byte : -1;
}

// Writes the bytes of a token of a BPE of characters as the decoder spells it, and returns their
// number. out is NULL: only counts. `tokenizers` decodes normalized added tokens as they match, for
// instance with a space before them. Older releases decode their content; special tokens are
// decoded like this here.
static size_t character_token_bytes(const Parser *r, int id, const char *text, char *out) {
    TextBuffer buffers[4] = {0};
    size_t length = strlen(text);
    bool special = true, normalized = false;
    if (r->of_id[id]) json_flag(r->of_id[id], "special", false, &special);
    if (!special) json_flag(r->of_id[id], "normalized", true, &normalized);
    if (normalized) text = normalizer_apply(&r->out->normalizer, text, &length, buffers);
    text = normalizer_apply(&r->spelling, text, &length, buffers + 2);
    int byte = r->decode_bytes ? byte_of(text, length) : -1;
    char one = (char)byte;
    if (byte >= 0) {
        text = &one;
        length = 1;
    }
    if (out) memcpy(out, text, length);
    for (int i = 0; i < 4; i++) free(buffers[i].text);
    return length;
}

// Writes the bytes that a token stands for and returns their number. Vocabulary entries of a
// byte-level BPE use the byte alphabet, even those that are also added tokens.
static size_t token_bytes(const Parser *r, const Alphabet *alphabet, int id, const char *text, char *out) {
    size_t length = strlen(text);
    bool foreign;
    if (r->characters) return character_token_bytes(r, id, text, out);
    if (r->symbols.of_id[id]) return symbol_bytes(alphabet, text, length, out, &foreign);
    memcpy(out, text, length);
    return length;
}

// Fills the table with the ids and bytes of all tokens.
static bool fill_table(Parser *r, const Alphabet *alphabet) {
    TokenTable *table = &r->out->table;
    size_t total = 0;
    for (int id = 0; id < r->size; id++) {
        const char *text = text_of(r, id);
        if (!text) return REFUSE("%s: no token has the id %d; use a vocabulary with ids 0..n-1", r->path, id);
        total += r->characters ? character_token_bytes(r, id, text, NULL) : strlen(text);
    }
    token_table_init(table, r->size, total);
    for (int id = 0; id < r->size; id++) {
        char *out = table->bytes + table->start[id];
        table->start[id + 1] = table->start[id] + token_bytes(r, alphabet, id, text_of(r, id), out);
    }
    return true;
}

// Adds all entries of the vocabulary as whole pieces, for ignore_merges.
static void add_whole_pieces(Parser *r, const Alphabet *alphabet) {
    TextIds *whole = &r->out->bpe.whole;
    size_t total = 0;
    for (int id = 0; id < r->symbols.limit; id++)
        total += r->symbols.of_id[id] ? strlen(r->symbols.of_id[id]) : 0;
    char *out = r->out->texts = xmalloc(total + 1, "the vocabulary");
    text_ids_init(whole, r->symbols.count);
    for (int id = 0; id < r->symbols.limit; id++) {
        const char *text = r->symbols.of_id[id];
        size_t length = text ? strlen(text) : 0;
        bool foreign = false;
        if (!length) continue;
        if (r->characters) memcpy(out, text, length);
        else length = symbol_bytes(alphabet, text, length, out, &foreign);
        if (!foreign) text_ids_add(whole, out, length, id);
        out += length;
    }
}

// Fills the tables of the initial symbols of a BPE of characters.
static bool read_characters(Parser *r) {
    Bpe *bpe = &r->out->bpe;
    const char *unknown = json_member_string(r->model, "unk_token");
    bool complete = true;
    if (!json_flag(r->model, "fuse_unk", false, &bpe->fuse_unknown))
        return REFUSE("%s: \"fuse_unk\" is not true or false", r->path);
    bpe->unknown = unknown ? symbols_find(&r->symbols, unknown, strlen(unknown)) : -1;
    if (unknown && bpe->unknown < 0)
        return REFUSE("%s: the \"unk_token\" %.80s is not in the vocabulary", r->path, unknown);
    bpe->character_id = xmalloc(CODE_POINTS * sizeof *bpe->character_id, "the vocabulary");
    for (int c = 0; c < CODE_POINTS; c++) bpe->character_id[c] = -1;
    for (int id = 0; id < r->symbols.limit; id++) {
        const char *text = r->symbols.of_id[id];
        uint32_t c;
        size_t length = text ? strlen(text) : 0;
        if (length && utf8_next(text, length, &c) == length) bpe->character_id[c] = id;
    }
    for (int byte = 0; byte < 256; byte++) {
        char text[8];
        int length = snprintf(text, sizeof text, "<0x%02X>", (unsigned)byte);
        bpe->byte_id[byte] = symbols_find(&r->symbols, text, (size_t)length);
        complete = complete && bpe->byte_id[byte] >= 0;
    }
    return complete || unknown ||
           REFUSE(
               "%s: the vocabulary has neither \"unk_token\" nor all 256 tokens <0x00> to <0xFF>; text "
               "would be lost",
               r->path);
}

static bool read_tokens(Parser *r) {
    bool ignore_merges;
    if (!json_flag(r->model, "ignore_merges", false, &ignore_merges))
        return REFUSE("%s: \"ignore_merges\" is not true or false", r->path);
    r->vocab = cJSON_GetObjectItemCaseSensitive(r->model, "vocab");
    r->merges = cJSON_GetObjectItemCaseSensitive(r->model, "merges");
    r->added = cJSON_GetObjectItemCaseSensitive(r->root, "added_tokens");
    if (!cJSON_IsObject(r->vocab)) return REFUSE("%s: the model has no \"vocab\"", r->path);
    if (!cJSON_IsArray(r->merges)) return REFUSE("%s: the model has no list of \"merges\"", r->path);
    if (!json_absent(r->added) && !cJSON_IsArray(r->added))
        return REFUSE("%s: \"added_tokens\" is not a list", r->path);
    const int most = cJSON_GetArraySize(r->vocab) + cJSON_GetArraySize(r->added);
    const Alphabet alphabet = byte_alphabet();
    const cJSON *entry;
    symbols_init(&r->symbols, most);
    bpe_init(&r->out->bpe, cJSON_GetArraySize(r->merges));
    r->of_id = xcalloc((size_t)most + 1, sizeof(*r->of_id), "the vocabulary");
    cJSON_ArrayForEach(entry, r->vocab) {
        if (!symbols_add(&r->symbols, entry->string, entry, r->path, r->err)) return false;
    }
    r->size = r->symbols.count;
    cJSON_ArrayForEach(entry, r->added) {
        if (!assign_added_id(r, entry, most)) return false;
    }
    if (ignore_merges) add_whole_pieces(r, &alphabet);
    return (r->characters ? read_characters(r)
                          : symbols_of_bytes(&r->symbols, &alphabet, r->out->bpe.byte_id, r->path, r->err)) &&
           fill_table(r, &alphabet) && read_added(r);
}

// ---- the model ----

// Parses a merge: "left right" or ["left", "right"].
static bool parse_merge(const Parser *r, const cJSON *item, BpeMerge *merge, const char **why) {
    const cJSON *left = item->child, *right = left ? left->next : NULL;
    if (cJSON_IsString(item))
        return symbols_merge_line(&r->symbols, item->valuestring, strlen(item->valuestring), merge, why);
    *why = "is not two symbols";
    if (!cJSON_IsArray(item) || !cJSON_IsString(left) || !cJSON_IsString(right) || right->next) return false;
    const char *a = left->valuestring, *b = right->valuestring;
    return symbols_merge(&r->symbols, a, strlen(a), b, strlen(b), merge, why);
}

// Returns false if the symbol has a `space` after another character.
static bool starts_pieces(const Metaspace *metaspace, const char *symbol) {
    size_t bytes = strlen(symbol);
    return metaspace_end(metaspace, symbol, bytes, 0) == bytes;
}

static bool read_merges(Parser *r) {
    const cJSON *item;
    int32_t rank = 0;
    bool divides = true;
    cJSON_ArrayForEach(item, r->merges) {
        BpeMerge merge = {.rank = rank};
        const char *why;
        if (!parse_merge(r, item, &merge, &why)) {
            return REFUSE("%s: merge %d \"%.80s\" %s", r->path, (int)rank + 1,
                          cJSON_IsString(item) ? item->valuestring : "", why);
        }
        bpe_add(&r->out->bpe, merge);
        divides = divides && r->characters &&
                  starts_pieces(&r->out->metaspace, r->symbols.of_id[merge.merged]);
        rank++;
    }
    // Cutting texts into words only saves time. The ids stay the same if no merge crosses the cuts.
    Metaspace *metaspace = &r->out->metaspace;
    bool known = symbols_find(&r->symbols, metaspace->space, strlen(metaspace->space)) >= 0;
    if (!metaspace->split && (!divides || !known || r->out->bpe.whole.slots)) metaspace->whole = true;
    return true;
}

static bool check_model(Parser *r) {
    static const char *const empty[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    const char *type = json_member_string(r->model, "type");
    const cJSON *dropout = cJSON_GetObjectItemCaseSensitive(r->model, "dropout");
    if (!cJSON_IsObject(r->model)) return REFUSE("%s has no \"model\"; use a tokenizer.json", r->path);
    if (type && strcmp(type, "BPE") != 0) {
        return REFUSE(
            "%s: a %.40s tokenizer is not supported; use a BPE, as in GPT-2, Llama, Mistral or Qwen", r->path,
            type);
    }
    for (size_t i = 0; i < sizeof empty / sizeof *empty; i++) {
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(r->model, empty[i]);
        if (!json_absent(item) && !(cJSON_IsString(item) && !*item->valuestring))
            return REFUSE("%s: the model's \"%s\" is not supported; set it to null", r->path, empty[i]);
    }
    if (!json_absent(dropout) && !(cJSON_IsNumber(dropout) && dropout->valuedouble == 0))
        return REFUSE("%s: the model's \"dropout\" would make its ids random; set it to null", r->path);
    return true;
}

// ---- end-of-document token ----

// Reads eos_token of tokenizer_config.json, a string or an object with "content". *found is NULL if
// the file or the entry is missing.
static bool read_config(const char *path, char **found, Error *err) {
    *found = NULL;
    if (!durable_exists(path)) return true;
    cJSON *root = read_object(path, err);
    if (!root) return false;
    const cJSON *eos = cJSON_GetObjectItemCaseSensitive(root, "eos_token");
    const char *text = cJSON_IsString(eos) ? eos->valuestring : content_of(eos);
    if (text) *found = xstrdup(text);
    cJSON_Delete(root);
    return true;
}

static bool find_eod(Parser *r, const char *wanted) {
    static const char *const common[] = {END_OF_TEXT, "<|end_of_text|>",
                                         "<\uff5cend\u2581of\u2581sentence\uff5c>", "</s>"};
    const char *slash = strrchr(r->path, '/');
    char *config = text_format("%.*stokenizer_config.json", (int)(slash ? slash + 1 - r->path : 0), r->path);
    char *found = NULL;
    int *eod = &r->out->table.eod;
    bool good = wanted || read_config(config, &found, r->err);
    const char *name = wanted ? wanted : found;
    if (name) *eod = token_id(r, name);
    for (size_t i = 0; i < sizeof common / sizeof *common && !name && *eod < 0; i++)
        *eod = token_id(r, common[i]);
    if (good && *eod < 0) {
        good = name ? REFUSE("%s has no token \"%.80s\", the end-of-document token according to %s", r->path,
                             name, wanted ? "--tokenizer-eod" : config)
                    : REFUSE("%s: unknown end-of-document token; name it with --tokenizer-eod", r->path);
    }
    free(found);
    free(config);
    return good;
}

void bpe_parts_free(BpeParts *parts) {
    added_tokens_free(&parts->raw);
    added_tokens_free(&parts->normalized);
    normalizer_free(&parts->normalizer);
    piece_steps_free(&parts->steps);
    bpe_free(&parts->bpe);
    token_table_free(&parts->table);
    free(parts->texts);
    *parts = (BpeParts){0};
}

char *tokenizer_json_path(const char *model) {
    struct stat status;
    bool folder = !stat(model, &status) && S_ISDIR(status.st_mode);
    size_t length = strlen(model);
    while (folder && length > 1 && model[length - 1] == '/') length--;
    return folder ? text_format("%.*s/tokenizer.json", (int)length, model) : xstrdup(model);
}

bool tokenizer_json_read(BpeParts *out, const char *model, const char *eod_token, Error *err) {
    char *path = tokenizer_json_path(model);
    Parser parser = {.path = path, .out = out, .err = err}, *r = &parser;
    *out = (BpeParts){0};
    cJSON *root = read_object(path, err);
    bool good = root != NULL;
    if (good) {
        r->root = root;
        r->model = cJSON_GetObjectItemCaseSensitive(root, "model");
        good = check_model(r) && tokenizer_parts_read(r) && read_tokens(r) && read_merges(r) &&
               tokenizer_post_processor_read(r) && find_eod(r, eod_token);
    }
    cJSON_Delete(root);
    symbols_free(&r->symbols);
    normalizer_free(&r->spelling);
    free(r->of_id);
    free(path);
    if (!good) bpe_parts_free(out);
    return good;
}
