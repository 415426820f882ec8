// The codecs: known answers of Philox, all bfloat16 values, the Hadamard transform, group scales
// near the limits of fp32, code ranges and error bounds, unbiased rounding, errors of the paper's
// codecs on known distributions, the summation tree of the norm, the replica hash, and the example
// in sdp4bit/README.md.
#include <float.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "llmc/base/base.h"
#include "sdp4bit/codec.h"

static const uint32_t POSITIVE_NAN = 0x7FC00000u;

// --- quantizing a group with codec.h's primitives -----------------------------------------------

static uint32_t largest_bits(const float *x, int n) {
    uint32_t largest = 0;
    for (int i = 0; i < n; i++) {
        uint32_t magnitude = f32_bits(x[i]) & 0x7FFFFFFFu;
        if (magnitude > largest) largest = magnitude;
    }
    return largest;
}

static RoundingKey test_key(uint32_t source) {
    RoundingKey key = {20240901u, 1u, 77u, source};
    return key;
}

// Returns the code of value v at logical offset `at`.
static int code_of(float v, int levels, int rounding, RoundingKey key, int64_t at) {
    if (rounding == ROUND_NEAREST) return code_nearest(v, levels);
    return code_stochastic(v, levels, philox_half(rounding_bits(key, (uint64_t)at / 8), (int)(at % 8)));
}

// Returns the relative L2 error of quantizing and dequantizing n values in groups, optionally with
// the Hadamard transform.
static double relative_error(const float *x, int64_t n, int group, Codec codec, bool transform,
                             int rounding) {
    int levels = codec_info(codec).levels;
    float *buffer = (float *)xmalloc((size_t)group * sizeof *buffer, "a group");
    double error = 0, power = 0;
    for (int64_t first = 0; first < n; first += group) {
        memcpy(buffer, x + first, (size_t)group * sizeof *buffer);
        for (int i = 0; transform && i < group; i += HADAMARD_ORDER) hadamard(buffer + i, HADAMARD_ORDER);
        GroupScale scale = group_scale(largest_bits(buffer, group), levels);
        for (int i = 0; i < group; i += 8) {
            Philox4 bits = rounding_bits(test_key(0), (uint64_t)(first + i) / 8);
            for (int e = 0; e < 8; e++) {
                float v = group_scaled(buffer[i + e], scale);
                int q = rounding == ROUND_NEAREST ? code_nearest(v, levels)
                                                  : code_stochastic(v, levels, philox_half(bits, e));
                buffer[i + e] = code_value(q, scale.scale);
            }
        }
        for (int i = 0; transform && i < group; i += HADAMARD_ORDER) hadamard(buffer + i, HADAMARD_ORDER);
        for (int i = 0; i < group; i++) {
            double decoded = transform ? (double)f32_mul(buffer[i], HADAMARD_INVERSE) : (double)buffer[i];
            error += (decoded - x[first + i]) * (decoded - x[first + i]);
            power += (double)x[first + i] * x[first + i];
        }
    }
    free(buffer);
    return sqrt(error / power);
}

// --- Philox -------------------------------------------------------------------------------------

// Random123's published vectors for philox4x32 with 10 and with 7 rounds.
static void test_philox_known_answers(void **state) {
    static const uint32_t rows[3][14] = {
        {0, 0, 0, 0, 0, 0, 0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u, 0x5f6fb709u, 0x0d893f64u,
         0x4f121f81u, 0x4f730a48u},
        {~0u, ~0u, ~0u, ~0u, ~0u, ~0u, 0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu, 0x5207ddc2u,
         0x45165e59u, 0x4d8ee751u, 0x8c52f662u},
        {0xa4093822u, 0x299f31d0u, 0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u, 0xd16cfe09u,
         0x94fdccebu, 0x5001e420u, 0x24126ea1u, 0x4dfccabau, 0x190a87f0u, 0xc47362bau, 0xb6b5242au},
    };
    for (int r = 0; r < 3; r++) {
        const uint32_t *a = rows[r];
        Philox4 ten = philox4x32_10(a[0], a[1], a[2], a[3], a[4], a[5]),
                seven = philox4x32(7, a[0], a[1], a[2], a[3], a[4], a[5]);
        for (int i = 0; i < 4; i++) {
            assert_int_equal(ten.v[i], a[6 + i]);
            assert_int_equal(seven.v[i], a[10 + i]);
        }
    }
}

static void test_rounding_bits_layout(void **state) {
    // Digits of pi, in the order of the key's fields.
    RoundingKey key = {0xa4093822u, 0x13198a2eu, 0x299f31d0u, 0x03707344u};
    Philox4 bits = rounding_bits(key, 0x85a308d3243f6a88ull);
    static const uint32_t expected[8] = {0xcabau, 0x4dfcu, 0x87f0u, 0x190au,
                                         0x62bau, 0xc473u, 0x242au, 0xb6b5u};
    for (int e = 0; e < 8; e++) assert_int_equal(philox_half(bits, e), expected[e]);

    // Every field of the key and every bit of the block number changes the result.
    RoundingKey other[4] = {key, key, key, key};
    other[0].seed ^= 1;
    other[1].step ^= 1;
    other[2].purpose ^= 1;
    other[3].source ^= 1;
    for (int i = 0; i < 4; i++)
        assert_memory_not_equal(rounding_bits(other[i], 5).v, rounding_bits(key, 5).v, 16);
    for (int bit = 0; bit < 64; bit++)
        assert_memory_not_equal(rounding_bits(key, 1ull << bit).v, rounding_bits(key, 0).v, 16);
}

// --- bfloat16 -----------------------------------------------------------------------------------

static bool bf16_is_nan(uint16_t h) { return (h & 0x7FFFu) > 0x7F80u; }

static void test_bf16_every_pattern(void **state) {
    for (uint32_t h = 0; h < 65536; h++) {
        float x = bf16_to_float((uint16_t)h);
        assert_int_equal(f32_bits(x), h << 16);
        uint16_t expected = bf16_is_nan((uint16_t)h) ? (uint16_t)((h & 0x8000u) | 0x7FC0u) : (uint16_t)h;
        assert_int_equal(bf16_from_float(x), expected);
    }
}

// Between adjacent values, a tie rounds to the even pattern, and other values round to the nearest
// one. The last pair includes infinity.
static void test_bf16_ties_and_neighbors(void **state) {
    for (uint32_t h = 0; h < 65536; h++) {
        if (bf16_is_nan((uint16_t)h) || (h & 0x7FFFu) == 0x7F80u) continue;
        uint32_t tie = (h << 16) | 0x8000u, even = h & 1 ? h + 1 : h;
        assert_int_equal(bf16_from_float(f32_from_bits(tie)), even);
        assert_int_equal(bf16_from_float(f32_from_bits(tie - 1)), h);
        assert_int_equal(bf16_from_float(f32_from_bits(tie + 1)), h + 1);
        assert_int_equal(bf16_from_float(f32_from_bits((h << 16) + 1)), h);
        assert_int_equal(bf16_from_float(f32_from_bits((h << 16) + 0xFFFFu)), h + 1);
    }
    // NaNs can be quiet or signaling. If the payload is only in the low half, truncation would make
    // infinity.
    assert_int_equal(bf16_from_float(f32_from_bits(0x7F800001u)), 0x7FC0);
    assert_int_equal(bf16_from_float(f32_from_bits(0xFF800001u)), 0xFFC0);
    assert_int_equal(bf16_from_float(f32_from_bits(0x7FFFFFFFu)), 0x7FC0);
    assert_int_equal(bf16_from_float(f32_from_bits(0xFFFFFFFFu)), 0xFFC0);
}

// --- Hadamard -----------------------------------------------------------------------------------

static float sylvester(int i, int j) { return __builtin_popcount((unsigned)(i & j)) % 2 ? -1.0f : 1.0f; }

static void test_hadamard_is_sylvester(void **state) {
    for (int j = 0; j < 32; j++) {
        float x[32] = {0};
        x[j] = 1.0f;
        hadamard(x, HADAMARD_ORDER);
        for (int i = 0; i < 32; i++) assert_true(x[i] == sylvester(i, j));
        hadamard(x, HADAMARD_ORDER);
        for (int i = 0; i < 32; i++) assert_true(x[i] == (i == j ? 32.0f : 0.0f));
    }
    // Small integers are exact, so the product with the matrix is exact too.
    float x[32], y[32];
    for (int i = 0; i < 32; i++) x[i] = y[i] = (float)((i * 2654435761u >> 20) % 2001) - 1000.0f;
    hadamard(y, HADAMARD_ORDER);
    for (int i = 0; i < 32; i++) {
        float sum = 0;
        for (int j = 0; j < 32; j++) sum += sylvester(i, j) * x[j];
        assert_true(y[i] == sum);
    }
    hadamard(y, HADAMARD_ORDER);
    for (int i = 0; i < 32; i++) assert_true(f32_mul(y[i], HADAMARD_INVERSE) == x[i]);
}

// Returns value i after the first `stages` stages. Stage t combines indices that differ in bit
// order[t].
static float after_stages(const float *x, const int *order, int stages, int i) {
    if (stages == 0) return x[i];
    int bit = 1 << order[stages - 1];
    float lower = after_stages(x, order, stages - 1, i & ~bit),
          upper = after_stages(x, order, stages - 1, i | bit);
    return i & bit ? lower - upper : lower + upper;
}

// The order of additions is part of the wire format. The stages are 1, 2, 4, 8, 16.
static void test_hadamard_stage_order(void **state) {
    static const int rising[5] = {0, 1, 2, 3, 4}, falling[5] = {4, 3, 2, 1, 0};
    float x[32], y[32];
    int differs = 0;
    for (int i = 0; i < 32; i++) x[i] = y[i] = sinf((float)(i * i + 1)) * (i % 5 == 0 ? 1000.0f : 0.01f);
    hadamard(y, HADAMARD_ORDER);
    for (int i = 0; i < 32; i++) {
        assert_int_equal(f32_bits(y[i]), f32_bits(after_stages(x, rising, 5, i)));
        differs += y[i] != after_stages(x, falling, 5, i);
    }
    assert_true(differs > 0);  // these inputs distinguish the orders
}

// --- group scale --------------------------------------------------------------------------------

static void check_scale(float m, int levels) {
    GroupScale g = group_scale(f32_bits(m), levels);
    assert_true(g.scale == m / (float)levels);
    assert_true(g.lift == (m < 0x1p-100f ? 0x1p24f : 1.0f));
    assert_true(isfinite(g.inverse) && g.inverse > 0);
    // Both ends of the range have the outermost codes.
    assert_int_equal(code_nearest(group_scaled(m, g), levels), levels);
    assert_int_equal(code_nearest(group_scaled(-m, g), levels), -levels);
    assert_true(fabsf(group_scaled(m, g)) <= (float)levels * (1 + 0x1p-22f));
    assert_int_equal(code_nearest(group_scaled(0.0f, g), levels), 0);
}

static void test_group_scale_finite(void **state) {
    float near = 0x1p-100f;
    float values[] = {FLT_MIN,        nextafterf(FLT_MIN, 1),
                      1.5f * FLT_MIN, nextafterf(near, 0),
                      near,           nextafterf(near, 1),
                      0x1p-101f,      1e-20f,
                      1.0f,           3.14159f,
                      7.0f,           127.0f,
                      1e20f,          nextafterf(FLT_MAX, 0),
                      FLT_MAX};
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        check_scale(values[i], 7);
        check_scale(values[i], 127);
    }
}

// Below the normal range the scale and all codes are zero.
static void test_group_scale_tiny(void **state) {
    uint32_t tiny[] = {0, 1, 2, 0x1234, 0x400000, 0x7FFFFF};
    for (size_t i = 0; i < sizeof tiny / sizeof *tiny; i++) {
        GroupScale g = group_scale(tiny[i], 7);
        assert_int_equal(f32_bits(g.scale), 0);
        assert_int_equal(f32_bits(g.inverse), 0);
        assert_int_equal(code_stochastic(group_scaled(f32_from_bits(tiny[i]), g), 7, 0), 0);
        assert_int_equal(f32_bits(code_value(0, g.scale)), 0);
    }
}

// If a group contains a NaN or infinity, the scale is NaN, codes are zero, and every element
// decodes to NaN.
static void test_group_scale_non_finite(void **state) {
    static const uint32_t bad[] = {0x7F800000u, 0xFF800000u, 0x7F800001u,
                                   0x7FC00000u, 0xFFC00000u, 0xFFFFFFFFu};
    for (size_t k = 0; k < sizeof bad / sizeof *bad; k++) {
        for (int at = 0; at < 64; at++) {
            float x[64];
            for (int i = 0; i < 64; i++) x[i] = (float)(i - 31);
            x[7] = FLT_MAX;
            x[at] = f32_from_bits(bad[k]);
            GroupScale g = group_scale(largest_bits(x, 64), 127);
            assert_int_equal(f32_bits(g.scale), POSITIVE_NAN);
            for (int i = 0; i < 64; i++) {
                assert_int_equal(code_nearest(group_scaled(x[i], g), 127), 0);
                assert_int_equal(code_stochastic(group_scaled(x[i], g), 127, 0), 0);
            }
            assert_true(isnan(code_value(0, g.scale)));
        }
    }
}

// --- codes --------------------------------------------------------------------------------------

static float random_float(uint32_t *counter, int exponent_low, int exponent_span) {
    Philox4 r = philox4x32_10(99, 0, (*counter)++, 0, 0, 0);
    float mantissa = (float)((double)r.v[0] / 2147483648.0 - 1.0);
    return ldexpf(mantissa, exponent_low + (int)(r.v[1] % (uint32_t)exponent_span));
}

static void check_group_error(const float *x, int n, Codec codec, RoundingKey key) {
    int levels = codec_info(codec).levels;
    GroupScale g = group_scale(largest_bits(x, n), levels);
    if (g.inverse == 0.0f) return;
    // v and q * scale have errors of a few ulp. A subnormal scale has an error of up to half a
    // subnormal step.
    double slack = levels * ((double)g.scale * 0x1p-21 + 0x1p-149);
    for (int i = 0; i < n; i++) {
        float v = group_scaled(x[i], g);
        int nearest = code_of(v, levels, ROUND_NEAREST, key, i),
            stochastic = code_of(v, levels, ROUND_STOCHASTIC, key, i);
        assert_in_range(nearest + levels, 0, 2 * levels);
        assert_in_range(stochastic + levels, 0, 2 * levels);
        assert_true(fabs((double)x[i] - code_value(nearest, g.scale)) <= 0.5 * (double)g.scale + slack);
        assert_true(fabs((double)x[i] - code_value(stochastic, g.scale)) <= (double)g.scale + slack);
    }
}

static void test_codes_bounded(void **state) {
    static const int ranges[][2] = {{-3, 3},   {-30, 60}, {-126, 3},  {-128, 30},
                                    {-101, 3}, {100, 28}, {-149, 270}};
    uint32_t counter = 0;
    float x[128];
    for (int trial = 0; trial < 2100; trial++) {
        for (int i = 0; i < 128; i++)
            x[i] = random_float(&counter, ranges[trial % 7][0], ranges[trial % 7][1]);
        if (trial % 5 == 0) x[trial % 128] = x[3] * 64.0f;
        if (largest_bits(x, 128) >= 0x7F800000u) continue;
        check_group_error(x, 128, CODEC_INT4, test_key((uint32_t)trial));
        check_group_error(x, 128, CODEC_INT8, test_key((uint32_t)trial));
    }
    // Values slightly out of range are clamped, for any random number.
    assert_int_equal(code_nearest(7.6f, 7), 7);
    assert_int_equal(code_nearest(-7.6f, 7), -7);
    assert_int_equal(code_stochastic(7.000001f, 7, 65535), 7);
    assert_int_equal(code_stochastic(-7.000001f, 7, 0), -7);
    assert_int_equal(code_nearest(0.5f, 7), 0);
    assert_int_equal(code_nearest(1.5f, 7), 2);
    assert_int_equal(code_nearest(-2.5f, 7), -2);
}

// --- the table ----------------------------------------------------------------------------------

// For every code size, the code of element e is in bits [e * bits, (e + 1) * bits) of the stream.
static void test_packing(void **state) {
    for (int bits = 2; bits <= 8; bits++) {
        int most = (1 << (bits - 1)) - 1;
        for (int shift = 0; shift < 2 * most + 2; shift++) {
            int q[8];
            for (int e = 0; e < 8; e++) q[e] = (shift + 3 * e) % (2 * most + 2) - most - 1;
            uint64_t stream = pack_codes(q, bits);
            if (bits < 8) assert_true(stream >> (8 * bits) == 0);
            for (int e = 0; e < 8; e++) {
                assert_int_equal(unpack_code(stream, e, bits), q[e]);
                for (int b = 0; b < bits; b++) assert_int_equal(stream >> (e * bits + b) & 1, q[e] >> b & 1);
            }
        }
    }
    assert_true(pack_codes((int[8]){1, -1, -7, 7, 0, 0, 0, 0}, 4) == 0x79F1);
}

static void test_table(void **state) {
    for (int a = 0; a < CODECS; a++) {
        CodecInfo row = codec_info((Codec)a);
        assert_int_equal(codec_bytes((Codec)a, 32), 4 * row.bits);
        if (codec_eden((Codec)a)) assert_int_equal(eden_of_bits(row.bits), a);
        else if (codec_grouped((Codec)a)) assert_int_equal(codec_of_bits(row.bits), a);
        for (int b = 0; b < a; b++) assert_string_not_equal(row.name, codec_info((Codec)b).name);
    }
}

// Checks that the call ends the program.
static void dies(void (*call)(void)) {
    int status;
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
        signal(SIGABRT, SIG_DFL);
        call();
        _exit(0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}
static void ask_unknown_codec(void) { codec_info((Codec)CODECS); }
static void ask_unknown_bits(void) { codec_of_bits(5); }
static void ask_unknown_eden(void) { eden_of_bits(8); }
static void test_unknown_codec(void **state) {
    dies(ask_unknown_codec);
    dies(ask_unknown_bits);
    dies(ask_unknown_eden);
}

// --- unbiasedness -------------------------------------------------------------------------------

// For all 65536 random numbers, the share of the upper neighbor must be `fraction`, rounded to
// 1/65536 for up to 63 levels (a bias of at most 2^-17 of a level), and to 1/32768 for more levels.
static void check_exhaustive(int levels, int low, float fraction, double most) {
    float v = (float)low + fraction;
    double frac = (double)v - floor((double)v);
    int base = (int)floor((double)v);
    int64_t up = 0;
    for (uint32_t r = 0; r < 65536; r++) {
        int q = code_stochastic(v, levels, r);
        assert_true(q == base || q == base + 1);
        up += q - base;
    }
    assert_true(fabs((double)up - frac * 65536.0) <= most);
}

static void test_stochastic_exhaustive(void **state) {
    static const float fractions[] = {0.0f, 0x1p-18f, 0x1p-16f, 0.1f,   0.25f,       0.3333f,
                                      0.5f, 0.75f,    0.9f,     0.999f, 1 - 0x1p-17f};
    for (size_t f = 0; f < sizeof fractions / sizeof *fractions; f++) {
        for (int low = -7; low < 7; low += 3) check_exhaustive(7, low, fractions[f], 0.5);
        for (int low = -127; low < 127; low += 42) check_exhaustive(127, low, fractions[f], 1.0);
    }
}

// With real random bits, the mean of many draws is within 4 sigma of the value, in every interval
// between two levels.
static void check_interval(int low, int levels, double fraction, uint32_t source) {
    enum { DRAWS = 8192 };
    float v = (float)(low + fraction);
    double sum = 0;
    for (int i = 0; i < DRAWS; i += 8) {
        Philox4 bits = rounding_bits(test_key(source), (uint64_t)i / 8);
        for (int e = 0; e < 8; e++) sum += code_stochastic(v, levels, philox_half(bits, e));
    }
    double sigma = sqrt(fraction * (1 - fraction) / DRAWS);
    assert_true(fabs(sum / DRAWS - (double)v) <= 4 * sigma + 0x1p-16);
}

static void test_stochastic_unbiased(void **state) {
    static const double fractions[] = {0.03, 0.2, 0.5, 0.71, 0.98};
    uint32_t source = 0;
    for (int f = 0; f < 5; f++) {
        for (int low = -7; low < 7; low++) check_interval(low, 7, fractions[f], source++);
        for (int low = -127; low < 127; low += 11) check_interval(low, 127, fractions[f], source++);
    }
}

// --- error levels -------------------------------------------------------------------------------

enum { SAMPLES = 1 << 20 };
typedef enum Distribution { GAUSSIAN, LAPLACE, OUTLIERS } Distribution;

static double uniform(uint32_t bits) { return (bits + 0.5) * 0x1p-32; }

// Returns sample `index` of a distribution: Gaussian (Box-Muller), Laplace (inverse distribution),
// or Gaussian with 1 % of outliers that are 20 times as large.
static float sample(Distribution d, uint32_t index) {
    Philox4 r = philox4x32_10(4711, (uint32_t)d, index, 0, 0, 0);
    double u = uniform(r.v[0]);
    if (d == LAPLACE) return (float)(u < 0.5 ? log(2 * u) : -log(2 * (1 - u)));
    double normal = sqrt(-2 * log(u)) * cos(6.283185307179586 * uniform(r.v[1]));
    return (float)(d == OUTLIERS && uniform(r.v[2]) < 0.01 ? 20 * normal : normal);
}

typedef struct ErrorRow {
    Distribution distribution;
    int group;
    double int4, int4_ht, int8, int8_ht, nearest, nearest_ht;
} ErrorRow;

// Allows 2 % plus half a unit in the expected value's last digit, because it has few digits.
static void check_error(const float *x, const ErrorRow *row, Codec codec, bool transform, int rounding,
                        double expected, double last_digit) {
    double measured = relative_error(x, SAMPLES, row->group, codec, transform, rounding);
    if (fabs(measured - expected) > 0.02 * expected + last_digit / 2) {
        fail_msg("distribution %d group %d codec %d transform %d rounding %d: %.5f, expected %.5f",
                 row->distribution, row->group, codec, transform, rounding, measured, expected);
    }
}

static void test_error_levels(void **state) {
    static const ErrorRow rows[] = {
        {GAUSSIAN, 128, .166, .166, .0092, .0091, .118, .117},
        {GAUSSIAN, 512, .191, .190, .0105, .0105, .135, .134},
        {GAUSSIAN, 2048, .215, .212, .0119, .0117, .152, .150},
        {LAPLACE, 128, .228, .166, .0126, .0092, .160, .118},
        {OUTLIERS, 128, .462, .151, .0293, .0083, .279, .107},
        {OUTLIERS, 512, .708, .223, .0469, .0123, .403, .157},
    };
    float *x = (float *)xmalloc(SAMPLES * sizeof *x, "samples");
    for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
        const ErrorRow *row = &rows[r];
        if (r == 0 || rows[r - 1].distribution != row->distribution) {
            for (uint32_t i = 0; i < SAMPLES; i++) x[i] = sample(row->distribution, i);
        }
        check_error(x, row, CODEC_INT4, false, ROUND_STOCHASTIC, row->int4, .001);
        check_error(x, row, CODEC_INT4, true, ROUND_STOCHASTIC, row->int4_ht, .001);
        check_error(x, row, CODEC_INT8, false, ROUND_STOCHASTIC, row->int8, .0001);
        check_error(x, row, CODEC_INT8, true, ROUND_STOCHASTIC, row->int8_ht, .0001);
        check_error(x, row, CODEC_INT4, false, ROUND_NEAREST, row->nearest, .001);
        check_error(x, row, CODEC_INT4, true, ROUND_NEAREST, row->nearest_ht, .001);
    }
    free(x);
}

// --- the norm's tree and the replica hash -------------------------------------------------------

static void test_tree_sum(void **state) {
    float x[32], a[32];
    for (int i = 0; i < 32; i++) a[i] = x[i] = (float)(1.0 / (i + 3));
    // Independent computation: sums pairs of neighbors, then pairs of these sums.
    for (int n = 32; n > 1; n /= 2) {
        for (int i = 0; i < n / 2; i++) a[i] = a[2 * i] + a[2 * i + 1];
    }
    assert_int_equal(f32_bits(tree_sum32(x)), f32_bits(a[0]));
    // Adding 2^24 + 1 + 1 in sequence would lose both ones. The tree adds the ones first.
    float y[32] = {0x1p24f, 0, 1, 1};
    assert_true(tree_sum32(y) == 0x1p24f + 2);
}

static void test_replica_mix(void **state) {
    // replica_mix(0, 0) is splitmix64's first output for seed 0.
    assert_true(replica_mix(0, 0) == 0xE220A8397B1DCDAFull);
    uint64_t base = replica_mix(10, 0x3F80) + replica_mix(11, 0x3F81);
    assert_true(base != replica_mix(10, 0x3F81) + replica_mix(11, 0x3F80));  // swapped values are detected
    for (int bit = 0; bit < 32; bit++) {                                     // any flipped bit is detected
        assert_true(replica_mix(10, 0x3F80u ^ (1u << bit)) != replica_mix(10, 0x3F80));
    }
    for (uint64_t position = 0; position < 1000; position++)
        assert_true(replica_mix(position, 7) != replica_mix(position + 1, 7));
}

// --- the worked example of sdp4bit/README.md ----------------------------------------------------

typedef struct Example {
    uint8_t codes[16];
    uint8_t scale[4];
    float value[32];
} Example;

// Encodes one int4 group of 32 values: seed 1234, step 1, level 2, source (node) 1, logical offset
// 0.
static Example encode_example(const float *x, int rounding) {
    Example out;
    RoundingKey key = {1234, 1, PURPOSE_GRAD_LEVEL2, 1};
    GroupScale g = group_scale(largest_bits(x, 32), 7);
    int q[32];
    for (int i = 0; i < 32; i++) q[i] = code_of(group_scaled(x[i], g), 7, rounding, key, i);
    for (int i = 0; i < 32; i += 8) {
        uint64_t stream = pack_codes(q + i, 4);
        memcpy(out.codes + i / 2, &stream, 4);
    }
    uint32_t bits = f32_bits(g.scale);
    for (int i = 0; i < 4; i++) out.scale[i] = (uint8_t)(bits >> (8 * i));
    for (int i = 0; i < 32; i++) out.value[i] = code_value(q[i], g.scale);
    return out;
}

static void test_worked_example(void **state) {
    float x[32];
    for (int i = 0; i < 32; i++) x[i] = (float)(i - 10) / 16.0f;

    static const uint8_t scale[4] = {0x00, 0x00, 0x40, 0x3e};  // 1.3125 / 7 = 0.1875
    static const uint8_t nearest[16] = {0xdd, 0xed, 0xee, 0xff, 0x0f, 0x00, 0x11, 0x21,
                                        0x22, 0x33, 0x43, 0x44, 0x55, 0x65, 0x66, 0x77};
    Example rn = encode_example(x, ROUND_NEAREST);
    assert_memory_equal(rn.scale, scale, 4);
    assert_memory_equal(rn.codes, nearest, 16);

    static const uint32_t bits[4] = {62175, 2526, 50138, 50274};  // random numbers of the first elements
    RoundingKey key = {1234, 1, PURPOSE_GRAD_LEVEL2, 1};
    for (int e = 0; e < 4; e++) assert_int_equal(philox_half(rounding_bits(key, 0), e), bits[e]);

    static const uint8_t stochastic[16] = {0xdd, 0xee, 0xee, 0xfe, 0x0f, 0x10, 0x11, 0x12,
                                           0x22, 0x33, 0x33, 0x44, 0x55, 0x66, 0x76, 0x77};
    static const float decoded[8] = {-0.5625f, -0.5625f, -0.375f, -0.375f,
                                     -0.375f,  -0.375f,  -0.375f, -0.1875f};
    Example sr = encode_example(x, ROUND_STOCHASTIC);
    assert_memory_equal(sr.scale, scale, 4);
    assert_memory_equal(sr.codes, stochastic, 16);
    assert_memory_equal(sr.value, decoded, sizeof decoded);

    // The same group with the Hadamard transform.
    static const uint8_t ht_scale[4] = {0x25, 0x49, 0x12, 0x40};  // 16 / 7
    static const uint8_t ht[16] = {0xf5, 0x0f, 0x0f, 0x00, 0x0c, 0x00, 0x00, 0x00,
                                   0x09, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00};
    hadamard(x, HADAMARD_ORDER);
    Example transformed = encode_example(x, ROUND_STOCHASTIC);
    assert_memory_equal(transformed.scale, ht_scale, 4);
    assert_memory_equal(transformed.codes, ht, 16);
    hadamard(transformed.value, HADAMARD_ORDER);
    static const float back[8] = {-0.642857f, -0.5f,      -0.5f,      -0.357143f,
                                  -0.5f,      -0.357143f, -0.357143f, -0.214286f};
    for (int i = 0; i < 8; i++)
        assert_true(fabsf(f32_mul(transformed.value[i], HADAMARD_INVERSE) - back[i]) < 1e-6f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_philox_known_answers),
        cmocka_unit_test(test_rounding_bits_layout),
        cmocka_unit_test(test_bf16_every_pattern),
        cmocka_unit_test(test_bf16_ties_and_neighbors),
        cmocka_unit_test(test_hadamard_is_sylvester),
        cmocka_unit_test(test_hadamard_stage_order),
        cmocka_unit_test(test_group_scale_finite),
        cmocka_unit_test(test_group_scale_tiny),
        cmocka_unit_test(test_group_scale_non_finite),
        cmocka_unit_test(test_codes_bounded),
        cmocka_unit_test(test_packing),
        cmocka_unit_test(test_table),
        cmocka_unit_test(test_unknown_codec),
        cmocka_unit_test(test_stochastic_exhaustive),
        cmocka_unit_test(test_stochastic_unbiased),
        cmocka_unit_test(test_error_levels),
        cmocka_unit_test(test_tree_sum),
        cmocka_unit_test(test_replica_mix),
        cmocka_unit_test(test_worked_example),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
