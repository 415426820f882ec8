// Conversations and rendered lines of preprocess_data --chat. The first byte selects a template.
#include "dev/lib/chat.h"
#include "test/fuzz/fuzz.h"

static void check_tokens(const ChatTokens *tokens, bool ok) {
    int64_t sum = 0, counted = 0;
    PROMISE(memchr(tokens->why, 0, sizeof tokens->why) && !*tokens->why == ok);
    if (!ok) return;
    for (int64_t i = 0; i < tokens->lengths.count; i++) sum += tokens->lengths.ids[i];
    PROMISE(tokens->ids.count == tokens->mask.count && tokens->ids.count == sum && sum > 0);
    for (int64_t i = 0; i < sum; i++) {
        PROMISE(tokens->ids.ids[i] >= 0 && tokens->ids.ids[i] <= 256);
        PROMISE(tokens->mask.ids[i] == 0 || tokens->mask.ids[i] == 1);
        counted += tokens->mask.ids[i];
    }
    PROMISE(counted > 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const char *const names[] = {"plain", "qwen3", "llama3.1", "mistral"};
    if (!size) return 0;
    Tokenizer *tokenizer = tokenizer_open(&(TokenizerChoice){.type = TOKENIZER_BYTE}, NULL);
    Encoder *encoder = encoder_create(tokenizer);
    ChatTokens chat = {0}, rendered = {0};
    char *line = (char *)fuzz_copy(data + 1, size - 1);
    bool ok = chat_encode(chat_template(names[data[0] % 4]), tokenizer, encoder, "messages", line, size - 1,
                          &chat);
    check_tokens(&chat, ok);
    check_tokens(&rendered, chat_read_rendered(tokenizer, line, size - 1, &rendered));
    free(line);
    chat_tokens_free(&chat);
    chat_tokens_free(&rendered);
    encoder_free(encoder);
    tokenizer_close(tokenizer);
    return 0;
}
