// Sampling: see sample.h.
#include "llmc/run/sample.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/rng.h"
#include "llmc/base/utf8.h"

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

char *sample_text(const Tokenizer *tokenizer, const int32_t *ids, int64_t n) {
    size_t total = 0, at = 0, bytes;
    for (int64_t i = 0; i < n; i++) {
        tokenizer_decode(tokenizer, ids[i], &bytes);
        total += bytes;
    }
    // Repaired text takes at most three bytes for each raw one; a character may be spread over tokens, so the whole is repaired at once.
    char *text = (char *)xmalloc(4 * total + 1, "the sample"), *raw = text + 3 * total + 1;
    for (int64_t i = 0; i < n; i++) {
        const char *piece = tokenizer_decode(tokenizer, ids[i], &bytes);
        memcpy(raw + at, piece, bytes);
        at += bytes;
    }
    int64_t replaced = 0;
    size_t length = utf8_repair(raw, total, text, &replaced);
    for (size_t i = 0; i < length; i++) {
        if (!text[i]) text[i] = ' ';  // a model of bytes may write zeros
    }
    text[length] = 0;
    return text;
}

void sample_log(Log *log, int64_t iteration, const Tokenizer *tokenizer, const int32_t *ids, int64_t n) {
    char *text = sample_text(tokenizer, ids, n);
    log_line(log, "sample at iteration %lld:\n%s", (long long)iteration, text);
    log_text(log, "sample/text_summary", iteration, text);
    Text json = json_begin("sample");
    json_integer(&json, "iteration", iteration);
    json_text(&json, "text", text);
    log_json(log, &json);
    free(text);
}
