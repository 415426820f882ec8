// Checks that depend only on the flags. Called by config_parse.c and llmc/plan/plan_time.c.
#pragma once
#include "llmc/config/config.h"
LLMC_BEGIN

// Checks for missing flags, flags that exclude each other, and values that conflict. given: (rows
// of the table) flags that occur. notes: one line per flag without effect. Error: EXIT_USAGE.
bool config_check(const Config *config, const bool *given, char *notes, size_t notes_bytes, Error *err);
// Returns why these flags cannot be combined with --local-steps above 1 and what to do, or NULL if
// they can.
const char *config_no_local_steps(const Config *config);

LLMC_END
