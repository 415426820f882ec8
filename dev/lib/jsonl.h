// Extracts one string from a line of JSON. Called by the workers of preprocess_data for every
// document. Unlike cJSON, it supports U+0000 in texts, counts lone surrogates and builds no tree.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// Buffer for unescaped text, one per thread.
typedef struct JsonText {
    char *buffer;
    size_t capacity;
} JsonText;

typedef enum JsonlResult {
    JSONL_FOUND,
    JSONL_INVALID,    // the line is not exactly one JSON object
    JSONL_NO_KEY,     // the object lacks the key
    JSONL_NOT_STRING  // the key's value is not a string
} JsonlResult;

// Result of jsonl_find.
typedef struct JsonlText {
    const char *text;  // JSONL_FOUND: UTF-8 text in the line or in json->buffer, valid until the
                       // next call
    size_t bytes;
    int64_t replaced;  // number of lone surrogate \u escapes that were replaced by U+FFFD
    size_t column;     // JSONL_INVALID: 1-based byte position at which parsing failed
    const char *why;   // JSONL_INVALID: reason
} JsonlText;
// Finds the value of `key` at the top level of the object in `line`, like Python's json.loads: NaN
// and Infinity are allowed, and if a key occurs several times, the last one counts. Nesting is
// limited to 1000 levels. Does not validate UTF-8.
JsonlResult jsonl_find(JsonText *json, const char *line, size_t bytes, const char *key, JsonlText *found);
void json_text_free(JsonText *json);

LLMC_END
