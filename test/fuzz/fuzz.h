// Shared by the fuzz targets. Each target defines LLVMFuzzerTestOneInput for one parser of external
// data. It parses the input, uses accepted values as the program would, and aborts if a PROMISE is
// broken. `make fuzz` links targets with libFuzzer, which searches for failing inputs. `make
// fuzz-targets` links them with replay.c, which runs seeds and past failures. test/fuzz/run.sh
// starts both.
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/base.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define PROMISE(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: failed check: %s\n", __FILE__, __LINE__, #condition); \
            abort(); \
        } \
    } while (0)

// Every error must have a documented exit code and one line of text.
static inline void fuzz_check_error(const Error *err) {
    PROMISE(err->code == EXIT_USAGE || err->code == EXIT_ENVIRONMENT || err->code == EXIT_DATA ||
            err->code == EXIT_CHECKPOINT);
    PROMISE(memchr(err->what, 0, sizeof err->what) && *err->what);
}

// Writes the bytes to file `name` in a temporary directory of this process, which is removed at
// exit. Returns the path.
const char *fuzz_folder(void);
const char *fuzz_file(const char *name, const void *data, size_t bytes);

// An input in two parts: the bytes before and after the first 0xFF.
typedef struct FuzzParts {
    const uint8_t *first, *second;
    size_t first_bytes, second_bytes;
} FuzzParts;

static inline FuzzParts fuzz_parts(const uint8_t *data, size_t size) {
    const uint8_t *separator = size ? (const uint8_t *)memchr(data, 0xFF, size) : NULL;
    size_t before = separator ? (size_t)(separator - data) : size;
    return (FuzzParts){data, separator ? separator + 1 : data + size, before,
                       separator ? size - before - 1 : 0};
}

// Copies the bytes to a heap block of exactly that size, so that a sanitizer detects reads past the
// end. Allocates at least one byte.
static inline void *fuzz_copy(const void *data, size_t bytes) {
    void *copy = xmalloc(bytes ? bytes : 1, "an input");
    if (bytes) memcpy(copy, data, bytes);
    return copy;
}
// Like fuzz_copy, with a terminating zero.
static inline char *fuzz_text(const void *data, size_t bytes) {
    char *copy = (char *)xmalloc(bytes + 1, "an input");
    if (bytes) memcpy(copy, data, bytes);
    copy[bytes] = 0;
    return copy;
}
