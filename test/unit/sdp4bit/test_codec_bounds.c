// Assumptions of the GPU kernels about uniform codecs:
//   - Clamping is unnecessary. This test computes the codes of a group's largest magnitude m
//     without clamping, for every mantissa. Both multiplications are monotonic, so the codes of
//     other elements are between the codes of +m and -m.
//   - A code can be multiplied by its scale in one fused operation.
//   - A code can be read from the bits of v + u.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "llmc/base/base.h"
#include "sdp4bit/codec.h"

// Runs a check for every uniform codec.
static void for_each_codec(void (*check)(CodecInfo codec)) {
    for (int c = 0; c < CODECS; c++) {
        if (codec_grouped((Codec)c) && !codec_eden((Codec)c)) check(codec_info((Codec)c));
    }
}

// Compute code_stochastic and code_nearest without clamp_code.
static int unclamped_stochastic(float v, int levels, uint32_t random16) {
    bool fine = levels < 64;
    float offset = fine ? 192.0f : 384.0f;
    float u = fine ? (float)random16 / 65536.0f : (float)(random16 & 0x7FFF) / 32768.0f;
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

// Tests biased exponents: the smallest and the largest that are scaled up, the smallest that is
// not, the exponent of 1, and the largest.
static void check_clamp(CodecInfo codec) {
    static const uint32_t exponents[] = {1, 26, 27, 127, 254};
    for (size_t i = 0; i < sizeof exponents / sizeof *exponents; i++) {
        assert_int_equal(count_outside(exponents[i], codec.levels), 0);
    }
}
static void no_codec_needs_the_clamp(void **state) { for_each_codec(check_clamp); }
// Shows that the check works: 16-bit codes need the clamp for some mantissas.
static void wider_codes_would_need_it(void **state) { assert_true(count_outside(127, 32767) > 0); }

// Compares scale_biased of kernels_cuda_codec.cuh with the plain product. u is a float without
// exponent that has code + sign at bit 16. One fused operation computes
// u * (scale * 2^133) - sign * scale.
static int64_t count_unequal_products(uint32_t exponent, int sign) {
    int64_t unequal = 0;
    for (uint32_t mantissa = exponent ? 0 : 1; mantissa < 1u << 23; mantissa += 5) {
        float scale = f32_from_bits(exponent << 23 | mantissa);
        int code = (int)(mantissa * 2654435761u >> 24) % (2 * sign) - sign;
        float u = f32_from_bits((uint32_t)(code + sign) << 16);
        float fused = fmaf(u, scale * 0x1p127f * 64.0f, scale * (float)-sign);
        unequal += f32_bits(fused) != f32_bits(code_value(code, scale));
    }
    return unequal;
}
// Tests subnormal scales, the smallest normal ones, ordinary ones, and the largest below 2^-5,
// above which the scaled-up scale is infinite.
static void check_product(CodecInfo codec) {
    static const uint32_t exponents[] = {0, 1, 100, 121};
    int sign = 1 << (codec.bits - 1);
    for (size_t i = 0; i < sizeof exponents / sizeof *exponents; i++) {
        assert_int_equal(count_unequal_products(exponents[i], sign), 0);
    }
    assert_true(count_unequal_products(122, sign) > 0);
}
static void a_fused_product_is_the_product(void **state) { for_each_codec(check_product); }

// For codecs with up to 63 levels, byte 2 of the float 192 + v + u is 64 + code. Tests v near every
// code with all random bits.
static void check_byte(CodecInfo codec) {
    int limit = codec.levels * 64;
    for (int i = -limit; codec.levels < 64 && i <= limit; i++) {
        for (uint32_t random16 = 0; random16<65536; random16 += codec.levels> 7 ? 5 : 1) {
            float v = (float)i / 64.0f + (i % 2 ? 0x1p-18f : 0.0f);
            uint32_t sum = f32_bits(f32_add(v, f32_from_bits(STOCHASTIC_FINE | random16)));
            if ((int)(sum >> 16 & 0xFF) - 64 != code_stochastic(v, codec.levels, random16)) {
                fail_msg("%s: v = %g, random bits %u", codec.name, (double)v, random16);
            }
        }
    }
}
static void a_fine_stochastic_code_is_a_byte_of_the_sum(void **state) { for_each_codec(check_byte); }

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_codec_needs_the_clamp),
        cmocka_unit_test(wider_codes_would_need_it),
        cmocka_unit_test(a_fused_product_is_the_product),
        cmocka_unit_test(a_fine_stochastic_code_is_a_byte_of_the_sum),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
