// gpt_upload_rope_table with the RoPE scaling of Llama 3.1 and 3.2. transformers 5.23 computed the
// expected frequencies (modeling_rope_utils, rope_type llama3, theta 500000, low 1, high 4, 8192
// positions).
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "llmc/model/gpt.h"

typedef struct Known {
    int column;
    double frequency;
} Known;

// Compares angles at 64 positions. A single angle determines the frequency only modulo 2 pi /
// position, and low frequencies need high positions.
static void expect_of(GPT gpt, const Known *known, int count) {
    enum { T = 65 };
    Error err = {0};
    Site site = {0};
    Device *device = device_open(0, &site, &err);
    const int head = gpt.rotary;
    const double gain = gpt.yarn.factor > 0 ? gpt.yarn.gain : 1;
    gpt.stream = stream_create(device, "compute");
    gpt.T = T;
    float *turns = gpt.rope_table = malloc((size_t)T * (size_t)head * sizeof(float));
    gpt_upload_rope_table(&gpt);
    for (int i = 0; i < count; i++) {
        double frequency = known[i].frequency;
        int t = frequency < 0.04 ? 64 : 1, column = known[i].column;
        double got = atan2(turns[t * head + head / 2 + column], turns[t * head + column]) / t;
        double length = hypot(turns[t * head + head / 2 + column], turns[t * head + column]);
        if (fabs(length - gain) > 1e-6) fail_msg("column %d: gain %.9g, not %.9g", column, length, gain);
        if (fabs(got - frequency) > 2e-6 * frequency + 1e-9)
            fail_msg("head %d, column %d: frequency %.9g, not %.9g", head, column, got, frequency);
    }
    free(turns);
    stream_destroy(gpt.stream);
    device_close(device);
}

static void expect(int head, double stretch, const Known *known, int count) {
    GPT gpt = {.rotary = head, .rotary_base = 500000, .rotary_stretch = stretch};
    expect_of(gpt, known, count);
}

static void without_scaling(void **state) {
    const Known known[] = {
        {0, 1}, {8, 0.193922758}, {16, 0.0376060307}, {32, 1.41421356e-3}, {56, 1.03133854e-5}};
    expect(128, 1, known, 5);
}

static void of_llama_3_1(void **state) {  // columns 29 to 34 are interpolated
    const Known known[] = {{0, 1},
                           {16, 0.03760603070},
                           {28, 0.0032114461},
                           {29, 0.00216657063},
                           {30, 0.00137189368},
                           {32, 0.000524846022},
                           {34, 0.000178507791},
                           {35, 9.55621217e-05},
                           {56, 1.28917316e-06}};
    expect(128, 8, known, 9);
}

static void of_llama_3_2(void **state) {
    const Known known[] = {{0, 1},
                           {8, 0.03760603070},
                           {14, 0.0032114461},
                           {15, 0.00129054801},
                           {16, 0.000429556705},
                           {17, 9.70828623e-05},
                           {18, 1.94616379e-05}};
    expect(64, 32, known, 7);
}

// transformers 4.46, rope_type linear
static void linear(void **state) {
    const Known known[] = {{0, 0.4}, {8, 0.07756910473}, {32, 0.00056568539}, {56, 4.12535428e-06}};
    expect_of((GPT){.rotary = 128, .rotary_base = 500000, .rotary_interpolation = 2.5}, known, 4);
}

// transformers 4.46, rope_type yarn: Qwen 2.5's setting for 131072 tokens. Columns 24 to 39 are
// interpolated.
static void yarn_of_qwen_2_5(void **state) {
    const Known known[] = {{0, 1},
                           {8, 0.1778279394},
                           {16, 0.03162277862},
                           {23, 0.006978305988},
                           {24, 0.005375321489},
                           {31, 0.0008029597811},
                           {39, 6.490394298e-05},
                           {40, 4.445698505e-05},
                           {41, 3.582531644e-05},
                           {63, 3.102344408e-07}};
    const Yarn yarn = {
        .factor = 4, .positions = 32768, .fast = 32, .slow = 1, .gain = 1.138629436, .rounded = true};
    expect_of((GPT){.rotary = 128, .rotary_base = 1e6, .yarn = yarn}, known, 10);
}

static void yarn_with_other_turns(void **state) {
    const Known known[] = {{0, 1},
                           {8, 0.1000000015},
                           {11, 0.04216964915},
                           {12, 0.02865814231},
                           {16, 0.005312500056},
                           {20, 0.0004941059742},
                           {21, 0.0001482108637},
                           {31, 8.334509403e-06}};
    const Yarn yarn = {.factor = 16, .positions = 4096, .fast = 24, .slow = 2, .gain = 0.5, .rounded = true};
    expect_of((GPT){.rotary = 64, .rotary_base = 1e4, .yarn = yarn}, known, 8);
}

// truncate false: the range of interpolated columns is 8.09 to 17.40.
static void yarn_without_rounding(void **state) {
    const Known known[] = {{0, 1},
                           {4, 0.2254180002},
                           {8, 0.05081327482},
                           {9, 0.03170569618},
                           {12, 0.00679495949},
                           {17, 0.0001293187012},
                           {18, 3.830881237e-05},
                           {31, 3.023511428e-07}};
    const Yarn yarn = {.factor = 32, .positions = 4096, .fast = 32, .slow = 1, .gain = 1.3466};
    expect_of((GPT){.rotary = 64, .rotary_base = 150000, .yarn = yarn}, known, 8);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(without_scaling),       cmocka_unit_test(of_llama_3_1),
        cmocka_unit_test(of_llama_3_2),          cmocka_unit_test(linear),
        cmocka_unit_test(yarn_of_qwen_2_5),      cmocka_unit_test(yarn_with_other_turns),
        cmocka_unit_test(yarn_without_rounding),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
