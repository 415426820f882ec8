// Delayed scaling (llmc/model/fp8_scaling.c) against Transformer Engine's rules, applied to a list
// of all maxima; which passes enter the histories; saving and restoring the state.
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "test/leaks.h"
#include "test/random.h"
#include "test/unit/model_bench.h"

enum { SCALES = 2 * LAYER_LINEARS * FP8_OPERANDS, STEPS = 12, WORDS = 64 };

// Settings of a run.
typedef struct Settings {
    const char *format, *recipe, *algo, *length, *margin;
} Settings;

static void open_model(Bench *b, Settings s) {
    const char *const flags[] = {"--num-layers",
                                 "2",
                                 "--hidden-size",
                                 "32",
                                 "--num-attention-heads",
                                 "2",
                                 "--seq-length",
                                 "16",
                                 "--max-position-embeddings",
                                 "16",
                                 "--micro-batch-size",
                                 "2",
                                 "--global-batch-size",
                                 "2",
                                 "--fp8-format",
                                 s.format,
                                 "--fp8-recipe",
                                 s.recipe,
                                 "--fp8-amax-compute-algo",
                                 s.algo,
                                 "--fp8-amax-history-len",
                                 s.length,
                                 "--fp8-margin",
                                 s.margin};
    assert_true(bench_open(b, (int)(sizeof flags / sizeof flags[0]), flags, WORDS));
}
static const Settings SIMPLE = {"hybrid", "delayed", "max", "3", "0"};

static void get_scales(Bench *b, Fp8Scale *scale) {
    copy_to_host(b->compute, scale, b->gpt.fp8.scale, SCALES * sizeof *scale);
    stream_synchronize(b->compute);
}
static void set_absmax(Bench *b, const float *absmax) {
    Fp8Scale scale[SCALES];
    get_scales(b, scale);
    for (int i = 0; i < SCALES; i++) scale[i].absmax = f32_bits(absmax[i]);
    copy_to_device(b->compute, b->gpt.fp8.scale, scale, sizeof scale);
    stream_synchronize(b->compute);
}

// Everything that Transformer Engine knows about a tensor.
typedef struct Reference {
    float entry[STEPS];  // maxima of steps, oldest first
    int entries;
    float scale;
} Reference;

static void reference_step(Reference *r, float absmax, float fp8_max, int length, bool most_recent,
                           int margin) {
    if (absmax == 0) return;  // not quantized in this step
    r->entry[r->entries++] = isfinite(absmax) ? absmax : 0;
    float amax = 0;
    for (int i = 0; i < length && i < r->entries; i++) {
        float entry = r->entry[r->entries - 1 - i];
        if (i == 0 || (!most_recent && entry > amax)) amax = entry;
    }
    if (amax == 0) return;
    r->scale = fp8_max / powf(2, (float)margin) / amax;
    if (isinf(r->scale)) r->scale = FLT_MAX;
}

static float random_absmax(Random *r) {
    switch (random_u64(r) % 8) {
        case 0: return 0;
        case 1: return INFINITY;
        case 2: return NAN;
        case 3: return 0x1p-140f;  // its scale is beyond fp32
        default: return expf(4 * (float)random_normal(r));
    }
}

static void check_rules(Settings s) {
    Bench b;
    Random random = {(uint64_t)s.length[0]};
    Reference reference[SCALES] = {{{0}, 0, 0}};
    Fp8Scale scale[SCALES];
    int length = atoi(s.length), margin = atoi(s.margin);
    open_model(&b, s);
    for (int i = 0; i < SCALES; i++) reference[i].scale = 1;
    for (int step = 0; step < STEPS; step++) {
        float absmax[SCALES];
        for (int i = 0; i < SCALES; i++) {
            float largest = strcmp(s.format, "hybrid") == 0 && i % FP8_OPERANDS == FP8_GRADIENT ? 57344 : 448;
            absmax[i] = random_absmax(&random);
            reference_step(&reference[i], absmax[i], largest, length, s.algo[1] == 'o', margin);
        }
        set_absmax(&b, absmax);
        fp8_gather_maxima(&b.gpt);
        fp8_update_scales(&b.gpt);
        get_scales(&b, scale);
        Fp8State state = fp8_get_state(&b.gpt);
        assert_int_equal(state.scales, SCALES);
        assert_int_equal(state.length, length);
        for (int i = 0; i < SCALES; i++) {
            const Reference *r = &reference[i];
            assert_true(scale[i].scale == r->scale && state.scale[i] == r->scale);
            assert_true(scale[i].inverse == 1.0f / r->scale && scale[i].absmax == 0);
            for (int k = 1; k <= length; k++) {
                float entry = k <= r->entries ? r->entry[r->entries - k] : 0;
                assert_true(state.history[(i + 1) * length - k] == entry);
            }
        }
        fp8_state_free(&state);
    }
    bench_close(&b);
}

static void rules_of_transformer_engine(void **state) {
    static const char *const formats[] = {"hybrid", "e4m3"}, *const algos[] = {"most_recent", "max"},
                             *const lengths[] = {"1", "2", "5", "20"}, *const margins[] = {"0", "3"};
    for (int i = 0; i < 32; i++) {
        check_rules(
            (Settings){formats[i & 1], "delayed", algos[i >> 1 & 1], lengths[i >> 2 & 3], margins[i >> 4]});
    }
}

// --- passes --------------------------------------------------------------------------------------

static void load(Bench *b) {
    int32_t tokens[32], targets[32];
    for (int i = 0; i < 32; i++) tokens[i] = i * 7 % WORDS, targets[i] = i * 5 % WORDS;
    bench_upload(b, tokens, targets);
    gpt_init_weights(&b->gpt, 1, (Peers){MPI_COMM_SELF, 0, &b->site});
    zero_init_master_weights(b->zero);
    zero_step_begins(b->zero, 1);
}

// Returns the largest absolute value of the weights.
static float largest_weight(Bench *b, int layer, enum LayerTensor which) {
    int tensor = gpt_layer_tensor(&b->gpt, layer, which);
    int64_t n = bench_numel(b, tensor);
    floatX *host = malloc((size_t)n * sizeof *host);
    float largest = 0;
    copy_to_host(b->compute, host, zero_weight(b->zero, tensor), (size_t)n * sizeof *host);
    stream_synchronize(b->compute);
    for (int64_t i = 0; i < n; i++) largest = fmaxf(largest, fabsf(floatX_to_float(host[i])));
    free(host);
    return largest;
}

static void a_step_fills_every_history(void **state) {
    static const enum LayerTensor weights[LAYER_LINEARS] = {QKV_W, PROJ_W, FC1_W, FC2_W};
    Bench b;
    Fp8Scale first[SCALES], scale[SCALES];
    open_model(&b, SIMPLE);
    load(&b);
    bench_pass(&b, 1.0f / 32, true, true, false);
    get_scales(&b, first);
    bench_pass(&b, 1.0f / 32, true, false, true);
    get_scales(&b, scale);
    Fp8State after = fp8_get_state(&b.gpt);
    for (int i = 0; i < SCALES; i++) {
        float newest = after.history[3 * i + 2];
        assert_true(newest > 0 && after.history[3 * i] == 0 && after.history[3 * i + 1] == 0);
        assert_true(f32_bits(newest) >= first[i].absmax && scale[i].absmax == 0);
    }
    for (int layer = 0; layer < 2; layer++) {
        for (int which = 0; which < LAYER_LINEARS; which++) {
            int i = fp8_scale_index(layer, (LayerLinear)which, FP8_WEIGHT);
            assert_true(after.history[3 * i + 2] == largest_weight(&b, layer, weights[which]));
        }
    }
    fp8_state_free(&after);
    bench_close(&b);
}

// Without histories, each tensor of the first micro-batch is quantized with the scale of its own
// maximum. The other micro-batches and steps keep the scales until a step ends.
static void check_first_scales(const char *margin) {
    Bench b;
    Fp8Scale first[SCALES], second[SCALES], later[SCALES];
    open_model(&b, (Settings){"hybrid", "delayed", "max", "3", margin});
    load(&b);
    bench_pass(&b, 1.0f / 32, true, true, false);
    get_scales(&b, first);
    for (int i = 0; i < SCALES; i++) {
        Fp8Type type = i % FP8_OPERANDS == FP8_GRADIENT ? FP8_E5M2 : FP8_E4M3;
        assert_true(first[i].scale != 1 &&
                    first[i].scale == fp8_scale(first[i].absmax, type, atoi(margin), 1));
    }
    bench_pass(&b, 1.0f / 64, true, false, false);
    get_scales(&b, second);
    for (int i = 0; i < SCALES; i++) assert_true(second[i].scale == first[i].scale);
    bench_pass(&b, 1.0f / 32, true, false, true);
    get_scales(&b, second);
    bench_pass(&b, 1.0f / 8, true, true, false);  // the next step, with larger gradients
    get_scales(&b, later);
    for (int i = 0; i < SCALES; i++) assert_true(later[i].scale == second[i].scale);
    bench_close(&b);
}

static void the_first_micro_batch_sets_scales(void **state) {
    check_first_scales("0");
    check_first_scales("2");
}

static void other_passes_leave_no_trace(void **state) {
    Bench b;
    Fp8Scale before[SCALES], after[SCALES];
    open_model(&b, SIMPLE);
    load(&b);
    get_scales(&b, before);
    Pass evaluation = {.B = 2, .T = 16, .first = true};
    gpt_forward(&b.gpt, &evaluation);
    gpt_head(&b.gpt, &evaluation);
    get_scales(&b, after);
    assert_memory_equal(before, after, sizeof before);
    Pass training = {.B = 2, .T = 16, .training = true, .backward = true};
    gpt_warm_up(&b.gpt, &training);
    get_scales(&b, after);
    assert_memory_equal(before, after, sizeof before);
    bench_close(&b);
}

// The maxima of a skipped step are dropped, whatever they are.
static void skipped_steps_leave_no_trace(void **state) {
    Bench b;
    Fp8Scale before[SCALES], after[SCALES];
    float absmax[SCALES];
    StepStatus status;
    open_model(&b, SIMPLE);
    for (int i = 0; i < SCALES; i++) absmax[i] = 1 + (float)i;
    set_absmax(&b, absmax);
    fp8_gather_maxima(&b.gpt);
    fp8_update_scales(&b.gpt);
    get_scales(&b, before);
    Fp8State kept = fp8_get_state(&b.gpt);
    copy_to_host(b.compute, &status, zero_status_on_device(b.zero), sizeof status);
    stream_synchronize(b.compute);
    status.applied = 0;
    copy_to_device(b.compute, b.zero->base.control, &status, sizeof status);
    for (int i = 0; i < SCALES; i++) absmax[i] = i % 3 ? 1e38f : INFINITY;
    set_absmax(&b, absmax);
    fp8_gather_maxima(&b.gpt);
    fp8_update_scales(&b.gpt);
    get_scales(&b, after);
    assert_memory_equal(before, after, sizeof before);  // absmax is 0 again
    Fp8State now = fp8_get_state(&b.gpt);
    assert_memory_equal(kept.history, now.history, (size_t)(SCALES * kept.length) * sizeof(float));
    fp8_state_free(&kept);
    fp8_state_free(&now);
    bench_close(&b);
}

static void other_recipes_have_no_state(void **state) {
    static const Settings none[] = {{"hybrid", "tensorwise", "max", "3", "0"},
                                    {"none", "delayed", "max", "3", "0"}};
    Fp8State delayed = fp8_state_new(SCALES, 1);
    for (int i = 0; i < 2; i++) {
        Bench b;
        open_model(&b, none[i]);
        fp8_gather_maxima(&b.gpt);
        fp8_update_scales(&b.gpt);
        Fp8State empty = fp8_get_state(&b.gpt);
        assert_int_equal(empty.scales, 0);
        assert_false(fp8_set_state(&b.gpt, &delayed));
        bench_close(&b);
    }
    fp8_state_free(&delayed);
}

// --- checkpoints ---------------------------------------------------------------------------------

// Runs a few steps with random maxima.
static Fp8State after_some_steps(Settings s) {
    Bench b;
    Random random = {5};
    open_model(&b, s);
    for (int step = 0; step < STEPS; step++) {
        float absmax[SCALES];
        for (int i = 0; i < SCALES; i++) absmax[i] = random_absmax(&random);
        set_absmax(&b, absmax);
        fp8_gather_maxima(&b.gpt);
        fp8_update_scales(&b.gpt);
    }
    Fp8State state = fp8_get_state(&b.gpt);
    bench_close(&b);
    return state;
}

static void restores_bit_exactly(void **state) {
    static const Settings all[] = {{"hybrid", "delayed", "max", "3", "1"},
                                   {"e4m3", "delayed", "most_recent", "1", "0"},
                                   {"hybrid", "delayed", "most_recent", "4", "0"}};
    for (int i = 0; i < 3; i++) {
        Bench b;
        Fp8State saved = after_some_steps(all[i]);
        open_model(&b, all[i]);
        assert_true(fp8_set_state(&b.gpt, &saved));
        Fp8State again = fp8_get_state(&b.gpt);
        size_t entries = (size_t)(SCALES * saved.length);
        assert_memory_equal(again.scale, saved.scale, SCALES * sizeof(float));
        assert_memory_equal(again.history, saved.history, entries * sizeof(float));
        fp8_state_free(&again);
        fp8_state_free(&saved);
        bench_close(&b);
    }
}

static void another_length_keeps_the_newest(void **state) {
    static const char *const lengths[] = {"2", "7"};
    Fp8State saved = fp8_state_new(SCALES, 4);
    for (int i = 0; i < SCALES; i++) {
        saved.scale[i] = 1;
        for (int k = 0; k < 4; k++) saved.history[4 * i + k] = (float)(8 >> k);
    }
    for (int l = 0; l < 2; l++) {
        Bench b;
        int length = atoi(lengths[l]);
        open_model(&b, (Settings){"e4m3", "delayed", "max", lengths[l], "0"});
        assert_true(fp8_set_state(&b.gpt, &saved));
        Fp8State now = fp8_get_state(&b.gpt);
        for (int i = 0; i < SCALES; i++) {
            for (int k = 1; k <= length; k++) {
                float entry = k <= 4 ? saved.history[4 * (i + 1) - k] : 0;
                assert_true(now.history[length * (i + 1) - k] == entry);
            }
            assert_true(now.scale[i] == 448.0f / (length == 2 ? 2 : 8));
        }
        fp8_state_free(&now);
        bench_close(&b);
    }
    fp8_state_free(&saved);
}

// Scales follow from the new flags at once, so that no gradient of the first step is clipped.
static void another_format_changes_scales(void **state) {
    Bench b;
    Fp8State saved = fp8_state_new(SCALES, 1), other = fp8_state_new(SCALES + 1, 1);
    for (int i = 0; i < SCALES; i++) saved.scale[i] = 57344.0f / 7, saved.history[i] = i ? 7 : 0;
    open_model(&b, (Settings){"e4m3", "delayed", "most_recent", "1", "2"});
    assert_false(fp8_set_state(&b.gpt, &other));
    assert_true(fp8_set_state(&b.gpt, &saved));
    Fp8State now = fp8_get_state(&b.gpt);
    for (int i = 0; i < SCALES; i++) assert_true(now.scale[i] == (i ? 112.0f / 7 : 57344.0f / 7));
    fp8_state_free(&now);
    fp8_state_free(&saved);
    fp8_state_free(&other);
    bench_close(&b);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rules_of_transformer_engine),
        cmocka_unit_test(a_step_fills_every_history),
        cmocka_unit_test(the_first_micro_batch_sets_scales),
        cmocka_unit_test(other_passes_leave_no_trace),
        cmocka_unit_test(skipped_steps_leave_no_trace),
        cmocka_unit_test(other_recipes_have_no_state),
        cmocka_unit_test(restores_bit_exactly),
        cmocka_unit_test(another_length_keeps_the_newest),
        cmocka_unit_test(another_format_changes_scales),
    };
    Launch launch;
    leaks_launch(&launch, &argc, &argv);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    failed += leaks_found();
    launch_finalize(&launch);
    return failed;
}
