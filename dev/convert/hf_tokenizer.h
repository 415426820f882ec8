// Copies the small files of Hugging Face directories, byte for byte: GPT-2's vocab.json and
// merges.txt, or tokenizer.json; the tokenizer's other files, such as chat templates; and the
// model's config.json and generation_config.json. Called by hf_export.c and hf_import.c.
#pragma once
#include <cjson/cJSON.h>

#include "llmc/base/json_line.h"
#include "llmc/data/tokenizer.h"
LLMC_BEGIN

#define HF_VOCAB "vocab.json"
#define HF_MERGES "merges.txt"
#define HF_TOKENIZER "tokenizer.json"
#define HF_TOKENIZER_CONFIG "tokenizer_config.json"
#define HF_GENERATION_CONFIG "generation_config.json"
#define HF_CONFIG "config.json"

typedef struct HfTokenizerFile {
    char *name, *text;
    uint64_t bytes;
} HfTokenizerFile;

typedef struct HfTokenizer {
    TokenizerType type;  // TOKENIZER_GPT2_BPE or TOKENIZER_HUGGING_FACE
    HfTokenizerFile *file;
    int files;
    int size, eod;   // number of ids, 0 without a tokenizer; id of EOD
    int bos, pad;    // ids of the other special tokens; -1: none
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
// Checks that the tokenizer uses --tokenizer-eod if it is given. Error: EXIT_USAGE.
bool hf_tokenizer_eod_used(const HfTokenizerOptions *options, const TokenizerChoice *choice, Error *err);
// Checks that a model with this number of embedding rows can use the tokenizer. Errors: EXIT_DATA.
bool hf_tokenizer_fits(int size, int64_t rows, Error *err);

// Adds the files of the tokenizer, after validating them as the trainer does. Errors: EXIT_DATA.
bool hf_tokenizer_read(HfTokenizer *tokenizer, const TokenizerChoice *choice, Error *err);
// Expresses the tokenizer type Byte as a GPT-2 tokenizer: one symbol per byte, no merges.
void hf_tokenizer_of_bytes(HfTokenizer *tokenizer);
// Adds config.json and generation_config.json of a directory. Skips a file that is missing or was
// already added from another directory. folder: NULL for the directory of the chosen tokenizer, if
// it has files. Errors: EXIT_DATA.
bool hf_tokenizer_add_configs(HfTokenizer *tokenizer, const TokenizerChoice *choice, const char *folder,
                              Error *err);
// Adds or replaces a file. Takes over the text.
void hf_tokenizer_put(HfTokenizer *tokenizer, const char *name, Text *text);
// Returns a JSON file, or NULL if there is no such file. The caller deletes it.
cJSON *hf_tokenizer_object(const HfTokenizer *tokenizer, const char *name);
// Writes the files into the directory. Errors: EXIT_CHECKPOINT.
bool hf_tokenizer_write(const HfTokenizer *tokenizer, const char *folder, Error *err);
void hf_tokenizer_free(HfTokenizer *tokenizer);

LLMC_END
