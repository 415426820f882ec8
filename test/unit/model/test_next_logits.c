// Generation with a KV cache: the logits must match a training forward pass over the whole
// sequence, in the fp32 build within 1e-5 of the largest logit.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "dev/lib/text_model.h"
#include "test/unit/model_bench.h"
#include "test/leaks.h"
#include "test/random.h"

enum { VOCABULARY = 96, LENGTH = 24 };
#define COUNT(list) ((int)(sizeof(list) / sizeof((list)[0])))

// Opens an inference model with the weights of the bench.
static void open_writer(TextModel *w, const Bench *b) {
    Error err = {0};
    Config config = b->config;
    config.recompute_granularity = RECOMPUTE_FULL;
    assert_true(text_model_open(w, &config, LENGTH, 2, &b->site, &err));
    for (int i = 0; i < w->gpt.tensors; i++) {
        size_t bytes = (size_t)bench_numel(b, i) * sizeof(floatX);
        floatX *host = malloc(bytes);
        copy_to_host(b->compute, host, zero_weight(b->zero, i), bytes);
        stream_synchronize(b->compute);
        zero_put_weights(w->zero, i, host);
        free(host);
    }
}

static void expect_same(const floatX *got, const floatX *expected, int n) {
    double scale = 0, worst = 0;
    for (int i = 0; i < VOCABULARY; i++) {
        double e = (double)floatX_to_float(expected[i]);
        scale = fmax(scale, fabs(e));
        worst = fmax(worst, fabs((double)floatX_to_float(got[i]) - e));
    }
    // In bf16 a different order of sums can change the rounding in every layer.
    double allowed = sizeof(floatX) == sizeof(float) ? 1e-5 * fmax(scale, 1) : 0x1p-6 * scale;
    if (!(worst <= allowed && scale > 0.1))
        fail_msg("%d tokens: logits differ by %g of %g, allowed %g", n, worst, scale, allowed);
}

// Compares the logits of every position after a prompt of `prompt` tokens and single tokens.
static void compare(int count, const char *const *flags, int prompt) {
    static const char *const common[] = {"--num-layers",
                                         "3",
                                         "--hidden-size",
                                         "48",
                                         "--seq-length",
                                         "24",
                                         "--max-position-embeddings",
                                         "24",
                                         "--micro-batch-size",
                                         "2",
                                         "--hidden-dropout",
                                         "0",
                                         "--attention-dropout",
                                         "0",
                                         "--init-method-std",
                                         "0.2"};
    const char *all[64];
    Bench b;
    TextModel w;
    Random rng = {61};
    int32_t ids[LENGTH];
    floatX got[VOCABULARY], expected[VOCABULARY];
    memcpy(all, common, sizeof common);
    memcpy(all + COUNT(common), flags, (size_t)count * sizeof *flags);
    assert_true(bench_open(&b, COUNT(common) + count, all, VOCABULARY));
    gpt_init_weights(&b.gpt, 9, (Peers){MPI_COMM_SELF, 0, NULL});
    open_writer(&w, &b);
    for (int again = 0; again < 2; again++) {  // the second sequence reuses the cache
        for (int i = 0; i < LENGTH; i++) ids[i] = (int32_t)(random_u64(&rng) % VOCABULARY);
        for (int n = prompt, start = 0; n <= LENGTH; start = n++) {
            gpt_next_logits(&b.gpt, ids, n, expected);
            gpt_continue(&w.gpt, ids + start, start, n - start, got);
            expect_same(got, expected, n);
        }
        // Repeats the tokens after the prompt in one call.
        gpt_continue(&w.gpt, ids + prompt, prompt, LENGTH - prompt, got);
        expect_same(got, expected, LENGTH);
    }
    text_model_close(&w);
    bench_close(&b);
}

static void test_gpt2(void **state) {
    static const char *const flags[] = {"--num-attention-heads", "3"};
    compare(COUNT(flags), flags, 1);
    compare(COUNT(flags), flags, 17);
}

static void test_llama(void **state) {
    static const char *const flags[] = {"--num-attention-heads",
                                        "6",
                                        "--group-query-attention",
                                        "--num-query-groups",
                                        "2",
                                        "--normalization",
                                        "RMSNorm",
                                        "--position-embedding-type",
                                        "rope",
                                        "--swiglu",
                                        "--disable-bias-linear",
                                        "--untie-embeddings-and-output-weights",
                                        "--qk-layernorm"};
    compare(COUNT(flags), flags, 1);
    compare(COUNT(flags), flags, 11);
}

static void test_part_of_each(void **state) {
    static const char *const flags[] = {
        "--num-attention-heads", "3",  "--swiglu", "--position-embedding-type", "rope",
        "--rotary-percent",      "0.5"};
    compare(COUNT(flags), flags, 6);
}

static void test_window(void **state) {
    static const char *const flags[] = {"--num-attention-heads",
                                        "6",
                                        "--group-query-attention",
                                        "--num-query-groups",
                                        "2",
                                        "--position-embedding-type",
                                        "yarn",
                                        "--rotary-scaling-factor",
                                        "4",
                                        "--disable-bias-linear",
                                        "--add-qkv-bias",
                                        "--window-size",
                                        "4,0",
                                        "--window-attn-skip-freq",
                                        "2"};
    compare(COUNT(flags), flags, 1);
    compare(COUNT(flags), flags, 11);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gpt2),
        cmocka_unit_test(test_llama),
        cmocka_unit_test(test_part_of_each),
        cmocka_unit_test(test_window),
    };
    Launch launch;
    leaks_launch(&launch, &argc, &argv);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    failed += leaks_found();
    launch_finalize(&launch);
    return failed;
}
