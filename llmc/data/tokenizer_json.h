// Reads BPE tokenizers in Hugging Face's tokenizer.json format. There are two kinds: byte-level BPE
// (GPT-2, Llama 3, Qwen), and BPE of characters with byte_fallback, which tokenizers converted from
// SentencePiece use (Llama 2, Mistral, TinyLlama). Called by tokenizer.c.
#pragma once
#include "llmc/data/bpe_parts.h"
LLMC_BEGIN

// model: the file, or a directory that contains tokenizer.json. eod_token: text of the
// end-of-document token; NULL: eos_token of tokenizer_config.json in the same directory, else the
// usual names. Errors: EXIT_DATA with the file name if it is missing, malformed, or unsupported.
// On failure nothing needs freeing.
char *tokenizer_json_path(const char *model);  // returns the file's path, malloc'ed
bool tokenizer_json_read(BpeParts *out, const char *model, const char *eod_token, Error *err);
void bpe_parts_free(BpeParts *parts);

LLMC_END
