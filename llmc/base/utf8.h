// UTF-8 as the Unicode standard defines it (table 3-7): reading, writing and repairing. Used by the
// tokenizer, which promises PCRE2 well-formed text, and by the JSON-lines reader for \u escapes.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

enum { UTF8_REPLACEMENT = 0xFFFD, UTF8_REPLACEMENT_BYTES = 3 };
#define UTF8_INVALID UINT32_MAX

// Reads the character at text (bytes >= 1 are left). Returns how many bytes it takes, and its code
// point. For ill-formed text: the length of the maximal invalid subpart and UTF8_INVALID (Unicode
// 3.9, "substitution of maximal subparts", as Python's errors="replace").
size_t utf8_next(const char *text, size_t bytes, uint32_t *code_point);
// Writes code_point (0..10FFFF, no surrogate) to out, at most 4 bytes. Returns the number of bytes.
size_t utf8_write(uint32_t code_point, char *out);
// Bytes of the longest well-formed prefix of text: equal to `bytes` when all of it is.
size_t utf8_valid_prefix(const char *text, size_t bytes);
// Copies text to out with U+FFFD for every maximal invalid subpart, and adds their number to
// *replaced. out must hold 3 * bytes. Returns the bytes written.
size_t utf8_repair(const char *text, size_t bytes, char *out, int64_t *replaced);

LLMC_END
