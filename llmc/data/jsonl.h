// One string out of one line of JSON. Called by preprocess_data's workers for every document. Its
// own reader, not cJSON: a text may hold U+0000, lone surrogates must be counted, and no tree is
// built for other fields.
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

// What jsonl_find found.
typedef struct JsonlText {
    const char *text;  // JSONL_FOUND: bytes of UTF-8, in the line or in json->buffer, until the next call
    size_t bytes;
    int64_t replaced;  // \u escapes that are lone surrogates: they became U+FFFD
    size_t column;     // JSONL_INVALID: the 1-based byte where reading stopped
    const char *why;   // and what was wrong
} JsonlText;
// Finds the value of `key` in the object that is the whole line, at top level only. White space
// around the object is allowed; of a key that occurs twice the last value counts. Accepted is what
// Python's json.loads accepts (NaN and Infinity too), nested at most 1000 deep. UTF-8 is passed on
// as it is.
JsonlResult jsonl_find(JsonText *json, const char *line, size_t bytes, const char *key, JsonlText *found);
void json_text_free(JsonText *json);

LLMC_END
