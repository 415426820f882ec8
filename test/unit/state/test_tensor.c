// Parameter tables of ranks under tensor and pipeline parallelism: stages and parts of split
// tensors have the logical positions of the unsplit model.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/state/zero_parts.h"
#include "test/unit/model_bench.h"
#include "llmc/model/gpt.h"

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

static Mesh place(int rank, int tp_size, int pp_size) {
    Mesh mesh;
    Error err = {0};
    int hosts[64] = {0};
    bool ok = mesh_build(&mesh, rank, tp_size * pp_size, hosts, 0, tp_size, pp_size, &err);
    if (!ok) fail_msg("%s", err.what);
    return mesh;
}

// The concatenated tables of all stages equal the table of the unsplit model in names, initial
// weights and logical positions. The last stage starts with a copy of the tied embedding, which it
// does not count.
static void stages_add_up_to_the_model(void **state) {
    Config config;
    configure(&config, 6);
    for (int size = 1; size <= 6; size++) {
        if (6 % size) continue;
        int next = 0, whole_tensors = 0;
        for (int rank = 0; rank < size; rank++) {
            Mesh mesh = place(rank, 1, size);
            GPT part;
            gpt_describe(&part, &config, &mesh);
            whole_tensors = part.whole_tensors;
            assert_int_equal(whole_tensors, 4 + 6 * 12);
            assert_int_equal(part.L, 6 / size);
            assert_int_equal(part.tensor[0].unit, 0);
            LayoutTensor *rows = tensors_for_plan(part.tensor, part.tensors);
            int64_t logical = 0;
            for (int i = 0; i < part.tensors; i++) {
                bool copy = i == 0 && rank > 0 && rank == size - 1;
                const Tensor *ours = &part.tensor[i], *same = &part.whole[copy ? 0 : next++];
                assert_string_equal(ours->name, same->name);
                assert_int_equal(ours->number, same->number);
                assert_int_equal(ours->counted, !copy);
                assert_true(ours->std == same->std && ours->logical == same->logical);
                logical += rows[i].before;
                assert_int_equal(logical, same->logical);
                logical += round_up64(rows[i].numel + rows[i].after, HADAMARD_ORDER);
            }
            int first = gpt_layer_tensor(&part, 0, LN1_W);
            char name[96];
            snprintf(name, sizeof name, "encoder.layers.%d.input_norm.weight", rank * 6 / size);
            assert_string_equal(part.tensor[first].name, name);
            assert_int_equal(part.tensor[first].unit, rank == 0 || rank == size - 1);
            free(rows);
            gpt_free(&part);
        }
        assert_int_equal(next, whole_tensors);
    }
    config_free(&config);
}

// Exactly one rank counts each element of the model, and parts have the same shapes as in
// Megatron-LM.
static void shards_add_up_to_the_model(void **state) {
    Config config;
    configure(&config, 2);
    for (int ranks = 1; ranks <= 4; ranks *= 2) {
        int64_t counted = 0, all = 0;
        for (int rank = 0; rank < ranks; rank++) {
            Mesh mesh = place(rank, ranks, 1);
            GPT part;
            gpt_describe(&part, &config, &mesh);
            for (int i = 0; i < part.tensors; i++) {
                const Tensor *t = &part.tensor[i];
                if (t->counted) counted += tensor_elements(t);
                if (rank == 0) all += tensor_whole_elements(t);
                for (int d = 0; d < 2; d++) {
                    assert_int_equal(t->local[d], d == t->split ? t->whole[d] / ranks : t->whole[d]);
                }
                assert_int_equal(t->offset, t->split < 0 ? 0 : rank * t->local[t->split]);
            }
            assert_int_equal(part.tensor[gpt_layer_tensor(&part, 1, QKV_W)].local[0], 96 / ranks);
            assert_int_equal(part.tensor[gpt_layer_tensor(&part, 1, PROJ_W)].local[1], 32 / ranks);
            assert_int_equal(part.tensor[gpt_layer_tensor(&part, 1, FC1_B)].local[0], 128 / ranks);
            assert_int_equal(part.tensor[gpt_layer_tensor(&part, 1, FC2_W)].local[1], 128 / ranks);
            assert_int_equal(part.tensor[GPT_WTE].local[0], 32 / ranks);
            gpt_free(&part);
        }
        assert_int_equal(counted, all);
    }
    config_free(&config);
}

// The parts of a split tensor have different logical positions, each starting at a multiple of 32.
// The next tensor follows all parts. Replicated tensors have the same positions on all ranks.
static void shards_have_distinct_numbers(void **state) {
    for (int split = 0; split < 2; split++) {
        for (int rank = 0; rank < 4; rank++) {
            Tensor whole[4] = {tensor_row("same", 5, 0, -1, 0, 0), tensor_row("cut", 64, 96, split, 0, 0),
                               tensor_row("small", 4, 20, split, 0, 0), tensor_row("after", 7, 9, -1, 0, 0)};
            tensors_number(whole, 4, 4);
            Tensor t[4];
            for (int i = 0; i < 4; i++) t[i] = tensor_part(&whole[i], rank, 4);
            LayoutTensor *rows = tensors_for_plan(t, 4);
            LayoutOptions options = {1, 1, 32, 32, 1, 1};
            BucketLayout plan;
            Error err;
            assert_true(layout_build(&plan, rows, 4, &options, &err));
            int64_t small = 32 + 64 * 96;
            int64_t expected[] = {0, 32 + rank * 64 * 96 / 4, small + rank * 32, small + 4 * 32};
            for (int i = 0; i < plan.segments_total; i++) {
                assert_int_equal(plan.segments[i].logical, expected[plan.segments[i].tensor]);
            }
            layout_free(&plan);
            free(rows);
        }
    }
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stages_add_up_to_the_model),
        cmocka_unit_test(shards_add_up_to_the_model),
        cmocka_unit_test(shards_have_distinct_numbers),
    };
    Launch launch;
    launch_init(&launch, &argc, &argv);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    launch_finalize(&launch);
    return failed;
}
