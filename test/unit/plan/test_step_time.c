// Predicted step times against schedules worked out by hand.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "llmc/plan/step_time.h"

// There are three buckets: embeddings and two layers. Forward takes 2 x 1 ms, the LM head 3,
// backward 2 x 2.
enum { THREE = 3, PASSES = 9 };
typedef struct Case {
    BucketLoad bucket[5];
    StepLoad load;
} Case;

static Case *three(Case *c, BucketLoad each) {
    memset(c, 0, sizeof *c);
    for (int b = 0; b < THREE; b++) {
        c->bucket[b] = each;
        c->bucket[b].layers = b > 0;
        if (!each.reductions) c->bucket[b].reductions = 1;
    }
    c->load = (StepLoad){
        .buckets = THREE, .bucket = c->bucket, .micro_batches = 1, .forward = 1, .backward = 2, .head = 3};
    return c;
}

static void takes(Case *c, double ms) { assert_float_equal(step_time(&c->load), ms, 1e-9); }

static void compute_only(void **state) {
    Case c;
    takes(three(&c, (BucketLoad){0}), PASSES);
    c.load.micro_batches = 3;
    takes(&c, 3 * PASSES);
    assert_float_equal(step_compute(&c.load), 3 * PASSES, 1e-9);
}

// Backward of the embeddings counts as compute; waits for messages do not.
static void exposed_waits(void **state) {
    Case c;
    three(&c, (BucketLoad){0});
    c.load.micro_batches = 2;
    c.load.tail = 0.5;
    takes(&c, 2 * (PASSES + 0.5));
    c.load.waits = 1.5;
    takes(&c, 2 * (PASSES + 0.5 + 1.5));
    assert_float_equal(step_compute(&c.load), 2 * (PASSES + 0.5), 1e-9);
    assert_float_equal(step_time_alone(&c.load), 2 * (PASSES + 0.5), 1e-9);
    // The gradients of the embeddings are sent last.
    three(&c, (BucketLoad){.grad_between = 1});
    c.load.tail = 3;
    takes(&c, PASSES + 3 + 1);
}

// A step without messages consists of compute, updates and memory traffic.
static void step_without_messages(void **state) {
    Case c;
    three(&c, (BucketLoad){.grad_inside = 4,
                           .grad_between = 4,
                           .weight_between = 2,
                           .weight_inside = 1,
                           .update = 1,
                           .gathered = true,
                           .forward_gather = 3,
                           .backward_gather = 3});
    c.load.memory = 5;
    c.load.waits = 7;
    assert_float_equal(step_time_alone(&c.load), PASSES + 5 + 2, 1e-9);
}

// Updates take 1 ms each, in forward order. The embeddings are ready at 1 ms, layer 1 at 2. Layer 1
// computes until 3, when layer 2 is ready. So 2 ms are exposed.
static void updates_in_forward_order(void **state) {
    Case c;
    takes(three(&c, (BucketLoad){.update = 1}), PASSES + 2);
    // Memory traffic precedes the updates and is fully exposed.
    c.load.memory = 5;
    takes(&c, PASSES + 5 + 2);
}

// Matrix products of the update leave forward only the rest of the GPU's time.
static void products_delay_forward(void **state) {
    Case c;
    takes(three(&c, (BucketLoad){.update = 1, .products = 1}), PASSES + 3);
    assert_float_equal(step_time_alone(&c.load), PASSES + 3, 1e-9);
    // Forward starts after 2.4 ms and layer 2 has its weights at 3 ms: 2.4 ms are exposed.
    takes(three(&c, (BucketLoad){.update = 1, .products = 0.8}), PASSES + 2.4);
    // While forward waits for weights (until 3, 5 and 7 ms), products cost nothing.
    takes(three(&c, (BucketLoad){.update = 1, .products = 1, .weight_between = 2}), PASSES + 6);
}

static void gradients_overlap_with_backward(void **state) {
    Case c;
    // Layer 2 is sent 2 to 3 ms into backward. Layer 1 and the embeddings are complete at 4 and
    // are sent one after the other until 6.
    takes(three(&c, (BucketLoad){.grad_between = 1}), PASSES + 2);
    // Messages take 4 ms on each of two links. They end at 6, 10, 14 on the first link and at 10,
    // 14, 18 on the second.
    takes(three(&c, (BucketLoad){.grad_inside = 4, .grad_between = 4}), PASSES + 14);
}

// Gradients take 3 ms per bucket. The messages end at 7 + 9 ms, minus the burst.
static void network_with_a_burst(void **state) {
    Case c;
    // Backward starts at 5 ms and completes layer 2 at 7.
    takes(three(&c, (BucketLoad){.grad_between = 3}), 7 + 9);
    c.load.burst = 2;
    takes(&c, 7 + 9 - 2);
    // With a long burst nothing is exposed.
    c.load.burst = 100;
    takes(&c, PASSES);
    // With a burst, weights still cannot arrive before their updates, which take 1 ms each.
    takes(three(&c, (BucketLoad){.update = 1, .weight_between = 5}), 1 + 5 + 5 + 5 + 1 + 3 + 4);
    c.load.burst = 100;
    takes(&c, PASSES + 2);
}

// Weights take 2 ms between nodes, then 1 ms inside, so they arrive 3, 5 and 7 ms after the update.
// Layer 1 computes from 5 to 6, layer 2 from 7 to 8. Without messages layer 2 would end at 2.
static void layers_wait_for_their_own_weights(void **state) {
    Case c;
    takes(three(&c, (BucketLoad){.weight_between = 2, .weight_inside = 1}), PASSES + 6);
}

// Two micro-batches send six messages of 8 ms. The first one starts at 7, when the first backward
// has completed layer 2. Compute ends at 18.
static void reduction_per_micro_batch(void **state) {
    Case c;
    three(&c, (BucketLoad){.grad_between = 8, .reductions = 2});
    c.load.micro_batches = 2;
    takes(&c, 7 + 6 * 8);
    // With one reduction only the second micro-batch sends, starting at 16.
    three(&c, (BucketLoad){.grad_between = 8, .reductions = 1});
    c.load.micro_batches = 2;
    takes(&c, 16 + 3 * 8);
}

// A bucket of two layers has gradients of 8 ms. The embeddings follow with as many. Backward
// completes the layers at 7 and 9.
static void parts_of_a_bucket(void **state) {
    Case c;
    const double sent[] = {0.75, 0.25};
    three(&c, (BucketLoad){.grad_between = 8});
    c.load.buckets = 2;
    c.bucket[1].layers = 2;
    takes(&c, 9 + 8 + 8);
    c.bucket[1].sent = sent;
    takes(&c, 7 + 8 + 8);
    c.bucket[1].grad_between = 2;  // parts of 1.5 and 0.5 ms
    takes(&c, 9 + 0.5 + 8);
}

// Four layers are gathered into two slots, for 3 ms each. In forward they arrive at 3, 6, 9 and 12,
// and the LM head ends at 16. Backward finds layers 4 and 3 in the slots and completes them at 18
// and 20. Layer 2 is gathered from 18 to 21 and completed at 23, layer 1 is gathered from 21 to 24
// and completed at 26.
static void gathers_through_two_slots(void **state) {
    Case c;
    three(&c, (BucketLoad){0});
    c.load.buckets = 5;
    for (int b = 1; b < 5; b++) {
        c.bucket[b] = (BucketLoad){
            .layers = 1, .reductions = 1, .gathered = true, .forward_gather = 3, .backward_gather = 3};
    }
    takes(&c, 26);
    // If gathers take 1 ms, only the first one is exposed.
    for (int b = 1; b < 5; b++) c.bucket[b].forward_gather = c.bucket[b].backward_gather = 1;
    takes(&c, 4 + 3 + 8 + 1);
}

static void outer_syncs_of_local_steps(void **state) {
    Case c;
    three(&c, (BucketLoad){.exchange = 12});
    // Six steps of 10 ms have three outer syncs of 12 ms. If a sync overlaps with one step, 2 ms
    // are exposed; with two steps nothing is.
    assert_float_equal(step_time_local(&c.load, 10, 6, 0), (60 + 6) / 6.0, 1e-9);
    assert_float_equal(step_time_local(&c.load, 10, 6, 1), 10, 1e-9);
    // Three outer syncs of 30 ms are longer than three steps.
    three(&c, (BucketLoad){.exchange = 30});
    assert_float_equal(step_time_local(&c.load, 10, 3, 2), 30, 1e-9);
    // The large first bucket takes 30 ms. The other buckets' sync slots are late in the period.
    c.bucket[1].exchange = c.bucket[2].exchange = 3;
    assert_float_equal(step_time_local(&c.load, 10, 6, 2), 10, 1e-9);
    assert_float_equal(step_time_local(&c.load, 10, 6, 1), (60 + 10) / 6.0, 1e-9);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(compute_only),
        cmocka_unit_test(exposed_waits),
        cmocka_unit_test(step_without_messages),
        cmocka_unit_test(updates_in_forward_order),
        cmocka_unit_test(products_delay_forward),
        cmocka_unit_test(gradients_overlap_with_backward),
        cmocka_unit_test(network_with_a_burst),
        cmocka_unit_test(layers_wait_for_their_own_weights),
        cmocka_unit_test(reduction_per_micro_batch),
        cmocka_unit_test(parts_of_a_bucket),
        cmocka_unit_test(gathers_through_two_slots),
        cmocka_unit_test(outer_syncs_of_local_steps),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
