// The codes of a group's largest element without clamping, for every mantissa: the proof that GPU kernels may leave the clamp out. Every other element of
// the group is no larger in magnitude and both multiplications are monotonic, so its code lies between those of +m and -m.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "llmc/base.h"
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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(int4_never_needs_the_clamp),
        cmocka_unit_test(int8_never_needs_the_clamp),
        cmocka_unit_test(wider_codes_would_need_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
