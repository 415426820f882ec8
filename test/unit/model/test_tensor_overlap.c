// Stream ordering of steps with tensor, sequence and pipeline parallelism. The device, collectives,
// links and ops only record the memory that they read and write on each stream (recorded_run.h), as
// in test_overlap.c. Steps run on one rank of each pipeline stage. A stage has two tensor-parallel
// ranks in each of two data-parallel ones. The tests check that:
//   - events order any two uses of the same memory of which at least one is a write, also with FP8
//     layers and with plain or quantized messages between stages
//   - omitting any wait between compute and tensor parallelism or a link is detected as a race
//   - the end of a run waits for all work before memory is unmapped or freed
//   - single kernels and quantized messages are used where they should be
//   - the reduction of one row block is not ordered with the GEMMs of the other
//   - in backward, collectives are not ordered with the GEMMs that should hide them
//   - messages between stages are not ordered with the passes that should hide them
#include <mpi.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "test/leaks.h"
#include "test/unit/model/recorded_run.h"

static int count_of(const Recording *r, const char *name) {
    int count = 0;
    for (int i = 0; i < r->device.op_count; i++) count += !strcmp(r->device.ops[i].name, name);
    return count;
}

// Returns the n-th operation with this name that the host has started.
static const Op *find(const Recording *r, const char *name, int n) {
    for (int i = 0; i < r->device.op_count; i++) {
        if (!strcmp(r->device.ops[i].name, name) && n-- == 0) return &r->device.ops[i];
    }
    fail_msg("%s was not called so often", name);
    return NULL;
}
static void overlaps(const Recording *r, const char *first, int i, const char *second, int j) {
    const Op *a = find(r, first, i), *b = find(r, second, j);
    if (before(a, b) || before(b, a)) fail_msg("%s %d and %s %d cannot overlap", first, i, second, j);
}

static const Case cases[] = {
    // tensor parallelism
    {"optim", BLOCKS, 1, 1},
    {"optim", BLOCKS | DIRECT, 1, 1},
    {"optim_grads_params", BLOCKS, 1, 1},
    {"optim_grads_params", BLOCKS | DIRECT, 1, 1},
    {"optim", 0, 1, 1},
    {"optim", DIRECT | FUSED, 1, 1},
    {"optim_grads_params", DIRECT, 1, 1},
    {"optim_grads_params", DIRECT | FUSED, 1, 1},
    {"optim", SEQUENCE, 1, 1},
    {"optim", DIRECT | FUSED | SEQUENCE, 1, 1},
    {"optim_grads_params", DIRECT | SEQUENCE, 1, 1},
    {"optim_grads_params", DIRECT | FUSED | SEQUENCE, 1, 1},
    {"optim", DIRECT | FUSED | CODED, 1, 1},
    {"optim_grads_params", SEQUENCE | CODED, 1, 1},
    {"optim", DIRECT | FUSED | SEQUENCE | CODED, 1, 1},
    {"optim", SEQUENCE | RECOMPUTE, 1, 1},
    // FP8
    {"optim", TENSORWISE, 1, 1},
    {"optim", TENSORWISE | SEQUENCE, 1, 1},
    {"optim", TENSORWISE | SEQUENCE | RECOMPUTE, 1, 1},
    {"optim_grads_params", TENSORWISE | SEQUENCE | DIRECT | FUSED, 1, 1},
    {"optim_grads", TENSORWISE | SEQUENCE | CODED, 1, 1},
    {"optim", DELAYED | DIRECT | FUSED, 1, 1},
    {"optim", DELAYED | SEQUENCE, 1, 1},
    {"optim_grads_params", DELAYED | SEQUENCE | DIRECT, 1, 1},
    {"optim", BLOCKWISE, 1, 1},
    {"optim", BLOCKWISE | SEQUENCE, 1, 1},
    {"optim_grads_params", BLOCKWISE | SEQUENCE | DIRECT, 1, 1},
    // Muon
    {"optim", MUON, 1, 1},
    {"optim_grads", MUON | SEQUENCE, 1, 1},
    {"optim_grads_params", MUON | DIRECT, 1, 1},
    {"optim_grads", MUON, 2, 1},
    {"optim", MUON | SEQUENCE, 2, 3},
    // pipelines
    {"optim", 0, 2, 1},
    {"optim", DIRECT | FUSED | SEQUENCE, 3, 1},
    {"optim_grads", UNTIED, 3, 2},
    {"optim", SEQUENCE, 2, 3},
    {"optim", QUANTIZED, 2, 1},
    {"optim", QUANTIZED | SEALED, 3, 1},
    {"optim_grads", QUANTIZED | SEQUENCE | RECOMPUTE, 3, 2},
    {"optim", QUANTIZED | SEALED | CODED, 2, 3},
    {"optim", QUANTIZED | TENSORWISE | SEQUENCE, 2, 1},
    {"optim", QUANTIZED | DELAYED | SEQUENCE | DIRECT, 3, 2},
    {"optim", BLOCKWISE | SEQUENCE, 2, 3},
};
enum { CASES = sizeof cases / sizeof *cases };

// An evaluation between steps uses the same buffers, but always sends bf16 and computes in bf16.
static void conflicting_uses_are_ordered(void **state) {
    for (int i = 0; i < CASES; i++) {
        way = cases[i];
        for (int stage = 0; stage < way.stages; stage++) {
            Recording r;
            open_recording(&r, stage, nothing);
            run(&r);
            int direct = count_of(&r, "reduce") + count_of(&r, "gather") + count_of(&r, "fused norm");
            if ((direct > 0) != (way.flags & DIRECT && !(way.flags & CODED)))
                fail_msg("case %d: %d single kernels", i, direct);
            run_passes(&r, false);
            run_steps(&r, STEPS + 1, STEPS + 1);
            close_recording(&r);
            if (r.device.races)
                fail_msg("case %d, %s, stage %d: %s", i, way.strategy, stage, r.device.first_race);
            assert_true(r.device.all_uses > 500);
        }
    }
}

// Omits waits, which must be detected. what, i: name of the wait.
static void is_needed(const Recording *whole, int stage, Omitted omitted, const char *what, int i) {
    Recording r;
    if (!whole->device.waits[omitted.stream][omitted.event])
        fail_msg("stage %d never waits: %s", stage, what);
    open_recording(&r, stage, omitted);
    run(&r);
    if (!r.device.races) fail_msg("case %d, stage %d: nothing is found without %s", i, stage, what);
    close_recording(&r);
}

// Only row blocks use the second event of reductions, and only sequence parallelism the event of
// gathers in every layer.
static void every_wait_is_needed(void **state) {
    for (int i = 0; i < CASES; i++) {
        Recording whole;
        way = cases[i];
        if (way.stages > 1) continue;
        open_recording(&whole, 0, nothing);
        run(&whole);
        const TensorParallel *tp = &whole.gpt.tp;
        int side = tp->side->id, compute = whole.compute->id;
        is_needed(&whole, 0, (Omitted){side, tp->queued->id, 0}, "the start of collectives", i);
        is_needed(&whole, 0, (Omitted){compute, tp->reduced[0]->id, 0}, "reductions", i);
        if (way.flags & BLOCKS)
            is_needed(&whole, 0, (Omitted){compute, tp->reduced[1]->id, 0}, "reductions of block 1", i);
        if (way.flags & SEQUENCE) is_needed(&whole, 0, (Omitted){compute, tp->gathered->id, 0}, "gathers", i);
        close_recording(&whole);
    }
}

// In FP8 layers with sequence parallelism, the ranks gather maxima and codes of inputs and
// gradients. Omits one wait for a gather at a time.
static void every_gather_in_fp8_is_awaited(void **state) {
    const Case ways[] = {{"optim", TENSORWISE | SEQUENCE, 1, 1},
                         {"optim", DELAYED | SEQUENCE, 1, 1},
                         {"optim_grads_params", TENSORWISE | SEQUENCE | DIRECT, 1, 1}};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        Recording whole;
        way = ways[i];
        open_recording(&whole, 0, nothing);
        run_steps(&whole, 1, 1);
        int compute = whole.compute->id, gathered = whole.gpt.tp.gathered->id;
        int calls = whole.device.waits[compute][gathered];
        assert_true(calls >= 2 * LAYERS * 6);  // 2 micro-batches; 6 gathers of codes in a layer
        close_recording(&whole);
        for (int call = 1; call <= calls; call++) {
            Recording r;
            open_recording(&r, 0, (Omitted){compute, gathered, call});
            run_steps(&r, 1, 1);
            if (!r.device.races) fail_msg("way %d: nothing is found without wait %d", (int)i, call);
            close_recording(&r);
        }
    }
}

// Omits each wait between compute and a link.
static void every_wait_for_a_link_is_needed(void **state) {
    for (int i = 0; i < CASES; i++) {
        way = cases[i];
        for (int stage = 0; stage < (way.stages > 1 ? way.stages : 0); stage++) {
            Recording whole;
            Link *links[MOST_LINKS];
            open_recording(&whole, stage, nothing);
            run(&whole);
            int count = links_of(&whole.gpt.pipeline, links);
            assert_true(count > 0);
            for (int l = 0; l < count; l++) {
                const char *name = links[l]->stream->name;
                bool used = whole.device.waits[links[l]->stream->id][links[l]->ready->id] > 0;
                assert_true(used || way.flags & UNTIED);  // without tied embeddings, two links are idle
                if (!used) continue;
                is_needed(&whole, stage, (Omitted){links[l]->stream->id, links[l]->ready->id, 0}, name, i);
                is_needed(&whole, stage, (Omitted){whole.compute->id, links[l]->done->id, 0}, name, i);
            }
            close_recording(&whole);
        }
    }
}

// tp_close waits for both streams before other ranks' memory is unmapped, also if neither waits for
// the other.
static void closing_waits_for_all_work(void **state) {
    Recording r;
    way = (Case){"optim", DIRECT, 1, 1};
    open_recording(&r, 0, nothing);
    GPT *gpt = &r.gpt;
    int64_t N = (int64_t)gpt->B * gpt->T;
    tp_begin_pass(&gpt->tp, true);
    tp_reduce_begin(&gpt->tp, gpt->dx, NULL, gpt->dx, N, 0);
    set_zero(r.compute, gpt->branch, (size_t)(X * N * gpt->C));
    overlaps(&r, "reduce", 0, "set_zero", count_of(&r, "set_zero") - 1);
    close_recording(&r);
    if (r.device.races) fail_msg("%s", r.device.first_race);
}

static void reductions_overlap_gemms(void **state) {
    Recording r;
    way = (Case){"optim_grads_params", BLOCKS | DIRECT, 1, 1};
    open_recording(&r, 0, nothing);
    run(&r);
    for (int l = 0; l < LAYERS; l++) {
        int block = 2 * l, reduce = 1 + 4 * l;  // the first one is of the embedding
        overlaps(&r, "reduce", reduce, "projection", block + 1);
        overlaps(&r, "reduce", reduce + 1, "fc1", block);
        overlaps(&r, "reduce", reduce + 1, "fc2", block);
        overlaps(&r, "reduce", reduce + 2, "fc1", block + 1);
        overlaps(&r, "reduce", reduce + 2, "fc2", block + 1);
        if (l + 1 < LAYERS) overlaps(&r, "reduce", reduce + 3, "QKV", block + 2);
        assert_true(before(find(&r, "QKV", block), find(&r, "attention", l)));
    }
    close_recording(&r);
}

// In backward of QKV and fc1, the gather of the norm's output can overlap with the GEMM for dx, and
// the reduction of dx with the GEMM for dw. In backward of the projection and fc2, the gather of
// the gradient precedes the GEMMs.
static void backward_overlaps_gemms(void **state) {
    Recording r;
    way = (Case){"optim", DIRECT | FUSED | SEQUENCE, 1, 1};
    open_recording(&r, 0, nothing);
    run(&r);
    assert_int_equal(find(&r, "reduce", 0)->stream, r.compute->id);  // of the embedding
    for (int i = 0; i < 2 * LAYERS; i++) {
        int saved = 3 + 2 * i, reduce = 2 + i;  // embedding, first norm and LM head come first
        overlaps(&r, "gather", saved, "dx", i);
        overlaps(&r, "reduce", reduce, "dw", i);
        assert_int_equal(find(&r, "gather", saved - 1)->stream, r.compute->id);
        assert_true(before(find(&r, "gather", saved - 1), find(&r, "dx and dw", i)));
        assert_true(before(find(&r, "gather", saved), find(&r, "dw", i)));
    }
    close_recording(&r);
}

// The same in FP8: the gather of the saved codes can overlap with the product for dx, and the
// reduction of dx with the product for dw. A layer gathers the codes of two inputs in forward, and
// the same codes again in backward. Gathers of gradients use comm_all_gather and do not count.
static void backward_overlaps_fp8_products(void **state) {
    Recording r;
    way = (Case){"optim", TENSORWISE | SEQUENCE | DIRECT | FUSED, 1, 1};
    open_recording(&r, 0, nothing);
    run(&r);
    for (int i = 0; i < 2 * LAYERS; i++) {
        int saved = 2 * LAYERS + 1 + i, reduce = 2 + i, dx = 2 * i + 1;  // the LM head gathers its input
        overlaps(&r, "gather", saved, "FP8 dx", dx);
        overlaps(&r, "reduce", reduce, "FP8 dw", dx);
        assert_true(before(find(&r, "gather", saved), find(&r, "FP8 transpose", dx)));
        assert_true(before(find(&r, "FP8 transpose", dx), find(&r, "FP8 dw", dx)));
    }
    close_recording(&r);
}

// Returns the first GEMM of the pass that the host starts after operation i, or NULL.
static const Op *next_gemm(const Recording *r, int i) {
    for (; i < r->device.op_count; i++) {
        const Op *op = &r->device.ops[i];
        if (!strcmp(op->name, "QKV") || !strcmp(op->name, "dx and dw")) return op;
    }
    return NULL;
}

// Sends and receives can overlap with the pass that follows, except the receive for the first pass
// of a step. On the middle one of three stages, no backward pass directly follows the forward pass
// of its micro-batch.
static void messages_overlap_passes(void **state) {
    const Case ways[] = {{"optim", 0, 3, 1}, {"optim", QUANTIZED | SEQUENCE, 3, 1}};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        Recording r;
        int exposed = 0;
        way = ways[i];
        open_recording(&r, 1, nothing);
        run(&r);
        assert_int_equal(count_of(&r, "send"), STEPS * 2 * micro_batches_of(&way));
        assert_int_equal(count_of(&r, "receive"), STEPS * 2 * micro_batches_of(&way));
        for (int at = 0; at < r.device.op_count; at++) {
            const Op *op = &r.device.ops[at], *gemm = next_gemm(&r, at);
            if (strcmp(op->name, "send") && strcmp(op->name, "receive")) continue;
            exposed += gemm && before(op, gemm);
        }
        assert_int_equal(exposed, STEPS);
        close_recording(&r);
    }
}

// Without row blocks, every norm includes the reduction of the branch that it adds. Only the first
// norm of a pass adds none.
static void norms_include_reductions(void **state) {
    Recording r;
    way = (Case){"optim", DIRECT | FUSED, 1, 1};
    open_recording(&r, 0, nothing);
    run(&r);
    assert_int_equal(count_of(&r, "norm"), STEPS);
    assert_int_equal(count_of(&r, "fused norm"), STEPS * 2 * LAYERS);
    assert_int_equal(count_of(&r, "reduce"), STEPS * (2 + 2 * LAYERS));  // embedding, LM head, backward
    close_recording(&r);
}

static void small_micro_batches_stay_whole(void **state) {
    Group group = {.size = 3};
    TensorParallel tp = {.group = &group, .C = 100};
    tp.block_bytes = 200 * X * tp.C;
    assert_int_equal(tp_row_blocks(&tp, 399).count, 1);
    RowBlocks blocks = tp_row_blocks(&tp, 405);
    assert_int_equal(blocks.count, 2);
    assert_int_equal(blocks.rows[0].count, 201);  // a multiple of the ranks
    assert_int_equal(blocks.rows[1].first, 201);
    assert_int_equal(blocks.rows[1].count, 204);
    tp.block_bytes = 0;
    assert_int_equal(tp_row_blocks(&tp, 405).count, 1);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(conflicting_uses_are_ordered),   cmocka_unit_test(every_wait_is_needed),
        cmocka_unit_test(every_gather_in_fp8_is_awaited), cmocka_unit_test(every_wait_for_a_link_is_needed),
        cmocka_unit_test(closing_waits_for_all_work),     cmocka_unit_test(reductions_overlap_gemms),
        cmocka_unit_test(norms_include_reductions),       cmocka_unit_test(backward_overlaps_gemms),
        cmocka_unit_test(backward_overlaps_fp8_products), cmocka_unit_test(messages_overlap_passes),
        cmocka_unit_test(small_micro_batches_stay_whole),
    };
    Launch launch;
    leaks_launch(&launch, &argc, &argv);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    failed += leaks_found();
    launch_finalize(&launch);
    return failed;
}
