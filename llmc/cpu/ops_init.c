// The CPU backend of ops.h: initial weights, drawn on the threads that the rank may use. Called by
// train_gpt.cu (gpt_init_weights) through ops.h.
#include "llmc/cpu/internal.h"
#include "llmc/base/normal.h"
#include "llmc/ranks/parallel.h"

// Pairs drawn at once: loops over arrays of words and numbers are what the compiler can vectorise.
// PIECE: values that a thread takes at a time.
enum { DRAW_PAIRS = 64, PIECE = 1 << 16 };

typedef struct Drawing {
    floatX *weights;
    double std;
    uint64_t seed;
    uint32_t tensor;
} Drawing;

// The fp32 numbers 2 * pair .. 2 * (pair + DRAW_PAIRS) - 1 of the stream.
static void draw_pairs(float *values, const Drawing *d, uint64_t pair) {
    uint32_t words[4][DRAW_PAIRS];
    for (int i = 0; i < DRAW_PAIRS; i++) {
        Philox4 bits = counter_bits(d->seed, PURPOSE_INIT, d->tensor, pair + (uint64_t)i);
        for (int w = 0; w < 4; w++) words[w][i] = bits.v[w];
    }
    for (int i = 0; i < DRAW_PAIRS; i++) {
        Philox4 bits = {{words[0][i], words[1][i], words[2][i], words[3][i]}};
        double normal[2];
        normal_pair(bits, normal);
        for (int e = 0; e < 2; e++) values[2 * i + e] = (float)f64_mul(d->std, normal[e]);
    }
}

// Values [lo, hi), lo even.
static void draw_range(void *drawing, int64_t lo, int64_t hi) {
    const Drawing *d = drawing;
    float values[2 * DRAW_PAIRS];
    for (int64_t at = lo; at < hi; at += 2 * DRAW_PAIRS) {
        draw_pairs(values, d, (uint64_t)at / 2);
        narrow(d->weights + at, values, min64(2 * DRAW_PAIRS, hi - at));
    }
}

void op_init_weights(Stream *s, floatX *weights, int64_t n, double std, uint64_t seed, uint32_t tensor,
                     int threads) {
    Drawing drawing = {weights, std, seed, tensor};
    if (std > 0) parallel_ranges(threads, 0, n, PIECE, draw_range, &drawing);
    else for (int64_t i = 0; i < n; i++) weights[i] = floatX_from_float(std < 0 ? 1.0f : 0.0f);
    show_progress(s);
}
