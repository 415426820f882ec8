// Translates a run's flags to loader options, because the loader does not know the Config. Called
// by setup.c and by tests of the loader.
#pragma once
#include "llmc/config/config.h"
#include "llmc/data/loader.h"
LLMC_BEGIN

// Returns the loader options of a config. Strings and arrays are borrowed from it.
LoaderOptions loader_options(const Config *config, int dp_rank, int dp_size);
// Adjusts the options of a resumed run. If batch sizes, training length or evaluation intervals
// have changed, each split gets as many more samples as the rest of the run needs. If nothing has
// changed, the numbers stay the same, and so does the order of the data. consumed_*: samples used
// so far.
void loader_options_resume(LoaderOptions *options, const Config *config, int64_t iteration,
                           int64_t consumed_train, int64_t consumed_valid);

LLMC_END
