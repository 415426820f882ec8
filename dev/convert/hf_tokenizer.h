// Copies tokenizer files into and out of Hugging Face directories, byte for byte: GPT-2's
// vocab.json and merges.txt, or tokenizer.json and the files next to it. Called by hf_export.c and
// hf_import.c.
#pragma once
#include "llmc/data/tokenizer.h"
LLMC_BEGIN

#define HF_VOCAB "vocab.json"
#define HF_MERGES "merges.txt"
#define HF_TOKENIZER "tokenizer.json"
#define HF_TOKENIZER_CONFIG "tokenizer_config.json"
#define HF_GENERATION_CONFIG "generation_config.json"

typedef struct HfTokenizerFile {
    const char *name;
    char *text;
    uint64_t bytes;
} HfTokenizerFile;

enum { HF_MOST_TOKENIZER_FILES = 4 };
typedef struct HfTokenizer {
    TokenizerType type;  // TOKENIZER_GPT2_BPE or TOKENIZER_HUGGING_FACE
    HfTokenizerFile file[HF_MOST_TOKENIZER_FILES];
    int files;       // 0: no tokenizer
    int size, eod;   // number of ids; id of EOD
    char *eod_text;  // text of EOD for TOKENIZER_HUGGING_FACE
} HfTokenizer;

// The user's choice of tokenizer, as the trainer's flags.
typedef struct HfTokenizerOptions {
    const char *vocab_file, *merge_file;
    const char *model, *eod;  // --tokenizer-model, --tokenizer-eod
    bool none;                // omit the tokenizer
} HfTokenizerOptions;
// Sets *choice to the tokenizer that the flags name; without --tokenizer-eod its eod_token stays.
// Returns false if they name none.
bool hf_tokenizer_given(const HfTokenizerOptions *options, TokenizerChoice *choice);

// Reads the files and validates them as the trainer does. Errors: EXIT_DATA.
bool hf_tokenizer_read(HfTokenizer *tokenizer, const TokenizerChoice *choice, Error *err);
// Expresses the tokenizer type Byte as a GPT-2 tokenizer: one symbol per byte, no merges.
void hf_tokenizer_of_bytes(HfTokenizer *tokenizer);
// Returns NULL if there is no such file.
const HfTokenizerFile *hf_tokenizer_file(const HfTokenizer *tokenizer, const char *name);
// Writes the files into the directory. Errors: EXIT_CHECKPOINT.
bool hf_tokenizer_write(const HfTokenizer *tokenizer, const char *folder, Error *err);
void hf_tokenizer_free(HfTokenizer *tokenizer);

LLMC_END
