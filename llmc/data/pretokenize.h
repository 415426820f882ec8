// Cuts text into GPT-2's pre-tokens ("pieces"), the units inside which byte pairs are merged.
// Called by the encoder in tokenizer.c.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// The compiled pattern: immutable, shared by threads.
typedef struct PiecePattern PiecePattern;
// One per thread: the pattern and room for one match.
typedef struct PieceSplitter PieceSplitter;

PiecePattern *piece_pattern_compile(void);
void piece_pattern_free(PiecePattern *pattern);
PieceSplitter *piece_splitter_create(const PiecePattern *pattern);
void piece_splitter_free(PieceSplitter *splitter);

// End of the piece that begins at text[start]: start < end <= bytes, so that pieces tile the text.
// text is well-formed UTF-8, start lies on a character. Pieces that ASCII alone decides are cut by
// hand, the others by PCRE2; both give the same borders.
size_t piece_end(const PieceSplitter *splitter, const char *text, size_t bytes, size_t start);
// The same by PCRE2 alone: ten times slower, and the definition that the hand-written path is
// tested against.
size_t piece_end_pcre2(const PieceSplitter *splitter, const char *text, size_t bytes, size_t start);

LLMC_END
