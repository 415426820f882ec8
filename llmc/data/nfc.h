// Unicode's normalization form C, the normalizer "NFC" of tokenizer.json (Qwen's, for instance).
// Called by the encoder in tokenizer.c.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// Unicode's tables in a form to look things up in: immutable, shared by threads.
typedef struct Nfc Nfc;

Nfc *nfc_create(void);
void nfc_free(Nfc *nfc);

enum { NFC_MOST_GROWTH = 3 };  // bytes of the result for a byte of the text, at most
// Bytes at the beginning of text that are normalized as they stand: all of them for nearly every
// text. text: well-formed UTF-8.
size_t nfc_normal_prefix(const Nfc *nfc, const char *text, size_t bytes);
// The normalized text; returns its bytes. out holds NFC_MOST_GROWTH * bytes. Unicode standard annex
// 15, with the tables of Unicode 9, as `tokenizers`: later marks count as letters.
size_t nfc_normalize(const Nfc *nfc, const char *text, size_t bytes, char *out);

LLMC_END
