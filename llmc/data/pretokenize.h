// Pre-tokenization: splits text into pre-tokens ("pieces"), the units within which byte pairs are
// merged, by GPT-2's pattern or by the pattern of a tokenizer.json. Called by the encoder in
// tokenizer.c.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// Patterns as tokenizer.json has them, with backslashes doubled for C. For these, hand-written code
// splits text where ASCII characters alone decide.
#define GPT2_PATTERN \
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)" \
    "|\\s+"
#define LLAMA3_PATTERN \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}" \
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define QWEN2_PATTERN \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}" \
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

// A compiled pattern: immutable, shared by threads.
typedef struct PiecePattern PiecePattern;
// A pattern with match data, one per thread.
typedef struct PieceSplitter PieceSplitter;

// Compiles a pattern of tokenizer.json. file: for error messages. Errors: EXIT_DATA if pattern.c
// cannot translate it, if PCRE2 rejects it, or if it matches the empty string.
PiecePattern *piece_pattern_compile(const char *regex, const char *file, Error *err);
void piece_pattern_free(PiecePattern *pattern);
PieceSplitter *piece_splitter_create(const PiecePattern *pattern);
void piece_splitter_free(PieceSplitter *splitter);

// Returns the end of the piece that starts at text[start]: start < end <= bytes, so that pieces
// cover the text. text must be well-formed UTF-8 and start must be on a character boundary. A piece
// is a match of the pattern, or the text between two matches. Hand-written code handles pieces that
// ASCII alone decides, PCRE2 the others; both give the same boundaries.
size_t piece_end(const PieceSplitter *splitter, const char *text, size_t bytes, size_t start);
// The same with PCRE2 only: ten times slower, the reference for testing the hand-written code.
size_t piece_end_pcre2(const PieceSplitter *splitter, const char *text, size_t bytes, size_t start);

// Successive pre-tokenization steps; each splits the pieces of the previous one ("pre_tokenizer" in
// tokenizer.json).
enum { MOST_PIECE_STEPS = 8 };
typedef struct PieceStep {
    bool prefix_space;      // prepend a space to pieces that do not start with one
    PiecePattern *pattern;  // NULL: no split
} PieceStep;
typedef struct PieceSteps {
    PieceStep step[MOST_PIECE_STEPS];
    int count;
} PieceSteps;

// Pre-tokenization of tokenizers that write spaces as another character, such as U+2581.
typedef enum PrependScheme { PREPEND_NEVER, PREPEND_FIRST, PREPEND_ALWAYS } PrependScheme;
typedef struct Metaspace {
    char space[4];          // UTF-8 of the character
    bool replace;           // replace spaces by this character
    PrependScheme prepend;  // texts to start with it: none, the first, or also those after added tokens
    bool split;             // a piece starts at each of them
    bool whole;             // pieces are whole texts; neither: a piece starts at the first of a run
} Metaspace;

// Returns the end of the piece that starts at text[start]: before the next `space` that starts one.
size_t metaspace_end(const Metaspace *metaspace, const char *text, size_t bytes, size_t start);

void piece_steps_free(PieceSteps *steps);

// --- pattern.c -----------------------------------------------------------------------------------

// Translates the regular expressions of tokenizer.json from Oniguruma to PCRE2 syntax.
// Returns an equivalent pattern (malloc'ed) to be compiled with PCRE2_UTF and PCRE2_UCP. Returns
// NULL for constructs that the two engines interpret differently, or might; *why then describes the
// construct and *where is its byte offset.
//
// Supported: literals, classes, alternation, groups, lookaround, repetition, general categories
// (\p{L}), \s \S \d \D, and (?i:...) around letters and apostrophes.
char *pattern_for_pcre2(const char *regex, const char **why, size_t *where);

LLMC_END
