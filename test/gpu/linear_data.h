// Random tensors on the host and on the device, and error bounds, for test_linear_gpu.cu and
// test_fp8_gpu.cu.
#pragma once
#include <math.h>
#include <stdint.h>

#include "llmc/cuda/internal.h"
#include "test/gpu/check.h"

typedef struct Bench {
    Checks *checks;
    Device *device;
    Stream *stream;
    uint64_t random;
} Bench;

static inline void *new_memory(Bench *b, size_t bytes) {
    Error err = {};
    void *memory = device_alloc(b->device, bytes, "a test", &err);
    if (!memory) fatal(NULL, err.code, "%s", err.what);
    return memory;
}
static inline void *new_host(size_t bytes) { return xcalloc(1, bytes ? bytes : 1, "a test"); }

// Roughly uniform in (-scale, scale).
static inline float draw(Bench *b, float scale) {
    b->random = b->random * 6364136223846793005u + 1442695040888963407u;
    return ((float)(b->random >> 40) / 8388608.0f - 1.0f) * scale;
}

// The same bf16 values on the host and on the device.
typedef struct Values {
    floatX *host, *device;
    int64_t count;
} Values;
static inline Values random_values(Bench *b, int64_t count, float scale) {
    Values v = {(floatX *)new_host((size_t)count * sizeof(floatX)),
                (floatX *)new_memory(b, (size_t)count * sizeof(floatX)), count};
    for (int64_t i = 0; i < count; i++) v.host[i] = floatX_from_float(draw(b, scale));
    copy_to_device(b->stream, v.device, v.host, (size_t)count * sizeof(floatX));
    return v;
}
static inline void values_free(Bench *b, Values *v) {
    stream_synchronize(b->stream);
    device_free(b->device, v->device);
    free(v->host);
}
static inline double at(const Values *v, int64_t i) { return floatX_to_float(v->host[i]); }

static inline floatX *fetch(Bench *b, const void *device, int64_t count, size_t size) {
    floatX *host = (floatX *)new_host((size_t)count * size);
    copy_to_host(b->stream, host, device, (size_t)count * size);
    stream_synchronize(b->stream);
    return host;
}

static inline double bf16_half_ulp(double x) { return fabs(x) * 0x1p-8; }

// Largest error of an output tensor in units of its bound, and where it occurs.
typedef struct Worst {
    double ratio;
    int64_t at;
} Worst;
static inline void compare(Worst *worst, int64_t i, double got, double exact, double bound) {
    double ratio = fabs(got - exact) / (bound + 1e-30);
    if (!(ratio <= worst->ratio)) worst->ratio = ratio, worst->at = i;  // NaN counts as the worst
}
