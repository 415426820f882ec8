// Streams tokens as text. A UTF-8 character may span several tokens; its bytes are held back until
// it is complete. Called by dev/generate.c.
#pragma once
#include <stdio.h>

#include "llmc/data/tokenizer.h"
LLMC_BEGIN

enum { TEXT_HELD_BYTES = 3 };  // longest incomplete character

typedef struct TextStream {
    const Tokenizer *tokenizer;
    FILE *out;
    char held[TEXT_HELD_BYTES];
    size_t held_bytes;
} TextStream;

// Appends a token, writes all complete characters and flushes. Invalid UTF-8, which byte-level
// models may produce, is replaced by U+FFFD, and zero bytes by spaces. Returns false with errno if
// writing fails.
bool text_stream_put(TextStream *stream, int token);
// Writes the bytes held back, if the text ended within a character.
bool text_stream_end(TextStream *stream);

LLMC_END
