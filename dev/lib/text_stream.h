// Writes tokens as text while they are generated. A UTF-8 character may span several tokens; its
// bytes are held back until it is complete. Called by dev/generate.c.
#pragma once
#include <stdio.h>

#include "llmc/data/tokenizer.h"
LLMC_BEGIN

enum { TEXT_HELD_BYTES = 3 };  // maximum length of an incomplete character

typedef struct TextStream {
    const Tokenizer *tokenizer;
    FILE *out;
    char held[TEXT_HELD_BYTES];
    size_t held_bytes;
    int strip;  // number of spaces to drop if the text starts with them, see tokenizer_stripped
} TextStream;

// Appends a token, writes all complete characters and flushes. Replaces invalid UTF-8, which
// byte-level models may produce, by U+FFFD, and zero bytes by spaces. If writing fails, returns
// false and sets errno.
bool text_stream_put(TextStream *stream, int token);
// Writes the bytes that were held back, if the text ends within a character.
bool text_stream_end(TextStream *stream);

LLMC_END
