// Checks for test/gpu/test_*.cu, which do not use cmocka, because GPU machines often lack it.
#pragma once
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct Checks {
    const char *program;
    int passed, failed;
} Checks;

// Counts a check and prints its message if it failed, up to 20 per program.
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

// Prints the last line with the counts. Returns the exit code.
static inline int checks_end(const Checks *checks) {
    printf("%s: %d passed, %d failed\n", checks->program, checks->passed, checks->failed);
    return checks->failed == 0 && checks->passed > 0 ? 0 : 1;
}
