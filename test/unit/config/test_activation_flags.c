// Flags of --quantized-activations and --quantized-tensor-parallel: defaults, values, conflicts,
// notes, and resuming with other flags.
#include "sdp4bit/codec.h"
#include "test/unit/config/command_line.h"

#define STAGES SMALL "--pipeline-model-parallel-size 2 "
#define QUANTIZED STAGES "--quantized-activations "

static void defaults(void **state) {
    static const char *const fragments[] = {"\"quantized_activations\":false",
                                            "\"quantized_tensor_parallel\":false",
                                            "\"activation_quantization_bits_forward\":8",
                                            "\"activation_quantization_bits_backward\":8",
                                            "\"aq_group_size\":64",
                                            "\"aq_rounding\":\"stochastic\""};
    Run run;
    must_run(&run, SMALL, 1);
    for (size_t i = 0; i < sizeof fragments / sizeof *fragments; i++) json_has(&run.config, fragments[i]);
    config_free(&run.config);
}

static void flags_are_accepted(void **state) {
    Run run;
    must_run(&run,
             QUANTIZED
             "--activation-quantization-bits-forward 4 --activation-quantization-bits-backward 16 "
             "--aq-group-size 32 --aq-rounding nearest",
             2);
    const Config *c = &run.config;
    assert_true(c->quantized_activations && c->aq_group_size == 32);
    assert_int_equal(c->activation_quantization_bits_forward, 4);
    assert_int_equal(c->activation_quantization_bits_backward, 16);
    assert_int_equal(c->aq_rounding, ROUND_NEAREST);
    assert_string_equal(run.notes, "");
    config_free(&run.config);
}

static void impossible_flags_are_refused(void **state) {
    static const struct {
        const char *line, *what;
    } bad[] = {
        {SMALL "--quantized-activations",
         "--quantized-activations needs --pipeline-model-parallel-size 2 or more, because only pipeline "
         "stages "
         "send activations; add it, or drop --quantized-activations"},
        {QUANTIZED "--activation-quantization-bits-forward 2", "bits-forward 2: must be 4 or 8 or 16"},
        {QUANTIZED "--activation-quantization-bits-backward 12", "bits-backward 12: must be 4 or 8 or 16"},
        {QUANTIZED "--aq-group-size 48", "--aq-group-size 48"},
        {QUANTIZED "--aq-group-size 128", "--aq-group-size 128 does not divide --hidden-size 64"},
        {QUANTIZED "--aq-rounding random", "not one of nearest|stochastic"},
        {SMALL "--quantized-tensor-parallel",
         "--quantized-tensor-parallel needs --tensor-model-parallel-size 2 or more; add it, or drop "
         "--quantized-tensor-parallel"},
        {SMALL "--tensor-model-parallel-size 2 --quantized-tensor-parallel --aq-group-size 128",
         "--aq-group-size 128 does not divide --hidden-size 64"},
        {QUANTIZED "--gpus-per-node 1 --local-steps 4", "drop --pipeline-model-parallel-size"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) must_fail(bad[i].line, 0, bad[i].what);
}

static void notes_name_flags_without_effect(void **state) {
    Run run;
    must_run(&run, STAGES "--activation-quantization-bits-backward 4 --aq-rounding nearest", 2);
    assert_string_equal(run.notes,
                        "--activation-quantization-bits-backward has no effect without "
                        "--quantized-activations\n"
                        "--aq-rounding has no effect without --quantized-activations\n");
    config_free(&run.config);
    must_run(&run, STAGES "--aq-group-size 32", 2);
    assert_string_equal(run.notes,
                        "--aq-group-size has no effect without --quantized-activations or "
                        "--quantized-tensor-parallel\n");
    config_free(&run.config);
    must_run(&run, SMALL "--tensor-model-parallel-size 2 --quantized-tensor-parallel --aq-group-size 32", 2);
    assert_string_equal(run.notes, "");
    config_free(&run.config);
}

// What is sent between stages is not part of the training state.
static void checkpoints(void **state) {
    Run run;
    assert_true(resume(&run, SMALL "--global-batch-size 4", QUANTIZED "--global-batch-size 4"));
    assert_string_equal(run.notes, "");
    config_free(&run.config);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults),
        cmocka_unit_test(flags_are_accepted),
        cmocka_unit_test(impossible_flags_are_refused),
        cmocka_unit_test(notes_name_flags_without_effect),
        cmocka_unit_test(checkpoints),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
