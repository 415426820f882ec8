// --eval-tasks: how likely the model finds the continuations in files of samples
// (llmc/data/tasks.h), at each evaluation or alone. acc, acc_norm and perplexity are those of
// EleutherAI's lm-evaluation-harness. Called by train_gpt.c.
//
// Samples are shared out as batches. A batch has as many tokens as a micro-batch, in sequences of
// one length: the sequence length, its half, a quarter, and so on. Which requests share a batch
// depends on the files alone. So a request's likelihood has the same bits with any number of
// data-parallel ranks. The figures are summed in the files' order.
#pragma once
#include "llmc/model/gpt.h"
#include "llmc/run/run.h"
LLMC_BEGIN

// Rank 0 reads the files and tells the others. Nothing without the flag. Collective; the same error
// on every rank (EXIT_DATA).
bool eval_tasks_open(Run *run);
// Scores all samples with the weights as they are, and logs the figures. An iteration is scored
// once. Leaves early and logs nothing when the run is to stop (run->stop). Collective.
void eval_tasks(Run *run, GPT *gpt);

LLMC_END
