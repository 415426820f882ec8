// Samples of --eval-tasks: a context and continuations whose likelihoods are compared. Reads files
// of JSON lines and encodes them as EleutherAI's lm-evaluation-harness does. Called by
// llmc/run/eval_tasks.c. docs/eval_tasks.md has the form.
#pragma once
#include "llmc/data/tokenizer.h"
LLMC_BEGIN

enum { TASK_NAME_BYTES = 64, MAX_TASKS = 1000, MAX_CHOICES = 1000 };

typedef enum TaskForm {
    TASK_CHOICES,      // the likeliest choice should be the right one: HellaSwag, ARC
    TASK_CONTINUATION  // one continuation, each token of which should be the likeliest: LAMBADA
} TaskForm;

// All samples of a name, whichever lines and files they stand in.
typedef struct Task {
    char name[TASK_NAME_BYTES];
    int32_t form;  // TaskForm
    int32_t samples;
} Task;

// A line: requests first .. first + choices - 1.
typedef struct TaskSample {
    int64_t first;
    int32_t task, choices;
    int32_t right;  // of the choices, from 0
} TaskSample;

// A context and one continuation as ids[first .. first + tokens - 1], of which the last `scored`
// are the continuation. tokens - 1 is at most the sequence length: the last id is only predicted.
typedef struct TaskRequest {
    int64_t first;
    int32_t tokens, scored;
    int32_t characters;  // of the choice: acc_norm divides by them
} TaskRequest;

// Plain arrays, so that ranks can send them to each other.
typedef struct TaskSet {
    Task *task;
    int64_t tasks;
    TaskSample *sample;
    int64_t samples;  // in the files' order
    TaskRequest *request;
    int64_t requests;  // likewise
    TokenBuffer ids;
} TaskSet;

// How texts become requests.
typedef struct TaskEncoding {
    const Tokenizer *tokenizer;
    int seq_length;
} TaskEncoding;

// Appends the samples of a file to a set, which begins as {0}. A context is encoded alone, and
// together with its continuation, which is what stands there behind as many tokens as the context
// has. White space at the context's end belongs to the continuation. A tokenizer's prefix, such as
// Llama 3's, stands before them. What is too long loses tokens at its front. An empty context is
// the prefix, or the end of a document.
// Error (EXIT_DATA), naming file and line: no such file; a line that is no JSON object, lacks a
// member or has one of another kind; no choices, an empty one, more than MAX_CHOICES; a right
// choice that is not there; a context of white space alone; a continuation without a token of its
// own, or longer than the sequence length; text that cannot be encoded; no samples.
bool task_set_read(TaskSet *set, const char *path, TaskEncoding encoding, Error *err);
void task_set_free(TaskSet *set);

LLMC_END
