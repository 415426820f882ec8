// Flags of --optimizer muon: defaults of Megatron-LM, ranges, conflicts, notes, and checkpoints of
// the other optimizer.
#include "test/unit/config/command_line.h"

#define MUON SMALL "--optimizer muon "

static void defaults_match_megatron(void **state) {
    static const char *const fragments[] = {"\"optimizer\":\"adam\"",
                                            "\"muon_momentum\":0.9",
                                            "\"muon_nesterov\":false",
                                            "\"muon_no_split_qkv\":false",
                                            "\"muon_scale_mode\":\"spectral\"",
                                            "\"muon_extra_scale_factor\":1.0",
                                            "\"muon_coefficient_type\":\"quintic\"",
                                            "\"muon_num_ns_steps\":5",
                                            "\"exp_avg_dtype\":\"fp32\""};
    Run run;
    must_run(&run, SMALL, 1);
    for (size_t i = 0; i < sizeof fragments / sizeof *fragments; i++) json_has(&run.config, fragments[i]);
    config_free(&run.config);
}

static void flags_are_accepted(void **state) {
    Run run;
    must_run(&run,
             MUON
             "--muon-momentum 0.95 --muon-nesterov --muon-no-split-qkv --muon-scale-mode shape_scaling "
             "--muon-extra-scale-factor 0.2 --muon-coefficient-type polar_express --muon-num-ns-steps 8 "
             "--muon-fp32-matmul-prec medium --muon-scalar-optimizer adam "
             "--no-use-layer-wise-param-layout --muon-use-syrk --use-precision-aware-optimizer "
             "--exp-avg-dtype bf16 --exp-avg-sq-dtype fp32 --main-params-dtype fp32 --main-grads-dtype fp32",
             1);
    const Config *c = &run.config;
    assert_int_equal(c->optimizer, OPTIMIZER_MUON);
    assert_true(c->muon_momentum == 0.95 && c->muon_extra_scale_factor == 0.2 && c->muon_nesterov);
    assert_true(c->muon_no_split_qkv && c->muon_num_ns_steps == 8);
    assert_int_equal(c->muon_scale_mode, MUON_SHAPE_SCALING);
    assert_int_equal(c->exp_avg_dtype, MOMENT_BF16);
    assert_int_equal(c->muon_coefficient_type, MUON_POLAR_EXPRESS);
    assert_string_equal(run.notes, "");
    config_free(&run.config);
}

// Megatron-LM's default, with which results do not depend on the number of ranks.
static void tensor_parallel_ranks_orthogonalize_whole_matrices(void **state) {
    Run run;
    must_run(&run, MUON "--tensor-model-parallel-size 2", 2);
    assert_int_equal(run.config.muon_tp_mode, MUON_DUPLICATED);
    assert_string_equal(run.notes, "");
    config_free(&run.config);
    must_run(&run, MUON "--tensor-model-parallel-size 2 --muon-tp-mode blockwise", 2);
    assert_int_equal(run.config.muon_tp_mode, MUON_BLOCKWISE);
    config_free(&run.config);
}

static void impossible_flags_are_refused(void **state) {
    static const struct {
        const char *line, *what;
    } bad[] = {
        {SMALL "--optimizer lion", "--optimizer lion: not one of adam|muon"},
        {MUON "--muon-momentum 1", "at least 0 and below 1"},
        {MUON "--muon-momentum 0.99999999", "becomes 1 in float32"},
        {MUON "--muon-extra-scale-factor 0", "above 0"},
        {MUON "--muon-num-ns-steps 0", "--muon-num-ns-steps 0"},
        {MUON "--muon-num-ns-steps 65", "--muon-num-ns-steps 65"},
        {MUON "--muon-coefficient-type quartic", "simple|quintic|polar_express|cans|aol|deepseekv4|cubic5"},
        {MUON "--muon-coefficient-type cubic5 --muon-num-ns-steps 6", "use --muon-num-ns-steps 5"},
        {MUON "--muon-tp-mode distributed", "--muon-tp-mode distributed: not one of duplicated|blockwise"},
        {MUON "--exp-avg-dtype fp16", "--exp-avg-dtype fp16: not one of fp32|bf16"},
        {MUON "--exp-avg-sq-dtype bf16", "--exp-avg-sq-dtype bf16: not one of fp32"},
        {SMALL "--exp-avg-dtype bf16", "--exp-avg-dtype bf16 needs --optimizer muon"},
        {MUON "--muon-fp32-matmul-prec high", "--muon-fp32-matmul-prec high: not one of medium"},
        {MUON "--muon-scalar-optimizer lion", "--muon-scalar-optimizer lion: not one of adam"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) must_fail(bad[i].line, 0, bad[i].what);
}

static void notes_name_flags_without_effect(void **state) {
    Run run;
    must_run(&run, SMALL "--muon-momentum 0.9 --muon-num-ns-steps 4", 1);
    assert_string_equal(run.notes,
                        "--muon-momentum has no effect without --optimizer muon\n"
                        "--muon-num-ns-steps has no effect without --optimizer muon\n");
    config_free(&run.config);
}

// The state of one optimizer does not fit the other. Checkpoints without the key are of AdamW.
static void checkpoints_of_the_other_optimizer(void **state) {
    Run adam, muon;
    must_run(&adam, SMALL, 1);
    must_run(&muon, MUON, 1);
    char *saved_adam = config_to_json(&adam.config), *saved_muon = config_to_json(&muon.config);
    assert_true(config_saved_with_muon(saved_muon) && !config_saved_with_muon(saved_adam));
    assert_false(config_saved_with_muon("{}") || config_saved_with_muon("") || config_saved_with_muon(NULL));
    assert_true(config_match_checkpoint(&muon.config, saved_muon, NULL, 0, &muon.err));
    assert_false(config_match_checkpoint(&muon.config, saved_adam, NULL, 0, &muon.err));
    assert_int_equal(muon.err.code, EXIT_CHECKPOINT);
    assert_non_null(strstr(muon.err.what, "add --no-load-optim"));
    assert_false(config_match_checkpoint(&adam.config, saved_muon, NULL, 0, &adam.err));
    assert_false(config_match_checkpoint(&muon.config, "{}", NULL, 0, &muon.err));
    muon.config.no_load_optim = true;
    *muon.notes = 0;
    assert_true(config_match_checkpoint(&muon.config, saved_adam, muon.notes, sizeof muon.notes, &muon.err));
    assert_non_null(strstr(muon.notes, "only the weights are loaded"));
    muon.config.no_load_optim = false;
    muon.config.finetune = true;
    assert_true(config_match_checkpoint(&muon.config, saved_adam, NULL, 0, &muon.err));
    free(saved_adam);
    free(saved_muon);
    config_free(&adam.config);
    config_free(&muon.config);
}

// Without optimizer state the schedule restarts, so it may differ from the checkpoint's.
static void schedules_of_the_other_optimizer(void **state) {
    Run adam, muon;
    must_run(&adam, SMALL "--train-iters 10", 1);
    must_run(&muon, MUON "--train-iters 20 --lr 2e-3 --lr-decay-style linear --lr-warmup-iters 2", 1);
    char *saved_adam = config_to_json(&adam.config);
    muon.config.no_load_optim = true;
    if (!config_match_checkpoint(&muon.config, saved_adam, NULL, 0, &muon.err)) fail_msg("%s", muon.err.what);
    assert_true(muon.config.lr == 2e-3);
    muon.config.use_checkpoint_opt_param_scheduler = true;
    assert_true(config_match_checkpoint(&muon.config, saved_adam, NULL, 0, &muon.err));
    assert_true(muon.config.lr == adam.config.lr);
    free(saved_adam);
    config_free(&adam.config);
    config_free(&muon.config);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults_match_megatron),
        cmocka_unit_test(flags_are_accepted),
        cmocka_unit_test(tensor_parallel_ranks_orthogonalize_whole_matrices),
        cmocka_unit_test(impossible_flags_are_refused),
        cmocka_unit_test(notes_name_flags_without_effect),
        cmocka_unit_test(checkpoints_of_the_other_optimizer),
        cmocka_unit_test(schedules_of_the_other_optimizer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
