// The last part of --plan: how long a step takes over --plan-network with each preset, and which
// preset to take. Called by plan_report.c.
#pragma once
#include <stdio.h>

#include "llmc/base/memory_plan.h"
#include "llmc/state/zero.h"
LLMC_BEGIN

// A row for each preset of presets.h and one for the run itself, as the rank that sees the ranks as
// `mesh` meets them. Then the preset to take, its flags, and why, and the run under each sharding
// strategy.
void plan_time_report(const Config *config, const Mesh *mesh, FILE *out);

LLMC_END
