// A Config as text: Megatron's argument dump, JSON for checkpoints and JSON lines, and the
// comparison with a loaded checkpoint's JSON. See config.h.
#include <stdlib.h>
#include <string.h>

#include "llmc/config/config.h"
#include "llmc/base/json.h"
#include "llmc/base/utf8.h"

// --- one value -----------------------------------------------------------------------------------

// The name Megatron's argument dump has for a flag: underscores, and --no-check-... without its
// "no-".
static void dump_name(const Option *row, char *name, size_t bytes) {
    snprintf(name, bytes, "%s", row->name + (row->negative ? strlen("no-") : 0));
    for (char *c = name; *c; c++) {
        if (*c == '-') *c = '_';
    }
}

// Flags that store something and describe the run. The rest is not dumped.
static bool is_setting(const Option *row) {
    return row->name && row->offset != OPTION_NO_FIELD && strcmp(row->name, "help") != 0 &&
           strcmp(row->name, "version") != 0;
}

// A whole number without default that was not given holds 0 and has no value.
static bool number_text(const Option *row, int64_t value, char *text, size_t bytes) {
    snprintf(text, bytes, "%lld", (long long)value);
    return value || row->initial;
}

// The digits of a numeric row in text; false: no value.
static bool row_number(const Option *row, const void *field, char *text, size_t bytes) {
    if (row->kind == OPTION_REAL) {
        double value;
        memcpy(&value, field, sizeof value);
        format_real(value, text, bytes);
        return value != 0 || row->initial;
    }
    int narrow = 0;
    int64_t wide = 0;
    if (row->kind == OPTION_INT) memcpy(&narrow, field, sizeof narrow);
    else memcpy(&wide, field, sizeof wide);
    return number_text(row, row->kind == OPTION_INT ? narrow : wide, text, bytes);
}

// The text of a textual row into text (cut to bytes); false: no value.
static bool row_text(const Option *row, const void *field, const char **text, char *buffer, size_t bytes) {
    if (row->kind != OPTION_CHOICE) {
        memcpy(text, field, sizeof *text);
        return *text != NULL;
    }
    int index;
    memcpy(&index, field, sizeof index);
    const char *word = row->choices;
    for (; index > 0; index--) word += strcspn(word, "|") + 1;
    snprintf(buffer, bytes, "%.*s", (int)strcspn(word, "|"), word);
    *text = buffer;
    return true;
}

// --- Megatron's argument dump --------------------------------------------------------------------

// "  name ....... value" with dots to column 48; malloc'ed.
static char *dump_line(const char *name, const char *value) {
    int dots = 48 - (int)strlen(name);
    size_t bytes = strlen(name) + strlen(value) + 64;
    char *line = (char *)xmalloc(bytes, "argument dump");
    snprintf(line, bytes, "  %s %.*s %s", name, dots > 0 ? dots : 0,
             "................................................", value);
    return line;
}

// A list as Python prints it: ['a', 'b']; malloc'ed.
static char *list_text(const Words *words) {
    size_t bytes = 8;
    for (int i = 0; i < words->count; i++) bytes += strlen(words->items[i]) + 4;
    char *text = (char *)xmalloc(bytes, "argument dump");
    size_t used = (size_t)snprintf(text, bytes, "[");
    for (int i = 0; i < words->count; i++) {
        used += (size_t)snprintf(text + used, bytes - used, "%s'%s'", i ? ", " : "", words->items[i]);
    }
    snprintf(text + used, bytes - used, "]");
    return text;
}

static char *row_line(const Option *row, const Config *config) {
    const void *field = (const char *)config + row->offset;
    char name[96], buffer[96];
    const char *value = buffer;
    dump_name(row, name, sizeof name);
    Words words;
    char *list = NULL;
    switch (row->kind) {
        case OPTION_FLAG: value = *(const bool *)field ? "True" : "False"; break;
        case OPTION_INT:
        case OPTION_INT64:
        case OPTION_REAL:
            if (!row_number(row, field, buffer, sizeof buffer)) value = "None";
            break;
        case OPTION_WORDS:
            memcpy(&words, field, sizeof words);
            list = words.items ? list_text(&words) : NULL;
            value = list ? list : "None";
            break;
        default:
            if (!row_text(row, field, &value, buffer, sizeof buffer)) value = "None";
    }
    char *line = dump_line(name, value);
    free(list);
    return line;
}

// Derived values, under Megatron's names where it has them.
typedef struct Derived {
    const char *name;
    double value;
    bool whole;
} Derived;

enum { DERIVED = 11 };

static void derived_values(const Config *c, Derived derived[DERIVED]) {
    Derived values[DERIVED] = {
        {"data_parallel_size", c->dp_size, true},
        {"padded_vocab_size", c->vocab_size_padded, true},
        {"unpadded_vocab_size", c->vocab_size_unpadded, true},
        {"eod", c->eod, true},
        {"num_micro_batches", c->micro_batches, true},
        {"total_samples", (double)c->total_samples, true},
        {"schedule_warmup_samples", c->warmup_samples_wn, false},
        {"schedule_decay_samples", (double)c->decay_samples_dn, true},
        {"schedule_wsd_samples", (double)c->wsd_samples, true},
        {"schedule_weight_decay_samples", (double)c->weight_decay_samples, true},
        {"world_size", (double)c->dp_size * c->tensor_model_parallel_size * c->pipeline_model_parallel_size,
         true},
    };
    memcpy(derived, values, sizeof values);
}

static void derived_text(const Derived *derived, char *text, size_t bytes) {
    if (derived->whole) snprintf(text, bytes, "%.0f", derived->value);
    else format_real(derived->value, text, bytes);
}

static int compare_lines(const void *a, const void *b) {
    return strcasecmp(*(char *const *)a, *(char *const *)b);
}

void config_print(const Config *config, FILE *file) {
    int rows, count = 0;
    const Option *table = config_options(&rows);
    char **lines = (char **)xcalloc((size_t)rows + DERIVED, sizeof *lines, "argument dump");
    for (int i = 0; i < rows; i++) {
        if (is_setting(&table[i])) lines[count++] = row_line(&table[i], config);
    }
    Derived derived[DERIVED];
    derived_values(config, derived);
    for (int i = 0; i < DERIVED; i++) {
        char text[40];
        derived_text(&derived[i], text, sizeof text);
        lines[count++] = dump_line(derived[i].name, text);
    }
    qsort(lines, (size_t)count, sizeof *lines, compare_lines);
    fprintf(file, "------------------------ arguments ------------------------\n");
    for (int i = 0; i < count; i++) {
        fprintf(file, "%s\n", lines[i]);
        free(lines[i]);
    }
    fprintf(file, "-------------------- end of arguments ---------------------\n");
    free(lines);
}

// --- JSON ----------------------------------------------------------------------------------------

// cJSON returns NULL only when memory runs out.
static void add_item(cJSON *object, const char *name, cJSON *item) {
    if (!item || !cJSON_AddItemToObject(object, name, item)) {
        fatal(NULL, EXIT_ENVIRONMENT, "out of memory for JSON; use a larger machine");
    }
}

// Flags are bytes, a folder's name for one; JSON wants UTF-8.
static cJSON *text_item(const char *text) {
    size_t bytes = strlen(text);
    int64_t replaced = 0;
    char *repaired = (char *)xmalloc(3 * bytes + 1, "JSON");
    repaired[utf8_repair(text, bytes, repaired, &replaced)] = '\0';
    cJSON *item = cJSON_CreateString(repaired);
    free(repaired);
    return item;
}

static cJSON *words_item(const Words *words) {
    cJSON *array = words->items ? cJSON_CreateArray() : cJSON_CreateNull();
    for (int i = 0; array && words->items && i < words->count; i++) {
        if (!cJSON_AddItemToArray(array, text_item(words->items[i]))) {
            fatal(NULL, EXIT_ENVIRONMENT, "out of memory for JSON; use a larger machine");
        }
    }
    return array;
}

// Numbers go in as text, so that they read back to the bit.
static cJSON *row_item(const Option *row, const Config *config) {
    const void *field = (const char *)config + row->offset;
    char buffer[96];
    const char *text;
    Words words;
    switch (row->kind) {
        case OPTION_FLAG: return cJSON_CreateBool(*(const bool *)field);
        case OPTION_INT:
        case OPTION_INT64:
        case OPTION_REAL:
            return row_number(row, field, buffer, sizeof buffer) ? cJSON_CreateRaw(buffer)
                                                                 : cJSON_CreateNull();
        case OPTION_WORDS: memcpy(&words, field, sizeof words); return words_item(&words);
        default:
            return row_text(row, field, &text, buffer, sizeof buffer) ? text_item(text) : cJSON_CreateNull();
    }
}

char *config_to_json(const Config *config) {
    int rows;
    const Option *table = config_options(&rows);
    cJSON *object = cJSON_CreateObject();
    if (!object) fatal(NULL, EXIT_ENVIRONMENT, "out of memory for JSON; use a larger machine");
    for (int i = 0; i < rows; i++) {
        char name[96];
        if (!is_setting(&table[i])) continue;
        dump_name(&table[i], name, sizeof name);
        add_item(object, name, row_item(&table[i], config));
    }
    Derived derived[DERIVED];
    derived_values(config, derived);
    for (int i = 0; i < DERIVED; i++) {
        char text[40];
        derived_text(&derived[i], text, sizeof text);
        add_item(object, derived[i].name, cJSON_CreateRaw(text));
    }
    char *text = cJSON_PrintUnformatted(object);
    cJSON_Delete(object);
    if (!text) fatal(NULL, EXIT_ENVIRONMENT, "out of memory for JSON; use a larger machine");
    return text;
}

// --- comparison with a checkpoint ----------------------------------------------------------------

// What must be equal for a checkpoint's weights to mean the same.
static const char *const model_names[] = {"num_layers",
                                          "hidden_size",
                                          "ffn_hidden_size",
                                          "num_attention_heads",
                                          "kv_channels",
                                          "max_position_embeddings",
                                          "unpadded_vocab_size",
                                          "norm_epsilon",
                                          "group_query_attention",
                                          "num_query_groups",
                                          "normalization",
                                          "position_embedding_type",
                                          "rotary_base",
                                          "rotary_percent",
                                          "use_rope_scaling",
                                          "rope_scaling_factor",
                                          "swiglu",
                                          "disable_bias_linear",
                                          "untie_embeddings_and_output_weights",
                                          "qk_layernorm"};
// The same for its residual of error feedback.
static const char *const residual_names[] = {"hadamard_transform", "gradient_quantization_method",
                                             "tensor_model_parallel_size", "seed"};
// What the schedule follows from, in samples as Megatron compares it.
static const char *const schedule_names[] = {"lr",
                                             "min_lr",
                                             "lr_warmup_init",
                                             "lr_decay_style",
                                             "lr_wsd_decay_style",
                                             "schedule_warmup_samples",
                                             "schedule_decay_samples",
                                             "schedule_wsd_samples",
                                             "start_weight_decay",
                                             "end_weight_decay",
                                             "weight_decay_incr_style"};
// What decides which tokens come next.
static const char *const data_names[] = {"seed",
                                         "eval_seed",
                                         "seq_length",
                                         "split",
                                         "data_path",
                                         "train_data_path",
                                         "mid_level_dataset_surplus",
                                         "mock_data",
                                         "tokenizer_type",
                                         "eod_mask_loss",
                                         "reset_position_ids",
                                         "reset_attention_mask"};
#define COUNT_OF(list) (sizeof(list) / sizeof((list)[0]))

const char *const *config_model_names(int *count) {
    *count = (int)COUNT_OF(model_names);
    return model_names;
}

enum { EXCERPT_BYTES = 64 };

// As much of a text as fits, from a little before byte `at`, where it differs from another.
static void excerpt(const char *text, size_t at, char out[EXCERPT_BYTES]) {
    enum { BEFORE = 24 };
    bool cut = strlen(text) >= EXCERPT_BYTES && at > BEFORE;
    snprintf(out, EXCERPT_BYTES, "%s%s", cut ? "..." : "", text + (cut ? at - BEFORE : 0));
}

// The first name from *at on whose values differ, with both values as text, cut. NULL when there is
// none. A name that one side does not know counts as equal.
static const char *next_difference(const cJSON *saved, const cJSON *now, const char *const *names,
                                   size_t count, size_t *at, char was[EXCERPT_BYTES],
                                   char is[EXCERPT_BYTES]) {
    while (*at < count) {
        const char *name = names[(*at)++];
        const cJSON *a = cJSON_GetObjectItemCaseSensitive(saved, name),
                    *b = cJSON_GetObjectItemCaseSensitive(now, name);
        if (!a || !b) continue;
        char *a_text = cJSON_PrintUnformatted(a), *b_text = cJSON_PrintUnformatted(b);
        bool differ = a_text && b_text && strcmp(a_text, b_text) != 0;
        if (differ) {
            size_t same = 0;
            while (a_text[same] && a_text[same] == b_text[same]) same++;
            excerpt(a_text, same, was);
            excerpt(b_text, same, is);
        }
        cJSON_free(a_text);
        cJSON_free(b_text);
        if (differ) return name;
    }
    return NULL;
}

// --- comparison with rank 0 ----------------------------------------------------------------------

// A file, a folder, or a list of shards or files.
static bool is_path(const Option *row) {
    if (row->kind == OPTION_WORDS)
        return strstr(row->name, "data-path") != NULL || !strcmp(row->name, "eval-tasks");
    return row->kind == OPTION_TEXT && (!strcmp(row->value, "PATH") || !strcmp(row->value, "FOLDER"));
}

static bool counts_everywhere(const Option *row) {
    // Its own files and lines.
    static const char *const of_first_rank[] = {"log-jsonl", "log-line", "log-progress", "tensorboard"};
    for (size_t i = 0; i < COUNT_OF(of_first_rank); i++) {
        if (strstr(row->name ? row->name : "", of_first_rank[i])) return false;
    }
    return is_setting(row) && row->use == OPTION_USED;
}

bool config_same(const char *own_json, const char *first_json, Error *err) {
    int rows;
    const Option *table = config_options(&rows);
    cJSON *own = json_parse_object(own_json, strlen(own_json)),
          *first = json_parse_object(first_json, strlen(first_json));
    bool ok = own && first;
    if (!ok) {
        error_set(err, EXIT_COMMUNICATION,
                  "rank 0's flags did not arrive as they were sent; see what is wrong with the network");
    }
    for (int i = 0; i < rows && ok; i++) {
        char name[96], here[EXCERPT_BYTES], there[EXCERPT_BYTES];
        const char *const names[] = {name};
        size_t at = 0;
        if (!counts_everywhere(&table[i])) continue;
        dump_name(&table[i], name, sizeof name);
        // Follows from the samples and the batch sizes, which are flags of their own.
        if (!strcmp(name, "train_iters") &&
            cJSON_IsNumber(cJSON_GetObjectItemCaseSensitive(own, "train_samples")))
            continue;
        const cJSON *mine = cJSON_GetObjectItemCaseSensitive(own, name),
                    *theirs = cJSON_GetObjectItemCaseSensitive(first, name);
        if (is_path(&table[i]) && cJSON_IsNull(mine) == cJSON_IsNull(theirs) &&
            cJSON_GetArraySize(mine) == cJSON_GetArraySize(theirs))
            continue;
        if (!next_difference(own, first, names, 1, &at, here, there)) continue;
        ok = error_set(err, EXIT_USAGE,
                       "%s%s is %s here and %s on rank 0; start all ranks with the same flags",
                       table[i].negative ? "" : "--", table[i].negative ? name : table[i].name, here, there);
    }
    const char *const vocabulary[] = {"padded_vocab_size", "unpadded_vocab_size", "eod"};
    char here[EXCERPT_BYTES], there[EXCERPT_BYTES];
    size_t at = 0;
    const char *name = ok ? next_difference(own, first, vocabulary, COUNT_OF(vocabulary), &at, here, there)
                          : NULL;
    if (name) {
        ok = error_set(err, EXIT_USAGE, "%s is %s here and %s on rank 0; copy one vocabulary to all machines",
                       name, here, there);
    }
    cJSON_Delete(own);
    cJSON_Delete(first);
    return ok;
}

// --- what a checkpoint brings --------------------------------------------------------------------

// A saved value counts if it would count on the command line.
static void adopt_flag(const cJSON *saved, const char *flag, Config *config) {
    char name[96], digits[40];
    int rows;
    Error ignored;
    const Option *table = config_options(&rows), *row = options_find(table, rows, flag, strlen(flag));
    dump_name(row, name, sizeof name);
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(saved, name);
    const char *word = cJSON_IsString(item) ? item->valuestring : digits;
    if (cJSON_IsNumber(item)) format_real(item->valuedouble, digits, sizeof digits);
    if (cJSON_IsNumber(item) || cJSON_IsString(item)) options_set(row, word, config, &ignored);
}

static void adopt_samples(const cJSON *saved, const char *name, int64_t *field) {
    json_int64(cJSON_GetObjectItemCaseSensitive(saved, name), 0, JSON_INT_MAX, field);
}

// --use-checkpoint-opt_param-scheduler: the saved schedule replaces the command line's.
static void adopt_schedule(Config *config, const cJSON *saved) {
    static const char *const flags[] = {"lr",
                                        "min-lr",
                                        "lr-warmup-init",
                                        "lr-decay-style",
                                        "lr-wsd-decay-style",
                                        "start-weight-decay",
                                        "end-weight-decay",
                                        "weight-decay-incr-style"};
    for (size_t i = 0; i < COUNT_OF(flags); i++) adopt_flag(saved, flags[i], config);
    const cJSON *warmup = cJSON_GetObjectItemCaseSensitive(saved, "schedule_warmup_samples");
    if (cJSON_IsNumber(warmup)) config->warmup_samples_wn = warmup->valuedouble;  // may be fractional
    adopt_samples(saved, "schedule_decay_samples", &config->decay_samples_dn);
    adopt_samples(saved, "schedule_wsd_samples", &config->wsd_samples);
    adopt_samples(saved, "schedule_weight_decay_samples", &config->weight_decay_samples);
}

// The vocabulary is padded to a multiple of T, so another T may want another flag for the same
// number of rows.
static bool match_padding(const Config *config, const cJSON *saved, Error *err) {
    int64_t rows, T = config->tensor_model_parallel_size;
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(saved, "padded_vocab_size");
    if (!json_int64(item, 1, INT32_MAX, &rows) || rows == config->vocab_size_padded) return true;
    if (rows % T) {
        return error_set(err, EXIT_CHECKPOINT,
                         "the checkpoint's vocabulary has %lld rows with padding, which "
                         "--tensor-model-parallel-size %lld does not divide; change it, or give another "
                         "--load",
                         (long long)rows, (long long)T);
    }
    return error_set(err, EXIT_CHECKPOINT,
                     "the checkpoint's vocabulary has %lld rows with padding, this run's %d; add "
                     "--make-vocab-size-divisible-by %lld, or give another --load",
                     (long long)rows, config->vocab_size_padded, (long long)(rows / T));
}

static bool match_model(const Config *config, const cJSON *saved, const cJSON *now, Error *err) {
    char was[EXCERPT_BYTES], is[EXCERPT_BYTES];
    size_t at = 0;
    const char *name = next_difference(saved, now, model_names, COUNT_OF(model_names), &at, was, is);
    if (!name) return match_padding(config, saved, err);
    return error_set(err, EXIT_CHECKPOINT,
                     "the checkpoint was made with %s %s, this run has %s; give the checkpoint's model "
                     "flags, or another --load",
                     name, was, is);
}

static bool match_schedule(Config *config, const cJSON *saved, const cJSON *now, Error *err) {
    if (config->override_opt_param_scheduler) return true;
    if (config->use_checkpoint_opt_param_scheduler) {
        adopt_schedule(config, saved);
        return true;
    }
    char was[EXCERPT_BYTES], is[EXCERPT_BYTES];
    size_t at = 0;
    const char *name = next_difference(saved, now, schedule_names, COUNT_OF(schedule_names), &at, was, is);
    // The length of the run matters only to a weight decay that changes along it.
    const char *const ramp[] = {"schedule_weight_decay_samples"};
    size_t ramp_at = config->weight_decay_incr_style == WEIGHT_DECAY_CONSTANT;
    if (!name) name = next_difference(saved, now, ramp, 1, &ramp_at, was, is);
    if (!name) return true;
    return error_set(err, EXIT_CHECKPOINT,
                     "the checkpoint's schedule has %s %s, this run's %s; add --override-opt_param-scheduler "
                     "to use this run's or "
                     "--use-checkpoint-opt_param-scheduler to use the checkpoint's",
                     name, was, is);
}

static bool match(Config *config, const cJSON *saved, const cJSON *now, char *notes, size_t notes_bytes,
                  Error *err) {
    if (!match_model(config, saved, now, err)) return false;
    if (config->finetune) return true;
    if (!match_schedule(config, saved, now, err)) return false;
    char was[EXCERPT_BYTES], is[EXCERPT_BYTES];
    size_t at = 0;
    const char *name;
    while ((name = next_difference(saved, now, data_names, COUNT_OF(data_names), &at, was, is))) {
        options_note(notes, notes_bytes,
                     "%s was %s in the checkpoint and is %s: the data go on in another order", name, was, is);
    }
    return true;
}

bool config_match_checkpoint(Config *config, const char *saved_json, char *notes, size_t notes_bytes,
                             Error *err) {
    char *now_json = config_to_json(config);
    cJSON *saved = json_parse_object(saved_json, strlen(saved_json));
    cJSON *now = json_parse_object(now_json, strlen(now_json));
    bool ok = saved && now ? match(config, saved, now, notes, notes_bytes, err)
                           : error_set(err, EXIT_CHECKPOINT,
                                       "the arguments in the checkpoint are no JSON object; the checkpoint "
                                       "is damaged, load another");
    cJSON_Delete(saved);
    cJSON_Delete(now);
    free(now_json);
    return ok;
}

bool config_same_residual(const Config *config, const char *saved_json) {
    char was[EXCERPT_BYTES], is[EXCERPT_BYTES], *now_json = config_to_json(config);
    cJSON *saved = json_parse_object(saved_json, strlen(saved_json));
    cJSON *now = json_parse_object(now_json, strlen(now_json));
    size_t at = 0;
    bool same = saved && now &&
                !next_difference(saved, now, residual_names, COUNT_OF(residual_names), &at, was, is);
    cJSON_Delete(saved);
    cJSON_Delete(now);
    free(now_json);
    return same;
}
