// Pseudo-random inputs (identical on every machine) and tensors in device memory for ops_dump.c and
// ops_invariants.c, which are linked with the CPU backend and with the CUDA backend.
#pragma once
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/base.h"
#include "llmc/device.h"
#include "llmc/ops.h"
#include "test/random.h"

enum { SCRATCH_ROWS = 1 << 20, SCRATCH_WIDTH = 16384 };

// --- device memory -------------------------------------------------------------------------------

typedef struct Lab {
    Device *device;
    Stream *stream;
    Random random;
    void *scratch;  // scratch memory of the ops, for up to SCRATCH_ROWS rows of SCRATCH_WIDTH
} Lab;

static inline Lab lab_open(const Site *site) {
    Error err = {0};
    Lab lab = {device_open(0, site, &err), NULL, {20260101}, NULL};
    if (!lab.device) {
        fprintf(stderr, "%s\n", err.what);
        exit(err.code);
    }
    lab.stream = stream_create(lab.device, "ops");
    size_t scratch = op_scratch_bytes(SCRATCH_ROWS, SCRATCH_WIDTH);
    lab.scratch = device_alloc(lab.device, scratch, "the ops' scratch", &err);
    if (!lab.scratch) {
        fprintf(stderr, "%s\n", err.what);
        exit(err.code);
    }
    op_set_scratch(lab.device, lab.scratch, scratch);
    return lab;
}
static inline void lab_close(Lab *lab) {
    stream_synchronize(lab->stream);
    stream_destroy(lab->stream);
    device_free(lab->device, lab->scratch);
    device_close(lab->device);
}

static inline void *lab_alloc(Lab *lab, size_t bytes) {
    Error err = {0};
    void *memory = device_alloc(lab->device, bytes, "a test tensor", &err);
    if (!memory) {
        fprintf(stderr, "%s\n", err.what);
        exit(err.code);
    }
    return memory;
}
static inline void *upload(Lab *lab, const void *host, size_t bytes) {
    void *memory = lab_alloc(lab, bytes);
    copy_to_device(lab->stream, memory, host, bytes);
    stream_synchronize(lab->stream);
    return memory;
}
// Returns memory filled with 0xFF bytes (NaN in every precision), which reveals elements that an op
// does not write or reads before writing.
static inline void *poisoned(Lab *lab, size_t bytes) {
    void *host = memset(xmalloc(bytes ? bytes : 1, "poison"), 0xFF, bytes ? bytes : 1);
    void *memory = upload(lab, host, bytes);
    free(host);
    return memory;
}
static inline floatX *poisoned_x(Lab *lab, int64_t n) {
    return (floatX *)poisoned(lab, (size_t)n * sizeof(floatX));
}
static inline float *poisoned_f(Lab *lab, int64_t n) {
    return (float *)poisoned(lab, (size_t)n * sizeof(float));
}

// Random inputs that are exact in bf16, so builds of every precision use the same values.
static inline floatX *random_x(Lab *lab, int64_t n, double mean, double deviation) {
    floatX *host = (floatX *)xmalloc((size_t)n * sizeof(floatX), "an input");
    for (int64_t i = 0; i < n; i++) {
        float value = (float)(mean + deviation * random_normal(&lab->random));
        host[i] = floatX_from_float(bf16_to_float(bf16_from_float(value)));
    }
    floatX *memory = (floatX *)upload(lab, host, (size_t)n * sizeof(floatX));
    free(host);
    return memory;
}
static inline float *random_f(Lab *lab, int64_t n, double deviation) {
    float *host = (float *)xmalloc((size_t)n * sizeof(float), "an input");
    for (int64_t i = 0; i < n; i++) host[i] = (float)(deviation * random_normal(&lab->random));
    float *memory = (float *)upload(lab, host, (size_t)n * sizeof(float));
    free(host);
    return memory;
}
// Ids below `limit`. About half are `limit / 3`, so one id occurs in many rows.
static inline int32_t *random_ids(Lab *lab, int64_t n, int limit) {
    int32_t *host = (int32_t *)xmalloc((size_t)n * sizeof(int32_t), "ids");
    for (int64_t i = 0; i < n; i++) {
        uint64_t draw = random_u64(&lab->random);
        host[i] = draw & 1 ? limit / 3 : (int32_t)((draw >> 1) % (uint64_t)limit);
    }
    int32_t *memory = (int32_t *)upload(lab, host, (size_t)n * sizeof(int32_t));
    free(host);
    return memory;
}
// Random document starts (B, T), and positions (B, T), which restart at each document if
// `restarts`.
static inline void random_documents(Lab *lab, int B, int T, bool restarts, int32_t **doc_start,
                                    int32_t **positions) {
    size_t bytes = (size_t)B * (size_t)T * sizeof(int32_t);
    int32_t *start = (int32_t *)xmalloc(bytes, "document starts"),
            *position = (int32_t *)xmalloc(bytes, "positions");
    for (int b = 0; b < B; b++) {
        int32_t current = 0;
        for (int t = 0; t < T; t++) {
            if (restarts && t > 0 && random_u64(&lab->random) % 23 == 0) current = t;
            start[b * T + t] = current;
            position[b * T + t] = t - current;
        }
    }
    *doc_start = (int32_t *)upload(lab, start, bytes);
    *positions = (int32_t *)upload(lab, position, bytes);
    free(start);
    free(position);
}

// Frees a NULL-terminated list of tensors.
static inline void release(Lab *lab, void *const *list) {
    stream_synchronize(lab->stream);
    for (; *list; list++) device_free(lab->device, *list);
}
