// Options and batches of the loader. Included by loader.h and the loader's own files.
#pragma once
#include "llmc/data/dataset.h"
LLMC_BEGIN

// Arguments of one --data-path or --{train,valid,test}-data-path.
typedef struct DataPath {
    const char *const *words;
    int count;
} DataPath;

typedef struct LoaderOptions {
    DataPath data_path;           // one blend, divided by `split`; empty if split_path is used
    DataPath split_path[SPLITS];  // one blend per split, each used in full
    const char *split;            // "969, 30, 1"
    bool mock_data;               // Megatron's synthetic samples, unlimited; paths are ignored
    int64_t samples[SPLITS];      // requested per split, or ONE_EPOCH; 0: split not needed
    double surplus;               // for weighted blends, see SplitRequest
    int seq_length;
    int vocab_size;  // ids must be below this (unpadded size)
    int eod;         // -1: none. Required by the three flags below; mock data uses 0
    bool known_ids;  // the vocabulary is GPT-2's; refuse shards of a different vocabulary
    bool eod_mask_loss, reset_position_ids, reset_attention_mask;
    bool sft;  // samples are packed conversations with loss masks; excludes mock data and the three flags
    uint32_t seed, eval_seed;  // shuffle seed of training samples | of the other splits, 0: same as seed
    int micro_batch_size;      // B
    int dp_rank, dp_size;
} LoaderOptions;

// One micro-batch of this rank. Host memory owned by the loader, valid until the next loader_batch.
typedef struct Batch {
    int32_t *tokens;       // (B, T)
    int32_t *targets;      // (B, T) tokens shifted by one position
    int32_t *positions;    // (B, T) 0..T-1, restarting after EOD with reset_position_ids, and in each
                           // conversation with sft
    float *loss_mask;      // (B, T) 0 where the input is EOD with eod_mask_loss, or the target is not the
                           // assistant's with sft, else 1; NULL: all ones
    int32_t *doc_start;    // (B, T) first position that token t attends to; NULL without
                           // reset_attention_mask and sft
    int64_t first_sample;  // global index of row 0; row j is first_sample + j
} Batch;

LLMC_END
