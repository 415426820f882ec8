// Results of --eval-tasks in the log, as JSON lines and as TensorBoard scalars. Called by
// llmc/run/eval_tasks.c.
#pragma once
#include "llmc/log/log.h"
LLMC_BEGIN

// Result of a task.
typedef struct TaskFigures {
    const char *task;
    int64_t samples;
    bool choices;            // multiple choice: has acc_norm, else perplexity
    double acc, acc_stderr;  // fraction of correct samples and its standard error
    double acc_norm, acc_norm_stderr;
    double perplexity;  // exp(-(mean log-likelihood of the continuations))
} TaskFigures;

// Prints framed lines, and writes for each task the JSON line "task" and scalars such as "task
// arc_easy acc".
void log_tasks(Log *log, int64_t iteration, int64_t consumed_samples, const TaskFigures *tasks, int count);

LLMC_END
