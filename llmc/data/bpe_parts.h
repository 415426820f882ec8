// Parts of a BPE tokenizer: tokenizer_json.c fills them, the encoder in tokenizer.c uses them.
#pragma once
#include "llmc/data/normalize.h"
#include "llmc/data/pretokenize.h"
#include "llmc/data/vocabulary.h"
LLMC_BEGIN

// --- added_tokens.c ------------------------------------------------------------------------------

// Added tokens: special tokens that are matched in the raw text before pre-tokenization, such as
// "<|endoftext|>" or runs of spaces ("added_tokens" in tokenizer.json). tokenizer_json.c fills the
// table, the encoder in tokenizer.c searches it.

typedef struct AddedToken {
    char *text;  // owned
    size_t bytes;
    int id;
    bool left, right;  // lstrip, rstrip: the match absorbs white space on this side
    int shorter;       // index of the longest other token that is a prefix of this one; -1: none
} AddedToken;

// Zero-initialized: an empty table.
typedef struct AddedTokens {
    AddedToken *tokens;  // (count), sorted by added_tokens_complete
    int count;
    uint8_t pairs[1 << 13];  // bitmap of the first two bytes of all tokens, may have false positives
} AddedTokens;

// Adds a token. Its text must be non-empty and not in the table yet; the caller assigns the id.
void added_tokens_add(AddedTokens *tokens, AddedToken token);
// Sorts the table; call once after the last token. Returns false on duplicate texts and points
// *twice at the text.
bool added_tokens_complete(AddedTokens *tokens, const char **twice);
void added_tokens_free(AddedTokens *tokens);

// An occurrence of a token in a text.
typedef struct AddedMatch {
    size_t start, end;
    const AddedToken *token;
} AddedMatch;

// Finds the first match that starts at or after `from`; prefers the longest token at that position.
// Returns false if there is none.
bool added_tokens_find(const AddedTokens *tokens, const char *text, size_t bytes, size_t from,
                       AddedMatch *match);
// Extends the match by the white space that its token absorbs, but not before `from`. The result is
// empty if the previous token already absorbed the whole match. text must be well-formed UTF-8.
AddedMatch added_match_strip(AddedMatch match, const char *text, size_t bytes, size_t from);

// --- the parts -----------------------------------------------------------------------------------

// Ids added around every text: the "single" template of "post_processor".
enum { MOST_AROUND = 16 };
typedef struct AroundText {
    int32_t id[MOST_AROUND];
    int before, after;  // id[0 .. before) precede the text, the next `after` follow it
} AroundText;

// Parts of a BPE tokenizer, in the order in which text passes through them.
typedef struct BpeParts {
    AddedTokens raw;  // matched in the raw text
    Normalizer normalizer;
    AddedTokens normalized;  // matched in normalized text
    PieceSteps steps;        // byte-level BPE; no steps: BPE of characters
    Metaspace metaspace;     // BPE of characters
    Bpe bpe;
    TokenTable table;  // bytes as decoded
    char *texts;       // owned: texts of bpe.whole that are not in the table
    AroundText around;
    int stripped;  // maximum number of spaces that decoding removes at the start of a text
} BpeParts;

LLMC_END
