// Initial weights: the functions of llmc/base/normal.h against libm in long double, corner cases,
// golden bits, the distribution, and op_init_weights on the CPU.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "llmc/base/normal.h"
#include "sdp4bit/codec.h"  // replica_mix
#include "llmc/ops.h"
#include "llmc/base/rng.h"

#define TWO_PI 6.283185307179586476925286766559005768L

// --- the functions ------------------------------------------------------------------------------

static double relative_error(double ours, long double exact) {
    return exact == 0 ? (ours == 0 ? 0 : INFINITY) : (double)fabsl((ours - exact) / exact);
}

static void logarithm_is_accurate(void **state) {
    double worst = 0;
    for (uint64_t i = 0; i < 2000000; i++) {
        Philox4 bits = counter_bits(5, PURPOSE_INIT, 6, i);
        double x = 1.0 - uniform53(bits.v[0], bits.v[1]);
        double near_zero = ldexp(x, -(int)(i % 11)), near_one = 1.0 - ldexp(1.0 - x, -(int)(i % 53));
        worst = fmax(worst, relative_error(log_unit(x), logl(x)));
        worst = fmax(worst, relative_error(log_unit(near_zero), logl(near_zero)));
        worst = fmax(worst, relative_error(log_unit(near_one), logl(near_one)));
    }
    // Powers of two, the boundary of the mantissa range, and the neighbors of these values.
    for (int e = 0; e < 63; e++) {
        double power = ldexp(1.0, -e), middle = ldexp(sqrt(0.5), -e);
        double x[] = {power,  nextafter(power, 0),  e ? nextafter(power, 1) : 1.0,
                      middle, nextafter(middle, 0), nextafter(middle, 1)};
        for (int k = 0; k < 6; k++) worst = fmax(worst, relative_error(log_unit(x[k]), logl(x[k])));
    }
    if (!(worst < 4e-16)) fail_msg("relative error %g", worst);
    assert_true(log_unit(1.0) == 0.0);
}

// Returns the error against long double functions, whose argument is reduced to an eighth of a turn
// by symmetry.
static double circle_error(double u) {
    double ours[2], quarters = rint(4 * u);
    long double angle = (u - quarters / 4) * TWO_PI, c = cosl(angle), s = sinl(angle);
    const long double exact[5][2] = {{c, s}, {-s, c}, {-c, -s}, {s, -c}, {c, s}};
    circle(u, &ours[0], &ours[1]);
    return fmax(relative_error(ours[0], exact[(int)quarters][0]),
                relative_error(ours[1], exact[(int)quarters][1]));
}

static void cosine_and_sine_are_accurate(void **state) {
    double worst = 0;
    for (uint64_t i = 0; i < 2000000; i++) {
        Philox4 bits = counter_bits(5, PURPOSE_INIT, 7, i);
        worst = fmax(worst, circle_error(uniform53(bits.v[2], bits.v[3])));
    }
    // Values near every multiple of an eighth of a turn.
    for (int eighth = 0; eighth <= 8; eighth++) {
        for (int e = 4; e <= 53; e++) {
            double below = eighth / 8.0 - ldexp(1.0, -e), above = eighth / 8.0 + ldexp(1.0, -e);
            if (below >= 0) worst = fmax(worst, circle_error(below));
            if (above <= 1) worst = fmax(worst, circle_error(above));
        }
    }
    if (!(worst < 4e-16)) fail_msg("relative error %g", worst);
    for (int quarter = 0; quarter <= 4; quarter++) {
        static const double exact[5][2] = {{1, 0}, {0, 1}, {-1, 0}, {0, -1}, {1, 0}};
        double c, s;
        circle(quarter / 4.0, &c, &s);
        assert_true(c == exact[quarter][0] && s == exact[quarter][1]);
    }
}

static void uniforms_are_exact(void **state) {
    assert_true(uniform53(0, 0) == 0.0 && uniform53(0, 2047) == 0.0);
    assert_true(uniform53(0, 2048) == 0x1p-53);
    assert_true(uniform53(UINT32_MAX, UINT32_MAX) == 1.0 - 0x1p-53);
    for (uint64_t i = 0; i < 100000; i++) {
        Philox4 bits = counter_bits(8, PURPOSE_INIT, 9, i);
        uint64_t integer = ((uint64_t)bits.v[0] << 32 | bits.v[1]) >> 11;
        assert_true(uniform53(bits.v[0], bits.v[1]) == (double)integer * 0x1p-53);
    }
}

// --- normal numbers -----------------------------------------------------------------------------

static double number(uint64_t seed, uint32_t stream, uint64_t index) {
    double pair[2];
    normal_pair(counter_bits(seed, PURPOSE_INIT, stream, index / 2), pair);
    return pair[index % 2];
}

static void extreme_bits_give_finite_numbers(void **state) {
    static const uint32_t ends[] = {0, 0x40000000u, 0x80000000u, 0xC0000000u, UINT32_MAX};
    for (int i = 0; i < 25; i++) {
        Philox4 bits = {{ends[i / 5], ends[i / 5], ends[i % 5], i % 5 == 4 ? UINT32_MAX : 0}};
        double pair[2];
        normal_pair(bits, pair);
        assert_true(fabs(pair[0]) < 8.6 && fabs(pair[1]) < 8.6);  // sqrt(2 * 53 ln 2) = 8.57
    }
    double pair[2];
    normal_pair((Philox4){{0, 0, 5, 6}}, pair);  // radius of u = 0
    assert_true(pair[0] == 0.0 && pair[1] == 0.0);
    normal_pair((Philox4){{UINT32_MAX, UINT32_MAX, 0, 0}}, pair);  // the largest radius
    assert_true(fabs(pair[0] - sqrt(2 * 53 * log(2.0))) < 1e-14 && pair[1] == 0.0);
}

// If these bits changed, a seed would give other initial weights. mpmath with 200 bits and an
// independent Philox give the same values, except for the last bit of the two marked ones.
static void golden_bits(void **state) {
    static const struct {
        uint64_t seed;
        uint32_t stream;
        uint64_t pair;
        double normal[2];
    } row[] = {
        {1234, 0, 0, {0x1.391584a650968p-2, -0x1.00e4bfda9d2d8p+0}},
        {1234, 3, 62500000, {0x1.82869dceb9628p+0 /* +1 */, -0x1.9a0d914604224p-2 /* +1 */}},
        {0xFEDCBA9876543210u, 77, 0x123456789ABu, {0x1.25d4c1febda73p+0, 0x1.f007c7cbb5927p-2}},
    };
    for (size_t i = 0; i < sizeof row / sizeof row[0]; i++) {
        for (int e = 0; e < 2; e++)
            assert_true(number(row[i].seed, row[i].stream, 2 * row[i].pair + (uint64_t)e) ==
                        row[i].normal[e]);
    }
    // The hash of many values detects differences in the last bit, for example from another order
    // of operations or an FMA.
    uint64_t hash = 0;
    for (uint64_t i = 0; i < 400000; i++) {
        uint64_t bits = f64_bits(number(1234, 1, i));
        hash += replica_mix(2 * i, (uint32_t)bits) + replica_mix(2 * i + 1, (uint32_t)(bits >> 32));
    }
    assert_int_equal(hash, 0x4fc6fe3073626dfeu);
}

static void normals_are_normal(void **state) {
    enum { N = 200000 };
    double sum = 0, squares = 0, fourth = 0, neighbors = 0, squared_neighbors = 0, last = 0;
    int beyond = 0;
    for (int i = 0; i < N; i++) {
        double x = number(1234, 3, (uint64_t)i);
        sum += x;
        squares += x * x;
        fourth += x * x * x * x;
        neighbors += x * last;
        squared_neighbors += (x * x - 1) * (last * last - 1);
        beyond += fabs(x) > 1.959964;  // 5 % of a normal distribution
        last = x;
    }
    double root = sqrt(N);
    assert_true(fabs(sum / N) < 4 / root);
    assert_true(fabs(squares / N - 1) < 4 * sqrt(2.0) / root);
    assert_true(fabs(fourth / N - 3) < 4 * sqrt(96.0) / root);
    assert_true(fabs(neighbors / N) < 4 / root);
    assert_true(fabs(squared_neighbors / N) < 4 * 2 / root);  // both numbers of a pair share their radius
    assert_true(fabs(beyond / (double)N - 0.05) < 4 * sqrt(0.05 * 0.95) / root);
}

static void streams_do_not_depend_on_order_and_differ(void **state) {
    double late = number(1, 2, 1000001), first = number(1, 2, 0);
    assert_true(number(1, 2, 1000001) == late && number(1, 2, 0) == first);
    assert_true(number(1, 3, 0) != first && number(2, 2, 0) != first &&
                number((uint64_t)1 << 32 | 1, 2, 0) != first);
    assert_true(number(1, 2, (uint64_t)1 << 33) != first);
}

// --- weights ------------------------------------------------------------------------------------

// With any number of threads, element i is number i of the stream, rounded twice. Memory after the
// tensor is unchanged.
static void weights_are_the_stream(void **state) {
    enum { MOST = 200003 };
    static const int sizes[] = {0, 1, 2, 127, 128, 129, 65536, 65537, MOST};
    static floatX weights[MOST + 1];
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        for (int threads = 1; threads <= 3; threads += 2) {
            memset(weights, 0xFF, sizeof weights);
            InitWeights all = {weights, sizes[i], 1, 0, 0, 1, 0.02, 77, 5, threads, 0};
            op_init_weights(NULL, &all);
            for (int j = 0; j < sizes[i]; j++) {
                floatX expected = floatX_from_float((float)(0.02 * number(77, 5, (uint64_t)j)));
                if (memcmp(&weights[j], &expected, sizeof expected) != 0)
                    fail_msg("number %d of %d on %d threads", j, sizes[i], threads);
            }
            assert_true(isnan(floatX_to_float(weights[sizes[i]])));
        }
    }
}

// Parts split by rows, by columns or by both have the same numbers as the unsplit tensor.
static void parts_have_the_numbers_of_the_whole(void **state) {
    enum { ROWS = 61, COLUMNS = 1003, MOST = ROWS * COLUMNS };
    static const struct {
        int64_t first_row, rows, first_column, columns;
    } box[] = {{0, ROWS, 0, COLUMNS}, {0, 30, 0, COLUMNS}, {31, 30, 0, COLUMNS}, {60, 1, 0, COLUMNS},
               {0, ROWS, 0, 501},     {0, ROWS, 501, 502}, {0, ROWS, 1002, 1},   {7, 13, 129, 257},
               {8, 12, 128, 256},     {5, 1, 9, 1}};
    static floatX whole[MOST], part[MOST + 1];
    InitWeights all = {whole, ROWS, COLUMNS, 0, 0, COLUMNS, 0.02, 77, 5, 1, 0};
    op_init_weights(NULL, &all);
    for (size_t i = 0; i < 2 * sizeof box / sizeof box[0]; i++) {
        int64_t rows = box[i / 2].rows, columns = box[i / 2].columns;
        InitWeights cut = {
            part, rows,          columns, box[i / 2].first_row, box[i / 2].first_column, COLUMNS, 0.02, 77,
            5,    i % 2 ? 3 : 1, 0};
        memset(part, 0xFF, sizeof part);
        op_init_weights(NULL, &cut);
        for (int64_t r = 0; r < rows; r++) {
            const floatX *expected = whole + (cut.first_row + r) * COLUMNS + cut.first_column;
            if (memcmp(part + r * columns, expected, (size_t)columns * sizeof(floatX)) != 0)
                fail_msg("part %zu, row %lld", i / 2, (long long)r);
        }
        assert_true(isnan(floatX_to_float(part[rows * columns])));
    }
}

static void constants(void **state) {
    floatX weights[10];
    for (int ones = 0; ones < 2; ones++) {
        memset(weights, 0xFF, sizeof weights);
        InitWeights nine = {weights, 3, 3, 1, 2, 7, ones ? -1.0 : 0.0, 77, 5, 2, 0};
        op_init_weights(NULL, &nine);
        for (int i = 0; i < 9; i++) assert_true(floatX_to_float(weights[i]) == (float)ones);
        assert_true(isnan(floatX_to_float(weights[9])));
    }
}

// Stream 0 of sampling shares no random bits with any stream of initial weights, even the one with
// index PURPOSE_SAMPLE.
static void purposes_share_no_bits(void **state) {
    for (uint64_t i = 0; i < 1000; i++) {
        double sampled = rng_uniform(5, PURPOSE_SAMPLE, i);
        for (uint32_t stream = 0; stream < 10; stream++) {
            Philox4 bits = counter_bits(5, PURPOSE_INIT, stream, i);
            assert_true(sampled != uniform53(bits.v[0], bits.v[1]));
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(logarithm_is_accurate),
        cmocka_unit_test(cosine_and_sine_are_accurate),
        cmocka_unit_test(uniforms_are_exact),
        cmocka_unit_test(extreme_bits_give_finite_numbers),
        cmocka_unit_test(golden_bits),
        cmocka_unit_test(normals_are_normal),
        cmocka_unit_test(streams_do_not_depend_on_order_and_differ),
        cmocka_unit_test(weights_are_the_stream),
        cmocka_unit_test(parts_have_the_numbers_of_the_whole),
        cmocka_unit_test(constants),
        cmocka_unit_test(purposes_share_no_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
