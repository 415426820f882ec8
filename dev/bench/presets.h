// Parses a command line with several presets, for benchmarks that run them in one process: COMMON
// FLAGS --preset NAME FLAGS --preset NAME FLAGS. Used by train_presets.c and sync_only.c.
#pragma once
#include <stdlib.h>
#include <string.h>

#include "llmc/base/base.h"

typedef struct Preset {
    const char *name;
    int argc;
    char **argv;  // program name, common flags, flags of the preset, NULL
} Preset;

typedef struct Presets {
    Preset *preset;  // (count)
    int count;
} Presets;

// Parses arguments [first, argc). Error (EXIT_USAGE): there is no preset, or a preset has no name.
static inline bool presets_read(Presets *presets, int first, int argc, char **argv, Error *err) {
    presets->preset = (Preset *)xcalloc((size_t)argc + 1, sizeof(Preset), "the presets");
    presets->count = 0;
    int common = first;
    while (common < argc && strcmp(argv[common], "--preset")) common++;
    for (int i = common; i < argc;) {
        if (i + 1 == argc || argv[i + 1][0] == '-')
            return usage_error(
                err, "--preset needs a name and the preset's flags; see the head of the source file");
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
           usage_error(err, "no preset is given; use FLAGS --preset NAME FLAGS --preset NAME FLAGS");
}

static inline void presets_free(Presets *presets) {
    for (int i = 0; i < presets->count; i++) free(presets->preset[i].argv);
    free(presets->preset);
}
