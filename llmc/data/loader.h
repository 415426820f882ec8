// Batches for the training loop: Megatron's sampler order over iterations, micro-batches and
// data-parallel ranks, on top of the datasets. Also token checks, loss masks, positions and
// document starts, mock data and --inspect-data. Called by train_gpt.c and llmc/run.
#pragma once
#include <stdio.h>

#include "llmc/data/loader_options.h"
#include "llmc/ranks/peers.h"
LLMC_BEGIN

typedef struct Loader Loader;

// Opens the shards and builds the indices once per node, in memory shared by its ranks. node: the
// ranks of this host, or MPI_COMM_SELF. node.site identifies this rank in the message if a shard is
// truncated while open. Copies options, including strings and arrays. Prints nothing. Collective
// over node: on failure every rank returns NULL with the same error (EXIT_USAGE, EXIT_DATA,
// EXIT_ENVIRONMENT).
Loader *loader_open(const LoaderOptions *options, Peers node, Error *err);
// Collective over node. NULL is allowed.
void loader_close(Loader *loader);
// Returns true if samples were requested from this split and it has data (a non-zero weight or its
// own path).
bool loader_has_split(const Loader *loader, int split);
// Number of samples of a split, at least as many as requested. INT64_MAX for mock data, 0 if the
// split is absent.
int64_t loader_samples(const Loader *loader, int split);
// One fingerprint per shard, split by split (malloc'ed). Equal on machines that have the same data.
// Hashes the shard's sizes, the first and last bytes of both files, and its weight in the blend.
uint64_t *loader_fingerprints(const Loader *loader, int *shards);
// Returns the prefix of the shard at index `place` of loader_fingerprints.
const char *loader_shard_prefix(const Loader *loader, int place);
// Epochs of training data read after `consumed` samples: tokens read / tokens of all shards. With
// --sft and one shard: conversations read / conversations of the shard.
// For a blend this is the mean over its shards (--inspect-data lists them separately). -1 for mock
// data or without a training split.
double loader_epoch(const Loader *loader, int64_t consumed);
// Loads this rank's B rows of the global micro-batch that starts at sample `consumed`: row j is
// sample consumed + dp_rank * B + j. Micro-batch k of an iteration starts at the iteration's
// consumed samples + k * B * dp_size. Not collective. Errors (EXIT_DATA): a token id outside
// 0..vocab_size-1, with shard, sequence and position; samples past the end of the dataset.
bool loader_batch(Loader *loader, int split, int64_t consumed, Batch *batch, Error *err);
// Prints Megatron's " > datasets target sizes (minimum size):" lines. Then, per split and shard:
// sequences, tokens, epochs, samples, whether the last epoch is shuffled separately, and the
// warnings of check_ends.
void loader_print_summary(const Loader *loader, FILE *out);
// Returns the text of an id, or NULL if it has none. Used by loader_inspect.
typedef const char *(*DecodeToken)(const void *context, int id, size_t *bytes);
// Implements --inspect-data k for sample k of the training split: prints its shard, the sequences
// and offsets it spans, its ids and text (decode NULL: no text), its epoch, and for a blend samples
// and tokens per shard. Error: EXIT_USAGE if k is out of range.
bool loader_inspect(const Loader *loader, int64_t k, FILE *out, DecodeToken decode, const void *context,
                    Error *err);

// --- check.c -------------------------------------------------------------------------------------

// Implements --check-data: opens every shard of the options' paths, reads every token once and
// prints one line per shard with sequences, documents, tokens, lengths and the largest id. Uses the
// options' paths, vocabulary (vocab_size, eod, known_ids) and mock_data. Not collective; call it on
// one rank. Errors: any error of opening a shard; EXIT_DATA for the first id outside the
// vocabulary; any error of check_ends.
bool check_data(const LoaderOptions *options, FILE *out, Error *err);

// Checks the last tokens of up to `most` sequences spread over the shard. If all of them end with
// the same id and it is not EOD, there are two possible causes:
// - The shard was preprocessed without EOD, and all texts end with the same id, such as a newline.
// - The ids belong to another vocabulary, even if they are in range. This is certain if the id is
//   the largest one sampled and occurs nowhere else, as the EOD of GPT-2, Byte and NullTokenizer
//   does.
// Fails with EXIT_DATA if it is certain and options->known_ids is set. Otherwise prints a warning
// to out (may be NULL).
bool check_ends(const Shard *shard, const LoaderOptions *options, int64_t most, FILE *out, Error *err);
enum { CHECK_SOME_ENDS = 32 };  // sequences checked by every run: a few reads per shard

LLMC_END
