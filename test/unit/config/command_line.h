// Helpers for tests of the command line, which parse a line of text into a Config or an error.
#pragma once
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "llmc/config/config.h"

// The flags of a complete small run. Tests append flags, which take precedence.
#define SMALL \
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 " \
    "--max-position-embeddings 32 --micro-batch-size 2 --lr 1e-3 --train-iters 10 --mock-data " \
    "--tokenizer-type Byte --use-distributed-optimizer "

enum { MAX_ARGS = 256, NOTES = 2048 };

typedef struct Run {
    Config config;
    Error err;
    char notes[NOTES];
    bool ok;
} Run;

// Splits a line at spaces (without quoting), parses it, and derives fields for `world` ranks or
// --plan-world-size. world = 0: only parses.
static inline void run_line(Run *run, const char *line, int world) {
    char *copy = strdup(line), *argv[MAX_ARGS] = {"train_gpt"}, *save = NULL;
    int argc = 1;
    for (char *word = strtok_r(copy, " ", &save); word && argc < MAX_ARGS;
         word = strtok_r(NULL, " ", &save)) {
        argv[argc++] = word;
    }
    run->ok = config_parse(&run->config, argc, argv, run->notes, sizeof run->notes, &run->err);
    free(copy);  // with sanitizers, detects pointers into argv
    if (run->ok && world && !run->config.help && !run->config.version) {
        int ranks = run->config.plan_world_size ? run->config.plan_world_size : world;
        run->ok = config_finish(&run->config, ranks, 0, 0, &run->err);
        if (!run->ok) config_free(&run->config);
    }
}

static inline void must_run(Run *run, const char *line, int world) {
    run_line(run, line, world);
    if (!run->ok) fail_msg("refused: %s\n%s", line, run->err.what);
}

// Expects a one-line usage error that contains `what`.
static inline void must_fail(const char *line, int world, const char *what) {
    Run run;
    run_line(&run, line, world);
    if (run.ok) {
        config_free(&run.config);
        fail_msg("accepted: %s", line);
    }
    assert_int_equal(run.err.code, EXIT_USAGE);
    if (!strstr(run.err.what, what)) fail_msg("%s\nsays: %s\nwithout: %s", line, run.err.what, what);
    if (strchr(run.err.what, '\n')) fail_msg("more than one line: %s", run.err.what);
}

static inline void json_has(const Config *config, const char *fragment) {
    char *json = config_to_json(config);
    if (!strstr(json, fragment)) fail_msg("no %s in %s", fragment, json);
    free(json);
}

// Returns true if a run with flags `now` may resume from a checkpoint of a run with flags `was`,
// both on 2 ranks. The caller then frees the config.
static inline bool resume(Run *run, const char *was, const char *now) {
    Run saved;
    must_run(&saved, was, 2);
    char *json = config_to_json(&saved.config);
    config_free(&saved.config);
    must_run(run, now, 2);
    run->ok = config_match_checkpoint(&run->config, json, run->notes, sizeof run->notes, &run->err);
    free(json);
    if (!run->ok) config_free(&run->config);
    return run->ok;
}
