// From a checkpoint of Megatron-LM's to one of ours, of iteration 0. dev/convert_checkpoint.c and
// the tests call it.
#pragma once
#include "dev/convert/hf.h"
LLMC_BEGIN

typedef struct MegatronImport {
    const char *folder;         // Megatron-LM's --save folder, or that of one iteration in it
    int64_t iteration;          // of a --save folder; -1: the one that its tracker names
    const char *save;           // a --save folder without checkpoints; NULL: see whether it could be made
    bool no_optimizer;          // the weights alone, for --finetune
    HfTokenizerWish tokenizer;  // where it is not that of the checkpoint's arguments
    int64_t piece;              // HF_PIECE
    Peers peers;                // of one rank
} MegatronImport;
// `torch_dist` checkpoints and the older ones with a file per rank, of any tensor and pipeline
// parallel sizes. Master weights are the distributed optimizer's where torch_dist holds them as
// parts of parameters, else the weights; report->notes says which. The embedding keeps its rows. No
// pickle is executed; the folder's files are hostile input. Errors: EXIT_CHECKPOINT; EXIT_DATA of
// the tokenizer's files; EXIT_USAGE for a `save` with checkpoints.
bool megatron_import(const MegatronImport *wish, HfReport *report, Error *err);

LLMC_END
