// The table of presets: the flags of each preset against the config that --plan derives for it,
// predicted against measured codec errors, and the choice of a preset.
#include <math.h>

#include "../config/command_line.h"
#include "llmc/base/normal.h"
#include "llmc/plan/plan_report.h"

static void same_text(Config *a, Config *b, const char *name) {
    char *one = config_to_json(a), *other = config_to_json(b);
    if (strcmp(one, other) != 0) fail_msg("%s:\n%s\n%s", name, one, other);
    free(one);
    free(other);
}

// preset_config must reset all quantization settings of the run.
static void flags_match_the_preset(void **state) {
    static const char *const runs[] = {
        SMALL, SMALL "@configs/sdp4bit.args", SMALL "--grad-reduce-in-bf16", SMALL "@configs/eden.args",
        SMALL "--quantized-weights --quantized-gradients --gradient-quantization-bits-intra 4"};
    for (int i = 0; i < PRESETS; i++) {
        char line[1024];
        Run flags, run;
        snprintf(line, sizeof line, SMALL "%s", i ? presets[i].flags : "");
        must_run(&flags, line, 2);
        for (size_t k = 0; k < sizeof runs / sizeof *runs; k++) {
            must_run(&run, runs[k], 2);
            Config preset = preset_config(&run.config, &presets[i]);
            preset = preset_config(&preset, &presets[i]);
            Config wanted = preset_config(&flags.config, &presets[i]);
            same_text(&flags.config, &wanted, presets[i].name);
            assert_int_equal(preset.quantized_gradients, flags.config.quantized_gradients);
            assert_int_equal(preset.quantized_weights, flags.config.quantized_weights);
            assert_int_equal(preset.grad_reduce_in_bf16, flags.config.grad_reduce_in_bf16);
            assert_int_equal(preset.hadamard_transform, flags.config.hadamard_transform);
            config_free(&run.config);
        }
        config_free(&flags.config);
    }
}

static void eden_decoded(const float *x, uint32_t largest, int bits, float *decoded) {
    float squares = 0, product = 0;
    for (int i = 0; i < EDEN_GROUP; i++) squares += x[i] * x[i];
    float inverse = eden_inverse(squares, f32_from_bits(largest));
    for (int i = 0; i < EDEN_GROUP; i++) {
        decoded[i] = eden_value(eden_code(fabsf(x[i]) * inverse, x[i] < 0, bits), bits);
        product += x[i] * decoded[i];
    }
    for (int i = 0; i < EDEN_GROUP; i++) decoded[i] *= eden_scale(squares, product, 1);
}

static void uniform_decoded(const float *x, int group, uint32_t largest, int levels, uint32_t g,
                            Rounding rounding, float *decoded) {
    GroupScale scale = group_scale(largest, levels);
    for (int i = 0; i < group; i++) {
        uint32_t random = philox4x32(7, 4, 5, (uint32_t)i, g, 6, 0).v[0] & 0xFFFFu;
        float v = group_scaled(x[i], scale);
        int q = rounding == ROUND_NEAREST ? code_nearest(v, levels) : code_stochastic(v, levels, random);
        decoded[i] = code_value(q, scale.scale);
    }
}

// Measures the error of a codec on Gaussian values.
static double measured(Codec codec, int group, Rounding rounding) {
    CodecInfo info = codec_info(codec);
    double error = 0, square = 0;
    float x[2048], decoded[2048];
    for (uint32_t g = 0; g < 200; g++) {
        uint32_t largest = 0;
        for (int i = 0; i < group; i += 2) {
            double two[2];
            normal_pair(philox4x32(10, 1, 2, (uint32_t)i, g, 3, (uint32_t)group), two);
            for (int k = 0; k < 2; k++) {
                x[i + k] = (float)two[k];
                uint32_t size = f32_bits(x[i + k]) & 0x7FFFFFFFu;
                if (size > largest) largest = size;
            }
        }
        if (codec_eden(codec)) eden_decoded(x, largest, info.bits, decoded);
        else uniform_decoded(x, group, largest, info.levels, g, rounding, decoded);
        for (int i = 0; i < group; i++) {
            double off = (double)decoded[i] - (double)x[i];
            error += off * off;
            square += (double)x[i] * (double)x[i];
        }
    }
    return error / square;
}

static void errors_match_the_codecs(void **state) {
    static const struct {
        Codec codec;
        int group;
        Rounding rounding;
    } cases[] = {{CODEC_INT4, 128, ROUND_STOCHASTIC}, {CODEC_INT4, 512, ROUND_STOCHASTIC},
                 {CODEC_INT8, 128, ROUND_STOCHASTIC}, {CODEC_INT4, 2048, ROUND_NEAREST},
                 {CODEC_EDEN4, 256, ROUND_NEAREST},   {CODEC_EDEN3, 256, ROUND_NEAREST},
                 {CODEC_EDEN2, 256, ROUND_NEAREST}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double computed = codec_gaussian_error(cases[i].codec, cases[i].group, cases[i].rounding);
        double found = measured(cases[i].codec, cases[i].group, cases[i].rounding);
        if (fabs(computed / found - 1) < (codec_eden(cases[i].codec) ? 0.08 : 0.03)) continue;
        fail_msg("case %zu: %g computed, %g found", i, computed, found);
    }
    assert_true(codec_gaussian_error(CODEC_FP32, 0, ROUND_NEAREST) == 0);
}

static void bf16_rounds_to_nearest(void **state) {
    double error = 0, square = 0;
    for (uint32_t i = 0; i < 20000; i++) {
        double two[2];
        normal_pair(philox4x32(10, 7, 8, i, 9, 0, 0), two);
        float x = (float)two[0];
        double off = (double)bf16_to_float(bf16_from_float(x)) - (double)x;
        error += off * off;
        square += (double)x * (double)x;
    }
    assert_float_equal(codec_gaussian_error(CODEC_BF16, 0, ROUND_NEAREST) / (error / square), 1, 0.2);
}

// The errors of both levels add up. int8 inside the node adds little to int4 between nodes.
static void levels_add_up(void **state) {
    GradFormat format = {.intra_codec = CODEC_INT8,
                         .inter_codec = CODEC_INT4,
                         .intra_group = 128,
                         .inter_group = 128,
                         .rounding = ROUND_STOCHASTIC};
    double eight = codec_gaussian_error(CODEC_INT8, 128, ROUND_STOCHASTIC);
    double four = codec_gaussian_error(CODEC_INT4, 128, ROUND_STOCHASTIC);
    assert_float_equal(preset_gradient_error(&format, true, true), sqrt(eight + four), 1e-12);
    assert_float_equal(preset_gradient_error(&format, true, false), sqrt(eight), 1e-12);
    assert_float_equal(preset_gradient_error(&format, false, true), sqrt(four), 1e-12);
    assert_true(preset_gradient_error(&format, false, false) == 0);
}

// A later preset in the table is chosen only if it is sufficiently faster.
static void larger_changes_must_be_faster(void **state) {
    int local = PRESETS - 1;
    double ms[PRESETS] = {0};
    assert_int_equal(preset_choose(ms), -1);
    for (int i = 0; i < PRESETS; i++) ms[i] = 100;
    assert_int_equal(preset_choose(ms), 0);
    ms[2] = 91;
    assert_int_equal(preset_choose(ms), 0);
    ms[2] = 90;
    assert_int_equal(preset_choose(ms), 2);
    ms[4] = 85;
    assert_int_equal(preset_choose(ms), 2);
    ms[local] = 61;
    assert_int_equal(preset_choose(ms), 2);
    ms[local] = 60;
    assert_int_equal(preset_choose(ms), local);
    assert_string_equal(presets[local].name, "local");
    ms[0] = ms[2] = ms[local] = 0;
    assert_int_equal(preset_choose(ms), 4);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(flags_match_the_preset),        cmocka_unit_test(errors_match_the_codecs),
        cmocka_unit_test(bf16_rounds_to_nearest),        cmocka_unit_test(levels_add_up),
        cmocka_unit_test(larger_changes_must_be_faster),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
