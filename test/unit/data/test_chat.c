// Tests chat templates and loss masks: texts written by hand, ids and masks of transformers
// (dev/ref/make_chat_golden.py), rendered lines, and errors.
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "dev/lib/chat.h"
#include "llmc/base/json.h"

#define GOLDEN "test/golden/chat/"

static Tokenizer *open_tokenizer(const char *folder) {
    Error err = {0};
    TokenizerChoice choice = {.type = folder ? TOKENIZER_HUGGING_FACE : TOKENIZER_BYTE,
                              .model = folder,
                              .eod_token = "</s>"};
    Tokenizer *tokenizer = tokenizer_open(&choice, &err);
    if (!tokenizer) fail_msg("%s", err.what);
    return tokenizer;
}

static bool encode(const char *name, const Tokenizer *tokenizer, const char *line, ChatTokens *tokens) {
    Encoder *encoder = encoder_create(tokenizer);
    const ChatTemplate *t = chat_template(name);
    bool ok = t ? chat_encode(t, tokenizer, encoder, "messages", line, strlen(line), tokens)
                : chat_read_rendered(tokenizer, line, strlen(line), tokens);
    encoder_free(encoder);
    return ok;
}

// Decodes the tokens, with << and >> around those that the loss counts and | after a conversation.
static void as_text(const Tokenizer *tokenizer, const ChatTokens *tokens, char *text, size_t bytes) {
    size_t used = 0;
    int64_t i = 0;
    for (int64_t c = 0; c < tokens->lengths.count; c++) {
        bool before = false;
        for (int64_t end = i + tokens->lengths.ids[c]; i < end; i++) {
            size_t length;
            const char *piece = tokenizer_decode(tokenizer, tokens->ids.ids[i], &length);
            bool counted = tokens->mask.ids[i];
            const char *mark = counted == before ? "" : counted ? "<<" : ">>";
            used += (size_t)snprintf(text + used, bytes - used, "%s%.*s", mark, (int)length, piece);
            before = counted;
        }
        used += (size_t)snprintf(text + used, bytes - used, before ? ">>|" : "|");
    }
    assert_int_equal(i, tokens->ids.count);
    assert_int_equal(i, tokens->mask.count);
}

static void expect_text(const char *name, const char *folder, const char *line, const char *expected) {
    Tokenizer *tokenizer = open_tokenizer(folder);
    ChatTokens tokens = {0};
    char text[4096];
    if (!encode(name, tokenizer, line, &tokens)) fail_msg("%s: %s", name, tokens.why);
    as_text(tokenizer, &tokens, text, sizeof text);
    assert_string_equal(text, expected);
    chat_tokens_free(&tokens);
    tokenizer_close(tokenizer);
}

#define SAY(role, text) "{\"role\":\"" role "\",\"content\":\"" text "\"}"
#define LINE(...) "{\"messages\":[" __VA_ARGS__ "]}"
#define TWO_TURNS \
    LINE(SAY("system", "Be.") "," SAY("user", " a ") "," SAY("assistant", \
                                                             " b ") "," SAY("user", \
                                                                            "c") "," SAY("assistant", "d"))
#define NO_SYSTEM LINE(SAY("user", " a ") "," SAY("assistant", " b "))

static void texts_by_hand(void **state) {
    expect_text(
        "chatml", GOLDEN "bytes", TWO_TURNS,
        "<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\n a <|im_end|>\n<|im_start|>assistant\n"
        "<< b <|im_end|>>>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n<<d<|im_end|>>>\n|");
    expect_text("qwen2.5", GOLDEN "bytes", NO_SYSTEM,
                "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
                "<|im_end|>\n<|im_start|>user\n a <|im_end|>\n<|im_start|>assistant\n<< b <|im_end|>>>\n|");
    expect_text("qwen3", GOLDEN "bytes", TWO_TURNS,
                "<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\n a <|im_end|>\n<|im_start|>assistant\n"
                "<< b <|im_end|>>>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
                "<<<think>\n\n</think>\n\nd<|im_end|>>>\n|");
    expect_text("llama3", GOLDEN "bytes", TWO_TURNS,
                "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe.<|eot_id|>"
                "<|start_header_id|>user<|end_header_id|>\n\na<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\n<<b<|eot_id|>>>"
                "<|start_header_id|>user<|end_header_id|>\n\nc<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\n<<d<|eot_id|>>>|");
    expect_text("mistral-v7", GOLDEN "bytes", TWO_TURNS,
                "<s>[SYSTEM_PROMPT]Be.[/SYSTEM_PROMPT][INST] a [/INST]<< b </s>>>[INST]c[/INST]<<d</s>>>|");
    expect_text("mistral", GOLDEN "metaspace", NO_SYSTEM, "<s>[INST]  a [/INST]<< b</s>>>|");
    expect_text(
        "plain", NULL, TWO_TURNS,
        "System: Be.\nUser:  a \nAssistant:<<  b <|endoftext|>>>User: c\nAssistant:<< d<|endoftext|>>>|");
}

static void a_system_message_starts_a_conversation(void **state) {
    expect_text("plain", NULL,
                LINE(SAY("user", "a") "," SAY("assistant", "b") "," SAY("system", "S") "," SAY(
                    "user", "c") "," SAY("assistant", "d") "," SAY("system", "T") "," SAY("assistant", "e")),
                "User: a\nAssistant:<< b<|endoftext|>>>|System: S\nUser: c\nAssistant:<< d<|endoftext|>>>|"
                "System: T\nAssistant:<< e<|endoftext|>>>|");
}

#define WEIGHTED(weight, text) "{\"role\":\"assistant\",\"weight\":" weight ",\"content\":\"" text "\"}"

static void weights_choose_the_answers(void **state) {
    expect_text("plain", NULL,
                LINE(SAY("user", "a") "," WEIGHTED("0", "b") "," SAY("user", "c") "," WEIGHTED(
                    "1", "d") "," SAY("user", "e") "," WEIGHTED("null", "f")),
                "User: a\nAssistant: b<|endoftext|>User: c\nAssistant:<< d<|endoftext|>>>"
                "User: e\nAssistant:<< f<|endoftext|>>>|");
    // What ends the turn has the weight of the turn, and the ids don't depend on weights.
    expect_text("qwen3", GOLDEN "bytes",
                LINE("{\"role\":\"user\",\"content\":\"a\",\"weight\":0}," SAY("assistant", "b") "," SAY(
                    "user", "c") "," WEIGHTED("0.0", "d")),
                "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<<b<|im_end|>>>\n<|im_start|>user\nc"
                "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nd<|im_end|>\n|");
}

static void other_keys_are_ignored(void **state) {
    expect_text("plain", NULL,
                "{\"id\":1,\"messages\":[{\"role\":\"user\",\"name\":\"x\",\"content\":\"a\"},"
                "{\"role\":\"assistant\",\"content\":\"b\",\"tool_calls\":null,\"train\":null,"
                "\"id\":{\"train\":false}}]}",
                "User: a\nAssistant:<< b<|endoftext|>>>|");
}

static void expect_list(const cJSON *list, const TokenBuffer *found, const char *what, int number) {
    int i = 0;
    const cJSON *item;
    cJSON_ArrayForEach(item, list) {
        if (i >= found->count || item->valueint != found->ids[i])
            fail_msg("case %d: %s %d differs", number, what, i);
        i++;
    }
    assert_int_equal(i, found->count);
}

static void same_as_transformers(void **state) {
    Error err = {0};
    cJSON *file = json_read_object(GOLDEN "cases.json", 1 << 24, &err);
    if (!file) fail_msg("%s", err.what);
    Tokenizer *tokenizers[2] = {open_tokenizer(GOLDEN "bytes"), open_tokenizer(GOLDEN "metaspace")};
    int number = 0;
    const cJSON *one;
    cJSON_ArrayForEach(one, cJSON_GetObjectItem(file, "cases")) {
        const char *name = json_member_string(one, "template"), *line = json_member_string(one, "line");
        const Tokenizer *tokenizer = tokenizers[!strcmp(json_member_string(one, "tokenizer"), "metaspace")];
        ChatTokens tokens = {0};
        assert_true(chat_check_tokens(chat_template(name), tokenizer, &err));
        if (!encode(name, tokenizer, line, &tokens)) fail_msg("case %d, %s: %s", number, name, tokens.why);
        expect_list(cJSON_GetObjectItem(one, "ids"), &tokens.ids, name, number);
        expect_list(cJSON_GetObjectItem(one, "mask"), &tokens.mask, "mask", number);
        chat_tokens_free(&tokens);
        number++;
    }
    assert_true(number > 30);
    cJSON_Delete(file);
    for (int i = 0; i < 2; i++) tokenizer_close(tokenizers[i]);
}

static void rendered_lines(void **state) {
    expect_text("rendered", NULL, "{\"input_ids\":[65,66,256],\"x\":1,\"assistant_masks\":[0,1,1]}",
                "A<<B<|endoftext|>>>|");
}

static void lines_are_refused(void **state) {
    static const struct {
        const char *name, *line, *why;
    } cases[] = {
        {"plain", "[]", "is not a JSON object"},
        {"plain", "{\"text\":\"a\"}", "has no \"messages\""},
        {"plain", LINE(""), "has no \"messages\""},
        {"plain", LINE("1"), "message 1 has no \"role\""},
        {"plain", LINE("{\"content\":\"a\"}"), "message 1 has no \"role\""},
        {"plain", LINE(SAY("user", "a") "," SAY("tool", "b")), "message 2 has the role \"tool\""},
        {"mistral", LINE(SAY("system", "a")), "which template mistral lacks; use user and assistant"},
        {"plain", LINE("{\"role\":\"user\",\"content\":null}"), "message 1 has a \"content\" that is not"},
        {"plain", LINE("{\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":[]}"), "has \"tool_calls\""},
        {"plain", LINE(SAY("user", "a") "," WEIGHTED("0.5", "b")), "message 2 has the \"weight\" 0.5"},
        {"plain", LINE(SAY("user", "a") "," WEIGHTED("true", "b")), "message 2 has the \"weight\" true"},
        {"plain", LINE("{\"role\":\"user\",\"content\":\"a\",\"weight\":1}"),
         "message 1 has the \"weight\" 1 and the role user"},
        {"plain", LINE(SAY("user", "a") "," WEIGHTED("0", "b")), "conversation without loss, because"},
        {"plain", LINE(SAY("assistant", "a") "," SAY("system", "b") "," WEIGHTED("0", "c")),
         "all its assistant turns have weight 0 (messages 2 to 3)"},
        {"plain", LINE("{\"role\":\"assistant\",\"content\":\"a\",\"train\":false}"),
         "message 1 has \"train\"; write \"weight\": 0 or 1 instead"},
        {"plain", LINE("{\"role\":\"assistant\",\"content\":\"a\",\"training\":true}"),
         "message 1 has \"training\"; write \"weight\""},
        {"plain", LINE("{\"role\":\"assistant\",\"content\":\"a\",\"loss\":0}"), "has \"loss\""},
        {"plain", LINE("{\"role\":\"assistant\",\"content\":\"a\",\"thinking\":\"b\"}"),
         "message 1 has \"thinking\"; use --chat rendered"},
        {"plain", LINE("{\"role\":\"assistant\",\"content\":\"a\",\"function_call\":{}}"),
         "message 1 has \"function_call\"; use --chat rendered"},
        {"plain", "{\"functions\":[],\"messages\":[" SAY("assistant", "a") "]}", "has \"functions\"; use"},
        {"plain", "{\"chat_template_kwargs\":{\"a\":1},\"messages\":[" SAY("assistant", "a") "]}",
         "has \"chat_template_kwargs\"; use --chat rendered"},
        {"plain", LINE(SAY("user", "a") "," SAY("assistant", "")), "message 2 is an empty assistant turn"},
        {"llama3", LINE(SAY("assistant", " \\n\\u00a0")), "message 1 is an empty assistant turn"},
        {"qwen3", LINE(SAY("assistant", "x</think>y")), "message 1 contains </think>"},
        {"plain", LINE(SAY("user", "a")), "without an assistant turn (messages 1 to 1)"},
        {"plain", LINE(SAY("assistant", "a") "," SAY("system", "b")), "turn (messages 2 to 2)"},
        {"mistral", LINE(SAY("assistant", "a")), "message 1 has the role assistant, but template mistral"},
        {"rendered", "{\"input_ids\":[]}", "has no list \"input_ids\""},
        {"rendered", "{\"input_ids\":[1],\"assistant_masks\":[2]}", "element 0 of \"assistant_masks\""},
        {"rendered", "{\"input_ids\":[1,257],\"assistant_masks\":[1,1]}", "element 1 of \"input_ids\""},
        {"rendered", "{\"input_ids\":[1,2],\"assistant_masks\":[1]}", "has 2 \"input_ids\" but 1"},
        {"rendered", "{\"input_ids\":[1,2],\"assistant_masks\":[0,0]}", "all 0"},
        {"rendered", "{\"input_ids\":[1,2],\"assistant_masks\":[1,0]}", "all 0 after the first token"},
    };
    Tokenizer *tokenizer = open_tokenizer(NULL);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ChatTokens tokens = {0};
        if (encode(cases[i].name, tokenizer, cases[i].line, &tokens)) fail_msg("case %zu: accepted", i);
        if (!strstr(tokens.why, cases[i].why)) fail_msg("case %zu: %s", i, tokens.why);
        chat_tokens_free(&tokens);
    }
    tokenizer_close(tokenizer);
}

static void missing_tokens(void **state) {
    Tokenizer *tokenizer = open_tokenizer(NULL);
    Error err = {0};
    assert_false(chat_check_tokens(chat_template("llama3"), tokenizer, &err));
    assert_non_null(strstr(err.what, "no token <|begin_of_text|>"));
    assert_int_equal(err.code, EXIT_USAGE);
    assert_true(chat_check_tokens(chat_template("plain"), tokenizer, &err));
    assert_null(chat_template(CHAT_RENDERED));
    tokenizer_close(tokenizer);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(texts_by_hand),
        cmocka_unit_test(a_system_message_starts_a_conversation),
        cmocka_unit_test(weights_choose_the_answers),
        cmocka_unit_test(other_keys_are_ignored),
        cmocka_unit_test(same_as_transformers),
        cmocka_unit_test(rendered_lines),
        cmocka_unit_test(lines_are_refused),
        cmocka_unit_test(missing_tokens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
