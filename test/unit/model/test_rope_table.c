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
static void expect(int head, double stretch, const Known *known, int count) {
    enum { T = 65 };
    GPT gpt;
    Error err = {0};
    Site site = {0};
    Device *device = device_open(0, &site, &err);
    memset(&gpt, 0, sizeof gpt);
    gpt.stream = stream_create(device, "compute");
    gpt.T = T;
    gpt.rotary = head;
    gpt.rotary_base = 500000;
    gpt.rotary_stretch = stretch;
    float *turns = gpt.rope_table = malloc((size_t)T * (size_t)head * sizeof(float));
    gpt_upload_rope_table(&gpt);
    for (int i = 0; i < count; i++) {
        double frequency = known[i].frequency;
        int t = frequency < 0.04 ? 64 : 1, column = known[i].column;
        double got = atan2(turns[t * head + head / 2 + column], turns[t * head + column]) / t;
        if (fabs(got - frequency) > 2e-6 * frequency + 1e-9)
            fail_msg("head %d, column %d: frequency %.9g, not %.9g", head, column, got, frequency);
    }
    free(turns);
    stream_destroy(gpt.stream);
    device_close(device);
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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(without_scaling),
        cmocka_unit_test(of_llama_3_1),
        cmocka_unit_test(of_llama_3_2),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
