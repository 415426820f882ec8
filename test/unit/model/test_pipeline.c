// The pipeline schedule: every micro-batch runs forward and backward once on every stage, without
// deadlock, and buffers of activations and gradients are not reused too early.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "llmc/model/pipeline_schedule.h"

enum { MOST = 32, CHUNKS = 4, STAGES = 8, PLACES = 128 };

// Compares with Megatron-LM's schedule, written out by hand.
static void schedule_is_1f1b(void **state) {
    // B: backward
    enum { B = 8 };
    static const int first[] = {0, 1, 2, 0 + B, 3, 1 + B, 2 + B, 3 + B};
    static const int last[] = {0, 0 + B, 1, 1 + B, 2, 2 + B, 3, 3 + B};
    PipelineAction actions[8];
    const int *expected[] = {first, NULL, last};
    for (int stage = 0; stage < 3; stage += 2) {
        assert_int_equal(pipeline_actions((PipelineShape){3, stage, 1}, 4, true, actions), 8);
        for (int i = 0; i < 8; i++) {
            assert_int_equal(actions[i].micro_batch + B * actions[i].backward, expected[stage][i]);
        }
    }
    assert_int_equal(pipeline_actions((PipelineShape){3, 0, 1}, 4, false, actions), 4);
    for (int i = 0; i < 4; i++) assert_true(actions[i].micro_batch == i && !actions[i].backward);
}

// A simulated stage: its completed passes and, for each buffer, the index (from 1) of the pair of
// micro-batch and chunk that uses it.
typedef struct Running {
    PipelineAction actions[2 * MOST * CHUNKS];
    int count, at;
    bool forward[MOST * CHUNKS], backward[MOST * CHUNKS];
    int slot[PLACES], input[PLACES];
} Running;

static int pair_of(PipelineShape s, PipelineAction a) { return a.micro_batch * s.chunks + a.chunk; }

// Returns true if the neighboring stage has completed the pass on which `a` depends, or there is
// none.
static bool has_come(const Running *all, PipelineShape s, PipelineAction a) {
    int step = a.backward ? 1 : -1, end = a.backward ? s.stages - 1 : 0;
    int last_chunk = a.backward ? s.chunks - 1 : 0;
    if (s.stage == end && a.chunk == last_chunk) return true;
    PipelineAction before = a;
    int neighbor = (s.stage + step + s.stages) % s.stages;
    if (s.stage == end) before.chunk += step;
    const Running *r = &all[neighbor];
    return a.backward ? r->backward[pair_of(s, before)] : r->forward[pair_of(s, before)];
}

// Posts the receive of the next action.
static void expect_next(Running *r, PipelineShape s, int i) {
    if (i >= r->count || r->actions[i].backward) return;
    int *place = &r->input[r->actions[i].input];
    assert_true(r->actions[i].input <= pipeline_in_flight(s, MOST));
    assert_int_equal(*place, 0);
    *place = pair_of(s, r->actions[i]) + 1;
}

static void run_action(Running *r, PipelineShape s, PipelineAction a) {
    int pair = pair_of(s, a);
    if (!a.backward) {
        assert_false(r->forward[pair]);
        assert_int_equal(r->slot[a.slot], 0);
        r->forward[pair] = true;
        r->slot[a.slot] = pair + 1;
        return;
    }
    assert_true(r->forward[pair] && !r->backward[pair]);
    assert_int_equal(r->slot[a.slot], pair + 1);
    assert_int_equal(r->input[a.input], pair + 1);
    r->backward[pair] = true;
    r->slot[a.slot] = r->input[a.input] = 0;
}

// Returns true if the receive of action `a` was posted: one action earlier, unless that action is
// of the same micro-batch.
static bool is_expected(const Running *r, PipelineShape s, PipelineAction a) {
    for (int i = 0; i < r->count && i <= r->at + 1; i++) {
        PipelineAction found = r->actions[i];
        if (pair_of(s, found) != pair_of(s, a) || found.backward != a.backward) continue;
        return i <= r->at || found.micro_batch != r->actions[r->at].micro_batch;
    }
    return false;
}

// Finds the stage that receives the action's output. Returns false if there is none.
static bool receiver_of(PipelineShape s, PipelineAction *a, int *stage) {
    int step = a->backward ? -1 : 1, end = a->backward ? 0 : s.stages - 1;
    if (s.stage == end) a->chunk += step;
    *stage = (s.stage + step + s.stages) % s.stages;
    return a->chunk >= 0 && a->chunk < s.chunks;
}

// Returns true if all messages in flight can complete before the stages start their next actions.
// On GPUs a kernel launch may wait for them in the backward pass of the last micro-batch (see the
// links in llmc/cuda/comm.cu).
static bool nothing_holds_the_host(const Running *all, PipelineShape s) {
    const Running *r = &all[s.stage];
    for (int i = 0; i < r->at; i++) {
        PipelineAction sent = r->actions[i];
        int to;
        if (receiver_of(s, &sent, &to) && !is_expected(&all[to], s, sent)) return false;
    }
    return r->at + 1 == r->count || has_come(all, s, r->actions[r->at + 1]);
}

// Runs all stages. An action waits for the neighbor on which it depends.
static void check_order(int stages, int chunks, int micro_batches) {
    static Running all[STAGES];
    memset(all, 0, sizeof all);
    int passes = 2 * micro_batches * chunks;
    for (int i = 0; i < stages; i++) {
        PipelineShape s = {stages, i, chunks};
        all[i].count = pipeline_actions(s, micro_batches, true, all[i].actions);
        assert_int_equal(all[i].count, passes);
        expect_next(&all[i], s, 0);
    }
    for (int done = 0; done < stages * passes;) {
        int before = done;
        for (int i = 0; i < stages; i++) {
            PipelineShape s = {stages, i, chunks};
            Running *r = &all[i];
            if (r->at == r->count || !has_come(all, s, r->actions[r->at])) continue;
            PipelineAction a = r->actions[r->at];
            bool may_be_held = a.backward && a.micro_batch == micro_batches - 1;
            if (may_be_held && !nothing_holds_the_host(all, s)) continue;
            r->at++;
            assert_true(a.slot < pipeline_in_flight(s, micro_batches));
            expect_next(r, s, r->at);
            run_action(r, s, a);
            done++;
        }
        if (done == before) fail_msg("%d stages, %d chunks, %d: deadlock", stages, chunks, micro_batches);
    }
}

static void every_stage_finishes(void **state) {
    for (int stages = 1; stages <= STAGES; stages++) {
        for (int n = 1; n <= 20; n++) check_order(stages, 1, n);
        for (int chunks = 2; stages > 1 && chunks <= CHUNKS; chunks++) {
            for (int n = stages; n <= MOST; n += stages) check_order(stages, chunks, n);
        }
    }
}

// Messages of a link arrive in the order in which the receiver uses them.
static void messages_arrive_in_order(void **state) {
    static PipelineAction from[2 * MOST * CHUNKS], to[2 * MOST * CHUNKS];
    for (int stages = 2; stages <= STAGES; stages++) {
        for (int i = 0; i < stages; i++) {
            PipelineShape a = {stages, i, 3}, b = {stages, (i + 1) % stages, 3};
            int n = 2 * stages, count = pipeline_actions(a, n, true, from), at = 0;
            pipeline_actions(b, n, true, to);
            for (int k = 0; k < count; k++) {
                bool last = i == stages - 1;
                if (from[k].backward || (last && from[k].chunk == 2)) continue;
                while (to[at].backward || (last && to[at].chunk == 0)) at++;
                assert_int_equal(to[at].micro_batch, from[k].micro_batch);
                assert_int_equal(to[at++].chunk, from[k].chunk + last);
            }
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(schedule_is_1f1b),
        cmocka_unit_test(every_stage_finishes),
        cmocka_unit_test(messages_arrive_in_order),
    };
    return cmocka_run_group_tests_name("order of the pipeline", tests, NULL, NULL);
}
