// What a loader is opened with, and what it returns. Included by loader.h and the loader's own files.
#pragma once
#include "llmc/data/dataset.h"
LLMC_BEGIN

// The words of one --data-path or of its kin.
typedef struct DataPath {
    const char *const *words;
    int count;
} DataPath;

typedef struct LoaderOptions {
    DataPath data_path;           // one blend, cut by split; or none,
    DataPath split_path[SPLITS];  // and one blend per split, each used whole
    const char *split;            // "969, 30, 1"
    bool mock_data;               // Megatron's synthetic samples, without end; the paths are ignored
    int64_t samples[SPLITS];      // requested per split, or ONE_EPOCH; 0: the split is not wanted
    double surplus;               // of a weighted blend's shards: SplitRequest
    int seq_length;
    int vocab_size;  // ids must be below this (unpadded size)
    int eod;         // -1: none. Needed by the three flags below; mock data has its own, 0
    bool known_ids;  // GPT-2's: shards of another vocabulary are refused
    bool eod_mask_loss, reset_position_ids, reset_attention_mask;
    uint32_t seed, eval_seed;  // order of the training samples | of the others, 0: seed
    int micro_batch_size;      // B
    int dp_rank, dp_size;
} LoaderOptions;

// One micro-batch of this rank. Host memory of the loader, valid until its next loader_batch.
typedef struct Batch {
    int32_t *tokens;       // (B, T)
    int32_t *targets;      // (B, T) tokens shifted by one
    int32_t *positions;    // (B, T) 0..T-1, restarted after an EOD under reset_position_ids
    float *loss_mask;      // (B, T) 0 where the input is EOD under eod_mask_loss, else 1; NULL: all ones
    int32_t *doc_start;    // (B, T) first position that token t attends to; NULL without reset_attention_mask
    int64_t first_sample;  // global index of row 0; row j is first_sample + j
} Batch;

LLMC_END
