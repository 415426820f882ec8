// Tokenizes arbitrary text. The hand-written splitter must agree with PCRE2, and decoding the
// tokens must reproduce the text, in which invalid UTF-8 is replaced.
#include "llmc/data/pretokenize.h"
#include "llmc/data/tokenizer.h"
#include "llmc/base/utf8.h"
#include "test/fuzz/fuzz.h"

typedef struct Opened {
    Tokenizer *bpe, *bytes, *null;
    PiecePattern *pattern[3];
} Opened;

static Tokenizer *open_gpt2(const char *vocab_file, const char *merge_file, Error *err) {
    TokenizerChoice choice = {.type = TOKENIZER_GPT2_BPE, .vocab_file = vocab_file, .merge_file = merge_file};
    return tokenizer_open(&choice, err);
}

static const Opened *open_once(void) {
    static Opened o;
    Error err = {0};
    if (o.bpe) return &o;
    o.bpe = open_gpt2("test/golden/tokenizer/vocab.json", "test/golden/tokenizer/merges.txt", &err);
    if (!o.bpe) fprintf(stderr, "%s (start it in the root of the repository)\n", err.what);
    PROMISE(o.bpe);
    o.bytes = tokenizer_open(&(TokenizerChoice){.type = TOKENIZER_BYTE}, &err);
    o.null = tokenizer_open(&(TokenizerChoice){.type = TOKENIZER_NULL, .null_vocab_size = 1000}, &err);
    o.pattern[0] = piece_pattern_compile(GPT2_PATTERN, "GPT-2", &err);
    o.pattern[1] = piece_pattern_compile(LLAMA3_PATTERN, "Llama 3", &err);
    o.pattern[2] = piece_pattern_compile(QWEN2_PATTERN, "Qwen", &err);
    return &o;
}

static void check_pieces(const PiecePattern *pattern, const char *text, size_t bytes) {
    PieceSplitter *splitter = piece_splitter_create(pattern);
    for (size_t start = 0, end; start < bytes; start = end) {
        end = piece_end(splitter, text, bytes, start);
        PROMISE(end > start && end <= bytes && end == piece_end_pcre2(splitter, text, bytes, start));
    }
    piece_splitter_free(splitter);
}

static void encode(const Tokenizer *tokenizer, const char *text, size_t bytes, const char *expected,
                   size_t expected_bytes, int64_t expected_replaced) {
    Encoder *encoder = encoder_create(tokenizer);
    for (int again = 0; again < 2; again++) {  // the second time uses the word cache
        TokenBuffer ids = {0};
        int64_t replaced = 0;
        encoder_encode(encoder, text, bytes, &ids, &replaced);
        size_t at = 0;
        for (int64_t i = 0; i < ids.count; i++) {
            size_t length;
            const char *part = tokenizer_decode(tokenizer, ids.ids[i], &length);
            PROMISE(!expected || (at + length <= expected_bytes && !memcmp(expected + at, part, length)));
            at += length;
        }
        PROMISE(!expected || (at == expected_bytes && replaced == expected_replaced));
        token_buffer_free(&ids);
    }
    encoder_free(encoder);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const Opened *o = open_once();
    char *text = (char *)fuzz_copy(data, size);
    char *repaired = (char *)xmalloc(3 * size + 1, "repaired text");
    int64_t replaced = 0;
    size_t bytes = utf8_repair(text, size, repaired, &replaced);
    PROMISE(utf8_valid_prefix(repaired, bytes) == bytes &&
            (replaced == 0) == (utf8_valid_prefix(text, size) == size));
    char *exact = (char *)fuzz_copy(repaired, bytes);
    free(repaired);
    for (int i = 0; i < 3; i++) check_pieces(o->pattern[i], exact, bytes);
    encode(o->bpe, text, size, exact, bytes, replaced);
    encode(o->bytes, text, size, exact, bytes, replaced);
    encode(o->null, text, size, NULL, 0, 0);
    free(exact);
    free(text);
    return 0;
}
