// The regular expressions of tokenizer.json, which are Oniguruma's, in PCRE2's words. Called by
// pretokenize.c.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// The same expression for PCRE2 (malloc'ed), to be compiled with PCRE2_UTF and PCRE2_UCP. NULL for
// what the two engines read differently, or might. *why then says what it is, *where at which byte.
//
// Known are literals, classes, alternatives, groups, lookaround, repetition, general categories
// (\p{L}), \s \S \d \D, and (?i:...) around letters and apostrophes.
char *pattern_for_pcre2(const char *regex, const char **why, size_t *where);

LLMC_END
