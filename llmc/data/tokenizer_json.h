// Reads Hugging Face's tokenizer.json of a byte-level BPE: the tokenizers of GPT-2, Llama 3, Qwen
// and their like. Called by tokenizer.c.
#pragma once
#include "llmc/data/added_tokens.h"
#include "llmc/data/nfc.h"
#include "llmc/data/pretokenize.h"
#include "llmc/data/vocabulary.h"
LLMC_BEGIN

// Ids that stand around every text: "post_processor", of which {"single": [...]} counts.
enum { MOST_AROUND = 16 };
typedef struct AroundText {
    int32_t id[MOST_AROUND];
    int before, after;  // id[0 .. before) in front of the text, the next `after` behind it
} AroundText;

// What a byte-level BPE tokenizer is made of. Text goes through the parts in this order.
typedef struct ByteLevel {
    AddedTokens raw;         // found in the text as it is
    Nfc *nfc;                // NULL: text is not normalized
    AddedTokens normalized;  // found in normalized text
    PieceSteps steps;
    Bpe bpe;
    TokenTable table;
    AroundText around;
} ByteLevel;

// model: the file, or a folder that has tokenizer.json. eod_token: the text of the token that ends
// a document; NULL: eos_token of tokenizer_config.json beside the file, else the usual names.
// Errors: EXIT_DATA with the file, for a file that is missing or malformed, and for what a
// byte-level BPE does not need. On failure nothing is left to free.
bool tokenizer_json_read(ByteLevel *out, const char *model, const char *eod_token, Error *err);
void byte_level_free(ByteLevel *parts);

LLMC_END
