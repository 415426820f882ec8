// Bytes per step of each sharding strategy against numbers worked out by hand.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "llmc/plan/traffic.h"

// Two nodes of two ranks. The embeddings and each of four layers are a bucket of 131072 elements,
// of which a rank's shard has 32768. MESSAGE_ALIGN divides all sizes below.
enum { UNITS = 5, NUMBERS = 131072 };
// Gradients inside the node: (D - 1) messages of N shards in 8 bits with a scale per 128 values:
// 2 x 32768 + 2 x 256 x 4.
enum { GRAD_INSIDE = 67584 };
// Gradients between nodes: (N - 1) messages of one shard in 4 bits: 16384 + 256 x 4.
enum { GRAD_BETWEEN = 17408 };
// Weights between nodes: one shard in 4 bits with a scale per 2048 values: 16384 + 16 x 4. Inside
// the node a rank sends both nodes' shards to the other rank.
enum { WEIGHT_BETWEEN = 16448, WEIGHT_INSIDE = 2 * WEIGHT_BETWEEN };
// Both shards in bf16: 2 x 32768 x 2.
enum { PART_INSIDE = 131072 };

typedef struct Case {
    Config config;
    Mesh mesh;
    Tensor tensors[2 * UNITS];
    MemoryPlan memory_plan;
    Zero *zero;
    const BucketLayout *plan;
    StepTraffic traffic;
} Case;

static void quantize(Config *c) {
    c->quantized_weights = c->quantized_gradients = true;
    c->weight_quantization_bits = c->gradient_quantization_bits_inter = 4;
    c->gradient_quantization_bits_intra = 8;
    c->wq_group_size = 2048;
    c->gq_group_size_intra = c->gq_group_size_inter = 128;
    c->gradient_alltoall_pipeline = 1;
    c->ddp_bucket_size = 1;
    c->local_steps = 1;
}

static void tear_down(Case *c) {
    traffic_free(&c->traffic);
    zero_free(c->zero);
    memory_plan_free(&c->memory_plan, NULL);
    c->zero = NULL;
}

// Sets up `units` buckets on 2 x 2 data-parallel ranks for stage `stage` of `stages`.
static void set_up(Case *c, int units, int layers, int stages, int stage) {
    Error err;
    bool words = stage == 0 || stage == stages - 1;
    memset(c, 0, sizeof *c);
    quantize(&c->config);
    assert_true(mesh_build(&c->mesh, 4 * stage, 4 * stages, NULL, 2, 1, stages, &err));
    for (int u = 0; u < units; u++) {
        c->tensors[u] = tensor_row("matrix", NUMBERS / 1024, 1024, -1, u, 0);
        c->tensors[u].chunk = words && u == 0 ? ANY_CHUNK : 0;
    }
    tensors_number(c->tensors, units, 1);
    c->config.num_layers = layers;
    c->config.pipeline_model_parallel_size = stages;
}

static WireBytes bytes_of(Case *c, Sharding sharding, int micro_batches) {
    Error err;
    int units = 0;
    while (c->tensors[units].dims) units++;
    tear_down(c);
    c->config.sharding = sharding;
    c->config.micro_batches = micro_batches;
    c->zero = zero_plan(&c->config, &c->mesh, c->tensors, units, &c->memory_plan, &err);
    if (!c->zero) fail_msg("%s", err.what);
    c->plan = zero_layout(c->zero);
    assert_int_equal(c->plan->buckets, units);
    assert_int_equal(c->plan->bucket[0].matrix_per_rank, NUMBERS / c->mesh.dp.size);
    c->traffic = traffic_make(&c->config, &c->mesh, c->zero);
    const GradFormat *grad = zero_grad_format(c->zero, true);
    const WeightFormat *weight = zero_weight_format(c->zero);
    WireBytes bytes = traffic_of_step(&c->traffic, grad, weight);
    // The formulas are exact, because there are no padding and no 1-D tensors.
    WireFormula formula = traffic_formula(&c->traffic, grad, weight);
    assert_true(fabs(formula.grad_intra - (double)bytes.grad_intra) < 1e-3);
    assert_true(fabs(formula.grad_inter - (double)bytes.grad_inter) < 1e-3);
    assert_true(fabs(formula.weight_intra - (double)bytes.weight_intra) < 1e-3);
    assert_true(fabs(formula.weight_inter - (double)bytes.weight_inter) < 1e-3);
    return bytes;
}

static WireBytes gather_of(const Case *c, int b, bool backward) {
    return traffic_of_gather(&c->traffic, b, backward, zero_weight_format(c->zero));
}

static void same_bytes(WireBytes got, int64_t grad_intra, int64_t grad_inter, int64_t weight_intra,
                       int64_t weight_inter) {
    assert_int_equal(got.grad_intra, grad_intra);
    assert_int_equal(got.grad_inter, grad_inter);
    assert_int_equal(got.weight_intra, weight_intra);
    assert_int_equal(got.weight_inter, weight_inter);
}

static void gathers_are(const Case *c, const int (*want)[2]) {
    for (int b = 0; b < c->plan->buckets; b++) {
        assert_int_equal(c->traffic.trips[b].forward, want[b][0]);
        assert_int_equal(c->traffic.trips[b].backward, want[b][1]);
    }
}

static void optim_sends_once(void **state) {
    Case c;
    set_up(&c, UNITS, 4, 1, 0);
    for (int micro_batches = 1; micro_batches < 4; micro_batches++) {
        same_bytes(bytes_of(&c, SHARD_OPTIMIZER, micro_batches), UNITS * GRAD_INSIDE, UNITS * GRAD_BETWEEN,
                   UNITS * WEIGHT_INSIDE, UNITS * WEIGHT_BETWEEN);
    }
    tear_down(&c);
}

// Without sharding, a rank sends its quarter of the reduced gradients in fp32 between nodes, then
// the quarters of both nodes inside the node. It sends no weights.
static void without_sharding_reduced_gradients_are_gathered(void **state) {
    Case c;
    set_up(&c, UNITS, 4, 1, 0);
    for (int micro_batches = 1; micro_batches < 4; micro_batches++) {
        same_bytes(bytes_of(&c, SHARD_NOTHING, micro_batches), UNITS * (GRAD_INSIDE + 2 * NUMBERS),
                   UNITS * (GRAD_BETWEEN + NUMBERS), 0, 0);
    }
    tear_down(&c);
}

// The bucket of the embeddings is reduced once per step, buckets of layers in every micro-batch.
static void gradients_are_reduced_per_micro_batch(void **state) {
    Case c;
    set_up(&c, UNITS, 4, 1, 0);
    same_bytes(bytes_of(&c, SHARD_GRADIENTS, 1), UNITS * GRAD_INSIDE, UNITS * GRAD_BETWEEN,
               UNITS * WEIGHT_INSIDE, UNITS * WEIGHT_BETWEEN);
    same_bytes(bytes_of(&c, SHARD_GRADIENTS, 3), 13 * GRAD_INSIDE, 13 * GRAD_BETWEEN, UNITS * WEIGHT_INSIDE,
               UNITS * WEIGHT_BETWEEN);
    tear_down(&c);
}

// Layers are buckets 1 to 4. Buckets 1 and 3 share a slot, and so do 2 and 4. Forward gathers all
// four. Backward finds 4 and 3 in the slots and gathers 2 and 1, which the next micro-batch then
// finds.
static void layers_are_gathered_in_both_directions(void **state) {
    Case c;
    set_up(&c, UNITS, 4, 1, 0);
    WireBytes one = bytes_of(&c, SHARD_PARAMETERS, 1);
    static const int once[][2] = {{0, 0}, {1, 1}, {1, 1}, {1, 0}, {1, 0}};
    gathers_are(&c, once);
    // Between nodes the bytes are the same as with optim.
    same_bytes(one, UNITS * GRAD_INSIDE, UNITS * GRAD_BETWEEN, WEIGHT_INSIDE + 6 * PART_INSIDE,
               UNITS * WEIGHT_BETWEEN);
    same_bytes(gather_of(&c, 2, true), 0, 0, PART_INSIDE, 0);
    same_bytes(gather_of(&c, 0, true), 0, 0, 0, 0);
    same_bytes(traffic_of_update(&c.traffic, 2, zero_grad_format(c.zero, true), zero_weight_format(c.zero)),
               GRAD_INSIDE, GRAD_BETWEEN, 0, WEIGHT_BETWEEN);
    WireBytes three = bytes_of(&c, SHARD_PARAMETERS, 3);
    static const int thrice[][2] = {{0, 0}, {1, 3}, {1, 3}, {3, 0}, {3, 0}};
    gathers_are(&c, thrice);
    same_bytes(three, 13 * GRAD_INSIDE, 13 * GRAD_BETWEEN, WEIGHT_INSIDE + 14 * PART_INSIDE,
               UNITS * WEIGHT_BETWEEN);
    tear_down(&c);
}

// Every gather uses both hops. With a secondary partition only forward gathers do.
static void sharding_over_all_ranks(void **state) {
    Case c;
    set_up(&c, UNITS, 4, 1, 0);
    c.config.shard_scope = SHARD_IN_WORLD;
    same_bytes(bytes_of(&c, SHARD_PARAMETERS, 1), UNITS * GRAD_INSIDE, UNITS * GRAD_BETWEEN,
               7 * WEIGHT_INSIDE, 7 * WEIGHT_BETWEEN);
    c.config.secondary_partition = true;
    same_bytes(bytes_of(&c, SHARD_PARAMETERS, 1), UNITS * GRAD_INSIDE, UNITS * GRAD_BETWEEN,
               5 * WEIGHT_INSIDE + 2 * PART_INSIDE, 5 * WEIGHT_BETWEEN);
    same_bytes(gather_of(&c, 2, false), 0, 0, WEIGHT_INSIDE, WEIGHT_BETWEEN);
    same_bytes(gather_of(&c, 2, true), 0, 0, PART_INSIDE, 0);
    tear_down(&c);
}

// The first of two stages runs two forward passes before the first backward pass. So the second
// forward and the second backward pass find no layers in the slots.
static void pipeline_stages_gather_more(void **state) {
    Case c;
    set_up(&c, UNITS, 8, 2, 0);
    bytes_of(&c, SHARD_PARAMETERS, 2);
    static const int first[][2] = {{0, 0}, {2, 2}, {2, 2}, {2, 1}, {2, 1}};
    gathers_are(&c, first);
    tear_down(&c);
    // The last stage alternates forward and backward, like a single stage.
    set_up(&c, UNITS, 8, 2, 1);
    bytes_of(&c, SHARD_PARAMETERS, 2);
    static const int last[][2] = {{0, 0}, {1, 2}, {1, 2}, {2, 0}, {2, 0}};
    gathers_are(&c, last);
    tear_down(&c);
    // Middle stages have no embeddings, so layers are units 0 to 3. Bucket 0 is never gathered.
    set_up(&c, UNITS - 1, 12, 3, 1);
    bytes_of(&c, SHARD_PARAMETERS, 1);
    static const int middle[][2] = {{0, 0}, {1, 1}, {1, 0}, {1, 0}};
    gathers_are(&c, middle);
    // All buckets of this stage are layers.
    assert_int_equal(bytes_of(&c, SHARD_GRADIENTS, 3).grad_inter, 3 * (UNITS - 1) * GRAD_BETWEEN);
    tear_down(&c);
}

// Each node is a replica group of two ranks, and a rank's shard has 65536 elements. Every four
// steps the groups reduce-scatter and all-gather it, which sends half of the shard twice. Inside
// the node, a step sends as many bytes as above for two shards.
static void replica_groups_sync_every_h_steps(void **state) {
    Case c;
    Error err;
    set_up(&c, UNITS, 4, 1, 0);
    assert_true(mesh_make_replica_groups(&c.mesh, &err));
    c.config.local_steps = 4;
    same_bytes(bytes_of(&c, SHARD_OPTIMIZER, 1), UNITS * GRAD_INSIDE, UNITS * 2 * GRAD_BETWEEN / 4,
               UNITS * WEIGHT_INSIDE, 0);
    assert_int_equal(zero_exchange_bytes(c.zero, 1, zero_grad_format(c.zero, true)), 2 * GRAD_BETWEEN);
    tear_down(&c);
}

// A micro-batch has 2 x 32 tokens of 64 channels. 4096 values have 64 scales of 4 bytes.
static void activations_between_stages(void **state) {
    Config c = {.micro_batch_size = 2, .seq_length = 32, .hidden_size = 64, .aq_group_size = 64};
    Mesh mesh = {.tp = {.size = 2}, .pp = {.size = 2}};
    c.activation_quantization_bits_forward = 4;
    c.activation_quantization_bits_backward = 8;
    const double plain = 4096 * sizeof(floatX);
    assert_true(parts_hidden_bytes(&c, &mesh, FORWARD) == plain);
    assert_true(parts_hidden_bytes(&c, &mesh, BACKWARD) == plain);
    c.quantized_activations = true;
    assert_true(parts_hidden_bytes(&c, &mesh, FORWARD) == 2048 + 256);
    assert_true(parts_hidden_bytes(&c, &mesh, BACKWARD) == 4096 + 256);
    c.verify_wire = true;
    assert_true(parts_hidden_bytes(&c, &mesh, FORWARD) == 2048 + 256 + MESSAGE_ALIGN);
    c.sequence_parallel = true;  // each of two ranks sends half of the rows
    assert_true(parts_hidden_bytes(&c, &mesh, BACKWARD) == 2048 + 128 + MESSAGE_ALIGN);
    c.activation_quantization_bits_forward = 16;  // without a checksum, like all unquantized activations
    assert_true(parts_hidden_bytes(&c, &mesh, FORWARD) == plain / 2);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(optim_sends_once),
        cmocka_unit_test(without_sharding_reduced_gradients_are_gathered),
        cmocka_unit_test(gradients_are_reduced_per_micro_batch),
        cmocka_unit_test(layers_are_gathered_in_both_directions),
        cmocka_unit_test(sharding_over_all_ranks),
        cmocka_unit_test(pipeline_stages_gather_more),
        cmocka_unit_test(replica_groups_sync_every_h_steps),
        cmocka_unit_test(activations_between_stages),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
