// Several arms on one command line, for benchmarks that pay the start of a process once: COMMON
// FLAGS --arm NAME FLAGS --arm NAME FLAGS. Used by train_arms.c and sync_only.c.
#pragma once
#include <stdlib.h>
#include <string.h>

#include "llmc/base/base.h"

typedef struct Arm {
    const char *name;
    int argc;
    char **argv;  // the program's name, common flags, the arm's own; NULL at the end
} Arm;

typedef struct Arms {
    Arm *arm;  // (count)
    int count;
} Arms;

// Words [first, argc) of a command line. Error (EXIT_USAGE): no arm, or one without a name.
static inline bool arms_read(Arms *arms, int first, int argc, char **argv, Error *err) {
    arms->arm = (Arm *)xcalloc((size_t)argc + 1, sizeof(Arm), "the arms");
    arms->count = 0;
    int common = first;
    while (common < argc && strcmp(argv[common], "--arm")) common++;
    for (int i = common; i < argc;) {
        if (i + 1 == argc || argv[i + 1][0] == '-')
            return error_set(err, EXIT_USAGE, "--arm wants a name and the arm's flags");
        Arm *arm = &arms->arm[arms->count++];
        int from = i + 2;
        for (i = from; i < argc && strcmp(argv[i], "--arm");) i++;
        arm->name = argv[from - 1];
        arm->argv = (char **)xcalloc((size_t)(2 + common - first + i - from), sizeof(char *), "the arms");
        arm->argv[arm->argc++] = argv[0];
        for (int k = first; k < common; k++) arm->argv[arm->argc++] = argv[k];
        for (int k = from; k < i; k++) arm->argv[arm->argc++] = argv[k];
    }
    return arms->count > 0 ||
           error_set(err, EXIT_USAGE, "no arm is given; write FLAGS --arm NAME FLAGS --arm NAME FLAGS");
}

static inline void arms_free(Arms *arms) {
    for (int i = 0; i < arms->count; i++) free(arms->arm[i].argv);
    free(arms->arm);
}
