// Reads byte-level BPE tokenizers in Hugging Face's tokenizer.json format, such as the tokenizers
// of GPT-2, Llama 3, Qwen and similar models. Called by tokenizer.c.
#pragma once
#include "llmc/data/added_tokens.h"
#include "llmc/data/nfc.h"
#include "llmc/data/pretokenize.h"
#include "llmc/data/vocabulary.h"
LLMC_BEGIN

// Ids added around every text: the "single" template of "post_processor".
enum { MOST_AROUND = 16 };
typedef struct AroundText {
    int32_t id[MOST_AROUND];
    int before, after;  // id[0 .. before) precede the text, the next `after` follow it
} AroundText;

// Parts of a byte-level BPE tokenizer, in the order in which text passes through them.
typedef struct ByteLevel {
    AddedTokens raw;         // matched in the raw text
    Nfc *nfc;                // NULL: no normalization
    AddedTokens normalized;  // matched in normalized text
    PieceSteps steps;
    Bpe bpe;
    TokenTable table;
    AroundText around;
} ByteLevel;

// model: the file, or a directory that contains tokenizer.json. eod_token: text of the
// end-of-document token; NULL: eos_token of tokenizer_config.json in the same directory, else the
// usual names. Errors: EXIT_DATA with the file name if it is missing, malformed, or uses features
// outside byte-level BPE. On failure nothing needs freeing.
bool tokenizer_json_read(ByteLevel *out, const char *model, const char *eod_token, Error *err);
void byte_level_free(ByteLevel *parts);

LLMC_END
