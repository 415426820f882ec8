// Reads --data-path lists from files (--data-args-path and --per-split-data-args-path), for blends
// too long for a command line. Uses Megatron-LM's formats. Called by config_parse.c.
#pragma once
#include "llmc/data/dataset.h"
LLMC_BEGIN

// Arguments of a --data-path.
typedef struct DataWords {
    const char **items;  // (count), pointers into text; malloc'ed
    int count;
    char *text;
} DataWords;

// Splits a text file at white space: "0.3 prefix_a 0.7 prefix_b". Errors (EXIT_USAGE): an
// unreadable or empty file. On failure nothing needs freeing.
bool data_args_read(DataWords *words, const char *path, Error *err);
// Reads a JSON object with the members "train", "valid" and "test". Each is a list of strings
// (weights may be numbers), one white-space-separated string, or null for no data. Ignores unknown
// members. Errors (EXIT_USAGE) name the file and the member.
bool data_args_read_splits(DataWords words[SPLITS], const char *path, Error *err);
void data_words_free(DataWords *words);

LLMC_END
