// Reading, writing and repairing UTF-8: see utf8.h.
#include "llmc/base/utf8.h"

#include <assert.h>
#include <string.h>

// Properties of a character's first byte. The range of the second byte depends on it (no overlong
// forms, no surrogates, nothing above U+10FFFF); all later ones are 80..BF.
typedef struct LeadByte {
    size_t length;       // length of the character; 0 if the byte cannot start one
    uint8_t low, high;   // range of the second byte
    uint32_t high_bits;  // payload bits of the first byte
} LeadByte;

static LeadByte lead_byte(uint8_t b) {
    if (b < 0x80) return (LeadByte){1, 0, 0, b};
    if (b < 0xC2) return (LeadByte){0, 0, 0, 0};
    if (b < 0xE0) return (LeadByte){2, 0x80, 0xBF, b & 0x1F};
    if (b < 0xF0) return (LeadByte){3, b == 0xE0 ? 0xA0 : 0x80, b == 0xED ? 0x9F : 0xBF, b & 0x0F};
    if (b < 0xF5) return (LeadByte){4, b == 0xF0 ? 0x90 : 0x80, b == 0xF4 ? 0x8F : 0xBF, b & 0x07};
    return (LeadByte){0, 0, 0, 0};
}

size_t utf8_next(const char *text, size_t bytes, uint32_t *code_point) {
    assert(text && bytes > 0 && code_point);
    const uint8_t *p = (const uint8_t *)text;
    LeadByte lead = lead_byte(p[0]);
    *code_point = UTF8_INVALID;
    if (!lead.length) return 1;
    uint32_t value = lead.high_bits;
    uint8_t low = lead.low, high = lead.high;
    for (size_t i = 1; i < lead.length; i++) {
        if (i >= bytes || p[i] < low || p[i] > high) return i;
        value = value << 6 | (p[i] & 0x3F);
        low = 0x80;
        high = 0xBF;
    }
    *code_point = value;
    return lead.length;
}

size_t utf8_write(uint32_t code_point, char *out) {
    assert(out && code_point <= 0x10FFFF);
    uint8_t *p = (uint8_t *)out;
    if (code_point < 0x80) {
        p[0] = (uint8_t)code_point;
        return 1;
    }
    size_t length = code_point < 0x800 ? 2 : code_point < 0x10000 ? 3 : 4;
    for (size_t i = length - 1; i > 0; i--) {
        p[i] = (uint8_t)(0x80 | (code_point & 0x3F));
        code_point >>= 6;
    }
    p[0] = (uint8_t)(0xF00 >> length | code_point);  // C0, E0 or F0: as many leading ones as bytes
    return length;
}

// Returns the length of the ASCII prefix, eight bytes at a time.
static size_t ascii_prefix(const char *text, size_t bytes) {
    size_t i = 0;
    for (uint64_t word; i + 8 <= bytes; i += 8) {
        memcpy(&word, text + i, 8);
        if (word & 0x8080808080808080u) break;
    }
    while (i < bytes && (uint8_t)text[i] < 0x80) i++;
    return i;
}

size_t utf8_valid_prefix(const char *text, size_t bytes) {
    size_t i = 0;
    while ((i += ascii_prefix(text + i, bytes - i)) < bytes) {
        uint32_t code_point;
        size_t length = utf8_next(text + i, bytes - i, &code_point);
        if (code_point == UTF8_INVALID) break;
        i += length;
    }
    return i;
}

size_t utf8_leading_space(const char *text, size_t bytes) {
    uint32_t c;
    for (size_t at = 0, next; at < bytes; at = next) {
        next = at + utf8_next(text + at, bytes - at, &c);
        if (!utf8_python_space(c)) return at;
    }
    return bytes;
}

size_t utf8_stripped(const char *text, size_t bytes) {
    size_t end = 0;
    for (size_t at = 0; at < bytes;) {
        uint32_t c;
        at += utf8_next(text + at, bytes - at, &c);
        if (!utf8_python_space(c)) end = at;
    }
    return end;
}

size_t utf8_repair(const char *text, size_t bytes, char *out, int64_t *replaced) {
    assert(out && replaced);
    size_t i = 0, written = 0;
    while (i < bytes) {
        size_t valid = utf8_valid_prefix(text + i, bytes - i);
        memcpy(out + written, text + i, valid);
        written += valid;
        i += valid;
        if (i == bytes) break;
        uint32_t code_point;
        i += utf8_next(text + i, bytes - i, &code_point);
        written += utf8_write(UTF8_REPLACEMENT, out + written);
        ++*replaced;
    }
    return written;
}
