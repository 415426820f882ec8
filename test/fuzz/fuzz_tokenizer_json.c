// The input is tokenizer.json, 0xFF, tokenizer_config.json. If the first byte is S, the first part
// contains only members that are inserted into a valid tokenizer.json; if it is M, members that are
// inserted into its "model". Tokenizers that load must produce only ids of their vocabulary, and
// bytes for each id.
#include "llmc/base/utf8.h"
#include "llmc/data/tokenizer.h"
#include "test/fuzz/fuzz.h"

static bool itself(uint32_t byte) {
    return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || (byte >= 0xAE && byte <= 0xFF);
}

// Writes a valid file whose vocabulary has all 256 byte symbols, two merged tokens and an end of
// text. The members are inserted at the start, because the first of equal names counts.
static size_t write_sound(char *out, const uint8_t *members, size_t bytes, bool of_model) {
    size_t used = (size_t)sprintf(out, "{");
    if (!of_model) memcpy(out + used, members, bytes);
    used += of_model ? 0 : bytes;
    used +=
        (size_t)sprintf(out + used,
                        "\"added_tokens\":[{\"id\":258,\"content\":\"<|endoftext|>\",\"special\":true}],"
                        "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false},\"model\":{");
    if (of_model) memcpy(out + used, members, bytes);
    used += of_model ? bytes : 0;
    used += (size_t)sprintf(out + used,
                            "\"merges\":[\"t h\",[\"th\",\"e\"]],\"vocab\":{\"th\":256,\"the\":257");
    uint32_t shifted = 0x100;
    for (uint32_t byte = 0; byte < 256; byte++) {
        char symbol[8];
        size_t length = utf8_write(itself(byte) ? byte : shifted++, symbol);
        used += (size_t)sprintf(out + used, ",\"%s%.*s\":%u", byte == '"' || byte == '\\' ? "\\" : "",
                                (int)length, symbol, (unsigned)byte);
    }
    return used + (size_t)sprintf(out + used, "}}}");
}

// The text is short, because the matching time of a hostile pattern can be polynomial in its
// length.
static void encode(const Tokenizer *tokenizer) {
    static const char text[] = "a1 the\xCC\x81\n";
    Encoder *encoder = encoder_create(tokenizer);
    TokenBuffer ids = {0};
    int64_t replaced = 0;
    encoder_encode(encoder, text, sizeof text - 1, &ids, &replaced);
    for (int64_t i = 0; i < ids.count; i++)
        PROMISE(ids.ids[i] >= 0 && ids.ids[i] < tokenizer_vocab_size(tokenizer));
    PROMISE(replaced == 0);
    token_buffer_free(&ids);
    encoder_free(encoder);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    bool sound = size && (*data == 'S' || *data == 'M');
    FuzzParts parts = fuzz_parts(data + sound, size - sound);
    char *text = (char *)xmalloc(8192 + size, "a tokenizer");
    size_t bytes = parts.first_bytes;
    if (sound) bytes = write_sound(text, parts.first, bytes, *data == 'M');
    else if (bytes) memcpy(text, parts.first, bytes);
    fuzz_file("tokenizer_config.json", parts.second, parts.second_bytes);
    TokenizerChoice choice = {.type = TOKENIZER_HUGGING_FACE,
                              .model = fuzz_file("tokenizer.json", text, bytes)};
    Error err = {0};
    Tokenizer *tokenizer = tokenizer_open(&choice, &err);
    free(text);
    if (!tokenizer) {
        fuzz_check_error(&err);
        return 0;
    }
    int before, after, size_of = tokenizer_vocab_size(tokenizer);
    const int32_t *prefix = tokenizer_prefix(tokenizer, &before);
    tokenizer_suffix(tokenizer, &after);
    for (int i = 0; i < before + after; i++) PROMISE(prefix[i] >= 0 && prefix[i] < size_of);
    PROMISE(tokenizer_eod(tokenizer) >= 0 && tokenizer_eod(tokenizer) < size_of);
    encode(tokenizer);
    for (int id = -1; id <= size_of; id++) {
        size_t length;
        const char *part = tokenizer_decode(tokenizer, id, &length);
        free(fuzz_copy(part, length));
    }
    tokenizer_close(tokenizer);
    return 0;
}
