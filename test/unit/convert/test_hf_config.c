// Tests the conversion of config.json to flags and back for scaled rotary positions and sliding
// windows, without weights.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "dev/convert/hf_family.h"
#include "llmc/base/durable.h"
#include "test/leaks.h"
#include "test/unit/folder.h"

#define COUNT(list) (sizeof(list) / sizeof((list)[0]))
// A model of four layers. Followed by the members of a case.
#define SIZES \
    "\"vocab_size\": 50, \"num_hidden_layers\": 4, \"hidden_size\": 32, \"num_attention_heads\": 4, " \
    "\"num_key_value_heads\": 2, \"intermediate_size\": 40, \"hidden_act\": \"silu\", " \
    "\"max_position_embeddings\": 12, \"rope_theta\": 500.0"
#define LLAMA "\"model_type\": \"llama\", " SIZES
#define MISTRAL "\"model_type\": \"mistral\", " SIZES
#define QWEN2 "\"model_type\": \"qwen2\", " SIZES

// Reads a config.json with these members.
static bool read_members(HfConfig *c, const char *members, Error *err) {
    char folder[80];
    assert_int_equal(folder_make(folder, sizeof folder, "test_hf_config"), 0);
    char *path = text_format("%s/config.json", folder), *text = text_format("{%s}", members);
    assert_true(durable_write_file(path, text, strlen(text), err));
    bool ok = hf_config_read(c, path, err);
    free(path);
    free(text);
    assert_int_equal(folder_remove(folder), 0);
    return ok;
}

static bool has_flag(const ModelFlags *flags, const char *flag) {
    for (int i = 0; i < flags->count; i++) {
        if (strcmp(flags->items[i], flag) == 0) return true;
    }
    return false;
}

static int occurrences(const char *text, const char *part) {
    int count = 0;
    for (; (text = strstr(text, part)); text++) count++;
    return count;
}

// flags: expected flags; "!--x": no flag that starts with this. keys: members of the exported
// config.json, which appear `times` times.
typedef struct Case {
    const char *members, *flags[6], *type;
    int times;
    const char *keys[6];
} Case;

static void check(const Case *c) {
    Error err = {0};
    HfConfig config;
    ImportedModel model;
    Text out = {0};
    if (!read_members(&config, c->members, &err)) fail_msg("%s: %s", c->members, err.what);
    for (int i = 0; i < 6 && c->flags[i]; i++) {
        if (!has_flag(&config.flags, c->flags[i])) fail_msg("%s: no %s", c->members, c->flags[i]);
    }
    if (!imported_model_open(&model, &config.flags, config.words, 8, "a test", &err))
        fail_msg("%s: %s", c->members, err.what);
    const HfFamily *family = hf_family_of(&model, &err);
    if (!family) fail_msg("%s: %s", c->members, err.what);
    assert_string_equal(family->type, c->type);
    hf_config_write(family, &model, "float32", NULL, &out);
    for (int i = 0; i < 6 && c->keys[i]; i++) {
        if (occurrences(out.data, c->keys[i]) != c->times)
            fail_msg("%s: not %d times %s in %s", c->members, c->times, c->keys[i], out.data);
    }
    // A second import gives the same flags.
    HfConfig again;
    char *members = text_format("%.*s", (int)(strrchr(out.data, '}') - out.data) - 1, out.data + 1);
    if (!read_members(&again, members, &err)) fail_msg("%s: %s", members, err.what);
    for (int i = 0; i < 6 && c->flags[i]; i++) {
        if (!has_flag(&again.flags, c->flags[i])) fail_msg("%s: no %s", members, c->flags[i]);
    }
    free(members);
    text_free(&out);
    imported_model_close(&model);
    model_flags_free(&config.flags);
    model_flags_free(&again.flags);
}

// Keys of the scaling are in rope_parameters and in rope_scaling. An mscale becomes the equal
// attention factor.
static void scaled_rotary_positions(void **state) {
    static const Case cases[] = {
        {LLAMA ", \"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 2.5}",
         {"--rotary-seq-len-interpolation-factor=2.5", "--position-embedding-type=rope"},
         "llama",
         2,
         {"\"rope_type\": \"linear\"", "\"factor\": 2.5"}},
        {LLAMA ", \"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4}",
         {"--position-embedding-type=yarn", "--rotary-scaling-factor=4",
          "--yarn-original-max-position-embeddings=12", "--yarn-beta-fast=32", "--yarn-beta-slow=1"},
         "llama",
         2,
         {"\"rope_type\": \"yarn\"", "\"original_max_position_embeddings\": 12", "\"beta_slow\": 1.0",
          "\"beta_fast\": 32.0", "\"factor\": 4.0"}},
        {QWEN2 ", \"rope_scaling\": {\"rope_type\": \"yarn\", \"original_max_position_embeddings\": 3, "
               "\"truncate\": false}",
         {"--rotary-scaling-factor=4", "--no-yarn-correction-range-round-to-int"},
         "qwen2",
         2,
         {"\"factor\": 4.0", "\"truncate\": false"}},
        {LLAMA ", \"rope_parameters\": {\"rope_type\": \"yarn\", \"factor\": 40, \"mscale\": 0.707, "
               "\"mscale_all_dim\": 1.0}",
         {"--rotary-scaling-factor=40"},
         "llama",
         2,
         {"\"attention_factor\": 0.92104"}},
        {LLAMA ", \"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 2, \"attention_factor\": 1.25, "
               "\"mscale\": 1}",
         {"--yarn-attention-factor=1.25"},
         "llama",
         2,
         {"\"attention_factor\": 1.25"}},
    };
    for (size_t i = 0; i < COUNT(cases); i++) check(&cases[i]);
}

static void sliding_windows(void **state) {
    static const Case cases[] = {
        {MISTRAL ", \"sliding_window\": 5", {"--window-size=4,0"}, "mistral", 1, {"\"sliding_window\": 5"}},
        {MISTRAL, {"--window-size=4095,0"}, "mistral", 1, {"\"sliding_window\": 4096"}},
        {MISTRAL ", \"sliding_window\": null", {NULL}, "llama", 0, {"sliding_window"}},
        {QWEN2 ", \"sliding_window\": 5, \"use_sliding_window\": false",
         {"--add-qkv-bias", "--disable-bias-linear"},
         "qwen2",
         1,
         {"\"use_sliding_window\": false", "sliding_window"}},
        {QWEN2 ", \"sliding_window\": 5, \"use_sliding_window\": true",
         {NULL},
         "qwen2",
         1,
         {"sliding_window"}},
        {QWEN2 ", \"sliding_window\": 5, \"use_sliding_window\": true, \"max_window_layers\": 0",
         {"--window-size=4,0"},
         "qwen2",
         1,
         {"\"use_sliding_window\": true", "\"sliding_window\": 5", "\"max_window_layers\": 0"}},
        {QWEN2 ", \"sliding_window\": 5, \"use_sliding_window\": true, \"max_window_layers\": 3",
         {"--window-size=4,0", "--window-attn-skip-freq=0,0,0,1"},
         "qwen2",
         1,
         {"\"max_window_layers\": 3", "\"sliding_attention\""}},
        {QWEN2 ", \"sliding_window\": 7, \"use_sliding_window\": true, \"max_window_layers\": 3, "
               "\"layer_types\": [\"full_attention\", \"sliding_attention\", \"full_attention\", "
               "\"sliding_attention\"]",
         {"--window-size=6,0", "--window-attn-skip-freq=0,1,0,1"},
         "qwen2",
         2,
         {"\"sliding_attention\"", "\"full_attention\""}},
    };
    for (size_t i = 0; i < COUNT(cases); i++) check(&cases[i]);
}

static void invalid_values(void **state) {
    static const struct {
        const char *members, *what;
    } cases[] = {
        {LLAMA ", \"rope_scaling\": {\"rope_type\": \"longrope\", \"factor\": 2}", "rope_type 'longrope'"},
        {LLAMA ", \"rope_scaling\": {\"rope_type\": \"linear\"}", "rope_scaling.factor '(none)'"},
        {LLAMA ", \"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": \"8\"}", "rope_scaling.factor '8'"},
        {LLAMA ", \"rope_scaling\": {\"rope_type\": \"yarn\", \"mscale\": []}", "rope_scaling.mscale '"},
        {LLAMA ", \"rope_scaling\": {\"rope_type\": \"yarn\", \"truncate\": 1}", "truncate '1'"},
        {LLAMA ", \"rope_scaling\": {\"rope_type\": \"yarn\", \"original_max_position_embeddings\": 0}",
         "original_max_position_embeddings '0'"},
        {MISTRAL ", \"sliding_window\": 0", "sliding_window '0'"},
        {MISTRAL ", \"sliding_window\": \"5\"", "sliding_window '5'"},
        {QWEN2 ", \"use_sliding_window\": 1", "use_sliding_window '1'"},
        {QWEN2 ", \"use_sliding_window\": true, \"max_window_layers\": -1", "max_window_layers '-1'"},
        {QWEN2 ", \"use_sliding_window\": true, \"layer_types\": [\"full_attention\"]", "layer_types '"},
        {QWEN2 ", \"layer_types\": [\"sliding_attention\"]", "layer_types '[sliding_attention]'"},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        Error err = {0};
        HfConfig config;
        if (read_members(&config, cases[i].members, &err)) fail_msg("%s is accepted", cases[i].members);
        if (!strstr(err.what, cases[i].what)) fail_msg("'%s' lacks %s", err.what, cases[i].what);
    }
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scaled_rotary_positions),
        cmocka_unit_test(sliding_windows),
        cmocka_unit_test(invalid_values),
    };
    Launch launch;
    leaks_launch(&launch, &argc, &argv);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    failed += leaks_found();
    launch_finalize(&launch);
    return failed;
}
