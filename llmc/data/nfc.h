// Unicode normalization form C: the normalizer "NFC" of tokenizer.json (Qwen's, for instance).
// Called by the encoder in tokenizer.c.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// Effect of every character on normalization: immutable, shared by threads.
typedef struct Nfc Nfc;

Nfc *nfc_create(void);
void nfc_free(Nfc *nfc);

enum { NFC_MOST_GROWTH = 3 };  // maximum ratio of output to input bytes
// Number of leading bytes that are already normalized: all of them for nearly every text. text must
// be well-formed UTF-8.
size_t nfc_normal_prefix(const Nfc *nfc, const char *text, size_t bytes);
// Normalizes text (Unicode Standard Annex 15) and returns the number of bytes written. out must
// hold NFC_MOST_GROWTH * bytes. Code points that Unicode 9 did not assign are treated as letters
// that never change, as in Hugging Face's `tokenizers`.
size_t nfc_normalize(const Nfc *nfc, const char *text, size_t bytes, char *out);

LLMC_END
