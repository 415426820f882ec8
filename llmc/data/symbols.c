// Map between token texts and ids while a vocabulary is read, see symbols.h.
#include "llmc/data/symbols.h"

#include <stdlib.h>
#include <string.h>

#include "llmc/base/utf8.h"

void symbols_init(Symbols *s, int limit) {
    *s = (Symbols){.slots = 64, .limit = limit};
    while (s->slots < 2 * (size_t)limit + 1) s->slots *= 2;
    s->text = xcalloc(s->slots, sizeof *s->text, "reading the vocabulary");
    s->length = xmalloc(s->slots * sizeof *s->length, "reading the vocabulary");
    s->id = xmalloc(s->slots * sizeof *s->id, "reading the vocabulary");
    s->of_id = xcalloc((size_t)limit + 1, sizeof *s->of_id, "reading the vocabulary");
}

void symbols_free(Symbols *s) {
    free(s->text);
    free(s->length);
    free(s->id);
    free(s->of_id);
    *s = (Symbols){0};
}

// Returns the slot of this text, or the empty slot to insert it.
static size_t slot_of(const Symbols *s, const char *text, size_t length) {
    uint64_t hash = 0xCBF29CE484222325u;  // FNV-1a
    for (size_t i = 0; i < length; i++) hash = (hash ^ (uint8_t)text[i]) * 0x100000001B3u;
    size_t slot = (size_t)hash & (s->slots - 1);
    while (s->text[slot] && (s->length[slot] != length || memcmp(s->text[slot], text, length)))
        slot = (slot + 1) & (s->slots - 1);
    return slot;
}

int symbols_find(const Symbols *s, const char *text, size_t length) {
    size_t slot = slot_of(s, text, length);
    return s->text[slot] ? s->id[slot] : -1;
}

bool symbols_add(Symbols *s, const char *text, const cJSON *item, const char *file, Error *err) {
    double value = cJSON_IsNumber(item) ? item->valuedouble : -1;
    int id = value >= 0 && value < s->limit ? (int)value : -1;
    if (id < 0 || (double)id != value) {
        return error_set(err, EXIT_DATA,
                         "%s: the id of \"%.80s\" is not an integer from 0 to %d; use a vocabulary "
                         "with ids 0..n-1",
                         file, text, s->limit - 1);
    }
    if (s->of_id[id]) {
        return error_set(err, EXIT_DATA,
                         "%s: \"%.80s\" and \"%.80s\" have the same id %d; every token needs its own", file,
                         s->of_id[id], text, id);
    }
    size_t length = strlen(text), slot = slot_of(s, text, length);
    if (s->text[slot]) {
        return error_set(err, EXIT_DATA, "%s: \"%.80s\" occurs twice (ids %d and %d); remove one", file, text,
                         s->id[slot], id);
    }
    s->text[slot] = text;
    s->length[slot] = length;
    s->id[slot] = id;
    s->of_id[id] = text;
    s->count++;
    if (length > s->longest) s->longest = length;
    return true;
}

// ---- byte alphabet: bytes 21..7E, A1..AC, AE..FF map to themselves, the other 68 to U+0100 and up

static bool stands_for_itself(uint32_t byte) {
    return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || (byte >= 0xAE && byte <= 0xFF);
}

Alphabet byte_alphabet(void) {
    Alphabet alphabet;
    memset(alphabet.byte, -1, sizeof alphabet.byte);
    uint32_t shifted = 0x100;
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t code_point = stands_for_itself(byte) ? byte : shifted++;
        alphabet.code_point[byte] = code_point;
        alphabet.byte[code_point] = (int16_t)byte;
    }
    return alphabet;
}

size_t symbol_bytes(const Alphabet *alphabet, const char *symbol, size_t length, char *out, bool *foreign) {
    size_t count = 0;
    *foreign = false;
    for (size_t i = 0; i < length;) {
        uint32_t code_point;
        i += utf8_next(symbol + i, length - i, &code_point);
        int byte = code_point < ALPHABET_END ? alphabet->byte[code_point] : -1;
        if (byte < 0) {
            *foreign = true;
            memcpy(out, symbol, length);
            return length;
        }
        out[count++] = (char)byte;
    }
    return count;
}

bool symbols_of_bytes(const Symbols *s, const Alphabet *alphabet, int32_t byte_id[256], const char *file,
                      Error *err) {
    for (int byte = 0; byte < 256; byte++) {
        char symbol[4];
        size_t length = utf8_write(alphabet->code_point[byte], symbol);
        byte_id[byte] = symbols_find(s, symbol, length);
        if (byte_id[byte] < 0) {
            return error_set(err, EXIT_DATA,
                             "%s: no entry for byte 0x%02X (\"%.*s\"); a byte-level vocabulary has all 256",
                             file, (unsigned)byte, (int)length, symbol);
        }
    }
    return true;
}

// ---- merges ----

bool symbols_merge(const Symbols *s, const char *left, size_t left_bytes, const char *right,
                   size_t right_bytes, BpeMerge *merge, const char **why) {
    char joined[4096];
    *why = "is longer than any token";
    if (left_bytes > sizeof joined || right_bytes > sizeof joined - left_bytes) return false;
    memcpy(joined, left, left_bytes);
    memcpy(joined + left_bytes, right, right_bytes);
    merge->left = symbols_find(s, left, left_bytes);
    merge->right = symbols_find(s, right, right_bytes);
    merge->merged = symbols_find(s, joined, left_bytes + right_bytes);
    *why = "has or produces a symbol that is not in the vocabulary";
    return merge->left >= 0 && merge->right >= 0 && merge->merged >= 0;
}

bool symbols_merge_line(const Symbols *s, const char *line, size_t length, BpeMerge *merge,
                        const char **why) {
    const char *space = memchr(line, ' ', length);
    size_t left = space ? (size_t)(space - line) : 0, right = space ? length - left - 1 : 0;
    *why = "is not two symbols with one space between them";
    if (!left || !right || memchr(space + 1, ' ', right)) return false;
    return symbols_merge(s, line, left, space + 1, right, merge, why);
}
