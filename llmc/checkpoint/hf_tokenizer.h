// GPT-2's tokenizer files on their way into a Hugging Face folder and out of it: vocab.json and
// merges.txt, which travel byte for byte. Called by hf_export.c and hf_import.c.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

#define HF_VOCAB "vocab.json"
#define HF_MERGES "merges.txt"

typedef struct HfTokenizer {
    char *vocab, *merges;  // the files' texts; NULL: there is no tokenizer
    uint64_t vocab_bytes, merges_bytes;
    int size, eod;         // ids; that of the end of a document
} HfTokenizer;

// Reads both files and checks them as the trainer would. Errors: EXIT_DATA.
bool hf_tokenizer_read(HfTokenizer *tokenizer, const char *vocab_file, const char *merge_file, Error *err);
// The tokenizer type Byte in GPT-2's terms: a symbol for every byte, no merges.
void hf_tokenizer_of_bytes(HfTokenizer *tokenizer);
// Writes both files into the folder. True where there is no tokenizer. Errors: EXIT_CHECKPOINT.
bool hf_tokenizer_write(const HfTokenizer *tokenizer, const char *folder, Error *err);
void hf_tokenizer_free(HfTokenizer *tokenizer);

LLMC_END
