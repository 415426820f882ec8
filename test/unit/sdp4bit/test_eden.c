// EDEN and its rotation. First compares the kernels of CPU ranks bit by bit with a numpy model
// (dev/ref/eden_model.py): signs, rotated values, levels, codes, scales, decoded values. Then
// checks the properties that sdp4bit/README.md states for a group: the scale is unbiased, empty and
// non-finite groups are encoded as specified, and the random rotation makes the mean unbiased.
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "sdp4bit/kernels.h"
#include "test/golden/golden.h"

#define GOLDEN "test/golden/eden/eden.golden"
enum { MOST_GROUPS = 64, MOST = MOST_GROUPS * EDEN_GROUP };
static const Codec codecs[] = {CODEC_EDEN4, CODEC_EDEN3, CODEC_EDEN2};
enum { EDENS = sizeof codecs / sizeof *codecs };

// --- one message ---------------------------------------------------------------------------------

// Groups before and after encoding and decoding. Each group is a separate tensor.
typedef struct Trip {
    int groups;
    Codec codec;
    RoundingKey key;
    Segment segment[MOST_GROUPS];
    float x[MOST];
    MessageLayout message;
    uint8_t bytes[MOST * 4 + 1024] __attribute__((aligned(16)));
    float back[MOST], partials[MOST / 32];
} Trip;

static void start_trip(Trip *t, Codec codec, int groups, const float *x) {
    memset(t, 0, sizeof *t);
    assert_true(groups <= MOST_GROUPS);
    t->groups = groups;
    t->codec = codec;
    memcpy(t->x, x, (size_t)groups * EDEN_GROUP * sizeof *x);
    for (int g = 0; g < groups; g++) {
        Segment segment = {(int64_t)g * EDEN_GROUP, EDEN_GROUP, (int64_t)g * EDEN_GROUP, g};
        t->segment[g] = segment;
    }
    t->message = message_layout(codec, EDEN_GROUP, (int64_t)groups * EDEN_GROUP, 1, CODEC_BF16, 0);
}

static Bucket bucket_of(const Trip *t) {
    Bucket bucket = {0};
    bucket.matrix_elements = bucket.matrix_per_rank = (int64_t)t->groups * EDEN_GROUP;
    return bucket;
}

static void send(Trip *t) {
    QuantizePartitions q = {0};
    q.grads = t->x;
    q.bucket = bucket_of(t);
    q.table = (SegmentTable){t->segment, t->groups};
    q.hi = q.bucket.matrix_per_rank;
    q.scale = 1.0f;
    q.transform = TRANSFORM_ROTATION;
    q.rotation = t->key;
    q.codec = t->codec;
    q.group = EDEN_GROUP;
    q.tail_codec = CODEC_BF16;
    q.slots = 1;
    q.self = -1;
    q.send = t->bytes;
    q.message = t->message;
    kernel_quantize_partitions(NULL, &q);
}

static void receive(Trip *t) {
    SumFinal f = {0};
    f.received = t->bytes;
    f.sources = 1;
    f.in = t->message;
    f.codec = t->codec;
    f.group = EDEN_GROUP;
    f.tail_codec = CODEC_BF16;
    f.transform = TRANSFORM_ROTATION;
    f.rotation = t->key;
    f.bucket = bucket_of(t);
    f.table = (SegmentTable){t->segment, t->groups};
    f.hi = f.bucket.matrix_per_rank;
    f.own.matrix = t->back;
    f.matrix_partials = t->partials;
    kernel_sum_final(NULL, &f);
}

static const float *scales_of(const Trip *t) {
    return (const float *)(const void *)(t->bytes + t->message.scales);
}

// --- against the model ---------------------------------------------------------------------------

static const float *floats_of(const Golden *g, const char *what, int bits, int64_t count) {
    char name[32];
    int64_t found;
    snprintf(name, sizeof name, bits ? "%s.%d" : "%s", what, bits);
    const float *x = golden_f32(g, name, &found);
    if (!x || found != count) fail_msg("%s: %lld floats", name, (long long)found);
    return x;
}

// Compares bitwise, except that all NaNs are equal.
static void same_floats(const char *what, const float *a, const float *b, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        bool nans = isnan(a[i]) && isnan(b[i]);
        if (!nans && f32_bits(a[i]) != f32_bits(b[i]))
            fail_msg("%s %lld: %a, the model has %a", what, (long long)i, (double)a[i], (double)b[i]);
    }
}

static void load(Trip *t, const Golden *g, Codec codec) {
    int64_t groups, keys;
    const int32_t *logical = golden_i32(g, "logical", &groups), *key = golden_i32(g, "key", &keys);
    assert_true(logical && key && keys == 4);
    start_trip(t, codec, (int)groups, floats_of(g, "input", 0, groups * EDEN_GROUP));
    t->key = (RoundingKey){(uint32_t)key[0], (uint32_t)key[1], (uint32_t)key[2], (uint32_t)key[3]};
    assert_int_equal(key[2], PURPOSE_ROTATION);
    for (int i = 0; i < groups; i++) t->segment[i].logical = logical[i];
}

static double length_of(const Trip *t, int group) {
    double squares = 0;
    for (int i = 0; i < EDEN_GROUP; i++) squares += pow((double)t->x[group * EDEN_GROUP + i], 2);
    return sqrt(squares);
}

static void rotation_matches_the_numpy_model(void **state) {
    Golden g;
    Trip *t = (Trip *)malloc(sizeof *t);
    assert_true(t && golden_open(&g, GOLDEN));
    load(t, &g, CODEC_EDEN4);
    // The fp32 codec sends the rotated values unchanged.
    t->codec = CODEC_FP32;
    t->message = message_layout(CODEC_FP32, EDEN_GROUP, (int64_t)t->groups * EDEN_GROUP, 1, CODEC_BF16, 0);
    send(t);
    int64_t n = (int64_t)t->groups * EDEN_GROUP;
    same_floats("rotated", (const float *)(const void *)t->bytes, floats_of(&g, "rotated", 0, n), n);
    receive(t);
    // The inverse rotation restores the input except for fp32 rounding.
    for (int64_t i = 0; i < n; i++) {
        if (!isfinite(((const float *)(const void *)t->bytes)[i])) continue;
        double error = fabs((double)t->back[i] - t->x[i]), length = length_of(t, (int)(i / EDEN_GROUP));
        // The inverse multiplies by 256 before it divides, which overflows for huge values.
        assert_true(error <= 1e-6 * length + 1e-44 || length > 1e36);
    }
    golden_close(&g);
    free(t);
}

static void groups_match_the_numpy_model(void **state) {
    Golden g;
    Trip *t = (Trip *)malloc(sizeof *t);
    assert_true(t && golden_open(&g, GOLDEN));
    for (int c = 0; c < EDENS; c++) {
        CodecInfo info = codec_info(codecs[c]);
        const float *level = floats_of(&g, "levels", info.bits, info.levels);
        for (int k = 0; k < info.levels; k++) assert_true(eden_level(info.bits, k) == level[k]);
        load(t, &g, codecs[c]);
        send(t);
        char name[32];
        int64_t words, n = (int64_t)t->groups * EDEN_GROUP;
        snprintf(name, sizeof name, "codes.%d", info.bits);
        const int32_t *codes = golden_i32(&g, name, &words);
        assert_int_equal(4 * words, n * info.bits / 8);
        assert_memory_equal(t->bytes, codes, (size_t)(4 * words));
        same_floats("scale", scales_of(t), floats_of(&g, "scales", info.bits, t->groups), t->groups);
        receive(t);
        same_floats("back", t->back, floats_of(&g, "back", info.bits, n), n);
    }
    golden_close(&g);
    free(t);
}

// --- properties of a group -----------------------------------------------------------------

static double uniform(uint32_t bits) { return (bits + 0.5) * 0x1p-32; }
static float normal(uint32_t stream, uint32_t i) {
    Philox4 r = philox4x32_10(stream, 5, i, 0, 0, 0);
    return (float)(sqrt(-2 * log(uniform(r.v[0]))) * cos(6.283185307179586 * uniform(r.v[1])));
}
static void fill(float *x, int64_t n, uint32_t stream) {
    for (int64_t i = 0; i < n; i++) x[i] = normal(stream, (uint32_t)i);
}

// <x, decoded> = |x|^2 for every group, so the error is orthogonal to x. The energy of the error
// equals the golden file's.
static void error_is_orthogonal_to_the_group(void **state) {
    Trip *t = (Trip *)malloc(sizeof *t);
    float *x = (float *)malloc(MOST * sizeof *x);
    assert_true(t && x);
    fill(x, MOST, 1);
    for (int c = 0; c < EDENS; c++) {
        start_trip(t, codecs[c], MOST_GROUPS, x);
        t->key = (RoundingKey){7, 1, PURPOSE_ROTATION, 0};
        send(t);
        receive(t);
        for (int g = 0; g < MOST_GROUPS; g++) {
            double along = 0, length = 0;
            for (int i = g * EDEN_GROUP; i < (g + 1) * EDEN_GROUP; i++) {
                along += (double)x[i] * t->back[i];
                length += (double)x[i] * x[i];
            }
            assert_true(fabs(along / length - 1) < 1e-6);
        }
    }
    free(x);
    free(t);
}

static void check_not_finite(Codec codec, const float *x, bool nan, float expected_scale) {
    Trip *t = (Trip *)malloc(sizeof *t);
    assert_non_null(t);
    start_trip(t, codec, 1, x);
    memset(t->bytes, 0xEE, sizeof t->bytes);
    send(t);
    receive(t);
    for (int64_t i = 0; i < t->message.codes_stride; i++) assert_int_equal(t->bytes[i], 0);
    if (nan) assert_int_equal(f32_bits(scales_of(t)[0]), 0x7FC00000u);
    else assert_true(scales_of(t)[0] == expected_scale);
    for (int i = 0; i < EDEN_GROUP; i++) assert_true(nan ? isnan(t->back[i]) : t->back[i] == 0.0f);
    free(t);
}

static void empty_and_non_finite_groups(void **state) {
    for (int c = 0; c < EDENS; c++) {
        float x[EDEN_GROUP] = {0};
        check_not_finite(codecs[c], x, false, 0);
        x[3] = -0.0f;
        x[100] = 1e-42f;  // at least 16 times as large after the rotation, but still subnormal
        check_not_finite(codecs[c], x, false, 0);
        x[200] = INFINITY;
        check_not_finite(codecs[c], x, true, 0);
        x[200] = NAN;
        check_not_finite(codecs[c], x, true, 0);
        x[200] = FLT_MAX;  // all magnitudes are equal, so the scale is FLT_MAX / level
        if (eden_level(codec_info(codecs[c]).bits, codec_info(codecs[c]).levels - 1) > 1) x[201] = FLT_MAX;
        check_not_finite(codecs[c], x, true, 0);
    }
}

// Groups with magnitudes from the smallest to the largest normal number have the same relative
// error as with magnitude 1.
static void groups_of_every_size(void **state) {
    Trip *t = (Trip *)malloc(sizeof *t);
    assert_non_null(t);
    float gauss[EDEN_GROUP], x[EDEN_GROUP];
    fill(gauss, EDEN_GROUP, 3);
    for (int c = 0; c < EDENS; c++) {
        double first = 0;
        for (int exponent = -116; exponent <= 118; exponent += 2) {
            for (int i = 0; i < EDEN_GROUP; i++) x[i] = ldexpf(gauss[i], exponent);
            start_trip(t, codecs[c], 1, x);
            send(t);
            receive(t);
            double error = 0, power = 0;
            for (int i = 0; i < EDEN_GROUP; i++) {
                error += pow(ldexp((double)t->back[i] - x[i], -exponent), 2);
                power += pow(ldexp((double)x[i], -exponent), 2);
            }
            if (exponent == -116) first = error / power;
            assert_true(fabs(error / power - first) < 1e-3 * first);
        }
    }
    free(t);
}

// Returns the largest mean error of any element over many rotations of x, in standard deviations of
// the mean or, if of_one_trip, in RMS errors of one rotation.
static double worst_mean(Codec codec, const float *x, int groups, bool of_one_trip) {
    enum { TRIPS = 4000 };
    static double sum[MOST], squares[MOST];
    Trip *t = (Trip *)malloc(sizeof *t);
    assert_non_null(t);
    memset(sum, 0, sizeof sum);
    memset(squares, 0, sizeof squares);
    start_trip(t, codec, groups, x);
    for (uint32_t trip = 0; trip < TRIPS; trip++) {
        t->key = (RoundingKey){99, trip, PURPOSE_ROTATION, 0};
        send(t);
        receive(t);
        for (int i = 0; i < groups * EDEN_GROUP; i++) {
            double error = (double)t->back[i] - x[i];
            sum[i] += error;
            squares[i] += error * error;
        }
    }
    double worst = 0;
    for (int i = 0; i < groups * EDEN_GROUP; i++) {
        double one_trip = sqrt(squares[i] / TRIPS), sigma = one_trip / sqrt(TRIPS);
        worst = fmax(worst, fabs(sum[i] / TRIPS) / (of_one_trip ? one_trip : sigma));
    }
    free(t);
    return worst;
}

static void mean_over_rotations_is_unbiased(void **state) {
    enum { GROUPS = 4 };
    float x[GROUPS * EDEN_GROUP];
    fill(x, GROUPS * EDEN_GROUP, 4);
    for (int c = 0; c < EDENS; c++) {
        double worst = worst_mean(codecs[c], x, GROUPS, false);
        print_message("    %s: the mean is off by at most %.2f sigma\n", codec_info(codecs[c]).name, worst);
        assert_true(worst < 4);
    }
    // The Hadamard transform with random signs is not a perfect rotation. If five elements have
    // almost all of a group's length, the mean has a bias, which is a fraction of the error of one
    // rotation.
    static const double most[EDENS] = {0.25, 0.4, 1};
    for (int i = 0; i < GROUPS * EDEN_GROUP; i += 50) x[i] *= 20;
    for (int c = 0; c < EDENS; c++) {
        double worst = worst_mean(codecs[c], x, GROUPS, true);
        print_message("    %s, outliers: %.2f of one trip's error\n", codec_info(codecs[c]).name, worst);
        assert_true(worst < most[c]);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rotation_matches_the_numpy_model),
        cmocka_unit_test(groups_match_the_numpy_model),
        cmocka_unit_test(error_is_orthogonal_to_the_group),
        cmocka_unit_test(empty_and_non_finite_groups),
        cmocka_unit_test(groups_of_every_size),
        cmocka_unit_test(mean_over_rotations_is_unbiased),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
