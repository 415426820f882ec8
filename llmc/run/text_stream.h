// Tokens as text, written as they come. A character may be spread over several tokens: its bytes
// are held back until it is whole. Called by dev/generate.c.
#pragma once
#include <stdio.h>

#include "llmc/data/tokenizer.h"
LLMC_BEGIN

enum { TEXT_HELD_BYTES = 3 };  // of a character that is not whole

typedef struct TextStream {
    const Tokenizer *tokenizer;
    FILE *out;
    char held[TEXT_HELD_BYTES];
    size_t held_bytes;
} TextStream;

// Writes what is whole now, at once. What is no UTF-8 shows as U+FFFD, and a zero byte as a space:
// a model of bytes may write anything. False: `out` takes no more, and errno says why.
bool text_stream_put(TextStream *stream, int token);
// What was still held back: the text has ended within a character.
bool text_stream_end(TextStream *stream);

LLMC_END
