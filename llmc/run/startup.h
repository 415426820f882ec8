// The model in a run: what a rank holds of it, and its way to the first step. What else a run holds
// is set up in between, by setup.c and resume.c. Called by train_gpt.c and measure.c.
#pragma once
#include "llmc/model/gpt.h"
#include "llmc/run/run.h"
LLMC_BEGIN

// Everything that needs no device: this rank's place, its part of the model, the memory plan. gpt
// is filled with 0 before. Free with gpt_free. Errors: run_place's, gpt_check's, zero_plan's.
bool plan_run(Run *run, GPT *gpt);
// Device, groups, weights, data: everything up to the first iteration. The same errors on every
// rank.
bool start_run(Run *run, GPT *gpt);

// Two parts of start_run, for a run of another kind. After run_connect: hands the GPT what it works
// with. Then the first weights. Collective over the world.
void gpt_connect(GPT *gpt, Run *run);
void draw_weights(Run *run, GPT *gpt);

LLMC_END
