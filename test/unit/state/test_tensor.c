// What a rank of a larger layout holds: tables of pipeline stages and parts of split tensors are
// numbered as in the whole model.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/state/zero_inside.h"
#include "test/unit/model_bench.h"
#include "train_gpt.h"

static void configure(Config *config, int layers) {
    char text[16];
    snprintf(text, sizeof text, "%d", layers);
    const char *flags[] = {"--num-layers",
                           text,
                           "--hidden-size",
                           "32",
                           "--num-attention-heads",
                           "4",
                           "--seq-length",
                           "32",
                           "--max-position-embeddings",
                           "32",
                           "--micro-batch-size",
                           "1",
                           "--log-num-zeros-in-grad"};
    Error err = {0};
    bool ok = bench_configure(config, (int)(sizeof flags / sizeof *flags), flags, 32, &err);
    if (!ok) fail_msg("%s", err.what);
}

// The stages' tables, one after the other, are the whole model's: names, first weights, logical
// numbers.
static void stages_make_the_whole(void **state) {
    Config config;
    configure(&config, 6);
    GPT whole;
    gpt_describe(&whole, &config, gpt_stage(&config, 0, 1));
    assert_int_equal(whole.tensors, 4 + 6 * LAYER_TENSORS);
    for (int size = 1; size <= 6; size++) {
        if (6 % size) continue;
        int next = 0;
        for (int rank = 0; rank < size; rank++) {
            GPT part;
            gpt_describe(&part, &config, gpt_stage(&config, rank, size));
            assert_int_equal(part.L, 6 / size);
            assert_int_equal(part.tensor[0].unit, 0);
            PlanTensor *rows = tensors_for_plan(part.tensor, part.tensors);
            int64_t logical = 0;
            for (int i = 0; i < part.tensors; i++, next++) {
                const Tensor *ours = &part.tensor[i], *same = &whole.tensor[next];
                assert_string_equal(ours->name, same->name);
                assert_int_equal(ours->number, next);
                assert_true(ours->std == same->std && ours->logical == same->logical);
                logical += rows[i].before;
                assert_int_equal(logical, same->logical);
                logical += round_up64(rows[i].numel + rows[i].after, HADAMARD_ORDER);
            }
            int first = gpt_layer_tensor(&part, 0, LN1_W);
            char name[96];
            snprintf(name, sizeof name, "encoder.layers.%d.input_norm.weight", rank * 6 / size);
            assert_string_equal(part.tensor[first].name, name);
            free(rows);
            gpt_free(&part);
        }
        assert_int_equal(next, whole.tensors);
    }
    gpt_free(&whole);
    config_free(&config);
}

// The parts of a split tensor take the whole's logical numbers, each its own, and what follows the
// tensor is numbered as if it were whole. A replicated one has the same numbers everywhere.
static void parts_have_numbers_of_the_whole(void **state) {
    for (int split = 0; split < 2; split++) {
        for (int rank = 0; rank < 4; rank++) {
            Tensor t[3] = {tensor_row("same", 5, 0, -1, 0, 0), tensor_row("cut", 64, 96, split, 0, 0),
                           tensor_row("after", 7, 9, -1, 0, 0)};
            t[1].local[split] /= 4;
            t[1].offset = rank * t[1].local[split];
            tensors_number(t, 3);
            PlanTensor *rows = tensors_for_plan(t, 3);
            PlanOptions options = {1, 1, 32, 32, 1};
            Plan plan;
            Error err;
            assert_true(plan_build(&plan, rows, 3, &options, &err));
            int64_t expected[] = {0, 32 + rank * 64 * 96 / 4, 32 + 64 * 96};
            for (int i = 0; i < plan.segments_total; i++) {
                assert_int_equal(plan.segments[i].logical, expected[plan.segments[i].tensor]);
            }
            plan_free(&plan);
            free(rows);
        }
    }
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stages_make_the_whole),
        cmocka_unit_test(parts_have_numbers_of_the_whole),
    };
    Launch launch;
    launch_init(&launch, &argc, &argv);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    launch_finalize(&launch);
    return failed;
}
