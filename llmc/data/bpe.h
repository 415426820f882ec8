// Byte-pair merging of one pre-token. The tables are filled by the readers of vocabularies
// (vocabulary.c, tokenizer_json.c) and read by every encoder thread.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// A merge: the adjacent pair (left, right) becomes `merged`; lower ranks go first.
typedef struct BpeMerge {
    int32_t left, right;
    int32_t rank, merged;
} BpeMerge;

// Tokens that a whole piece may be: "ignore_merges" of tokenizer.json. A hash table of texts.
typedef struct WholePieces {
    const char **text;  // (slots), not owned; NULL: an empty slot
    uint32_t *bytes;    // (slots)
    int32_t *id;        // (slots)
    size_t slots;       // 0: pieces are always merged
    size_t longest;     // bytes
} WholePieces;

typedef struct Bpe {
    int32_t byte_id[256];  // the symbol each byte begins as
    BpeMerge *merges;      // open-addressing hash table of pairs; an empty slot has left = -1
    size_t slots;          // a power of two, more than twice the number of merges
    WholePieces whole;
} Bpe;

// One per thread: room for the piece being merged, grown as needed.
typedef struct BpeScratch {
    void *memory;
    size_t bytes;
} BpeScratch;

// An empty table for `merges` merges. byte_id is left to the caller.
void bpe_init(Bpe *bpe, int64_t merges);
void bpe_free(Bpe *bpe);
// Adds one merge; the same pair again replaces it (the last one wins, as in a Python dict).
void bpe_add(Bpe *bpe, BpeMerge merge);
// Room for `tokens` texts that are not merged when a piece is one of them, and one of them. The
// text must stay; a later one of the same bytes replaces it.
void bpe_init_whole(Bpe *bpe, int64_t tokens);
void bpe_add_whole(Bpe *bpe, const char *text, size_t bytes, int32_t id);

// Ids of one piece of 1..2^32-1 bytes. A piece that is a whole token is that token. Any other is
// merged: again and again the pair of lowest rank, the leftmost of equals, as Hugging Face's
// `tokenizers` does. For any trained list of merges that equals merging all occurrences in each
// round. Writes at most `bytes` ids to out and returns their number. Long pieces take O(n log n).
size_t bpe_encode(const Bpe *bpe, BpeScratch *scratch, const char *piece, size_t bytes, int32_t *out);
void bpe_scratch_free(BpeScratch *scratch);

LLMC_END
