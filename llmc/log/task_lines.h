// The figures of --eval-tasks in the log, as JSON lines and as TensorBoard scalars. Called by
// llmc/run/eval_tasks.c.
#pragma once
#include "llmc/log/log.h"
LLMC_BEGIN

// What a task came to.
typedef struct TaskFigures {
    const char *task;
    int64_t samples;
    bool choices;            // acc_norm is known, else perplexity
    double acc, acc_stderr;  // part of the samples that were right, and its standard error
    double acc_norm, acc_norm_stderr;
    double perplexity;  // e^-(mean log-likelihood of the continuations)
} TaskFigures;

// Framed lines, and for each task the JSON line "task" and scalars such as "task arc_easy acc".
void log_tasks(Log *log, int64_t iteration, int64_t consumed_samples, const TaskFigures *tasks, int count);

LLMC_END
