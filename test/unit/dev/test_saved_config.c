// config_of_checkpoint: the flags that it reads from a run's checkpoint, and invalid checkpoints.
#include "dev/lib/saved_config.h"
#include "test/unit/config/command_line.h"

static const Words NONE = {NULL, 0};

// The run used several ranks in a different layout.
static void model_equals_the_runs(void **state) {
    Run run;
    Config model;
    Error err;
    char notes[NOTES];
    must_run(&run,
             SMALL
             "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --swiglu "
             "--normalization RMSNorm --position-embedding-type rope --rotary-percent 0.5 "
             "--group-query-attention --num-query-groups 2 --disable-bias-linear "
             "--untie-embeddings-and-output-weights --ffn-hidden-size 80 --norm-epsilon 1e-6 "
             "--qk-layernorm --add-qkv-bias --window-size 7,0 --window-attn-skip-freq 1,0 "
             "--quantized-weights --global-batch-size 8 "
             "--make-vocab-size-divisible-by 96",
             8);
    char *json = config_to_json(&run.config);
    assert_true(config_of_checkpoint(&model, json, &NONE, &err));
    assert_int_equal(model.vocab_size_padded, run.config.vocab_size_padded);
    assert_int_equal(model.eod, 256);
    assert_int_equal(model.tensor_model_parallel_size, 1);
    assert_int_equal(model.pipeline_model_parallel_size, 1);
    assert_false(model.quantized_weights);
    model.finetune = true;  // compares only the model
    assert_true(config_match_checkpoint(&model, json, notes, sizeof notes, &err));
    config_free(&model);
    free(json);
    config_free(&run.config);
}

// The arguments that convert_checkpoint writes: no sequence length, no training flags, no
// --vocab-size.
#define IMPORTED \
    "\"num_layers\":1,\"hidden_size\":16,\"num_attention_heads\":2,\"ffn_hidden_size\":40," \
    "\"max_position_embeddings\":12,\"padded_vocab_size\":56," \
    "\"tokenizer_type\":\"NullTokenizer\""

static void an_imported_model(void **state) {
    static const char *const words[] = {"--tokenizer-type", "Byte"};
    const char *json = "{" IMPORTED ",\"unpadded_vocab_size\":50,\"eod\":49,\"vocab_file\":null}";
    Words own = {(const char **)words, 2};
    Config model;
    Error err;
    assert_true(config_of_checkpoint(&model, json, &NONE, &err));
    assert_int_equal(model.seq_length, 12);
    assert_int_equal(model.vocab_size, 49);
    assert_int_equal(model.vocab_size_padded, 56);
    assert_int_equal(model.tokenizer_type, TOKENIZER_NULL);
    config_free(&model);
    assert_true(config_of_checkpoint(&model, json, &own, &err));
    assert_int_equal(model.tokenizer_type, TOKENIZER_BYTE);
    config_free(&model);
    // The end-of-document id need not be the last one.
    json = "{" IMPORTED ",\"unpadded_vocab_size\":50,\"eod\":2,\"vocab_file\":null}";
    assert_true(config_of_checkpoint(&model, json, &NONE, &err));
    assert_int_equal(model.eod, 2);
    assert_string_equal(model.tokenizer_eod, "2");
    config_free(&model);
    assert_true(config_of_checkpoint(&model, json, &own, &err));
    assert_null(model.tokenizer_eod);
    config_free(&model);
}

// Older programs ignored NullTokenizer's --tokenizer-eod, so it could have any value.
static void an_ignored_eod(void **state) {
    static const char *const saved[] = {"<|x|>", "abc", "5"};
    for (int i = 0; i < 3; i++) {
        Config model;
        Error err;
        char *json = text_format("{" IMPORTED
                                 ",\"unpadded_vocab_size\":50,\"eod\":49,\"tokenizer_eod\":\"%s\"}",
                                 saved[i]);
        assert_true(config_of_checkpoint(&model, json, &NONE, &err));
        assert_int_equal(model.eod, 49);
        assert_string_equal(model.tokenizer_eod, "49");
        config_free(&model);
        free(json);
    }
}

static void invalid_models_are_refused(void **state) {
    static const struct {
        const char *json, *why;
    } cases[] = {
        {"", "not a JSON object"},
        {"{}", "missing --num-layers"},
        {"{" IMPORTED "}", "--vocab-size"},
        {"{" IMPORTED ",\"unpadded_vocab_size\":50,\"eod\":50}", "vocabulary sizes"},
        {"{" IMPORTED ",\"unpadded_vocab_size\":57,\"eod\":1}", "vocabulary sizes"},
        {"{" IMPORTED ",\"unpadded_vocab_size\":50,\"eod\":49,\"norm_epsilon\":\"x\"}", "--norm-epsilon"},
        {"{" IMPORTED ",\"unpadded_vocab_size\":50,\"eod\":49,\"group_query_attention\":true,"
         "\"num_query_groups\":3}",
         "--num-query-groups"},
        {"{" IMPORTED ",\"unpadded_vocab_size\":50,\"eod\":49,\"normalization\":\"BatchNorm\"}",
         "--normalization"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Config model;
        Error err;
        assert_false(config_of_checkpoint(&model, cases[i].json, &NONE, &err));
        assert_int_equal(err.code, EXIT_CHECKPOINT);
        if (!strstr(err.what, cases[i].why)) fail_msg("case %d: %s", (int)i, err.what);
        assert_null(strchr(err.what, '\n'));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(model_equals_the_runs),
        cmocka_unit_test(an_imported_model),
        cmocka_unit_test(an_ignored_eod),
        cmocka_unit_test(invalid_models_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
