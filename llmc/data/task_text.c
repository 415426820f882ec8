// Reads the texts of --eval-text, and cuts their tokens into overlapping windows as Megatron-LM's
// tasks/zeroshot_gpt does. See tasks.h.
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/durable.h"
#include "llmc/base/utf8.h"
#include "llmc/data/detokenize.h"
#include "llmc/data/tasks.h"

// Returns the number of words, separated by single spaces: a line end between two spaces is a word
// of WikiText.
static int64_t count_words(const char *text, size_t bytes) {
    size_t start = utf8_leading_space(text, bytes), end = utf8_stripped(text, bytes);
    int64_t words = start < end;
    for (size_t i = start; i < end; i++) words += text[i] == ' ';
    return words;
}

static bool check_utf8(const char *path, const char *text, size_t bytes, Error *err) {
    size_t valid = utf8_valid_prefix(text, bytes);
    if (valid == bytes) return true;
    long long line = 1;
    for (size_t i = 0; i < valid; i++) line += text[i] == '\n';
    return data_error(err, "%s line %lld: byte %zu of the file, 0x%02X, is not valid UTF-8; convert the text",
                      path, line, valid + 1, (unsigned)(uint8_t)text[valid]);
}

// Names the task after the file, without its folder.
static bool name_task(const TaskSet *set, const char *path, Task *task, Error *err) {
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    bool good = strlen(name) < sizeof task->name;
    for (const char *c = name; *c; c++) good = good && (uint8_t)*c >= 0x20 && *c != 0x7F;
    if (!good) {
        return data_error(err, "the file name of %s has more than %d bytes or control characters; rename it",
                          path, TASK_NAME_BYTES - 1);
    }
    snprintf(task->name, sizeof task->name, "%s", name);
    for (int64_t i = 0; i < set->tasks; i++) {
        if (set->task[i].form == TASK_TEXT && !strcmp(set->task[i].name, name))
            return data_error(err, "--eval-text has two files named %s; rename one of them", name);
    }
    return true;
}

// Appends the ids of a text to the set.
static bool append_ids(TaskSet *set, const char *path, const char *text, size_t bytes, TaskEncoding to,
                       Error *err) {
    int count;
    int64_t replaced = 0;
    const int32_t *front = tokenizer_prefix(to.tokenizer, &count);
    for (int i = 0; i < count; i++) token_buffer_append(&set->ids, front[i]);
    Encoder *encoder = encoder_create(to.tokenizer);
    encoder_encode(encoder, text, bytes, &set->ids, &replaced);
    encoder_free(encoder);
    return !replaced || data_error(err, "%s contains text that the tokenizer cannot encode", path);
}

// Appends the windows of ids[first ..]. The last window of a text may be shorter than the others.
static void append_windows(TaskSet *set, int64_t first, TaskEncoding to) {
    Task *task = &set->task[set->tasks - 1];
    int64_t targets = task->tokens - 1, seq_length = to.seq_length;
    for (int64_t start = 0, scored = 0; scored < targets; start += to.stride) {
        int64_t end = start + seq_length < targets ? start + seq_length : targets;
        TaskSample sample = {.first = set->requests, .task = (int32_t)(set->tasks - 1), .choices = 1};
        TaskRequest request = {.first = first + start,
                               .tokens = (int32_t)(end - start + 1),
                               .scored = (int32_t)(end - scored),
                               .characters = 1};
        set->sample = grow_array(set->sample, set->samples, sizeof sample, "windows of --eval-text");
        set->sample[set->samples++] = sample;
        set->request = grow_array(set->request, set->requests, sizeof request, "windows of --eval-text");
        set->request[set->requests++] = request;
        task->samples++;
        scored = end;
    }
}

static bool append_text(TaskSet *set, const char *path, char *text, size_t bytes, TaskEncoding to,
                        Error *err) {
    Task task = {.form = TASK_TEXT};
    int64_t first = set->ids.count;
    if (!name_task(set, path, &task, err) || !check_utf8(path, text, bytes, err)) return false;
    task.words = count_words(text, bytes);
    if (to.wikitext) bytes = detokenize_wikitext(text, bytes);
    if (!append_ids(set, path, text, bytes, to, err)) return false;
    task.tokens = set->ids.count - first;
    if (task.words < 2 || task.tokens < 2) {
        return data_error(err,
                          "%s has %lld words separated by spaces and %lld tokens; use a text with at "
                          "least 2 of each",
                          path, (long long)task.words, (long long)task.tokens);
    }
    set->task = grow_array(set->task, set->tasks, sizeof task, "texts of --eval-text");
    set->task[set->tasks++] = task;
    append_windows(set, first, to);
    return true;
}

bool task_set_read_text(TaskSet *set, const char *path, TaskEncoding encoding, Error *err) {
    assert(encoding.tokenizer && encoding.stride >= 1 && encoding.stride <= encoding.seq_length);
    uint64_t bytes;
    char *text = durable_read_file(path, ENCODER_MAX_BYTES, &bytes, err);
    if (!text) {
        err->code = EXIT_DATA;
        return false;
    }
    bool ok = append_text(set, path, text, (size_t)bytes, encoding, err);
    free(text);
    return ok;
}
