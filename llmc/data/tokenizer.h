// Text to token ids and back. GPT-2's byte-level BPE (vocab.json and merges.txt); any byte-level
// BPE of Hugging Face's tokenizer.json; a byte tokenizer (256 bytes and EOD) that needs no files;
// Megatron's NullTokenizer (ids only). Used by preprocess_data (encoding), the trainer (vocabulary
// size, EOD) and sampling (decoding).
//
// The BPE ids are those of Hugging Face's `tokenizers`. GPT-2's are also those of Megatron-LM's
// GPT2BPETokenizer, the others those of its HuggingFaceTokenizer. PCRE2's Unicode tables
// (version_unicode) say which characters are letters and digits. Newer and older tables differ in
// some: text in such letters may be cut differently.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// In the order of the words of --tokenizer-type.
typedef enum TokenizerType {
    TOKENIZER_GPT2_BPE,
    TOKENIZER_BYTE,
    TOKENIZER_HUGGING_FACE,
    TOKENIZER_NULL
} TokenizerType;

// Which tokenizer, and what it is made of. A type ignores the fields of others.
typedef struct TokenizerChoice {
    TokenizerType type;
    const char *vocab_file, *merge_file;  // GPT2_BPE
    const char *model;                    // HUGGING_FACE: tokenizer.json or its folder
    const char *eod_token;                // HUGGING_FACE: text of EOD; NULL: as tokenizer_json.h says
    int64_t null_vocab_size;              // NULL: n
} TokenizerChoice;

typedef struct Tokenizer Tokenizer;  // immutable after opening, shared by threads
typedef struct Encoder Encoder;      // one per thread: PCRE2 match data, room for BPE, the word cache

// GPT2_BPE wants vocab_file and merge_file, HUGGING_FACE wants model. NULL wants null_vocab_size n:
// V = n + 1, EOD = n, as in Megatron. merges.txt: a first line that begins with "#version" is
// skipped. The last merge counts even without a final newline; Hugging Face's tokenizers does the
// same, Megatron-LM drops it. Errors: EXIT_DATA for a missing or malformed file, with file and
// line. EXIT_USAGE for a null_vocab_size that cannot be, or a type without its files.
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
enum { ENCODER_MAX_BYTES = 1 << 30 };  // the caller makes sure of it
// Appends the ids of text, `bytes` of UTF-8. Invalid sequences are read as U+FFFD, one per maximal
// invalid subpart, and added to *replaced. HUGGING_FACE: the added tokens of its file are found in
// the text, special or not. The others have no special tokens: "<|endoftext|>" in the text is
// ordinary characters, as in Megatron. NullTokenizer: the text is decimal ids separated by white
// space. A word that is no id of the vocabulary is left out and counted.
void encoder_encode(Encoder *encoder, const char *text, size_t bytes, TokenBuffer *out, int64_t *replaced);
// The ids that a whole text has in front of it and behind it: those of HUGGING_FACE's
// post_processor, such as Llama 3's <|begin_of_text|>. encoder_encode adds none. *count is 0 for
// most tokenizers.
const int32_t *tokenizer_prefix(const Tokenizer *tokenizer, int *count);
const int32_t *tokenizer_suffix(const Tokenizer *tokenizer, int *count);
void token_buffer_append(TokenBuffer *buffer, int32_t id);
void token_buffer_free(TokenBuffer *buffer);

// Bytes of one id, length in *bytes. Not NUL-terminated; may be part of a UTF-8 character. EOD and
// other special tokens give their text, such as "<|endoftext|>". NullTokenizer's ids give their
// decimal form after a space. An id outside the vocabulary (a padded row) gives length 0.
const char *tokenizer_decode(const Tokenizer *tokenizer, int id, size_t *bytes);

LLMC_END
