// Builds a Config from a checkpoint's flags. Called by saved_model.c and dev/convert/imported.c.
#pragma once
#include "llmc/config/config.h"
LLMC_BEGIN

// Builds the Config of a checkpoint's model for a program that doesn't train: one rank,
// micro-batches of one sequence, and default training settings. saved_json: the flags in the
// checkpoint (config_to_json); only model and tokenizer flags are used. own: command-line flags,
// which override saved ones. Call config_free afterward. Error (EXIT_CHECKPOINT): missing or
// invalid model flags.
bool config_of_checkpoint(Config *config, const char *saved_json, const Words *own, Error *err);

LLMC_END
