// Plans one rank: see rank_plan.h.
#include "llmc/plan/rank_plan.h"

Zero *rank_plan(GPT *gpt, const Config *config, const Mesh *mesh, MemoryPlan *memory_plan, Error *err) {
    gpt_describe(gpt, config, mesh);
    if (!gpt_check(gpt, err)) return NULL;
    Zero *zero = zero_plan(config, mesh, gpt->tensor, gpt->tensors, memory_plan, err);
    if (zero) gpt_reserve(gpt, memory_plan);
    return zero;
}

Zero *rank_plan_state(const Config *config, const Mesh *mesh, MemoryPlan *memory_plan, Error *err) {
    GPT gpt;
    Zero *zero = rank_plan(&gpt, config, mesh, memory_plan, err);
    gpt_free(&gpt);
    return zero;
}
