// Opens a checkpoint for inference: config, tokenizer and weights. Accepts checkpoints of any
// parallel layout, preset and sharding strategy. Called by dev/generate.c.
#pragma once
#include "llmc/checkpoint/checkpoint.h"
#include "llmc/config/config.h"
#include "llmc/data/tokenizer.h"
LLMC_BEGIN

typedef struct SavedModel {
    Config config;  // from config_of_checkpoint
    Checkpoint *checkpoint;
    Tokenizer *tokenizer;
    int64_t iteration;
    char note[1400];  // message if another checkpoint than the requested one was opened, else ""
} SavedModel;

typedef struct SavedModelChoice {
    const char *load;    // checkpoint folder
    int64_t iteration;   // -1: the latest
    const Words *flags;  // trainer flags that name the tokenizer files; may be empty
    Peers peers;         // a single rank
} SavedModelChoice;

// Opens a checkpoint. Uses the tokenizer files that choice->flags names, else vocab.json and
// merges.txt or tokenizer.json in the checkpoint folder, else the files used in training. Errors:
// EXIT_CHECKPOINT, or EXIT_DATA for tokenizer files. On failure there is nothing to close.
bool saved_model_open(SavedModel *model, const SavedModelChoice *choice, Error *err);
void saved_model_close(SavedModel *model);

LLMC_END
