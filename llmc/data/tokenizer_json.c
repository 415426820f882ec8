// Reads tokenizer.json. See tokenizer_json.h. Unsupported features are refused with one line,
// because ignoring them would change the ids.
#include "llmc/data/tokenizer_json.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "llmc/base/durable.h"
#include "llmc/base/json.h"
#include "llmc/base/utf8.h"
#include "llmc/data/symbols.h"

enum { MAX_NESTING = 8 };

typedef struct Parser {
    const char *path;
    const cJSON *root, *model, *vocab, *merges, *added;  // parts of the file
    Symbols symbols;                                     // the model's "vocab"
    int size;                                            // number of ids
    const cJSON **of_id;                                 // (size) the added token with this id, or NULL
    ByteLevel *out;
    Error *err;
} Parser;

#define REFUSE(...) data_error(r->err, __VA_ARGS__)

static const char *type_of(const cJSON *item) {
    const char *type = json_member_string(item, "type");
    return type ? type : "without a type";
}

static bool is_type(const cJSON *item, const char *type) { return !strcmp(type_of(item), type); }

static bool is_absent(const cJSON *item) { return !item || cJSON_IsNull(item); }

// Reads an optional boolean member. Returns false if it is something else.
static bool read_flag(const cJSON *object, const char *name, bool missing, bool *value) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
    *value = is_absent(item) ? missing : cJSON_IsTrue(item);
    return is_absent(item) || cJSON_IsBool(item);
}

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
    bool good = read_flag(entry, "special", false, &special) &&
                read_flag(entry, "normalized", !special, &normalized) &&
                read_flag(entry, "single_word", false, &single) && read_flag(entry, "lstrip", false, &left) &&
                read_flag(entry, "rstrip", false, &right);
    if (!good)
        return REFUSE("%s: the added token \"%.80s\" has a flag that is not true or false", r->path, text);
    if (single)
        return REFUSE("%s: the added token \"%.80s\" has single_word, which is not supported", r->path, text);
    size_t bytes = strlen(text);
    char *own = xmalloc(NFC_MOST_GROWTH * bytes, "added tokens");
    if (normalized && r->out->nfc) bytes = nfc_normalize(r->out->nfc, text, bytes, own);
    else memcpy(own, text, bytes);
    AddedToken token = {own, bytes, id, left, right, -1};
    added_tokens_add(normalized ? &r->out->normalized : &r->out->raw, token);
    free(own);
    return true;
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

// Fills the table with the ids and bytes of all tokens. Vocabulary entries use the byte alphabet,
// even those that are also added tokens. With ignore_merges they are added as whole pieces.
static bool fill_table(Parser *r, const Alphabet *alphabet, bool ignore_merges) {
    TokenTable *table = &r->out->table;
    size_t total = 0;
    for (int id = 0; id < r->size; id++) {
        const char *text = text_of(r, id);
        if (!text) return REFUSE("%s: no token has the id %d; use a vocabulary with ids 0..n-1", r->path, id);
        total += strlen(text);
    }
    token_table_init(table, r->size, total);
    if (ignore_merges) text_ids_init(&r->out->bpe.whole, r->symbols.count);
    for (int id = 0; id < r->size; id++) {
        const char *text = text_of(r, id);
        char *out = table->bytes + table->start[id];
        size_t length = strlen(text);
        bool foreign = true;
        if (r->symbols.of_id[id]) length = symbol_bytes(alphabet, text, length, out, &foreign);
        else memcpy(out, text, length);
        if (ignore_merges && !foreign) text_ids_add(&r->out->bpe.whole, out, length, id);
        table->start[id + 1] = table->start[id] + length;
    }
    return true;
}

static bool read_tokens(Parser *r) {
    bool ignore_merges;
    if (!read_flag(r->model, "ignore_merges", false, &ignore_merges))
        return REFUSE("%s: \"ignore_merges\" is not true or false", r->path);
    r->vocab = cJSON_GetObjectItemCaseSensitive(r->model, "vocab");
    r->merges = cJSON_GetObjectItemCaseSensitive(r->model, "merges");
    r->added = cJSON_GetObjectItemCaseSensitive(r->root, "added_tokens");
    if (!cJSON_IsObject(r->vocab)) return REFUSE("%s: the model has no \"vocab\"", r->path);
    if (!cJSON_IsArray(r->merges)) return REFUSE("%s: the model has no list of \"merges\"", r->path);
    if (!is_absent(r->added) && !cJSON_IsArray(r->added))
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
    return symbols_of_bytes(&r->symbols, &alphabet, r->out->bpe.byte_id, r->path, r->err) &&
           fill_table(r, &alphabet, ignore_merges) && read_added(r);
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

static bool read_merges(Parser *r) {
    const cJSON *item;
    int32_t rank = 0;
    cJSON_ArrayForEach(item, r->merges) {
        BpeMerge merge = {.rank = rank};
        const char *why;
        if (!parse_merge(r, item, &merge, &why)) {
            return REFUSE("%s: merge %d \"%.80s\" %s", r->path, (int)rank + 1,
                          cJSON_IsString(item) ? item->valuestring : "", why);
        }
        bpe_add(&r->out->bpe, merge);
        rank++;
    }
    return true;
}

static bool check_model(Parser *r) {
    static const char *const empty[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    const char *type = json_member_string(r->model, "type");
    const cJSON *dropout = cJSON_GetObjectItemCaseSensitive(r->model, "dropout");
    bool byte_fallback;
    if (!cJSON_IsObject(r->model)) return REFUSE("%s has no \"model\"; use a tokenizer.json", r->path);
    if (type && strcmp(type, "BPE") != 0) {
        return REFUSE(
            "%s: a %.40s tokenizer is not supported; use a byte-level BPE, as in GPT-2, Llama 3 or Qwen",
            r->path, type);
    }
    for (size_t i = 0; i < sizeof empty / sizeof *empty; i++) {
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(r->model, empty[i]);
        if (!is_absent(item) && !(cJSON_IsString(item) && !*item->valuestring))
            return REFUSE("%s: the model's \"%s\" is not supported; byte-level BPE has none", r->path,
                          empty[i]);
    }
    if (!is_absent(dropout) && !(cJSON_IsNumber(dropout) && dropout->valuedouble == 0))
        return REFUSE("%s: the model's \"dropout\" would make its ids random; set it to null", r->path);
    if (!read_flag(r->model, "byte_fallback", false, &byte_fallback) || byte_fallback)
        return REFUSE("%s: the model's \"byte_fallback\" is not supported; byte-level BPE has none", r->path);
    return true;
}

// ---- normalizer, pre_tokenizer, post_processor, decoder ----

// Calls `read` for a part of the tokenizer, or for each part of a Sequence, which lists them in
// `members`.
typedef bool (*ReadPart)(Parser *r, const cJSON *part);

static bool each_part(Parser *r, const cJSON *part, const char *members, ReadPart read, int depth) {
    if (is_absent(part)) return true;
    if (!is_type(part, "Sequence")) return read(r, part);
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(part, members), *item;
    if (!cJSON_IsArray(list) || depth == MAX_NESTING)
        return REFUSE("%s: a Sequence has no \"%s\"", r->path, members);
    cJSON_ArrayForEach(item, list) {
        if (!each_part(r, item, members, read, depth + 1)) return false;
    }
    return true;
}

static bool read_normalizer(Parser *r, const cJSON *part) {
    if (!is_type(part, "NFC"))
        return REFUSE("%s: the normalizer %.40s is not supported; only NFC is", r->path, type_of(part));
    if (!r->out->nfc) r->out->nfc = nfc_create();  // NFC is idempotent
    return true;
}

static bool add_step(Parser *r, const char *regex, bool prefix_space) {
    PieceSteps *steps = &r->out->steps;
    if (steps->count == MOST_PIECE_STEPS)
        return REFUSE("%s: the pre_tokenizer has more than %d steps", r->path, MOST_PIECE_STEPS);
    PiecePattern *pattern = regex ? piece_pattern_compile(regex, r->path, r->err) : NULL;
    if (regex && !pattern) return false;
    steps->step[steps->count++] = (PieceStep){prefix_space, pattern};
    return true;
}

// Reads {"Regex": ...}, or {"String": ...} as literal text.
static bool read_split(Parser *r, const cJSON *part) {
    const cJSON *pattern = cJSON_GetObjectItemCaseSensitive(part, "pattern");
    const char *regex = json_member_string(pattern, "Regex"), *text = json_member_string(pattern, "String");
    const char *behavior = json_member_string(part, "behavior");
    bool invert;
    if (!behavior || strcmp(behavior, "Isolated") != 0 || !read_flag(part, "invert", false, &invert) ||
        invert)
        return REFUSE("%s: Split with \"behavior\" other than Isolated, or \"invert\", is not supported",
                      r->path);
    if (regex) return add_step(r, regex, false);
    if (!text || !*text) return REFUSE("%s: Split has no pattern", r->path);
    char *quoted = xmalloc(2 * strlen(text) + 1, "a pattern"), *out = quoted;
    for (; *text; *out++ = *text++) {
        if (strchr("\\^$.[|()?*+{}", *text)) *out++ = '\\';
    }
    *out = 0;
    bool good = add_step(r, quoted, false);
    free(quoted);
    return good;
}

// A step after ByteLevel would see the byte alphabet instead of text.
static bool read_pre_tokenizer(Parser *r, const cJSON *part) {
    bool prefix, regex, single;
    if (r->out->steps.count && !r->out->steps.step[r->out->steps.count - 1].pattern)
        return REFUSE("%s: the pre_tokenizer has steps after ByteLevel, which is not supported", r->path);
    if (is_type(part, "Split")) return read_split(r, part);
    if (is_type(part, "Digits") && read_flag(part, "individual_digits", false, &single))
        return add_step(r, single ? "\\p{N}" : "\\p{N}+", false);
    if (is_type(part, "ByteLevel") && read_flag(part, "add_prefix_space", true, &prefix) &&
        read_flag(part, "use_regex", true, &regex)) {
        // the last step has no pattern, which marks the end
        return (!regex || add_step(r, GPT2_PATTERN, prefix)) && add_step(r, NULL, prefix && !regex);
    }
    return REFUSE("%s: the pre_tokenizer %.40s is not supported; only ByteLevel, Split and Digits are",
                  r->path, type_of(part));
}

// Appends the ids of one token of a template.
static bool append_template_ids(Parser *r, const cJSON *template, const char *name, int *side) {
    const cJSON *tokens = cJSON_GetObjectItemCaseSensitive(template, "special_tokens"), *item;
    const cJSON *ids = cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItemCaseSensitive(tokens, name),
                                                        "ids");
    AroundText *around = &r->out->around;
    int64_t id;
    if (!cJSON_IsArray(ids))
        return REFUSE("%s: the post_processor does not define the ids of \"%.80s\"", r->path, name);
    cJSON_ArrayForEach(item, ids) {
        if (around->before + around->after == MOST_AROUND || !json_int64(item, 0, r->size - 1, &id))
            return REFUSE("%s: the post_processor has unknown or too many ids for \"%.80s\"", r->path, name);
        around->id[around->before + around->after] = (int32_t)id;
        ++*side;
    }
    return true;
}

static bool read_template(Parser *r, const cJSON *template) {
    const cJSON *single = cJSON_GetObjectItemCaseSensitive(template, "single"), *item;
    AroundText *around = &r->out->around;
    int texts = 0;
    if (around->before + around->after) return REFUSE("%s: the post_processor has two templates", r->path);
    cJSON_ArrayForEach(item, single) {
        const cJSON *token = cJSON_GetObjectItemCaseSensitive(item, "SpecialToken");
        const char *name = token ? json_member_string(token, "id") : NULL;
        texts += cJSON_GetObjectItemCaseSensitive(item, "Sequence") != NULL;
        if (token &&
            (!name || !append_template_ids(r, template, name, texts ? &around->after : &around->before)))
            return name ? false : REFUSE("%s: a token of the post_processor has no \"id\"", r->path);
    }
    return texts == 1 ||
           REFUSE("%s: the post_processor's template does not contain exactly one text", r->path);
}

static bool read_post_processor(Parser *r, const cJSON *part) {
    if (is_type(part, "ByteLevel")) return true;  // affects offsets only, not ids
    if (is_type(part, "TemplateProcessing")) return read_template(r, part);
    return REFUSE("%s: the post_processor %.40s is not supported; only TemplateProcessing is", r->path,
                  type_of(part));
}

static bool read_decoder(Parser *r, const cJSON *part) {
    return is_type(part, "ByteLevel") ||
           REFUSE("%s: the decoder %.40s is not supported; only ByteLevel is", r->path, type_of(part));
}

static bool read_parts(Parser *r) {
    static const struct {
        const char *name, *members;
        ReadPart read;
    } parts[] = {{"normalizer", "normalizers", read_normalizer},
                 {"pre_tokenizer", "pretokenizers", read_pre_tokenizer},
                 {"decoder", "decoders", read_decoder}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        const cJSON *part = cJSON_GetObjectItemCaseSensitive(r->root, parts[i].name);
        if (!each_part(r, part, parts[i].members, parts[i].read, 0)) return false;
    }
    PieceSteps *steps = &r->out->steps;
    if (!steps->count || steps->step[steps->count - 1].pattern)
        return REFUSE("%s: the pre_tokenizer does not end in ByteLevel; only byte-level BPE is supported",
                      r->path);
    if (!steps->step[steps->count - 1].prefix_space && steps->count > 1) steps->count--;  // it is a no-op
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

void byte_level_free(ByteLevel *parts) {
    added_tokens_free(&parts->raw);
    added_tokens_free(&parts->normalized);
    nfc_free(parts->nfc);
    piece_steps_free(&parts->steps);
    bpe_free(&parts->bpe);
    token_table_free(&parts->table);
    *parts = (ByteLevel){0};
}

char *tokenizer_json_path(const char *model) {
    struct stat status;
    bool folder = !stat(model, &status) && S_ISDIR(status.st_mode);
    size_t length = strlen(model);
    while (folder && length > 1 && model[length - 1] == '/') length--;
    return folder ? text_format("%.*s/tokenizer.json", (int)length, model) : xstrdup(model);
}

bool tokenizer_json_read(ByteLevel *out, const char *model, const char *eod_token, Error *err) {
    char *path = tokenizer_json_path(model);
    Parser parser = {.path = path, .out = out, .err = err}, *r = &parser;
    *out = (ByteLevel){0};
    cJSON *root = read_object(path, err);
    bool good = root != NULL;
    if (good) {
        r->root = root;
        r->model = cJSON_GetObjectItemCaseSensitive(root, "model");
        good = check_model(r) && read_parts(r) && read_tokens(r) && read_merges(r) &&
               each_part(r, cJSON_GetObjectItemCaseSensitive(root, "post_processor"), "processors",
                         read_post_processor, 0) &&
               find_eod(r, eod_token);
    }
    cJSON_Delete(root);
    symbols_free(&r->symbols);
    free(r->of_id);
    free(path);
    if (!good) byte_level_free(out);
    return good;
}
