// Checks which sizes of models, scratch memory and attention the GPU ops accept. Needs no GPU.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <string.h>

#include "llmc/cuda/limits.h"

typedef struct ModelSizes {
    int C, NH, HD, F, V;
    int64_t N;
    const char *names;  // text in the error; NULL: accepted
} ModelSizes;

// Sizes that the kernels don't support are refused at startup, with the name of the flag.
static void test_models(void **state) {
    const int64_t most = INT32_MAX;
    const ModelSizes model[] = {
        {768, 12, 64, 3072, 50304, 65536, NULL},
        {640, 5, 128, 2560, 512, most, NULL},
        {16384, 128, 128, 65536, 512, 1, NULL},
        {100, 4, 25, 400, 512, 1, "--hidden-size 100"},
        {16392, 128, 128, 65536, 512, 1, "--hidden-size 16392"},
        {96, 8, 12, 384, 512, 1, "attention heads of size 12"},
        {3072, 6, 512, 12288, 512, 1, "attention heads of size 512"},
        {64, 2, 32, 260, 512, 1, "--ffn-hidden-size 260"},
        {64, 2, 32, 256, 50257, 1, "--make-vocab-size-divisible-by"},
        {64, 2, 32, 256, 512, most + 1, "--micro-batch-size"},
    };
    for (size_t i = 0; i < sizeof model / sizeof model[0]; i++) {
        const ModelSizes *m = &model[i];
        Error err = {0};
        bool fine = limits_check_model(m->C, m->NH, m->HD, m->F, m->V, m->N, &err);
        assert_int_equal(fine, m->names == NULL);
        if (fine) continue;
        assert_int_equal(err.code, EXIT_USAGE);
        assert_non_null(strstr(err.what, m->names));
    }
}

// Returns the scratch bytes of the embedding's backward, computed as in embedding.cu. sort: bytes
// that the sort needs.
static size_t embedding_wants(int64_t N, int C, size_t sort) {
    size_t used = 3 * scratch_ids_bytes(N) + scratch_aligned(sort);
    return used + (size_t)scratch_chunks(N, C, sort) * scratch_chunk_bytes(C);
}

// The planned scratch is large enough at any size. A small model with a micro-batch of 3.4 M tokens
// once exceeded it.
static void test_scratch(void **state) {
    const int64_t rows[] = {1, 31, 2048, 65536, 1 << 20, 3100000, 3400000, 1 << 24, INT32_MAX};
    const int widths[] = {8, 64, 768, 4096, 16384};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        for (size_t j = 0; j < sizeof widths / sizeof widths[0]; j++) {
            int64_t N = rows[i], most = (int64_t)scratch_sort_bytes(N);
            int C = widths[j];
            for (int part = 0; part <= 4; part++) {
                assert_true(embedding_wants(N, C, (size_t)(most * part / 4)) <= scratch_bytes(N, C));
            }
            assert_true(scratch_chunks(N, C, (size_t)most) >= 1);
            // LayerNorm's backward needs at least the sums of one block: 3 rows of fp32.
            assert_true(3 * (size_t)C * sizeof(float) <= SCRATCH_LEAST &&
                        scratch_bytes(N, C) >= SCRATCH_LEAST);
        }
    }
}

// Chunk sizes determine the order of sums and therefore the results. They must not change from
// earlier versions, which had 64 MiB of scratch memory.
static void test_chunks(void **state) {
    assert_int_equal(scratch_chunks(65536, 768, 600000), 2048);
    assert_int_equal(scratch_chunks(16384, 2048, 200000), 512);
    assert_int_equal(scratch_chunks(1 << 20, 768, 9 << 20), (SCRATCH_LEAST - (21 << 20)) / 6144);
    assert_int_equal(scratch_chunks(3400000, 64, 28 << 20), CHUNKS_LEAST);
    assert_int_equal(scratch_bytes(65536, 768), SCRATCH_LEAST);
}

static void test_attention(void **state) {
    assert_true(limits_dense(2048, false) && limits_dense(64, false));
    assert_false(limits_dense(2048, true));
    assert_false(limits_dense(2040, false));
    assert_false(limits_packed(1, false, false, false));  // single tokens
    assert_true(limits_packed(64, false, true, false) && limits_packed(64, false, false, true));
    assert_false(limits_packed(64, true, false, false) || limits_packed(64, false, true, true));
    char text[256];
    limits_attention_notice(2048, false, "--deterministic-mode", text, sizeof text);
    assert_string_equal(text, "");
    limits_attention_notice(2040, true, NULL, text, sizeof text);
    assert_string_equal(text, "");
    limits_attention_notice(2040, false, "--deterministic-mode", text, sizeof text);
    assert_non_null(strstr(text, "without --deterministic-mode"));
    assert_non_null(strstr(text, "at least 5.6 % (1.3B) or 11 % (125M) longer"));
    limits_attention_notice(2048, true, "--attention-dropout", text, sizeof text);
    assert_non_null(strstr(text, "without --attention-dropout"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_models),
        cmocka_unit_test(test_scratch),
        cmocka_unit_test(test_chunks),
        cmocka_unit_test(test_attention),
    };
    return cmocka_run_group_tests_name("limits of the GPU's ops", tests, NULL, NULL);
}
