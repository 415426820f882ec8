// Byte-pair merging. See bpe.h. Most pre-tokens are short and are merged in place by rescanning a
// small array. Long ones use a heap over a linked list, so that a megabyte without a space takes
// O(n log n) instead of O(n^2).
#include "llmc/data/bpe.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "llmc/base/utf8.h"

enum { SHORT_PIECE = 48, NO_RANK = INT32_MAX };

static size_t pair_slot(int32_t left, int32_t right, size_t slots) {
    uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    key *= 0x9E3779B97F4A7C15u;  // Fibonacci hashing: the high bits depend on all bits
    return (size_t)(key >> 32) & (slots - 1);
}

static size_t table_slots(int64_t entries) {
    size_t slots = 64;
    while (slots < 2 * (size_t)entries + 1) slots *= 2;
    return slots;
}

void bpe_init(Bpe *bpe, int64_t merges) {
    assert(bpe && merges >= 0);
    bpe->whole = (TextIds){0};
    bpe->character_id = NULL;
    bpe->unknown = -1;
    bpe->fuse_unknown = false;
    bpe->slots = table_slots(merges);
    bpe->merges = xmalloc(bpe->slots * sizeof *bpe->merges, "the table of merges");
    for (size_t i = 0; i < bpe->slots; i++) bpe->merges[i].left = -1;
}

void bpe_free(Bpe *bpe) {
    free(bpe->merges);
    free(bpe->character_id);
    text_ids_free(&bpe->whole);
    bpe->merges = NULL;
    bpe->character_id = NULL;
}

// ---- texts and their ids ----

void text_ids_init(TextIds *t, int64_t texts) {
    assert(texts >= 0);
    *t = (TextIds){.slots = table_slots(texts)};
    t->text = xcalloc(t->slots, sizeof *t->text, "the vocabulary");
    t->bytes = xmalloc(t->slots * sizeof *t->bytes, "the vocabulary");
    t->id = xmalloc(t->slots * sizeof *t->id, "the vocabulary");
}

void text_ids_free(TextIds *t) {
    free(t->text);
    free(t->bytes);
    free(t->id);
    *t = (TextIds){0};
}

// Returns the slot of this text, or the empty slot to insert it.
static size_t text_slot(const TextIds *t, const char *text, size_t bytes) {
    size_t i = (size_t)XXH3_64bits(text, bytes) & (t->slots - 1);
    while (t->text[i] && (t->bytes[i] != bytes || memcmp(t->text[i], text, bytes)))
        i = (i + 1) & (t->slots - 1);
    return i;
}

void text_ids_add(TextIds *t, const char *text, size_t bytes, int32_t id) {
    assert(t->slots && id >= 0);
    size_t i = text_slot(t, text, bytes);
    t->text[i] = text;
    t->bytes[i] = bytes;
    t->id[i] = id;
    if (bytes > t->longest) t->longest = bytes;
}

int32_t text_ids_find(const TextIds *t, const char *text, size_t bytes) {
    if (!t->slots || bytes > t->longest) return -1;
    size_t i = text_slot(t, text, bytes);
    return t->text[i] ? t->id[i] : -1;
}

// ---- merging ----

void bpe_add(Bpe *bpe, BpeMerge merge) {
    size_t i = pair_slot(merge.left, merge.right, bpe->slots);
    for (; bpe->merges[i].left >= 0; i = (i + 1) & (bpe->slots - 1)) {
        if (bpe->merges[i].left == merge.left && bpe->merges[i].right == merge.right) break;
    }
    bpe->merges[i] = merge;
}

static const BpeMerge *find_merge(const Bpe *bpe, int32_t left, int32_t right) {
    for (size_t i = pair_slot(left, right, bpe->slots);; i = (i + 1) & (bpe->slots - 1)) {
        const BpeMerge *merge = &bpe->merges[i];
        if (merge->left == left && merge->right == right) return merge;
        if (merge->left < 0) return NULL;
    }
}

// Returns the rank of a pair (NO_RANK: no merge) and the merged symbol.
static int32_t pair_rank(const Bpe *bpe, int32_t left, int32_t right, int32_t *merged) {
    const BpeMerge *merge = find_merge(bpe, left, right);
    *merged = merge ? merge->merged : -1;
    return merge ? merge->rank : NO_RANK;
}

// Writes the ids of a character's bytes. Returns their number, 0 if one has no id.
static size_t byte_ids(const Bpe *bpe, const char *character, size_t bytes, int32_t *ids) {
    for (size_t i = 0; i < bytes; i++) {
        ids[i] = bpe->byte_id[(uint8_t)character[i]];
        if (ids[i] < 0) return 0;
    }
    return bytes;
}

// Writes the initial symbols of a piece, at most one per byte, and returns their number. `unknown`
// is written before the next character that has an id, as in `tokenizers`: after the ids of bytes
// between the two.
static size_t initial_symbols(const Bpe *bpe, const char *piece, size_t bytes, int32_t *ids) {
    if (!bpe->character_id) return byte_ids(bpe, piece, bytes, ids);
    size_t count = 0, length;
    bool pending = false;
    for (size_t i = 0; i < bytes; i += length) {
        uint32_t c;
        length = utf8_next(piece + i, bytes - i, &c);
        int32_t id = bpe->character_id[c];
        size_t fallback = id < 0 ? byte_ids(bpe, piece + i, length, ids + count) : 0;
        count += fallback;
        if (fallback) continue;
        if (pending && (id >= 0 || !bpe->fuse_unknown)) ids[count++] = bpe->unknown;
        pending = id < 0;
        if (id >= 0) ids[count++] = id;
    }
    if (pending) ids[count++] = bpe->unknown;
    return count;
}

static size_t encode_short(const Bpe *bpe, int32_t *ids, size_t count) {
    int32_t rank[SHORT_PIECE], merged[SHORT_PIECE];  // merge of the pair (i, i + 1)
    for (size_t i = 0; i + 1 < count; i++) rank[i] = pair_rank(bpe, ids[i], ids[i + 1], &merged[i]);
    while (count > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < count; i++) {
            if (rank[i] < rank[best]) best = i;
        }
        if (rank[best] == NO_RANK) break;
        ids[best] = merged[best];
        count--;
        for (size_t i = best + 1; i < count; i++) ids[i] = ids[i + 1];
        for (size_t i = best + 1; i + 1 < count; i++) {
            rank[i] = rank[i + 1];
            merged[i] = merged[i + 1];
        }
        if (best > 0) rank[best - 1] = pair_rank(bpe, ids[best - 1], ids[best], &merged[best - 1]);
        if (best + 1 < count) rank[best] = pair_rank(bpe, ids[best], ids[best + 1], &merged[best]);
    }
    return count;
}

// Heap of merge candidates. Keys hold the rank in the upper and the position of the left symbol in
// the lower 32 bits, so that the smallest key is the next merge.
typedef struct Heap {
    uint64_t *keys;
    size_t count;
} Heap;

static void heap_push(Heap *heap, uint64_t key) {
    size_t i = heap->count++;
    while (i > 0 && heap->keys[(i - 1) / 2] > key) {
        heap->keys[i] = heap->keys[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    heap->keys[i] = key;
}

static uint64_t heap_pop(Heap *heap) {
    uint64_t smallest = heap->keys[0], last = heap->keys[--heap->count];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < heap->count; i = child) {
        if (child + 1 < heap->count && heap->keys[child + 1] < heap->keys[child]) child++;
        if (heap->keys[child] >= last) break;
        heap->keys[i] = heap->keys[child];
    }
    heap->keys[i] = last;
    return smallest;
}

// A long pre-token as a doubly linked list of symbols, indexed by initial position. A symbol merged
// into its left neighbor has id -1.
typedef struct LongPiece {
    const Bpe *bpe;
    Heap heap;
    int32_t *ids;
    uint32_t *next, *previous;  // `count` marks both ends
    uint32_t count;             // initial symbols
} LongPiece;

static LongPiece long_piece(const Bpe *bpe, BpeScratch *scratch, int32_t *ids, size_t count) {
    // n - 1 initial candidates, and at most two more per merge
    size_t heap_bytes = 3 * count * sizeof(uint64_t), need = heap_bytes + 2 * count * sizeof(uint32_t);
    if (scratch->bytes < need) {
        free(scratch->memory);
        scratch->memory = xmalloc(need, "merging a long piece of text");
        scratch->bytes = need;
    }
    LongPiece p = {bpe, {scratch->memory, 0}, ids, NULL, NULL, (uint32_t)count};
    p.next = (uint32_t *)((char *)scratch->memory + heap_bytes);
    p.previous = p.next + count;
    for (uint32_t i = 0; i < p.count; i++) {
        p.next[i] = i + 1;
        p.previous[i] = i ? i - 1 : p.count;
    }
    return p;
}

static void push_candidate(LongPiece *p, uint32_t left) {
    int32_t merged;
    if (left == p->count || p->next[left] == p->count) return;
    int32_t rank = pair_rank(p->bpe, p->ids[left], p->ids[p->next[left]], &merged);
    if (rank != NO_RANK) heap_push(&p->heap, (uint64_t)(uint32_t)rank << 32 | left);
}

// Applies a merge candidate unless one of its symbols has changed since it was pushed.
static void merge_candidate(LongPiece *p, uint64_t key) {
    uint32_t left = (uint32_t)key, right;
    int32_t merged;
    if (p->ids[left] < 0 || (right = p->next[left]) == p->count) return;
    if (pair_rank(p->bpe, p->ids[left], p->ids[right], &merged) != (int32_t)(key >> 32)) return;
    p->ids[left] = merged;
    p->ids[right] = -1;
    p->next[left] = p->next[right];
    if (p->next[right] != p->count) p->previous[p->next[right]] = left;
    push_candidate(p, p->previous[left]);
    push_candidate(p, left);
}

static size_t encode_long(const Bpe *bpe, BpeScratch *scratch, int32_t *ids, size_t symbols) {
    LongPiece p = long_piece(bpe, scratch, ids, symbols);
    for (uint32_t i = 0; i < p.count; i++) push_candidate(&p, i);
    while (p.heap.count) merge_candidate(&p, heap_pop(&p.heap));
    size_t count = 0;
    for (uint32_t i = 0; i < p.count; i = p.next[i]) ids[count++] = ids[i];
    return count;
}

size_t bpe_encode(const Bpe *bpe, BpeScratch *scratch, const char *piece, size_t bytes, int32_t *out) {
    assert(bytes > 0 && bytes <= UINT32_MAX);
    int32_t whole = text_ids_find(&bpe->whole, piece, bytes);
    if (whole >= 0) {
        out[0] = whole;
        return 1;
    }
    size_t count = initial_symbols(bpe, piece, bytes, out);
    return count <= SHORT_PIECE ? encode_short(bpe, out, count) : encode_long(bpe, scratch, out, count);
}

void bpe_scratch_free(BpeScratch *scratch) {
    free(scratch->memory);
    *scratch = (BpeScratch){NULL, 0};
}
