// Batches for the training loop: Megatron's sampler order over iterations, micro-batches and
// data-parallel ranks on top of the datasets; token checks, loss masks, position ids and document
// starts; mock data; --inspect-data. Called by train_gpt.cu.
#pragma once
#include <stdio.h>

#include "llmc/data/dataset.h"
#include "llmc/ranks/peers.h"
LLMC_BEGIN

typedef struct LoaderOptions {
    // Which of the paths go together config_parse has checked.
    const char *const *data_path;        int data_path_count;         // one blend, cut by split
    const char *const *train_data_path;
    int train_data_path_count;  // or one blend per split, each used whole
    const char *const *valid_data_path;  int valid_data_path_count;
    const char *const *test_data_path;   int test_data_path_count;
    const char *split;                   // "969, 30, 1"
    bool mock_data;  // Megatron's synthetic samples, repeated without end; the paths are then ignored
    int64_t samples[SPLITS];             // requested samples per split; 0 = split not wanted; or ONE_EPOCH
    double surplus;                      // of a weighted blend's shards: SplitRequest
    int seq_length;
    int vocab_size;                      // ids must be below this (unpadded size)
    int eod;  // -1: none. Needed by the three flags below; mock data has its own, 0
    bool known_ids;  // ids of a tokenizer of this program: shards of another one are refused
    bool eod_mask_loss, reset_position_ids, reset_attention_mask;
    uint32_t seed, eval_seed;            // order of the training samples | of the others, 0: seed
    int micro_batch_size;                // B
    int dp_rank, dp_size;
} LoaderOptions;

// One micro-batch of this rank, host memory owned by the loader, valid until the next loader_batch
// of this loader.
typedef struct Batch {
    int32_t *tokens;        // (B, T)
    int32_t *targets;       // (B, T) tokens shifted by one
    int32_t *positions;     // (B, T) 0..T-1, restarted after an EOD under reset_position_ids
    float *loss_mask;  // (B, T) 1, or 0 where the input token is EOD under eod_mask_loss; NULL when all ones
    int32_t
        *doc_start;  // (B, T) first position that token t may attend to; NULL without reset_attention_mask
    int64_t first_sample;   // global index of row 0; row j is first_sample + j
} Batch;

typedef struct Loader Loader;

// Opens the shards and builds the indices once per node (node: the ranks of this host,
// MPI_COMM_SELF will do; its site speaks for shards that are cut short while the loader is open) in
// memory that the ranks of the node share. Collective over node: on failure every rank of the node
// returns NULL with the same error (EXIT_USAGE, EXIT_DATA, EXIT_ENVIRONMENT). Prints nothing;
// loader_print_summary does. The strings and arrays of options need not outlive the call.
Loader *loader_open(const LoaderOptions *options, Peers node, Error *err);
// Collective over node. NULL is allowed.
void loader_close(Loader *loader);
// True when this split has data (its weight is non-zero, or it has a path, and samples were
// requested).
bool loader_has_split(const Loader *loader, int split);
// Number of samples of a split: at least as many as requested; INT64_MAX for mock data, 0 without
// the split.
int64_t loader_samples(const Loader *loader, int split);
// A number for each shard, split by split (malloc'ed), equal where machines have the same data: of
// its sizes, the two ends of both its files and its weight in the blend.
uint64_t *loader_fingerprints(const Loader *loader, int *shards);
// The prefix of the shard with that place among them.
const char *loader_shard_prefix(const Loader *loader, int place);
// How often the training data has been read after `consumed` samples: tokens consumed / tokens of
// all its shards; for a blend that is the mean over its shards (--inspect-data tells them apart).
// -1 for mock data or without a training split.
double loader_epoch(const Loader *loader, int64_t consumed);
// Micro-batch whose global micro-batch starts at sample `consumed` (= consumed samples at the
// iteration's start + k * B * dp_size): this rank reads rows consumed + dp_rank * B + j. Not
// collective. Errors (EXIT_DATA): a token id outside 0..vocab_size-1, naming shard, sequence and
// position; samples beyond the dataset's end.
bool loader_batch(Loader *loader, int split, int64_t consumed, Batch *batch, Error *err);
// Megatron's " > datasets target sizes (minimum size):" lines, then per split and shard: sequences,
// tokens, epochs, samples, and whether the last epoch is shuffled separately.
void loader_print_summary(const Loader *loader, FILE *out);
// --inspect-data k: sample k of the training split: shard, sequences and offsets it spans, its ids,
// the text by `decode` (NULL: ids only), the epoch it lies in, samples and tokens per blend part.
// Errors: EXIT_USAGE for a k that is not there.
bool loader_inspect(const Loader *loader, int64_t k, FILE *out,
                    const char *(*decode)(const void *context, int id, size_t *bytes), const void *context,
                    Error *err);

LLMC_END
