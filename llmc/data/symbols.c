// Map between token texts and ids while a vocabulary is read. See symbols.h.
#include "llmc/data/symbols.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/json.h"
#include "llmc/base/utf8.h"

void symbols_init(Symbols *s, int limit) {
    assert(limit >= 0);
    *s = (Symbols){.limit = limit};
    text_ids_init(&s->ids, limit);
    s->of_id = xcalloc((size_t)limit + 1, sizeof *s->of_id, "the vocabulary");
}

void symbols_free(Symbols *s) {
    text_ids_free(&s->ids);
    free(s->of_id);
    *s = (Symbols){0};
}

int symbols_find(const Symbols *s, const char *text, size_t length) {
    return text_ids_find(&s->ids, text, length);
}

bool symbols_add(Symbols *s, const char *text, const cJSON *item, const char *file, Error *err) {
    int64_t id;
    if (!json_int64(item, 0, s->limit - 1, &id)) {
        return data_error(
            err, "%s: the id of \"%.80s\" is not an integer from 0 to %d; use a vocabulary with ids 0..n-1",
            file, text, s->limit - 1);
    }
    if (s->of_id[id]) {
        return data_error(err, "%s: \"%.80s\" and \"%.80s\" have the same id %d; every token needs its own",
                          file, s->of_id[id], text, (int)id);
    }
    size_t length = strlen(text);
    int other = symbols_find(s, text, length);
    if (other >= 0) {
        return data_error(err, "%s: \"%.80s\" occurs twice (ids %d and %d); remove one", file, text, other,
                          (int)id);
    }
    text_ids_add(&s->ids, text, length, (int32_t)id);
    s->of_id[id] = text;
    s->count++;
    return true;
}

// ---- byte alphabet: bytes 21..7E, A1..AC, AE..FF map to themselves, the other 68 to U+0100 and up

Alphabet byte_alphabet(void) {
    Alphabet alphabet;
    memset(alphabet.byte, -1, sizeof alphabet.byte);
    uint32_t shifted = 0x100;
    for (uint32_t byte = 0; byte < 256; byte++) {
        bool unchanged = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
        uint32_t code_point = unchanged ? byte : shifted++;
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
            return data_error(
                err, "%s: no entry for byte 0x%02X (\"%.*s\"); a byte-level vocabulary needs all 256 bytes",
                file, (unsigned)byte, (int)length, symbol);
        }
    }
    return true;
}

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
