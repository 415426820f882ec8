// The trainer as a function, for main.c and for programs that train several times in one process.
#pragma once
#include "llmc/model/gpt.h"
LLMC_BEGIN

// Runs the trainer with the command line of a program and returns its exit code
// (docs/exit_codes.md). May be called repeatedly. Starts and ends MPI unless MPI is running
// already.
int train_gpt(int argc, char **argv);

LLMC_END
