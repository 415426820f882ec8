// Translates the regular expressions of tokenizer.json from Oniguruma to PCRE2 syntax. Called by
// pretokenize.c.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// Returns an equivalent pattern (malloc'ed) to be compiled with PCRE2_UTF and PCRE2_UCP. Returns
// NULL for constructs that the two engines interpret differently, or might; *why then describes the
// construct and *where is its byte offset.
//
// Supported: literals, classes, alternation, groups, lookaround, repetition, general categories
// (\p{L}), \s \S \d \D, and (?i:...) around letters and apostrophes.
char *pattern_for_pcre2(const char *regex, const char **why, size_t *where);

LLMC_END
