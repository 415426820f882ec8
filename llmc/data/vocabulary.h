// Reads GPT-2's vocabulary files, vocab.json and merges.txt. Called by tokenizer.c.
#pragma once
#include "llmc/data/bpe.h"
LLMC_BEGIN

#define END_OF_TEXT "<|endoftext|>"

// The bytes of every id, concatenated: id i is bytes[start[i]] .. bytes[start[i + 1]].
typedef struct TokenTable {
    char *bytes;
    size_t *start;  // (size + 1)
    int size;       // ids 0 .. size-1
    int eod;        // id of "<|endoftext|>"
} TokenTable;

// Creates an empty table with space for `size` ids of total_bytes bytes in all.
void token_table_init(TokenTable *table, int size, size_t total_bytes);
// Sets the bytes of id `next`. Ids must be appended in order.
void token_table_append(TokenTable *table, int next, const char *bytes, size_t length);
void token_table_free(TokenTable *table);

// Returns the text of a file of a tokenizer (malloc'ed, NUL-terminated), or NULL with EXIT_DATA.
// hint: what to do if it is missing.
char *vocabulary_file(const char *path, const char *hint, size_t *bytes, Error *err);
// Reads both files. The ids in vocab.json must be 0 .. n-1, each used once, and include all 256
// byte symbols and "<|endoftext|>", and the parts and the result of every merge. Errors: EXIT_DATA
// with file and line or entry. On failure nothing needs freeing.
bool vocabulary_read(TokenTable *table, Bpe *bpe, const char *vocab_file, const char *merge_file, Error *err);

LLMC_END
