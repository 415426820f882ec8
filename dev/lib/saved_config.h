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
// Returns true if the tokenizer has files and they exist.
bool tokenizer_files_exist(const TokenizerChoice *choice);
// Points the tokenizer flags to the tokenizer files in a directory. Returns false, without a
// change, if they are missing or the tokenizer type has no files.
bool config_use_tokenizer_in(Config *config, const char *folder);
// Checks that a tokenizer with `size` ids and end-of-document id `eod` is the model's. EXIT_DATA.
bool config_check_tokenizer(const Config *config, int size, int eod, Error *err);
// Hands a malloc'ed string to the config, which config_free frees, and returns it.
const char *config_keep(Config *config, char *text);

LLMC_END
