// LoRA in the complete model. The oracle is the model without adapters whose weights are merged,
// W' = W + s B A: the losses must be equal, and the adapters' gradients follow from its dW' by the
// chain rule, dB = s dW' A^T and dA = s B^T dW'. The fp32 build also uses finite differences,
// which cover the dropout of the adapters' inputs.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "test/unit/model_bench.h"
#include "test/leaks.h"

#define COUNT(list) ((int)(sizeof(list) / sizeof((list)[0])))
enum { N = 24, VOCABULARY = 31 };

static const char *const small_flags[] = {
    "--num-layers",     "2",   "--hidden-size",       "24",  "--num-attention-heads",     "3",
    "--seq-length",     "12",  "--micro-batch-size",  "2",   "--max-position-embeddings", "13",
    "--hidden-dropout", "0.1", "--attention-dropout", "0.1", "--init-method-std",         "0.2"};

// GPT-2, and a Llama with grouped queries and norms of queries and keys.
enum { GPT2, LLAMA, FAMILIES };
static const char *const family_flags[FAMILIES][13] = {
    [LLAMA] = {"--normalization", "RMSNorm", "--position-embedding-type", "rope", "--swiglu",
               "--disable-bias-linear", "--untie-embeddings-and-output-weights", "--ffn-hidden-size", "64",
               "--group-query-attention", "--qk-layernorm"},
};

// Opens a model with initialized weights and a micro-batch. extra: more flags, NULL at the end.
static void open_model(Bench *b, int family, const char *const *extra) {
    const char *flags[64];
    int count = COUNT(small_flags);
    memcpy(flags, small_flags, sizeof small_flags);
    for (const char *const *flag = family_flags[family]; *flag; flag++) flags[count++] = *flag;
    for (; *extra; extra++) flags[count++] = *extra;
    assert_true(bench_open(b, count, flags, VOCABULARY));
    gpt_init_weights(&b->gpt, 7, (Peers){MPI_COMM_SELF, 0, NULL});
    int32_t tokens[N], targets[N];
    for (int i = 0; i < N; i++) {
        tokens[i] = (i * 7 + 3) % VOCABULARY;
        targets[i] = (i * 5 + 1) % VOCABULARY;
    }
    bench_upload(b, tokens, targets);
    zero_step_begins(b->zero, 1);
}

static const char *const no_flags[] = {NULL};
static const char *const lora_flags[] = {"--lora-rank", "8", "--lora-alpha", "4", NULL};

static int64_t numel(const Bench *b, int adapter) { return tensor_elements(&b->gpt.lora.tensor[adapter]); }

// Sets every element of B, which starts at 0, to a multiple of 1/64.
static void fill_b(Bench *b) {
    for (int t = 1; t < b->gpt.lora.tensors; t += 2) {
        floatX *w = zero_weight(b->zero, t);
        for (int64_t i = 0; i < numel(b, t); i++)
            w[i] = floatX_from_float((float)((i * 7 + t) % 9 - 4) / 64.0f);
    }
}

// Returns the number in `base` of the matrix that adapter `a` belongs to.
static int matrix_of(const Bench *b, int a) {
    const char *name = b->gpt.lora.tensor[a].name;
    size_t stem = strlen(name) - strlen("lora_A.weight");
    for (int i = 0; i < b->gpt.tensors; i++) {
        const char *other = b->gpt.tensor[i].name;
        if (strncmp(name, other, stem) == 0 && strcmp(other + stem, "weight") == 0) return i;
    }
    fail_msg("%s has no matrix", name);
    return -1;
}

// Adds s B A to the weights of the plain model.
static void merge(const Bench *lora, Bench *plain) {
    for (int t = 0; t < lora->gpt.lora.tensors; t += 2) {
        int64_t rank = lora->gpt.lora.rank, columns = lora->gpt.lora.tensor[t].whole[1];
        int64_t rows = lora->gpt.lora.tensor[t + 1].whole[0];
        const floatX *A = zero_weight(lora->zero, t), *B = zero_weight(lora->zero, t + 1);
        floatX *w = zero_weight(plain->zero, matrix_of(lora, t));
        for (int64_t i = 0; i < rows * columns; i++) {
            double sum = 0;
            for (int64_t r = 0; r < rank; r++)
                sum += (double)floatX_to_float(B[i / columns * rank + r]) *
                       floatX_to_float(A[r * columns + i % columns]);
            w[i] = floatX_from_float((float)(floatX_to_float(w[i]) + lora->gpt.lora.scale * sum));
        }
    }
}

// Compares with a relative bound on the root mean square of the difference.
static void expect_close(const char *what, const float *ours, const double *wanted, int64_t n) {
    double allowed = sizeof(floatX) == sizeof(float) ? 2e-5 : 0.03, squares = 0, differences = 0;
    for (int64_t i = 0; i < n; i++) {
        squares += wanted[i] * wanted[i];
        differences += (ours[i] - wanted[i]) * (ours[i] - wanted[i]);
    }
    if (!(differences <= allowed * allowed * squares))
        fail_msg("%s: relative error %g, allowed %g", what, sqrt(differences / squares), allowed);
}

// Compares the gradients of adapters t and t + 1 with those that follow from the gradient of the
// merged matrix.
static void check_chain_rule(const Bench *lora, const Bench *plain, int t) {
    int64_t rank = lora->gpt.lora.rank, columns = lora->gpt.lora.tensor[t].whole[1];
    int64_t rows = lora->gpt.lora.tensor[t + 1].whole[0];
    const floatX *A = zero_weight(lora->zero, t), *B = zero_weight(lora->zero, t + 1);
    const float *dw = zero_grad(plain->zero, matrix_of(lora, t));
    double *dA = calloc((size_t)(rank * columns), sizeof *dA),
           *dB = calloc((size_t)(rows * rank), sizeof *dB);
    for (int64_t o = 0; o < rows; o++) {
        for (int64_t c = 0; c < columns; c++) {
            double d = lora->gpt.lora.scale * dw[o * columns + c];
            for (int64_t r = 0; r < rank; r++) {
                dB[o * rank + r] += d * floatX_to_float(A[r * columns + c]);
                dA[r * columns + c] += d * floatX_to_float(B[o * rank + r]);
            }
        }
    }
    expect_close(lora->gpt.lora.tensor[t].name, zero_grad(lora->zero, t), dA, rank * columns);
    expect_close(lora->gpt.lora.tensor[t + 1].name, zero_grad(lora->zero, t + 1), dB, rows * rank);
    free(dA);
    free(dB);
}

static void test_gradients_follow_from_merged_model(void **state) {
    for (int family = 0; family < FAMILIES; family++) {
        Bench lora, plain;
        open_model(&lora, family, lora_flags);
        open_model(&plain, family, no_flags);
        fill_b(&lora);
        merge(&lora, &plain);
        double ours = bench_pass(&lora, 1.0f / N, true, true, true),
               wanted = bench_pass(&plain, 1.0f / N, true, true, true);
        double allowed = sizeof(floatX) == sizeof(float) ? 1e-5 : 5e-3;
        if (fabs(ours - wanted) > allowed) fail_msg("loss %g, merged %g", ours, wanted);
        assert_int_equal(lora.gpt.lora.tensors, 2 * 2 * LAYER_LINEARS);
        for (int t = 0; t < lora.gpt.lora.tensors; t += 2) check_chain_rule(&lora, &plain, t);
        bench_close(&plain);
        bench_close(&lora);
    }
}

static void test_start_equals_base(void **state) {
    for (int family = 0; family < FAMILIES; family++) {
        Bench lora, plain;
        open_model(&lora, family, lora_flags);
        open_model(&plain, family, no_flags);
        float ours = bench_pass(&lora, 1.0f / N, false, false, false),
              wanted = bench_pass(&plain, 1.0f / N, false, false, false);
        assert_memory_equal(lora.gpt.losses, plain.gpt.losses, N * sizeof(float));
        assert_true(ours == wanted);
        bench_close(&plain);
        bench_close(&lora);
    }
}

// A is uniform in +-1 / sqrt(columns), B is zero.
static void test_initial_adapters(void **state) {
    Bench b;
    open_model(&b, LLAMA, lora_flags);
    for (int t = 0; t < b.gpt.lora.tensors; t++) {
        const floatX *w = zero_weight(b.zero, t);
        double largest = 0, squares = 0, bound = 1 / sqrt((double)b.gpt.lora.tensor[t].whole[1]);
        for (int64_t i = 0; i < numel(&b, t); i++) {
            double value = floatX_to_float(w[i]);
            largest = fmax(largest, fabs(value));
            squares += value * value;
        }
        double deviation = sqrt(squares / (double)numel(&b, t)) / bound;
        if (t % 2) assert_true(largest == 0);
        else if (largest > 1.004 * bound || largest < 0.9 * bound || fabs(deviation - sqrt(1.0 / 3)) > 0.08)
            fail_msg("%s: largest %g of %g, deviation %g", b.gpt.lora.tensor[t].name, largest, bound,
                     deviation);
    }
    bench_close(&b);
}

// Copies the adapters' gradients.
static float *gradients_of(const Bench *b) {
    int64_t n = b->zero->base.layout.arena_elements;
    float *copy = malloc((size_t)n * sizeof *copy);
    memcpy(copy, zero_grad(b->zero, 0) - b->zero->base.layout.tensor_arena[0], (size_t)n * sizeof *copy);
    return copy;
}

static void test_full_recompute_is_bit_exact(void **state) {
    static const char *const full[] = {
        "--lora-rank", "8", "--lora-dropout", "0.25", "--recompute-granularity", "full", NULL};
    static const char *const selective[] = {"--lora-rank", "8", "--lora-dropout", "0.25", NULL};
    float *gradients[2];
    int64_t n = 0;
    for (int i = 0; i < 2; i++) {
        Bench b;
        open_model(&b, LLAMA, i ? full : selective);
        fill_b(&b);
        bench_pass(&b, 1.0f / N, true, true, true);
        gradients[i] = gradients_of(&b);
        n = b.zero->base.layout.arena_elements;
        bench_close(&b);
    }
    assert_memory_equal(gradients[0], gradients[1], (size_t)n * sizeof(float));
    for (int i = 0; i < 2; i++) free(gradients[i]);
}

// A step changes every adapter and no frozen weight.
static void test_step_trains_only_adapters(void **state) {
    Bench b;
    open_model(&b, GPT2, lora_flags);
    fill_b(&b);
    zero_init_master_weights(b.zero);
    floatX **before = calloc((size_t)b.gpt.tensors, sizeof *before);
    for (int t = 0; t < b.gpt.tensors; t++) {
        size_t bytes = (size_t)bench_numel(&b, t) * sizeof(floatX);
        before[t] = malloc(bytes);
        memcpy(before[t], frozen_weight(&b.gpt.lora.frozen, t), bytes);
        assert_null(gpt_grad(&b.gpt, t));
    }
    bench_pass(&b, 1.0f / N, true, true, true);
    int adapters = b.gpt.lora.tensors;
    floatX first[64] = {0};
    for (int t = 0; t < adapters; t++) first[t] = zero_weight(b.zero, t)[1];
    zero_update(b.zero, 0.01, 0.01, 0);
    assert_int_equal(zero_step_status(b.zero, 0).applied, 1);
    for (int t = 0; t < adapters; t++)
        assert_true(floatX_to_float(zero_weight(b.zero, t)[1]) != floatX_to_float(first[t]));
    for (int t = 0; t < b.gpt.tensors; t++) {
        assert_memory_equal(before[t], frozen_weight(&b.gpt.lora.frozen, t),
                            (size_t)bench_numel(&b, t) * sizeof(floatX));
        free(before[t]);
    }
    free(before);
    bench_close(&b);
}

static double loss_of(Bench *b) {
    set_zero(b->compute, b->zero->loss_sum, sizeof(float));
    return bench_pass(b, 1.0f / N, false, false, false);
}

// Compares the derivative along the gradient with a difference of losses, for every adapter.
static void test_finite_differences(void **state) {
    static const char *const flags[] = {"--lora-rank", "8", "--lora-dropout", "0.25", NULL};
    if (sizeof(floatX) != sizeof(float)) {
        print_message("finite differences need the fp32 build\n");
        skip();
    }
    for (int family = 0; family < FAMILIES; family++) {
        Bench b;
        open_model(&b, family, flags);
        fill_b(&b);
        bench_pass(&b, 1.0f / N, true, true, true);
        for (int t = 0; t < b.gpt.lora.tensors; t++) {
            int64_t n = numel(&b, t);
            floatX *w = zero_weight(b.zero, t);
            const float *gradient = zero_grad(b.zero, t);
            float *saved = malloc((size_t)n * sizeof *saved);
            double length = 0, h = 4e-3, losses[2];
            for (int64_t i = 0; i < n; i++) length += (double)gradient[i] * gradient[i];
            length = sqrt(length);
            for (int64_t i = 0; i < n; i++) saved[i] = floatX_to_float(w[i]);
            for (int side = 0; side < 2; side++) {
                for (int64_t i = 0; i < n; i++)
                    w[i] = floatX_from_float(saved[i] + (float)((side ? -h : h) * gradient[i] / length));
                losses[side] = loss_of(&b);
            }
            for (int64_t i = 0; i < n; i++) w[i] = floatX_from_float(saved[i]);
            free(saved);
            double measured = (losses[0] - losses[1]) / (2 * h);
            if (fabs(measured - length) > 5e-3 * length + 3e-4)
                fail_msg("%s: %g by differences, %g by backward", b.gpt.lora.tensor[t].name, measured,
                         length);
        }
        bench_close(&b);
    }
}

// --- --lora-base-format --------------------------------------------------------------------------

// Returns x with Phi(x) = p.
static double normal_quantile(double p) {
    double low = -10, high = 10;
    for (int i = 0; i < 200; i++) {
        double middle = (low + high) / 2;
        if (0.5 * erfc(-middle / sqrt(2)) < p) low = middle;
        else high = middle;
    }
    return low;
}

// QLoRA's formula: quantiles at even distances from an offset to 1/2, 8 positive and 7 negative
// ones, divided by the largest.
static void test_nf4_levels(void **state) {
    const double offset = 0.9677083, largest = normal_quantile(offset);
    for (int i = 0; i < 8; i++) {
        double positive = normal_quantile(offset + (0.5 - offset) * (7 - i) / 8) / largest,
               negative = -normal_quantile(offset + (0.5 - offset) * i / 7) / largest;
        assert_true(fabs(nf4_level(8 + i) - positive) < 1e-6);
        assert_true(fabs(nf4_level(i) - negative) < 1e-6);
    }
}

enum { GROUPS = 3, VALUES = GROUPS * FROZEN_GROUP - 10 };  // the last group is not full

static void round_trip(FrozenFormat format, const floatX *values, uint8_t *codes, floatX *scales,
                       floatX *out) {
    frozen_quantize(format, values, VALUES, codes, scales);
    op_dequantize(NULL, &(Dequantize){VALUES, format, codes, scales, out});
}

// Every value becomes the nearest multiple of its group's scale.
static void test_values_are_rounded_to_nearest(void **state) {
    floatX values[VALUES], out[VALUES], scales[GROUPS];
    uint8_t codes[VALUES];
    for (int format = FROZEN_INT8; format <= FROZEN_NF4; format++) {
        for (int i = 0; i < VALUES; i++)
            values[i] = floatX_from_float((float)sin(i * 7.0 + 1) * (float)(1 + i / FROZEN_GROUP));
        round_trip((FrozenFormat)format, values, codes, scales, out);
        for (int i = 0; i < VALUES; i++) {
            double scale = floatX_to_float(scales[i / FROZEN_GROUP]), best = INFINITY;
            double value = floatX_to_float(values[i]);
            for (int code = -127; code <= 127; code++)
                best = fmin(best, fabs(value - code * scale) + (format == FROZEN_NF4 ? INFINITY : 0));
            for (int code = 0; code < NF4_LEVELS && format == FROZEN_NF4; code++)
                best = fmin(best, fabs(value - nf4_level(code) * scale));
            if (!(fabs(value - floatX_to_float(out[i])) <= best + 0.004 * fabs(value)))
                fail_msg("format %d: %g became %g, scale %g", format, value, floatX_to_float(out[i]), scale);
        }
    }
}

// Codes that can be represented are kept. NF4 has the even element in the high bits.
static void test_codes(void **state) {
    floatX values[VALUES], out[VALUES], scales[GROUPS];
    uint8_t codes[VALUES];
    for (int i = 0; i < VALUES; i++) values[i] = floatX_from_float((float)(i % FROZEN_GROUP * 4 - 127));
    round_trip(FROZEN_INT8, values, codes, scales, out);
    for (int i = 0; i < VALUES; i++) assert_int_equal((int8_t)codes[i], i % FROZEN_GROUP * 4 - 127);
    assert_memory_equal(values, out, sizeof values);
    for (int i = 0; i < VALUES; i++) values[i] = floatX_from_float(nf4_level(i % NF4_LEVELS));
    round_trip(FROZEN_NF4, values, codes, scales, out);
    for (int i = 0; i < VALUES / 2; i++) assert_int_equal(codes[i], (2 * i % 16) << 4 | (2 * i % 16 + 1));
    assert_memory_equal(values, out, sizeof values);
    values[70] = floatX_from_float(NAN);  // only its group becomes NaN
    round_trip(FROZEN_NF4, values, codes, scales, out);
    for (int i = 0; i < VALUES; i++)
        assert_int_equal(isnan(floatX_to_float(out[i])) != 0, i / FROZEN_GROUP == 1);
    memset(values, 0, sizeof values);
    round_trip(FROZEN_INT8, values, codes, scales, out);
    assert_memory_equal(values, out, sizeof values);
}

// A quantized model computes with its dequantized weights: a bf16 model with these weights has the
// same losses and gradients.
static void test_quantized_base_equals_dequantized(void **state) {
    static const char *const quantized_flags[][7] = {{"--lora-rank", "8", "--lora-alpha", "4",
                                                      "--lora-base-format", "int8"},
                                                     {"--lora-rank", "8", "--lora-alpha", "4",
                                                      "--lora-base-format", "nf4"}};
    for (int i = 0; i < 2 * FAMILIES; i++) {
        Bench quantized, plain;
        open_model(&quantized, i / 2, quantized_flags[i % 2]);
        open_model(&plain, i / 2, lora_flags);
        fill_b(&quantized);
        fill_b(&plain);
        int changed = 0;
        for (int t = 0; t < plain.gpt.tensors; t++) {
            size_t bytes = (size_t)bench_numel(&plain, t) * sizeof(floatX);
            frozen_use(&quantized.gpt.lora.frozen, t, quantized.compute);
            changed += memcmp(gpt_weight(&plain.gpt, t), gpt_weight(&quantized.gpt, t), bytes) != 0;
            memcpy(gpt_weight(&plain.gpt, t), gpt_weight(&quantized.gpt, t), bytes);
        }
        assert_int_equal(changed, 2 * LAYER_LINEARS);
        bench_pass(&quantized, 1.0f / N, true, true, true);
        bench_pass(&plain, 1.0f / N, true, true, true);
        assert_memory_equal(quantized.gpt.losses, plain.gpt.losses, N * sizeof(float));
        float *ours = gradients_of(&quantized), *wanted = gradients_of(&plain);
        assert_memory_equal(ours, wanted, (size_t)plain.zero->base.layout.arena_elements * sizeof(float));
        free(ours);
        free(wanted);
        bench_close(&plain);
        bench_close(&quantized);
    }
}

// The count from flags, for --plan, equals the table's.
static void test_parameters(void **state) {
    for (int family = 0; family < FAMILIES; family++) {
        const char *const some[] = {"--lora-rank", "8", "--lora-targets", "query_key_value,dense_h_to_4h",
                                    NULL};
        for (int i = 0; i < 2; i++) {
            Bench b;
            int64_t trained = 0, frozen = 0;
            open_model(&b, family, i ? some : lora_flags);
            Parameters own = gpt_trained(&b.gpt);
            for (int t = 0; t < own.whole_tensors; t++) trained += tensor_whole_elements(&own.whole[t]);
            for (int t = 0; t < b.gpt.tensors; t++) frozen += tensor_elements(&b.gpt.tensor[t]);
            assert_int_equal((int64_t)config_lora_parameters(&b.config), trained);
            assert_int_equal(gpt_frozen_parameters(&b.gpt).own, frozen);
            assert_int_equal(gpt_frozen_parameters(&b.gpt).whole, frozen);
            bench_close(&b);
        }
    }
}

static void test_targets(void **state) {
    static const struct {
        const char *list;
        int targets;  // -1: refused
    } cases[] = {{"all-linear", LORA_ALL},
                 {"query_key_value", LORA_QKV},
                 {"q_proj,k_proj,v_proj,o_proj", LORA_QKV | LORA_PROJ},
                 {"up_proj,gate_proj,down_proj", LORA_FC1 | LORA_FC2},
                 {"c_attn,c_proj", LORA_QKV | LORA_PROJ | LORA_FC2},
                 {"linear_fc1", LORA_FC1},
                 {"q_proj,v_proj", -1},
                 {"gate_proj", -1},
                 {"lm_head", -1},
                 {"", -1}};
    for (int i = 0; i < COUNT(cases); i++) {
        Config config = {.lora_targets = cases[i].list};
        int targets;
        Error err;
        bool ok = config_lora_targets(&config, &targets, &err);
        assert_int_equal(ok, cases[i].targets >= 0);
        if (ok) assert_int_equal(targets, cases[i].targets);
        else assert_int_equal(err.code, EXIT_USAGE);
    }
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_targets),
        cmocka_unit_test(test_parameters),
        cmocka_unit_test(test_initial_adapters),
        cmocka_unit_test(test_nf4_levels),
        cmocka_unit_test(test_values_are_rounded_to_nearest),
        cmocka_unit_test(test_codes),
        cmocka_unit_test(test_quantized_base_equals_dequantized),
        cmocka_unit_test(test_start_equals_base),
        cmocka_unit_test(test_gradients_follow_from_merged_model),
        cmocka_unit_test(test_full_recompute_is_bit_exact),
        cmocka_unit_test(test_step_trains_only_adapters),
        cmocka_unit_test(test_finite_differences),
    };
    Launch launch;
    leaks_launch(&launch, &argc, &argv);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    failed += leaks_found();
    launch_finalize(&launch);
    return failed;
}
