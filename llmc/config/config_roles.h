// The column of the option table that says how a flag is compared: with the checkpoint that a run
// resumes from, and between ranks. Every stored row must give it, so that a new flag cannot be
// forgotten. Read by config_match.c, dev/lib/saved_config.c and dev/convert.
#pragma once
#include "llmc/config/config.h"
LLMC_BEGIN

enum {
    FREE = 0,             // may differ from the checkpoint; equal on all ranks
    MODEL = 1 << 0,       // must match the checkpoint; loaded from it by programs that don't train
    LOADED = 1 << 1,      // loaded by those programs too, but a resumed run may change it
    SCHEDULE = 1 << 2,    // must match the checkpoint, unless a flag says which side wins
    DECAY_RAMP = 1 << 3,  // the same while weight decay changes over the run
    DATA = 1 << 4,        // a difference changes the order of the data, which is noted
    RESIDUAL = 1 << 5,    // must match for the saved error-feedback residual to be usable
    PATH = 1 << 6,        // files or directories, whose names may differ between ranks
    RANK_0 = 1 << 7,      // used by rank 0 only, so other ranks may differ
    VOCABULARY = 1 << 8   // derived from the tokenizer's files; equal on all ranks
};

// Values derived by config_finish, as rows without default or help. Named as in checkpoints.
const Option *config_derived(int *rows);
// Returns true for rows that store something and describe the run: those in dumps and checkpoints.
bool config_is_setting(const Option *row);
// Finds the next key in checkpoints of a flag or derived value with one of these roles, in table
// order. *at starts at 0. Returns false at the end.
bool config_next_key(int roles, int *at, char key[OPTION_KEY_BYTES]);

LLMC_END
