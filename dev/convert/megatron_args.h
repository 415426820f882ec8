// What the arguments of a Megatron-LM checkpoint say: a pickled argparse.Namespace in common.pt
// (torch_dist) or in every rank's file. Called by megatron.c.
#pragma once
#include "dev/convert/megatron_source.h"
LLMC_BEGIN

typedef struct MegatronArgs {
    ModelFlags flags;         // of the trainer
    int64_t rows, divisible;  // of the embedding; what they are a multiple of, as the flags say
    int64_t vocab_size;       // as the tokenizer's flag says; 0: it does not
    int64_t iteration;
    MegatronRanks ranks;                                               // that saved it
    char *tokenizer_type, *vocab_file, *merge_file, *tokenizer_model;  // NULL: not there
} MegatronArgs;

// saved: the dict with "args", "iteration" and "checkpoint_version". by_rank: the checkpoint is one
// of a file per rank. path: for messages. Errors (EXIT_CHECKPOINT): arguments or sizes that are
// missing, what the trainer computes otherwise, stages of different sizes by rank.
bool megatron_args_read(MegatronArgs *args, const PickleValue *saved, bool by_rank, const char *path,
                        Error *err);
void megatron_args_free(MegatronArgs *args);

LLMC_END
