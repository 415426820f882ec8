// The CPU backend's ops for text generation (attention with a KV cache, linear layer with one row)
// against double-precision references. Also runs with PRECISION=fp32.
#include "test/unit/ops_common.h"

enum { G = 2, SHARERS = 3, NH = G * SHARERS, HD = 16, ROW = (NH + 2 * G) * HD, ROOM = 150, POISON = 0xFF };

// Computes the attention output (NH * HD) of the query at position t. qkv: rows of all positions.
static void attend(double *out, const floatX *qkv, int t, int window) {
    int least = window && t >= window ? t - window + 1 : 0;
    for (int head = 0; head < NH; head++) {
        int first = head / SHARERS * (SHARERS + 2) * HD, key_at = first + SHARERS * HD;
        const floatX *q = qkv + t * ROW + first + head % SHARERS * HD;
        double sum = 0, e[ROOM];
        for (int key = least; key <= t; key++) {
            double score = 0;
            for (int d = 0; d < HD; d++) {
                double k = (double)floatX_to_float(qkv[key * ROW + key_at + d]);
                score += (double)floatX_to_float(q[d]) * k;
            }
            sum += e[key] = exp(score / sqrt(HD));
        }
        for (int d = 0; d < HD; d++) {
            double value = 0;
            for (int key = least; key <= t; key++)
                value += e[key] / sum * (double)floatX_to_float(qkv[key * ROW + key_at + HD + d]);
            out[head * HD + d] = value;
        }
    }
}

// Fills the cache in calls of several sizes. Queries of a call attend to all earlier positions.
static void check_cached_attention(int window) {
    static const int calls[] = {5, 1, 1, 70, 2, 66};
    Random rng = {51};
    floatX *qkv = random_floatX(&rng, ROOM * ROW, 0, 1);
    floatX *keys = poisoned_floatX(G * ROOM * HD), *values = poisoned_floatX(G * ROOM * HD);
    int start = 0;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        int T = calls[i];
        floatX *out = poisoned_floatX(T * NH * HD);
        void *workspace = poisoned(op_cached_attention_workspace_bytes(T, ROOM, NH, HD));
        CachedAttention a = {.T = T,
                             .start = start,
                             .room = ROOM,
                             .NH = NH,
                             .HD = HD,
                             .groups = G,
                             .window = window,
                             .qkv = qkv + start * ROW,
                             .keys = keys,
                             .values = values,
                             .out = out,
                             .workspace = workspace};
        op_cache_append(NULL, &a);
        op_cached_attention(NULL, &a);
        for (int t = 0; t < T; t++) {
            double expected[NH * HD];
            attend(expected, qkv, start + t, window);
            check_floatX("cached attention", out + t * NH * HD, expected, NH * HD, 4e-6);
        }
        free(workspace);
        free(out);
        start += T;
    }
    // Nothing is written past the last position.
    for (int g = 0; g < G; g++) {
        const uint8_t *unused = (const uint8_t *)(keys + (g * ROOM + start) * HD);
        for (size_t i = 0; i < (size_t)(ROOM - start) * HD * sizeof(floatX); i++)
            assert_int_equal(unused[i], POISON);
    }
    free_all(qkv, keys, values, NULL);
}

static void test_cached_attention(void **state) {
    check_cached_attention(0);
    check_cached_attention(1);
    check_cached_attention(7);
    check_cached_attention(ROOM);
}

static void test_linear_of_one_row(void **state) {
    enum { C = 197, OC = 6000 };  // large enough to be split over threads
    Random rng = {52};
    floatX *x = random_floatX(&rng, C, 0, 1), *w = random_floatX(&rng, OC * C, 0, 0.3),
           *bias = random_floatX(&rng, OC, 0, 1), *y = poisoned_floatX(OC), *pre = poisoned_floatX(OC);
    double expected[OC], activated[OC];
    for (int o = 0; o < OC; o++) {
        expected[o] = (double)floatX_to_float(bias[o]);
        for (int c = 0; c < C; c++)
            expected[o] += (double)floatX_to_float(x[c]) * (double)floatX_to_float(w[o * C + c]);
    }
    Linear a = {.N = 1,
                .C = C,
                .OC = OC,
                .x = x,
                .w = w,
                .bias = bias,
                .y = y,
                .workspace = poisoned(op_linear_workspace_bytes(1, C, OC))};
    op_linear_forward(NULL, &a);
    check_floatX("y", y, expected, OC, 2e-6);
    a.pre = pre;
    a.threads = 3;
    op_linear_forward(NULL, &a);
    check_floatX("pre", pre, expected, OC, 2e-6);
    for (int o = 0; o < OC; o++) {
        double p = (double)floatX_to_float(pre[o]);
        activated[o] = 0.5 * p * (1 + tanh(0.7978845608028654 * (p + 0.044715 * p * p * p)));
    }
    check_floatX("GELU", y, activated, OC, 1e-6);
    free_all(x, w, bias, y, pre, a.workspace, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cached_attention),
        cmocka_unit_test(test_linear_of_one_row),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
