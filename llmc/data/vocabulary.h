// GPT-2's vocabulary files: reads vocab.json and merges.txt into the tables of tokenizer.c, which
// alone calls this.
#pragma once
#include "llmc/data/bpe.h"
LLMC_BEGIN

#define END_OF_TEXT "<|endoftext|>"

// The bytes of every id, back to back: id i is bytes[start[i]] .. bytes[start[i + 1]].
typedef struct TokenTable {
    char *bytes;
    size_t *start;  // (size + 1)
    int size;       // ids 0 .. size-1
    int eod;        // the id of "<|endoftext|>"
} TokenTable;

// An empty table to append to; room for `size` ids that together have total_bytes bytes.
void token_table_init(TokenTable *table, int size, size_t total_bytes);
// Sets the bytes of the next id. next: how many ids have been set before.
void token_table_append(TokenTable *table, int next, const char *bytes, size_t length);
void token_table_free(TokenTable *table);

// Reads both files. The ids of vocab.json must be 0 .. n-1, each once. All 256 byte symbols and
// "<|endoftext|>" must be there, and so must every merge's parts and result. Errors: EXIT_DATA with
// file and line or entry. On failure nothing is left to free.
bool vocabulary_read(TokenTable *table, Bpe *bpe, const char *vocab_file, const char *merge_file, Error *err);

LLMC_END
