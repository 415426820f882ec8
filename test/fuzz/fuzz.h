// What the fuzz targets share. A target is LLVMFuzzerTestOneInput over one parser of outside bytes:
// it gives the parser hostile input, uses what the parser accepted as the program would, and ends
// the process when a promise is broken. `make fuzz` links the targets with libFuzzer, which
// searches for such inputs; otherwise replay.c runs the seeds and the inputs that once failed.
// test/fuzz/run.sh starts both.
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
            fprintf(stderr, "%s:%d: broken promise: %s\n", __FILE__, __LINE__, #condition); \
            abort(); \
        } \
    } while (0)

// What every refusal owes the user: a documented exit code and a line of text.
static inline void fuzz_check_error(const Error *err) {
    PROMISE(err->code == EXIT_USAGE || err->code == EXIT_ENVIRONMENT || err->code == EXIT_DATA ||
            err->code == EXIT_CHECKPOINT);
    PROMISE(memchr(err->what, 0, sizeof err->what) && *err->what);
}

// A folder of this process, removed when it ends. Path of a file in it that holds these bytes: of
// `name`, until the next call with that name.
const char *fuzz_folder(void);
const char *fuzz_file(const char *name, const void *data, size_t bytes);

// An input of two parts: what stands before the first 0xFF byte, and what stands behind it.
typedef struct FuzzParts {
    const uint8_t *first, *second;
    size_t first_bytes, second_bytes;
} FuzzParts;

static inline FuzzParts fuzz_parts(const uint8_t *data, size_t size) {
    const uint8_t *border = size ? (const uint8_t *)memchr(data, 0xFF, size) : NULL;
    size_t before = border ? (size_t)(border - data) : size;
    return (FuzzParts){data, border ? border + 1 : data + size, before, border ? size - before - 1 : 0};
}

// A copy without a byte behind it, so that a sanitizer sees a read that goes too far. At least one
// byte is allocated.
static inline void *fuzz_copy(const void *data, size_t bytes) {
    void *copy = xmalloc(bytes ? bytes : 1, "an input");
    if (bytes) memcpy(copy, data, bytes);
    return copy;
}
// The same as text with a final zero.
static inline char *fuzz_text(const void *data, size_t bytes) {
    char *copy = (char *)xmalloc(bytes + 1, "an input");
    if (bytes) memcpy(copy, data, bytes);
    copy[bytes] = 0;
    return copy;
}
