// A checkpoint as a model to be used, not trained: its Config, its tokenizer, its weights. The
// checkpoint may be of any layout, preset and strategy. Called by dev/generate.c.
#pragma once
#include "llmc/checkpoint/checkpoint.h"
#include "llmc/config/config.h"
#include "llmc/data/tokenizer.h"
LLMC_BEGIN

typedef struct SavedModel {
    Config config;  // config_of_checkpoint's
    Checkpoint *checkpoint;
    Tokenizer *tokenizer;
    int64_t iteration;
    char note[1400];  // a line on which checkpoint was taken; empty: nothing to say
} SavedModel;

typedef struct SavedModelChoice {
    const char *load;    // a --save folder
    int64_t iteration;   // -1: the latest
    const Words *flags;  // the trainer's, of another place of the tokenizer's files; may be empty
    Peers peers;         // of one rank
} SavedModelChoice;

// The tokenizer's files are those of the flags; else vocab.json and merges.txt, or tokenizer.json,
// in the folder of the checkpoints; else those of the run's flags, where they still lie. Errors:
// EXIT_CHECKPOINT; EXIT_DATA of the tokenizer's files. On failure nothing is left to close.
bool saved_model_open(SavedModel *model, const SavedModelChoice *choice, Error *err);
void saved_model_close(SavedModel *model);

LLMC_END
