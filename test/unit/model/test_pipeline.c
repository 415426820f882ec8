// The order of work on the stages of a pipeline: every micro-batch passes once each way, no stage
// waits for ever, and no place for activations or gradients is used again too early.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "llmc/model/pipeline.h"

enum { MOST = 32 };

// Megatron-LM's order, written out.
static void the_order_is_1f1b(void **state) {
    static const PipelineAction first[] = {{0, false}, {1, false}, {2, false}, {0, true},
                                           {3, false}, {1, true},  {2, true},  {3, true}};
    static const PipelineAction last[] = {{0, false}, {0, true}, {1, false}, {1, true},
                                          {2, false}, {2, true}, {3, false}, {3, true}};
    PipelineAction actions[8];
    const PipelineAction *expected[] = {first, NULL, last};
    for (int stage = 0; stage < 3; stage += 2) {
        assert_int_equal(pipeline_actions(3, stage, 4, true, actions), 8);
        for (int i = 0; i < 8; i++) {
            assert_int_equal(actions[i].micro_batch, expected[stage][i].micro_batch);
            assert_int_equal(actions[i].backward, expected[stage][i].backward);
        }
    }
    assert_int_equal(pipeline_actions(3, 0, 4, false, actions), 4);
    for (int i = 0; i < 4; i++) assert_true(actions[i].micro_batch == i && !actions[i].backward);
}

// Runs all stages: an action waits for its neighbour's.
static void check_order(int stages, int micro_batches) {
    PipelineAction actions[MOST][2 * MOST];
    int at[MOST] = {0}, forward[MOST] = {0}, backward[MOST] = {0};
    for (int s = 0; s < stages; s++) {
        assert_int_equal(pipeline_actions(stages, s, micro_batches, true, actions[s]), 2 * micro_batches);
    }
    for (int done = 0; done < stages * 2 * micro_batches;) {
        int before = done;
        for (int s = 0; s < stages; s++) {
            if (at[s] == 2 * micro_batches) continue;
            PipelineAction a = actions[s][at[s]];
            bool ready = a.backward ? s == stages - 1 || backward[s + 1] > a.micro_batch
                                    : s == 0 || forward[s - 1] > a.micro_batch;
            if (!ready) continue;
            // In order, each once.
            assert_int_equal(a.micro_batch, a.backward ? backward[s]++ : forward[s]++);
            assert_true(forward[s] >= backward[s]);
            assert_true(forward[s] - backward[s] <= pipeline_in_flight(stages, s, micro_batches));
            at[s]++;
            done++;
        }
        if (done == before) fail_msg("%d stages, %d micro-batches: all wait", stages, micro_batches);
    }
}

static void every_stage_gets_through(void **state) {
    for (int stages = 1; stages <= 8; stages++) {
        for (int micro_batches = 1; micro_batches <= 20; micro_batches++) check_order(stages, micro_batches);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_order_is_1f1b),
        cmocka_unit_test(every_stage_gets_through),
    };
    return cmocka_run_group_tests_name("order of the pipeline", tests, NULL, NULL);
}
