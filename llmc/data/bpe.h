// Byte-pair merging of one pre-token. The tables are filled by tokenizer.c from vocab.json and
// merges.txt and read by every encoder thread.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// A merge: the adjacent pair (left, right) becomes `merged`; lower ranks go first.
typedef struct BpeMerge {
    int32_t left, right;
    int32_t rank, merged;
} BpeMerge;

typedef struct Bpe {
    int32_t byte_id[256];  // the symbol each byte begins as
    BpeMerge *merges;      // open-addressing hash table of pairs; an empty slot has left = -1
    size_t slots;          // a power of two, more than twice the number of merges
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

// Merges one piece of 1..2^32-1 bytes: again and again the pair of lowest rank, the leftmost of
// equals, as Hugging Face's `tokenizers` does. For any trained list of merges that equals merging
// all occurrences in each round. Writes at most `bytes` ids to out and returns their number. Long
// pieces take O(n log n).
size_t bpe_encode(const Bpe *bpe, BpeScratch *scratch, const char *piece, size_t bytes, int32_t *out);
void bpe_scratch_free(BpeScratch *scratch);

LLMC_END
