// Startup of a run and its model, from flags to the first step. The steps that don't involve the
// model are in setup.c and resume.c. Called by train_gpt.c and measure.c.
#pragma once
#include "llmc/model/gpt.h"
#include "llmc/run/run.h"
LLMC_BEGIN

// Does everything that needs no device: mesh, this rank's part of the model, memory plan. gpt must
// be zeroed; free it with gpt_free. Errors: see run_place, gpt_check and zero_plan.
bool plan_run(Run *run, GPT *gpt);
// Opens the device, connects the ranks, loads weights and data. Returns false on every rank if one
// failed.
bool start_run(Run *run, GPT *gpt);

// Parts of start_run that measure.c uses too. gpt_connect attaches the GPT to the run's resources,
// after run_connect. draw_weights initializes the weights. Collective over the world.
void gpt_connect(GPT *gpt, Run *run);
void draw_weights(Run *run, GPT *gpt);

LLMC_END
