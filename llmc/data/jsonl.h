// One string out of one line of JSON. Called by preprocess_data's workers for every document. Its own reader, not cJSON: a text may hold U+0000,
// lone surrogates must be counted, and no tree is built for the fields that nobody asked for.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// One per thread: where unescaped text is put.
typedef struct JsonText {
    char *buffer;
    size_t capacity;
} JsonText;

typedef enum JsonlResult {
    JSONL_FOUND,
    JSONL_INVALID,    // not one JSON object and nothing else
    JSONL_NO_KEY,     // the object lacks the key
    JSONL_NOT_STRING  // the key's value is no string
} JsonlResult;

// Finds the value of `key` in the object that is the whole line (white space around it allowed), at top level only; of a key that occurs twice
// the last value counts. What is accepted is what Python's json.loads accepts (NaN and Infinity too; nesting at most 1000). *text points into the
// line or into json->buffer and lives until the next call; \u escapes that are lone surrogates become U+FFFD and are added to *replaced. UTF-8
// is passed on as it is. For JSONL_INVALID, *column is the 1-based byte where reading stopped and *why says what was wrong.
JsonlResult jsonl_find(JsonText *json, const char *line, size_t bytes, const char *key, const char **text, size_t *text_bytes, int64_t *replaced,
                       size_t *column, const char **why);
void json_text_free(JsonText *json);

LLMC_END
