// The complete GPT (llmc/model) against PyTorch: logits, losses, every gradient, ten AdamW steps.
// The fp32 build also compares with finite differences. Recomputation must be bitwise identical.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "test/unit/model_bench.h"
#include "test/golden/golden.h"
#include "test/golden/gpt/llama_losses.h"
#include "test/leaks.h"

#define GOLDEN "test/golden/gpt/gpt.golden"
#define COUNT(list) ((int)(sizeof(list) / sizeof((list)[0])))

// In bf16 the error must be at most twice the error of PyTorch in bf16. In fp32 the results must
// agree closely.
static void expect_close(const Golden *g, const char *name, const float *ours, const float *reference,
                         int64_t n) {
    char key[160];
    double squares = 0, worst = 0, scale = 0;
    for (int64_t i = 0; i < n; i++) {
        double error = fabs((double)ours[i] - reference[i]);
        squares += error * error;
        worst = fmax(worst, isnan(error) ? INFINITY : error);
        scale = fmax(scale, fabs((double)reference[i]));
    }
    snprintf(key, sizeof key, "error.%s", name);
    const float *allowed = golden_f32(g, key, NULL);
    assert_non_null(allowed);
    double rms = sqrt(squares / (double)n), rms_limit, worst_limit;
    if (sizeof(floatX) == sizeof(float)) {
        rms_limit = worst_limit = 2e-5 * scale + 1e-7;
    } else {
        rms_limit = 2.0 * allowed[0] + 1e-6 * scale;
        worst_limit = 2.0 * allowed[1] + 1e-3 * scale;  // one large rounding error among n
    }
    if (!(rms <= rms_limit && worst <= worst_limit)) {
        fail_msg("%s: rms error %g (allowed %g), largest %g (allowed %g), scale %g", name, rms, rms_limit,
                 worst, worst_limit, scale);
    }
}

static void fill_from_golden(Bench *b, const Golden *g) {
    for (int i = 0; i < b->gpt.tensors; i++) {
        char key[160];
        int64_t n, wanted = bench_numel(b, i);
        snprintf(key, sizeof key, "weight.%s", b->gpt.tensor[i].name);
        const uint16_t *stored = golden_bf16(g, key, &n);
        assert_non_null(stored);
        assert_int_equal(n, wanted);
        floatX *host = malloc((size_t)n * sizeof *host);
        for (int64_t j = 0; j < n; j++) host[j] = floatX_from_float(bf16_to_float(stored[j]));
        copy_to_device(b->compute, zero_weight(b->zero, i), host, (size_t)n * sizeof *host);
        free(host);
    }
    zero_init_master_weights(b->zero);
}

static void open_golden(Bench *b, Golden *g) {
    static const char *const flags[] = {"--num-layers",
                                        "3",
                                        "--hidden-size",
                                        "48",
                                        "--num-attention-heads",
                                        "3",
                                        "--seq-length",
                                        "16",
                                        "--max-position-embeddings",
                                        "16",
                                        "--micro-batch-size",
                                        "4",
                                        "--global-batch-size",
                                        "8",
                                        "--hidden-dropout",
                                        "0",
                                        "--attention-dropout",
                                        "0",
                                        "--adam-beta2",
                                        "0.95",
                                        "--weight-decay",
                                        "0.1",
                                        "--clip-grad",
                                        "1.0"};
    assert_true(golden_open(g, GOLDEN));
    const int32_t *config = golden_i32(g, "config", NULL);
    assert_true(config[0] == 3 && config[1] == 48 && config[2] == 3 && config[3] == 16 && config[4] == 128 &&
                config[5] == 4);
    assert_true(bench_open(b, COUNT(flags), flags, 128));
    fill_from_golden(b, g);
}

static void test_forward_matches_pytorch(void **state) {
    Bench b;
    Golden g;
    open_golden(&b, &g);
    bench_upload(&b, golden_i32(&g, "tokens", NULL), golden_i32(&g, "targets", NULL));
    int N = b.gpt.B * b.gpt.T, V = b.gpt.V;
    zero_step_begins(b.zero, 1);
    float loss = bench_pass(&b, 1.0f / (float)N, false, false, false);
    floatX *logits = malloc((size_t)(N * V) * sizeof *logits);
    float *wide = malloc((size_t)(N * V) * sizeof *wide);
    op_linear_forward(b.compute, &(Linear){.N = N,
                                           .C = b.gpt.C,
                                           .OC = V,
                                           .x = b.gpt.lnf.y,
                                           .w = zero_weight(b.zero, GPT_WTE),
                                           .y = logits,
                                           .workspace = b.gpt.workspace});
    for (int i = 0; i < N * V; i++) wide[i] = floatX_to_float(logits[i]);
    expect_close(&g, "logits", wide, golden_f32(&g, "logits", NULL), N * V);
    expect_close(&g, "losses", b.gpt.losses, golden_f32(&g, "losses", NULL), N);
    expect_close(&g, "loss", &loss, golden_f32(&g, "loss", NULL), 1);
    free(logits);
    free(wide);
    golden_close(&g);
    bench_close(&b);
}

// The key bias does not change the softmax, so its computed gradient is only rounding noise.
static bool noise(const Bench *b, int tensor, int64_t element) {
    bool qkv_bias = strstr(b->gpt.tensor[tensor].name, "query_key_value.bias") != NULL;
    return qkv_bias && element / b->gpt.HD % 3 == 1;
}

static void compare_tensor(Bench *b, const Golden *g, int tensor, const char *kind, const float *ours,
                           const float *reference) {
    char name[160];
    int64_t n = bench_numel(b, tensor), kept = 0;
    float *x = malloc((size_t)n * sizeof *x), *y = malloc((size_t)n * sizeof *y);
    for (int64_t i = 0; i < n; i++) {
        if (noise(b, tensor, i)) continue;
        x[kept] = ours[i];
        y[kept++] = reference[i];
    }
    snprintf(name, sizeof name, "%s.%s", kind, b->gpt.tensor[tensor].name);
    expect_close(g, name, x, y, kept);
    free(x);
    free(y);
}

static void test_gradients_match_pytorch(void **state) {
    Bench b;
    Golden g;
    open_golden(&b, &g);
    bench_upload(&b, golden_i32(&g, "tokens", NULL), golden_i32(&g, "targets", NULL));
    zero_step_begins(b.zero, 1);
    bench_pass(&b, 1.0f / (float)(b.gpt.B * b.gpt.T), true, true, true);
    for (int i = 0; i < b.gpt.tensors; i++) {
        char key[160];
        snprintf(key, sizeof key, "gradient.%s", b.gpt.tensor[i].name);
        const float *reference = golden_f32(&g, key, NULL);
        assert_non_null(reference);
        compare_tensor(&b, &g, i, "gradient", zero_grad(b.zero, i), reference);
    }
    golden_close(&g);
    bench_close(&b);
}

// Runs one optimizer step over two micro-batches and returns the step status.
static StepStatus golden_step(Bench *b, const Golden *g, int step) {
    int N = b->gpt.B * b->gpt.T;
    const int32_t *tokens = golden_i32(g, "tokens", NULL), *targets = golden_i32(g, "targets", NULL);
    zero_step_begins(b->zero, step + 1);
    for (int k = 0; k < 2; k++) {
        bench_upload(b, tokens + (2 * step + k) * N, targets + (2 * step + k) * N);
        bench_pass(b, 0.5f / (float)N, true, k == 0, k == 1);
    }
    double lr = golden_f32(g, "learning_rates", NULL)[step];
    zero_update(b->zero, lr, lr, golden_f32(g, "adam", NULL)[3]);
    return zero_step_status(b->zero, 0);
}

static void test_ten_steps_match_pytorch(void **state) {
    Bench b;
    Golden g;
    open_golden(&b, &g);
    const float *loss = golden_f32(&g, "steps.loss", NULL), *norm = golden_f32(&g, "steps.norm", NULL);
    const float *bf16_loss = golden_f32(&g, "steps.bf16_loss", NULL),
                *bf16_norm = golden_f32(&g, "steps.bf16_norm", NULL);
    bool fp32 = sizeof(floatX) == sizeof(float);
    double loss_error = 0, norm_error = 0, loss_allowed = 0, norm_allowed = 0;
    for (int step = 0; step < 10; step++) {
        StepStatus control = golden_step(&b, &g, step);
        assert_int_equal(control.applied, 1);
        assert_int_equal(control.adam_steps, step + 1);
        loss_error = fmax(loss_error, fabs(control.loss - loss[step]));
        norm_error = fmax(norm_error, fabs(control.grad_norm - norm[step]) / norm[step]);
        loss_allowed = fmax(loss_allowed, fabs(bf16_loss[step] - loss[step]));
        norm_allowed = fmax(norm_allowed, fabs(bf16_norm[step] - norm[step]) / norm[step]);
    }
    if (loss_error > (fp32 ? 1e-4 : 2 * loss_allowed + 1e-3))
        fail_msg("loss differs by %g, PyTorch bf16 by %g", loss_error, loss_allowed);
    if (norm_error > (fp32 ? 1e-3 : 2 * norm_allowed + 1e-3))
        fail_msg("norm differs by %g, PyTorch bf16 by %g", norm_error, norm_allowed);
    golden_close(&g);
    bench_close(&b);
}

// Compares the change of the master weights over ten steps, tensor by tensor.
static void test_master_weights_match_pytorch(void **state) {
    Bench b;
    Golden g;
    open_golden(&b, &g);
    for (int step = 0; step < 10; step++) golden_step(&b, &g, step);
    for (int p = 0; p < b.zero->base.range_count; p++) {
        const Range *piece = &b.zero->base.ranges[p];
        char key[160];
        int64_t n;
        snprintf(key, sizeof key, "weight.%s", b.gpt.tensor[piece->tensor].name);
        const uint16_t *before = golden_bf16(&g, key, NULL);
        snprintf(key, sizeof key, "change.%s", b.gpt.tensor[piece->tensor].name);
        const uint16_t *change = golden_bf16(&g, key, &n);
        assert_int_equal(piece->hi - piece->lo, n);
        double squares = 0, reference = 0;
        for (int64_t i = 0; i < n; i++) {
            if (noise(&b, piece->tensor, i)) continue;
            double expected = bf16_to_float(change[i]),
                   ours = (double)b.zero->optimizer.master[piece->state_at + i] - bf16_to_float(before[i]);
            squares += (ours - expected) * (ours - expected);
            reference += expected * expected;
        }
        snprintf(key, sizeof key, "error.change.%s", b.gpt.tensor[piece->tensor].name);
        const float *allowed = golden_f32(&g, key, NULL);
        assert_non_null(allowed);
        // PyTorch's change is stored in bf16, with a relative error of 2^-9.
        double rms = sqrt(squares / (double)n), atol = 0x1p-8 * sqrt(reference / (double)n);
        double limit = (sizeof(floatX) == sizeof(float) ? 0.0 : 2.0 * allowed[0]) + atol;
        if (!(rms <= limit))
            fail_msg("%s: change differs by %g rms, allowed %g", b.gpt.tensor[piece->tensor].name, rms,
                     limit);
    }
    golden_close(&g);
    bench_close(&b);
}

static const char *const small_flags[] = {"--num-layers",
                                          "2",
                                          "--hidden-size",
                                          "24",
                                          "--num-attention-heads",
                                          "3",
                                          "--seq-length",
                                          "12",
                                          "--max-position-embeddings",
                                          "13",
                                          "--micro-batch-size",
                                          "2",
                                          "--hidden-dropout",
                                          "0.1",
                                          "--attention-dropout",
                                          "0.1",
                                          "--init-method-std",
                                          "0.2"};

// Model families: GPT-2, Llama, Qwen 3, a mixture of their features, and Qwen 2 with YaRN and a
// window.
enum { GPT2, LLAMA, QWEN, MIXED, QWEN2, FAMILIES };
static const char *const family_flags[FAMILIES][15] = {
    [LLAMA] = {"--normalization", "RMSNorm", "--position-embedding-type", "rope", "--swiglu",
               "--disable-bias-linear", "--untie-embeddings-and-output-weights", "--ffn-hidden-size", "64"},
    [QWEN] = {"--normalization", "RMSNorm", "--position-embedding-type", "rope", "--swiglu",
              "--disable-bias-linear", "--ffn-hidden-size", "64", "--qk-layernorm", "--kv-channels", "16"},
    [MIXED] = {"--position-embedding-type", "rope", "--rotary-percent", "0.5", "--swiglu",
               "--ffn-hidden-size", "40", "--group-query-attention", "--qk-layernorm"},
    [QWEN2] = {"--normalization", "RMSNorm", "--position-embedding-type", "yarn", "--swiglu",
               "--disable-bias-linear", "--add-qkv-bias", "--ffn-hidden-size", "40",
               "--rotary-scaling-factor", "4", "--window-size", "3,0"},
};

static void open_small(Bench *b, int family, bool recompute) {
    const char *flags[COUNT(small_flags) + 16];
    int count = COUNT(small_flags);
    memcpy(flags, small_flags, sizeof small_flags);
    flags[count++] = "--recompute-granularity";
    flags[count++] = recompute ? "full" : "selective";
    for (const char *const *flag = family_flags[family]; *flag; flag++) flags[count++] = *flag;
    assert_true(bench_open(b, count, flags, 31));
    gpt_init_weights(&b->gpt, 7, (Peers){MPI_COMM_SELF, 0, NULL});
    int32_t tokens[24], targets[24];
    for (int i = 0; i < 24; i++) {
        tokens[i] = (i * 7 + 3) % 31;
        targets[i] = (i * 5 + 1) % 31;
    }
    bench_upload(b, tokens, targets);
}

// For one random direction d per tensor, compares the directional derivative with (loss(w + h d) -
// loss(w - h d)) / 2h. Hidden and attention dropout are on.
static void check_differences(int family) {
    Bench b;
    open_small(&b, family, false);
    zero_step_begins(b.zero, 1);
    bench_pass(&b, 1.0f / 24, true, true, true);
    for (int t = 0; t < b.gpt.tensors; t++) {
        int64_t n = bench_numel(&b, t);
        floatX *w = zero_weight(b.zero, t);
        float *gradient = zero_grad(b.zero, t), *saved = malloc((size_t)n * sizeof *saved);
        double expected = 0, h = 4e-3, losses[2], length = 0;
        for (int64_t i = 0; i < n; i++) saved[i] = floatX_to_float(w[i]);
        for (int64_t i = 0; i < n; i++) length += gradient[i] * gradient[i];
        length = sqrt(length);
        // The gradient of the key rows of the QKV bias is only noise.
        for (int64_t i = 0; i < n; i++) expected += gradient[i] * (gradient[i] / length);
        for (int side = 0; side < 2; side++) {
            for (int64_t i = 0; i < n; i++)
                w[i] = floatX_from_float(saved[i] + (float)((side ? -h : h) * gradient[i] / length));
            set_zero(b.compute, b.zero->loss_sum, sizeof(float));
            losses[side] = bench_pass(&b, 1.0f / 24, false, false, false);
        }
        for (int64_t i = 0; i < n; i++) w[i] = floatX_from_float(saved[i]);
        free(saved);
        double measured = (losses[0] - losses[1]) / (2 * h);
        if (fabs(measured - expected) > 5e-3 * fabs(expected) + 3e-4)
            fail_msg("%s: %g by differences, %g by backward", b.gpt.tensor[t].name, measured, expected);
    }
    bench_close(&b);
}

static void test_finite_differences(void **state) {
    if (sizeof(floatX) != sizeof(float)) {
        print_message("finite differences need the fp32 build\n");
        skip();
    }
    for (int family = 0; family < FAMILIES; family++) check_differences(family);
}

static void check_recompute(int family) {
    Bench plain, again;
    open_small(&plain, family, false);
    open_small(&again, family, true);
    zero_step_begins(plain.zero, 1);
    zero_step_begins(again.zero, 1);
    assert_true(bench_pass(&plain, 1.0f / 24, true, true, true) ==
                bench_pass(&again, 1.0f / 24, true, true, true));
    for (int t = 0; t < plain.gpt.tensors; t++) {
        assert_memory_equal(zero_grad(plain.zero, t), zero_grad(again.zero, t),
                            (size_t)bench_numel(&plain, t) * sizeof(float));
    }
    assert_true(memory_plan_total(&again.memory_plan) < memory_plan_total(&plain.memory_plan));
    bench_close(&plain);
    bench_close(&again);
}

static void test_full_recompute_is_bit_exact(void **state) {
    for (int family = 0; family < FAMILIES; family++) check_recompute(family);
}

// Two passes over the same data give exactly twice the gradients of one pass. The first pass
// overwrites old gradients of matrices.
static void check_accumulation(int family) {
    Bench b;
    open_small(&b, family, false);
    size_t bytes = (size_t)b.zero->base.layout.arena_elements * sizeof(float);
    float *once = malloc(bytes);
    for (int t = 0; t < b.gpt.tensors; t++) {
        for (int64_t i = 0; b.gpt.tensor[t].dims > 1 && i < bench_numel(&b, t); i++)
            zero_grad(b.zero, t)[i] = NAN;
    }
    zero_step_begins(b.zero, 1);
    bench_pass(&b, 1.0f / 24, true, true, false);
    memcpy(once, b.zero->grads.whole, bytes);
    bench_pass(&b, 1.0f / 24, true, false, true);
    for (int t = 0; t < b.gpt.tensors; t++) {
        const float *twice = zero_grad(b.zero, t), *first = once + b.zero->base.layout.tensor_arena[t];
        double worst = 0, scale = 0;
        for (int64_t i = 0; i < bench_numel(&b, t); i++) {
            double difference = fabs(twice[i] - 2.0 * first[i]);
            worst = fmax(worst, isnan(difference) ? INFINITY : difference);
            scale = fmax(scale, fabs(first[i]));
        }
        assert_true(worst <= 1e-5 * scale + 1e-9);
    }
    free(once);
    bench_close(&b);
}

static void test_gradients_accumulate(void **state) {
    for (int family = 0; family < FAMILIES; family++) check_accumulation(family);
}

// The gradients before backward, for test_layers_write_their_own.
static float *watched_before;
static Bench *watched;

void __real_zero_reduce_unit(Zero *zero, int unit, bool last);
void __wrap_zero_reduce_unit(Zero *zero, int unit, bool last);
// When a unit is complete, backward must not have written gradients of the units that follow in
// backward order. An exception is the LM head, which writes the gradient of the word embedding or
// output layer first.
void __wrap_zero_reduce_unit(Zero *zero, int unit, bool last) {
    for (int t = 0; watched && t < watched->gpt.tensors; t++) {
        const Tensor *tensor = &watched->gpt.tensor[t];
        if (tensor->unit >= unit || t == GPT_WTE || t == watched->gpt.output) continue;
        const float *before = watched_before + zero_layout(zero)->tensor_arena[t];
        size_t bytes = (size_t)tensor_elements(tensor) * sizeof(float);
        if (memcmp(zero_grad(zero, t), before, bytes) != 0) {
            fail_msg("unit %d is complete, and %s of unit %d has been written", unit, tensor->name,
                     tensor->unit);
        }
    }
    __real_zero_reduce_unit(zero, unit, last);
}

static void test_layers_write_their_own(void **state) {
    for (int kind = 0; kind < 2 * FAMILIES; kind++) {
        Bench b;
        open_small(&b, kind / 2, kind % 2 == 1);
        zero_step_begins(b.zero, 1);
        size_t bytes = (size_t)zero_layout(b.zero)->arena_elements * sizeof(float);
        watched_before = malloc(bytes);
        memcpy(watched_before, zero_grad(b.zero, 0) - zero_layout(b.zero)->tensor_arena[0], bytes);
        watched = &b;
        bench_pass(&b, 1.0f / 24, true, true, true);
        watched = NULL;
        free(watched_before);
        bench_close(&b);
    }
}

static void test_evaluation_has_no_dropout(void **state) {
    Bench b;
    open_small(&b, GPT2, false);
    zero_step_begins(b.zero, 1);
    gpt_forward(&b.gpt, &(Pass){.B = 2, .T = 12});
    floatX first[24 * 24], second[24 * 24];
    memcpy(first, b.gpt.lnf.y, sizeof first);
    gpt_forward(&b.gpt, &(Pass){.B = 2, .T = 12, .first_sample = 99});
    memcpy(second, b.gpt.lnf.y, sizeof second);
    assert_memory_equal(first, second, sizeof first);
    gpt_forward(&b.gpt, &(Pass){.B = 2, .T = 12, .first_sample = 99, .training = true});
    assert_memory_not_equal(first, b.gpt.lnf.y, sizeof first);
    bench_close(&b);
}

static void test_parameter_table(void **state) {
    Bench b;
    open_small(&b, GPT2, false);
    int64_t h = 24, L = 2, V = 31, P = 13;
    assert_int_equal(b.zero->base.layout.parameters, V * h + P * h + L * (12 * h * h + 13 * h) + 2 * h);
    assert_string_equal(b.gpt.tensor[gpt_layer_tensor(&b.gpt, 1, FC2_W)].name,
                        "encoder.layers.1.mlp.dense_4h_to_h.weight");
    double sum = 0, squares = 0;
    const floatX *w = zero_weight(b.zero, GPT_WTE);
    for (int64_t i = 0; i < V * h; i++) {
        sum += floatX_to_float(w[i]);
        squares += floatX_to_float(w[i]) * (double)floatX_to_float(w[i]);
    }
    double n = (double)(V * h), std = sqrt(squares / n);
    assert_true(fabs(sum / n) < 4 * 0.2 / sqrt(n) && fabs(std - 0.2) < 4 * 0.2 / sqrt(2 * n));
    bench_close(&b);
}

static void test_llama_parameter_table(void **state) {
    Bench b;
    open_small(&b, LLAMA, false);
    int64_t h = 24, L = 2, V = 31, F = 64;
    assert_int_equal(b.zero->base.layout.parameters, 2 * V * h + L * (4 * h * h + 3 * h * F + 2 * h) + h);
    assert_int_equal(gpt_layer_tensor(&b.gpt, 1, QKV_B), -1);
    assert_int_equal(gpt_layer_tensor(&b.gpt, 1, LN2_B), -1);
    static const char *const names[] = {"embedding.word_embeddings.weight",
                                        "output_layer.weight",
                                        "encoder.layers.0.input_norm.weight",
                                        "encoder.layers.0.self_attention.query_key_value.weight",
                                        "encoder.layers.0.self_attention.dense.weight",
                                        "encoder.layers.0.post_attention_norm.weight",
                                        "encoder.layers.0.mlp.dense_h_to_4h.weight",
                                        "encoder.layers.0.mlp.dense_4h_to_h.weight",
                                        "encoder.layers.1.input_norm.weight"};
    for (int i = 0; i < COUNT(names); i++) assert_string_equal(b.gpt.tensor[i].name, names[i]);
    bench_close(&b);
}

// In the table, query and key norms follow the QKV linear layer, and biases follow their weights.
static void test_head_norm_table(void **state) {
    static const char *const names[] = {"query_key_value.weight", "query_key_value.bias",
                                        "q_layernorm.weight",     "q_layernorm.bias",
                                        "k_layernorm.weight",     "k_layernorm.bias",
                                        "dense.weight",           "dense.bias"};
    Bench b;
    open_small(&b, MIXED, false);
    int first = gpt_layer_tensor(&b.gpt, 1, QKV_W);
    for (int i = 0; i < COUNT(names); i++) {
        char name[96];
        snprintf(name, sizeof name, "encoder.layers.1.self_attention.%s", names[i]);
        assert_string_equal(b.gpt.tensor[first + i].name, name);
        if (i >= 2 && i < 6) assert_int_equal(bench_numel(&b, first + i), 8);
    }
    bench_close(&b);
    open_small(&b, QWEN, false);
    assert_int_equal(gpt_layer_tensor(&b.gpt, 0, Q_NORM_B), -1);
    assert_int_equal(gpt_layer_tensor(&b.gpt, 0, K_NORM_W), gpt_layer_tensor(&b.gpt, 0, QKV_W) + 2);
    bench_close(&b);
}

// Sets the same weights and tokens as dev/ref/llama_golden.py.
static void fill_llama(Bench *b) {
    int32_t tokens[16], targets[16];
    for (int t = 0; t < b->gpt.tensors; t++) {
        floatX *w = zero_weight(b->zero, t);
        float offset = b->gpt.tensor[t].dims == 1 ? 1.0f : 0.0f;
        for (int64_t i = 0; i < bench_numel(b, t); i++) {
            uint32_t bits = (uint32_t)i * 2654435761u + (uint32_t)t * 40503u;
            w[i] = floatX_from_float(offset + ((float)(bits / 128 % 64) - 32.0f) / 128.0f);
        }
    }
    for (int i = 0; i < 16; i++) tokens[i] = (i * 7 + 3) % 40, targets[i] = (i * 5 + 1) % 40;
    bench_upload(b, tokens, targets);
}

static void check_definition(const char *groups, bool qk_norm, const double expected[16]) {
    const char *const flags[] = {"--num-layers",
                                 "2",
                                 "--hidden-size",
                                 "32",
                                 "--num-attention-heads",
                                 "4",
                                 "--seq-length",
                                 "8",
                                 "--max-position-embeddings",
                                 "8",
                                 "--micro-batch-size",
                                 "2",
                                 "--hidden-dropout",
                                 "0",
                                 "--attention-dropout",
                                 "0",
                                 "--normalization",
                                 "RMSNorm",
                                 "--position-embedding-type",
                                 "rope",
                                 "--rotary-base",
                                 "500",
                                 "--swiglu",
                                 "--ffn-hidden-size",
                                 "48",
                                 "--disable-bias-linear",
                                 "--untie-embeddings-and-output-weights",
                                 "--group-query-attention",
                                 "--num-query-groups",
                                 groups,
                                 "--qk-layernorm"};
    double allowed = sizeof(floatX) == sizeof(float) ? 2e-5 : 0.15;
    Bench b;
    assert_true(bench_open(&b, COUNT(flags) - !qk_norm, flags, 40));
    fill_llama(&b);
    zero_step_begins(b.zero, 1);
    bench_pass(&b, 1.0f / 16, false, false, false);
    for (int i = 0; i < 16; i++) {
        double difference = fabs((double)b.gpt.losses[i] - expected[i]);
        if (!(difference <= allowed)) fail_msg("loss %d: %g, expected %g", i, b.gpt.losses[i], expected[i]);
    }
    bench_close(&b);
}

static void test_llama_matches_reference(void **state) {
    check_definition("4", false, llama_losses_4_groups);
    check_definition("2", false, llama_losses_2_groups);
    check_definition("2", true, llama_losses_2_groups_qk_norm);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_parameter_table),           cmocka_unit_test(test_llama_parameter_table),
        cmocka_unit_test(test_head_norm_table),           cmocka_unit_test(test_llama_matches_reference),
        cmocka_unit_test(test_forward_matches_pytorch),   cmocka_unit_test(test_gradients_match_pytorch),
        cmocka_unit_test(test_ten_steps_match_pytorch),   cmocka_unit_test(test_master_weights_match_pytorch),
        cmocka_unit_test(test_finite_differences),        cmocka_unit_test(test_full_recompute_is_bit_exact),
        cmocka_unit_test(test_gradients_accumulate),      cmocka_unit_test(test_layers_write_their_own),
        cmocka_unit_test(test_evaluation_has_no_dropout),
    };
    Launch launch;
    leaks_launch(&launch, &argc, &argv);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    failed += leaks_found();
    launch_finalize(&launch);
    return failed;
}
