// Plans one rank: its part of the model, its bucket layout and every buffer that it allocates.
// Needs no device. Called by llmc/plan/plan_report.c, plan_time.c and llmc/run/setup.c.
#pragma once
#include "llmc/model/gpt.h"
LLMC_BEGIN

// Plans the rank that `mesh` describes. mesh must outlive the result. Fills gpt (free it with
// gpt_free, also after an error) and memory_plan. Returns NULL with the error of gpt_check or
// zero_plan if the configuration cannot run.
Zero *rank_plan(GPT *gpt, const Config *config, const Mesh *mesh, MemoryPlan *memory_plan, Error *err);
// rank_plan without returning the model.
Zero *rank_plan_state(const Config *config, const Mesh *mesh, MemoryPlan *memory_plan, Error *err);

LLMC_END
