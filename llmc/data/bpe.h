// Byte-pair merging within one pre-token. vocabulary.c and tokenizer_json.c fill the tables; all
// encoder threads read them.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// A merge rule: the adjacent pair (left, right) becomes `merged`. Lower ranks are applied first.
typedef struct BpeMerge {
    int32_t left, right;
    int32_t rank, merged;
} BpeMerge;

// Hash table from texts to ids. Zero-initialized: empty, without space.
typedef struct TextIds {
    const char **text;  // (slots), not owned; NULL: empty slot
    size_t *bytes;      // (slots)
    int32_t *id;        // (slots)
    size_t slots;       // power of two, more than twice the number of texts
    size_t longest;     // longest text in bytes
} TextIds;

// Reserves space for `texts` texts.
void text_ids_init(TextIds *ids, int64_t texts);
void text_ids_free(TextIds *ids);
// Adds a text, which must outlive the table. A later duplicate replaces the earlier one.
void text_ids_add(TextIds *ids, const char *text, size_t bytes, int32_t id);
int32_t text_ids_find(const TextIds *ids, const char *text, size_t bytes);

enum { CODE_POINTS = 0x110000 };

typedef struct Bpe {
    int32_t byte_id[256];   // byte-level: initial symbol of each byte. BPE of characters: id of
                            // "<0x00>" to "<0xFF>" for characters without an id; -1: none
    int32_t *character_id;  // BPE of characters: (CODE_POINTS), -1: none; NULL: byte-level
    int32_t unknown;        // BPE of characters: id for characters without an id and without bytes
    bool fuse_unknown;      // one `unknown` for successive unknown characters
    BpeMerge *merges;       // open-addressing hash table of pairs; empty slots have left = -1
    size_t slots;           // power of two, more than twice the number of merges
    TextIds whole;          // pre-tokens that map to one id without merging ("ignore_merges" in
                            // tokenizer.json)
} Bpe;

// Scratch memory of one thread, grows as needed.
typedef struct BpeScratch {
    void *memory;
    size_t bytes;
} BpeScratch;

// Creates an empty table for `merges` merges. The caller fills byte_id.
void bpe_init(Bpe *bpe, int64_t merges);
void bpe_free(Bpe *bpe);
// Adds a merge. Adding the same pair again replaces it, as in a Python dict.
void bpe_add(Bpe *bpe, BpeMerge merge);

// Encodes one pre-token of 1 to 2^32-1 bytes, for a BPE of characters in well-formed UTF-8. A
// pre-token in `whole` maps to its id. Otherwise applies the lowest-ranked merge, leftmost first,
// until none applies, as Hugging Face's `tokenizers` does. For merge lists produced by training
// this equals merging all occurrences per round. Writes at most `bytes` ids and returns their
// number. O(n log n) for long pre-tokens.
size_t bpe_encode(const Bpe *bpe, BpeScratch *scratch, const char *piece, size_t bytes, int32_t *out);
void bpe_scratch_free(BpeScratch *scratch);

LLMC_END
