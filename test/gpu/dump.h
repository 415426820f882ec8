// Device memory and printed results of kernels_dump. Included by kernels_dump.c,
// dump_activations.h, dump_fp8.h and dump_lossless.h.
#pragma once
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/base.h"
#include "llmc/device.h"
#include "sdp4bit/kernels.h"

enum { SEED = 20240901, PURPOSE_DATA = 200 };  // purpose of test data, unused by the program

typedef struct Dump {
    Device *device;
    Stream *stream;
    FILE *full;  // NULL without --full
    char prefix[128];
} Dump;

// --- memory -------------------------------------------------------------------------------------

static inline void stop(const Error *err) {
    error_print(NULL, err->what);
    exit(err->code);
}

static inline void *reserve(Dump *d, int64_t bytes) {
    Error err;
    void *memory = device_alloc(d->device, (size_t)(bytes > 0 ? bytes : 1), "test data", &err);
    if (!memory) stop(&err);
    return memory;
}

static inline void *upload(Dump *d, const void *host, int64_t bytes) {
    void *memory = reserve(d, bytes);
    copy_to_device(d->stream, memory, host, (size_t)bytes);
    return memory;
}

static inline void release(Dump *d, void *memory) {
    stream_synchronize(d->stream);
    device_free(d->device, memory);
}

// --- results ------------------------------------------------------------------------------------

typedef enum Kind { RAW, FP32, FP64, BF16 } Kind;

static inline void unify_nans(void *bytes, int64_t size, Kind kind) {
    if (kind == FP32) {
        uint32_t *word = (uint32_t *)bytes;
        for (int64_t i = 0; i < size / 4; i++)
            word[i] = (word[i] & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC00000u : word[i];
    } else if (kind == FP64) {
        uint64_t *word = (uint64_t *)bytes;
        for (int64_t i = 0; i < size / 8; i++)
            word[i] = (word[i] & INT64_MAX) > 0x7FF0000000000000u ? 0x7FF8000000000000u : word[i];
    } else if (kind == BF16) {
        uint16_t *word = (uint16_t *)bytes;
        for (int64_t i = 0; i < size / 2; i++) word[i] = (word[i] & 0x7FFFu) > 0x7F80u ? 0x7FC0u : word[i];
    }
}

static inline uint64_t hash_bytes(const uint8_t *bytes, int64_t size) {
    uint64_t hash = 0x9E3779B97F4A7C15ull ^ (uint64_t)size;
    for (int64_t at = 0; at < size; at += 8) {
        uint64_t word = 0;
        memcpy(&word, bytes + at, (size_t)(size - at < 8 ? size - at : 8));
        hash = (hash ^ word) * 0xBF58476D1CE4E5B9ull;
        hash ^= hash >> 29;
    }
    return hash;
}

// Prints name, size and hash of a result in device memory.
static inline void result(Dump *d, Kind kind, const void *memory, int64_t size, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
static inline void result(Dump *d, Kind kind, const void *memory, int64_t size, const char *format, ...) {
    char name[128];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(name, sizeof name, format, arguments);
    va_end(arguments);
    uint8_t *host = (uint8_t *)xmalloc((size_t)size + 8, "a result");
    copy_to_host(d->stream, host, memory, (size_t)size);
    stream_synchronize(d->stream);
    unify_nans(host, size, kind);
    printf("%s %s %" PRId64 " %016" PRIx64 "\n", d->prefix, name, size, hash_bytes(host, size));
    if (d->full) fwrite(host, 1, (size_t)size, d->full);
    free(host);
}
