// Several presets on one command line, for benchmarks that pay the start of a process once: COMMON
// FLAGS --preset NAME FLAGS --preset NAME FLAGS. Used by train_presets.c and sync_only.c.
#pragma once
#include <stdlib.h>
#include <string.h>

#include "llmc/base/base.h"

typedef struct Preset {
    const char *name;
    int argc;
    char **argv;  // the program's name, common flags, the preset's own; NULL at the end
} Preset;

typedef struct Presets {
    Preset *preset;  // (count)
    int count;
} Presets;

// Words [first, argc) of a command line. Error (EXIT_USAGE): no preset, or one without a name.
static inline bool presets_read(Presets *presets, int first, int argc, char **argv, Error *err) {
    presets->preset = (Preset *)xcalloc((size_t)argc + 1, sizeof(Preset), "the presets");
    presets->count = 0;
    int common = first;
    while (common < argc && strcmp(argv[common], "--preset")) common++;
    for (int i = common; i < argc;) {
        if (i + 1 == argc || argv[i + 1][0] == '-')
            return error_set(err, EXIT_USAGE, "--preset wants a name and the preset's flags");
        Preset *preset = &presets->preset[presets->count++];
        int from = i + 2;
        for (i = from; i < argc && strcmp(argv[i], "--preset");) i++;
        preset->name = argv[from - 1];
        preset->argv = (char **)xcalloc((size_t)(2 + common - first + i - from), sizeof(char *),
                                        "the presets");
        preset->argv[preset->argc++] = argv[0];
        for (int k = first; k < common; k++) preset->argv[preset->argc++] = argv[k];
        for (int k = from; k < i; k++) preset->argv[preset->argc++] = argv[k];
    }
    return presets->count > 0 ||
           error_set(err, EXIT_USAGE,
                     "no preset is given; write FLAGS --preset NAME FLAGS --preset NAME FLAGS");
}

static inline void presets_free(Presets *presets) {
    for (int i = 0; i < presets->count; i++) free(presets->preset[i].argv);
    free(presets->preset);
}
