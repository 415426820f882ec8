// --plan: memory and traffic of a run, computed without a device. Called by train_gpt.c.
#pragma once
#include <stdio.h>

#include "llmc/config/config.h"
#include "llmc/ranks/mesh.h"
LLMC_BEGIN

// Prints the model and its pipeline stages; for the rank that needs the most memory its buckets,
// memory by purpose and bytes per step and level; and a summary: which GPUs have enough memory, and
// the inter-node traffic compared with the baselines and SDP4Bit. If --plan-network is set, adds
// the predicted step time of each preset. mesh: any rank's. Returns the error of gpt_plan before
// printing anything.
bool plan_report(const Config *config, const Mesh *mesh, FILE *out, Error *err);
// Prints the last part of the report, the predicted step time over --plan-network: a row for each
// preset of presets.h and one for the run itself, computed for the rank that `mesh` describes. Then
// the recommended preset with its flags and reason, and the run under each sharding strategy.
void plan_time_report(const Config *config, const Mesh *mesh, FILE *out);

LLMC_END
