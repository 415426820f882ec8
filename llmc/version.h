// Names the build in --version, logs and checkpoints. Used by train_gpt.cu, the log and the checkpoint.
#pragma once
#include "llmc/base.h"
LLMC_BEGIN
const char *version_number(void);  // "0.1.0"
const char *version_commit(void);  // abbreviated commit, "+" appended for a modified tree, "unknown" outside a checkout
// "MPI Open MPI v4.1.4, OpenBLAS 0.3.21, ..." of the libraries the host code runs with, into text.
void version_libraries(char *text, size_t bytes);
LLMC_END
