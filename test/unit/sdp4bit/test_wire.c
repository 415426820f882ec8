// The kernels encode and decode the example message that sdp4bit/README.md prints byte by byte:
// from rank 1 to rank 0 of two nodes with one rank each.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "sdp4bit/kernels.h"

// A tensor that model parallelism does not split.
#define MATRIX(NUMEL, UNIT) \
    { .numel = (NUMEL), .matrix = true, .unit = (UNIT) }
#define VECTOR(NUMEL, UNIT) \
    { .numel = (NUMEL), .matrix = false, .unit = (UNIT) }

typedef struct Example {
    BucketLayout layout;
    GradFormat format;
    MessageLayout message;
    float grads[128];  // the bucket: 64 matrix elements and 16 tail elements
} Example;

// Builds a matrix of 40 elements and a 1-D tensor of 9. The gradients are (i - 10) / 8 and (i + 1)
// / 4; averaging over two ranks halves them.
static void example_build(Example *e, bool hadamard) {
    static const LayoutTensor tensors[] = {MATRIX(40, 0), VECTOR(9, 0)};
    LayoutOptions options = {2, 1, 32, 32, 1, 1};
    GradFormat format = {CODEC_INT8, CODEC_INT4, 32, 32, CODEC_BF16, hadamard, ROUND_STOCHASTIC, 1};
    MessageLayout unused;
    memset(e, 0, sizeof *e);
    e->format = format;
    assert_true(layout_build(&e->layout, tensors, 2, &options, NULL));
    layout_grad_messages(&e->layout, &e->layout.bucket[0], &format, 0, &unused, &e->message);
    for (int i = 0; i < 40; i++) e->grads[i] = (float)(i - 10) / 8.0f;
    for (int i = 0; i < 9; i++) e->grads[e->layout.bucket[0].matrix_elements + i] = (float)(i + 1) / 4.0f;
}

static SegmentTable table_of(const BucketLayout *layout) {
    SegmentTable table = {layout->segments, layout->bucket[0].segments};
    return table;
}

// Encodes both slots as source `rank`.
static void example_encode(const Example *e, int rank, uint8_t *slots) {
    QuantizePartitions q = {0};
    q.grads = e->grads;
    q.bucket = e->layout.bucket[0];
    q.table = table_of(&e->layout);
    q.hi = q.bucket.matrix_per_rank;
    q.scale = 0.5f;
    q.transform = e->format.transform;
    q.codec = e->format.inter_codec;
    q.group = e->format.inter_group;
    q.tail_codec = e->format.tail_codec;
    q.rounding = e->format.rounding;
    RoundingKey key = {1234, 1, PURPOSE_GRAD_LEVEL2, (uint32_t)rank};
    q.key = key;
    q.slots = 2;
    q.self = rank;
    q.send = slots;
    q.self_slot = slots + rank * e->message.bytes;
    q.message = e->message;
    kernel_quantize_partitions(NULL, &q);
}

static void test_message_layout(void **state) {
    Example e;
    example_build(&e, false);
    assert_int_equal(e.layout.bucket[0].matrix_elements, 64);
    assert_int_equal(e.layout.bucket[0].tail_elements, 16);
    assert_int_equal(e.message.scales, 16);
    assert_int_equal(e.message.tail, 32);
    assert_int_equal(e.message.bytes, 48);
    layout_free(&e.layout);
}

static const uint8_t plain_codes[16] = {0xdd, 0xee, 0xee, 0xfe, 0x0f, 0x10, 0x11, 0x12,
                                        0x22, 0x33, 0x33, 0x44, 0x55, 0x66, 0x76, 0x77};
static const uint8_t transformed_codes[16] = {0xf5, 0x0f, 0x0f, 0x00, 0x0c, 0x00, 0x00, 0x00,
                                              0x09, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00};

static void check_message(bool hadamard, const uint8_t *codes, const uint8_t *scale) {
    static const uint8_t tail[16] = {0x00, 0x3e, 0x80, 0x3e, 0xc0, 0x3e, 0x00, 0x3f,
                                     0x20, 0x3f, 0x40, 0x3f, 0x60, 0x3f, 0x80, 0x3f};
    Example e;
    uint8_t slots[96] __attribute__((aligned(16)));
    memset(slots, 0, sizeof slots);
    example_build(&e, hadamard);
    example_encode(&e, 1, slots);
    assert_memory_equal(slots, codes, 16);
    assert_memory_equal(slots + 16, scale, 4);
    assert_memory_equal(slots + 32, tail, 16);
    layout_free(&e.layout);
}

static void test_message_bytes(void **state) {
    // The scales are 1.3125 / 7 and 16 / 7.
    static const uint8_t scale[4] = {0x00, 0x00, 0x40, 0x3e}, transformed_scale[4] = {0x25, 0x49, 0x12, 0x40};
    check_message(false, plain_codes, scale);
    check_message(true, transformed_codes, transformed_scale);
}

// Decodes the message as rank `rank`, and overwrites the gradients or adds to them.
static void example_decode(Example *e, int rank, const uint8_t *message, bool add, float *partials,
                           float *tail_partials) {
    SumFinal f = {0};
    f.received = message;
    f.sources = 1;
    f.in = e->message;
    f.codec = e->format.inter_codec;
    f.group = e->format.inter_group;
    f.tail_codec = e->format.tail_codec;
    f.transform = e->format.transform;
    f.rank = rank;
    f.bucket = e->layout.bucket[0];
    f.table = table_of(&e->layout);
    f.hi = f.bucket.matrix_per_rank;
    f.own = grad_shard_of(&f.bucket, e->grads, rank);
    f.add = add;
    f.matrix_partials = partials;
    f.tail_partials = tail_partials;
    kernel_sum_final(NULL, &f);
}

static void check_decoded(bool hadamard, const float *expected) {
    Example e;
    uint8_t slots[96] __attribute__((aligned(16)));
    float partial, tail_partial;
    double squares = 0, tail_squares = 0;
    example_build(&e, hadamard);
    example_encode(&e, 1, slots);
    example_decode(&e, 0, slots, false, &partial, &tail_partial);
    for (int i = 0; i < 8; i++) assert_true(fabsf(e.grads[i] - expected[i]) < 1e-6f);
    for (int i = 0; i < 32; i++) squares += (double)e.grads[i] * (double)e.grads[i];
    for (int i = 0; i < 8; i++) {
        assert_true(e.grads[64 + i] == (float)(i + 1) / 8.0f);
        tail_squares += (double)e.grads[64 + i] * (double)e.grads[64 + i];
    }
    assert_true(fabs((double)partial - squares) < 1e-5 && fabs((double)tail_partial - tail_squares) < 1e-5);
    // Rank 1's ranges are unchanged.
    assert_true(e.grads[32] == 22.0f / 8.0f && e.grads[72] == 9.0f / 4.0f);
    layout_free(&e.layout);
}

static void test_decoded_values(void **state) {
    static const float plain[8] = {-0.5625f, -0.5625f, -0.375f, -0.375f, -0.375f, -0.375f, -0.375f, -0.1875f};
    static const float transformed[8] = {-0.642857f, -0.5f,      -0.5f,      -0.357143f,
                                         -0.5f,      -0.357143f, -0.357143f, -0.214286f};
    check_decoded(false, plain);
    check_decoded(true, transformed);
}

// Adding an equal message exactly doubles the values and quadruples the partial sums of squares.
static void test_added_values(void **state) {
    Example once, twice;
    uint8_t slots[96] __attribute__((aligned(16)));
    float partial[2], tail_partial[2];
    example_build(&once, true);
    example_build(&twice, true);
    example_encode(&once, 1, slots);
    example_decode(&once, 0, slots, false, &partial[0], &tail_partial[0]);
    example_decode(&twice, 0, slots, false, &partial[1], &tail_partial[1]);
    example_decode(&twice, 0, slots, true, &partial[1], &tail_partial[1]);
    for (int i = 0; i < 32; i++) assert_true(twice.grads[i] == 2 * once.grads[i]);
    for (int i = 64; i < 72; i++) assert_true(twice.grads[i] == 2 * once.grads[i]);
    assert_true(partial[0] > 0 && partial[1] == 4 * partial[0] && tail_partial[1] == 4 * tail_partial[0]);
    layout_free(&once.layout);
    layout_free(&twice.layout);
}

// Elements 40 to 63 of the matrix are padding. The transform spreads rounding errors to them, and
// the last stage sets them to zero.
static void test_padding_is_masked(void **state) {
    Example e;
    uint8_t slots[96] __attribute__((aligned(16)));
    float partial, tail_partial;
    example_build(&e, true);
    example_encode(&e, 0, slots);
    example_decode(&e, 1, slots + e.message.bytes, false, &partial, &tail_partial);
    for (int i = 32; i < 40; i++) assert_true(e.grads[i] != 0.0f);
    for (int i = 40; i < 64; i++) assert_true(e.grads[i] == 0.0f);
    layout_free(&e.layout);
}

// --- checksums ----------------------------------------------------------------------------------

enum { SEALED = 64, COUNT = 3 };
#define CODE ((uint64_t)1 << 63 | 500)

static uint64_t checked(const SealMessages *a) {
    uint64_t sums[COUNT], fault = 0;
    kernel_check_messages(NULL, a, sums, &fault, CODE);
    return fault;
}

static void seals_find_every_flipped_bit(void **state) {
    uint8_t messages[COUNT * SEALED], before[COUNT * SEALED];
    for (int i = 0; i < COUNT * SEALED; i++) messages[i] = (uint8_t)(i * 41 % 251);
    memcpy(before, messages, sizeof before);
    SealMessages a = {messages, COUNT, 1, SEALED, 99, 7, 65536};
    kernel_seal_messages(NULL, &a);
    for (int i = 0; i < COUNT * SEALED; i++) {  // sealing writes only the last section of nonempty messages
        bool seal = i / SEALED != 1 && i % SEALED >= SEALED - MESSAGE_ALIGN;
        assert_true(seal || messages[i] == before[i]);
        if (seal && i % SEALED >= SEALED - MESSAGE_ALIGN / 2) assert_int_equal(messages[i], 0);
    }
    assert_true(checked(&a) == 0);
    for (int bit = 0; bit < 8 * COUNT * SEALED; bit++) {
        int message = bit / 8 / SEALED;
        messages[bit / 8] ^= (uint8_t)(1 << bit % 8);
        // Empty messages and the unused half of a seal are not checked.
        bool counts = message != 1 && bit / 8 % SEALED < SEALED - MESSAGE_ALIGN / 2;
        assert_true(checked(&a) == (counts ? CODE + (uint64_t)message : 0));
        messages[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
}

// Intact messages in the wrong slot or of another step are detected.
static void seals_find_messages_out_of_place(void **state) {
    uint8_t messages[COUNT * SEALED] = {0}, copy[SEALED];
    SealMessages a = {messages, COUNT, -1, SEALED, 99, 7, 65536};
    kernel_seal_messages(NULL, &a);
    assert_true(checked(&a) == 0);
    SealMessages other = a;
    other.key = 100;
    assert_true(checked(&other) == CODE);
    other = a;
    other.first = 8;
    assert_true(checked(&other) == CODE);
    memcpy(copy, messages + SEALED, SEALED);
    memcpy(messages + SEALED, messages + 2 * SEALED, SEALED);
    memcpy(messages + 2 * SEALED, copy, SEALED);
    assert_true(checked(&a) == CODE + 1);
    uint64_t sums[COUNT], first = 77;
    kernel_check_messages(NULL, &a, sums, &first, CODE);
    assert_true(first == 77);  // the first finding is kept
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_message_layout),
        cmocka_unit_test(seals_find_every_flipped_bit),
        cmocka_unit_test(seals_find_messages_out_of_place),
        cmocka_unit_test(test_message_bytes),
        cmocka_unit_test(test_decoded_values),
        cmocka_unit_test(test_added_values),
        cmocka_unit_test(test_padding_is_masked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
