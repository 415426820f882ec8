// Compares normal random numbers (llmc/base/normal.h) and their intermediate values on GPU and host
// in double precision, because rounding could hide differences in the last bit. Also compares
// op_init_weights with the host's numbers for tensors of realistic sizes.
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "llmc/cuda/internal.h"
#include "llmc/base/normal.h"
#include "llmc/ops.h"
#include "test/gpu/check.h"

// The intermediate values and the result for 128 random bits.
struct Drawn {
    double uniform, logarithm, near_one, near_zero, cosine, sine, normal[2];
};
static const char *const PART[] = {"uniform", "logarithm", "logarithm near 1", "logarithm near 0",
                                   "cosine",  "sine",      "first normal",     "second normal"};
enum { PARTS = sizeof PART / sizeof PART[0], CORNERS = 7, SEED = 99, STREAM = 7 };
static_assert(sizeof(Drawn) == PARTS * sizeof(double), "Drawn is an array of doubles");

// The first draws use words from the ends and the middle of their range; the others are random.
static __host__ __device__ Philox4 words_of(uint64_t i) {
    const uint32_t corner[CORNERS] = {0,           2048,        0x40000000u, 0x7FFFFFFFu,
                                      0x80000000u, 0xC0000000u, 0xFFFFFFFFu};
    Philox4 bits = counter_bits(SEED, PURPOSE_INIT, STREAM, i);
    for (int w = 0; i < CORNERS * CORNERS * CORNERS * CORNERS && w < 4; w++, i /= CORNERS)
        bits.v[w] = corner[i % CORNERS];
    return bits;
}

static __host__ __device__ Drawn drawn_of(uint64_t i) {
    Philox4 bits = words_of(i);
    Drawn d;
    d.uniform = uniform53(bits.v[0], bits.v[1]);
    // A power of two.
    double rest = f64_sub(1.0, d.uniform), small = f64_from_bits((uint64_t)(1023 - i % 50) << 52);
    d.logarithm = log_unit(rest);
    d.near_one = log_unit(f64_sub(1.0, f64_mul(d.uniform, small)));
    d.near_zero = log_unit(f64_mul(rest, f64_from_bits((uint64_t)(1023 - i % 11) << 52)));
    circle(uniform53(bits.v[2], bits.v[3]), &d.cosine, &d.sine);
    normal_pair(bits, d.normal);
    return d;
}

static __global__ void draw_kernel(Drawn *out, int count) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < count) out[i] = drawn_of((uint64_t)i);
}

static void test_functions(Checks *c, Device *device, Stream *stream) {
    enum { COUNT = 2000000 };
    Error err = {};
    Drawn *out = (Drawn *)device_alloc(device, COUNT * sizeof(Drawn), "a test", &err),
          *host = (Drawn *)malloc(COUNT * sizeof(Drawn));
    draw_kernel<<<(COUNT + 255) / 256, 256, 0, stream_handle(stream)>>>(out, COUNT);
    check_launch(stream, "draw");
    copy_to_host(stream, host, out, COUNT * sizeof(Drawn));
    stream_synchronize(stream);
    int differ[PARTS] = {};
    for (int i = 0; i < COUNT; i++) {
        Drawn expected = drawn_of((uint64_t)i);
        const double *ours = &host[i].uniform, *theirs = &expected.uniform;
        for (int part = 0; part < PARTS; part++)
            differ[part] += memcmp(&ours[part], &theirs[part], sizeof(double)) != 0;
    }
    for (int part = 0; part < PARTS; part++)
        check(c, differ[part] == 0, "%s: %d of %d differ from the host's", PART[part], differ[part],
              (int)COUNT);
    free(host);
    device_free(device, out);
}

static floatX expected_weight(int64_t j, double std) {
    double normal[2];
    if (std <= 0) return floatX_from_float(std < 0 ? 1.0f : 0.0f);
    normal_pair(counter_bits(SEED, PURPOSE_INIT, STREAM, (uint64_t)j / 2), normal);
    return floatX_from_float((float)f64_mul(std, normal[j % 2]));
}

static void test_weights(Checks *c, Device *device, Stream *stream) {
    const int64_t sizes[] = {1, 2, 511, 512, 513, 1000001, (int64_t)3000 * 1024};
    const double stds[] = {0.02, 0.02 / 9, 0, -1};
    Error err = {};
    floatX *weights = (floatX *)device_alloc(device, (size_t)(sizes[6] + 2) * sizeof *weights, "a test",
                                             &err),
           *host = (floatX *)malloc((size_t)(sizes[6] + 2) * sizeof *host);
    for (int i = 0; i < 7 * 4; i++) {
        int64_t n = sizes[i / 4];
        double std = stds[i % 4];
        memset(host, 0xEE, (size_t)(n + 2) * sizeof *host);
        copy_to_device(stream, weights, host, (size_t)(n + 2) * sizeof *host);
        const InitWeights all = {weights + 1, n, 1, 0, 0, 1, std, SEED, STREAM, 1, 0};
        op_init_weights(stream, &all);
        copy_to_host(stream, host, weights, (size_t)(n + 2) * sizeof *host);
        stream_synchronize(stream);
        int64_t differ = 0;
        for (int64_t j = 0; j < n; j++) differ += host[1 + j] != expected_weight(j, std);
        check(c, differ == 0, "%lld weights, deviation %g: %lld differ", (long long)n, std,
              (long long)differ);
        check(c, host[0] == 0xEEEE && host[n + 1] == 0xEEEE, "%lld weights, deviation %g: wrote past the end",
              (long long)n, std);
    }
    free(host);
    device_free(device, weights);
}

// Parts of a tensor with 3001 columns, some with odd bounds, at an address that is only 2-byte
// aligned.
static void test_parts(Checks *c, Device *device, Stream *stream) {
    enum { COLUMNS = 3001, MOST = 200 * COLUMNS };
    const struct {
        int64_t rows, columns, first_row, first_column;
    } box[] = {
        {200, COLUMNS, 11, 0}, {200, 1500, 0, 0}, {200, 1501, 0, 1500}, {77, 256, 5, 513}, {9, 1, 8, 3000}};
    Error err = {};
    floatX *weights = (floatX *)device_alloc(device, (MOST + 2) * sizeof *weights, "a test", &err),
           *host = (floatX *)malloc((MOST + 2) * sizeof *host);
    for (int i = 0; i < 5; i++) {
        const int64_t rows = box[i].rows, columns = box[i].columns, n = rows * columns;
        memset(host, 0xEE, (MOST + 2) * sizeof *host);
        copy_to_device(stream, weights, host, (MOST + 2) * sizeof *host);
        const InitWeights part = {
            weights + 1, rows, columns, box[i].first_row, box[i].first_column, COLUMNS, 0.02, SEED,
            STREAM,      1,    0};
        op_init_weights(stream, &part);
        copy_to_host(stream, host, weights, (MOST + 2) * sizeof *host);
        stream_synchronize(stream);
        int64_t differ = 0;
        for (int64_t j = 0; j < n; j++) {
            int64_t row = part.first_row + j / columns, column = part.first_column + j % columns;
            differ += host[1 + j] != expected_weight(row * COLUMNS + column, 0.02);
        }
        check(c, differ == 0, "part %d of a tensor: %lld weights differ", i, (long long)differ);
        check(c, host[0] == 0xEEEE && host[n + 1] == 0xEEEE, "part %d of a tensor: wrote past the end", i);
    }
    free(host);
    device_free(device, weights);
}

int main(void) {
    Checks checks = {"test_normal_gpu", 0, 0};
    Site site = {};
    site.rank = -1;
    site.phase = "a test";
    Error err = {};
    Device *device = device_open(0, &site, &err);
    if (!device) fatal(NULL, err.code, "%s", err.what);
    Stream *stream = stream_create(device, "compute");
    test_functions(&checks, device, stream);
    test_weights(&checks, device, stream);
    test_parts(&checks, device, stream);
    stream_destroy(stream);
    device_close(device);
    return checks_end(&checks);
}
