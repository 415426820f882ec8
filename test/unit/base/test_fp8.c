// FP8 numbers: every code, every bf16 number and neighbors of all ties against a search over the
// decoded values, bf16 numbers also against other libraries, and the scales.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "llmc/base/fp8.h"
#include "test/golden/fp8/codes.h"
#include "test/random.h"

// --- an independent reference --------------------------------------------------------------------

// Returns the value of a code by the definition of the formats.
static double value_of(int code, Fp8Type type) {
    int mantissa_bits = type == FP8_E4M3 ? 3 : 2, bias = type == FP8_E4M3 ? 7 : 15;
    int mantissa = code & ((1 << mantissa_bits) - 1), exponent = (code & 0x7F) >> mantissa_bits;
    double sign = code & 0x80 ? -1.0 : 1.0;
    if (type == FP8_E4M3 && (code & 0x7F) == 0x7F) return NAN;
    if (type == FP8_E5M2 && exponent == 31) return mantissa == 0 ? sign * INFINITY : NAN;
    double fraction = ldexp(mantissa, -mantissa_bits) + (exponent > 0);
    return sign * ldexp(fraction, (exponent > 0 ? exponent : 1) - bias);
}

static int largest_code(Fp8Type type) { return type == FP8_E4M3 ? 0x7E : 0x7B; }

// Returns the nearest code, in a tie the even one, by a search over all finite values.
static int nearest_code(double x, Fp8Type type) {
    int sign = signbit(x) ? 0x80 : 0, best = 0;
    if (!isfinite(x)) return sign | 0x7F;
    double magnitude = fmin(fabs(x), value_of(largest_code(type), type));
    for (int code = 1; code <= largest_code(type); code++) {
        double distance = fabs(magnitude - value_of(code, type));
        double closest = fabs(magnitude - value_of(best, type));
        if (distance < closest || (distance == closest && code % 2 == 0)) best = code;
    }
    return sign | best;
}

static void check_encode(float x, Fp8Type type) {
    int expected = nearest_code((double)x, type), got = fp8_encode(x, type);
    if (got != expected) fail_msg("%a as type %d: code 0x%02x, expected 0x%02x", x, type, got, expected);
}

// --- codes ---------------------------------------------------------------------------------------

static void every_code_decodes_to_its_value(void **state) {
    for (int type = FP8_E4M3; type <= FP8_E5M2; type++) {
        for (int code = 0; code < 256; code++) {
            double expected = value_of(code, type);
            float got = fp8_decode((uint8_t)code, type);
            assert_int_equal(signbit(got) != 0, code >> 7);
            if (isnan(expected)) {
                assert_true(isnan(got));
            } else {
                assert_true((double)got == expected);
            }
            // NaN and infinity become the last NaN.
            int again = isfinite(expected) ? code : code | 0x7F;
            assert_int_equal(fp8_encode(got, type), again);
        }
        assert_true(fp8_decode((uint8_t)largest_code(type), type) == fp8_largest(type));
    }
    assert_true(fp8_largest(FP8_E4M3) == 448.0f && fp8_largest(FP8_E5M2) == 57344.0f);
}

static void every_bf16_number_is_rounded_to_nearest_even(void **state) {
    for (uint32_t bits = 0; bits < 65536; bits++) {
        float x = bf16_to_float((uint16_t)bits);
        check_encode(x, FP8_E4M3);
        check_encode(x, FP8_E5M2);
    }
}

// Requires that the codes of all bf16 numbers change where they change in the golden file.
static void check_golden(const uint16_t *first, int codes, Fp8Type type) {
    assert_int_equal(codes, largest_code(type) + 1);
    int code = 0;
    for (uint32_t bits = 0; bits < 0x7F80u; bits++) {
        if (code + 1 < codes && bits == first[code + 1]) code++;
        assert_int_equal(fp8_encode(bf16_to_float((uint16_t)bits), type), code);
        assert_int_equal(fp8_encode(bf16_to_float((uint16_t)(bits | 0x8000u)), type), code | 0x80);
    }
    assert_int_equal(code, codes - 1);
}
static void other_libraries_give_the_same_codes(void **state) {
    check_golden(first_bf16_of_e4m3, sizeof first_bf16_of_e4m3 / sizeof *first_bf16_of_e4m3, FP8_E4M3);
    check_golden(first_bf16_of_e5m2, sizeof first_bf16_of_e5m2 / sizeof *first_bf16_of_e5m2, FP8_E5M2);
}

// fp32 numbers at and next to every value and every tie, in the subnormal range too.
static void ties_go_to_the_even_code(void **state) {
    for (int type = FP8_E4M3; type <= FP8_E5M2; type++) {
        for (int code = 0; code < largest_code(type); code++) {
            double value = value_of(code, type), next = value_of(code + 1, type);
            float tie = (float)((value + next) / 2);
            assert_int_equal(fp8_encode(tie, type), code + code % 2);
            const float x[] = {tie,          nextafterf(tie, 0),          nextafterf(tie, INFINITY),
                               (float)value, nextafterf((float)value, 0), nextafterf((float)value, INFINITY)};
            for (int i = 0; i < 6; i++) {
                check_encode(x[i], type);
                check_encode(-x[i], type);
            }
        }
    }
}

// Only a number that is not finite itself becomes NaN.
static void products_that_overflow_are_saturated(void **state) {
    for (int type = FP8_E4M3; type <= FP8_E5M2; type++) {
        assert_int_equal(fp8_encode_scaled(-3e38f, FLT_MAX, type), 0x80 | largest_code(type));
        assert_int_equal(fp8_encode_scaled(3e38f, 2.0f, type), largest_code(type));
        assert_int_equal(fp8_encode_scaled(0.0f, FLT_MAX, type), 0);
        assert_int_equal(fp8_encode_scaled(-INFINITY, 2.0f, type), 0xFF);
        assert_int_equal(fp8_encode_scaled(NAN, 2.0f, type) & 0x7F, 0x7F);
        assert_int_equal(fp8_encode_scaled(3.0f, 0.5f, type), fp8_encode(1.5f, type));
    }
}

static void random_numbers_are_rounded_to_nearest_even(void **state) {
    Random rng = {5};
    for (int i = 0; i < 200000; i++) {
        uint64_t random = random_u64(&rng);
        // Every other number is in the range of the formats.
        float any = f32_from_bits((uint32_t)random),
              near = ldexpf((float)(random >> 32), (int)(random % 44) - 60);
        for (int type = FP8_E4M3; type <= FP8_E5M2; type++) {
            check_encode(any, type);
            check_encode(near, type);
        }
    }
}

static void special_numbers(void **state) {
    static const struct {
        float x;
        int e4m3, e5m2;
    } row[] = {
        {0.0f, 0x00, 0x00},       {-0.0f, 0x80, 0x80},        {448.0f, 0x7E, 0x5F},    {449.0f, 0x7E, 0x5F},
        {464.0f, 0x7E, 0x5F},     {480.0f, 0x7E, 0x60},       {-1e30f, 0xFE, 0xFB},    {57344.0f, 0x7E, 0x7B},
        {57345.0f, 0x7E, 0x7B},   {65536.0f, 0x7E, 0x7B},     {FLT_MAX, 0x7E, 0x7B},   {-FLT_MAX, 0xFE, 0xFB},
        {INFINITY, 0x7F, 0x7F},   {-INFINITY, 0xFF, 0xFF},    {0x1p-9f, 0x01, 0x18},   {0x1p-10f, 0x00, 0x14},
        {0x1.8p-9f, 0x02, 0x1A},  {0x1.000002p-10f, 1, 0x14}, {0x1p-16f, 0x00, 0x01},  {0x1p-17f, 0x00, 0x00},
        {0x1.8p-16f, 0x00, 0x02}, {-0x1p-149f, 0x80, 0x80},   {0x1.Ep-7f, 0x08, 0x24}, {1.0f, 0x38, 0x3C},
    };
    for (size_t i = 0; i < sizeof row / sizeof row[0]; i++) {
        assert_int_equal(fp8_encode(row[i].x, FP8_E4M3), row[i].e4m3);
        assert_int_equal(fp8_encode(row[i].x, FP8_E5M2), row[i].e5m2);
    }
    static const uint32_t nan[] = {0x7FC00000u, 0x7F800001u, 0x7FFFFFFFu};
    for (int i = 0; i < 3; i++) {
        for (int type = FP8_E4M3; type <= FP8_E5M2; type++) {
            assert_int_equal(fp8_encode(f32_from_bits(nan[i]), type), 0x7F);
            assert_int_equal(fp8_encode(f32_from_bits(nan[i] | 0x80000000u), type), 0xFF);
        }
    }
}

// --- scales --------------------------------------------------------------------------------------

static void scales_map_the_maximum_to_the_largest_value(void **state) {
    assert_true(fp8_scale(f32_bits(448.0f), FP8_E4M3, 0, 7.0f) == 1.0f);
    assert_true(fp8_scale(f32_bits(3.0f), FP8_E4M3, 0, 7.0f) == 448.0f / 3.0f);
    assert_true(fp8_scale(f32_bits(3.0f), FP8_E5M2, 0, 7.0f) == 57344.0f / 3.0f);
    assert_true(fp8_scale(f32_bits(7.0f), FP8_E4M3, 2, 7.0f) == 16.0f);
    assert_true(fp8_scale(f32_bits(FLT_MAX), FP8_E4M3, 0, 7.0f) == 448.0f / FLT_MAX);
    // The largest number whose scale is finite, and the one before it.
    float least = 448.0f / FLT_MAX;
    while (isinf(448.0f / least)) least = nextafterf(least, 1);
    float infinite = nextafterf(least, 0);
    assert_true(isinf(448.0f / infinite) && fp8_scale(f32_bits(least), FP8_E4M3, 0, 7.0f) == 448.0f / least);
    assert_true(fp8_scale(f32_bits(infinite), FP8_E4M3, 0, 7.0f) == FLT_MAX);
    assert_true(fp8_scale(f32_bits(0x1p-149f), FP8_E5M2, 0, 7.0f) == FLT_MAX);
    // With a large margin, the quotient would be 0 and its inverse infinite.
    assert_true(fp8_scale(f32_bits(1e20f), FP8_E4M3, 100, 7.0f) == FLT_MIN);
    static const uint32_t without[] = {0, 0x7F800000u, 0x7F800001u, 0x7FC00000u, 0x7FFFFFFFu};
    for (int i = 0; i < 5; i++) assert_true(fp8_scale(without[i], FP8_E4M3, 0, 7.0f) == 7.0f);
}

// The maximum is encoded as the largest value, or, after rounding of the scale, next to it.
static void scaled_maxima_do_not_saturate(void **state) {
    for (uint32_t bits = 1; bits < 0x7F80u; bits++) {
        float max = bf16_to_float((uint16_t)bits);
        for (int type = FP8_E4M3; type <= FP8_E5M2; type++) {
            float scale = fp8_scale(f32_bits(max), type, 0, 1), block = fp8_block_scale(f32_bits(max), type);
            if (scale < FLT_MAX) assert_int_equal(fp8_encode(max * scale, type), largest_code(type));
            assert_true(block <= scale && scale < 2.0 * (double)block);
            assert_true((f32_bits(block) & 0x7FFFFFu) == 0 && (double)(1.0f / block) == 1.0 / (double)block);
            assert_true(max * block <= fp8_largest(type));
        }
    }
    static const uint32_t without[] = {0, 0x7F800000u, 0x7FC00000u};
    for (int i = 0; i < 3; i++) assert_true(fp8_block_scale(without[i], FP8_E4M3) == 1.0f);
}

static void absolute_values_are_ordered(void **state) {
    const float x[] = {0.0f, -0x1p-149f, 0x1p-126f, -1.0f, 2.0f, -FLT_MAX, INFINITY, NAN};
    for (int i = 1; i < 8; i++) assert_true(fp8_absolute(x[i - 1]) < fp8_absolute(x[i]));
    assert_true(fp8_absolute(-0.0f) == 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_code_decodes_to_its_value),
        cmocka_unit_test(every_bf16_number_is_rounded_to_nearest_even),
        cmocka_unit_test(other_libraries_give_the_same_codes),
        cmocka_unit_test(ties_go_to_the_even_code),
        cmocka_unit_test(products_that_overflow_are_saturated),
        cmocka_unit_test(random_numbers_are_rounded_to_nearest_even),
        cmocka_unit_test(special_numbers),
        cmocka_unit_test(scales_map_the_maximum_to_the_largest_value),
        cmocka_unit_test(scaled_maxima_do_not_saturate),
        cmocka_unit_test(absolute_values_are_ordered),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
