// Tests the linear layers on a GPU against fp64 on the host, and checks that a second call is
// bitwise identical. --speed also prints GEMM rates of a layer of the 125M model at micro-batch
// size 32 and sequence length 2048.
//
// Tolerances are the sum of these error bounds:
//   stored value  half a unit in the last place of bf16 (at most 2^-8 of the value)
//   fp32 sums     k x 2^-23 x sum of |a b|, in any order
//   tanh          2^-11 for the hardware's tanh, times its factor
#include <string.h>

#include "llmc/ops.h"
#include "test/gpu/linear_data.h"

// (1 + tanh(u)) / 2 without cancellation, which would lose all digits below u = -19.
static double exact_gate(double x) {
    return 1.0 / (1.0 + exp(-2.0 * 0.7978845608028654 * (x + 0.044715 * x * x * x)));
}
static double exact_gelu(double x) { return x * exact_gate(x); }
static double exact_gelu_derivative(double x) {
    double u = 0.7978845608028654 * (x + 0.044715 * x * x * x), t = tanh(u);
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * 0.7978845608028654 * (1.0 + 3 * 0.044715 * x * x);
}

static void check_worst(Bench *b, const Worst *worst, const char *what, int64_t N, int C, int OC) {
    check(b->checks, worst->ratio <= 1.0,
          "%s of (%lld, %d) x (%d, %d)^T: element %lld is off by %g times its bound", what, (long long)N, C,
          OC, C, (long long)worst->at, worst->ratio);
}

// --- forward -------------------------------------------------------------------------------------

static void test_forward(Bench *b, int64_t N, int C, int OC, bool with_pre, bool with_bias) {
    Values x = random_values(b, N * C, 1.0f), w = random_values(b, (int64_t)OC * C, 2.0f / sqrtf((float)C)),
           bias = random_values(b, OC, 0.5f);
    floatX *y = (floatX *)new_memory(b, (size_t)(N * OC) * sizeof(floatX)),
           *pre = (floatX *)new_memory(b, (size_t)(N * OC) * sizeof(floatX));
    void *workspace = new_memory(b, op_linear_workspace_bytes(N, C, OC));
    Linear linear = {.N = N,
                     .C = C,
                     .OC = OC,
                     .x = x.device,
                     .w = w.device,
                     .bias = with_bias ? bias.device : NULL,
                     .y = y};
    linear.pre = with_pre ? pre : NULL;
    linear.workspace = workspace;
    op_linear_forward(b->stream, &linear);
    floatX *got_y = fetch(b, y, N * OC, sizeof(floatX)), *got_pre = fetch(b, pre, N * OC, sizeof(floatX));
    Worst worst_y = {}, worst_pre = {};
    for (int64_t n = 0; n < N; n++) {
        for (int o = 0; o < OC; o++) {
            int64_t i = n * OC + o;
            double sum = with_bias ? at(&bias, o) : 0.0, size = fabs(sum);
            for (int k = 0; k < C; k++)
                sum += at(&x, n * C + k) * at(&w, (int64_t)o * C + k),
                    size += fabs(at(&x, n * C + k) * at(&w, (int64_t)o * C + k));
            double summed = C * 0x1p-23 * size;
            if (with_pre) {
                compare(&worst_pre, i, floatX_to_float(got_pre[i]), sum, bf16_half_ulp(sum) + summed);
                // Depending on the epilogue, GELU is applied before or after the sum is rounded.
                // |GELU'| <= 1.13.
                compare(&worst_y, i, floatX_to_float(got_y[i]), exact_gelu(sum),
                        bf16_half_ulp(exact_gelu(sum)) + 1.13 * (summed + bf16_half_ulp(sum)) +
                            fabs(sum) * 0x1p-11);
            } else {
                compare(&worst_y, i, floatX_to_float(got_y[i]), sum, bf16_half_ulp(sum) + summed);
            }
        }
    }
    check_worst(b, &worst_y, with_pre ? "GELU" : "the product", N, C, OC);
    if (with_pre) check_worst(b, &worst_pre, "the pre-activation", N, C, OC);
    op_linear_forward(b->stream, &linear);
    floatX *again = fetch(b, y, N * OC, sizeof(floatX));
    check(b->checks, memcmp(again, got_y, (size_t)(N * OC) * sizeof(floatX)) == 0,
          "a second forward differs");
    values_free(b, &x), values_free(b, &w), values_free(b, &bias);
    device_free(b->device, y), device_free(b->device, pre), device_free(b->device, workspace);
    free(got_y), free(got_pre), free(again);
}

// --- backward ------------------------------------------------------------------------------------

static void check_dx(Bench *b, const floatX *dx, const Values *dy, const Values *w, const Values *pre,
                     int64_t N, int C, int OC) {
    Worst worst = {};
    for (int64_t n = 0; n < N; n++) {
        for (int k = 0; k < C; k++) {
            double sum = 0.0, size = 0.0;
            for (int o = 0; o < OC; o++)
                sum += at(dy, n * OC + o) * at(w, (int64_t)o * C + k),
                    size += fabs(at(dy, n * OC + o) * at(w, (int64_t)o * C + k));
            double p = pre ? at(pre, n * C + k) : 0.0, slope = pre ? exact_gelu_derivative(p) : 1.0;
            // The product may be rounded before it is multiplied by GELU'. GELU' may be computed
            // with the hardware's tanh, which has a relative error of 2^-11.
            double bound = bf16_half_ulp(sum * slope) + OC * 0x1p-23 * size * 1.13;
            if (pre)
                bound += fabs(slope) * bf16_half_ulp(sum) +
                         fabs(sum) * (1.0 + fabs(p)) * (1.0 + p * p / 7.0) * 0x1p-11;
            compare(&worst, n * C + k, floatX_to_float(dx[n * C + k]), sum * slope, bound);
        }
    }
    check_worst(b, &worst, pre ? "dx through GELU" : "dx", N, C, OC);
}

// Compares dw and dbias with `before` plus the sum over `passes` equal micro-batches.
static void check_dw(Bench *b, const float *dw, const float *dbias, float before, int passes,
                     const Values *dy, const Values *x, int64_t N, int C, int OC) {
    Worst worst = {}, worst_bias = {};
    for (int o = 0; o < OC; o++) {
        double column = 0.0, column_size = fabs(before);
        for (int64_t n = 0; n < N; n++) column += at(dy, n * OC + o), column_size += fabs(at(dy, n * OC + o));
        if (dbias)
            compare(&worst_bias, o, dbias[o], before + passes * column,
                    (double)(N + 2) * passes * 0x1p-23 * column_size);
        for (int k = 0; k < C; k++) {
            double sum = 0.0, size = fabs(before);
            for (int64_t n = 0; n < N; n++)
                sum += at(dy, n * OC + o) * at(x, n * C + k),
                    size += fabs(at(dy, n * OC + o) * at(x, n * C + k));
            compare(&worst, (int64_t)o * C + k, dw[(int64_t)o * C + k], before + passes * sum,
                    (double)(N + 2) * passes * 0x1p-23 * size);
        }
    }
    check_worst(b, &worst, "dw", N, C, OC);
    if (dbias) check_worst(b, &worst_bias, "dbias", N, C, OC);
}

// Compares dpre_bias (C) with the sum of dx (N, C) over `passes` equal micro-batches. The kernel
// may sum before or after dx is rounded.
static void check_dpre_bias(Bench *b, const float *device_bias, const floatX *device_dx, int passes,
                            int64_t N, int C) {
    float *got = (float *)fetch(b, device_bias, C, sizeof(float));
    floatX *dx = fetch(b, device_dx, N * C, sizeof(floatX));
    Worst worst = {};
    for (int c = 0; c < C; c++) {
        double sum = 0.0, bound = 0.0;
        for (int64_t n = 0; n < N; n++) {
            double value = floatX_to_float(dx[n * C + c]);
            sum += passes * value,
                bound += passes * (bf16_half_ulp(value) + (double)(N + 2) * passes * 0x1p-23 * fabs(value));
        }
        compare(&worst, c, got[c], sum, bound);
    }
    check_worst(b, &worst, "bias gradient before GELU", N, C, 0);
    free(got), free(dx);
}

// Two micro-batches, added to nonzero gradients.
static void test_backward(Bench *b, int64_t N, int C, int OC, bool with_pre) {
    const float before = 3.25f;
    Values dy = random_values(b, N * OC, 1.0f), x = random_values(b, N * C, 1.0f),
           w = random_values(b, (int64_t)OC * C, 0.5f), pre = random_values(b, N * C, 4.0f);
    size_t dw_bytes = (size_t)OC * C * sizeof(float), dbias_bytes = (size_t)OC * sizeof(float);
    floatX *dx = (floatX *)new_memory(b, (size_t)(N * C) * sizeof(floatX));
    float *dw = (float *)new_memory(b, dw_bytes), *dbias = (float *)new_memory(b, dbias_bytes),
          *start = (float *)new_host(dw_bytes + dbias_bytes);
    for (size_t i = 0; i < (dw_bytes + dbias_bytes) / sizeof(float); i++) start[i] = before;
    void *workspace = new_memory(b, op_linear_workspace_bytes(N, C, OC));
    float *dpre_bias = (float *)new_memory(b, (size_t)C * sizeof(float));
    set_zero(b->stream, dpre_bias, (size_t)C * sizeof(float));
    float *first_dw = NULL, *first_dbias = NULL;
    Linear linear = {.N = N, .C = C, .OC = OC, .x = x.device, .w = w.device};
    linear.dy = dy.device;
    linear.x_pre = with_pre ? pre.device : NULL;
    linear.dx = dx;
    linear.dw = dw;
    linear.dpre_bias = with_pre ? dpre_bias : NULL;
    linear.workspace = workspace;
    for (int run = 0; run < 2; run++) {
        copy_to_device(b->stream, dw, start, dw_bytes);
        copy_to_device(b->stream, dbias, start, dbias_bytes);
        for (int pass = 0; pass < 2; pass++) {
            op_bias_gradient(b->stream, dbias, dy.device, NULL, N, OC, workspace, NULL);
            op_linear_backward(b->stream, &linear);
        }
        float *got_dw = (float *)fetch(b, dw, (int64_t)OC * C, sizeof(float)),
              *got_dbias = (float *)fetch(b, dbias, OC, sizeof(float));
        if (run == 0) {
            first_dw = got_dw, first_dbias = got_dbias;
            floatX *got_dx = fetch(b, dx, N * C, sizeof(floatX));
            check_dx(b, got_dx, &dy, &w, with_pre ? &pre : NULL, N, C, OC);
            check_dw(b, got_dw, got_dbias, before, 2, &dy, &x, N, C, OC);
            free(got_dx);
        } else {
            check(b->checks,
                  memcmp(got_dw, first_dw, dw_bytes) == 0 && memcmp(got_dbias, first_dbias, dbias_bytes) == 0,
                  "a second backward differs");
            free(got_dw), free(got_dbias);
        }
    }
    if (with_pre) check_dpre_bias(b, dpre_bias, dx, 4, N, C);
    linear.dx = NULL;  // only dw, once
    linear.overwrite = true;
    for (int beside = 0; beside < 2; beside++) {
        linear.beside_collective = beside == 1;
        op_linear_backward(b->stream, &linear);
        float *dw_after = (float *)fetch(b, dw, (int64_t)OC * C, sizeof(float));
        check_dw(b, dw_after, NULL, 0.0f, 1, &dy, &x, N, C, OC);
        free(dw_after);
    }
    float *bias_after = (float *)fetch(b, dbias, OC, sizeof(float));
    check(b->checks, memcmp(bias_after, first_dbias, dbias_bytes) == 0,
          "dbias changed without being requested");
    values_free(b, &dy), values_free(b, &x), values_free(b, &w), values_free(b, &pre);
    device_free(b->device, dx), device_free(b->device, dw), device_free(b->device, dbias),
        device_free(b->device, workspace);
    device_free(b->device, dpre_bias);
    free(start), free(first_dw), free(first_dbias), free(bias_after);
}

// Values from -8 to 8, and lengths that are not multiples of 8.
static void test_gelu(Bench *b) {
    const int64_t lengths[] = {1, 7, 8, 4099, 65536};
    Values pre = random_values(b, 65536, 8.0f);
    floatX *y = (floatX *)new_memory(b, 65537 * sizeof(floatX));
    for (int l = 0; l < 5; l++) {
        set_zero(b->stream, y, 65537 * sizeof(floatX));
        op_gelu_forward(b->stream, y, pre.device, lengths[l]);
        floatX *got = fetch(b, y, 65537, sizeof(floatX));
        Worst worst = {};
        for (int64_t i = 0; i < lengths[l]; i++) {
            double exact = exact_gelu(at(&pre, i));
            // The kernel computes e^-2u in fp32, with u up to 25.
            compare(&worst, i, floatX_to_float(got[i]), exact, bf16_half_ulp(exact) + fabs(exact) * 0x1p-15);
        }
        check(b->checks, worst.ratio <= 1.0, "GELU of %g is off by %g times its bound", at(&pre, worst.at),
              worst.ratio);
        check(b->checks, got[lengths[l]] == 0, "GELU of %lld values wrote past the end",
              (long long)lengths[l]);
        free(got);
    }
    values_free(b, &pre);
    device_free(b->device, y);
}

// Uses more shapes than the initial hash table of GEMM plans holds, each one twice, to check that
// the right plan is found.
static void test_many_shapes(Bench *b) {
    Values x = random_values(b, 256 * 64, 1.0f), w = random_values(b, 64 * 64, 0.5f);
    floatX *y = (floatX *)new_memory(b, 256 * 64 * sizeof(floatX));
    void *workspace = new_memory(b, op_linear_workspace_bytes(256, 64, 64));
    for (int round = 0; round < 2; round++) {
        for (int64_t N = 1; N <= 100; N++) {
            set_zero(b->stream, y, 256 * 64 * sizeof(floatX));
            Linear linear = {.N = N, .C = 64, .OC = 64, .x = x.device, .w = w.device, .bias = NULL, .y = y};
            linear.workspace = workspace;
            op_linear_forward(b->stream, &linear);
            floatX *got = fetch(b, y, 256 * 64, sizeof(floatX));
            double sum = 0.0;
            for (int k = 0; k < 64; k++) sum += at(&x, (N - 1) * 64 + k) * at(&w, 63 * 64 + k);
            check(b->checks,
                  fabs(floatX_to_float(got[N * 64 - 1]) - sum) <= bf16_half_ulp(sum) + 64 * 0x1p-23 * 64,
                  "the last of %lld rows is wrong", (long long)N);
            check(b->checks, got[N * 64] == 0, "%lld rows: wrote past the end", (long long)N);
            free(got);
        }
    }
    values_free(b, &x), values_free(b, &w);
    device_free(b->device, y), device_free(b->device, workspace);
}

// --- speed ---------------------------------------------------------------------------------------

typedef struct Layer {
    const char *name;
    int C, OC;
    bool gelu_out, gelu_in;  // forward ends in GELU; backward's dx passes GELU'
} Layer;

static void time_layer(Bench *b, const Layer *l, int64_t N) {
    enum { REPEATS = 20 };
    Values dy = random_values(b, N * l->OC, 1.0f), x = random_values(b, N * l->C, 1.0f),
           w = random_values(b, (int64_t)l->OC * l->C, 0.05f), bias = random_values(b, l->OC, 0.1f);
    floatX *wide = (floatX *)new_memory(b,
                                        (size_t)N * (size_t)(l->C > l->OC ? l->C : l->OC) * sizeof(floatX)),
           *pre = (floatX *)new_memory(b, (size_t)(N * l->OC) * sizeof(floatX));
    float *dw = (float *)new_memory(b, (size_t)l->OC * (size_t)l->C * sizeof(float)),
          *dbias = (float *)new_memory(b, (size_t)l->OC * sizeof(float));
    void *workspace = new_memory(b, op_linear_workspace_bytes(N, l->C, l->OC));
    Linear forward = {
        .N = N, .C = l->C, .OC = l->OC, .x = x.device, .w = w.device, .bias = bias.device, .y = wide};
    forward.pre = l->gelu_out ? pre : NULL;
    forward.workspace = workspace;
    Linear backward = {.N = N, .C = l->C, .OC = l->OC, .x = x.device, .w = w.device};
    backward.dy = dy.device;
    backward.x_pre = l->gelu_in ? x.device : NULL;
    backward.dx = wide;
    backward.dw = dw;
    backward.overwrite = true;
    backward.workspace = workspace;
    Event *mark[3] = {event_create_timed(b->device), event_create_timed(b->device),
                      event_create_timed(b->device)};
    for (int round = 0; round < 2; round++) {  // the first warms up
        event_record(mark[0], b->stream);
        for (int i = 0; i < REPEATS; i++) op_linear_forward(b->stream, &forward);
        event_record(mark[1], b->stream);
        for (int i = 0; i < REPEATS; i++) {
            op_bias_gradient(b->stream, dbias, dy.device, NULL, N, l->OC, workspace, NULL);
            op_linear_backward(b->stream, &backward);
        }
        event_record(mark[2], b->stream);
    }
    double there = event_elapsed_ms(mark[0], mark[1]) / REPEATS,
           back = event_elapsed_ms(mark[1], mark[2]) / REPEATS;
    double flops = 2.0 * (double)N * l->C * l->OC;
    printf("  %-5s (%lld, %d) -> %d   forward %7.3f ms %6.1f TFLOP/s   backward %7.3f ms %6.1f TFLOP/s\n",
           l->name, (long long)N, l->C, l->OC, there, 1e-9 * flops / there, back, 2e-9 * flops / back);
    for (int i = 0; i < 3; i++) event_destroy(mark[i]);
    values_free(b, &dy), values_free(b, &x), values_free(b, &w), values_free(b, &bias);
    device_free(b->device, wide), device_free(b->device, pre), device_free(b->device, dw),
        device_free(b->device, dbias), device_free(b->device, workspace);
}

static void time_layers(Bench *b) {
    const Layer layers[] = {{"qkv", 768, 2304, false, false},
                            {"proj", 768, 768, false, false},
                            {"fc1", 768, 3072, true, false},
                            {"fc2", 3072, 768, false, true}};
    for (int i = 0; i < 4; i++) time_layer(b, &layers[i], 32 * 2048);
}

int main(int argc, char **argv) {
    Checks checks = {"test_linear_gpu", 0, 0};
    Error err = {};
    Bench b = {&checks, device_open(0, NULL, &err), NULL, 12345};
    if (!b.device) fatal(NULL, err.code, "%s", err.what);
    b.stream = stream_create(b.device, "compute");
    const int shapes[][3] = {{192, 64, 256}, {1, 128, 512}, {333, 72, 200}, {1000, 320, 96}};  // N, C, OC
    for (int i = 0; i < 4; i++) {
        int N = shapes[i][0], C = shapes[i][1], OC = shapes[i][2];
        for (int form = 0; form < 4; form++) test_forward(&b, N, C, OC, form & 1, form & 2);
        for (int form = 0; form < 2; form++) test_backward(&b, N, C, OC, form);
    }
    test_gelu(&b);
    test_many_shapes(&b);
    if (argc > 1 && strcmp(argv[1], "--speed") == 0) time_layers(&b);
    stream_destroy(b.stream);
    device_close(b.device);
    return checks_end(&checks);
}
