// --plan: what a run will allocate and send, computed without a device. Called by train_gpt.c.
#pragma once
#include <stdio.h>

#include "llmc/plan/plan_time.h"
#include "llmc/plan/memory_fit.h"
LLMC_BEGIN

// Prints the model and what each stage of the pipeline holds. Then, for the rank that needs most
// memory: its buckets, memory by purpose, bytes per step and level. Then a step status: which GPUs
// hold the run, and what leaves a node beside what the baselines and SDP4Bit send. With
// --plan-network also how long a step takes with each preset. mesh: any rank's. Error: that of
// rank_plan, before anything is printed.
bool plan_report(const Config *config, const Mesh *mesh, FILE *out, Error *err);
LLMC_END
