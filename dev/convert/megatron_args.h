// Reads the arguments of a Megatron-LM checkpoint: a pickled argparse.Namespace in common.pt
// (torch_dist) or in every rank's file (legacy). Called by megatron.c.
#pragma once
#include "dev/convert/megatron_source.h"
LLMC_BEGIN

typedef struct MegatronArgs {
    ModelFlags flags;         // the trainer's flags
    int64_t rows, divisible;  // embedding rows; divisor of this number according to the flags
    int64_t vocab_size;       // from the tokenizer's flag; 0: unknown
    int64_t iteration;
    MegatronRanks ranks;  // parallel sizes of the run that saved it
    char *tokenizer_type, *vocab_file, *merge_file, *tokenizer_model;  // NULL: not set
} MegatronArgs;

// saved: the dict with "args", "iteration" and "checkpoint_version". by_rank: legacy checkpoint
// with one file per rank. path: for error messages. Errors (EXIT_CHECKPOINT): missing arguments or
// sizes, settings that the trainer does not support, legacy pipeline stages of different sizes.
bool megatron_args_read(MegatronArgs *args, const PickleValue *saved, bool by_rank, const char *path,
                        Error *err);
void megatron_args_free(MegatronArgs *args);

LLMC_END
