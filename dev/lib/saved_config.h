// The model of a checkpoint as a Config. Called by saved_model.c and dev/convert/imported.c.
#pragma once
#include "llmc/config/config.h"
LLMC_BEGIN

// Builds the Config of a checkpoint's model for a program that doesn't train, on one rank:
// unsharded, with micro-batches of one sequence. saved_json: the checkpoint's config_to_json text,
// of which model and tokenizer flags are read. own: further command-line flags, which win. Training
// settings keep their defaults. Call config_free afterward. Error (EXIT_CHECKPOINT): missing or
// invalid model flags.
bool config_of_checkpoint(Config *config, const char *saved_json, const Words *own, Error *err);

LLMC_END
