// Reads and writes config.json according to a family's tables. See hf_family.h. The file is treated
// as untrusted input.
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/json.h"
#include "llmc/base/json_line.h"
#include "dev/convert/hf_family.h"

enum { TEXT_BYTES = 256, MOST_ENTRIES = 64, CONFIG_MAX_BYTES = 1 << 20 };

// Returns the value of a key; "a.b" means member b of member a. NULL: missing.
static const cJSON *member(const cJSON *config, const char *key) {
    const char *dot = strchr(key, '.');
    char first[64];
    if (!dot) return cJSON_GetObjectItemCaseSensitive(config, key);
    snprintf(first, sizeof first, "%.*s", (int)(dot - key), key);
    return cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItemCaseSensitive(config, first), dot + 1);
}

// Formats a value as in the tables. A list that repeats a single string gives that string in
// brackets.
static void text_of(const cJSON *value, char text[TEXT_BYTES]) {
    const cJSON *first = cJSON_IsArray(value) && cJSON_IsString(value->child) ? value->child : NULL;
    const cJSON *other = first;
    while (other && cJSON_IsString(other) && strcmp(other->valuestring, first->valuestring) == 0)
        other = other->next;
    if (first && !other) snprintf(text, TEXT_BYTES, "[%s]", first->valuestring);
    else if (!value) snprintf(text, TEXT_BYTES, "(none)");
    else if (cJSON_IsObject(value)) snprintf(text, TEXT_BYTES, "{}");
    else model_flag_text(value, text, TEXT_BYTES);
}

// State while config.json is converted to flags.
typedef struct Reading {
    const cJSON *config;
    const char *path;
    cJSON *arguments;  // model arguments found so far
    Error *err;
} Reading;

// Sets an argument and checks it against earlier values. negated: the key is the logical negation
// of the argument.
static bool take_either(const Reading *r, const char *key, const char *argument, const char *value,
                        bool negated) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(r->arguments, argument);
    const char *known = item ? item->valuestring : value;
    if (!item) cJSON_AddStringToObject(r->arguments, argument, value);
    if (strcmp(known, value) == 0) return true;
    return ckpt_error(r->err,
                      "%s has %s %.60s, but other keys imply %.60s; the trainer supports only a single "
                      "value, so import another model",
                      r->path, key, negated ? known : value, negated ? value : known);
}

static bool take(const Reading *r, const char *key, const char *argument, const char *value) {
    return take_either(r, key, argument, value, false);
}

static bool take_blocks(const Reading *r, const HfFamily *family) {
    if (family->like && !take_blocks(r, family->like)) return false;
    for (int i = 0; i < family->block_count; i++) {
        if (!take(r, family->name, family->blocks[i].argument, family->blocks[i].value)) return false;
    }
    return true;
}

static bool check_fixed(const Reading *r, const HfFamily *family) {
    if (family->like && !check_fixed(r, family->like)) return false;
    for (int i = 0; i < family->fixed_count; i++) {
        const HfFixed *fixed = &family->fixed[i];
        const cJSON *item = member(r->config, fixed->key);
        char text[TEXT_BYTES];
        if (!item && !fixed->needed) continue;
        text_of(item, text);
        if (options_choice(fixed->values, text) >= 0) continue;
        return ckpt_error(r->err,
                          "%s has %s '%.60s', which the trainer does not support: %s; import another model",
                          r->path, fixed->key, text, fixed->why);
    }
    return true;
}

static bool take_key(const Reading *r, const HfKey *key) {
    const cJSON *item = member(r->config, key->key);
    char text[TEXT_BYTES];
    if (!item || cJSON_IsNull(item))
        return !key->missing || take_either(r, key->key, key->argument, key->missing, key->negated);
    text_of(item, text);
    if (key->negated && cJSON_IsBool(item))
        return take_either(r, key->key, key->argument, cJSON_IsTrue(item) ? "false" : "true", true);
    if (!key->negated && cJSON_IsNumber(item)) return take(r, key->key, key->argument, text);
    return ckpt_error(r->err, "%s has %s '%.60s', which is not a %s; save or download it again", r->path,
                      key->key, text, key->negated ? "boolean" : "number");
}

static bool take_keys(const Reading *r, const HfFamily *family) {
    if (family->like && !take_keys(r, family->like)) return false;
    for (int i = 0; i < family->key_count; i++) {
        if (!family->keys[i].written_only && !take_key(r, &family->keys[i])) return false;
    }
    return true;
}

// The parameters of Llama 3.1's rope scaling, except the factor. The trainer supports only these
// values (llmc/model/gpt_init.c).
static const struct RopeNumber {
    const char *name, *text;
} ROPE_NUMBERS[] = {{"low_freq_factor", "1.0"},
                    {"high_freq_factor", "4.0"},
                    {"original_max_position_embeddings", "8192"}};
#define ROPE_TYPES "only linear, yarn and Llama 3.1's rope scaling, or none, are supported"

static bool refuse_rope(const Reading *r, const char *key, const cJSON *rope, const char *bad) {
    char text[TEXT_BYTES];
    text_of(cJSON_GetObjectItemCaseSensitive(rope, bad), text);
    return ckpt_error(r->err,
                      "%s has %s.%s '%.60s', which the trainer does not support: " ROPE_TYPES
                      "; import another model",
                      r->path, key, bad, text);
}

// Returns the first member that is present and not a number, or NULL.
static const char *not_a_number(const cJSON *rope, const char *const *names, int count) {
    for (int i = 0; i < count; i++) {
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(rope, names[i]);
        if (item && !cJSON_IsNull(item) && !cJSON_IsNumber(item)) return names[i];
    }
    return NULL;
}

static double number_or(const cJSON *object, const char *name, double otherwise) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
    return cJSON_IsNumber(item) ? item->valuedouble : otherwise;
}

static bool take_number(const Reading *r, const char *key, const char *argument, double value) {
    char text[TEXT_BYTES];
    if (fabs(value) < 1e15 && value == (double)(int64_t)value)
        snprintf(text, sizeof text, "%" PRId64, (int64_t)value);
    else format_real(value, text, sizeof text);
    return take(r, key, argument, text);
}

// Factor of YaRN's cosines and sines, as transformers computes it; 0: the trainer's default.
static double yarn_gain(const cJSON *rope, double factor) {
    double given = number_or(rope, "attention_factor", 0), m = number_or(rope, "mscale", 0),
           all = number_or(rope, "mscale_all_dim", 0);
    if (given || !m || !all || factor <= 1) return given;
    return (0.1 * m * log(factor) + 1) / (0.1 * all * log(factor) + 1);
}

// Without a factor, it is the ratio of the context lengths.
static bool take_yarn(const Reading *r, const char *key, const cJSON *rope) {
    static const char *const numbers[] = {"factor",          "original_max_position_embeddings",
                                          "beta_fast",       "beta_slow",
                                          "mscale",          "mscale_all_dim",
                                          "attention_factor"};
    const char *bad = not_a_number(rope, numbers, sizeof numbers / sizeof *numbers);
    const cJSON *truncate = cJSON_GetObjectItemCaseSensitive(rope, "truncate");
    double positions = number_or(r->config, "max_position_embeddings", 0),
           before = number_or(rope, numbers[1], positions);
    if (!bad && !(before >= 1 && before < 1e9)) bad = numbers[1];
    if (!bad && truncate && !cJSON_IsBool(truncate)) bad = "truncate";
    if (bad) return refuse_rope(r, key, rope, bad);
    double factor = number_or(rope, "factor", positions / before), gain = yarn_gain(rope, factor);
    cJSON_ReplaceItemInObject(r->arguments, "position_embedding_type", cJSON_CreateString("yarn"));
    return take_number(r, key, "rotary_scaling_factor", factor) &&
           take_number(r, key, "yarn_original_max_position_embeddings", before) &&
           take_number(r, key, "yarn_beta_fast", number_or(rope, "beta_fast", 32)) &&
           take_number(r, key, "yarn_beta_slow", number_or(rope, "beta_slow", 1)) &&
           take_number(r, key, "yarn_attention_factor", gain) &&
           take(r, key, "no_yarn_correction_range_round_to_int", cJSON_IsFalse(truncate) ? "true" : "false");
}

static bool take_llama3(const Reading *r, const char *key, const cJSON *rope) {
    for (size_t i = 0; i < sizeof ROPE_NUMBERS / sizeof *ROPE_NUMBERS; i++) {
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(rope, ROPE_NUMBERS[i].name);
        if (cJSON_GetNumberValue(item) != atof(ROPE_NUMBERS[i].text))
            return refuse_rope(r, key, rope, ROPE_NUMBERS[i].name);
    }
    char text[TEXT_BYTES];
    text_of(cJSON_GetObjectItemCaseSensitive(rope, "factor"), text);
    return take(r, key, "use_rope_scaling", "true") && take(r, key, "rope_scaling_factor", text);
}

// Reads the rope settings from `key`: "rope_scaling", or "rope_parameters" in newer folders.
static bool take_rope(const Reading *r, const char *key) {
    const cJSON *rope = cJSON_GetObjectItemCaseSensitive(r->config, key);
    const cJSON *factor = cJSON_GetObjectItemCaseSensitive(rope, "factor");
    const char *name = cJSON_GetObjectItemCaseSensitive(rope, "rope_type") ? "rope_type" : "type";
    char type[TEXT_BYTES], text[TEXT_BYTES];
    text_of(cJSON_GetObjectItemCaseSensitive(rope, name), type);
    text_of(factor, text);
    bool plain = options_choice("(none)|null|default", type) >= 0;
    if (plain && (!factor || cJSON_GetNumberValue(factor) == 1)) return true;
    if (strcmp(type, "yarn") == 0) return take_yarn(r, key, rope);
    bool linear = strcmp(type, "linear") == 0, llama3 = strcmp(type, "llama3") == 0;
    if (!plain && !linear && !llama3) return refuse_rope(r, key, rope, name);
    if (plain || !cJSON_IsNumber(factor)) return refuse_rope(r, key, rope, "factor");
    return linear ? take(r, key, "rotary_seq_len_interpolation_factor", text) : take_llama3(r, key, rope);
}

static bool take_rotations(const Reading *r) {
    const char *positions = json_member_string(r->arguments, "position_embedding_type");
    if (!positions || strcmp(positions, "rope") != 0) return true;
    return take_rope(r, "rope_scaling") && take_rope(r, "rope_parameters");
}

// --- Sliding windows ---

static bool refuse_window(const Reading *r, const char *key) {
    char text[TEXT_BYTES];
    text_of(member(r->config, key), text);
    return ckpt_error(r->err,
                      "%s has %s '%.60s', which does not describe a sliding window; download it again",
                      r->path, key, text);
}

// Returns 1 if layer l has a window, 0 if not, -1 if layer_types has no known type for it.
static int has_window(const cJSON *config, int l, int64_t first) {
    const cJSON *types = cJSON_GetObjectItemCaseSensitive(config, "layer_types");
    if (!types || cJSON_IsNull(types)) return l >= first;
    const char *type = cJSON_GetStringValue(cJSON_GetArrayItem(types, l));
    return type && strcmp(type, "sliding_attention") == 0 ? 1
           : type && strcmp(type, "full_attention") == 0  ? 0
                                                          : -1;
}

// Takes a window of `keys` keys, the query's own included, in layers `first` and up, unless
// layer_types selects the layers.
static bool take_window_of(const Reading *r, int64_t keys, int64_t first) {
    int64_t layers = 0;
    int windows = 0;
    Text list = {0};
    char text[TEXT_BYTES];
    if (!json_member_int64(r->config, "num_hidden_layers", 1, 1 << 16, &layers))
        return refuse_window(r, "num_hidden_layers");
    for (int l = 0; l < layers; l++) {
        int window = has_window(r->config, l, first);
        if (window < 0) text_free(&list);
        if (window < 0) return refuse_window(r, "layer_types");
        text_add(&list, "%s%d", l ? "," : "", window);
        windows += window;
    }
    snprintf(text, sizeof text, "%" PRId64 ",0", keys - 1);
    bool some = windows > 0 && windows < layers;
    bool ok = (!some || take(r, "layer_types", "window_attn_skip_freq", list.data)) &&
              (!windows || take(r, "sliding_window", "window_size", text));
    text_free(&list);
    return ok;
}

static bool take_window(const Reading *r, const HfFamily *family) {
    const cJSON *use = cJSON_GetObjectItemCaseSensitive(r->config, "use_sliding_window"),
                *window = cJSON_GetObjectItemCaseSensitive(r->config, "sliding_window");
    int64_t keys = 4096, first = family->window == HF_WINDOW_SWITCHED ? 28 : 0;  // transformers' defaults
    if (family->window == HF_NO_WINDOW) return true;
    if (use && !cJSON_IsBool(use)) return refuse_window(r, "use_sliding_window");
    if (family->window == HF_WINDOW_SWITCHED && !cJSON_IsTrue(use)) {
        char text[TEXT_BYTES];
        text_of(member(r->config, "layer_types"), text);
        return options_choice("(none)|null|[full_attention]", text) >= 0 || refuse_window(r, "layer_types");
    }
    if (cJSON_IsNull(window)) return true;
    if (window && !json_int64(window, 1, INT32_MAX, &keys)) return refuse_window(r, "sliding_window");
    const cJSON *layers = cJSON_GetObjectItemCaseSensitive(r->config, "max_window_layers");
    if (family->window == HF_WINDOW_SWITCHED && layers && !json_int64(layers, 0, INT32_MAX, &first))
        return refuse_window(r, "max_window_layers");
    return take_window_of(r, keys, first);
}

// Query groups are set only if several heads share keys and values.
static void set_query_groups(cJSON *arguments) {
    const char *heads = json_member_string(arguments, "num_attention_heads");
    const char *groups = json_member_string(arguments, "num_query_groups");
    if (!groups) return;
    if (heads && strcmp(groups, heads) == 0) cJSON_DeleteItemFromObject(arguments, "num_query_groups");
    else cJSON_AddStringToObject(arguments, "group_query_attention", "true");
}

static void make_flags(const cJSON *arguments, ModelFlags *flags) {
    for (const cJSON *item = arguments->child; item; item = item->next) {
        bool yes = strcmp(item->valuestring, "true") == 0;
        bool no = strcmp(item->valuestring, "false") == 0 || strcmp(item->valuestring, "null") == 0;
        if (!no) model_flags_add(flags, item->string, yes ? NULL : item->valuestring);
    }
}

static const HfFamily *family_of(const Reading *r) {
    const char *type = json_member_string(r->config, "model_type");
    char known[200] = "";
    int count;
    const HfFamily *families = hf_families(&count);
    for (int i = 0; i < count; i++) {
        if (type && strcmp(type, families[i].type) == 0) return &families[i];
        size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", used ? ", " : "", families[i].type);
    }
    ckpt_error(r->err, "%s has model_type '%.60s', but this program supports %s; import another model",
               r->path, type ? type : "", known);
    return NULL;
}

// Sets the end-of-document token to config.json's end-of-sequence token (the first one of a list),
// or to the last id if config.json has none.
static void read_eod(HfConfig *c, const cJSON *config) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(config, "eos_token_id");
    c->eod = c->words - 1;
    json_int64(cJSON_IsArray(item) ? item->child : item, 0, c->words - 1, &c->eod);
}

static bool read_model(HfConfig *c, const Reading *r) {
    if (!(c->family = family_of(r))) return false;
    if (cJSON_HasObjectItem(r->config, "quantization_config")) {
        return ckpt_error(r->err, "%s describes a quantized model; import the original model", r->path);
    }
    if (!json_member_int64(r->config, "vocab_size", 1, 1 << 30, &c->words)) {
        return ckpt_error(
            r->err, "%s has no vocab_size, or one that this program does not support; import another model",
            r->path);
    }
    read_eod(c, r->config);
    return check_fixed(r, c->family) && take_blocks(r, c->family) && take_keys(r, c->family) &&
           take_rotations(r) && take_window(r, c->family);
}

bool hf_config_read(HfConfig *c, const char *path, Error *err) {
    memset(c, 0, sizeof *c);
    cJSON *config = json_read_object(path, CONFIG_MAX_BYTES, err);
    if (!config) return false;
    Reading r = {config, path, cJSON_CreateObject(), err};
    bool ok = read_model(c, &r);
    if (ok) {
        set_query_groups(r.arguments);
        make_flags(r.arguments, &c->flags);
    }
    cJSON_Delete(r.arguments);
    cJSON_Delete(config);
    return ok;
}

// A key with its value as JSON text.
typedef struct Entry {
    char *key, *value;
} Entry;

typedef struct Writing {
    const cJSON *arguments;
    Entry entries[MOST_ENTRIES];
    int count;
} Writing;

static void put(Writing *w, const char *key, const char *value, bool quoted) {
    if (w->count == MOST_ENTRIES)
        fatal(NULL, EXIT_USAGE, "config.json needs more than %d keys", MOST_ENTRIES);
    w->entries[w->count++] = (Entry){xstrdup(key), quoted ? text_format("\"%s\"", value) : xstrdup(value)};
}

static void put_item(Writing *w, const char *key, const cJSON *item) {
    char *text = item ? cJSON_PrintUnformatted(item) : NULL;
    if (text) put(w, key, text, false);
    cJSON_free(text);
}

static void put_key(Writing *w, const HfKey *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(w->arguments, key->argument);
    char text[TEXT_BYTES];
    if (key->negated) snprintf(text, sizeof text, "%s", cJSON_IsTrue(item) ? "false" : "true");
    else if (key->real) format_real(cJSON_GetNumberValue(item), text, sizeof text);
    else model_flag_text(item, text, sizeof text);
    put(w, key->key, text, false);
}

static void put_family(Writing *w, const HfFamily *family) {
    if (family->like) put_family(w, family->like);
    for (int i = 0; i < family->key_count; i++) put_key(w, &family->keys[i]);
    for (int i = 0; i < family->fixed_count; i++) {
        const HfFixed *fixed = &family->fixed[i];
        char text[TEXT_BYTES];
        snprintf(text, sizeof text, "%.*s", (int)strcspn(fixed->values, "|"), fixed->values);
        bool word = strcmp(text, "true") && strcmp(text, "false") && strcmp(text, "null");
        if (fixed->written) put(w, fixed->key, text, word);
    }
}

typedef struct RopeKey {
    const char *key, *argument;
    bool real;
} RopeKey;
static const RopeKey LLAMA3_KEYS[] = {{"factor", "rope_scaling_factor", true}};
static const RopeKey LINEAR_KEYS[] = {{"factor", "rotary_seq_len_interpolation_factor", true}};
static const RopeKey YARN_KEYS[] = {{"factor", "rotary_scaling_factor", true},
                                    {"original_max_position_embeddings",
                                     "yarn_original_max_position_embeddings", false},
                                    {"beta_fast", "yarn_beta_fast", true},
                                    {"beta_slow", "yarn_beta_slow", true},
                                    {"attention_factor", "yarn_attention_factor", true}};

static void put_rope_type(Writing *w, const char *group, const char *type, const RopeKey *keys, int count) {
    char key[TEXT_BYTES];
    for (int i = 0; i < count; i++) {
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(w->arguments, keys[i].argument);
        if (strcmp(keys[i].key, "attention_factor") == 0 && cJSON_GetNumberValue(item) == 0) continue;
        snprintf(key, sizeof key, "%s.%s", group, keys[i].key);
        put_key(w, &(HfKey){.key = key, .argument = keys[i].argument, .real = keys[i].real});
    }
    snprintf(key, sizeof key, "%s.rope_type", group);
    put(w, key, type, true);
    for (size_t i = 0; strcmp(type, "llama3") == 0 && i < sizeof ROPE_NUMBERS / sizeof *ROPE_NUMBERS; i++) {
        snprintf(key, sizeof key, "%s.%s", group, ROPE_NUMBERS[i].name);
        put(w, key, ROPE_NUMBERS[i].text, false);
    }
    snprintf(key, sizeof key, "%s.truncate", group);
    if (cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(w->arguments, "no_yarn_correction_range_round_to_int")))
        put(w, key, "false", false);
}

// Newer folders only have rope_parameters, but older programs read the scaling from rope_scaling.
static void put_rotations(Writing *w, const Config *c) {
    bool yarn = c->position_embedding_type == POSITIONS_YARN;
    bool linear = c->rotary_seq_len_interpolation_factor > 1;
    for (int k = 0; k < 2; k++) {
        const char *group = k ? "rope_scaling" : "rope_parameters";
        if (yarn) put_rope_type(w, group, "yarn", YARN_KEYS, sizeof YARN_KEYS / sizeof *YARN_KEYS);
        else if (c->use_rope_scaling) put_rope_type(w, group, "llama3", LLAMA3_KEYS, 1);
        else if (linear) put_rope_type(w, group, "linear", LINEAR_KEYS, 1);
        else if (!k) put(w, "rope_parameters.rope_type", "default", true);
    }
    if (yarn || linear || c->use_rope_scaling)
        put_key(w, &(HfKey){.key = "rope_scaling.rope_theta", .argument = "rotary_base", .real = true});
}

static void put_number(Writing *w, const char *key, int value) {
    char text[24];
    snprintf(text, sizeof text, "%d", value);
    put(w, key, text, false);
}

// Writes the windows of the layers. Older programs read max_window_layers, newer ones layer_types.
static void put_window(Writing *w, const HfFamily *family, const Config *c) {
    int keys = 0, first = c->num_layers;
    Text types = {0};
    for (int l = c->num_layers - 1; l >= 0; l--) {
        int window = config_window(c, l);
        if (window) keys = window;
        if (window && first == l + 1) first = l;
    }
    for (int l = 0; l < c->num_layers; l++)
        text_add(&types, "%s\n    \"%s\"", l ? "," : "[",
                 config_window(c, l) ? "sliding_attention" : "full_attention");
    text_add(&types, "\n  ]");
    bool switched = family->window == HF_WINDOW_SWITCHED;
    if (switched) put(w, "use_sliding_window", keys ? "true" : "false", false);
    // Without this key, transformers assumes a window of 4096 for Mistral.
    if (!keys && family->window == HF_WINDOW_ALWAYS) put(w, "sliding_window", "null", false);
    if (keys && family->window) put_number(w, "sliding_window", keys);
    if (keys && switched) put_number(w, "max_window_layers", first);
    if (keys && switched) put(w, "layer_types", types.data, false);
    text_free(&types);
}

static int by_key(const void *a, const void *b) {
    return strcmp(((const Entry *)a)->key, ((const Entry *)b)->key);
}

// Returns the length of the prefix "a." of a key "a.b", or 0 for other keys.
static size_t group_of(const char *key) { return strchr(key, '.') ? strcspn(key, ".") + 1 : 0; }

// Prints keys as transformers does: sorted, indented by two spaces.
static void print_entries(const Writing *w, Text *out) {
    for (int i = 0; i < w->count; i++) {
        const char *key = w->entries[i].key, *next = i + 1 < w->count ? w->entries[i + 1].key : "";
        size_t group = group_of(key);
        bool opens = group && (i == 0 || strncmp(w->entries[i - 1].key, key, group) != 0);
        bool closes = group && strncmp(next, key, group) != 0;
        if (opens) text_add(out, "  \"%.*s\": {\n", (int)group - 1, key);
        text_add(out, "%s  \"%s\": %s", group ? "  " : "", key + group, w->entries[i].value);
        if (closes) text_add(out, "\n  }");
        text_add(out, "%s\n", *next ? "," : "");
    }
}

void hf_config_write(const HfFamily *family, const ImportedModel *model, const char *dtype, const cJSON *ids,
                     Text *out) {
    cJSON *arguments = imported_arguments(&model->config);
    char architectures[TEXT_BYTES];
    Writing w = {.arguments = arguments};
    cJSON_ReplaceItemInObject(arguments, "num_query_groups",
                              cJSON_CreateNumber(config_query_groups(&model->config)));
    snprintf(architectures, sizeof architectures, "[\n    \"%s\"\n  ]", family->architecture);
    put(&w, "architectures", architectures, false);
    put(&w, "model_type", family->type, true);
    put(&w, "torch_dtype", dtype, true);
    put(&w, "use_cache", "true", false);
    for (int i = 0; i < HF_SPECIAL_IDS; i++)
        put_item(&w, HF_SPECIAL_ID[i], cJSON_GetObjectItemCaseSensitive(ids, HF_SPECIAL_ID[i]));
    put_item(&w, "vocab_size", cJSON_GetObjectItemCaseSensitive(arguments, "unpadded_vocab_size"));
    put_family(&w, family);
    if (model->config.position_embedding_type != POSITIONS_LEARNED) put_rotations(&w, &model->config);
    put_window(&w, family, &model->config);
    qsort(w.entries, (size_t)w.count, sizeof *w.entries, by_key);
    text_add(out, "{\n");
    print_entries(&w, out);
    text_add(out, "}\n");
    for (int i = 0; i < w.count; i++) {
        free(w.entries[i].key);
        free(w.entries[i].value);
    }
    cJSON_Delete(arguments);
}
