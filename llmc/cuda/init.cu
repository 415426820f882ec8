// Initial weights, drawn on the GPU with a pair of numbers per thread: see ops.h.
#include "llmc/cuda/common.cuh"
#include "llmc/base/normal.h"

enum { INIT_THREADS = 256, BLOCKS_PER_PROCESSOR = 16 };

// A part of a tensor, as runs of consecutive numbers of the tensor's random stream. Each row is a
// run; if the part has all columns, it is a single run.
struct Drawing {
    InitWeights op;
    int64_t runs, run;      // number of runs, numbers per run
    int64_t first, stride;  // first number of the first run, distance between the starts of runs
    int64_t pairs;          // threads per run, at least its number of pairs
};

// Draws normal or uniform values, or writes ones if std is negative.
__global__ void __launch_bounds__(INIT_THREADS) init_weights_kernel(Drawing d) {
    for (int64_t i = (int64_t)blockIdx.x * INIT_THREADS + threadIdx.x; i < d.runs * d.pairs;
         i += (int64_t)gridDim.x * INIT_THREADS) {
        const int64_t run = i / d.pairs, first = d.first + run * d.stride;
        const int64_t pair = first / 2 + i % d.pairs;
        const bool uniform = d.op.bound > 0;
        const Philox4 bits = counter_bits(d.op.seed, PURPOSE_INIT, d.op.tensor, (uint64_t)pair);
        double drawn[2];
        if (uniform) symmetric_pair(bits, drawn);
        else normal_pair(bits, drawn);
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int64_t at = 2 * pair + e - first;
            const double factor = uniform ? d.op.bound : d.op.std;
            float value = factor < 0 ? 1.0f : __double2float_rn(f64_mul(factor, drawn[e]));
            if (at >= 0 && at < d.run) d.op.weights[run * d.run + at] = floatX_from_float(value);
        }
    }
}

static Drawing drawing_of(const InitWeights *a) {
    Drawing d = {*a};
    bool all_columns = a->columns == a->whole_columns;
    d.runs = all_columns ? 1 : a->rows;
    d.run = all_columns ? a->rows * a->columns : a->columns;
    d.first = a->first_row * a->whole_columns + a->first_column;
    d.stride = a->whole_columns;
    d.pairs = d.run / 2 + 1;  // a run may start with the second number of a pair
    return d;
}

void op_init_weights(Stream *s, const InitWeights *a) {
    const Drawing d = drawing_of(a);
    if (d.runs * d.run <= 0) return;
    if (a->std == 0 && !(a->bound > 0)) {
        set_zero(s, a->weights, (size_t)(d.runs * d.run) * sizeof *a->weights);
        return;
    }
    int64_t blocks = ceil_div64(d.runs * d.pairs, INIT_THREADS),
            most = (int64_t)stream_device(s)->multiprocessors * BLOCKS_PER_PROCESSOR;
    init_weights_kernel<<<(unsigned)(blocks < most ? blocks : most), INIT_THREADS, 0, stream_handle(s)>>>(d);
    check_launch(s, "initial weights");
}
