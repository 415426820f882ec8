// Sampling: see sample.h.
#include "llmc/sample.h"

#include <math.h>

#include "llmc/rng.h"

static int largest_logit(const floatX *logits, int vocab) {
    int best = 0;
    for (int i = 1; i < vocab; i++) {
        if (floatX_to_float(logits[i]) > floatX_to_float(logits[best])) best = i;
    }
    return best;
}

int sample_token(const floatX *logits, int vocab, double temperature, uint64_t seed, int64_t position) {
    int best = largest_logit(logits, vocab);
    if (!(temperature > 0.0)) return best;
    double top = floatX_to_float(logits[best]), sum = 0.0;
    for (int i = 0; i < vocab; i++) sum += exp((floatX_to_float(logits[i]) - top) / temperature);
    double target = sum * rng_uniform(seed, PURPOSE_SAMPLE, (uint64_t)position), running = 0.0;
    for (int i = 0; i < vocab; i++) {
        running += exp((floatX_to_float(logits[i]) - top) / temperature);
        if (running > target) return i;
    }
    return best;  // NaN logits, or rounding at the very end
}
