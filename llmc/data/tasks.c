// Reads the files of --eval-tasks. See tasks.h.
#include "llmc/data/tasks.h"

#include <assert.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/durable.h"
#include "llmc/base/json.h"
#include "llmc/base/utf8.h"

// because files are read into memory
#define MAX_FILE_BYTES ((uint64_t)1 << 30)

typedef struct Parser {
    TaskSet *set;
    const char *path;
    int64_t line;  // 1-based
    TaskEncoding to;
    int32_t eod;
    Encoder *encoder;
    TokenBuffer context;  // tokens of the context alone; may be empty
    TokenBuffer tokens;   // tokens of context and continuation
    Error *err;
} Parser;

// Sets the error "<path> line 3: <what>".
static bool refuse(const Parser *r, const char *format, ...) __attribute__((format(printf, 2, 3)));
static bool refuse(const Parser *r, const char *format, ...) {
    char what[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    return data_error(r->err, "%s line %lld: %s; see docs/eval_tasks.md", r->path, (long long)r->line, what);
}

// Appends the tokens of a text.
static bool encode_more(Parser *r, const char *text, size_t bytes, TokenBuffer *tokens, const char *what) {
    int64_t replaced = 0;
    encoder_encode(r->encoder, text, bytes, tokens, &replaced);
    return replaced == 0 || refuse(r, "%s contains text that the tokenizer cannot encode", what);
}

static bool encode(Parser *r, const char *text, size_t bytes, TokenBuffer *tokens, const char *what) {
    tokens->count = 0;
    return encode_more(r, text, bytes, tokens, what);
}

static bool read_context(Parser *r, const char *text) {
    r->context.count = 0;
    if (!*text) return true;
    if (!encode(r, text, utf8_stripped(text, strlen(text)), &r->context, "the context")) return false;
    return r->context.count > 0 || refuse(r, "the context is white space only; make it empty");
}

// Returns the ids before r->tokens, as the harness does: the tokenizer's prefix, unless the tokens
// already start with it. An empty context becomes one id: the first one of the prefix, or else EOD.
static const int32_t *prefix_ids(const Parser *r, int *count) {
    const int32_t *front = tokenizer_prefix(r->to.tokenizer, count);
    if (!r->context.count) {
        if (!*count) front = &r->eod;
        *count = 1;
    }
    size_t bytes = (size_t)*count * sizeof *front;
    if (bytes && r->tokens.count >= *count && !memcmp(r->tokens.ids, front, bytes)) *count = 0;
    return front;
}

// Appends the last ids of `front` and r->tokens that fit the sequence length.
static TaskRequest append_tokens(Parser *r, const int32_t *front, int count) {
    TokenBuffer *ids = &r->set->ids;
    TaskRequest request = {.first = ids->count};
    int64_t most = (int64_t)r->to.seq_length + 1, all = count + r->tokens.count;
    for (int64_t i = all > most ? all - most : 0; i < all; i++)
        token_buffer_append(ids, i < count ? front[i] : r->tokens.ids[i - count]);
    request.tokens = (int32_t)(ids->count - request.first);
    return request;
}

// Appends a request for r->tokens. r->context: the tokens before the continuation, which replace as
// many of r->tokens. what: the name of the continuation `choice`, for messages.
static bool add_tokens(Parser *r, const char *choice, const char *what) {
    TaskSet *set = r->set;
    const int64_t context_tokens = r->context.count;
    int count;
    const int32_t *front = prefix_ids(r, &count);
    // without a context, the first token serves as context
    int64_t scored = context_tokens ? r->tokens.count - context_tokens : count + r->tokens.count - 1;
    if (scored <= 0) return refuse(r, "%s adds no token to the context", what);
    if (scored > r->to.seq_length) {
        return refuse(r, "%s has %lld tokens, more than --seq-length %d", what, (long long)scored,
                      r->to.seq_length);
    }
    if (context_tokens) memcpy(r->tokens.ids, r->context.ids, (size_t)context_tokens * sizeof(int32_t));
    TaskRequest request = append_tokens(r, front, count);
    request.scored = (int32_t)scored;
    for (; *choice; choice++) request.characters += !utf8_continues(*choice);
    set->request = grow_array(set->request, set->requests, sizeof *set->request,
                              "the samples of --eval-tasks");
    set->request[set->requests++] = request;
    return true;
}

// Appends a request whose continuation is delimiter + choice. number: index of the choice, for
// messages.
static bool add_request(Parser *r, const char *context, const char *delimiter, const char *choice,
                        int number) {
    char what[40];
    snprintf(what, sizeof what, "choice %d", number);
    if (!*choice) return refuse(r, "%s is empty", what);
    char *text = text_format("%s%s%s", context, delimiter, choice);
    bool ok = encode(r, text, strlen(text), &r->tokens, what);
    free(text);
    return ok && add_tokens(r, choice, what);
}

// Returns the string of an item, which must be valid UTF-8 (cJSON does not check). NULL on error.
static const char *text_of(const Parser *r, const cJSON *item, const char *what) {
    if (!cJSON_IsString(item)) {
        refuse(r, "%s is missing or not a string", what);
        return NULL;
    }
    const char *text = item->valuestring;
    size_t bytes = strlen(text);
    if (bytes < ENCODER_MAX_BYTES / 4 && utf8_valid_prefix(text, bytes) == bytes) return text;
    refuse(r, "%s is not valid UTF-8 or too long", what);
    return NULL;
}

static const char *member(const Parser *r, const cJSON *object, const char *name) {
    char what[40];
    snprintf(what, sizeof what, "\"%s\"", name);
    return text_of(r, cJSON_GetObjectItemCaseSensitive(object, name), what);
}

static bool add_task(Parser *r, const char *name, TaskForm form) {
    TaskSet *set = r->set;
    Task task = {.form = form};
    bool printable = *name != 0;
    for (const char *c = name; *c; c++) printable = printable && (uint8_t)*c >= 0x20 && *c != 0x7F;
    if (!printable || strlen(name) >= sizeof task.name) {
        return refuse(r, "\"task\" must have 1 to %d bytes and no control characters", TASK_NAME_BYTES - 1);
    }
    if (set->tasks == MAX_TASKS) return refuse(r, "there are more than %d tasks", MAX_TASKS);
    snprintf(task.name, sizeof task.name, "%s", name);
    set->task = grow_array(set->task, set->tasks, sizeof task, "the samples of --eval-tasks");
    set->task[set->tasks++] = task;
    return true;
}

static bool find_task(Parser *r, const char *name, TaskForm form, int32_t *task) {
    TaskSet *set = r->set;
    int64_t i = set->tasks - 1;  // usually the same task as on the previous line
    while (i >= 0 && strcmp(set->task[i].name, name) != 0) i--;
    if (i < 0 && !add_task(r, name, form)) return false;
    *task = (int32_t)(i < 0 ? set->tasks - 1 : i);
    if (set->task[*task].form == (int32_t)form) return true;
    return refuse(r, "other lines of task %s have %s", name,
                  form == TASK_CHOICES ? "a \"continuation\"" : "\"choices\"");
}

static bool read_choices(Parser *r, const cJSON *object, const char *context, TaskSample *sample) {
    const cJSON *choices = cJSON_GetObjectItemCaseSensitive(object, "choices"), *choice;
    const cJSON *between = cJSON_GetObjectItemCaseSensitive(object, "delimiter");
    const char *delimiter = between ? text_of(r, between, "\"delimiter\"") : " ";
    int64_t gold;
    int count = cJSON_IsArray(choices) ? cJSON_GetArraySize(choices) : 0;
    if (!delimiter) return false;
    if (count < 1 || count > MAX_CHOICES)
        return refuse(r, "\"choices\" must be a list of 1 to %d strings", MAX_CHOICES);
    if (!json_member_int64(object, "gold", 0, count - 1, &gold))
        return refuse(r, "\"gold\" must be the index of the correct choice, 0 to %d", count - 1);
    cJSON_ArrayForEach(choice, choices) {
        char what[40];
        snprintf(what, sizeof what, "choice %d", sample->choices);
        const char *text = text_of(r, choice, what);
        if (!text || !add_request(r, context, delimiter, text, sample->choices)) return false;
        sample->choices++;
    }
    sample->right = (int32_t)gold;
    return true;
}

static bool read_continuation(Parser *r, const cJSON *object, const char *context, TaskSample *sample) {
    const char *text = member(r, object, "continuation");
    sample->choices = 1;
    return text && add_request(r, context, "", text, 0);
}

static void copy_tokens(TokenBuffer *to, const TokenBuffer *from, int64_t count) {
    to->count = 0;
    for (int64_t i = 0; i < count; i++) token_buffer_append(to, from->ids[i]);
}

// Splits a text at its last word and tokenizes the two parts alone, as with Megatron-LM's
// --strict-lambada.
static bool read_last_word(Parser *r, const char *text, size_t end, size_t word) {
    size_t start = utf8_leading_space(text, word);
    char *last = text_format(" %.*s", (int)(end - word), text + word);
    bool ok = encode(r, text + start, utf8_stripped(text + start, word - start), &r->context, "\"text\"");
    copy_tokens(&r->tokens, &r->context, r->context.count);
    ok = ok && encode_more(r, last, strlen(last), &r->tokens, "\"text\"") && add_tokens(r, last, "\"text\"");
    free(last);
    return ok;
}

// The continuation is the last word or, without --strict-lambada, the last token of the text.
static bool read_cloze(Parser *r, const char *text) {
    size_t end = utf8_stripped(text, strlen(text)), word = end;
    if (!end) return refuse(r, "\"text\" has no words");
    for (size_t at = 0; at < end;) {
        at += utf8_leading_space(text + at, end - at);
        word = at;
        for (uint32_t c = 0; at < end && !utf8_leading_space(text + at, end - at);)
            at += utf8_next(text + at, end - at, &c);
    }
    if (r->to.strict_lambada) return read_last_word(r, text, end, word);
    if (!encode(r, text, strlen(text), &r->tokens, "\"text\"")) return false;
    copy_tokens(&r->context, &r->tokens, r->tokens.count - 1);
    return add_tokens(r, text + word, "\"text\"");
}

// Returns true for a line {"text": ...}, whose last word is the continuation.
static bool is_cloze(const cJSON *object) {
    return cJSON_GetObjectItemCaseSensitive(object, "text") &&
           !cJSON_GetObjectItemCaseSensitive(object, "context") &&
           !cJSON_GetObjectItemCaseSensitive(object, "choices") &&
           !cJSON_GetObjectItemCaseSensitive(object, "continuation");
}

static bool read_form(Parser *r, const cJSON *object, TaskSample *sample) {
    bool choices = cJSON_GetObjectItemCaseSensitive(object, "choices") != NULL;
    bool one = cJSON_GetObjectItemCaseSensitive(object, "continuation") != NULL, cloze = is_cloze(object);
    bool named = !cloze || cJSON_GetObjectItemCaseSensitive(object, "task");
    const char *name = named ? member(r, object, "task") : "lambada";
    const char *text = name ? member(r, object, cloze ? "text" : "context") : NULL;
    if (!text) return false;
    if (!cloze && choices == one) return refuse(r, "set either \"choices\" or \"continuation\"");
    if (!find_task(r, name, choices ? TASK_CHOICES : TASK_CONTINUATION, &sample->task)) return false;
    sample->choices = cloze;
    if (cloze) return read_cloze(r, text);
    return read_context(r, text) && (choices ? read_choices : read_continuation)(r, object, text, sample);
}

static bool read_sample(Parser *r, const cJSON *object) {
    TaskSet *set = r->set;
    TaskSample sample = {.first = set->requests};
    if (!read_form(r, object, &sample)) return false;
    set->sample = grow_array(set->sample, set->samples, sizeof *set->sample, "the samples of --eval-tasks");
    set->sample[set->samples++] = sample;
    set->task[sample.task].samples++;
    return true;
}

static bool read_line(Parser *r, const char *line, size_t bytes) {
    r->line++;
    if (strspn(line, " \t\r") >= bytes) return true;
    if (json_has_zero(line, bytes)) return refuse(r, "it contains U+0000");
    cJSON *object = json_parse_object(line, bytes);
    if (!object) return refuse(r, "it is not a JSON object");
    bool ok = read_sample(r, object);
    cJSON_Delete(object);
    return ok;
}

bool task_set_read(TaskSet *set, const char *path, TaskEncoding encoding, Error *err) {
    assert(encoding.tokenizer && encoding.seq_length >= 1);
    Parser r = {.set = set, .path = path, .to = encoding, .err = err};
    uint64_t bytes, before = (uint64_t)set->samples;
    char *text = durable_read_file(path, MAX_FILE_BYTES, &bytes, err);
    if (!text) {
        err->code = EXIT_DATA;
        return false;
    }
    r.eod = tokenizer_eod(encoding.tokenizer);
    r.encoder = encoder_create(encoding.tokenizer);
    bool ok = true;
    for (const char *at = text, *end = text + bytes; ok && at < end;) {
        const char *line_end = (const char *)memchr(at, '\n', (size_t)(end - at));
        if (!line_end) line_end = end;
        ok = read_line(&r, at, (size_t)(line_end - at));
        at = line_end + 1;
    }
    if (ok && (uint64_t)set->samples == before)
        ok = data_error(err, "%s has no samples; see docs/eval_tasks.md", path);
    token_buffer_free(&r.context);
    token_buffer_free(&r.tokens);
    encoder_free(r.encoder);
    free(text);
    return ok;
}

void task_set_free(TaskSet *set) {
    free(set->task);
    free(set->sample);
    free(set->request);
    token_buffer_free(&set->ids);
    *set = (TaskSet){0};
}
