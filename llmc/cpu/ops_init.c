// CPU ops, part 4: initial weights, drawn by all threads of the rank: see ops.h.
#include "llmc/cpu/ops_internal.h"
#include "llmc/base/normal.h"
#include "llmc/ranks/parallel.h"

// DRAW_PAIRS: pairs drawn at once, in loops over arrays that vectorize. PIECE: values per task.
enum { DRAW_PAIRS = 64, PIECE = 1 << 16 };

// A part of a tensor, as runs of consecutive numbers of the tensor's random stream. Each row is a
// run; if the part has all columns, it is a single run.
typedef struct Drawing {
    const InitWeights *op;
    int64_t run;     // numbers per run
    int64_t first;   // first number of the first run
    int64_t stride;  // distance between runs
} Drawing;

static Drawing drawing_of(const InitWeights *a) {
    bool all_columns = a->columns == a->whole_columns;
    return (Drawing){.op = a,
                     .run = all_columns ? a->rows * a->columns : a->columns,
                     .first = a->first_row * a->whole_columns + a->first_column,
                     .stride = a->whole_columns};
}

// Draws numbers 2 * pair .. 2 * (pair + pairs) - 1 of the stream in fp32. pairs <= DRAW_PAIRS.
static void draw_pairs(float *values, const InitWeights *a, uint64_t pair, int pairs) {
    uint32_t words[4][DRAW_PAIRS];
    for (int i = 0; i < pairs; i++) {
        Philox4 bits = counter_bits(a->seed, PURPOSE_INIT, a->tensor, pair + (uint64_t)i);
        for (int w = 0; w < 4; w++) words[w][i] = bits.v[w];
    }
    for (int i = 0; i < pairs; i++) {
        Philox4 bits = {{words[0][i], words[1][i], words[2][i], words[3][i]}};
        double drawn[2];
        if (a->bound > 0) symmetric_pair(bits, drawn);
        else normal_pair(bits, drawn);
        for (int e = 0; e < 2; e++)
            values[2 * i + e] = (float)f64_mul(a->bound > 0 ? a->bound : a->std, drawn[e]);
    }
}

// Sets elements at .. at + n - 1 of the part to numbers first, first + 1, ... of the stream.
// If `first` is odd, the run starts with the second number of a pair.
static void draw_run(const InitWeights *a, int64_t at, int64_t n, int64_t first) {
    float values[2 * DRAW_PAIRS];
    for (int64_t done = 0; done < n;) {
        int64_t number = first + done, skipped = number % 2;
        int64_t wanted = min64(2 * DRAW_PAIRS - skipped, n - done);
        draw_pairs(values, a, (uint64_t)number / 2, (int)ceil_div64(skipped + wanted, 2));
        narrow(a->weights + at + done, values + skipped, wanted);
        done += wanted;
    }
}

static void draw_range(void *drawing, int64_t lo, int64_t hi) {
    const Drawing *d = drawing;
    for (int64_t at = lo, n; at < hi; at += n) {
        int64_t inside = at % d->run;
        n = min64(d->run - inside, hi - at);
        draw_run(d->op, at, n, d->first + at / d->run * d->stride + inside);
    }
}

void op_init_weights(Stream *s, const InitWeights *a) {
    Drawing drawing = drawing_of(a);
    int64_t n = a->rows * a->columns;
    if (a->std > 0 || a->bound > 0) parallel_ranges(a->threads, 0, n, PIECE, draw_range, &drawing);
    else
        for (int64_t i = 0; i < n; i++) a->weights[i] = floatX_from_float(a->std < 0 ? 1.0f : 0.0f);
    show_progress(s);
}
