// A file of --eval-tasks or --eval-text with arbitrary bytes, read with the byte tokenizer.
#include "llmc/data/tasks.h"
#include "test/fuzz/fuzz.h"

enum { SEQ = 16 };

static void check_set(const TaskSet *set) {
    int64_t requests = 0, samples = 0, ids = 0;
    for (int64_t i = 0; i < set->tasks; i++) {
        PROMISE(*set->task[i].name && memchr(set->task[i].name, 0, TASK_NAME_BYTES));
        samples += set->task[i].samples;
    }
    for (int64_t i = 0; i < set->samples; i++) {
        const TaskSample *s = &set->sample[i];
        PROMISE(s->task >= 0 && s->task < set->tasks && s->first == requests);
        PROMISE(s->choices >= 1 && s->choices <= MAX_CHOICES && s->right >= 0 && s->right < s->choices);
        requests += s->choices;
    }
    for (int64_t i = 0; i < set->requests; i++) {
        const TaskRequest *r = &set->request[i];
        PROMISE(r->first == ids && r->scored >= 1 && r->scored < r->tokens && r->tokens <= SEQ + 1);
        PROMISE(r->characters >= 1);
        for (int t = 0; t < r->tokens; t++) PROMISE((uint32_t)set->ids.ids[ids + t] <= 256);
        ids += r->tokens;
    }
    PROMISE(samples == set->samples && requests == set->requests && ids == set->ids.count);
}

// Every token but the first must be scored once.
static void check_text(const TaskSet *set) {
    int64_t next = 1;
    PROMISE(set->tasks == 1 && set->samples == set->requests && set->task[0].samples == set->samples);
    for (int64_t i = 0; i < set->requests; i++) {
        const TaskRequest *r = &set->request[i];
        PROMISE(r->first >= 0 && r->first + r->tokens - r->scored == next);
        PROMISE(r->scored >= 1 && r->scored < r->tokens && r->tokens <= SEQ + 1);
        next += r->scored;
    }
    PROMISE(next == set->task[0].tokens && next == set->ids.count && set->task[0].words >= 2);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    TokenizerChoice byte = {.type = TOKENIZER_BYTE};
    Error err = {0};
    TaskSet set = {0};
    Tokenizer *tokenizer = tokenizer_open(&byte, &err);
    PROMISE(tokenizer);
    TaskEncoding encoding = {.tokenizer = tokenizer,
                             .seq_length = SEQ,
                             .strict_lambada = size % 2,
                             .stride = 1 + (int)(size % SEQ),
                             .wikitext = size % 2};
    const char *path = fuzz_file("tasks", data, size);
    if (task_set_read(&set, path, encoding, &err)) check_set(&set);
    else fuzz_check_error(&err);
    task_set_free(&set);
    if (task_set_read_text(&set, path, encoding, &err)) check_text(&set);
    else fuzz_check_error(&err);
    task_set_free(&set);
    tokenizer_close(tokenizer);
    return 0;
}
