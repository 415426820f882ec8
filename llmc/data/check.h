// Looks at shards as such: --check-data, and whether their documents end as this vocabulary's do.
// Called by llmc/run (--check-data), loader.c (every run, when it opens its data) and
// loader_report.c (warnings).
#pragma once
#include <stdio.h>

#include "llmc/data/loader_options.h"
LLMC_BEGIN

// --check-data: opens every shard of the options' paths and reads every token once. Prints one line
// per shard: sequences, documents, tokens, lengths and the largest id. Needs the options' paths,
// vocabulary (vocab_size, eod, known_ids) and mock_data. Not collective: one rank calls it.
// Errors: those of opening; EXIT_DATA for the first id outside the vocabulary; those of check_ends.
bool check_data(const LoaderOptions *options, FILE *out, Error *err);

// Looks at the last tokens of at most `most` sequences, spread over the shard. They may all end
// with one id that is not the vocabulary's end of a document. Then one of two things is true:
// - The shard was made without such ends, and every text ends alike, for instance with a newline.
// - Its ids are another vocabulary's, however valid they are here. That is certain where the id
//   stands nowhere else in what was looked at and is the largest there. So it is with the ends of
//   GPT-2, Byte and NullTokenizer.
// Error (EXIT_DATA): it is certain, and options->known_ids. Otherwise a warning goes to out (may be
// NULL).
bool check_ends(const Shard *shard, const LoaderOptions *options, int64_t most, FILE *out, Error *err);
enum { CHECK_SOME_ENDS = 32 };  // as many as every run looks at: a few reads per shard

LLMC_END
