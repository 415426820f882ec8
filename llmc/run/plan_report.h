// --plan: what a run will allocate and send, computed without a device. Called by train_gpt.cu.
#pragma once
#include <stdio.h>

#include "llmc/state/memory.h"
#include "llmc/state/zero.h"
LLMC_BEGIN

// The plan of the rank that sees the ranks as `mesh`, which must outlive the result. Its entries
// are exactly what the program allocates there. NULL with err where that rank could not run.
typedef Zero *(*PlanRank)(const Config *config, const Mesh *mesh, MemoryPlan *memory_plan, Error *err);
// Prints the model and what each stage of the pipeline holds. Then, for the rank that needs most
// memory: its buckets, memory by purpose, bytes per step and level. Then a verdict: which GPUs hold
// the run, and what leaves a node beside what the baselines and SDP4Bit send. mesh: any rank's.
// model_bytes: see memory.h. Error: plan_rank's, before anything is printed.
bool plan_report(const Config *config, const Mesh *mesh, PlanRank plan_rank, ModelBytes model_bytes,
                 FILE *out, Error *err);
LLMC_END
