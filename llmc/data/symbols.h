// What the readers of vocabulary files share: texts of tokens and their ids while a file is read,
// GPT-2's alphabet of bytes, merges. Called by vocabulary.c and tokenizer_json.c.
#pragma once
#include <cjson/cJSON.h>

#include "llmc/data/bpe.h"
LLMC_BEGIN

// Texts and ids, each once. The texts belong to others, such as a JSON tree, and must stay.
typedef struct Symbols {
    const char **text;  // (slots) a hash map from texts to ids; NULL: an empty slot
    size_t *length;     // (slots)
    int *id;            // (slots)
    size_t slots;
    const char **of_id;  // (limit) from ids to texts; NULL: none has this id
    int limit, count;    // ids are below limit; texts so far
    size_t longest;      // bytes
} Symbols;

// Room for `limit` texts.
void symbols_init(Symbols *symbols, int limit);
void symbols_free(Symbols *symbols);
// The id of a text, -1: there is none.
int symbols_find(const Symbols *symbols, const char *text, size_t length);
// Adds a text with the id that a JSON item holds. file: for messages. Errors: EXIT_DATA for an id
// that is no whole number from 0 to limit - 1, or is taken, and for a text that is there.
bool symbols_add(Symbols *symbols, const char *text, const cJSON *id, const char *file, Error *err);

// GPT-2's alphabet: every byte as one printable character.
enum { ALPHABET_END = 0x144 };
typedef struct Alphabet {
    uint32_t code_point[256];    // of every byte
    int16_t byte[ALPHABET_END];  // of every code point, -1 where it is none of the alphabet
} Alphabet;

Alphabet byte_alphabet(void);
// Bytes of a token in this alphabet; out has room for `length`. A token with other characters keeps
// its UTF-8: *foreign is then true.
size_t symbol_bytes(const Alphabet *alphabet, const char *symbol, size_t length, char *out, bool *foreign);
// The id that each byte's character has. Errors: EXIT_DATA where one has none.
bool symbols_of_bytes(const Symbols *symbols, const Alphabet *alphabet, int32_t byte_id[256],
                      const char *file, Error *err);

// The merge of two texts, of which ids are to be known as is that of their concatenation. False
// with a reason ("is ...", "has ...") where they are not.
bool symbols_merge(const Symbols *symbols, const char *left, size_t left_bytes, const char *right,
                   size_t right_bytes, BpeMerge *merge, const char **why);
// The same for one text "left right".
bool symbols_merge_line(const Symbols *symbols, const char *line, size_t length, BpeMerge *merge,
                        const char **why);

LLMC_END
