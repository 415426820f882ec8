// Compares a Config, as JSON, with a checkpoint's or with rank 0's: see config.h. The option table
// says which flags must match (config_roles.h).
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/json.h"
#include "llmc/config/config.h"
#include "llmc/config/config_roles.h"

bool config_next_key(int roles, int *at, char key[OPTION_KEY_BYTES]) {
    int rows, derived;
    const Option *table = config_options(&rows), *values = config_derived(&derived);
    while (*at < rows + derived) {
        int i = (*at)++;
        const Option *row = i < rows ? &table[i] : &values[i - rows];
        if (!row->name || !(row->roles & roles)) continue;
        option_key(row, key);
        return true;
    }
    return false;
}

enum { EXCERPT_BYTES = 64 };

// A key with two different values, shortened to the text around their first difference.
typedef struct Difference {
    char key[OPTION_KEY_BYTES], was[EXCERPT_BYTES], is[EXCERPT_BYTES];
} Difference;

// Copies as much of the text as fits, starting shortly before byte `at`.
static void excerpt(const char *text, size_t at, char out[EXCERPT_BYTES]) {
    enum { BEFORE = 24 };
    bool cut = strlen(text) >= EXCERPT_BYTES && at > BEFORE;
    snprintf(out, EXCERPT_BYTES, "%s%s", cut ? "..." : "", text + (cut ? at - BEFORE : 0));
}

// Compares d->key. A key that one side lacks counts as equal.
static bool differs(const cJSON *saved, const cJSON *now, Difference *d) {
    const cJSON *a = cJSON_GetObjectItemCaseSensitive(saved, d->key),
                *b = cJSON_GetObjectItemCaseSensitive(now, d->key);
    if (!a || !b) return false;
    char *a_text = cJSON_PrintUnformatted(a), *b_text = cJSON_PrintUnformatted(b);
    bool differ = a_text && b_text && strcmp(a_text, b_text) != 0;
    if (differ) {
        size_t same = 0;
        while (a_text[same] && a_text[same] == b_text[same]) same++;
        excerpt(a_text, same, d->was);
        excerpt(b_text, same, d->is);
    }
    cJSON_free(a_text);
    cJSON_free(b_text);
    return differ;
}

// Finds the next difference among the keys with one of these roles. *at starts at 0.
static bool next_difference(const cJSON *saved, const cJSON *now, int roles, int *at, Difference *d) {
    while (config_next_key(roles, at, d->key)) {
        if (differs(saved, now, d)) return true;
    }
    return false;
}

static bool first_difference(const cJSON *saved, const cJSON *now, int roles, Difference *d) {
    int at = 0;
    return next_difference(saved, now, roles, &at, d);
}

// --- comparison with rank 0 ----------------------------------------------------------------------

// Returns true if ranks may have these two values of a path: both absent, or lists of equal length.
static bool same_paths(const cJSON *own, const cJSON *first, const char *key) {
    const cJSON *a = cJSON_GetObjectItemCaseSensitive(own, key),
                *b = cJSON_GetObjectItemCaseSensitive(first, key);
    return cJSON_IsNull(a) == cJSON_IsNull(b) && cJSON_GetArraySize(a) == cJSON_GetArraySize(b);
}

static bool same_flag(const Option *row, const cJSON *own, const cJSON *first, Error *err) {
    Difference d;
    if (!config_is_setting(row) || row->use != OPTION_USED || row->roles & RANK_0) return true;
    option_key(row, d.key);
    // --train-samples and the batch sizes, which are compared too, determine train_iters.
    bool implied = !strcmp(d.key, "train_iters") &&
                   cJSON_IsNumber(cJSON_GetObjectItemCaseSensitive(own, "train_samples"));
    if (implied || (row->roles & PATH && same_paths(own, first, d.key)) || !differs(own, first, &d))
        return true;
    return usage_error(err, "%s%s is %s here and %s on rank 0; start all ranks with the same flags",
                       row->negative ? "" : "--", row->negative ? d.key : row->name, d.was, d.is);
}

bool config_same(const char *own_json, const char *first_json, Error *err) {
    assert(own_json && first_json);
    int rows;
    Difference d;
    const Option *table = config_options(&rows);
    cJSON *own = json_parse_object(own_json, strlen(own_json)),
          *first = json_parse_object(first_json, strlen(first_json));
    bool ok = own && first;
    if (!ok)
        error_set(err, EXIT_COMMUNICATION, "rank 0's flags were corrupted in transit; check the network");
    for (int i = 0; i < rows && ok; i++) ok = same_flag(&table[i], own, first, err);
    if (ok && first_difference(own, first, VOCABULARY, &d)) {
        ok = usage_error(err, "%s is %s here and %s on rank 0; use the same vocabulary files on all machines",
                         d.key, d.was, d.is);
    }
    cJSON_Delete(own);
    cJSON_Delete(first);
    return ok;
}

// --- comparison with a checkpoint ----------------------------------------------------------------

// Takes a saved value if the command line would accept it.
static void adopt_flag(const Option *row, const cJSON *saved, Config *config) {
    char key[OPTION_KEY_BYTES], digits[40];
    Error ignored;
    option_key(row, key);
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(saved, key);
    const char *word = cJSON_IsString(item) ? item->valuestring : digits;
    if (cJSON_IsNumber(item)) format_real(item->valuedouble, digits, sizeof digits);
    if (cJSON_IsNumber(item) || cJSON_IsString(item)) options_set(row, word, config, &ignored);
}

static void adopt_samples(const cJSON *saved, const char *key, int64_t *field) {
    json_int64(cJSON_GetObjectItemCaseSensitive(saved, key), 0, JSON_INT_MAX, field);
}

// --use-checkpoint-opt_param-scheduler: the saved schedule replaces the command line's.
static void adopt_schedule(Config *config, const cJSON *saved) {
    int rows;
    const Option *table = config_options(&rows);
    for (int i = 0; i < rows; i++) {
        if (table[i].roles & SCHEDULE) adopt_flag(&table[i], saved, config);
    }
    const cJSON *warmup = cJSON_GetObjectItemCaseSensitive(saved, "schedule_warmup_samples");
    if (cJSON_IsNumber(warmup)) config->warmup_samples_wn = warmup->valuedouble;  // may be fractional
    adopt_samples(saved, "schedule_decay_samples", &config->decay_samples_dn);
    adopt_samples(saved, "schedule_wsd_samples", &config->wsd_samples);
    adopt_samples(saved, "schedule_weight_decay_samples", &config->weight_decay_samples);
}

// The vocabulary is padded to a multiple of T, so with another T, the same padded size may need
// another --make-vocab-size-divisible-by.
static bool match_padding(const Config *config, const cJSON *saved, Error *err) {
    int64_t rows, T = config->tensor_model_parallel_size;
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(saved, "padded_vocab_size");
    if (!json_int64(item, 1, INT32_MAX, &rows) || rows == config->vocab_size_padded) return true;
    if (rows % T) {
        return ckpt_error(err,
                          "the checkpoint's padded vocabulary size %lld is not divisible by "
                          "--tensor-model-parallel-size %lld; use another size, or --load another checkpoint",
                          (long long)rows, (long long)T);
    }
    return ckpt_error(err,
                      "the checkpoint's padded vocabulary size is %lld, but this run's is %d; add "
                      "--make-vocab-size-divisible-by %lld, or --load another checkpoint",
                      (long long)rows, config->vocab_size_padded, (long long)(rows / T));
}

// Adds the defaults of model flags that the checkpoint is older than. Flags whose default depends
// on other flags, such as --ffn-hidden-size, stay missing; all checkpoints have them.
static void add_defaults(cJSON *saved) {
    int rows;
    const Option *table = config_options(&rows);
    Config defaults = {0};
    options_defaults(table, rows, &defaults);
    char *text = config_to_json(&defaults);
    cJSON *values = json_parse_object(text, strlen(text));
    for (int i = 0; i < rows && values; i++) {
        const Option *row = &table[i];
        char key[OPTION_KEY_BYTES];
        bool fixed = row->initial || row->kind == OPTION_FLAG || row->kind == OPTION_TEXT;
        if (!row->name || !(row->roles & MODEL) || !fixed) continue;
        option_key(row, key);
        if (cJSON_GetObjectItemCaseSensitive(saved, key)) continue;
        cJSON_AddItemToObject(saved, key, cJSON_DetachItemFromObjectCaseSensitive(values, key));
    }
    cJSON_Delete(values);
    free(text);
}

// Returns true if both windows flags give every layer the same window, however they are spelled.
static bool same_windows(const Config *config, const cJSON *saved) {
    Config was = *config;
    Error ignored;
    was.window_size = json_member_string(saved, "window_size");
    was.window_attn_skip_freq = json_member_string(saved, "window_attn_skip_freq");
    if (!was.window_size) was.window_size = "-1,0";  // no window; set, so that the other flag is checked
    if (!config_check_window(&was, &ignored)) return false;
    for (int layer = 0; layer < config->num_layers; layer++) {
        if (config_window(&was, layer) != config_window(config, layer)) return false;
    }
    return true;
}

static bool match_model(const Config *config, const cJSON *saved, const cJSON *now, Error *err) {
    Difference d;
    int at = 0;
    bool differ;
    while ((differ = next_difference(saved, now, MODEL, &at, &d))) {
        bool window = !strcmp(d.key, "window_size") || !strcmp(d.key, "window_attn_skip_freq");
        if (!window || !same_windows(config, saved)) break;
    }
    if (!differ) return match_padding(config, saved, err);
    return ckpt_error(err,
                      "the checkpoint was made with %s %s, but this run has %s; use the checkpoint's model "
                      "flags, or --load another checkpoint",
                      d.key, d.was, d.is);
}

static int saved_lora_rank(const cJSON *saved) {
    int64_t rank = 0;
    json_member_int64(saved, "lora_rank", 0, INT32_MAX, &rank);  // older checkpoints lack the key
    return (int)rank;
}

// Different names may mean the same matrices.
static bool same_targets(const Config *config, const cJSON *saved, Error *err) {
    const char *was = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(saved, "lora_targets"));
    Config other = *config;
    int theirs = 0, ours = 0;
    if (was) other.lora_targets = was;
    if (!config_lora_targets(&other, &theirs, err) || !config_lora_targets(config, &ours, err)) return false;
    if (theirs == ours) return true;
    return ckpt_error(err,
                      "the adapters were trained with lora_targets %.200s, but this run has %.200s; use the "
                      "same flags",
                      was, config->lora_targets);
}

// A checkpoint holds the adapters of a LoRA run, or a whole model.
static bool match_adapters(const Config *config, const cJSON *saved, const cJSON *now, Error *err) {
    static const char *const keys[] = {"lora_rank", "lora_alpha"};
    int was = saved_lora_rank(saved), is = config->lora_rank;
    if (was && !is) {
        return ckpt_error(err,
                          "the checkpoint holds only LoRA adapters of rank %d; add --lora-rank %d and "
                          "--pretrained-checkpoint, or --load a checkpoint of a whole model",
                          was, was);
    }
    if (is && !was) {
        return ckpt_error(err,
                          "the checkpoint holds a whole model and no LoRA adapters; name it with "
                          "--pretrained-checkpoint, and --load a folder of adapters or none");
    }
    for (size_t i = 0; is && i < sizeof keys / sizeof keys[0]; i++) {
        Difference d;
        snprintf(d.key, sizeof d.key, "%s", keys[i]);
        if (!differs(saved, now, &d)) continue;
        return ckpt_error(err,
                          "the adapters were trained with %s %s, but this run has %s; use the same flags",
                          d.key, d.was, d.is);
    }
    return !is || same_targets(config, saved, err);
}

static bool match_schedule(Config *config, const cJSON *saved, const cJSON *now, Error *err) {
    if (config->override_opt_param_scheduler) return true;
    if (config->use_checkpoint_opt_param_scheduler) {
        adopt_schedule(config, saved);
        return true;
    }
    if (!config_loads_optimizer(config)) return true;  // see restore in llmc/run/resume.c
    Difference d;
    // The length of the run only matters if weight decay changes over it.
    bool constant = config->weight_decay_incr_style == WEIGHT_DECAY_CONSTANT;
    if (!first_difference(saved, now, constant ? SCHEDULE : SCHEDULE | DECAY_RAMP, &d)) return true;
    return ckpt_error(
        err,
        "the checkpoint's schedule has %s %s, but this run's has %s; add --override-opt_param-scheduler to "
        "use this run's schedule, or --use-checkpoint-opt_param-scheduler to use the checkpoint's",
        d.key, d.was, d.is);
}

static const char *optimizer_of(const cJSON *arguments) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(arguments, "optimizer");
    return cJSON_IsString(item) ? item->valuestring : "adam";  // older checkpoints lack the key
}

// AdamW has two moments of every matrix, Muon one momentum.
static bool match_optimizer(const Config *config, const cJSON *saved, const cJSON *now, char *notes,
                            size_t notes_bytes, Error *err) {
    const char *was = optimizer_of(saved), *is = optimizer_of(now);
    if (strcmp(was, is) == 0) return true;
    if (config_loads_optimizer(config)) {
        return ckpt_error(
            err,
            "the checkpoint was saved with --optimizer %.20s, whose state --optimizer %s cannot "
            "use; add --no-load-optim to load only the weights, or use --optimizer %.20s",
            was, is, was);
    }
    options_note(notes, notes_bytes,
                 "optimizer was %.20s in the checkpoint and is now %s: only the weights are loaded", was, is);
    return true;
}

// Adds a note for every flag with these roles that differs, or only for the first.
static void note_differences(const cJSON *saved, const cJSON *now, int roles, bool all, const char *effect,
                             char *notes, size_t notes_bytes) {
    Difference d;
    int at = 0;
    while (next_difference(saved, now, roles, &at, &d)) {
        options_note(notes, notes_bytes, "%s was %s in the checkpoint and is now %s, so %s", d.key, d.was,
                     d.is, effect);
        if (!all) break;
    }
}

static bool in_fp8(const cJSON *arguments) {
    const cJSON *format = cJSON_GetObjectItemCaseSensitive(arguments, "fp8_format");
    return cJSON_IsString(format) && strcmp(format->valuestring, "none") != 0;
}

static bool match(Config *config, const cJSON *saved, const cJSON *now, char *notes, size_t notes_bytes,
                  Error *err) {
    if (!match_model(config, saved, now, err) || !match_adapters(config, saved, now, err)) return false;
    if (config->finetune) return true;
    if (!match_optimizer(config, saved, now, notes, notes_bytes, err)) return false;
    if (!match_schedule(config, saved, now, err)) return false;
    note_differences(saved, now, DATA, true, "training continues with the data in a different order", notes,
                     notes_bytes);
    // From bf16 to FP8 and back, only the first of these flags matters: the format.
    note_differences(saved, now, PRECISION, in_fp8(saved) && in_fp8(now), "linear layers round differently",
                     notes, notes_bytes);
    return true;
}

static bool damaged_arguments(Error *err) {
    return ckpt_error(err,
                      "the arguments in the checkpoint are not a JSON object; the checkpoint is damaged: "
                      "load another one");
}

bool config_match_checkpoint(Config *config, const char *saved_json, char *notes, size_t notes_bytes,
                             Error *err) {
    assert(config && saved_json);
    char *now_json = config_to_json(config);
    cJSON *saved = json_parse_object(saved_json, strlen(saved_json));
    cJSON *now = json_parse_object(now_json, strlen(now_json));
    if (saved) add_defaults(saved);
    bool ok = saved && now ? match(config, saved, now, notes, notes_bytes, err) : damaged_arguments(err);
    cJSON_Delete(saved);
    cJSON_Delete(now);
    free(now_json);
    return ok;
}

bool config_match_base(const Config *config, const char *saved_json, Error *err) {
    assert(config && saved_json);
    char *now_json = config_to_json(config);
    cJSON *saved = json_parse_object(saved_json, strlen(saved_json));
    cJSON *now = json_parse_object(now_json, strlen(now_json));
    if (saved) add_defaults(saved);
    bool ok = saved && now ? match_model(config, saved, now, err) : damaged_arguments(err);
    if (ok && saved_lora_rank(saved)) {
        ok = ckpt_error(err,
                        "%s holds only LoRA adapters, but the frozen model is loaded from there; name a "
                        "checkpoint of a whole model with --pretrained-checkpoint",
                        config_lora_base(config));
    }
    cJSON_Delete(saved);
    cJSON_Delete(now);
    free(now_json);
    return ok;
}

int config_saved_lora_rank(const char *saved_json) {
    cJSON *saved = saved_json ? json_parse_object(saved_json, strlen(saved_json)) : NULL;
    int rank = saved_lora_rank(saved);
    cJSON_Delete(saved);
    return rank;
}

bool config_saved_with_muon(const char *saved_json) {
    cJSON *saved = saved_json ? json_parse_object(saved_json, strlen(saved_json)) : NULL;
    bool muon = strcmp(optimizer_of(saved), "muon") == 0;
    cJSON_Delete(saved);
    return muon;
}

bool config_same_residual(const Config *config, const char *saved_json) {
    assert(config && saved_json);
    Difference d;
    char *now_json = config_to_json(config);
    cJSON *saved = json_parse_object(saved_json, strlen(saved_json));
    cJSON *now = json_parse_object(now_json, strlen(now_json));
    bool same = saved && now && !first_difference(saved, now, RESIDUAL, &d);
    cJSON_Delete(saved);
    cJSON_Delete(now);
    free(now_json);
    return same;
}
