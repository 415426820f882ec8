// Quantized activations against the primitives of the simulator, bit by bit; sizes and checksums of
// messages; independence of random bits; errors of both codecs.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "sdp4bit/activations.h"
#include "sdp4bit/wire.h"
#include "test/mpi/simulator.h"

enum { ELEMENTS = 64 * 96, GROUP = 96, LOGICAL = 5 * ELEMENTS };
static const RoundingKey KEY = {1234, 7, PURPOSE_ACTIVATION | 12 << 8, 64};

typedef struct Trip {
    ActivationFormat format;
    MessageLayout layout;
    ActivationScratch scratch;
    Segment segment;
    float values[ELEMENTS], partials[ELEMENTS / 32];
    floatX x[ELEMENTS], back[ELEMENTS];
    uint8_t message[4 * ELEMENTS + 1024] __attribute__((aligned(16)));
} Trip;

// Hidden states: normal, with a few outlier channels per token.
static float hidden(int i) {
    Philox4 r = philox4x32_10(3, 5, (uint32_t)i, 0, 0, 0);
    double u = (r.v[0] + 0.5) * 0x1p-32, v = (r.v[1] + 0.5) * 0x1p-32;
    double x = sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
    return (float)(i % 96 == 17 ? 30 * x : x);
}

static Trip *trip_new(Codec codec, Rounding rounding) {
    Trip *t = xcalloc(1, sizeof *t, "a message");
    t->format = (ActivationFormat){codec, GROUP, rounding};
    t->layout = activations_message(&t->format, ELEMENTS, false);
    t->segment = activations_segment(ELEMENTS, LOGICAL);
    t->scratch = (ActivationScratch){t->values, t->partials, &t->segment};
    for (int i = 0; i < ELEMENTS; i++) t->x[i] = floatX_from_float(hidden(i));
    return t;
}

static void travel(Trip *t, RoundingKey key) {
    memset(t->message, 0xAB, sizeof t->message);
    activations_encode(&t->format, &t->layout, &t->scratch, key, t->x, 1, t->message, NULL);
    assert_int_equal(t->message[t->layout.bytes], 0xAB);
    memset(t->values, 0xCD, sizeof t->values);
    activations_decode(&t->format, &t->layout, &t->scratch, t->message, 1, t->back, NULL);
}

// Returns the squared error relative to the squared norm.
static double error_of(const Trip *t) {
    double error = 0, norm = 0;
    for (int i = 0; i < ELEMENTS; i++) {
        double x = floatX_to_float(t->x[i]), d = floatX_to_float(t->back[i]) - x;
        error += d * d;
        norm += x * x;
    }
    return error / norm;
}

static void match_the_simulator(void **state) {
    static const Codec codecs[] = {CODEC_INT4, CODEC_INT8};
    for (int i = 0; i < 4; i++) {
        Trip *t = trip_new(codecs[i % 2], i < 2 ? ROUND_NEAREST : ROUND_STOCHASTIC);
        float *x = xcalloc(ELEMENTS, sizeof *x, "simulated values");
        RoundingKey unused = {0};
        for (int j = 0; j < ELEMENTS; j++) x[j] = floatX_to_float(t->x[j]);
        simulator_transform(x, ELEMENTS, TRANSFORM_HADAMARD, unused, LOGICAL);
        simulator_send(x, ELEMENTS, t->format.codec, GROUP, t->format.rounding, KEY, LOGICAL);
        simulator_invert(x, ELEMENTS, TRANSFORM_HADAMARD, unused, LOGICAL);
        travel(t, KEY);
        for (int j = 0; j < ELEMENTS; j++) {
            floatX expected = floatX_from_float(x[j]);
            assert_memory_equal(&t->back[j], &expected, sizeof expected);
        }
        free(x);
        free(t);
    }
}

static void sizes(void **state) {
    ActivationFormat four = {CODEC_INT4, 64, ROUND_STOCHASTIC}, eight = {CODEC_INT8, 64, ROUND_STOCHASTIC};
    assert_int_equal(activations_message(&four, 4096, false).bytes, 2048 + 64 * 4);
    assert_int_equal(activations_message(&eight, 4096, false).bytes, 4096 + 64 * 4);
    assert_int_equal(activations_message(&four, 4096, true).bytes, 2048 + 64 * 4 + MESSAGE_ALIGN);
    assert_int_equal(activations_message(&four, 64, false).bytes, 32 + 16);  // a scale is padded
}

// Groups have a scale of their own, so an outlier costs the precision of its group only.
static void errors_are_small(void **state) {
    static const struct {
        Codec codec;
        Rounding rounding;
        double most;
    } bound[] = {{CODEC_INT8, ROUND_NEAREST, 1e-4},
                 {CODEC_INT8, ROUND_STOCHASTIC, 2e-4},
                 {CODEC_INT4, ROUND_NEAREST, 0.02},
                 {CODEC_INT4, ROUND_STOCHASTIC, 0.04}};
    for (size_t i = 0; i < sizeof bound / sizeof *bound; i++) {
        Trip *t = trip_new(bound[i].codec, bound[i].rounding);
        travel(t, KEY);
        assert_true(error_of(t) < bound[i].most && error_of(t) > 0.01 * bound[i].most);
        free(t);
    }
}

// Each part of the key and the logical offset select other random bits; equal keys repeat them.
static void keys(void **state) {
    static const RoundingKey others[] = {{1235, 7, PURPOSE_ACTIVATION | 12 << 8, 64},
                                         {1234, 8, PURPOSE_ACTIVATION | 12 << 8, 64},
                                         {1234, 7, PURPOSE_ACTIVATION | 13 << 8, 64},
                                         {1234, 7, PURPOSE_ACTIVATION_GRADIENT | 12 << 8, 64},
                                         {1234, 7, PURPOSE_ACTIVATION | 12 << 8, 65}};
    Trip *t = trip_new(CODEC_INT4, ROUND_STOCHASTIC), *other = trip_new(CODEC_INT4, ROUND_STOCHASTIC);
    travel(t, KEY);
    travel(other, KEY);
    assert_memory_equal(t->message, other->message, t->layout.bytes);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        travel(other, others[i]);
        assert_memory_not_equal(t->message, other->message, t->layout.bytes);
    }
    other->segment.logical += ELEMENTS;
    travel(other, KEY);
    assert_memory_not_equal(t->message, other->message, t->layout.bytes);
    free(t);
    free(other);
}

// A rank of a sequence-parallel group sends rows [24, 64) with the bits that one rank would use.
static void rows_of_a_rank(void **state) {
    enum { FIRST = 24 * 96, PART = ELEMENTS - FIRST };
    Trip *t = trip_new(CODEC_INT4, ROUND_STOCHASTIC), *part = trip_new(CODEC_INT4, ROUND_STOCHASTIC);
    travel(t, KEY);
    part->layout = activations_message(&part->format, PART, false);
    part->segment = activations_segment(PART, LOGICAL + FIRST);
    memcpy(part->x, t->x + FIRST, PART * sizeof(floatX));
    travel(part, KEY);
    assert_memory_equal(part->back, t->back + FIRST, PART * sizeof(floatX));
    free(t);
    free(part);
}

// Several messages at once are the messages of their parts; rounding to nearest ignores the key.
static void several_messages(void **state) {
    enum { COUNT = 4, PART = ELEMENTS / COUNT };
    Trip *t = trip_new(CODEC_INT8, ROUND_NEAREST), *part = trip_new(CODEC_INT8, ROUND_NEAREST);
    const RoundingKey none = {0};
    t->layout = part->layout = activations_message(&t->format, PART, false);
    activations_encode(&t->format, &t->layout, &t->scratch, none, t->x, COUNT, t->message, NULL);
    activations_decode(&t->format, &t->layout, &t->scratch, t->message, COUNT, t->back, NULL);
    for (int i = 0; i < COUNT; i++) {
        memcpy(part->x, t->x + i * PART, PART * sizeof(floatX));
        travel(part, KEY);
        assert_memory_equal(part->message, t->message + i * t->layout.bytes, t->layout.bytes);
        assert_memory_equal(part->back, t->back + i * PART, PART * sizeof(floatX));
    }
    free(t);
    free(part);
}

// A value that is not finite makes its group NaN, so that the loss becomes NaN and the step is
// skipped or ends the run.
static void not_finite(void **state) {
    Trip *t = trip_new(CODEC_INT8, ROUND_STOCHASTIC);
    t->x[3 * GROUP + 5] = floatX_from_float(INFINITY);
    travel(t, KEY);
    for (int i = 0; i < ELEMENTS; i++) {
        bool hit = i / GROUP == 3;
        assert_int_equal(isnan(floatX_to_float(t->back[i])), hit);
    }
    free(t);
}

// A checksum covers all bytes, and belongs to one message.
static void checksums(void **state) {
    Mesh mesh;
    Error err;
    uint64_t fault = 0, sums[WIRE_HOPS * 8];
    assert_true(mesh_build(&mesh, 1, 2, NULL, 2, 1, 2, &err));
    WireChecks checks = {.mesh = &mesh, .sealed = true, .sums = sums, .fault = &fault, .step = 3};
    Faults none = {0};
    checks.faults = &none;
    StageMessage which = {HOP_ACTIVATIONS, 0, 1, 2, 12};
    Trip *t = trip_new(CODEC_INT4, ROUND_STOCHASTIC);
    t->layout = activations_message(&t->format, ELEMENTS, true);
    travel(t, KEY);
    wire_seal_stage(&checks, &which, &t->layout, t->message, NULL);
    wire_check_stage(&checks, &which, &t->layout, t->message, NULL);
    assert_true(fault == 0);
    const StageMessage others[] = {{HOP_ACTIVATION_GRADIENTS, 0, 1, 2, 12},
                                   {HOP_ACTIVATIONS, 0, 1, 3, 12},
                                   {HOP_ACTIVATIONS, 0, 1, 2, 13},
                                   {HOP_ACTIVATIONS, 1, 0, 2, 12}};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        fault = 0;
        wire_check_stage(&checks, &others[i], &t->layout, t->message, NULL);
        assert_true(fault != 0);
    }
    for (int64_t at = 0; at < message_content(&t->layout); at += 97) {
        fault = 0;
        t->message[at] ^= 16;
        wire_check_stage(&checks, &which, &t->layout, t->message, NULL);
        assert_true(fault != 0);
        t->message[at] ^= 16;
    }
    assert_false(fault_error(fault, 1, &mesh, &err));
    assert_int_equal(err.code, EXIT_COMMUNICATION);
    assert_non_null(
        strstr(err.what, "message from rank 0 to rank 1, activations, micro-batch 2: it was corrupted"));
    free(t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(match_the_simulator), cmocka_unit_test(sizes),
        cmocka_unit_test(errors_are_small),    cmocka_unit_test(keys),
        cmocka_unit_test(rows_of_a_rank),      cmocka_unit_test(not_finite),
        cmocka_unit_test(checksums),           cmocka_unit_test(several_messages),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
