// Tokens that are found in the text itself, before it is cut into pieces: "added_tokens" of
// tokenizer.json, such as "<|endoftext|>" or runs of spaces. Filled by tokenizer_json.c, used by
// the encoder in tokenizer.c.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

typedef struct AddedToken {
    char *text;  // its own copy
    size_t bytes;
    int id;
    bool left, right;  // takes the white space on this side along
    int shorter;       // the longest other token that it begins with, -1: none
} AddedToken;

// All zero: no tokens.
typedef struct AddedTokens {
    AddedToken *tokens;  // (count), sorted once they are complete
    int count;
    bool first[256];         // bytes that a token begins with
    uint8_t pairs[1 << 13];  // bits: two bytes that a token begins with, or might
} AddedTokens;

// Adds one that is not empty and not there yet. Its id is the tokenizer's.
void added_tokens_add(AddedTokens *tokens, AddedToken token);
// After the last one. False where two have the same text, which *twice then points to.
bool added_tokens_complete(AddedTokens *tokens, const char **twice);
void added_tokens_free(AddedTokens *tokens);

// One token in a text.
typedef struct AddedMatch {
    size_t start, end;
    const AddedToken *token;
} AddedMatch;

// The first match that begins at `from` or later: the longest there. False when there is none.
bool added_tokens_find(const AddedTokens *tokens, const char *text, size_t bytes, size_t from,
                       AddedMatch *match);
// The match's bounds with the white space that its token takes along. To the left it takes none in
// front of `from`, and is empty when the token before it has taken all of it. text: well-formed
// UTF-8.
AddedMatch added_match_strip(AddedMatch match, const char *text, size_t bytes, size_t from);

LLMC_END
