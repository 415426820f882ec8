// Reading, writing and repairing UTF-8 as defined by the Unicode standard (table 3-7).
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

enum { UTF8_REPLACEMENT = 0xFFFD, UTF8_REPLACEMENT_BYTES = 3 };
#define UTF8_INVALID UINT32_MAX

// Returns true for a continuation byte: any byte of a character after its first.
static inline bool utf8_continues(char byte) { return ((uint8_t)byte & 0xC0) == 0x80; }
// Returns true for Unicode's White_Space property, which the tokenizers' regex engines use. Listed
// here to be independent of table versions, and because PCRE2's \s also matches U+180E.
static inline bool utf8_white_space(uint32_t c) {
    return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
           c == 0x3000;
}
// Returns true for the characters that Python's str.strip() removes and its regex \s matches.
static inline bool utf8_python_space(uint32_t c) { return utf8_white_space(c) || (c >= 0x1C && c <= 0x1F); }
// Returns the length of the white space (utf8_python_space) at the start of a text.
size_t utf8_leading_space(const char *text, size_t bytes);
// Returns the length of a text without the white space at its end.
size_t utf8_stripped(const char *text, size_t bytes);
// Decodes the character at text (bytes >= 1 left). Returns its length in bytes. Ill-formed text:
// returns the length of the maximal invalid subpart and sets UTF8_INVALID (Unicode 3.9,
// "substitution of maximal subparts", as Python's errors="replace").
size_t utf8_next(const char *text, size_t bytes, uint32_t *code_point);
// Encodes code_point (0..10FFFF, no surrogate) to out, at most 4 bytes. Returns the length.
size_t utf8_write(uint32_t code_point, char *out);
// Returns the length of the longest well-formed prefix.
size_t utf8_valid_prefix(const char *text, size_t bytes);
// Copies text to out, replacing every maximal invalid subpart by U+FFFD and adding their number to
// *replaced. out must hold 3 * bytes. Returns the bytes written.
size_t utf8_repair(const char *text, size_t bytes, char *out, int64_t *replaced);

LLMC_END
