// Token sampling: see sampling.h.
#include "llmc/run/sampling.h"

#include <assert.h>
#include <math.h>

#include "llmc/base/rng.h"

static int largest_logit(const floatX *logits, int vocab) {
    int best = 0;
    for (int i = 1; i < vocab; i++) {
        if (floatX_to_float(logits[i]) > floatX_to_float(logits[best])) best = i;
    }
    return best;
}

// Returns the probability of a logit, relative to the largest logit `top`.
static double weight_of(float logit, double top, double temperature) {
    return exp(((double)logit - top) / temperature);
}

static int draw_of_all(const Sampling *s, const floatX *logits, double uniform) {
    int best = largest_logit(logits, s->vocab);
    double top = (double)floatX_to_float(logits[best]), sum = 0.0;
    for (int i = 0; i < s->vocab; i++) sum += weight_of(floatX_to_float(logits[i]), top, s->temperature);
    double target = sum * uniform, running = 0.0;
    for (int i = 0; i < s->vocab; i++) {
        running += weight_of(floatX_to_float(logits[i]), top, s->temperature);
        if (running > target) return i;
    }
    return best;  // NaN logits, or rounding errors of the sum
}

// --- top-k and top-p -----------------------------------------------------------------------------
static bool comes_first(const Candidate *a, const Candidate *b) {
    return a->logit > b->logit || (a->logit == b->logit && a->token < b->token);
}

static void sink(Candidate *heap, int count, int at) {
    Candidate moved = heap[at];
    for (int below = 2 * at + 1; below < count; below = 2 * at + 1) {
        if (below + 1 < count && comes_first(&heap[below + 1], &heap[below])) below++;
        if (!comes_first(&heap[below], &moved)) break;
        heap[at] = heap[below];
        at = below;
    }
    heap[at] = moved;
}

static void make_heap(const Sampling *s, const floatX *logits) {
    for (int i = 0; i < s->vocab; i++) {
        float logit = floatX_to_float(logits[i]);
        s->candidates[i] = (Candidate){isnan(logit) ? -INFINITY : logit, i};
    }
    for (int i = s->vocab / 2 - 1; i >= 0; i--) sink(s->candidates, s->vocab, i);
}

// Pops the most likely candidate from a heap of `count` and stores it at index count - 1.
static Candidate take_first(Candidate *heap, int count) {
    Candidate first = heap[0];
    heap[0] = heap[count - 1];
    heap[count - 1] = first;
    sink(heap, count - 1, 0);
    return first;
}

static int draw_of_likeliest(const Sampling *s, const floatX *logits, double uniform) {
    Candidate *heap = s->candidates;
    int vocab = s->vocab, most = s->top_k > 0 && s->top_k < vocab ? s->top_k : vocab, taken = 0;
    make_heap(s, logits);
    double top = (double)heap[0].logit, whole = 0.0, sum = 0.0, running = 0.0;
    // Sum the probabilities of the top-k candidates, which popping moves to the end of the array.
    if (most < vocab) {
        for (; taken < most; taken++)
            whole += weight_of(take_first(heap, vocab - taken).logit, top, s->temperature);
    } else {
        for (int i = 0; i < vocab; i++) whole += weight_of(heap[i].logit, top, s->temperature);
    }
    int kept = 0;
    while (kept < most && (kept == 0 || sum < s->top_p * whole)) {
        if (kept == taken) take_first(heap, vocab - taken++);
        sum += weight_of(heap[vocab - 1 - kept++].logit, top, s->temperature);
    }
    for (int i = 0; i < kept; i++) {
        running += weight_of(heap[vocab - 1 - i].logit, top, s->temperature);
        if (running > sum * uniform) return heap[vocab - 1 - i].token;
    }
    return heap[vocab - 1].token;
}

int sampling_draw(const Sampling *sampling, const floatX *logits, uint64_t index) {
    assert(sampling->vocab > 0 && (sampling->candidates || (sampling->top_k <= 0 && sampling->top_p >= 1)));
    if (!(sampling->temperature > 0.0)) return largest_logit(logits, sampling->vocab);
    double uniform = rng_uniform(sampling->seed, PURPOSE_SAMPLE, index);
    return sampling->candidates ? draw_of_likeliest(sampling, logits, uniform)
                                : draw_of_all(sampling, logits, uniform);
}
