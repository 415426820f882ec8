// The role column of the option table: how a flag is compared with a loaded checkpoint and between
// ranks, and when it may or must be given. Every row that stores a value needs a role, so that no
// flag is left out of these checks. Read by config_match.c, config_check.c,
// dev/lib/saved_config.c and dev/convert. Also declares the checks of config_check.c.
#pragma once
#include "llmc/config/config.h"
LLMC_BEGIN

enum {
    FREE = 0,             // may differ from the checkpoint; equal on all ranks
    MODEL = 1 << 0,       // must match the checkpoint; loaded from it by programs that don't train
    LOADED = 1 << 1,      // loaded by those programs too, but a resumed run may change it
    SCHEDULE = 1 << 2,    // must match the checkpoint, unless a flag says which side wins
    DECAY_RAMP = 1 << 3,  // like SCHEDULE, if weight decay changes over the run
    DATA = 1 << 4,        // a difference changes the data order and adds a note
    RESIDUAL = 1 << 5,    // must match for the saved error-feedback residual to be usable
    PATH = 1 << 6,        // files or directories, whose names may differ between ranks
    RANK_0 = 1 << 7,      // used by rank 0 only, so other ranks may differ
    VOCABULARY = 1 << 8,  // derived from the tokenizer's files; equal on all ranks
    PRECISION = 1 << 9,   // may differ from the checkpoint; a difference adds a note

    REQUIRED = 1 << 10,    // must be given, even for --plan
    IN_ITERS = 1 << 11,    // a length in iterations, which excludes --train-samples
    IN_SAMPLES = 1 << 12,  // a length in samples, which needs --train-samples
    // The flag has no effect without another one; see the conditions in config_check.c.
    NEEDS_ROPE = 1 << 13,
    NEEDS_ROPE_SCALING = 1 << 14,
    NEEDS_LEARNED_POSITIONS = 1 << 15,
    NEEDS_QUERY_GROUPS = 1 << 16,
    NEEDS_TENSOR_RANKS = 1 << 17,
    NEEDS_SHARDED_WEIGHTS = 1 << 18,
    NEEDS_WORLD_SHARDS = 1 << 19,
    NEEDS_WSD = 1 << 20,
    NEEDS_QUANTIZED_GRADIENTS = 1 << 21,
    NEEDS_QUANTIZED_WEIGHTS = 1 << 22,
    NEEDS_WEIGHT_CODEC = 1 << 23,
    NEEDS_SAVE = 1 << 24,
    NEEDS_LOAD = 1 << 25,
    NEEDS_PROMPT = 1 << 26,
    NEEDS_TENSORBOARD = 1 << 27,
    NEEDS_DELAYED_SCALES = 1 << 28,
    NEEDS_BF16_LAYERS = 1 << 29,
    NEEDS_FP8 = 1 << 30  // an error without --fp8-format
};

// Values derived by config_finish, as rows without default or help. Named as in checkpoints.
const Option *config_derived(int *rows);
// Returns true for rows that store something and describe the run: those in dumps and checkpoints.
bool config_is_setting(const Option *row);
// Finds the next flag or derived value with one of these roles, in table order, and returns its key
// in checkpoints. *at starts at 0. Returns false at the end.
bool config_next_key(int roles, int *at, char key[OPTION_KEY_BYTES]);

// Checks for missing flags, flags that exclude each other, and values that conflict. given: (rows
// of the table) flags that occur. notes: one line per flag without effect. Error: EXIT_USAGE.
bool config_check(const Config *config, const bool *given, char *notes, size_t notes_bytes, Error *err);
// Checks that FP8 products support the format, the recipe, and the shapes of the linear layers. No
// notes. Error: EXIT_USAGE.
bool config_check_fp8(const Config *config, Error *err);
// Returns why the sharding strategy or the local steps exclude other flags and what to do, or NULL
// if they don't.
const char *config_conflict(const Config *config);

LLMC_END
