// <save>/progress.txt of --log-progress, in Megatron-LM's format: one line for each start of a job
// and for each saved checkpoint, over all jobs of a run. Called by llmc/run/setup.c and saver.c.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

typedef struct Progress Progress;

// Appends "Starting job" to <save>/progress.txt, creating it and its directory if necessary. Finds
// in earlier lines when the run started at this world size. active: true on rank 0 with
// --log-progress and --save; otherwise nothing is written. flops_so_far: FLOPs of earlier jobs.
// Returns NULL on error (EXIT_ENVIRONMENT).
Progress *progress_open(const char *save, int world_size, double flops_so_far, bool active, Error *err);
// Reopens the file if its directory has been replaced by another one of the same name. Error:
// EXIT_ENVIRONMENT.
bool progress_follow(Progress *progress, const char *save, Error *err);
// Appends the line of a saved checkpoint: TFLOP/s per GPU of this job, and of all jobs at this
// world size including the time between them, then FLOPs and billions of tokens so far.
void progress_checkpoint(Progress *progress, int64_t iteration, double flops_so_far, double tokens_so_far);
void progress_close(Progress *progress);

LLMC_END
