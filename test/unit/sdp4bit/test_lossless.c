// The entropy coder of lossless weights: pairs of old and new weights, tables, groups of every
// length, bits per weight, the golden message, and malformed messages.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#include <cmocka.h>

#include "llmc/base/base.h"
#include "sdp4bit/kernels.h"
#include "test/random.h"

static const uint16_t FREQUENCIES[][LOSSLESS_SYMBOLS] = LOSSLESS_FREQUENCIES;
static const uint16_t COSTS[][LOSSLESS_SYMBOLS] = LOSSLESS_COSTS;

// --- one weight ---------------------------------------------------------------------------------

// Checks that an old weight and the coded value of a new weight give the new weight.
static void check_pair(uint32_t old, uint32_t fresh, int scale) {
    int context = lossless_context(old, scale);
    uint32_t value = lossless_value(old, fresh, context, scale);
    LosslessCode code = lossless_code(value, context);
    if (value > 0xFFFF || code.symbol > LOSSLESS_ESCAPE || lossless_value_of(code) != value ||
        code.low >> code.low_bits || code.raw >> code.raw_bits || code.low_bits > 6 ||
        code.raw_bits != lossless_raw_bits(code.symbol, context) ||
        lossless_weight(old, value, context, scale) != fresh)
        fail_msg("old %04x, new %04x, scale %d", old, fresh, scale);
}

static void test_every_pair(void **state) {
    static const uint32_t some[] = {0x0000, 0x8000, 0x0001, 0x807F, 0x0080, 0x3C8F, 0x3C90,
                                    0xBC8F, 0x3F80, 0x7F7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF};
    for (uint32_t i = 0; i < 0x10000; i++) {
        for (size_t k = 0; k < sizeof some / sizeof *some; k++) {
            for (int scale = 0; scale < 256; scale += k % 2 ? 17 : 51) {
                check_pair(i, some[k], scale);
                check_pair(some[k], i, scale);
            }
        }
    }
}

static void test_likely_values_are_small(void **state) {
    int context = lossless_context(0x3C90, 120);
    assert_int_equal(lossless_value(0x3C90, 0x3C90, context, 120), 0);
    assert_int_equal(lossless_value(0x3C90, 0x3C8F, context, 120), 1);
    assert_int_equal(lossless_value(0x3C90, 0x3C91, context, 120), 2);
    assert_int_equal(lossless_value(0xBC90, 0xBC91, context, 120), 1);  // a larger magnitude
    assert_int_equal(lossless_value(0x0000, 0x8000, LOSSLESS_ZERO, 0), 1);
    // The context depends on the old exponent (0x79 = 121) and the scale.
    assert_int_equal(lossless_context(0x3C90, 121), 6);
    assert_int_equal(lossless_context(0x3C90, 121 - 7), 0);
    assert_int_equal(lossless_context(0x3C90, 121 + 7), 13);
    assert_int_equal(lossless_context(0x3C90, 121 + 8), LOSSLESS_FRESH);
    assert_int_equal(lossless_context(0x8000, 121), LOSSLESS_ZERO);
}

static void test_tables(void **state) {
    for (int c = 0; c < LOSSLESS_CONTEXTS; c++) {
        int sum = 0, shift = lossless_shift(c);
        assert_in_range(shift, 0, 16 - LOSSLESS_PRECISION);  // the limit of rANS with 16-bit words
        for (int q = 0; q < LOSSLESS_SYMBOLS; q++) {
            double bits = LOSSLESS_PRECISION - log2(FREQUENCIES[c][q]);
            assert_in_range(FREQUENCIES[c][q], 1, (1 << LOSSLESS_PRECISION) - 1);
            sum += FREQUENCIES[c][q];
            bits += shift + lossless_raw_bits((uint32_t)q, c);
            assert_int_equal(COSTS[c][q], lround(256 * bits));
        }
        assert_int_equal(sum, 1 << LOSSLESS_PRECISION);
    }
}

// --- messages -----------------------------------------------------------------------------------

// A sender's shard and a receiver's copy.
typedef struct Shard {
    LosslessLayout layout;
    uint16_t *old, *fresh, *tail, *replica, *replica_tail;
    uint8_t *coded, *message;
    uint32_t bytes;
    StepStatus control;
    uint64_t fault;
} Shard;

static uint16_t *words(int64_t n) { return (uint16_t *)xcalloc((size_t)n + 1, sizeof(uint16_t), "weights"); }

static Shard shard_of(int64_t elements, int64_t tail) {
    Shard s = {0};
    s.layout = lossless_layout(elements, tail);
    s.old = words(elements);
    s.fresh = words(elements);
    s.tail = words(tail);
    s.replica = words(elements + tail);
    s.replica_tail = s.replica + elements;
    s.coded = (uint8_t *)xcalloc(1, (size_t)s.layout.most, "a message");
    s.message = (uint8_t *)xcalloc(1, (size_t)s.layout.most, "a message");
    s.control.applied = 1;
    return s;
}

static void shard_free(Shard *s) {
    free(s->old);
    free(s->fresh);
    free(s->tail);
    free(s->replica);
    free(s->coded);
    free(s->message);
}

static void encode(Shard *s) {
    CodeWeights c = {&s->control,        s->layout, (uint8_t *)s->old, (uint8_t *)s->fresh,
                     (uint8_t *)s->tail, s->coded,  &s->bytes};
    kernel_code_weights(NULL, &c);
    kernel_pack_weights(NULL, &s->layout, s->coded, s->message);
    memcpy(s->replica, s->old, (size_t)s->layout.elements * sizeof *s->old);
}

// Decodes `bytes` bytes of the message. Returns true if it is well-formed.
static bool decode(Shard *s, int64_t bytes) {
    DecodeWeights d = {&s->control,           s->layout, s->message, s->layout.most, bytes, 1, 1,
                       (uint8_t *)s->replica, &s->fault, 77};
    s->fault = 0;
    kernel_decode_weights(NULL, &d);
    return s->fault == 0;
}

static void comes_back(Shard *s) {
    encode(s);
    assert_true(s->bytes <= s->layout.most && s->bytes % 16 == 0);
    if (!decode(s, s->bytes)) fail_msg("%lld weights: refused", (long long)s->layout.elements);
    assert_memory_equal(s->replica, s->fresh, (size_t)s->layout.elements * sizeof *s->fresh);
    if (s->layout.tail_elements)
        assert_memory_equal(s->replica_tail, s->tail, (size_t)s->layout.tail_elements * sizeof *s->tail);
}

// Sets random weights and changes with these standard deviations.
static void train(Shard *s, Random *r, double deviation, double change) {
    for (int64_t i = 0; i < s->layout.elements; i++) {
        double weight = deviation * random_normal(r);
        s->old[i] = bf16_from_float((float)weight);
        s->fresh[i] = bf16_from_float((float)(weight + change * random_normal(r)));
    }
    for (int64_t i = 0; i < s->layout.tail_elements; i++) s->tail[i] = (uint16_t)random_u64(r);
}

static void test_lengths(void **state) {
    static const int64_t lengths[] = {0, 32, 64, 96, 128, 160, 4096, 8160, 8192, 8224, 16384, 16416, 50016};
    Random random = {11};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        for (int tail = 0; tail <= 40; tail += 8) {
            Shard s = shard_of(lengths[i], tail);
            train(&s, &random, 0.02, 3e-4);
            comes_back(&s);
            shard_free(&s);
        }
    }
}

// Entropy of the changes in bits per weight, given the old exponents. Changes beyond 2^12 ulp count
// as one symbol.
enum { MOST_CHANGE = 1 << 12 };
static double entropy(const Shard *s) {
    static uint32_t count[256][2 * MOST_CHANGE + 1];
    double bits = 0;
    memset(count, 0, sizeof count);
    for (int64_t i = 0; i < s->layout.elements; i++) {
        int change = (int)lossless_ordered(s->fresh[i]) - (int)lossless_ordered(s->old[i]);
        if (abs(change) > MOST_CHANGE) change = MOST_CHANGE;
        count[s->old[i] >> 7 & 0xFF][change + MOST_CHANGE]++;
    }
    for (int e = 0; e < 256; e++) {
        double sum = 0;
        for (int k = 0; k <= 2 * MOST_CHANGE; k++) sum += count[e][k];
        for (int k = 0; k <= 2 * MOST_CHANGE; k++) {
            if (count[e][k]) bits -= count[e][k] * log2(count[e][k] / sum);
        }
    }
    return bits / (double)s->layout.elements;
}

// A message may exceed the entropy by the final states of the lanes (0.125 bits per weight), group
// entries, and tables that do not match the tails of the distribution.
static void test_bits(void **state) {
    static const double change[] = {3e-3, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5, 3e-6, 3e-7, 0};
    for (size_t i = 0; i < sizeof change / sizeof *change; i++) {
        Random random = {12};
        Shard s = shard_of(64 * LOSSLESS_GROUP, 0);
        train(&s, &random, 0.02, change[i]);
        comes_back(&s);
        double bits = 8.0 * s.bytes / (double)s.layout.elements, least = entropy(&s);
        print_message("changes of %g: %.3f bits per weight, entropy %.3f\n", change[i], bits, least);
        assert_true(bits <= least * 1.1 + 0.16);
        shard_free(&s);
    }
}

// A group that cannot be compressed is sent raw between coded groups.
static void test_raw_groups(void **state) {
    Random random = {13};
    Shard s = shard_of(3 * LOSSLESS_GROUP, 8);
    train(&s, &random, 0.02, 3e-5);
    for (int i = LOSSLESS_GROUP; i < 2 * LOSSLESS_GROUP; i++) s.fresh[i] = (uint16_t)random_u64(&random);
    comes_back(&s);
    LosslessEntry *entry = (LosslessEntry *)(void *)(s.message + s.layout.table);
    assert_int_equal(entry[1].words, LOSSLESS_GROUP);
    assert_true(entry[0].words < LOSSLESS_GROUP / 4 && entry[2].words < LOSSLESS_GROUP / 4);
    for (int64_t i = 0; i < s.layout.elements; i++) s.fresh[i] = (uint16_t)random_u64(&random);
    comes_back(&s);
    assert_int_equal(s.bytes, s.layout.most);
    shard_free(&s);
}

// Sets `many` weights to random values, except those that determine the scale.
static void scatter(Shard *s, Random *r, int64_t many) {
    for (int64_t i = 0; i < s->layout.elements && many > 0; i++) {
        if (i % lossless_run(1) < LOSSLESS_RUN) continue;
        s->fresh[i] = (uint16_t)random_u64(r);
        many--;
    }
}

// Groups whose coded size is near the raw size can be decoded, whether they are sent coded or raw.
static void test_raw_limit(void **state) {
    static const int lengths[] = {1024, 4128, LOSSLESS_GROUP};
    for (int i = 0; i < 3; i++) {
        int n = lengths[i], full = 0, raw = 0;
        for (int many = n / 2; many < n * 2 / 3; many += 2) {
            Random random = {20};
            Shard s = shard_of(n, 0);
            train(&s, &random, 0.02, 1e-4);
            scatter(&s, &random, many);
            comes_back(&s);
            int words = ((LosslessEntry *)(void *)(s.message + s.layout.table))->words;
            raw += words == n;
            full += words < n && words > n - 8;  // nearly as many as fit
            shard_free(&s);
        }
        print_message("groups of %d weights: %d sent raw, %d nearly full\n", n, raw, full);
        assert_true(raw > 0 && full > 0);
    }
}

// Weights before and after the step that do not occur in training: zeros of both signs, subnormals,
// infinities, NaN.
static void test_unusual_weights(void **state) {
    static const uint16_t strange[] = {0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x8080,
                                       0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0xFFFF};
    enum { KINDS = sizeof strange / sizeof *strange };
    Random random = {21};
    Shard s = shard_of(2 * LOSSLESS_GROUP + 160, 8);
    for (int round = 0; round <= KINDS; round++) {
        train(&s, &random, 0.02, 1e-4);
        for (int64_t i = 0; i < s.layout.elements; i++) {
            uint64_t r = random_u64(&random);
            uint16_t one = strange[(r >> 8) % KINDS], other = strange[(r >> 16) % KINDS];
            if (round < KINDS) {  // equal weights, of which few change
                s.old[i] = strange[round];
                s.fresh[i] = r % 1000 ? strange[round] : other;
            } else {
                if (r % 4 == 0) s.old[i] = one;
                if (r >> 2 & 1) s.fresh[i] = other;
            }
        }
        comes_back(&s);
    }
    shard_free(&s);
}

static void test_pads_are_nearly_free(void **state) {
    Shard s = shard_of(16 * LOSSLESS_GROUP, 0);
    comes_back(&s);
    assert_true(8.0 * s.bytes / (double)s.layout.elements < 0.14);
    shard_free(&s);
}

static void test_skipped_step(void **state) {
    Random random = {14};
    Shard s = shard_of(LOSSLESS_GROUP, 8);
    train(&s, &random, 0.02, 3e-4);
    s.control.applied = 0;
    encode(&s);
    assert_int_equal(s.bytes, sizeof(LosslessHeader));
    assert_true(decode(&s, s.bytes));
    assert_memory_equal(s.replica, s.old, (size_t)s.layout.elements * sizeof *s.old);
    // Applying the payload of a skipped step is detected.
    s.control.applied = 1;
    assert_false(decode(&s, s.bytes));
    assert_int_equal(s.fault, 77);
    shard_free(&s);
}

// The hash detects a change of the wire format.
static void test_message_is_golden(void **state) {
    Random random = {15};
    Shard s = shard_of(LOSSLESS_GROUP + 96, 8);
    train(&s, &random, 0.02, 1e-4);
    comes_back(&s);
    uint64_t sum = 0;
    for (uint32_t i = 0; i < s.bytes; i++) sum += replica_mix(i, s.message[i]);
    if (s.bytes != 3360 || sum != 0x9d9d549c5cea1eaa)
        fail_msg("%u bytes, %016llx", s.bytes, (unsigned long long)sum);
    shard_free(&s);
}

// --- malformed messages -------------------------------------------------------------------------

// A flipped bit never causes an access to other memory, and it is usually detected. A flip of the
// lowest bit of a change is only detected by a checksum (--verify-wire).
static void test_flipped_bits(void **state) {
    Random random = {16};
    Shard s = shard_of(LOSSLESS_GROUP + 4096, 8);
    train(&s, &random, 0.02, 1e-4);
    comes_back(&s);
    size_t bytes = (size_t)s.layout.elements * sizeof *s.fresh;
    int seen = 0, flipped = 0;
    for (int64_t bit = 0; bit < 8 * (int64_t)s.bytes; bit += 1 + (int64_t)(random_u64(&random) % 61)) {
        if (bit / 8 >= s.layout.tail && bit / 8 < s.layout.table) continue;  // the tail is sent as is
        s.message[bit / 8] ^= (uint8_t)(1 << bit % 8);
        memcpy(s.replica, s.old, bytes);
        seen += !decode(&s, s.bytes);
        flipped++;
        s.message[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    if (flipped < 500 || seen < flipped * 3 / 4)
        fail_msg("%d bits were flipped, %d were detected", flipped, seen);
    shard_free(&s);
}

// A receiver whose old weights differ from the sender's detects this if the contexts differ.
static void test_differing_replica(void **state) {
    Random random = {17};
    Shard s = shard_of(LOSSLESS_GROUP, 8);
    train(&s, &random, 0.02, 1e-4);
    comes_back(&s);
    memcpy(s.replica, s.old, (size_t)s.layout.elements * sizeof *s.old);
    s.replica[1000] ^= 1 << 9;  // the exponent
    assert_false(decode(&s, s.bytes));
    shard_free(&s);
}

// A group with an invalid entry is left unchanged, and the others are decoded.
static void test_bad_entries(void **state) {
    static const LosslessEntry bad[] = {{1u << 20, 100, 120, 0}, {0xFFFFFFF8u, 100, 120, 0},
                                        {104, 100, 120, 1},      {101, 100, 120, 0},
                                        {96, 100, 120, 0},       {104, 63, 120, 0},
                                        {8200, 8193, 120, 0},    {0, 0, 120, 0}};
    Random random = {19};
    Shard s = shard_of(2 * LOSSLESS_GROUP, 8);
    train(&s, &random, 0.02, 1e-4);
    comes_back(&s);
    LosslessEntry *entry = (LosslessEntry *)(void *)(s.message + s.layout.table), first = entry[0];
    size_t half = LOSSLESS_GROUP * sizeof *s.old;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        entry[0] = bad[i];
        memcpy(s.replica, s.old, 2 * half);
        if (decode(&s, s.bytes)) fail_msg("entry %zu is accepted", i);
        assert_memory_equal(s.replica, s.old, half);
        assert_memory_equal(s.replica + LOSSLESS_GROUP, s.fresh + LOSSLESS_GROUP, half);
    }
    entry[0] = first;
    memcpy(s.replica, s.old, 2 * half);
    assert_true(decode(&s, s.bytes));
    shard_free(&s);
}

// Messages are truncated at any position. Memory after them is poisoned.
static void test_truncated_messages(void **state) {
    Random random = {18};
    Shard s = shard_of(2 * LOSSLESS_GROUP, 8);
    train(&s, &random, 0.02, 1e-4);
    comes_back(&s);
    for (int64_t bytes = 0; bytes < s.bytes; bytes += 16) {
        memcpy(s.replica, s.old, 2 * LOSSLESS_GROUP * sizeof *s.old);
        assert_false(decode(&s, bytes));
        assert_memory_equal(s.replica, s.old, 2 * LOSSLESS_GROUP * sizeof *s.old);
    }
    shard_free(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_pair),
        cmocka_unit_test(test_likely_values_are_small),
        cmocka_unit_test(test_tables),
        cmocka_unit_test(test_lengths),
        cmocka_unit_test(test_bits),
        cmocka_unit_test(test_raw_groups),
        cmocka_unit_test(test_raw_limit),
        cmocka_unit_test(test_unusual_weights),
        cmocka_unit_test(test_pads_are_nearly_free),
        cmocka_unit_test(test_skipped_step),
        cmocka_unit_test(test_message_is_golden),
        cmocka_unit_test(test_flipped_bits),
        cmocka_unit_test(test_differing_replica),
        cmocka_unit_test(test_bad_entries),
        cmocka_unit_test(test_truncated_messages),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
