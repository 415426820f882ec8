// GPT-2's pre-tokenisation with PCRE2, and its short cut for ASCII: see pretokenize.h.
#include "llmc/data/pretokenize.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdlib.h>

// White space as the reference's engines know it: Unicode's White_Space property. PCRE2's own \s
// would also take U+180E. Spelled out, so that it depends on nobody's tables.
#define WHITE_SPACE                                                            \
    "\\x{09}-\\x{0D}\\x{20}\\x{85}\\x{A0}\\x{1680}\\x{2000}-\\x{200A}\\x{2028}" \
    "\\x{2029}\\x{202F}\\x{205F}\\x{3000}"

// GPT-2's alternation, leftmost first. A repetition that nothing can follow is possessive (++): the
// same matches, without a stack. The last but one gives back one character when a non-space
// follows, so that " x" can take its space along.
static const char piece_regex[] =
    "'s|'t|'re|'ve|'m|'ll|'d"
    "| ?\\p{L}++"
    "| ?\\p{N}++"
    "| ?[^" WHITE_SPACE "\\p{L}\\p{N}]++"
    "|[" WHITE_SPACE "]+(?![^" WHITE_SPACE "])"
    "|[" WHITE_SPACE "]++";

// What an ASCII byte is in the pattern. BEYOND: a byte of any other character, for which PCRE2's
// tables decide.
enum { OTHER, LETTER, DIGIT, SPACE, BEYOND };

struct PiecePattern {
    pcre2_code *code;
};

struct PieceSplitter {
    const pcre2_code *code;
    pcre2_match_data *match;
    uint8_t class[256];
};

PiecePattern *piece_pattern_compile(void) {
    int error;
    PCRE2_SIZE offset;
    // Anchored here and not per match, because the JIT-compiled code takes no such option.
    pcre2_code *code = pcre2_compile((PCRE2_SPTR)piece_regex, PCRE2_ZERO_TERMINATED,
                                     PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED, &error, &offset, NULL);
    if (!code && error == PCRE2_ERROR_HEAP_FAILED) {
        fatal(NULL, EXIT_ENVIRONMENT, "out of memory for the pre-token pattern; use a larger machine");
    }
    if (!code) {
        fatal(NULL, EXIT_ENVIRONMENT,
              "PCRE2 refuses the pre-token pattern at %zu (error %d); it must be built with Unicode support",
              (size_t)offset, error);
    }
    // Where PCRE2 has no JIT for this machine, its interpreter gives the same matches.
    pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
    PiecePattern *pattern = xmalloc(sizeof *pattern, "the pre-token pattern");
    pattern->code = code;
    return pattern;
}

void piece_pattern_free(PiecePattern *pattern) {
    if (!pattern) return;
    pcre2_code_free(pattern->code);
    free(pattern);
}

static uint8_t byte_class(int byte) {
    if (byte >= 0x80) return BEYOND;
    if (byte == ' ' || (byte >= '\t' && byte <= '\r')) return SPACE;
    if (byte >= '0' && byte <= '9') return DIGIT;
    return (byte >= 'A' && byte <= 'Z') || (byte >= 'a' && byte <= 'z') ? LETTER : OTHER;
}

PieceSplitter *piece_splitter_create(const PiecePattern *pattern) {
    PieceSplitter *splitter = xmalloc(sizeof *splitter, "the pre-token splitter");
    splitter->code = pattern->code;
    splitter->match = pcre2_match_data_create_from_pattern(pattern->code, NULL);
    if (!splitter->match) {
        fatal(NULL, EXIT_ENVIRONMENT, "out of memory for the pre-token match; use a larger machine");
    }
    for (int byte = 0; byte < 256; byte++) splitter->class[byte] = byte_class(byte);
    return splitter;
}

void piece_splitter_free(PieceSplitter *splitter) {
    if (!splitter) return;
    pcre2_match_data_free(splitter->match);
    free(splitter);
}

size_t piece_end_pcre2(const PieceSplitter *splitter, const char *text, size_t bytes, size_t start) {
    int found = pcre2_match(splitter->code, (PCRE2_SPTR)text, bytes, start, PCRE2_NO_UTF_CHECK,
                            splitter->match, NULL);
    if (found == PCRE2_ERROR_NOMEMORY) {
        fatal(NULL, EXIT_ENVIRONMENT, "out of memory for cutting text into pieces; use a larger machine");
    }
    // Some alternative takes any character, so only a resource limit can stop a match.
    if (found < 0) {
        fatal(NULL, EXIT_ENVIRONMENT,
              "PCRE2 stopped with error %d while cutting text into pieces; is its match limit set very low?",
              found);
    }
    return pcre2_get_ovector_pointer(splitter->match)[1];
}

static size_t run_end(const PieceSplitter *splitter, const char *text, size_t bytes, size_t i,
                      uint8_t class) {
    while (i < bytes && splitter->class[(uint8_t)text[i]] == class) i++;
    return i;
}

// Length of the contraction that the apostrophe at text[i] begins ('s 't 'm 'd 're 've 'll), 0 if
// there is none.
static size_t contraction(const char *text, size_t bytes, size_t i) {
    if (i + 1 >= bytes) return 0;
    char a = text[i + 1];
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
    if (i + 2 >= bytes) return 0;
    char b = text[i + 2];
    return ((a == 'r' || a == 'v') && b == 'e') || (a == 'l' && b == 'l') ? 3 : 0;
}

size_t piece_end(const PieceSplitter *splitter, const char *text, size_t bytes, size_t start) {
    const uint8_t *class_of = splitter->class;
    uint8_t class = class_of[(uint8_t)text[start]];
    size_t end = start;
    if (class == SPACE) {
        end = run_end(splitter, text, bytes, start, SPACE);
        if (end == bytes) return end;
        uint8_t follows = class_of[(uint8_t)text[end]];
        if (follows == BEYOND) return piece_end_pcre2(splitter, text, bytes, start);
        if (end - start > 1) return end - 1;  // the last one is left for the next piece
        if (text[start] != ' ') return end;   // only U+0020 joins what follows
        class = follows;
    } else if (text[start] == '\'') {
        size_t length = contraction(text, bytes, start);
        if (length) return start + length;
    }
    // Not by run_end, which would walk a long text without ASCII to its end for each of its pieces.
    if (class == BEYOND) return piece_end_pcre2(splitter, text, bytes, start);
    end = run_end(splitter, text, bytes, end, class);
    // A run that meets a character beyond ASCII may go on there.
    bool beyond = end < bytes && class_of[(uint8_t)text[end]] == BEYOND;
    return beyond ? piece_end_pcre2(splitter, text, bytes, start) : end;
}
