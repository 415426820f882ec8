// Normalization form C. See nfc.h. utf8proc decomposes and composes; this file limits it to the
// characters of Unicode 9. Text is cut into segments that cannot affect each other: one character
// and the following ones that may combine with it. Most segments are a single character, which is
// copied.
#include "llmc/data/nfc.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "llmc/base/utf8.h"

// Ranges (first, last) that contain every character with a decomposition, a composition or a
// combining class in Unicode 9, and no code point that was unassigned then. Later versions of
// Unicode cannot change the normalization of these characters.
// clang-format off
static const uint32_t unicode_9[][2] = {
    {0x3B, 0x374}, {0x37E, 0x37E}, {0x385, 0x38A}, {0x38C, 0x38C}, {0x38E, 0x3A1}, {0x3A5, 0x4F9},
    {0x591, 0x5C7}, {0x5D0, 0x5EA}, {0x5F2, 0x5F2}, {0x610, 0x61A}, {0x622, 0x6ED}, {0x711, 0x74A},
    {0x7EB, 0x7F3}, {0x816, 0x82D}, {0x859, 0x85B}, {0x8D4, 0x95F}, {0x9A1, 0x9A2}, {0x9AF, 0x9AF},
    {0x9BC, 0x9BE}, {0x9C7, 0x9C7}, {0x9CB, 0x9CD}, {0x9D7, 0x9D7}, {0x9DC, 0x9DD}, {0x9DF, 0x9DF},
    {0xA16, 0xA1C}, {0xA2B, 0xA2B}, {0xA32, 0xA33}, {0xA36, 0xA36}, {0xA38, 0xA38}, {0xA3C, 0xA3C},
    {0xA4D, 0xA4D}, {0xA59, 0xA5B}, {0xA5E, 0xA5E}, {0xABC, 0xABC}, {0xACD, 0xACD}, {0xB21, 0xB22},
    {0xB3C, 0xB3E}, {0xB47, 0xB48}, {0xB4B, 0xB4D}, {0xB56, 0xB57}, {0xB5C, 0xB5D}, {0xB92, 0xB94},
    {0xBBE, 0xBBE}, {0xBC6, 0xBC7}, {0xBCA, 0xBCD}, {0xBD7, 0xBD7}, {0xC46, 0xC48}, {0xC4D, 0xC4D},
    {0xC55, 0xC56}, {0xCBC, 0xCC2}, {0xCC6, 0xCC8}, {0xCCA, 0xCCD}, {0xCD5, 0xCD6}, {0xD3E, 0xD3E},
    {0xD46, 0xD47}, {0xD4A, 0xD4D}, {0xD57, 0xD57}, {0xDCA, 0xDCA}, {0xDCF, 0xDCF}, {0xDD9, 0xDDF},
    {0xE38, 0xE3A}, {0xE48, 0xE4B}, {0xEB8, 0xEB9}, {0xEC8, 0xECB}, {0xF18, 0xF43}, {0xF4C, 0xF69},
    {0xF71, 0xF93}, {0xF9C, 0xFB9}, {0xFC6, 0xFC6}, {0x1025, 0x108D}, {0x1100, 0x11C2}, {0x135D, 0x135F},
    {0x1714, 0x1714}, {0x1734, 0x1734}, {0x17D2, 0x17DD}, {0x18A9, 0x18A9}, {0x1939, 0x193B},
    {0x1A17, 0x1A18}, {0x1A60, 0x1A7C}, {0x1A7F, 0x1A7F}, {0x1AB0, 0x1ABD}, {0x1B05, 0x1B44},
    {0x1B6B, 0x1B73}, {0x1BAA, 0x1BF3}, {0x1C37, 0x1C37}, {0x1CD0, 0x1CF4}, {0x1CF8, 0x1CF9},
    {0x1DC0, 0x1DF5}, {0x1DFB, 0x1F15}, {0x1F18, 0x1F1D}, {0x1F20, 0x1F45}, {0x1F48, 0x1F4D},
    {0x1F50, 0x1F57}, {0x1F59, 0x1F59}, {0x1F5B, 0x1F5B}, {0x1F5D, 0x1F5D}, {0x1F5F, 0x1F7D},
    {0x1F80, 0x1FB4}, {0x1FB6, 0x1FC4}, {0x1FC6, 0x1FD3}, {0x1FD6, 0x1FDB}, {0x1FDD, 0x1FEF},
    {0x1FF2, 0x1FF4}, {0x1FF6, 0x1FFE}, {0x2000, 0x2003}, {0x20D0, 0x20F0}, {0x2126, 0x212B},
    {0x2190, 0x232A}, {0x2ADC, 0x2ADD}, {0x2CEF, 0x2CF1}, {0x2D7F, 0x2D7F}, {0x2DE0, 0x2DFF},
    {0x3008, 0x302F}, {0x3046, 0x3094}, {0x3099, 0x30FE}, {0x349E, 0x4D56}, {0x4E0D, 0x9F9C},
    {0xA66F, 0xA6F1}, {0xA806, 0xA806}, {0xA8C4, 0xA8C4}, {0xA8E0, 0xA8F1}, {0xA92B, 0xA953},
    {0xA9B3, 0xA9C0}, {0xAAB0, 0xAAC1}, {0xAAF6, 0xAAF6}, {0xABED, 0xABED}, {0xAC00, 0xD7A3},
    {0xF900, 0xFA6D}, {0xFA70, 0xFAD9}, {0xFB1D, 0xFB36}, {0xFB38, 0xFB3C}, {0xFB3E, 0xFB3E},
    {0xFB40, 0xFB41}, {0xFB43, 0xFB44}, {0xFB46, 0xFB4E}, {0xFE20, 0xFE2F}, {0x101FD, 0x101FD},
    {0x102E0, 0x102E0}, {0x10376, 0x1037A}, {0x10A0D, 0x10A0F}, {0x10A38, 0x10A3A}, {0x10A3F, 0x10A3F},
    {0x10AE5, 0x10AE6}, {0x11046, 0x11046}, {0x1107F, 0x110BA}, {0x11100, 0x11134}, {0x11173, 0x11173},
    {0x111C0, 0x111CA}, {0x11235, 0x11236}, {0x112E9, 0x112EA}, {0x1133C, 0x1133E}, {0x11347, 0x11347},
    {0x1134B, 0x1134D}, {0x11357, 0x11357}, {0x11366, 0x1136C}, {0x11370, 0x11374}, {0x11442, 0x11446},
    {0x114B0, 0x114C3}, {0x115AF, 0x115AF}, {0x115B8, 0x115C0}, {0x1163F, 0x1163F}, {0x116B6, 0x116B7},
    {0x1172B, 0x1172B}, {0x11C3F, 0x11C3F}, {0x16AF0, 0x16AF4}, {0x16B30, 0x16B36}, {0x1BC9E, 0x1BC9E},
    {0x1D157, 0x1D1C0}, {0x1D242, 0x1D244}, {0x1E000, 0x1E006}, {0x1E008, 0x1E018}, {0x1E01B, 0x1E021},
    {0x1E023, 0x1E024}, {0x1E026, 0x1E02A}, {0x1E8D0, 0x1E8D6}, {0x1E944, 0x1E94A}, {0x20122, 0x2A600},
    {0x2F800, 0x2FA1D},
};
// clang-format on

#define COUNT_OF(list) (sizeof(list) / sizeof((list)[0]))
enum { LIMIT = 0x2FA1E };  // end of the last range

// Effect of a character on normalization.
enum {
    OUTSIDE,  // never changes, and separates its neighbors
    STARTER,  // following characters may combine with it
    JOINING,  // changes on its own, or may combine with preceding characters
};

struct Nfc {
    uint8_t kind[LIMIT];
};

enum { MOST_PARTS = 8 };  // more than any canonical decomposition has

static size_t decompose(uint32_t c, utf8proc_int32_t parts[MOST_PARTS]) {
    int boundary = 0;  // unused by this option
    return (size_t)utf8proc_decompose_char((utf8proc_int32_t)c, parts, MOST_PARTS, UTF8PROC_DECOMPOSE,
                                           &boundary);
}

// Composes decomposed characters whose marks are sorted, in place. Returns the new count.
static size_t compose(utf8proc_int32_t *characters, size_t count) {
    return (size_t)utf8proc_normalize_utf32(characters, (utf8proc_ssize_t)count,
                                            UTF8PROC_COMPOSE | UTF8PROC_STABLE);
}

static uint8_t class_of(utf8proc_int32_t c) { return (uint8_t)utf8proc_get_property(c)->combining_class; }

// Marks c as JOINING if normalization changes it, and marks all but the first character of its
// decomposition, because they can combine with a preceding character.
static void classify(Nfc *nfc, uint32_t c) {
    utf8proc_int32_t parts[MOST_PARTS];
    size_t count = decompose(c, parts);
    for (size_t i = 1; i < count; i++) nfc->kind[parts[i]] = JOINING;
    if (class_of((utf8proc_int32_t)c) || compose(parts, count) != 1 || (uint32_t)parts[0] != c)
        nfc->kind[c] = JOINING;
}

Nfc *nfc_create(void) {
    Nfc *nfc = xcalloc(1, sizeof *nfc, "the tables of NFC");
    for (size_t i = 0; i < COUNT_OF(unicode_9); i++)
        memset(nfc->kind + unicode_9[i][0], STARTER, unicode_9[i][1] - unicode_9[i][0] + 1);
    for (size_t i = 0; i < COUNT_OF(unicode_9); i++) {
        for (uint32_t c = unicode_9[i][0]; c <= unicode_9[i][1]; c++) classify(nfc, c);
    }
    return nfc;
}

void nfc_free(Nfc *nfc) { free(nfc); }

static uint8_t kind_of(const Nfc *nfc, uint32_t c) { return c < LIMIT ? nfc->kind[c] : OUTSIDE; }

// Stops one character before the first joining one, because the two may combine.
size_t nfc_normal_prefix(const Nfc *nfc, const char *text, size_t bytes) {
    assert(nfc && (text || !bytes));
    for (size_t i = 0; i < bytes;) {
        uint32_t c = 0;
        if ((uint8_t)text[i] < 0xCC) {  // first byte of a character below U+0300
            i++;
            continue;
        }
        size_t length = utf8_next(text + i, bytes - i, &c);
        if (kind_of(nfc, c) == JOINING) {
            if (i > 0) i--;
            while (i > 0 && utf8_continues(text[i])) i--;
            return i;
        }
        i += length;
    }
    return bytes;
}

// ---- segments ----

typedef struct Segment {
    utf8proc_int32_t *characters;  // decomposed
    uint64_t *keys;                // scratch of sort_marks
    size_t count, capacity;
} Segment;

static void append_decomposed(Segment *s, uint32_t c) {
    if (s->capacity < s->count + MOST_PARTS) {
        s->capacity = 2 * (s->count + MOST_PARTS);
        s->characters = xrealloc(s->characters, s->capacity * sizeof *s->characters, "normalizing text");
        s->keys = xrealloc(s->keys, s->capacity * sizeof *s->keys, "normalizing text");
    }
    s->count += decompose(c, s->characters + s->count);
}

static int by_value(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

// Sorts each run of combining marks by class, stably: keys are class << 56 | index << 21 | mark.
// utf8proc_decompose, which could do this, takes quadratic time for long runs.
static void sort_marks(Segment *s) {
    for (size_t i = 0, end; i < s->count; i = end + 1) {
        bool sorted = true;
        for (end = i; end < s->count && class_of(s->characters[end]); end++) {
            uint64_t class = class_of(s->characters[end]);
            s->keys[end] = class << 56 | (uint64_t)end << 21 | (uint32_t)s->characters[end];
            sorted = sorted && (end == i || s->keys[end - 1] < s->keys[end]);
        }
        if (sorted) continue;
        qsort(s->keys + i, end - i, sizeof *s->keys, by_value);
        for (size_t k = i; k < end; k++) s->characters[k] = (utf8proc_int32_t)(s->keys[k] & 0x1FFFFF);
    }
}

// Normalizes one segment and returns the number of bytes written.
static size_t normalize_segment(Segment *s, const char *text, size_t bytes, char *out) {
    size_t written = 0;
    uint32_t c;
    s->count = 0;
    for (size_t i = 0; i < bytes;) {
        i += utf8_next(text + i, bytes - i, &c);
        append_decomposed(s, c);
    }
    sort_marks(s);
    s->count = compose(s->characters, s->count);
    for (size_t i = 0; i < s->count; i++) written += utf8_write((uint32_t)s->characters[i], out + written);
    return written;
}

size_t nfc_normalize(const Nfc *nfc, const char *text, size_t bytes, char *out) {
    assert(nfc && (text || !bytes) && out);
    size_t written = 0;
    Segment segment = {0};
    for (size_t start = 0, end; start < bytes; start = end) {
        uint32_t first, next;
        end = start + utf8_next(text + start, bytes - start, &first);
        const uint8_t kind = kind_of(nfc, first);
        bool copy = kind != JOINING;
        while (kind != OUTSIDE && end < bytes) {
            size_t length = utf8_next(text + end, bytes - end, &next);
            if (kind_of(nfc, next) != JOINING) break;
            end += length;
            copy = false;
        }
        if (copy) {
            memcpy(out + written, text + start, end - start);
            written += end - start;
        } else {
            written += normalize_segment(&segment, text + start, end - start, out + written);
        }
    }
    free(segment.characters);
    free(segment.keys);
    return written;
}
