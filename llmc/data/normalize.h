// Normalizers of tokenizer.json: NFC, and the Prepend and Replace of tokenizers converted from
// SentencePiece (Llama 2, Mistral). tokenizer_parts.c fills the steps, tokenizer.c applies them.
#pragma once
#include "llmc/data/nfc.h"
LLMC_BEGIN

// U+2581, which SentencePiece writes for a space.
#define LOWER_BLOCK "\u2581"

// Memory that is reused from text to text.
typedef struct TextBuffer {
    char *text;
    size_t bytes;
} TextBuffer;

// Returns the buffer's memory with space for `bytes`. Its contents are lost if it has to grow.
char *text_buffer_reserve(TextBuffer *buffer, size_t bytes, const char *purpose);

enum { MOST_NORMALIZER_STEPS = 8, NORMALIZER_MOST_GROWTH = 3 };

// One of three: NFC, prepend `to` to texts that are not empty, or replace every `from` by `to`.
typedef struct NormalizerStep {
    Nfc *nfc;         // owned; NULL: not NFC
    char *from, *to;  // owned; from is NULL for Prepend
} NormalizerStep;

// Zero-initialized: no steps, texts stay unchanged.
typedef struct Normalizer {
    NormalizerStep step[MOST_NORMALIZER_STEPS];
    int count;
} Normalizer;

void normalizer_free(Normalizer *normalizer);
// Returns false if the steps may make a long text more than NORMALIZER_MOST_GROWTH times longer.
bool normalizer_bounded(const Normalizer *normalizer);
// Returns the normalized text and its length in *bytes: `text` itself if nothing changes, else a
// buffer. text must be well-formed UTF-8.
const char *normalizer_apply(const Normalizer *normalizer, const char *text, size_t *bytes,
                             TextBuffer buffers[2]);
// Copies text to out with every `from` replaced by `to`. out must have space for the result; NULL:
// only count. Returns the result's length. from must not be empty.
size_t replace_text(const char *text, size_t bytes, const char *from, const char *to, char *out);

LLMC_END
