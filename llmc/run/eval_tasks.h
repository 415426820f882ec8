// --eval-tasks: scores multiple-choice and continuation tasks (llmc/data/tasks.h) at each
// evaluation and at the end of the run. acc, acc_norm and perplexity are defined as in EleutherAI's
// lm-evaluation-harness. Called by train_gpt.c.
//
// Requests are batched and the batches distributed over the data-parallel ranks. A batch has as
// many tokens as a micro-batch, in sequences of one length: the sequence length, a half, a quarter,
// and so on. Batches depend only on the files, so log-likelihoods are bitwise identical for any
// number of data-parallel ranks. Metrics are summed in file order.
#pragma once
#include "llmc/model/gpt.h"
#include "llmc/run/run.h"
LLMC_BEGIN

// Reads the files on rank 0 and broadcasts the samples. No-op unless --eval-tasks is given.
// Collective; the same error on every rank (EXIT_DATA).
bool eval_tasks_open(Run *run);
// Scores all samples with the current weights and logs the metrics, at most once per iteration.
// Ends early without logging if run->stop is set. Collective.
void eval_tasks(Run *run, GPT *gpt);

LLMC_END
