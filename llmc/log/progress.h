// <save>/progress.txt of --log-progress, as Megatron-LM writes it, over all jobs of a run: one line
// when a job starts, one per saved checkpoint. Called by llmc/run/setup.c and saver.c.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

typedef struct Progress Progress;

// Appends the "Starting job" line to <save>/progress.txt, made with its folder when absent. Learns
// from the earlier lines when the run began at this world size. active: rank 0 with --log-progress
// and --save; otherwise the result writes nothing. flops_so_far: of the whole run, at this start.
// Error: NULL and EXIT_ENVIRONMENT.
Progress *progress_open(const char *save, int world_size, double flops_so_far, bool active, Error *err);
// The folder was moved or removed, and saves go to another of that name. So does this file from
// here on. Error: EXIT_ENVIRONMENT.
bool progress_follow(Progress *progress, const char *save, Error *err);
// A checkpoint was saved. Appends its line: TFLOP/s per GPU of this job; the same over all jobs at
// this world size, with the time between jobs; FLOPs and billions of tokens so far.
void progress_checkpoint(Progress *progress, int64_t iteration, double flops_so_far, double tokens_so_far);
void progress_close(Progress *progress);

LLMC_END
