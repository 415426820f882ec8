// Samples of --eval-tasks: a context and continuations whose likelihoods are compared. Reads JSON
// lines files and tokenizes them as EleutherAI's lm-evaluation-harness does. Also the texts of
// --eval-text, as windows (task_text.c). Called by llmc/run/eval_tasks.c. The formats are described
// in docs/eval_tasks.md.
#pragma once
#include "llmc/data/tokenizer.h"
LLMC_BEGIN

enum { TASK_NAME_BYTES = 64, MAX_TASKS = 1000, MAX_CHOICES = 1000 };

typedef enum TaskForm {
    TASK_CHOICES,       // the most likely choice should be the correct one: HellaSwag, ARC
    TASK_CONTINUATION,  // every token of the one continuation should be the most likely one: LAMBADA
    TASK_TEXT           // the loss of all tokens but the first: WikiText
} TaskForm;

// All samples with the same task name, across lines and files, or all windows of a text.
typedef struct Task {
    char name[TASK_NAME_BYTES];
    int32_t form;  // TaskForm
    int32_t samples;
    int64_t tokens;  // of a text
    int64_t words;   // of a text: Megatron-LM's "original tokens", separated by single spaces
} Task;

// One line of a file or one window of a text: requests first .. first + choices - 1.
typedef struct TaskSample {
    int64_t first;
    int32_t task, choices;
    int32_t right;  // index of the correct choice
} TaskSample;

// A context and one continuation: ids[first .. first + tokens - 1], the last `scored` of which are
// the continuation. tokens - 1 is at most the sequence length, because the last id is only a
// target. The windows of a text overlap in `ids`.
typedef struct TaskRequest {
    int64_t first;
    int32_t tokens, scored;
    int32_t characters;  // length of the choice, the divisor of acc_norm
} TaskRequest;

// Flat arrays, so that ranks can exchange them.
typedef struct TaskSet {
    Task *task;
    int64_t tasks;
    TaskSample *sample;
    int64_t samples;  // in file order
    TaskRequest *request;
    int64_t requests;  // in file order
    TokenBuffer ids;
} TaskSet;

// Settings for the tokenization of texts.
typedef struct TaskEncoding {
    const Tokenizer *tokenizer;
    int seq_length;
    bool strict_lambada;  // lines {"text": ...}: score the last word, not only the last token
    int stride;           // texts: distance of windows, 1 .. seq_length
    bool wikitext;        // texts: detokenize_wikitext
} TaskEncoding;

// Appends the samples of a file to a set, which starts as {0}. The context is tokenized alone,
// for its number of tokens, and together with the continuation, which is the rest of these tokens.
// Trailing white space of the context is moved to the continuation. The tokenizer's prefix, such as
// Llama 3's, comes first. Requests that are too long are truncated on the left. An empty context
// becomes the prefix, or else EOD.
// Errors (EXIT_DATA, with file and line): missing file; a line that is not a JSON object, or has a
// missing or mistyped member; no choices, an empty one or more than MAX_CHOICES; a correct choice
// out of range; a context of white space only; a continuation that adds no token or exceeds the
// sequence length; text that cannot be tokenized; no samples.
bool task_set_read(TaskSet *set, const char *path, TaskEncoding encoding, Error *err);
// Appends a text as one task, named after its file, with a sample for each window. The first window
// scores all its targets, the others the last `stride` ones, so that each token but the first is
// scored once. The tokenizer's prefix comes first.
// Errors (EXIT_DATA): missing file; invalid UTF-8; fewer than 2 words or tokens; text that cannot
// be tokenized; two texts with the same file name, or a name that is too long.
bool task_set_read_text(TaskSet *set, const char *path, TaskEncoding encoding, Error *err);
void task_set_free(TaskSet *set);

LLMC_END
