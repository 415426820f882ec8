// Looks at shards as such: --check-data, and whether their documents end as this vocabulary's do.
// Called by train_gpt.cu (--check-data), loader.c (every run, when it opens its data) and
// loader_report.c (warnings).
#pragma once
#include <stdio.h>

#include "llmc/data/loader.h"
LLMC_BEGIN

// --check-data: opens every shard of the options' paths and reads every token once. Prints one line
// per shard: sequences, documents, tokens, lengths and the largest id. Of the options it needs the
// paths, the vocabulary (vocab_size, eod, known_ids) and mock_data. Not collective: one rank calls
// it. Errors: those of opening; EXIT_DATA for the first id outside the vocabulary, and those of
// check_ends.
bool check_data(const LoaderOptions *options, FILE *out, Error *err);

// Looks at the last tokens of at most `most` sequences, evenly spread. All of them may end with one
// id that is not the vocabulary's end of a document. Then either the shard was made without such
// ends and every text ends alike (a newline), or its ids are another vocabulary's, however valid
// they are here. The latter is certain where that id stands nowhere else in what was looked at and
// is the largest: so it is with the end of a document of GPT-2's vocabulary, of Byte and of
// NullTokenizer. Error (EXIT_DATA): it is certain and options->known_ids. A warning goes to out
// (may be NULL) otherwise.
bool check_ends(const Shard *shard, const LoaderOptions *options, int64_t most, FILE *out, Error *err);
enum { CHECK_SOME_ENDS = 32 };  // as many as every run looks at: a few reads per shard

LLMC_END
