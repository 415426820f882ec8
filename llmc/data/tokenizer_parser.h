// State of reading a tokenizer.json, shared by tokenizer_json.c (vocabulary, merges and
// end-of-document token) and tokenizer_parts.c (normalizer, pre_tokenizer, post_processor and
// decoder).
#pragma once
#include "llmc/base/json.h"
#include "llmc/data/bpe_parts.h"
#include "llmc/data/symbols.h"
LLMC_BEGIN

typedef struct TokenizerParser {
    const char *path;
    const cJSON *root, *model, *vocab, *merges, *added;  // parts of the file
    Symbols symbols;                                     // the model's "vocab"
    int size;                                            // number of ids
    const cJSON **of_id;                                 // (size) the added token with this id, or NULL
    bool characters;                                     // a BPE of characters, not of bytes
    Normalizer spelling;                                 // decoder's Replace steps
    bool decode_bytes;                                   // decoder has ByteFallback: "<0xE9>" is the byte E9
    bool fused;                                          // decoder has Fuse
    BpeParts *out;
    Error *err;
} TokenizerParser;

#define REFUSE(...) data_error(r->err, __VA_ARGS__)

// Text of a part's "type".
const char *tokenizer_part_type(const cJSON *part);
// True for a missing item and for null.
bool json_absent(const cJSON *item);
// Reads an optional boolean member. Returns false if it is something else.
bool json_flag(const cJSON *object, const char *name, bool missing, bool *value);

// Read the normalizer, the pre_tokenizer and the decoder, and later the post_processor, which needs
// the vocabulary.
bool tokenizer_parts_read(TokenizerParser *parser);
bool tokenizer_post_processor_read(TokenizerParser *parser);

LLMC_END
