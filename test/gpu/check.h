// What the GPU tests share: counted checks without a test library, because a machine with GPUs is
// often bare. Included by test/gpu/test_*.cu.
#pragma once
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct Checks {
    const char *program;
    int passed, failed;
} Checks;

// Counts a check; a failed one is told, the first 20 of a program in words.
static inline bool check(Checks *checks, bool holds, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static inline bool check(Checks *checks, bool holds, const char *format, ...) {
    if (holds) {
        checks->passed++;
        return true;
    }
    if (checks->failed++ >= 20) return false;
    va_list args;
    va_start(args, format);
    fprintf(stderr, "FAILED %s: ", checks->program);
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    return false;
}

// The counted last line; the program's exit code.
static inline int checks_end(const Checks *checks) {
    printf("%s: %d passed, %d failed\n", checks->program, checks->passed, checks->failed);
    return checks->failed == 0 && checks->passed > 0 ? 0 : 1;
}
