// Flags of tensor, sequence and pipeline parallelism: derived sizes, invalid layouts, and
// checkpoints of other layouts.
#include "test/unit/config/command_line.h"

static void derived_sizes(void **state) {
    static const struct {
        const char *words, *fragment;
    } good[] = {
        {"--plan --plan-world-size 64 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2",
         "\"data_parallel_size\":8"},
        {"--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
         "\"data_parallel_size\":1,\"padded_vocab_size\":512,\"unpadded_vocab_size\":257"},
        {"--tensor-model-parallel-size 2", "\"sequence_parallel\":false"},
        {"--tensor-model-parallel-size 2 --sequence-parallel", "\"sequence_parallel\":true"},
        {"--sequence-parallel", "\"sequence_parallel\":false"},  // no effect with T = 1
        {"--tensor-model-parallel-size 2", "\"tp_comm_backend\":\"auto\""},
        {"--tensor-model-parallel-size 2 --tp-comm-backend peer", "\"tp_comm_backend\":\"peer\""},
        {"--tensor-model-parallel-size 2 --global-batch-size 12", "\"num_micro_batches\":3"},
        // With interleaved stages the number of micro-batches must be a multiple of P.
        {"--num-layers 8 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1",
         "\"num_micro_batches\":4"},
    };
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        char line[2048];
        Run run;
        snprintf(line, sizeof line, "%s%s", SMALL, good[i].words);
        must_run(&run, line, 4);
        json_has(&run.config, good[i].fragment);
        config_free(&run.config);
    }
}

// The paper's throughput runs of 6.7B, 13B and 18B, and 13B on nodes of four GPUs.
static void the_papers_layouts(void **state) {
    static const struct {
        const char *shape;
        int dp, rows;
    } speed[] = {
        {"@configs/gpt_6.7b.args --tensor-model-parallel-size 4", 32, 50688},
        {"@configs/gpt_13b.args --tensor-model-parallel-size 8", 16, 51200},
        {"@configs/gpt_18b.args --tensor-model-parallel-size 8", 16, 51200},
        {"@configs/gpt_13b.args --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2", 16, 50688},
    };
    for (size_t i = 0; i < sizeof speed / sizeof speed[0]; i++) {
        char line[2048];
        Run run;
        snprintf(line, sizeof line,
                 "%s --mock-data --micro-batch-size 1 --global-batch-size %d "
                 "--no-async-tensor-model-parallel-allreduce",
                 speed[i].shape, speed[i].dp);
        must_run(&run, line, 128);
        assert_string_equal(run.notes, "");
        assert_int_equal(run.config.dp_size, speed[i].dp);
        assert_int_equal(run.config.vocab_size_padded, speed[i].rows);
        assert_int_equal(run.config.micro_batches, 1);
        config_free(&run.config);
    }
}

static void invalid_splits_are_refused(void **state) {
    static const struct {
        const char *words;
        int world;
        const char *what;
    } bad[] = {
        {"--num-attention-heads 8 --hidden-size 64 --tensor-model-parallel-size 3", 0,
         "--num-attention-heads 8 is not divisible by --tensor-model-parallel-size 3"},
        {"--tensor-model-parallel-size 8", 0, "--num-attention-heads 4 is not divisible by"},
        {"--tensor-model-parallel-size 2 --ffn-hidden-size 24", 0,
         "--ffn-hidden-size 24 is not a multiple of 8 x --tensor-model-parallel-size 2"},
        {"--tensor-model-parallel-size 2 --ffn-hidden-size 24 --swiglu", 0,
         "--ffn-hidden-size 24 is not a multiple of 8 x --tensor-model-parallel-size 2"},
        {"--tensor-model-parallel-size 2 --swiglu", 0,
         "--swiglu with --tensor-model-parallel-size 2 needs --disable-bias-linear"},
        {"--tensor-model-parallel-size 2 --sequence-parallel --seq-length 31", 0,
         "--seq-length 31 is not divisible by --tensor-model-parallel-size 2"},
        {"--tensor-model-parallel-size 4 --seq-length 31", 0,
         "--micro-batch-size 2 x --seq-length 31 = 62 tokens is not divisible by "
         "--tensor-model-parallel-size 4"},
        {"--tensor-model-parallel-size 0", 0, "at least 1"},
        {"--pipeline-model-parallel-size 3", 0,
         "--num-layers 2 is not divisible by --pipeline-model-parallel-size 3"},
        {"--pipeline-model-parallel-size 4", 0, "--num-layers 2 is not divisible by"},
        {"--num-layers-per-virtual-pipeline-stage 1", 0, "needs --pipeline-model-parallel-size 2"},
        {"--num-layers 12 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4", 0,
         "the 6 layers of a pipeline stage are not divisible by"},
        {"--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
         "--global-batch-size 6",
         2, "3 micro-batches per step are not divisible by --pipeline-model-parallel-size 2"},
        {"--global-batch-size 6 --tensor-model-parallel-size 2", 8,
         "--global-batch-size 6 is not divisible by --micro-batch-size 2 x data-parallel size 4 = 8"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char line[2048];
        snprintf(line, sizeof line, "%s%s", SMALL, bad[i].words);
        must_fail(line, bad[i].world, bad[i].what);
    }
}

static void notes(void **state) {
    Run run;
    must_run(&run, SMALL "--sequence-parallel", 1);
    assert_string_equal(run.notes,
                        "--sequence-parallel has no effect without --tensor-model-parallel-size above 1\n");
    config_free(&run.config);
    must_run(&run, SMALL "--tp-comm-backend peer", 1);
    assert_string_equal(run.notes,
                        "--tp-comm-backend has no effect without --tensor-model-parallel-size above 1\n");
    config_free(&run.config);
    must_run(&run,
             SMALL
             "--sequence-parallel --tensor-model-parallel-size 2 --tp-comm-overlap "
             "--no-async-tensor-model-parallel-allreduce --no-overlap-p2p-communication",
             2);
    assert_string_equal(run.notes, "");
    config_free(&run.config);
}

// Any layout can resume from any other layout's checkpoint if the embedding has the same number of
// rows.
#define ALONE SMALL "--global-batch-size 4 --make-vocab-size-divisible-by 384 "
#define TWO SMALL "--global-batch-size 4 --make-vocab-size-divisible-by 192 --tensor-model-parallel-size 2 "

static void checkpoints_of_other_layouts(void **state) {
    Run run;
    assert_true(resume(&run, ALONE, TWO));
    assert_string_equal(run.notes, "");
    config_free(&run.config);
    assert_true(resume(&run, TWO "--sequence-parallel", ALONE "--pipeline-model-parallel-size 2"));
    assert_string_equal(run.notes, "");
    config_free(&run.config);
    assert_false(resume(&run, SMALL, TWO "--make-vocab-size-divisible-by 128"));
    assert_int_equal(run.err.code, EXIT_CHECKPOINT);
    assert_non_null(strstr(run.err.what,
                           "size is 384, but this run's is 512; add "
                           "--make-vocab-size-divisible-by 192"));
    assert_false(resume(&run, SMALL "--make-vocab-size-divisible-by 1", TWO));
    assert_int_equal(run.err.code, EXIT_CHECKPOINT);
    assert_non_null(strstr(run.err.what, "size 257 is not divisible by --tensor-model-parallel-size 2"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(derived_sizes),
        cmocka_unit_test(the_papers_layouts),
        cmocka_unit_test(invalid_splits_are_refused),
        cmocka_unit_test(notes),
        cmocka_unit_test(checkpoints_of_other_layouts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
