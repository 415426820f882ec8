// Model flags of a run compared with a checkpoint's: keys that an older checkpoint lacks, and
// windows of layers in different spellings. test_config.c compares flags one by one.
#include "test/unit/config/command_line.h"

#include "llmc/base/json.h"
#include "llmc/config/config_roles.h"

// Returns the flags of a run as JSON (malloc'ed), without `key` unless that is NULL.
static char *saved_by(const char *line, const char *key) {
    Run run;
    must_run(&run, line, 1);
    char *text = config_to_json(&run.config);
    config_free(&run.config);
    cJSON *json = json_parse_object(text, strlen(text));
    free(text);
    assert_non_null(json);
    if (key) assert_non_null(cJSON_GetObjectItemCaseSensitive(json, key));
    if (key) cJSON_DeleteItemFromObjectCaseSensitive(json, key);
    text = cJSON_PrintUnformatted(json);
    cJSON_Delete(json);
    return text;
}

// Resumes with `line` from a checkpoint made with `saved_line` that lacks `key`. what: part of the
// error, or NULL if the flags match.
static void check_resume(const char *saved_line, const char *key, const char *line, const char *what) {
    Run run;
    char *saved = saved_by(saved_line, key);
    must_run(&run, line, 1);
    bool same = config_match_checkpoint(&run.config, saved, NULL, 0, &run.err);
    if (same && what) fail_msg("\"%s\" matches a checkpoint without %s", line, key);
    if (!same && !what) fail_msg("\"%s\" without %s: %s", line, key, run.err.what);
    if (what) assert_int_equal(run.err.code, EXIT_CHECKPOINT);
    if (what && !strstr(run.err.what, what)) fail_msg("\"%s\" does not contain \"%s\"", run.err.what, what);
    config_free(&run.config);
    free(saved);
}

#define ROPE SMALL "--position-embedding-type rope "
#define YARN SMALL "--position-embedding-type yarn "

// Each flag has its default in both, so a checkpoint without the key matches.
static void missing_keys_are_defaults(void **state) {
    int rows;
    const Option *table = config_options(&rows);
    for (int i = 0; i < rows; i++) {
        char key[OPTION_KEY_BYTES];
        if (!table[i].name || !(table[i].roles & MODEL)) continue;
        option_key(&table[i], key);
        check_resume(SMALL, key, SMALL, NULL);
    }
}

static void missing_keys_are_not_other_values(void **state) {
    static const struct {
        const char *key, *line, *what;
    } cases[] = {
        {"window_size", SMALL "--window-size 4,0", "window_size null, but this run has \"4,0\""},
        {"use_rope_scaling", ROPE "--use-rope-scaling", "use_rope_scaling false, but this run has true"},
        {"rope_scaling_factor", ROPE "--use-rope-scaling --rope-scaling-factor 32", "rope_scaling_factor 8"},
        {"rotary_seq_len_interpolation_factor", ROPE "--rotary-seq-len-interpolation-factor 2",
         "rotary_seq_len_interpolation_factor 1"},
        {"rotary_base", ROPE "--rotary-base 500000", "rotary_base 10000"},
        {"rotary_scaling_factor", YARN "--rotary-scaling-factor 4", "rotary_scaling_factor 1"},
        {"yarn_beta_fast", YARN "--yarn-beta-fast 16", "yarn_beta_fast 32"},
        {"no_yarn_correction_range_round_to_int", YARN "--no-yarn-correction-range-round-to-int",
         "no_yarn_correction_range_round_to_int false, but this run has true"},
        {"position_embedding_type", ROPE, "position_embedding_type \"learned_absolute\""},
        {"swiglu", SMALL "--swiglu", "swiglu false"},
        {"add_qkv_bias", SMALL "--disable-bias-linear --add-qkv-bias", "add_qkv_bias false"},
        {"qk_layernorm", SMALL "--qk-layernorm", "qk_layernorm false"},
        {"window_attn_skip_freq", SMALL "--window-size 4,0 --window-attn-skip-freq 2",
         "window_attn_skip_freq null, but this run has \"2\""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check_resume(cases[i].line, cases[i].key, cases[i].line, cases[i].what);
}

#define WINDOW SMALL "--window-size 4,0 "

// Equal windows of all layers match. SMALL has 2 layers.
static void windows_are_compared_by_layer(void **state) {
    static const char *const same[][2] = {
        {WINDOW "--window-attn-skip-freq 2", WINDOW "--window-attn-skip-freq [1,0]"},
        {WINDOW "--window-attn-skip-freq [1,0]", WINDOW "--window-attn-skip-freq 2"},
        {WINDOW "--window-attn-skip-freq 3", WINDOW},
        {WINDOW, WINDOW "--window-attn-skip-freq 1,1"},
        {WINDOW, SMALL "--window-size (4,0)"},
        {SMALL, SMALL "--window-size -1,0"},
        {SMALL "--window-size -1,0 --window-attn-skip-freq 2", SMALL},
        {WINDOW "--window-attn-skip-freq 1", SMALL},
        {WINDOW "--window-attn-skip-freq 0,0", SMALL "--window-attn-skip-freq 2"},
    };
    static const char *const other[][2] = {
        {WINDOW "--window-attn-skip-freq 2", WINDOW "--window-attn-skip-freq [0,1]"},
        {WINDOW "--window-attn-skip-freq 2", WINDOW},
        {WINDOW, SMALL "--window-size 5,0"},
        {WINDOW, SMALL},
        {WINDOW "--window-attn-skip-freq 2", SMALL "--window-size 5,0 --window-attn-skip-freq 2"},
    };
    for (size_t i = 0; i < sizeof same / sizeof *same; i++) check_resume(same[i][0], NULL, same[i][1], NULL);
    for (size_t i = 0; i < sizeof other / sizeof *other; i++)
        check_resume(other[i][0], NULL, other[i][1], "use the checkpoint's model flags");
}

// Differences that follow the windows in the table are still found.
static void flags_after_windows_are_compared(void **state) {
    check_resume(WINDOW "--window-attn-skip-freq 2", NULL, WINDOW "--window-attn-skip-freq 1,0 --swiglu",
                 "ffn_hidden_size");
    check_resume(WINDOW "--window-attn-skip-freq 2", NULL,
                 WINDOW "--window-attn-skip-freq 1,0 --qk-layernorm",
                 "qk_layernorm false, but this run has true");
}

// Optimizer and schedule must match only if they are loaded.
static void evaluation_ignores_optimizer_and_schedule(void **state) {
    const char *muon = SMALL "--optimizer muon", *schedule = SMALL "--lr-decay-iters 77";
    check_resume(muon, NULL, SMALL, "saved with --optimizer muon");
    check_resume(muon, NULL, SMALL "--skip-train", NULL);
    check_resume(schedule, NULL, SMALL, "the checkpoint's schedule has");
    check_resume(schedule, NULL, SMALL "--skip-train", NULL);
    check_resume(SMALL "--position-embedding-type rope", NULL, SMALL "--skip-train",
                 "position_embedding_type");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(missing_keys_are_defaults),
        cmocka_unit_test(missing_keys_are_not_other_values),
        cmocka_unit_test(windows_are_compared_by_layer),
        cmocka_unit_test(flags_after_windows_are_compared),
        cmocka_unit_test(evaluation_ignores_optimizer_and_schedule),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
