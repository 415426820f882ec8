// --plan: what a run will allocate and send, computed without a device. Called by train_gpt.cu.
#pragma once
#include <stdio.h>

#include "llmc/state/memory.h"
#include "llmc/state/zero.h"
LLMC_BEGIN
// Prints the model, its buckets, memory by purpose, bytes per step and level, and a verdict: which
// GPUs hold the run, and what leaves a node beside what the baselines and SDP4Bit send.
// memory_plan: its entries are exactly what the program allocates. model: see memory.h.
void plan_report(const Config *config, const Zero *zero, const MemoryPlan *memory_plan,
                 ModelPlan model, FILE *out);
LLMC_END
