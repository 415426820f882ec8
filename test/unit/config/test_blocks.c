// Flags of transformer blocks (GPT-2 or Llama): their effects, and invalid combinations.
#include "test/unit/config/command_line.h"

static void good_lines(void **state) {
    static const struct {
        const char *words, *fragment;
    } good[] = {
        {"",
         "\"normalization\":\"LayerNorm\",\"norm_epsilon\":1e-05,"
         "\"position_embedding_type\":\"learned_absolute\",\"rotary_base\":10000.0,"
         "\"rotary_percent\":1.0,\"use_rope_scaling\":false,\"rope_scaling_factor\":8.0,"
         "\"rotary_seq_len_interpolation_factor\":1.0,\"rotary_scaling_factor\":1.0,"
         "\"yarn_original_max_position_embeddings\":4096,\"yarn_beta_fast\":32.0,\"yarn_beta_slow\":1.0,"
         "\"no_yarn_correction_range_round_to_int\":false,\"yarn_attention_factor\":0.0,"
         "\"window_size\":null,\"window_attn_skip_freq\":null,"
         "\"swiglu\":false,\"disable_bias_linear\":false,\"add_qkv_bias\":false,"
         "\"untie_embeddings_and_output_weights\":false,\"qk_layernorm\":false"},
        {"--qk-layernorm", "\"qk_layernorm\":true"},
        {"--normalization RMSNorm --position-embedding-type rope --rotary-base 500000 --norm-epsilon 1e-6",
         "\"normalization\":\"RMSNorm\",\"norm_epsilon\":1e-06,\"position_embedding_type\":\"rope\","
         "\"rotary_base\":500000.0"},
        {"--position-embedding-type rope --use-rope-scaling --rope-scaling-factor 32",
         "\"use_rope_scaling\":true,\"rope_scaling_factor\":32.0"},
        {"--position-embedding-type rope --rotary-seq-len-interpolation-factor 2.5",
         "\"rotary_seq_len_interpolation_factor\":2.5"},
        {"--position-embedding-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings "
         "32768 "
         "--yarn-beta-fast 16 --yarn-beta-slow 2 --no-yarn-correction-range-round-to-int",
         "\"rotary_scaling_factor\":4.0,\"yarn_original_max_position_embeddings\":32768,"
         "\"yarn_beta_fast\":16.0,\"yarn_beta_slow\":2.0,\"no_yarn_correction_range_round_to_int\":true"},
        {"--window-size 7,0 --window-attn-skip-freq 3",
         "\"window_size\":\"7,0\",\"window_attn_skip_freq\":\"3\""},
        {"--disable-bias-linear --add-qkv-bias", "\"add_qkv_bias\":true"},
        {"--swiglu", "\"ffn_hidden_size\":128"},  // 64 x 8 / 3, rounded down to a multiple of 64
        {"--swiglu --ffn-hidden-size 176", "\"ffn_hidden_size\":176"},
        {"--group-query-attention --num-query-groups 2",
         "\"group_query_attention\":true,\"num_query_groups\":2"},
        {"--group-query-attention", "\"num_query_groups\":1"},
        {"", "\"kv_channels\":16"},
        {"--kv-channels 32", "\"kv_channels\":32"},
        {"--kv-channels 32 --hidden-size 72 --num-attention-heads 5", "\"kv_channels\":32"},
    };
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        char line[1024];
        Run run;
        snprintf(line, sizeof line, "%s%s", SMALL, good[i].words);
        must_run(&run, line, 1);
        json_has(&run.config, good[i].fragment);
        assert_string_equal(run.notes, "");
        config_free(&run.config);
    }
}

static void rotary_columns(void **state) {
    Run run;
    must_run(&run, SMALL, 1);
    assert_int_equal(config_rotary_columns(&run.config), 0);
    config_free(&run.config);
    must_run(&run, SMALL "--position-embedding-type rope --rotary-percent 0.5", 1);
    assert_int_equal(config_rotary_columns(&run.config), 8);
    config_free(&run.config);
}

// windows: the keys that a query of each layer sees
static void windows_of_layers(void **state) {
    static const struct {
        const char *words;
        int windows[4];
    } cases[] = {
        {"", {0, 0, 0, 0}},
        {"--window-size 7,0", {8, 8, 8, 8}},
        {"--window-size (0,0)", {1, 1, 1, 1}},
        {"--window-size -1,0", {0, 0, 0, 0}},
        {"--window-size 7,0 --window-attn-skip-freq 1", {0, 0, 0, 0}},
        {"--window-size 7,0 --window-attn-skip-freq 2", {8, 0, 8, 0}},
        {"--window-size 7,0 --window-attn-skip-freq 3", {8, 8, 0, 8}},
        {"--window-size 7,0 --window-attn-skip-freq [0,1,1,0]", {0, 8, 8, 0}},
        {"--window-size 7,0 --window-attn-skip-freq 1,0,0,1", {8, 0, 0, 8}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char line[1024];
        Run run;
        snprintf(line, sizeof line, "%s--num-layers 4 %s", SMALL, cases[i].words);
        must_run(&run, line, 1);
        for (int l = 0; l < 4; l++) {
            if (config_window(&run.config, l) != cases[i].windows[l])
                fail_msg("%s: layer %d sees %d keys", line, l, config_window(&run.config, l));
        }
        config_free(&run.config);
    }
}

static void bad_lines(void **state) {
    static const struct {
        const char *words, *what;
    } bad[] = {
        {"--use-rotary-position-embeddings", "use --position-embedding-type rope"},
        {"--rotary-interleaved", "only the non-interleaved rotation"},
        {"--rotary-percent 0", "above 0"},
        {"--rotary-base 0.5", "at least 1"},
        {"--position-embedding-type relative", "not one of learned_absolute|rope"},
        {"--window-size 7", "--window-size '7' is invalid"},
        {"--window-size 7,7", "--window-size '7,7' is invalid"},
        {"--window-size -2,0", "--window-size '-2,0' is invalid"},
        {"--window-size 7,0,0", "--window-size '7,0,0' is invalid"},
        {"--window-size seven,0", "--window-size 'seven,0' is invalid"},
        {"--window-size 7,0 --window-attn-skip-freq 0", "is not a positive integer"},
        {"--window-size 7,0 --window-attn-skip-freq two", "is not a positive integer"},
        {"--window-size 7,0 --window-attn-skip-freq 1,0,2", "is not a list of --num-layers"},
        {"--window-size 7,0 --window-attn-skip-freq ]3", "is not a list of --num-layers"},
        {"--window-size 7,0 --window-attn-skip-freq [1]", "is not a list of --num-layers"},
        {"--window-size 7,0 --window-attn-skip-freq 1,0,1,0,1,0,1,0,1", "is not a list of --num-layers"},
        {"--position-embedding-type yarn --use-rope-scaling", "both scale the rotation frequencies"},
        {"--position-embedding-type rope --use-rope-scaling --rotary-seq-len-interpolation-factor 2",
         "both scale the rotation frequencies"},
        {"--position-embedding-type yarn --rotary-seq-len-interpolation-factor 2",
         "both scale the rotation frequencies"},
        {"--position-embedding-type yarn --yarn-beta-slow 40", "larger than --yarn-beta-fast 32"},
        {"--position-embedding-type yarn --rotary-base 1", "--rotary-base above 1"},
        {"--position-embedding-type yarn --rotary-scaling-factor 0.5", "at least 1"},
        {"--position-embedding-type rope --rotary-percent 0.2", "rotates an even number of at least 2"},
        {"--group-query-attention --num-query-groups 3",
         "--num-attention-heads 4 is not divisible by --num-query-groups 3"},
        {"--group-query-attention --num-query-groups 0", "at least 1"},
        {"--group-query-attention --num-query-groups 2 --tensor-model-parallel-size 4",
         "--num-query-groups 2 is not divisible by --tensor-model-parallel-size 4"},
        {"--kv-channels 36", "--kv-channels 36 must be a multiple of 8"},
        {"--num-attention-heads 65536 --kv-channels 65536", "with heads of size 65536 is too wide"},
        {"--normalization rmsnorm", "not one of LayerNorm|RMSNorm"},
        {"--hidden-size 16 --num-attention-heads 2 --swiglu", "an MLP of width 0 for --hidden-size 16"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char line[1024];
        snprintf(line, sizeof line, "%s%s", SMALL, bad[i].words);
        must_fail(line, 0, bad[i].what);
    }
}

static void notes(void **state) {
    static const struct {
        const char *words, *note;
    } noted[] = {
        {"--num-query-groups 2", "--num-query-groups has no effect without --group-query-attention\n"},
        {"--rotary-percent 0.5",
         "--rotary-percent has no effect without --position-embedding-type rope or yarn\n"},
        {"--position-embedding-type rope --yarn-beta-fast 8",
         "--yarn-beta-fast has no effect without --position-embedding-type yarn\n"},
        {"--rotary-scaling-factor 8",
         "--rotary-scaling-factor has no effect without --position-embedding-type yarn\n"},
        {"--window-attn-skip-freq 3", "--window-attn-skip-freq has no effect without --window-size\n"},
        {"--add-qkv-bias", "--add-qkv-bias has no effect without --disable-bias-linear\n"},
        {"--position-embedding-type rope --reset-position-ids",
         "--reset-position-ids has no effect without learned positions\n"},
    };
    for (size_t i = 0; i < sizeof noted / sizeof noted[0]; i++) {
        char line[1024];
        Run run;
        snprintf(line, sizeof line, "%s%s", SMALL, noted[i].words);
        must_run(&run, line, 1);
        assert_string_equal(run.notes, noted[i].note);
        config_free(&run.config);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(good_lines), cmocka_unit_test(rotary_columns), cmocka_unit_test(windows_of_layers),
        cmocka_unit_test(bad_lines),  cmocka_unit_test(notes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
