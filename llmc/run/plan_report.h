// --plan: what a run will allocate and send, computed without a device. Called by train_gpt.cu.
#pragma once
#include <stdio.h>

#include "llmc/state/zero.h"
LLMC_BEGIN
// Parameters, topology, buckets, memory by purpose (the memory plan's entries are exactly what the program allocates), bytes per step and level, FLOPs.
void plan_report(const Config *config, const Zero *zero, const MemoryPlan *memory_plan, FILE *out);
LLMC_END
