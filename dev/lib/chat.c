// Chat templates and their application: see chat.h.
#include "dev/lib/chat.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/json.h"
#include "llmc/base/utf8.h"

// --- The templates -------------------------------------------------------------------------------

#define CHATML \
    .system = {"<|im_start|>system\n", "<|im_end|>\n"}, .user = {"<|im_start|>user\n", "<|im_end|>\n"}, \
    .assistant = {"<|im_start|>assistant\n", "\n"}, .stop = "<|im_end|>", \
    .tokens = {"<|im_start|>", "<|im_end|>"}
#define LLAMA3 \
    .begin = "<|begin_of_text|>", .user = {"<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"}, \
    .assistant = {"<|start_header_id|>assistant<|end_header_id|>\n\n", ""}, .stop = "<|eot_id|>", \
    .trims_all = true, \
    .tokens = {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}

static const ChatTemplate templates[] = {
    {.name = "chatml", CHATML},
    {.name = "qwen2.5",
     .default_system = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
     CHATML},
    // Without reasoning. The original drops reasoning from all turns but the last.
    {.name = "qwen3", .final = "<think>\n\n</think>\n\n", .refused = "</think>", CHATML},
    {.name = "llama3", .system = {"<|start_header_id|>system<|end_header_id|>\n\n", "<|eot_id|>"}, LLAMA3},
    {.name = "llama3.1",
     .default_system = "",
     .system = {"<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
                "Today Date: 26 Jul 2024\n\n",
                "<|eot_id|>"},
     LLAMA3},
    // Tokenizer V3 (7B v0.3, 8x22B), V3-Tekken (Nemo), and V7-Tekken (Small 3), which has a system
    // turn. The original of Small 3 adds a system message with the current date if there is none.
    {.name = "mistral",
     .begin = "<s>",
     .user = {"[INST] ", "[/INST]"},
     .assistant = {"", ""},
     .opening = " ",
     .stop = "</s>",
     .trims_assistant = true,
     .alternates = true,
     .tokens = {"<s>", "[INST]", "[/INST]", "</s>"}},
    {.name = "mistral-nemo",
     .begin = "<s>",
     .user = {"[INST]", "[/INST]"},
     .assistant = {"", ""},
     .stop = "</s>",
     .alternates = true,
     .tokens = {"<s>", "[INST]", "[/INST]", "</s>"}},
    {.name = "mistral-v7",
     .begin = "<s>",
     .system = {"[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"},
     .user = {"[INST]", "[/INST]"},
     .assistant = {"", ""},
     .stop = "</s>",
     .alternates = true,
     .tokens = {"<s>", "[INST]", "[/INST]", "</s>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"}},
    // For tokenizers without chat tokens, such as GPT-2's.
    {.name = "plain",
     .system = {"System: ", "\n"},
     .user = {"User: ", "\n"},
     .assistant = {"Assistant:", ""},
     .opening = " "},
};

const ChatTemplate *chat_template(const char *name) {
    for (size_t i = 0; i < sizeof templates / sizeof *templates; i++) {
        if (!strcmp(templates[i].name, name)) return &templates[i];
    }
    return NULL;
}

bool chat_check_tokens(const ChatTemplate *t, const Tokenizer *tokenizer, Error *err) {
    Encoder *encoder = encoder_create(tokenizer);
    const char *missing = NULL;
    for (int i = 0; i < CHAT_TOKENS && t->tokens[i] && !missing; i++) {
        TokenBuffer ids = {0};
        int64_t replaced = 0;
        encoder_encode_more(encoder, t->tokens[i], strlen(t->tokens[i]), &ids, &replaced);
        if (ids.count != 1) missing = t->tokens[i];
        token_buffer_free(&ids);
    }
    encoder_free(encoder);
    return !missing ||
           usage_error(err,
                       "--chat %s: the tokenizer has no token %s; use the tokenizer of a model with this "
                       "chat template, or another template (plain needs no tokens)",
                       t->name, missing);
}

// --- Applying a template -------------------------------------------------------------------------

static bool failed(ChatTokens *tokens, const char *format, ...) __attribute__((format(printf, 2, 3)));
static bool failed(ChatTokens *tokens, const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(tokens->why, sizeof tokens->why, format, values);
    va_end(values);
    return false;
}

void chat_tokens_free(ChatTokens *tokens) {
    token_buffer_free(&tokens->ids);
    token_buffer_free(&tokens->mask);
    token_buffer_free(&tokens->lengths);
}

// One line while it is encoded. The text that has the same mask value is collected, then encoded.
typedef struct Writer {
    const ChatTemplate *t;
    const Tokenizer *tokenizer;
    Encoder *encoder;
    ChatTokens *out;
    char *text;
    size_t bytes, capacity;
    int64_t start;  // first id of the current conversation
} Writer;

static void add(Writer *w, const char *text, size_t bytes) {
    if (w->capacity - w->bytes < bytes) {
        w->capacity = 2 * (w->capacity + bytes);
        w->text = xrealloc(w->text, w->capacity, "a conversation");
    }
    memcpy(w->text + w->bytes, text, bytes);
    w->bytes += bytes;
}

static void add_text(Writer *w, const char *text) {
    if (text) add(w, text, strlen(text));
}

static void fill_mask(ChatTokens *out, int mask) {
    while (out->mask.count < out->ids.count) token_buffer_append(&out->mask, mask);
}

// Encodes the collected text. mask: whether the loss counts it.
static void flush(Writer *w, int mask) {
    ChatTokens *out = w->out;
    bool first = out->ids.count == w->start;
    if (w->bytes && first) encoder_encode(w->encoder, w->text, w->bytes, &out->ids, &out->replaced);
    else if (w->bytes) encoder_encode_more(w->encoder, w->text, w->bytes, &out->ids, &out->replaced);
    w->bytes = 0;
    fill_mask(out, mask);
}

// Moves *text and returns the length without white space at both ends.
static size_t trim(const char **text, size_t bytes) {
    size_t leading = utf8_leading_space(*text, bytes);
    *text += leading;
    return utf8_stripped(*text, bytes - leading);
}

typedef enum Role { ROLE_SYSTEM, ROLE_USER, ROLE_ASSISTANT, ROLES } Role;
static const char *const role_names[ROLES] = {"system", "user", "assistant"};

typedef struct Message {
    Role role;
    const char *text;
    size_t bytes;
    int mask;  // of an assistant turn: whether the loss counts it
} Message;

// Returns the first of the names that the object has with a value other than null, or NULL.
static const char *first_member(const cJSON *object, const char *const *names) {
    for (; *names; names++) {
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, *names);
        if (item && !cJSON_IsNull(item)) return *names;
    }
    return NULL;
}

// Refuses keys that change what other programs render or train on. All others are ignored.
static bool check_keys(const Writer *w, const cJSON *item, int number) {
    static const char *const rendered[] = {"tool_calls", "function_call", "reasoning_content",
                                           "reasoning",  "thinking",      NULL},
                             *const masks[] = {"train", "training", "training_detail", "loss", "loss_scale",
                                               "mask",  NULL};
    const char *key = first_member(item, rendered), *mask = first_member(item, masks);
    if (key) return failed(w->out, "message %d has \"%s\"; use --chat rendered for it", number, key);
    if (!mask) return true;
    return failed(w->out, "message %d has \"%s\"; write \"weight\": 0 or 1 instead, or remove it", number,
                  mask);
}

// Reads the "weight" of a message as OpenAI defines it: 0 masks an assistant turn.
static bool read_weight(const Writer *w, const cJSON *item, int number, Message *m) {
    const cJSON *weight = cJSON_GetObjectItemCaseSensitive(item, "weight");
    int64_t value = m->role == ROLE_ASSISTANT;
    if (weight && !cJSON_IsNull(weight) && !json_int64(weight, 0, 1, &value)) {
        char *text = cJSON_PrintUnformatted(weight);
        failed(w->out, "message %d has the \"weight\" %.40s; use 0 or 1", number, text ? text : "");
        cJSON_free(text);
        return false;
    }
    m->mask = (int)value;
    return !m->mask || m->role == ROLE_ASSISTANT ||
           failed(w->out,
                  "message %d has the \"weight\" 1 and the role %s; only an assistant turn may have it",
                  number, role_names[m->role]);
}

// Reads message `number` (from 1) and checks it, apart from its place in the conversation.
static bool read_message(const Writer *w, const cJSON *item, int number, Message *m) {
    const char *role = json_member_string(item, "role"), *text = json_member_string(item, "content");
    if (!cJSON_IsObject(item) || !role) {
        return failed(w->out, "message %d has no \"role\"; write {\"role\": ..., \"content\": ...}", number);
    }
    for (m->role = 0; m->role < ROLES && strcmp(role, role_names[m->role]);) m->role++;
    bool known = m->role < ROLES && (m->role != ROLE_SYSTEM || w->t->system.before);
    if (!known) {
        return failed(w->out,
                      "message %d has the role \"%.40s\", which template %s lacks; use %suser and "
                      "assistant, or --chat rendered",
                      number, role, w->t->name, w->t->system.before ? "system, " : "");
    }
    *m = (Message){.role = m->role, .text = text, .bytes = text ? strlen(text) : 0};
    if (!check_keys(w, item, number) || !read_weight(w, item, number, m)) return false;
    if (!text) return failed(w->out, "message %d has a \"content\" that is not a string", number);
    bool assistant = m->role == ROLE_ASSISTANT;
    if (w->t->trims_all || (assistant && w->t->trims_assistant)) m->bytes = trim(&m->text, m->bytes);
    if (assistant && !m->bytes) {
        return failed(w->out, "message %d is an empty assistant turn; remove it", number);
    }
    if (assistant && w->t->refused && strstr(text, w->t->refused)) {
        return failed(w->out, "message %d contains %s, which template %s rewrites; use --chat rendered",
                      number, w->t->refused, w->t->name);
    }
    return true;
}

static void add_turn(Writer *w, ChatTurn turn, const char *text, size_t bytes) {
    add_text(w, turn.before);
    add(w, text, bytes);
    add_text(w, turn.after);
}

static void add_assistant(Writer *w, const Message *m, bool final) {
    const ChatTemplate *t = w->t;
    add_text(w, t->assistant.before);
    flush(w, 0);
    size_t newlines = 0;  // at the start of the content
    if (final && t->final) {
        while (newlines < m->bytes && m->text[newlines] == '\n') newlines++;
    }
    add_text(w, final && t->final ? t->final : t->opening);
    add(w, m->text + newlines, m->bytes - newlines);
    add_text(w, t->stop);
    flush(w, m->mask);
    if (!t->stop) token_buffer_append(&w->out->ids, tokenizer_eod(w->tokenizer));
    fill_mask(w->out, m->mask);
    add_text(w, t->assistant.after);
}

// Appends the messages [first, end), which are one conversation.
static bool add_conversation(Writer *w, const Message *messages, int first, int end) {
    const ChatTemplate *t = w->t;
    bool user = false, assistant = false, trains = false;
    w->start = w->out->ids.count;
    add_text(w, t->begin);
    if (messages[first].role != ROLE_SYSTEM && t->default_system) {
        add_turn(w, t->system, t->default_system, strlen(t->default_system));
    }
    bool has_system = messages[first].role == ROLE_SYSTEM;
    for (int i = first; i < end; i++) {
        const Message *m = &messages[i];
        Role expected = (i - first - has_system) % 2 == 0 ? ROLE_USER : ROLE_ASSISTANT;
        if (t->alternates && m->role != ROLE_SYSTEM && m->role != expected) {
            return failed(w->out,
                          "message %d has the role %s, but template %s needs user and assistant in "
                          "turn, from user on",
                          i + 1, role_names[m->role], t->name);
        }
        if (m->role == ROLE_ASSISTANT) add_assistant(w, m, user && i + 1 == end);
        else add_turn(w, m->role == ROLE_USER ? t->user : t->system, m->text, m->bytes);
        user |= m->role == ROLE_USER;
        assistant |= m->role == ROLE_ASSISTANT;
        trains |= m->mask;
    }
    if (!assistant) {
        return failed(w->out, "has a conversation without an assistant turn (messages %d to %d); remove it",
                      first + 1, end);
    }
    if (!trains) {
        return failed(w->out,
                      "has a conversation without loss, because all its assistant turns have weight 0 "
                      "(messages %d to %d); remove it",
                      first + 1, end);
    }
    flush(w, 0);
    token_buffer_append(&w->out->lengths, (int32_t)(w->out->ids.count - w->start));
    return true;
}

static bool add_messages(Writer *w, const cJSON *list, Message *messages) {
    int count = 0, first = 0;
    const cJSON *item;
    cJSON_ArrayForEach(item, list) {
        if (!read_message(w, item, count + 1, &messages[count])) return false;
        count++;
    }
    for (int i = 1; i <= count; i++) {
        if (i < count && messages[i].role != ROLE_SYSTEM) continue;
        if (!add_conversation(w, messages, first, i)) return false;
        first = i;
    }
    return true;
}

bool chat_encode(const ChatTemplate *t, const Tokenizer *tokenizer, Encoder *encoder, const char *key,
                 const char *line, size_t bytes, ChatTokens *tokens) {
    cJSON *object = json_parse_object(line, bytes);
    if (!object) return failed(tokens, "is not a JSON object; write {\"%s\": [...]} on one line", key);
    static const char *const rendered[] = {"tools", "functions", "chat_template_kwargs", NULL};
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(object, key);
    const char *other = first_member(object, rendered);
    bool ok = cJSON_IsArray(list) && list->child;
    if (!ok) failed(tokens, "has no \"%s\"; give it a list of {\"role\": ..., \"content\": ...}", key);
    if (ok && other) ok = failed(tokens, "has \"%s\"; use --chat rendered for it", other);
    if (ok) {
        Writer w = {.t = t, .tokenizer = tokenizer, .encoder = encoder, .out = tokens};
        Message *messages = xcalloc((size_t)cJSON_GetArraySize(list), sizeof *messages, "messages");
        ok = add_messages(&w, list, messages);
        free(messages);
        free(w.text);
    }
    cJSON_Delete(object);
    return ok;
}

// --- Rendered lines ------------------------------------------------------------------------------

// Appends a list of integers in [0, limit).
static bool add_integers(ChatTokens *tokens, const cJSON *list, const char *name, int64_t limit,
                         TokenBuffer *out) {
    const cJSON *item;
    int64_t value, place = 0;
    if (!cJSON_IsArray(list) || !list->child) {
        return failed(tokens, "has no list \"%s\"; see apply_chat_template of transformers", name);
    }
    cJSON_ArrayForEach(item, list) {
        if (!json_int64(item, 0, limit - 1, &value)) {
            return failed(tokens, "has an element %lld of \"%s\" that is not an integer from 0 to %lld",
                          (long long)place, name, (long long)limit - 1);
        }
        token_buffer_append(out, (int32_t)value);
        place++;
    }
    return true;
}

bool chat_read_rendered(const Tokenizer *tokenizer, const char *line, size_t bytes, ChatTokens *tokens) {
    cJSON *object = json_parse_object(line, bytes);
    if (!object) return failed(tokens, "is not a JSON object with \"input_ids\" and \"assistant_masks\"");
    const cJSON *ids = cJSON_GetObjectItemCaseSensitive(object, "input_ids"),
                *mask = cJSON_GetObjectItemCaseSensitive(object, "assistant_masks");
    int64_t start = tokens->ids.count, counted = 0;
    bool ok = add_integers(tokens, ids, "input_ids", tokenizer_vocab_size(tokenizer), &tokens->ids) &&
              add_integers(tokens, mask, "assistant_masks", 2, &tokens->mask);
    cJSON_Delete(object);
    if (!ok) return false;
    int64_t length = tokens->ids.count - start, masks = tokens->mask.count - start;
    if (length != masks) {
        return failed(tokens, "has %lld \"input_ids\" but %lld \"assistant_masks\"; write one for each",
                      (long long)length, (long long)masks);
    }
    // Token 0 has no prediction, so the loss never counts it.
    for (int64_t i = start + 1; i < tokens->mask.count; i++) counted += tokens->mask.ids[i];
    if (!counted) {
        return failed(tokens,
                      "has \"assistant_masks\" that are all 0 after the first token; its template may "
                      "lack {%% generation %%}");
    }
    token_buffer_append(&tokens->lengths, (int32_t)length);
    return true;
}
