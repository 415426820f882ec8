// The trainer as a function, for main.c and for programs that train several times in one process.
#pragma once
#include "llmc/model/gpt.h"
LLMC_BEGIN

// Runs the trainer with a program's command line and returns the exit code (docs/exit_codes.md).
// May be called repeatedly. Initializes and finalizes MPI unless the caller has initialized it.
int train_gpt(int argc, char **argv);

LLMC_END
