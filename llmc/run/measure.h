// --plan-measure: measures the device's FLOP rate on a few of the model's layers. Called by
// train_gpt.c, which runs the steps between measurement_begin and measured_tflops.
#pragma once
#include "llmc/model/gpt.h"
#include "llmc/run/run.h"
LLMC_BEGIN

// Warm-up steps select kernels and fill caches; they are not timed.
enum { MEASURE_WARM_UP_STEPS = 3, MEASURE_STEPS = 5 };

// Sets up a separate run `measured` and its model, with few layers and mock data. run must have
// been planned and have one rank. Errors: EXIT_USAGE with several ranks, otherwise see
// start_run. measurement_end must follow in any case.
bool measurement_begin(Run *run, Run *measured, GPT *gpt);
// Returns the TFLOP/s of forward and backward in the last MEASURE_STEPS steps. Synchronizes.
double measured_tflops(Run *measured);
// Frees `measured` and gpt. Copies the error of the measured run to run->error.
void measurement_end(Run *run, Run *measured, GPT *gpt);

LLMC_END
