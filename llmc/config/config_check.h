// What of the command line does not go together, told from the flags alone. Included by config_parse.c,
// config_check.c and llmc/plan/plan_time.c.
#pragma once
#include "llmc/config/config.h"
LLMC_BEGIN

// Missing flags, flags that exclude each other, values that do not fit together. given: (rows of
// the table) which flags occur. notes: one line for each flag without effect. Error: EXIT_USAGE.
bool config_check(const Config *config, const bool *given, char *notes, size_t notes_bytes, Error *err);
// Why a run with these flags cannot have --local-steps above 1, and what to do. NULL: it can.
const char *config_no_local_steps(const Config *config);

LLMC_END
