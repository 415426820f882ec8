// Converts text to token ids and back. Supports GPT-2's byte-level BPE (vocab.json and merges.txt),
// BPE in Hugging Face's tokenizer.json (byte-level, or of characters with byte_fallback), a byte
// tokenizer (256 bytes and EOD) that needs no files, and Megatron's NullTokenizer (ids only). Used
// by preprocess_data (encoding), the trainer (vocabulary size, EOD) and sampling (decoding).
//
// BPE ids equal the ids of Hugging Face's `tokenizers`. They also equal the ids of Megatron-LM's
// GPT2BPETokenizer (for GPT-2) or HuggingFaceTokenizer. PCRE2's Unicode tables (version_unicode)
// decide which characters are letters and digits, so text in recently added scripts may be split
// differently with other PCRE2 versions.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// Same order as the choices of --tokenizer-type.
typedef enum TokenizerType {
    TOKENIZER_GPT2_BPE,
    TOKENIZER_BYTE,
    TOKENIZER_HUGGING_FACE,
    TOKENIZER_NULL
} TokenizerType;

// Selects a tokenizer and its files. Fields of other types are ignored.
typedef struct TokenizerChoice {
    TokenizerType type;
    const char *vocab_file, *merge_file;  // GPT2_BPE
    const char *model;                    // HUGGING_FACE: tokenizer.json or its directory
    const char *eod_token;    // HUGGING_FACE: text of the EOD token; NULL: default, see tokenizer_json.h.
                              // TOKENIZER_NULL: decimal id of EOD; NULL: the last id
    int64_t null_vocab_size;  // TOKENIZER_NULL: number of ids without EOD
} TokenizerChoice;

typedef struct Tokenizer Tokenizer;  // immutable after opening, shared by threads
typedef struct Encoder Encoder;      // one per thread: PCRE2 match data, BPE scratch, word cache

// Opens a tokenizer. GPT2_BPE needs vocab_file and merge_file, HUGGING_FACE needs model, NULL needs
// null_vocab_size n (V = n + 1; EOD = n as in Megatron, if eod_token is NULL). A first line of
// merges.txt that starts with "#version" is skipped. The last merge counts even without a final
// newline, as in Hugging Face's tokenizers (Megatron-LM drops it). Errors: EXIT_DATA for a missing
// or malformed file, with file and line; EXIT_USAGE for an invalid null_vocab_size or missing file
// options.
Tokenizer *tokenizer_open(const TokenizerChoice *choice, Error *err);
void tokenizer_close(Tokenizer *tokenizer);
int tokenizer_vocab_size(const Tokenizer *tokenizer);  // unpadded: 50257 for GPT-2, 257 for Byte
int tokenizer_eod(const Tokenizer *tokenizer);         // 50256 for GPT-2, 256 for Byte

Encoder *encoder_create(const Tokenizer *tokenizer);
void encoder_free(Encoder *encoder);
// A growing array of ids.
typedef struct TokenBuffer {
    int32_t *ids;
    int64_t count, capacity;
} TokenBuffer;
enum { ENCODER_MAX_BYTES = 1 << 30 };  // longest text; checked by the caller
// Appends the ids of text, `bytes` of UTF-8. Each maximal invalid subpart is read as U+FFFD and
// counted in *replaced. HUGGING_FACE finds the added tokens of its file in the text, special or
// not. The other types have no special tokens: "<|endoftext|>" is ordinary text, as in Megatron.
// NullTokenizer: the text is decimal ids separated by white space; words that are not valid ids are
// skipped and counted in *replaced.
void encoder_encode(Encoder *encoder, const char *text, size_t bytes, TokenBuffer *out, int64_t *replaced);
// The same for a text that continues an encoded one: a tokenizer whose first word gets a space does
// not add it here.
void encoder_encode_more(Encoder *encoder, const char *text, size_t bytes, TokenBuffer *out,
                         int64_t *replaced);
// Ids that precede | follow a whole text, from HUGGING_FACE's post_processor, such as Llama 3's
// <|begin_of_text|>. encoder_encode does not add them. *count is 0 for most tokenizers.
const int32_t *tokenizer_prefix(const Tokenizer *tokenizer, int *count);
const int32_t *tokenizer_suffix(const Tokenizer *tokenizer, int *count);
void token_buffer_append(TokenBuffer *buffer, int32_t id);
void token_buffer_free(TokenBuffer *buffer);

// Returns the bytes of one id and their number in *bytes. Not NUL-terminated; may be part of a
// UTF-8 character. For EOD and other special tokens, they are the token's text, such as
// "<|endoftext|>"; for NullTokenizer's ids, a space and the decimal id. *bytes is 0 for an id
// outside the vocabulary (a padding row).
const char *tokenizer_decode(const Tokenizer *tokenizer, int id, size_t *bytes);
// Number of spaces to remove at the start of a decoded text, if it has as many: 1 for Llama 2's
// tokenizer, which encodes "x" as if it were " x"; 0 for most.
int tokenizer_stripped(const Tokenizer *tokenizer);

LLMC_END
