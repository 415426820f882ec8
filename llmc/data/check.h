// Checks of data shards: --check-data, and a test that the documents end with the vocabulary's EOD.
// Called by llmc/run (--check-data), loader.c (every run, on open) and loader_report.c (warnings).
#pragma once
#include <stdio.h>

#include "llmc/data/loader_options.h"
LLMC_BEGIN

// Implements --check-data: opens every shard of the options' paths, reads every token once and
// prints one line per shard with sequences, documents, tokens, lengths and the largest id. Uses the
// options' paths, vocabulary (vocab_size, eod, known_ids) and mock_data. Not collective; call it on
// one rank. Errors: any error of opening a shard; EXIT_DATA for the first id outside the
// vocabulary; any error of check_ends.
bool check_data(const LoaderOptions *options, FILE *out, Error *err);

// Checks the last tokens of up to `most` sequences spread over the shard. If all of them end with
// the same id and it is not EOD, one of two things happened:
// - The shard was preprocessed without EOD, and every text ends alike, for instance with a newline.
// - The ids belong to another vocabulary, even if they are in range. This is certain if the id is
//   the largest one sampled and occurs nowhere else, as the EOD of GPT-2, Byte and NullTokenizer
//   does.
// Fails with EXIT_DATA if it is certain and options->known_ids is set. Otherwise prints a warning
// to out (may be NULL).
bool check_ends(const Shard *shard, const LoaderOptions *options, int64_t most, FILE *out, Error *err);
enum { CHECK_SOME_ENDS = 32 };  // sequences checked by every run: a few reads per shard

LLMC_END
