// Batches for the training loop. Megatron's sampler order over iterations, micro-batches and
// data-parallel ranks, on top of the datasets; token checks, loss masks, positions and document
// starts; mock data; --inspect-data. Called by train_gpt.c and llmc/run.
#pragma once
#include <stdio.h>

#include "llmc/data/loader_options.h"
#include "llmc/ranks/peers.h"
LLMC_BEGIN

typedef struct Loader Loader;

// Opens the shards and builds the indices, once per node, in memory that its ranks share.
// node: the ranks of this host; MPI_COMM_SELF will do. Its site names the reader of a shard that is
// cut short while the loader is open. Strings and arrays of options need not outlive the call.
// Prints nothing. Collective over node: on failure every rank of it returns NULL with the same
// error (EXIT_USAGE, EXIT_DATA, EXIT_ENVIRONMENT).
Loader *loader_open(const LoaderOptions *options, Peers node, Error *err);
// Collective over node. NULL is allowed.
void loader_close(Loader *loader);
// Whether this split has data: its weight is not zero, or it has a path, and samples were
// requested.
bool loader_has_split(const Loader *loader, int split);
// Number of samples of a split: at least as many as requested. INT64_MAX for mock data, 0 without
// the split.
int64_t loader_samples(const Loader *loader, int split);
// A number for each shard, split by split (malloc'ed), equal where machines have the same data. It
// is made of the shard's sizes, the two ends of both its files and its weight in the blend.
uint64_t *loader_fingerprints(const Loader *loader, int *shards);
// The prefix of the shard with that place among them.
const char *loader_shard_prefix(const Loader *loader, int place);
// How often the training data has been read after `consumed` samples: tokens consumed / tokens of
// all shards. For a blend that is the mean over its shards; --inspect-data tells them apart. -1 for
// mock data or without a training split.
double loader_epoch(const Loader *loader, int64_t consumed);
// This rank's part of the global micro-batch that starts at sample `consumed`: rows consumed +
// dp_rank * B + j. Micro-batch k of an iteration starts at the iteration's consumed samples + k * B
// * dp_size. Not collective. Errors (EXIT_DATA): a token id outside 0..vocab_size-1, with shard,
// sequence and position; samples beyond the dataset's end.
bool loader_batch(Loader *loader, int split, int64_t consumed, Batch *batch, Error *err);
// Megatron's " > datasets target sizes (minimum size):" lines. Then, per split and shard:
// sequences, tokens, epochs, samples, and whether the last epoch is shuffled separately. Warnings
// of check_ends.
void loader_print_summary(const Loader *loader, FILE *out);
// The bytes of an id as text, for loader_inspect; NULL when it has none.
typedef const char *(*DecodeToken)(const void *context, int id, size_t *bytes);
// --inspect-data k: sample k of the training split. Prints its shard, the sequences and offsets
// that it spans, its ids, their text (decode NULL: none), its epoch, and samples and tokens per
// shard of a blend. Error: EXIT_USAGE for a k that is not there.
bool loader_inspect(const Loader *loader, int64_t k, FILE *out, DecodeToken decode, const void *context,
                    Error *err);

LLMC_END
