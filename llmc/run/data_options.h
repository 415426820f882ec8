// What a run's flags ask of its data. The loader itself knows no flags. Called by setup.c and
// by tests of the loader.
#pragma once
#include "llmc/config/config.h"
#include "llmc/data/loader.h"
LLMC_BEGIN

// The options that a run's flags mean. Strings and arrays stay the config's.
LoaderOptions loader_options(const Config *config, int dp_rank, int dp_size);
// The same run from a checkpoint on. Batch sizes, the length or the intervals of evaluation may
// have changed. Then each split asks for as many more samples as the rest of the run wants. A run
// that goes on as it began asks for the same numbers, and its data keep their order. consumed_*:
// samples so far.
void loader_options_go_on(LoaderOptions *options, const Config *config, int64_t iteration,
                          int64_t consumed_train, int64_t consumed_valid);

LLMC_END
