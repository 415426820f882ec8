// Converts a Megatron-LM checkpoint to a checkpoint of the trainer, at iteration 0. Called by
// dev/convert_checkpoint.c and the tests.
#pragma once
#include "dev/convert/hf.h"
LLMC_BEGIN

typedef struct MegatronImport {
    const char *folder;            // Megatron-LM's --save directory, or the directory of one iteration in it
    int64_t iteration;             // iteration in a --save directory; -1: named by its tracker
    const char *save;              // a --save directory without checkpoints; NULL: dry run
    bool no_optimizer;             // weights only, for --finetune
    HfTokenizerOptions tokenizer;  // overrides the tokenizer in the checkpoint's arguments
    int64_t buffer_elements;       // HF_BUFFER_ELEMENTS
    Peers peers;                   // single rank
} MegatronImport;
// Reads `torch_dist` checkpoints, and the legacy format with one file per rank, with any tensor and
// pipeline parallel sizes. Master weights come from the distributed optimizer if torch_dist stores
// them as parts of parameters, else from the weights; report->notes says which. The number of
// embedding rows is kept. Pickles are never executed; the files are untrusted input. Errors:
// EXIT_CHECKPOINT; EXIT_DATA for the tokenizer's files; EXIT_USAGE if `save` has checkpoints.
bool megatron_import(const MegatronImport *options, HfReport *report, Error *err);

LLMC_END
