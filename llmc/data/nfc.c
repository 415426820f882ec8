// Normalization form C, see nfc.h. Text is cut into segments before each plain character: one that
// no preceding character can affect. A segment is decomposed, its marks are sorted by class, and it
// is recomposed (Unicode Standard Annex 15). A single plain character is copied.
#include "llmc/data/nfc.h"

#include <stdlib.h>
#include <string.h>

#include "llmc/base/utf8.h"
#include "llmc/data/nfc_tables.h"

// All characters >= LIMIT and < PLAIN_BELOW are plain.
enum { LIMIT = 0x2FA20, PLAIN_BELOW = 0x300 };
// Hangul syllables are computed from 19 leading consonants, 21 vowels, and 27 optional final
// consonants.
enum {
    SYLLABLE = 0xAC00,
    SYLLABLES = 11172,
    LEAD = 0x1100,
    LEADS = 19,
    VOWEL = 0x1161,
    VOWELS = 21,
    TAIL = 0x11A7,
    TAILS = 28
};

#define COUNT_OF(list) (sizeof(list) / sizeof((list)[0]))

typedef struct Pair {
    uint32_t first, second, composed;
} Pair;

struct Nfc {
    uint8_t class[LIMIT];  // canonical combining class
    uint8_t plain[LIMIT];
    Pair pairs[COUNT_OF(nfc_pairs)];       // sorted by first, then second
    const uint32_t *decomposition[LIMIT];  // row of nfc_pairs or nfc_one_way, or NULL
};

static int by_parts(const void *a, const void *b) {
    const Pair *x = a, *y = b;
    if (x->first != y->first) return x->first < y->first ? -1 : 1;
    return (x->second > y->second) - (x->second < y->second);
}

// Characters that can combine with a preceding one, or that change on their own, are not plain.
Nfc *nfc_create(void) {
    Nfc *nfc = xcalloc(1, sizeof *nfc, "the tables of NFC");
    memset(nfc->plain, true, sizeof nfc->plain);
    for (size_t i = 0; i < COUNT_OF(nfc_classes); i++) {
        for (uint32_t c = nfc_classes[i][0]; c <= nfc_classes[i][1]; c++) {
            nfc->class[c] = (uint8_t)nfc_classes[i][2];
            nfc->plain[c] = false;
        }
    }
    for (size_t i = 0; i < COUNT_OF(nfc_pairs); i++) {
        const uint32_t *row = nfc_pairs[i];
        nfc->decomposition[row[0]] = row;
        nfc->pairs[i] = (Pair){row[1], row[2], row[0]};
        nfc->plain[row[2]] = false;
    }
    for (size_t i = 0; i < COUNT_OF(nfc_one_way); i++) {
        nfc->decomposition[nfc_one_way[i][0]] = nfc_one_way[i];
        nfc->plain[nfc_one_way[i][0]] = false;
    }
    for (uint32_t c = VOWEL; c < VOWEL + VOWELS; c++) nfc->plain[c] = false;
    for (uint32_t c = TAIL + 1; c < TAIL + TAILS; c++) nfc->plain[c] = false;
    qsort(nfc->pairs, COUNT_OF(nfc_pairs), sizeof *nfc->pairs, by_parts);
    return nfc;
}

void nfc_free(Nfc *nfc) { free(nfc); }

static bool is_plain(const Nfc *nfc, uint32_t c) { return c < PLAIN_BELOW || c >= LIMIT || nfc->plain[c]; }

static uint8_t class_of(const Nfc *nfc, uint32_t c) { return c < LIMIT ? nfc->class[c] : 0; }

static bool continues(char byte) { return ((uint8_t)byte & 0xC0) == 0x80; }

// The first non-plain character may combine with the one before it.
size_t nfc_normal_prefix(const Nfc *nfc, const char *text, size_t bytes) {
    for (size_t i = 0; i < bytes;) {
        uint32_t c = 0;
        if ((uint8_t)text[i] < 0xCC) {  // first byte of a character below U+0300
            i++;
            continue;
        }
        size_t length = utf8_next(text + i, bytes - i, &c);
        if (!is_plain(nfc, c)) {
            if (i > 0) i--;
            while (i > 0 && continues(text[i])) i--;
            return i;
        }
        i += length;
    }
    return bytes;
}

// ---- segments: a plain character and the following non-plain ones, as code points ----

typedef struct Segment {
    uint64_t *items;  // class << 56 | index << 21 | code point: sorting is stable within a class
    size_t count, capacity;
} Segment;

enum { CLASS_SHIFT = 56, PLACE_SHIFT = 21 };

static uint32_t code_of(uint64_t item) { return (uint32_t)(item & ((1 << PLACE_SHIFT) - 1)); }

static void append(const Nfc *nfc, Segment *s, uint32_t c) {
    if (s->count == s->capacity) {
        s->capacity = s->capacity ? 2 * s->capacity : 64;
        s->items = xrealloc(s->items, s->capacity * sizeof *s->items, "normalizing text");
    }
    s->items[s->count] = (uint64_t)class_of(nfc, c) << CLASS_SHIFT | (uint64_t)s->count << PLACE_SHIFT | c;
    s->count++;
}

// Appends the full decomposition. Only the first part can decompose further.
static void append_decomposed(const Nfc *nfc, Segment *s, uint32_t c) {
    if (c >= SYLLABLE && c < SYLLABLE + SYLLABLES) {
        uint32_t i = c - SYLLABLE;
        append(nfc, s, LEAD + i / (VOWELS * TAILS));
        append(nfc, s, VOWEL + i / TAILS % VOWELS);
        if (i % TAILS) append(nfc, s, TAIL + i % TAILS);
        return;
    }
    const uint32_t *row = c < LIMIT ? nfc->decomposition[c] : NULL;
    if (!row) {
        append(nfc, s, c);
        return;
    }
    append_decomposed(nfc, s, row[1]);
    if (row[2]) append_decomposed(nfc, s, row[2]);
}

static int by_value(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

// Sorts each run of combining marks by class.
static void sort_marks(Segment *s) {
    for (size_t i = 0, end; i < s->count; i = end + 1) {
        bool sorted = true;
        for (end = i; end < s->count && s->items[end] >> CLASS_SHIFT; end++)
            sorted = sorted && (end == i || s->items[end - 1] < s->items[end]);
        if (!sorted) qsort(s->items + i, end - i, sizeof *s->items, by_value);
    }
}

// Returns the composition of two characters, or 0.
static uint32_t compose(const Nfc *nfc, uint32_t a, uint32_t b) {
    if (a >= LEAD && a < LEAD + LEADS && b >= VOWEL && b < VOWEL + VOWELS)
        return SYLLABLE + ((a - LEAD) * VOWELS + (b - VOWEL)) * TAILS;
    if (a >= SYLLABLE && a < SYLLABLE + SYLLABLES && (a - SYLLABLE) % TAILS == 0 && b > TAIL &&
        b < TAIL + TAILS)
        return a + (b - TAIL);
    Pair wanted = {a, b, 0};
    const Pair *found = bsearch(&wanted, nfc->pairs, COUNT_OF(nfc_pairs), sizeof wanted, by_parts);
    return found ? found->composed : 0;
}

// Composes each character with the last starter (class 0) before it, unless a character in between
// has the same or a higher class.
static void recompose(const Nfc *nfc, Segment *s) {
    size_t kept = 0, starter = SIZE_MAX;
    for (size_t i = 0; i < s->count; i++) {
        uint64_t item = s->items[i], class = item >> CLASS_SHIFT;
        bool between = starter != SIZE_MAX && kept > starter + 1;
        bool reaches = starter != SIZE_MAX && (!between || s->items[kept - 1] >> CLASS_SHIFT < class);
        uint32_t joined = reaches ? compose(nfc, code_of(s->items[starter]), code_of(item)) : 0;
        if (joined) {
            s->items[starter] = joined;  // class 0; its index no longer matters
            continue;
        }
        if (class == 0) starter = kept;
        s->items[kept++] = item;
    }
    s->count = kept;
}

size_t nfc_normalize(const Nfc *nfc, const char *text, size_t bytes, char *out) {
    size_t written = 0;
    Segment segment = {0};
    for (size_t start = 0, end; start < bytes; start = end) {
        uint32_t c;
        size_t many = 0;
        for (end = start; end < bytes; many++) {
            size_t length = utf8_next(text + end, bytes - end, &c);
            if (many && is_plain(nfc, c)) break;
            end += length;
        }
        utf8_next(text + start, bytes - start, &c);
        if (many == 1 && is_plain(nfc, c)) {
            memcpy(out + written, text + start, end - start);
            written += end - start;
            continue;
        }
        segment.count = 0;
        for (size_t i = start; i < end;) {
            i += utf8_next(text + i, end - i, &c);
            append_decomposed(nfc, &segment, c);
        }
        sort_marks(&segment);
        recompose(nfc, &segment);
        for (size_t i = 0; i < segment.count; i++)
            written += utf8_write(code_of(segment.items[i]), out + written);
    }
    free(segment.items);
    return written;
}
