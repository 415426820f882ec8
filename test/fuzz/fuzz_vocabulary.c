// The input is vocab.json, 0xFF, merges.txt. If the first byte is M, the rest is merges.txt for a
// valid vocabulary. If it is V, the part before 0xFF contains entries that are added to a valid
// vocabulary. Tokenizers that load must reproduce every text.
#include "llmc/data/tokenizer.h"
#include "llmc/base/utf8.h"
#include "test/fuzz/fuzz.h"

static bool itself(uint32_t byte) {
    return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || (byte >= 0xAE && byte <= 0xFF);
}

// Writes a vocabulary of all 256 byte symbols, the end of text, three merged tokens and the added
// entries.
static size_t write_sound(char *out, const uint8_t *more, size_t more_bytes) {
    size_t used = (size_t)sprintf(out, "{\"<|endoftext|>\":256,\"th\":257,\"the\":258,\"\\u0120the\":259");
    uint32_t shifted = 0x100;
    for (uint32_t byte = 0; byte < 256; byte++) {
        char symbol[8];
        size_t length = utf8_write(itself(byte) ? byte : shifted++, symbol);
        used += (size_t)sprintf(out + used, ",\"%s%.*s\":%u", byte == '"' || byte == '\\' ? "\\" : "",
                                (int)length, symbol, (unsigned)byte);
    }
    memcpy(out + used, more, more_bytes);
    out[used + more_bytes] = '}';
    return used + more_bytes + 1;
}

static void round_trip(const Tokenizer *tokenizer, const char *text, size_t bytes) {
    Encoder *encoder = encoder_create(tokenizer);
    TokenBuffer ids = {0};
    int64_t replaced = 0;
    encoder_encode(encoder, text, bytes, &ids, &replaced);
    size_t at = 0;
    for (int64_t i = 0; i < ids.count; i++) {
        size_t length;
        const char *part = tokenizer_decode(tokenizer, ids.ids[i], &length);
        PROMISE(at + length <= bytes && !memcmp(text + at, part, length));
        at += length;
    }
    PROMISE(at == bytes && replaced == 0);
    token_buffer_free(&ids);
    encoder_free(encoder);
}

static Tokenizer *open_gpt2(const char *vocab_file, const char *merge_file, Error *err) {
    TokenizerChoice choice = {.type = TOKENIZER_GPT2_BPE, .vocab_file = vocab_file, .merge_file = merge_file};
    return tokenizer_open(&choice, err);
}

static void open_both(const char *vocab, const char *merges) {
    static const char text[] =
        " the theory of the 3 "
        "aa\xC3\xA9\n\taaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
        "aaathethethethethethethethethethethethe";
    Error err = {0};
    Tokenizer *tokenizer = open_gpt2(vocab, merges, &err);
    if (!tokenizer) {
        fuzz_check_error(&err);
        return;
    }
    PROMISE(tokenizer_eod(tokenizer) >= 0 && tokenizer_eod(tokenizer) < tokenizer_vocab_size(tokenizer));
    round_trip(tokenizer, text, sizeof text - 1);
    for (int id = -1; id <= tokenizer_vocab_size(tokenizer); id++) {
        size_t length;
        const char *part = tokenizer_decode(tokenizer, id, &length);
        free(fuzz_copy(part, length));
    }
    tokenizer_close(tokenizer);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char vocab[512], merges[512];
    bool only_merges = size && *data == 'M', adds = size && *data == 'V';
    FuzzParts parts = fuzz_parts(data + (only_merges || adds), size - (only_merges || adds));
    if (only_merges) parts = (FuzzParts){data, data + 1, 0, size - 1};
    char *sound = (char *)xmalloc(8192 + size, "a vocabulary");
    size_t bytes = only_merges || adds ? write_sound(sound, parts.first, parts.first_bytes)
                                       : parts.first_bytes;
    if (!only_merges && !adds) memcpy(sound, parts.first, bytes);
    snprintf(vocab, sizeof vocab, "%s", fuzz_file("vocab.json", sound, bytes));
    snprintf(merges, sizeof merges, "%s", fuzz_file("merges.txt", parts.second, parts.second_bytes));
    free(sound);
    open_both(vocab, merges);
    return 0;
}
