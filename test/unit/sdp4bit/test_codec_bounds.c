// The codes of a group's largest element without clamping, for every mantissa: the proof that GPU kernels may leave the clamp out. Every other element of
// the group is no larger in magnitude and both multiplications are monotonic, so its code lies between those of +m and -m. And two shortcuts of the GPU kernels:
// a code times its scale in one fused operation, and a code read from the bits of v + u.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "llmc/base/base.h"
#include "sdp4bit/codec.h"

// The codes that code_stochastic and code_nearest would give before clamp_code.
static int unclamped_stochastic(float v, int levels, uint32_t random16) {
    float offset = levels < 64 ? 192.0f : 384.0f, u = levels < 64 ? (float)random16 / 65536.0f : (float)(random16 & 0x7FFF) / 32768.0f;
    return (int)floorf(v + (offset + u)) - (int)offset;
}

static int64_t count_outside(uint32_t exponent, int levels) {
    int64_t outside = 0;
    for (uint32_t mantissa = 0; mantissa < 1u << 23; mantissa++) {
        float m = f32_from_bits(exponent << 23 | mantissa);
        GroupScale g = group_scale(f32_bits(m), levels);
        float v = group_scaled(m, g);
        outside += unclamped_stochastic(v, levels, 65535) > levels;
        outside += unclamped_stochastic(-v, levels, 0) < -levels;
        outside += (int)rintf(v) != levels;
        outside += v < (float)levels - 0.001f;
    }
    return outside;
}

// Exponents as stored: the smallest normal and the largest lifted, the smallest unlifted, 1, and the largest.
static const uint32_t EXPONENTS[] = {1, 26, 27, 127, 254};

static void int4_never_needs_the_clamp(void **state) {
    for (size_t i = 0; i < sizeof EXPONENTS / sizeof *EXPONENTS; i++) assert_int_equal(count_outside(EXPONENTS[i], 7), 0);
}
static void int8_never_needs_the_clamp(void **state) {
    for (size_t i = 0; i < sizeof EXPONENTS / sizeof *EXPONENTS; i++) assert_int_equal(count_outside(EXPONENTS[i], 127), 0);
}
// The count must be able to count: codes of 16 bits do need the clamp for some mantissas.
static void wider_codes_would_need_it(void **state) {
    assert_true(count_outside(127, 32767) > 0);
}

// kernels_cuda.cuh's scale_biased: u = code + bias at bit 16 of a float without exponent, times scale * 2^133, minus bias * scale, against the product itself.
static int64_t count_unequal_products(uint32_t exponent, int bias) {
    int64_t unequal = 0;
    for (uint32_t mantissa = exponent ? 0 : 1; mantissa < 1u << 23; mantissa += 5) {
        float scale = f32_from_bits(exponent << 23 | mantissa);
        int code = (int)(mantissa * 2654435761u >> 24) % (2 * bias) - bias;
        float fused = fmaf(f32_from_bits((uint32_t)(code + bias) << 16), scale * 0x1p127f * 64.0f, scale * (float)-bias);
        unequal += f32_bits(fused) != f32_bits(code_value(code, scale));
    }
    return unequal;
}
// Denormal scales, the smallest normal ones, ordinary ones, and the largest below 2^-5; from there on the lifted scale is infinite.
static void a_fused_product_is_the_product(void **state) {
    static const uint32_t exponents[] = {0, 1, 100, 121};
    for (size_t i = 0; i < sizeof exponents / sizeof *exponents; i++) {
        assert_int_equal(count_unequal_products(exponents[i], 8), 0);
        assert_int_equal(count_unequal_products(exponents[i], 128), 0);
    }
    assert_true(count_unequal_products(122, 128) > 0);
}

// Byte 2 of the float 192 + v + u is 64 + the code, for v around every code and all random bits.
static void a_stochastic_int4_code_is_a_byte_of_the_sum(void **state) {
    for (int i = -7 * 64; i <= 7 * 64; i++) {
        for (uint32_t random16 = 0; random16 < 65536; random16++) {
            float v = (float)i / 64.0f + (i % 2 ? 0x1p-18f : 0.0f);
            uint32_t sum = f32_bits(f32_add(v, f32_from_bits(STOCHASTIC_FINE | random16)));
            if ((int)(sum >> 16 & 0xFF) - 64 != code_stochastic(v, 7, random16)) fail_msg("v = %g, random bits %u", (double)v, random16);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(int4_never_needs_the_clamp),
        cmocka_unit_test(int8_never_needs_the_clamp),
        cmocka_unit_test(wider_codes_would_need_it),
        cmocka_unit_test(a_fused_product_is_the_product),
        cmocka_unit_test(a_stochastic_int4_code_is_a_byte_of_the_sum),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
