// Shared by the readers of vocabulary files (vocabulary.c, tokenizer_json.c): a map between token
// texts and ids, GPT-2's byte alphabet, and merges.
#pragma once
#include <cjson/cJSON.h>

#include "llmc/data/bpe.h"
LLMC_BEGIN

// A one-to-one map between texts and ids. Texts are not owned; they belong to a JSON tree, for
// instance.
typedef struct Symbols {
    TextIds ids;
    const char **of_id;  // (limit) map from ids to texts; NULL: unused id
    int limit, count;    // upper bound of ids; number of texts
} Symbols;

// Reserves space for `limit` texts.
void symbols_init(Symbols *symbols, int limit);
void symbols_free(Symbols *symbols);
int symbols_find(const Symbols *symbols, const char *text, size_t length);
// Adds a text with the id in a JSON item. file: for error messages. Errors: EXIT_DATA if the id is
// not an integer from 0 to limit - 1 or is taken, or if the text is already present.
bool symbols_add(Symbols *symbols, const char *text, const cJSON *id, const char *file, Error *err);

// GPT-2's byte alphabet: every byte as one printable character.
enum { ALPHABET_END = 0x144 };
typedef struct Alphabet {
    uint32_t code_point[256];    // character of each byte
    int16_t byte[ALPHABET_END];  // byte of each code point; -1: not in the alphabet
} Alphabet;

Alphabet byte_alphabet(void);
// Decodes a token in this alphabet to bytes; out must hold `length`. If the token contains other
// characters, copies its UTF-8 and sets *foreign.
size_t symbol_bytes(const Alphabet *alphabet, const char *symbol, size_t length, char *out, bool *foreign);
// Looks up the id of every byte's character. Errors: EXIT_DATA if one is missing.
bool symbols_of_bytes(const Symbols *symbols, const Alphabet *alphabet, int32_t byte_id[256],
                      const char *file, Error *err);

// Builds the merge of two texts. Both texts and their concatenation must have ids; otherwise
// returns false with a reason ("is ...", "has ...").
bool symbols_merge(const Symbols *symbols, const char *left, size_t left_bytes, const char *right,
                   size_t right_bytes, BpeMerge *merge, const char **why);
// The same for a line "left right".
bool symbols_merge_line(const Symbols *symbols, const char *line, size_t length, BpeMerge *merge,
                        const char **why);

LLMC_END
