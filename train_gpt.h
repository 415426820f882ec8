// The trainer's file without its main(), for programs and tests that link it: the passes of the GPT
// (llmc/model/gpt.h), and what main() was.
#pragma once
#include "llmc/model/gpt.h"
LLMC_BEGIN

// The trainer's main() where it was compiled with -Dmain=train_gpt_main. May be called again and
// again: every call is a run of its own. MPI is started and ended by the call, unless it runs
// already.
int train_gpt_main(int argc, char **argv);

LLMC_END
