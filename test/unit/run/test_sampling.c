// Sampling with temperature, top-k and top-p: a chi-square test of the frequencies against the
// exact distribution, and reproducibility.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/base.h"
#include "llmc/run/sampling.h"

// --- sampling ------------------------------------------------------------------------------------

enum { V = 40, DRAWS = 50000 };

typedef struct Case {
    double temperature, top_p;
    int top_k;
} Case;

static void make_logits(floatX *logits) {
    for (int i = 0; i < V; i++) logits[i] = floatX_from_float(3.0f * sinf(0.7f * (float)(i * i)));
    logits[7] = logits[11];  // a tie
}

static double logit_at(const floatX *logits, int i) { return (double)floatX_to_float(logits[i]); }

// Reference: sorts, truncates and normalizes the probabilities. Returns the number of candidates.
static int exact(const floatX *logits, const Case *c, double *p) {
    int order[V], kept = c->top_k && c->top_k < V ? c->top_k : V;
    double whole = 0, sum = 0;
    for (int i = 0; i < V; i++) {
        order[i] = i;
        for (int j = i; j > 0 && logit_at(logits, order[j]) > logit_at(logits, order[j - 1]); j--) {
            int swap = order[j];
            order[j] = order[j - 1], order[j - 1] = swap;
        }
    }
    for (int i = 0; i < V; i++) p[i] = 0;
    for (int i = 0; i < kept; i++) whole += exp(logit_at(logits, order[i]) / c->temperature);
    int n = 0;
    for (; n < kept && (n == 0 || sum / whole < c->top_p); n++)
        sum += p[order[n]] = exp(logit_at(logits, order[n]) / c->temperature);
    for (int i = 0; i < V; i++) p[i] /= sum;
    return n;
}

static Sampling sampling_of(const Case *c, Candidate *candidates) {
    bool cut = c->top_k || c->top_p < 1;
    return (Sampling){.vocab = V,
                      .temperature = c->temperature,
                      .top_k = c->top_k,
                      .top_p = c->top_p,
                      .seed = 5,
                      .candidates = cut ? candidates : NULL};
}

static void draws_follow_the_distribution(void **state) {
    static const Case cases[] = {{1, 1, 0},   {0.5, 1, 0},   {2, 1, 6},      {1, 1, 39},
                                 {1, 0.5, 0}, {1, 0.95, 0},  {3, 0.7, 25},   {0.8, 0.9, 12},
                                 {1, 1, V},   {1, 1, V + 9}, {1, 0.9999, 0}, {1, 0.3, 3}};
    floatX logits[V];
    Candidate candidates[V];
    make_logits(logits);
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        double p[V], chi_square = 0;
        int counts[V] = {0}, kept = exact(logits, &cases[k], p), classes = 0;
        Sampling s = sampling_of(&cases[k], candidates);
        for (int i = 0; i < DRAWS; i++) counts[sampling_draw(&s, logits, (uint64_t)i)]++;
        // Rare tokens are combined in one class.
        double rare_expected = 0, rare = 0;
        for (int i = 0; i < V; i++) {
            double expected = DRAWS * p[i];
            if (p[i] == 0) assert_int_equal(counts[i], 0);
            else if (expected < 10) rare_expected += expected, rare += counts[i];
            else chi_square += pow(counts[i] - expected, 2) / expected, classes++;
        }
        if (rare_expected > 0) chi_square += pow(rare - rare_expected, 2) / rare_expected, classes++;
        // The limit is four standard deviations above the mean of chi-square with classes - 1
        // degrees of freedom.
        double degrees = classes > 1 ? classes - 1 : 1, most = degrees + 4 * sqrt(2 * degrees) + 2;
        if (!(chi_square <= most) || kept < 1)
            fail_msg("case %d: chi-square %g of %d classes", (int)k, chi_square, classes);
    }
}

static void sampling_follows_the_softmax(void **state) {
    enum { TOKENS = 4 };
    const float p[TOKENS] = {0.1f, 0.2f, 0.3f, 0.4f};
    floatX logits[TOKENS];
    int counts[TOKENS] = {0};
    Sampling sampling = {.vocab = TOKENS, .temperature = 1.0, .top_p = 1.0, .seed = 7};
    double total = 0, weight[TOKENS];
    for (int i = 0; i < TOKENS; i++) {
        logits[i] = floatX_from_float(logf(p[i]));
        total += weight[i] = exp(floatX_to_float(logits[i]));
    }
    for (int k = 0; k < DRAWS; k++) counts[sampling_draw(&sampling, logits, (uint64_t)k)]++;
    for (int i = 0; i < TOKENS; i++) {
        double expected = weight[i] / total;
        assert_true(fabs(counts[i] / (double)DRAWS - expected) < 4 * sqrt(expected * (1 - expected) / DRAWS));
    }
    sampling.temperature = 0.0;
    assert_int_equal(sampling_draw(&sampling, logits, 0), 3);
    sampling.temperature = 1.0;
    for (int i = 0; i < TOKENS; i++) logits[i] = floatX_from_float(NAN);
    int token = sampling_draw(&sampling, logits, 0);
    assert_true(token >= 0 && token < TOKENS);
}

static void deterministic_draws(void **state) {
    floatX logits[V];
    Candidate candidates[V];
    make_logits(logits);
    int best = 0;
    for (int i = 0; i < V; i++) best = logit_at(logits, i) > logit_at(logits, best) ? i : best;
    static const Case certain[] = {{0, 1, 0}, {0, 0.5, 7}, {1, 1, 1}, {1, 1e-9, 0}, {1, 1e-9, 5}};
    for (size_t k = 0; k < sizeof certain / sizeof *certain; k++) {
        Sampling s = sampling_of(&certain[k], candidates);
        for (uint64_t i = 0; i < 50; i++) assert_int_equal(sampling_draw(&s, logits, i), best);
    }
    // The same seed and index give the same token; another seed gives other tokens.
    Sampling s = sampling_of(&(Case){1, 0.9, 20}, candidates), other = s;
    other.seed = 6;
    int differ = 0;
    for (uint64_t i = 0; i < 200; i++) {
        assert_int_equal(sampling_draw(&s, logits, i), sampling_draw(&s, logits, i));
        differ += sampling_draw(&s, logits, i) != sampling_draw(&other, logits, i);
    }
    assert_true(differ > 50);
    for (int i = 0; i < V; i++) logits[i] = floatX_from_float(NAN);
    int token = sampling_draw(&s, logits, 0);
    assert_true(token >= 0 && token < V);
}

// --- streamed text -------------------------------------------------------------------------------

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(draws_follow_the_distribution),
        cmocka_unit_test(sampling_follows_the_softmax),
        cmocka_unit_test(deterministic_draws),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
