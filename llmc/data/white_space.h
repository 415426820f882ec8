// White space as defined by the tokenizers' regex engines: Unicode's White_Space property, listed
// here to be independent of table versions. PCRE2's own \s would also match U+180E.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// For use in a character class of a regular expression.
#define WHITE_SPACE \
    "\\x{09}-\\x{0D}\\x{20}\\x{85}\\x{A0}\\x{1680}\\x{2000}-\\x{200A}\\x{2028}" \
    "\\x{2029}\\x{202F}\\x{205F}\\x{3000}"

static inline bool is_white_space(uint32_t c) {
    return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
           c == 0x3000;
}

LLMC_END
