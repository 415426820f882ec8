// The plan of one rank: its part of the model, its bucket layout and every buffer that it
// allocates. Needs no device. Called by llmc/plan/report.c, plan_time.c and llmc/run/startup.c.
#pragma once
#include "llmc/model/gpt.h"
LLMC_BEGIN

// Plans the rank that sees the others as `mesh`, which must outlive the result. Fills gpt (freed
// with gpt_free, also after an error) and memory_plan. NULL with err if that rank could not run:
// the errors of gpt_check and zero_plan.
Zero *rank_plan(GPT *gpt, const Config *config, const Mesh *mesh, MemoryPlan *memory_plan, Error *err);
// The same without the model.
Zero *rank_plan_state(const Config *config, const Mesh *mesh, MemoryPlan *memory_plan, Error *err);

LLMC_END
