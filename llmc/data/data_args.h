// Lists of shards from files: --data-args-path and --per-split-data-args-path, for blends too long
// for a command line. Megatron-LM's formats. Called by config_parse.c.
#pragma once
#include "llmc/data/dataset.h"
LLMC_BEGIN

// Words of a --data-path.
typedef struct DataWords {
    const char **items;  // (count) into text; malloc'ed
    int count;
    char *text;
} DataWords;

// The words of a text file, separated by white space: "0.3 prefix_a 0.7 prefix_b". Errors
// (EXIT_USAGE): a file that cannot be read or holds no word. On failure nothing needs freeing.
bool data_args_read(DataWords *words, const char *path, Error *err);
// A JSON object with the members "train", "valid" and "test". Each is a list of words (weights may
// be numbers), one text of them, or null for no data; unknown members are ignored. Errors
// (EXIT_USAGE) name file and member.
bool data_args_read_splits(DataWords words[SPLITS], const char *path, Error *err);
void data_words_free(DataWords *words);

LLMC_END
