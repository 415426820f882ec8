// --plan-measure: how fast this machine's device computes a few of the model's layers. Called by
// train_gpt.cu.
#pragma once
#include "llmc/model/gpt.h"
#include "llmc/run/run.h"
LLMC_BEGIN

// Launches one iteration: train_gpt.cu's training step.
typedef void (*TrainStep)(Run *run, GPT *gpt);
// Makes a few steps of a run of its own, with few of the model's layers and synthetic tokens. Puts
// what they reach into run->config.plan_tflops. run: planned, of one rank. Errors: EXIT_USAGE with
// more ranks, else those of a start.
bool measure_passes(Run *run, TrainStep train_step);

LLMC_END
