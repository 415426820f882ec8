// Flags of FP8: defaults, which layers run in FP8, bad combinations and sizes, notes, and
// checkpoints of runs with other FP8 flags.
#include "test/unit/config/command_line.h"

#include "llmc/config/config_roles.h"
#include "llmc/ops_fp8.h"

#define FP8 SMALL "--fp8-format hybrid "
#define BLOCKWISE \
    SMALL \
    "--fp8-format e4m3 --fp8-recipe blockwise --seq-length 128 --max-position-embeddings 128 " \
    "--hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 512 "

static void defaults_match_megatron(void **state) {
    Run run;
    must_run(&run, SMALL, 2);
    json_has(&run.config,
             "\"fp8_format\":\"none\",\"fp8_recipe\":\"delayed\",\"fp8_margin\":0,\"fp8_amax_history_len\":1,"
             "\"fp8_amax_compute_algo\":\"most_recent\",\"first_last_layers_bf16\":false,"
             "\"num_layers_at_start_in_bf16\":1,\"num_layers_at_end_in_bf16\":1");
    assert_false(config_fp8_on(&run.config));
    assert_int_equal(config_fp8_layers(&run.config), 0);
    config_free(&run.config);
}

static void choices_are_stored(void **state) {
    static const struct {
        const char *words;
        Fp8Format format;
        Fp8Recipe recipe;
        int length, margin;
        Fp8AmaxAlgo algo;
    } good[] = {
        {FP8, FP8_FORMAT_HYBRID, FP8_DELAYED, 1, 0, FP8_MOST_RECENT},
        {SMALL "--fp8-format e4m3 --fp8-recipe tensorwise", FP8_FORMAT_E4M3, FP8_TENSORWISE, 1, 0,
         FP8_MOST_RECENT},
        {FP8 "--fp8-recipe delayed --fp8-margin 2 --fp8-amax-history-len 1024 --fp8-amax-compute-algo max",
         FP8_FORMAT_HYBRID, FP8_DELAYED, 1024, 2, FP8_MAX},
        {BLOCKWISE, FP8_FORMAT_E4M3, FP8_BLOCKWISE, 1, 0, FP8_MOST_RECENT},
        // As in Transformer Engine, gradients may be E5M2 with block scales.
        {BLOCKWISE "--fp8-format hybrid", FP8_FORMAT_HYBRID, FP8_BLOCKWISE, 1, 0, FP8_MOST_RECENT},
        {FP8 "--fp8-recipe tensorwise --fp8-format none", FP8_FORMAT_NONE, FP8_TENSORWISE, 1, 0,
         FP8_MOST_RECENT},
    };
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        Run run;
        must_run(&run, good[i].words, 2);
        assert_string_equal(run.notes, "");
        assert_int_equal(run.config.fp8_format, good[i].format);
        assert_int_equal(run.config.fp8_recipe, good[i].recipe);
        assert_int_equal(run.config.fp8_amax_history_len, good[i].length);
        assert_int_equal(run.config.fp8_margin, good[i].margin);
        assert_int_equal(run.config.fp8_amax_compute_algo, good[i].algo);
        assert_int_equal(config_fp8_on(&run.config), good[i].format != FP8_FORMAT_NONE);
        config_free(&run.config);
    }
}

static void layers_at_both_ends_can_stay_in_bf16(void **state) {
    static const struct {
        const char *words, *layers;  // 1: in FP8
    } cases[] = {
        {"", "111111"},
        {"--first-last-layers-bf16", "011110"},
        {"--first-last-layers-bf16 --num-layers-at-start-in-bf16 2", "001110"},
        {"--first-last-layers-bf16 --num-layers-at-start-in-bf16 0 --num-layers-at-end-in-bf16 3", "111000"},
        {"--first-last-layers-bf16 --num-layers-at-start-in-bf16 3 --num-layers-at-end-in-bf16 2", "000100"},
        {"--first-last-layers-bf16 --num-layers-at-start-in-bf16 0 --num-layers-at-end-in-bf16 0", "111111"},
        // layers are counted over all stages
        {"--first-last-layers-bf16 --pipeline-model-parallel-size 2", "011110"},
        {"--fp8-format none", "000000"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char line[2048];
        Run run;
        snprintf(line, sizeof line, "%s--fp8-recipe tensorwise --num-layers 6 %s", FP8, cases[i].words);
        must_run(&run, line, 2);
        int layers = 0;
        for (int l = 0; l < 6; l++) {
            bool in_fp8 = cases[i].layers[l] == '1';
            assert_int_equal(config_layer_in_fp8(&run.config, l), in_fp8);
            layers += in_fp8;
        }
        assert_int_equal(config_fp8_layers(&run.config), layers);
        config_free(&run.config);
    }
}

static void bad_flags_are_refused(void **state) {
    static const struct {
        const char *words, *what;
    } bad[] = {
        {"--fp8-format e5m2", "--fp8-format e5m2: not one of none|e4m3|hybrid"},
        {"--fp8-format hybrid --fp8-recipe mxfp8",
         "not one of tensorwise|delayed|blockwise; mxfp8 and nvfp4"},
        {"--fp8-format hybrid --fp8-margin -1", "--fp8-margin -1: must be at least 0"},
        {"--fp8-format hybrid --fp8-amax-history-len 0", "--fp8-amax-history-len 0: must be at least 1"},
        {"--fp8-format hybrid --fp8-amax-compute-algo mean", "not one of most_recent|max"},
        {"--no-fp8-wgrad", "--no-fp8-wgrad is refused: weight gradients of FP8 layers are always"},
        {"--fp8-param-gather", "--fp8-param-gather is refused: model weights are bf16"},
        {"--fp8-output-proj", "--fp8-output-proj is refused: the LM head is bf16"},
        {"--fp8-quantizer-factory f", "--fp8-quantizer-factory is refused: this FP8 setting"},
        // settings without a format
        {"--fp8-recipe tensorwise", "--fp8-recipe needs --fp8-format hybrid or e4m3; add it, or drop"},
        {"--fp8-margin 1", "--fp8-margin needs --fp8-format"},
        {"--fp8-amax-history-len 16", "--fp8-amax-history-len needs --fp8-format"},
        {"--fp8-amax-compute-algo max", "--fp8-amax-compute-algo needs --fp8-format"},
        {"--first-last-layers-bf16", "--first-last-layers-bf16 needs --fp8-format"},
        {"--num-layers-at-start-in-bf16 2", "--num-layers-at-start-in-bf16 needs --fp8-format"},
        {"--num-layers-at-end-in-bf16 2", "--num-layers-at-end-in-bf16 needs --fp8-format"},
        {"--fp8-format hybrid --fp8-amax-history-len 8193", "must be at least 1 and at most 8192"},
        {"--fp8-format hybrid --local-steps 4",
         "--local-steps cannot be combined with --fp8-recipe delayed, whose scales all nodes share in every "
         "step; use --fp8-recipe tensorwise"},
        // layers in bf16
        {"--fp8-format hybrid --first-last-layers-bf16",
         "--first-last-layers-bf16 cannot be combined with --fp8-recipe delayed; use --fp8-recipe "
         "tensorwise"},
        {"--fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16",
         "--num-layers-at-start-in-bf16 1 and --num-layers-at-end-in-bf16 1 leave none of the 2 layers"},
        {"--fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16 "
         "--num-layers-at-start-in-bf16 99",
         "leave none of the 2 layers in FP8"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char line[2048];
        snprintf(line, sizeof line, "%s%s", SMALL, bad[i].words);
        must_fail(line, 0, bad[i].what);
    }
}

// Sizes of SMALL: 64 tokens, hidden size 64, attention 64 (QKV 192), MLP 256.
static void sizes_must_be_multiples(void **state) {
    static const struct {
        const char *words, *what;
    } bad[] = {
        {"--seq-length 20", "multiples of 16, but the number of tokens of a micro-batch is 40"},
        {"--hidden-size 72 --kv-channels 16", "multiples of 16, but the hidden size is 72"},
        {"--num-attention-heads 3 --kv-channels 8", "the width of the attention per rank is 24"},
        {"--ffn-hidden-size 264", "the width of the MLP per rank is 264"},
        {"--group-query-attention --num-query-groups 1 --kv-channels 8 --num-attention-heads 4 "
         "--ffn-hidden-size 264",
         "the width of the MLP per rank is 264; change --ffn-hidden-size, or drop --fp8-format"},
        // per rank with tensor parallelism
        {"--ffn-hidden-size 304 --tensor-model-parallel-size 2", "the width of the MLP per rank is 152"},
        {"--tensor-model-parallel-size 4 --kv-channels 8", "the width of the attention per rank is 8"},
        {"--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 1 --seq-length 16",
         "the number of tokens of a micro-batch per rank is 8; change --micro-batch-size or --seq-length"},
        {"--micro-batch-size 1 --seq-length 8",
         "the number of tokens of a micro-batch is 8; change --micro-batch-size or --seq-length, or drop"},
        {"--fp8-recipe blockwise",
         "--fp8-recipe blockwise needs multiples of 128, but the number of tokens of a"},
        {"--fp8-recipe blockwise --micro-batch-size 4", "multiples of 128, but the hidden size is 64"},
        {"--fp8-recipe blockwise --micro-batch-size 4 --hidden-size 128",
         ""},  // attention 128, QKV 384, MLP 512
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char line[2048];
        snprintf(line, sizeof line, "%s%s", FP8, bad[i].words);
        Run run;
        if (*bad[i].what) {
            must_fail(line, 0, bad[i].what);
            snprintf(line, sizeof line, "%s%s --fp8-format none", FP8, bad[i].words);
        }
        must_run(&run, line, 0);  // bf16 has no such limits
        config_free(&run.config);
    }
}

// Every model config and preset can be combined with FP8, with Megatron-LM's usual T.
static void model_configs_accept_fp8(void **state) {
    static const char *const models[] = {
        "@configs/tiny.args",
        "@configs/gpt_125m.args",
        "@configs/gpt_350m.args",
        "@configs/gpt_1.3b.args",
        "@configs/gpt_2.7b.args",
        "@configs/gpt_6.7b.args --tensor-model-parallel-size 4",
        "@configs/gpt_13b.args --tensor-model-parallel-size 8 --sequence-parallel",
        "@configs/gpt_18b.args --tensor-model-parallel-size 8",
        "@configs/llama_125m.args",
        "@configs/llama_1.1b.args --tensor-model-parallel-size 2",
        "@configs/llama_3b.args",
        "@configs/llama_8b.args --tensor-model-parallel-size 4",
    };
    static const char *const recipes[] = {"delayed", "tensorwise --first-last-layers-bf16"};
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++) {
        for (size_t k = 0; k < sizeof recipes / sizeof recipes[0]; k++) {
            char line[2048];
            Run run;
            snprintf(line, sizeof line,
                     "%s --mock-data --plan --plan-world-size 64 --global-batch-size 2048 @configs/eden.args "
                     "--fp8-format hybrid --fp8-recipe %s",
                     models[i], recipes[k]);
            must_run(&run, line, 64);
            assert_string_equal(run.notes, "");
            assert_int_equal(config_fp8_layers(&run.config), run.config.num_layers - (k ? 2 : 0));
            config_free(&run.config);
        }
    }
}

static void notes_name_what_has_no_effect(void **state) {
    static const struct {
        const char *words, *note;
    } notes[] = {
        {"--fp8-interval 1", "--fp8-interval has no effect: scales are computed in every step\n"},
        {"--fp8-recipe tensorwise --fp8-margin 1",
         "--fp8-margin has no effect without --fp8-recipe delayed\n"},
        {"--fp8-recipe tensorwise --fp8-amax-history-len 4",
         "--fp8-amax-history-len has no effect without --fp8-recipe delayed\n"},
        {"--fp8-recipe tensorwise --fp8-amax-compute-algo max",
         "--fp8-amax-compute-algo has no effect without --fp8-recipe delayed\n"},
        {"--fp8-recipe tensorwise --num-layers-at-end-in-bf16 1",
         "--num-layers-at-end-in-bf16 has no effect without --first-last-layers-bf16\n"},
        {"--num-layers-at-start-in-bf16 1",
         "--num-layers-at-start-in-bf16 has no effect without --first-last-layers-bf16\n"},
    };
    for (size_t i = 0; i < sizeof notes / sizeof notes[0]; i++) {
        char line[2048];
        Run run;
        snprintf(line, sizeof line, "%s%s", FP8, notes[i].words);
        must_run(&run, line, 1);
        assert_string_equal(run.notes, notes[i].note);
        config_free(&run.config);
    }
}

static void a_checkpoint_may_continue_in_another_precision(void **state) {
    static const struct {
        const char *was, *now, *note;
        int notes;
    } cases[] = {
        {SMALL, FP8, "fp8_format was \"none\" in the checkpoint and is now \"hybrid\", so ", 1},
        {FP8 "--fp8-recipe tensorwise", SMALL,
         "fp8_format was \"hybrid\" in the checkpoint and is now \"none\"", 1},
        {FP8, FP8 "--fp8-recipe tensorwise", "fp8_recipe was \"delayed\" in the checkpoint and is now ", 1},
        {FP8, FP8 "--fp8-amax-history-len 16", "fp8_amax_history_len was 1 in the checkpoint and is now 16",
         1},
        {FP8, FP8 "--fp8-amax-history-len 16 --fp8-margin 2 --fp8-format e4m3",
         "fp8_margin was 0 in the checkpoint and is now 2, so linear layers round differently\n", 3},
        {FP8, FP8, "", 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Run run;
        assert_true(resume(&run, cases[i].was, cases[i].now));
        if (!strstr(run.notes, cases[i].note)) fail_msg("notes are: %s", run.notes);
        int lines = 0;
        for (const char *c = run.notes; *c; c++) lines += *c == '\n';
        assert_int_equal(lines, cases[i].notes);
        config_free(&run.config);
    }
}

static char *json_of(const char *line) {
    Run run;
    must_run(&run, line, 2);
    char *json = config_to_json(&run.config);
    config_free(&run.config);
    return json;
}

static void ranks_need_equal_flags(void **state) {
    static const struct {
        const char *words, *what;
    } others[] = {
        {SMALL, "--fp8-format is \"none\" here and \"hybrid\" on rank 0"},
        {FP8 "--fp8-recipe tensorwise", "--fp8-recipe is \"tensorwise\" here and \"delayed\" on rank 0"},
        {FP8 "--fp8-margin 1", "--fp8-margin is 1 here and 0 on rank 0"},
        {FP8 "--fp8-amax-history-len 2", "--fp8-amax-history-len is 2 here"},
        {FP8 "--fp8-amax-compute-algo max", "--fp8-amax-compute-algo is \"max\" here"},
    };
    char *first = json_of(FP8);
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        Error err;
        char *own = json_of(others[i].words);
        assert_false(config_same(own, first, &err));
        assert_int_equal(err.code, EXIT_USAGE);
        if (!strstr(err.what, others[i].what)) fail_msg("says: %s", err.what);
        free(own);
    }
    free(first);
}

// Programs that load a checkpoint's model compute in bf16, so they read none of these flags.
static void the_model_does_not_depend_on_fp8(void **state) {
    char key[OPTION_KEY_BYTES];
    for (int at = 0; config_next_key(MODEL | LOADED | RESIDUAL | SCHEDULE, &at, key);) {
        if (strstr(key, "fp8") || strstr(key, "in_bf16")) fail_msg("%s is part of the model", key);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults_match_megatron),
        cmocka_unit_test(choices_are_stored),
        cmocka_unit_test(layers_at_both_ends_can_stay_in_bf16),
        cmocka_unit_test(bad_flags_are_refused),
        cmocka_unit_test(sizes_must_be_multiples),
        cmocka_unit_test(model_configs_accept_fp8),
        cmocka_unit_test(notes_name_what_has_no_effect),
        cmocka_unit_test(a_checkpoint_may_continue_in_another_precision),
        cmocka_unit_test(ranks_need_equal_flags),
        cmocka_unit_test(the_model_does_not_depend_on_fp8),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
