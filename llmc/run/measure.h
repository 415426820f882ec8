// --plan-measure: how fast this machine's device computes a few of the model's layers. Called by
// train_gpt.c, which runs the steps in between.
#pragma once
#include "llmc/model/gpt.h"
#include "llmc/run/run.h"
LLMC_BEGIN

// The first steps choose kernels and fill caches, and are not timed.
enum { MEASURE_WARM_UP_STEPS = 3, MEASURE_STEPS = 5 };

// Sets up `measured` and its model: a run of its own with few layers and mock data. run: planned,
// of one rank. Errors: EXIT_USAGE with several ranks, else those of a start. measurement_end must
// follow.
bool measurement_begin(Run *run, Run *measured, GPT *gpt);
// TFLOP/s of forward and backward in the latest MEASURE_STEPS steps. Waits for them.
double measured_tflops(Run *measured);
// Frees both. run->error becomes that of the measured run.
void measurement_end(Run *run, Run *measured, GPT *gpt);

LLMC_END
