// Pre-tokenization with PCRE2, and with fast paths for ASCII. See pretokenize.h.
#include "llmc/data/pretokenize.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <assert.h>
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>


// Class of an ASCII byte in the patterns. BEYOND: part of a non-ASCII character, which PCRE2's
// tables classify.
enum { OTHER, LETTER, DIGIT, SPACE, BEYOND };

// Finds the end of one piece without PCRE2.
typedef size_t (*CutByHand)(const PieceSplitter *splitter, const char *text, size_t bytes, size_t start);

struct PiecePattern {
    pcre2_code *code;
    CutByHand by_hand;  // piece_end_pcre2 if the pattern has no fast path
    size_t digits;      // maximum number of digits in a piece
};

struct PieceSplitter {
    const PiecePattern *pattern;
    pcre2_match_data *match;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
    uint8_t class[256];
};

static size_t cut_gpt2(const PieceSplitter *splitter, const char *text, size_t bytes, size_t start);
static size_t cut_llama3(const PieceSplitter *splitter, const char *text, size_t bytes, size_t start);

typedef struct KnownPattern {
    const char *regex;
    CutByHand by_hand;
    size_t digits;
} KnownPattern;
static const KnownPattern known_patterns[] = {{GPT2_PATTERN, cut_gpt2, SIZE_MAX},
                                              {LLAMA3_PATTERN, cut_llama3, 3},
                                              {QWEN2_PATTERN, cut_llama3, 1}};

static pcre2_code *compile(const char *regex, const char *file, Error *err) {
    const char *why;
    size_t where;
    char *text = pattern_for_pcre2(regex, &why, &where);
    if (!text) {
        data_error(err, "%s: the pattern \"%.80s\" has %s at \"%.20s\", which is not supported", file, regex,
                   why, regex + where);
        return NULL;
    }
    int error;
    PCRE2_SIZE offset;
    uint32_t empty = 0;
    char message[120] = "";
    pcre2_code *code = pcre2_compile((PCRE2_SPTR)text, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP, &error,
                                     &offset, NULL);
    free(text);
    if (!code && error == PCRE2_ERROR_HEAP_FAILED)
        fatal(NULL, EXIT_ENVIRONMENT,
              "out of memory for the pre-token pattern; use a machine with more memory");
    if (code) {
        pcre2_pattern_info(code, PCRE2_INFO_MATCHEMPTY, &empty);
    } else {
        pcre2_get_error_message(error, (PCRE2_UCHAR *)message, sizeof message);
    }
    if (code && !empty) return code;
    data_error(err, "%s: PCRE2 cannot split text by the pattern \"%.80s\": %s", file, regex,
               code ? "it matches the empty string" : message);
    pcre2_code_free(code);
    return NULL;
}

PiecePattern *piece_pattern_compile(const char *regex, const char *file, Error *err) {
    pcre2_code *code = compile(regex, file, err);
    if (!code) return NULL;
    // Without JIT support for this machine, PCRE2's interpreter gives the same matches.
    pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
    PiecePattern *pattern = xmalloc(sizeof *pattern, "the pre-token pattern");
    *pattern = (PiecePattern){code, piece_end_pcre2, 0};
    for (size_t i = 0; i < sizeof known_patterns / sizeof *known_patterns; i++) {
        const KnownPattern *known = &known_patterns[i];
        if (!strcmp(regex, known->regex)) *pattern = (PiecePattern){code, known->by_hand, known->digits};
    }
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

// Limits of the matching stack: a pattern that backtracks without bound fails with an error.
enum { STACK_INITIAL_BYTES = 1 << 15, STACK_MAX_BYTES = 1 << 26 };

PieceSplitter *piece_splitter_create(const PiecePattern *pattern) {
    PieceSplitter *splitter = xmalloc(sizeof *splitter, "the pre-token splitter");
    splitter->pattern = pattern;
    splitter->match = pcre2_match_data_create_from_pattern(pattern->code, NULL);
    splitter->context = pcre2_match_context_create(NULL);
    splitter->stack = pcre2_jit_stack_create(STACK_INITIAL_BYTES, STACK_MAX_BYTES, NULL);  // NULL: no JIT
    if (!splitter->match || !splitter->context)
        fatal(NULL, EXIT_ENVIRONMENT,
              "out of memory for the pre-token match; use a machine with more memory");
    pcre2_jit_stack_assign(splitter->context, NULL, splitter->stack);
    for (int byte = 0; byte < 256; byte++) splitter->class[byte] = byte_class(byte);
    return splitter;
}

void piece_splitter_free(PieceSplitter *splitter) {
    if (!splitter) return;
    pcre2_match_data_free(splitter->match);
    pcre2_match_context_free(splitter->context);
    pcre2_jit_stack_free(splitter->stack);
    free(splitter);
}

void piece_steps_free(PieceSteps *steps) {
    for (int i = 0; i < steps->count; i++) piece_pattern_free(steps->step[i].pattern);
    *steps = (PieceSteps){0};
}

size_t piece_end_pcre2(const PieceSplitter *splitter, const char *text, size_t bytes, size_t start) {
    assert(start < bytes);
    int found = pcre2_match(splitter->pattern->code, (PCRE2_SPTR)text, bytes, start, PCRE2_NO_UTF_CHECK,
                            splitter->match, splitter->context);
    if (found == PCRE2_ERROR_NOMATCH) return bytes;
    if (found == PCRE2_ERROR_NOMEMORY) {
        fatal(NULL, EXIT_ENVIRONMENT, "out of memory for pre-tokenization; use a machine with more memory");
    }
    if (found < 0) {
        fatal(NULL, EXIT_ENVIRONMENT,
              "PCRE2 failed with error %d during pre-tokenization; the pattern takes too many steps for this "
              "text; split the text, or use a PCRE2 with a higher match limit",
              found);
    }
    const PCRE2_SIZE *bounds = pcre2_get_ovector_pointer(splitter->match);
    return bounds[0] > start ? bounds[0] : bounds[1];
}

static size_t run_end(const PieceSplitter *splitter, const char *text, size_t bytes, size_t i,
                      uint8_t class) {
    while (i < bytes && splitter->class[(uint8_t)text[i]] == class) i++;
    return i;
}

// Returns the length of the contraction at the apostrophe text[i] ('s 't 'm 'd 're 've 'll), or 0.
// upper: the case bit to ignore case, or 0.
static size_t contraction(const char *text, size_t bytes, size_t i, int upper) {
    if (i + 1 >= bytes) return 0;
    int a = text[i + 1] | upper;
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
    if (i + 2 >= bytes) return 0;
    int b = text[i + 2] | upper;
    return ((a == 'r' || a == 'v') && b == 'e') || (a == 'l' && b == 'l') ? 3 : 0;
}

size_t piece_end(const PieceSplitter *splitter, const char *text, size_t bytes, size_t start) {
    return splitter->pattern->by_hand(splitter, text, bytes, start);
}

static size_t cut_gpt2(const PieceSplitter *splitter, const char *text, size_t bytes, size_t start) {
    const uint8_t *class_of = splitter->class;
    uint8_t class = class_of[(uint8_t)text[start]];
    size_t end = start;
    if (class == SPACE) {
        end = run_end(splitter, text, bytes, start, SPACE);
        if (end == bytes) return end;
        uint8_t follows = class_of[(uint8_t)text[end]];
        if (follows == BEYOND) return piece_end_pcre2(splitter, text, bytes, start);
        if (end - start > 1) return end - 1;  // the last space belongs to the next piece
        if (text[start] != ' ') return end;   // only U+0020 joins the next piece
        class = follows;
    } else if (text[start] == '\'') {
        size_t length = contraction(text, bytes, start, 0);
        if (length) return start + length;
    }
    // Not run_end: on a long non-ASCII text it would scan to the end for every piece.
    if (class == BEYOND) return piece_end_pcre2(splitter, text, bytes, start);
    end = run_end(splitter, text, bytes, end, class);
    // The run may continue with the non-ASCII character.
    bool beyond = end < bytes && class_of[(uint8_t)text[end]] == BEYOND;
    return beyond ? piece_end_pcre2(splitter, text, bytes, start) : end;
}

// Fast path of LLAMA3_PATTERN and QWEN2_PATTERN, which differ in the maximum number of digits in a
// piece.
static size_t cut_space(const PieceSplitter *splitter, const char *text, size_t bytes, size_t start) {
    size_t end = run_end(splitter, text, bytes, start, SPACE), line = end;
    if (end < bytes && splitter->class[(uint8_t)text[end]] == BEYOND)
        return piece_end_pcre2(splitter, text, bytes, start);
    while (line > start && text[line - 1] != '\n' && text[line - 1] != '\r') line--;
    if (line > start) return line;  // through the last line break
    return end == bytes || end - start == 1 ? end : end - 1;
}

static size_t cut_llama3(const PieceSplitter *splitter, const char *text, size_t bytes, size_t start) {
    const uint8_t *class_of = splitter->class;
    uint8_t class = class_of[(uint8_t)text[start]];
    uint8_t follows = start + 1 < bytes ? class_of[(uint8_t)text[start + 1]] : SPACE;
    bool line_end = text[start] == '\n' || text[start] == '\r';
    size_t end = start + 1;
    if (class == BEYOND || (follows == BEYOND && !line_end && class != DIGIT))
        return piece_end_pcre2(splitter, text, bytes, start);
    if (class == DIGIT) {
        while (end < bytes && end - start < splitter->pattern->digits &&
               class_of[(uint8_t)text[end]] == DIGIT)
            end++;
        bool may_continue = end < bytes && end - start < splitter->pattern->digits;
        bool beyond = may_continue && class_of[(uint8_t)text[end]] == BEYOND;
        return beyond ? piece_end_pcre2(splitter, text, bytes, start) : end;
    }
    size_t length = text[start] == '\'' ? contraction(text, bytes, start, 'a' ^ 'A') : 0;
    if (length) return start + length;
    if (class == LETTER || (follows == LETTER && !line_end)) {
        end = run_end(splitter, text, bytes, end, LETTER);
    } else if (class == OTHER || (text[start] == ' ' && follows == OTHER)) {
        end = run_end(splitter, text, bytes, end, OTHER);
        if (end == bytes || class_of[(uint8_t)text[end]] != BEYOND) {
            while (end < bytes && (text[end] == '\n' || text[end] == '\r')) end++;
            return end;
        }
    } else {
        return cut_space(splitter, text, bytes, start);
    }
    // The run may continue with the non-ASCII character.
    bool beyond = end < bytes && class_of[(uint8_t)text[end]] == BEYOND;
    return beyond ? piece_end_pcre2(splitter, text, bytes, start) : end;
}

size_t metaspace_end(const Metaspace *metaspace, const char *text, size_t bytes, size_t start) {
    const char *space = metaspace->space, *end = text + bytes, *from = text + start;
    const size_t length = strlen(space);
    assert(length || metaspace->whole);
    if (metaspace->whole) return bytes;
    // The first character belongs to the piece, even if it is a space.
    from += (size_t)(end - from) >= length && !memcmp(from, space, length) ? length : 1;
    for (const char *found; (found = memmem(from, (size_t)(end - from), space, length)) != NULL;) {
        bool run = (size_t)(found - text) >= start + length && !memcmp(found - length, space, length);
        if (metaspace->split || !run) return (size_t)(found - text);
        from = found + length;
    }
    return bytes;
}
