// The last part of --plan: predicted step time over --plan-network with each preset, and the
// recommended preset. Called by plan_report.c.
#pragma once
#include <stdio.h>

#include "llmc/base/memory_plan.h"
#include "llmc/state/zero.h"
LLMC_BEGIN

// Prints a row for each preset of presets.h and one for the run itself, computed for the rank that
// `mesh` describes. Then the recommended preset with its flags and reason, and the run under each
// sharding strategy.
void plan_time_report(const Config *config, const Mesh *mesh, FILE *out);

LLMC_END
