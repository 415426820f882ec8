// Properties of the algorithm, tested with the single-process simulator, which matches the
// distributed program bit by bit (test/mpi/test_sdp4bit_mpi.c): two-level errors on 4 nodes x 8
// ranks, baselines against a mean in double, AdamW against its formulas, and 1000 steps of a toy
// problem. With quantized weight differences model weights stay near the master weights; with
// direct quantization they do not.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "test/mpi/simulator.h"

// A tensor that model parallelism does not split.
#define MATRIX(NUMEL, UNIT) \
    { .numel = (NUMEL), .matrix = true, .unit = (UNIT) }
#define VECTOR(NUMEL, UNIT) \
    { .numel = (NUMEL), .matrix = false, .unit = (UNIT) }

static double uniform(uint32_t bits) { return (bits + 0.5) * 0x1p-32; }

static float normal(uint32_t stream, uint32_t a, uint32_t b, uint32_t i, double outliers) {
    Philox4 r = philox4x32_10(stream, 3, i, a, b, 0);
    double x = sqrt(-2 * log(uniform(r.v[0]))) * cos(6.283185307179586 * uniform(r.v[1]));
    return (float)(uniform(r.v[2]) < outliers ? 20 * x : x);
}

// One matrix of n elements over nodes x per_node ranks.
typedef struct Bench {
    LayoutTensor tensor;
    BucketLayout layout;
    Simulator sim;
    float **grads;  // (dp)
    float *losses;  // (dp)
} Bench;

// Enables error feedback between nodes.
static void bench_feed_back(Bench *bench) {
    SimulatorOptions o = bench->sim.options;
    floatX *w = (floatX *)xcalloc((size_t)bench->layout.arena_elements, sizeof *w, "weights");
    o.error_feedback = true;
    simulator_free(&bench->sim);
    simulator_create(&bench->sim, &o, w);
    free(w);
}

static void bench_start(Bench *bench, int64_t n, int nodes, int per_node, GradFormat grad,
                        WeightFormat weight, const float *weights) {
    LayoutTensor tensor = MATRIX(n, 0);
    bench->tensor = tensor;
    int64_t alignment = layout_alignment(grad.intra_group, grad.inter_group, weight.group);
    LayoutOptions options = {nodes,     per_node,
                             alignment, layout_alignment(grad.intra_group, grad.inter_group, 0),
                             1,         1};
    assert_true(layout_build(&bench->layout, &bench->tensor, 1, &options, NULL));
    floatX *w = (floatX *)xcalloc((size_t)bench->layout.arena_elements, sizeof *w, "weights");
    for (int64_t i = 0; weights && i < n; i++) w[i] = floatX_from_float(weights[i]);
    SimulatorOptions o = {&bench->layout, &bench->tensor, grad, weight, 42,   0.9f, 0.95f,
                          1e-8f,          0.0f,           0.0f, true,   0.0f, false};
    simulator_create(&bench->sim, &o, w);
    free(w);
    bench->grads = (float **)xcalloc((size_t)bench->layout.dp, sizeof *bench->grads, "gradients");
    bench->losses = (float *)xcalloc((size_t)bench->layout.dp, sizeof *bench->losses, "losses");
    for (int r = 0; r < bench->layout.dp; r++) {
        bench->grads[r] = (float *)xcalloc((size_t)bench->layout.arena_elements, sizeof(float), "gradients");
    }
}

static void bench_stop(Bench *bench) {
    for (int r = 0; r < bench->layout.dp; r++) free(bench->grads[r]);
    free(bench->grads);
    free(bench->losses);
    simulator_free(&bench->sim);
    layout_free(&bench->layout);
}

// --- two-level errors ---------------------------------------------------------------------------

enum { LEVEL_SAMPLES = 1 << 18, NODES = 4, PER_NODE = 8, RANKS = NODES * PER_NODE };

static double reduction_error(float *const *grads, const double *mean, GradFormat format, uint32_t step) {
    Bench bench;
    WeightFormat weight = {CODEC_BF16, 32, false, ROUND_NEAREST};
    bench_start(&bench, LEVEL_SAMPLES, NODES, PER_NODE, format, weight, NULL);
    float *shifted[RANKS];
    for (int r = 0; r < RANKS; r++) {
        shifted[r] = bench.grads[r];
        memcpy(shifted[r], grads[r], LEVEL_SAMPLES * sizeof(float));
    }
    simulator_reduce(&bench.sim, shifted, step);
    double error = 0, power = 0;
    for (int64_t i = 0; i < LEVEL_SAMPLES; i++) {
        double difference = (double)bench.sim.reduced[i] - mean[i];
        error += difference * difference;
        power += mean[i] * mean[i];
    }
    bench_stop(&bench);
    return sqrt(error / power);
}

// Fills the gradients of 32 ranks with independent values, of which 1 % are outliers that are 20
// times as large.
static void independent_gradients(float **grads, double *mean, double outliers) {
    for (uint32_t r = 0; r < RANKS; r++) {
        grads[r] = (float *)xmalloc(LEVEL_SAMPLES * sizeof(float), "gradients");
        for (uint32_t i = 0; i < LEVEL_SAMPLES; i++) {
            grads[r][i] = normal(1, r, 0, i, outliers);
            mean[i] += (double)grads[r][i] / RANKS;
        }
    }
}

static void test_two_level_errors(void **state) {
    static const struct {
        int intra, inter;
        bool hadamard;
        double stochastic, nearest;
    } rows[] = {{CODEC_INT8, CODEC_INT4, true, .162, .115},
                {CODEC_INT8, CODEC_INT4, false, .363, .254},
                {CODEC_INT4, CODEC_INT4, true, .221, .157},
                {CODEC_INT4, CODEC_INT4, false, .587, .369}};
    float *grads[RANKS];
    double *mean = (double *)xcalloc(LEVEL_SAMPLES, sizeof *mean, "the mean");
    independent_gradients(grads, mean, 0.01);
    for (int i = 0; i < 4; i++) {
        for (int rounding = ROUND_NEAREST; rounding <= ROUND_STOCHASTIC; rounding++) {
            GradFormat format = {rows[i].intra, rows[i].inter,    128,      128,
                                 CODEC_BF16,    rows[i].hadamard, rounding, 1};
            double expected = rounding == ROUND_STOCHASTIC ? rows[i].stochastic : rows[i].nearest;
            double measured = reduction_error(grads, mean, format, 1);
            if (fabs(measured - expected) > 0.02 * expected + 0.0005)
                fail_msg("row %d rounding %d: %.4f, expected %.4f", i, rounding, measured, expected);
        }
    }
    for (int r = 0; r < RANKS; r++) free(grads[r]);
    free(mean);
}

// Returns the bits per gradient between nodes, including scales.
static double bits_between(GradFormat format) {
    Bench bench;
    WeightFormat weight = {CODEC_BF16, 32, false, ROUND_NEAREST};
    bench_start(&bench, LEVEL_SAMPLES, NODES, PER_NODE, format, weight, NULL);
    double bytes = layout_wire_formula(&bench.layout, &format, &weight).grad_inter;
    bench_stop(&bench);
    return 8 * bytes / LEVEL_SAMPLES * PER_NODE * NODES / (NODES - 1);
}

// With EDEN and independent Gaussian gradients, the relative squared error of the reduced gradient
// matches the numpy model (dev/ref/eden_model.py) and is within its limits.
static void test_eden_errors(void **state) {
    static const struct {
        Codec codec;
        double bits, most, expected;
    } rows[] = {{CODEC_EDEN4, 4.2, .0095, .00911},
                {CODEC_EDEN3, 3.2, .036, .03510},
                {CODEC_EDEN2, 2.2, .135, .13263}};
    float *grads[RANKS];
    double *mean = (double *)xcalloc(LEVEL_SAMPLES, sizeof *mean, "the mean");
    independent_gradients(grads, mean, 0);
    for (int i = 0; i < 3; i++) {
        GradFormat format = {CODEC_INT8,         rows[i].codec,    128, EDEN_GROUP, CODEC_BF16,
                             TRANSFORM_ROTATION, ROUND_STOCHASTIC, 1};
        double error = pow(reduction_error(grads, mean, format, 1), 2), bits = bits_between(format);
        print_message("    %s: %.3f bits, relative squared error %.5f\n", codec_info(rows[i].codec).name,
                      bits, error);
        assert_true(bits <= rows[i].bits);
        assert_true(error <= rows[i].most);
        if (fabs(error - rows[i].expected) > 0.02 * rows[i].expected)
            fail_msg("%s: %.5f, expected %.5f", codec_info(rows[i].codec).name, error, rows[i].expected);
    }
    for (int r = 0; r < RANKS; r++) free(grads[r]);
    free(mean);
}

// Each step uses another rotation, so the mean over many steps is within 4 standard deviations of
// the true mean for every element. With a fixed rotation the error would repeat.
static void test_eden_unbiased(void **state) {
    enum { N = 1024, TRIALS = 1000 };
    static const Codec codecs[] = {CODEC_EDEN4, CODEC_EDEN3};
    static double sum[N], squares[N];
    for (int c = 0; c < 2; c++) {
        Bench bench;
        GradFormat format = {CODEC_INT8,         codecs[c],        128, EDEN_GROUP, CODEC_BF16,
                             TRANSFORM_ROTATION, ROUND_STOCHASTIC, 1};
        WeightFormat weight = {CODEC_BF16, 32, false, ROUND_NEAREST};
        bench_start(&bench, N, 2, 2, format, weight, NULL);
        memset(sum, 0, sizeof sum);
        memset(squares, 0, sizeof squares);
        for (uint32_t r = 0; r < 4; r++) {
            for (uint32_t i = 0; i < N; i++) bench.grads[r][i] = normal(3, r, 0, i, 0);
        }
        for (uint32_t step = 0; step < TRIALS; step++) {
            simulator_reduce(&bench.sim, bench.grads, step);
            for (int i = 0; i < N; i++) {
                double mean = 0;
                for (int r = 0; r < 4; r++) mean += (double)bench.grads[r][i] / 4;
                double error = (double)bench.sim.reduced[i] - mean;
                sum[i] += error;
                squares[i] += error * error;
            }
        }
        for (int i = 0; i < N; i++) {
            double sigma = sqrt(squares[i]) / TRIALS;
            if (fabs(sum[i] / TRIALS) > 4 * sigma)
                fail_msg("%s, element %d: off by %.2f sigma", codec_info(codecs[c]).name, i,
                         sum[i] / TRIALS / sigma);
        }
        bench_stop(&bench);
    }
}

// Computes the relative L2 error of the accumulated payloads against the accumulated gradients
// after EARLY and LATE steps. Every rank's gradient has a constant and a random part.
enum { FED = 1 << 13, EARLY = 16, LATE = 64 };
typedef struct Drift {
    double early, late;
} Drift;

static Drift drift_of(GradFormat format, bool feedback) {
    Bench bench;
    WeightFormat weight = {CODEC_BF16, 32, false, ROUND_NEAREST};
    Drift drift = {0, 0};
    bench_start(&bench, FED, 4, 2, format, weight, NULL);
    if (feedback) bench_feed_back(&bench);
    double *sent = (double *)xcalloc(FED, sizeof *sent, "sums");
    double *mean = (double *)xcalloc(FED, sizeof *mean, "sums");
    for (uint32_t step = 1; step <= LATE; step++) {
        for (uint32_t r = 0; r < (uint32_t)bench.layout.dp; r++) {
            for (uint32_t i = 0; i < FED; i++) {
                bench.grads[r][i] = normal(4, 0, 0, i, 0.01) + normal(5, r, step, i, 0);
                mean[i] += (double)bench.grads[r][i] / bench.layout.dp;
            }
        }
        simulator_reduce(&bench.sim, bench.grads, step);
        double error = 0, power = 0;
        for (int64_t i = 0; i < FED; i++) {
            sent[i] += (double)bench.sim.reduced[i];
            error += (sent[i] - mean[i]) * (sent[i] - mean[i]);
            power += mean[i] * mean[i] / ((double)step * step);  // power of one step
        }
        if (step == EARLY) drift.early = sqrt(error / power);
        drift.late = sqrt(error / power);
    }
    free(sent);
    free(mean);
    bench_stop(&bench);
    return drift;
}

// With error feedback, the error of the accumulated payloads (see Drift) stays constant, even at 2
// bits. Without it, the error grows with the square root of the number of steps, or linearly if
// rounding is biased.
static void test_error_feedback(void **state) {
    static const struct {
        const char *name;
        GradFormat format;
        double most;  // limit after LATE steps with error feedback, relative to one step's gradient
    } rows[] = {
        {"EDEN at 2 bits",
         {CODEC_BF16, CODEC_EDEN2, 32, 256, CODEC_BF16, TRANSFORM_ROTATION, ROUND_NEAREST, 1},
         0.35},
        {"int4, stochastic",
         {CODEC_BF16, CODEC_INT4, 32, 128, CODEC_BF16, TRANSFORM_HADAMARD, ROUND_STOCHASTIC, 1},
         0.1},
        {"int4, nearest",
         {CODEC_BF16, CODEC_INT4, 32, 128, CODEC_BF16, TRANSFORM_HADAMARD, ROUND_NEAREST, 1},
         0.07},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        Drift plain = drift_of(rows[i].format, false), fed = drift_of(rows[i].format, true);
        print_message(
            "    %-16s error of the sum, in gradients of a step: %.3f then %.3f; with error "
            "feedback %.3f then %.3f\n",
            rows[i].name, plain.early, plain.late, fed.early, fed.late);
        assert_true(plain.late > 1.6 * plain.early);
        assert_true(fed.late < 1.2 * fed.early && fed.late < rows[i].most);
        assert_true(fed.late < plain.late / 4);
    }
}

// Rounding errors of ranks are independent, so averaging 8 ranks with equal gradients divides the
// error by sqrt(8). If the key did not include the source, all ranks would have the same error.
static void test_rounding_errors_average_out(void **state) {
    enum { N = 1 << 16 };
    double error[2];
    for (int many = 0; many < 2; many++) {
        Bench bench;
        GradFormat format = {CODEC_INT8, CODEC_INT4, 128, 128, CODEC_BF16, false, ROUND_STOCHASTIC, 1};
        WeightFormat weight = {CODEC_BF16, 32, false, ROUND_NEAREST};
        bench_start(&bench, N, 1, many ? 8 : 2, format, weight, NULL);
        for (int r = 0; r < bench.layout.dp; r++) {
            for (uint32_t i = 0; i < N; i++) bench.grads[r][i] = normal(2, 0, 0, i, 0);
        }
        simulator_reduce(&bench.sim, bench.grads, 1);
        error[many] = 0;
        for (uint32_t i = 0; i < N; i++)
            error[many] += pow((double)bench.sim.reduced[i] - (double)bench.grads[0][i], 2);
        bench_stop(&bench);
    }
    double ratio = sqrt(error[0] / error[1]);  // error of 2 ranks relative to 8 ranks
    assert_true(ratio > 1.95 && ratio < 2.05);
}

// With stochastic rounding at both levels the mean over many steps approaches the true mean.
// Rounding to nearest is biased.
static void test_reduction_unbiased(void **state) {
    enum { N = 1024, TRIALS = 400 };
    double bias[2];
    for (int rounding = 0; rounding < 2; rounding++) {
        Bench bench;
        GradFormat format = {CODEC_INT8, CODEC_INT4, 128, 128, CODEC_BF16, true, rounding, 1};
        WeightFormat weight = {CODEC_BF16, 32, false, ROUND_NEAREST};
        bench_start(&bench, N, 2, 2, format, weight, NULL);
        static double sum[N], mean[N];
        memset(sum, 0, sizeof sum);
        memset(mean, 0, sizeof mean);
        for (int r = 0; r < 4; r++) {
            for (uint32_t i = 0; i < N; i++)
                mean[i] += (double)(bench.grads[r][i] = normal(3, (uint32_t)r, 0, i, 0.01)) / 4;
        }
        for (uint32_t step = 0; step < TRIALS; step++) {
            simulator_reduce(&bench.sim, bench.grads, step);
            for (int i = 0; i < N; i++) sum[i] += (double)bench.sim.reduced[i];
        }
        double error = 0, power = 0;
        for (int i = 0; i < N; i++) {
            error += pow(sum[i] / TRIALS - mean[i], 2);
            power += mean[i] * mean[i];
        }
        bias[rounding] = sqrt(error / power);
        bench_stop(&bench);
    }
    // The error of 0.16 per step shrinks by sqrt(400). Rounding to nearest repeats the same error.
    assert_true(bias[ROUND_STOCHASTIC] < 0.16 / 20 * 1.2);
    assert_true(bias[ROUND_NEAREST] > 0.08);
}

// --- the baseline and AdamW ---------------------------------------------------------------------

static void test_fp32_reduction_is_the_mean(void **state) {
    enum { N = 5000 };
    for (int transform = 0; transform < 2; transform++) {
        Bench bench;
        GradFormat format = {CODEC_FP32, CODEC_FP32, 32, 32, CODEC_FP32, transform, ROUND_STOCHASTIC, 1};
        WeightFormat weight = {CODEC_BF16, 32, false, ROUND_NEAREST};
        bench_start(&bench, N, 3, 2, format, weight, NULL);
        for (int r = 0; r < 6; r++) {
            for (uint32_t i = 0; i < N; i++) bench.grads[r][i] = normal(4, (uint32_t)r, 0, i, 0);
        }
        simulator_reduce(&bench.sim, bench.grads, 1);
        for (int i = 0; i < N; i++) {
            double mean = 0;
            for (int r = 0; r < 6; r++) mean += (double)bench.grads[r][i] / 6;
            assert_true(fabs((double)bench.sim.reduced[i] - mean) < 2e-6);
        }
        bench_stop(&bench);
    }
}

// Compares ten steps on one rank, with clipping and decay, with AdamW in double.
static void test_adamw(void **state) {
    enum { N = 96 };
    float weights[N];
    double p[N], m[N] = {0}, v[N] = {0};
    for (uint32_t i = 0; i < N; i++) weights[i] = bf16_to_float(bf16_from_float(normal(5, 0, 0, i, 0)));
    for (int i = 0; i < N; i++) p[i] = (double)weights[i];
    Bench bench;
    GradFormat format = {CODEC_FP32, CODEC_FP32, 32, 32, CODEC_FP32, false, ROUND_NEAREST, 1};
    WeightFormat weight = {CODEC_BF16, 32, false, ROUND_NEAREST};
    bench_start(&bench, N, 1, 1, format, weight, weights);
    bench.sim.options.clip_grad = 1.0f;
    bench.sim.options.weight_decay = 0.1f;
    for (int t = 1; t <= 10; t++) {
        double squares = 0, lr = 0.01;
        for (uint32_t i = 0; i < N; i++) {
            bench.grads[0][i] = normal(6, (uint32_t)t, 0, i, 0);
            squares += pow((double)bench.grads[0][i], 2);
        }
        simulator_step(&bench.sim, bench.grads, bench.losses, (uint32_t)t, 0.01f, 0.01f);
        assert_true(fabs((double)bench.sim.control.grad_norm - sqrt(squares)) < 1e-5 * sqrt(squares));
        for (int i = 0; i < N; i++) {
            // The norm is about 10, above the limit of 1.
            double g = (double)bench.grads[0][i] / (sqrt(squares) + 1e-6);
            m[i] = 0.9 * m[i] + 0.1 * g;
            v[i] = 0.95 * v[i] + 0.05 * g * g;
            p[i] -= lr * (m[i] / (1 - pow(0.9, t)) / (sqrt(v[i] / (1 - pow(0.95, t))) + 1e-8) + 0.1 * p[i]);
            assert_true(fabs((double)bench.sim.master[i] - p[i]) < 3e-6);
            assert_int_equal(bench.sim.replica[i], floatX_from_float(bench.sim.master[i]));
        }
    }
    bench_stop(&bench);
}

// --- 1000 steps ---------------------------------------------------------------------------------

enum { TOY = 1024, TOY_STEPS = 1000, TOY_RANKS = 4 };

typedef struct ToyResult {
    double loss;                         // mean squared distance of the final model weights from the target
    double largest_early, largest_late;  // largest |master - model weight| in each half
    double largest_end;                  // at the last step
    bool bounded;                        // every step satisfied the contraction bound
} ToyResult;

static double largest_gap(const Bench *bench) {
    double largest = 0;
    for (int i = 0; i < TOY; i++) {
        double gap = fabs((double)bench->sim.master[i] - (double)floatX_to_float(bench->sim.replica[i]));
        largest = gap > largest ? gap : largest;
    }
    return largest;
}

// Computes the gradient of 1/2 curvature (w - target)^2 at the model weights, plus independent
// noise per rank.
static void toy_gradients(Bench *bench, const float *target, uint32_t step) {
    for (uint32_t r = 0; r < TOY_RANKS; r++) {
        for (uint32_t i = 0; i < TOY; i++) {
            float curvature = 0.2f + (float)(i % 7);
            bench->grads[r][i] = curvature * (floatX_to_float(bench->sim.replica[i]) - target[i]) +
                                 0.05f * normal(7, r, step, i, 0);
        }
    }
}

// The bound in the paper's appendix: |e'| <= c (|e| + |update|) plus bf16 rounding, with c = 1/7 of
// the group's largest difference, or half of that with rounding to nearest.
static bool step_bounded(const Bench *bench, const float *before, double gap_before, double gap,
                         bool nearest) {
    double update = 0, weight = 0;
    for (int i = 0; i < TOY; i++) {
        update = fmax(update, fabs((double)bench->sim.master[i] - (double)before[i]));
        weight = fmax(weight, fabs((double)floatX_to_float(bench->sim.replica[i])));
    }
    double contraction = nearest ? 1.0 / 14 : 1.0 / 7;
    return gap <= contraction * (gap_before + update) * (1 + 1e-4) + weight * 0x1p-8;
}

static ToyResult toy(WeightFormat weight) {
    float weights[TOY], target[TOY], before[TOY];
    for (uint32_t i = 0; i < TOY; i++) {
        weights[i] = normal(8, 0, 0, i, 0);
        target[i] = normal(8, 1, 0, i, 0);
    }
    Bench bench;
    GradFormat grad = {CODEC_INT8, CODEC_INT4, 128, 128, CODEC_BF16, true, ROUND_STOCHASTIC, 1};
    bench_start(&bench, TOY, 2, 2, grad, weight, weights);
    ToyResult result = {0};
    result.bounded = true;
    double gap = 0;
    for (uint32_t step = 1; step <= TOY_STEPS; step++) {
        float lr = 0.02f * 0.5f * (1 + cosf(3.14159265f * (float)(step - 1) / TOY_STEPS));
        memcpy(before, bench.sim.master, sizeof before);
        toy_gradients(&bench, target, step);
        simulator_step(&bench.sim, bench.grads, bench.losses, step, lr, lr);
        double now = largest_gap(&bench);
        if (!step_bounded(&bench, before, gap, now, weight.rounding == ROUND_NEAREST)) result.bounded = false;
        gap = now;
        double *half = step <= TOY_STEPS / 2 ? &result.largest_early : &result.largest_late;
        *half = fmax(*half, gap);
    }
    result.largest_end = gap;
    for (int i = 0; i < TOY; i++)
        result.loss += pow((double)floatX_to_float(bench.sim.replica[i]) - (double)target[i], 2) / TOY;
    bench_stop(&bench);
    return result;
}

static void test_thousand_steps(void **state) {
    WeightFormat bf16 = {CODEC_BF16, 32, false, ROUND_NEAREST};
    ToyResult base = toy(bf16);
    print_message("    bf16 weights:             distance %.3g, |master - replica| at the end %.3g\n",
                  base.loss, base.largest_end);
    for (int rounding = ROUND_NEAREST; rounding <= ROUND_STOCHASTIC; rounding++) {
        const char *name = rounding == ROUND_NEAREST ? "nearest" : "stochastic";
        WeightFormat difference = {CODEC_INT4, 512, true, rounding},
                     direct = {CODEC_INT4, 512, false, rounding};
        ToyResult qwd = toy(difference), qw = toy(direct);
        print_message("    qWD int4 %-10s:      distance %.3g, at the end %.3g, largest %.3g then %.3g\n",
                      name, qwd.loss, qwd.largest_end, qwd.largest_early, qwd.largest_late);
        print_message("    qW  int4 %-10s:      distance %.3g, at the end %.3g\n", name, qw.loss,
                      qw.largest_end);
        assert_true(qwd.bounded);
        assert_true(qwd.largest_late <= qwd.largest_early);  // errors do not accumulate
        assert_true(qwd.largest_end < 0x1p-8 * 4);           // bf16 rounding of weights below 4
        assert_true(qwd.loss < 1.1 * base.loss);
        assert_true(qw.loss > 10 * qwd.loss);
        assert_true(qw.largest_end > 10 * qwd.largest_end);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_two_level_errors),
        cmocka_unit_test(test_eden_errors),
        cmocka_unit_test(test_eden_unbiased),
        cmocka_unit_test(test_error_feedback),
        cmocka_unit_test(test_rounding_errors_average_out),
        cmocka_unit_test(test_reduction_unbiased),
        cmocka_unit_test(test_fp32_reduction_is_the_mean),
        cmocka_unit_test(test_adamw),
        cmocka_unit_test(test_thousand_steps),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
