// Cuts text into pre-tokens ("pieces"), the units inside which byte pairs are merged: by GPT-2's
// pattern, or by that of a tokenizer.json. Called by the encoder in tokenizer.c.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// As tokenizer.json writes them (backslashes doubled for C). Text in these is cut by hand where
// ASCII alone decides.
#define GPT2_PATTERN \
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)" \
    "|\\s+"
#define LLAMA3_PATTERN \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}" \
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define QWEN2_PATTERN \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}" \
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

// The compiled pattern: immutable, shared by threads.
typedef struct PiecePattern PiecePattern;
// One per thread: the pattern and room for one match.
typedef struct PieceSplitter PieceSplitter;

// file: for messages. Errors: EXIT_DATA for a pattern that pattern.h does not know, that PCRE2
// refuses, or that matches the empty text.
PiecePattern *piece_pattern_compile(const char *regex, const char *file, Error *err);
void piece_pattern_free(PiecePattern *pattern);
PieceSplitter *piece_splitter_create(const PiecePattern *pattern);
void piece_splitter_free(PieceSplitter *splitter);

// End of the piece that begins at text[start]: start < end <= bytes, so that pieces tile the text.
// text is well-formed UTF-8, start lies on a character. A piece is a match of the pattern, or what
// lies between two. Pieces that ASCII alone decides are cut by hand, the others by PCRE2; both give
// the same borders.
size_t piece_end(const PieceSplitter *splitter, const char *text, size_t bytes, size_t start);
// The same by PCRE2 alone: ten times slower, and the definition that the hand-written path is
// tested against.
size_t piece_end_pcre2(const PieceSplitter *splitter, const char *text, size_t bytes, size_t start);

// The steps that text goes through, each cutting the pieces of the one before it: "pre_tokenizer"
// of tokenizer.json.
enum { MOST_PIECE_STEPS = 8 };
typedef struct PieceStep {
    bool prefix_space;      // a piece that does not begin with a space gets one first
    PiecePattern *pattern;  // NULL: the piece stays whole
} PieceStep;
typedef struct PieceSteps {
    PieceStep step[MOST_PIECE_STEPS];
    int count;
} PieceSteps;

void piece_steps_free(PieceSteps *steps);

LLMC_END
