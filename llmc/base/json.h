// Strict helpers around cJSON for JSON that comes from outside: whole-text parsing, integers that
// really are integers, escaped strings. Used by safetensors.c (file headers), manifest.c,
// config_text.c, json_line.c, launch.c and the tools that write or read JSON (dev/data, dev/bench).
#pragma once
#include <cjson/cJSON.h>
#include <stdio.h>

#include "llmc/base/base.h"
LLMC_BEGIN

// JSON numbers are doubles: beyond this magnitude integers are no longer told apart.
#define JSON_INT_MAX ((int64_t)1 << 53)

// From now on cJSON ends the process with one clear line when memory runs out, as xmalloc does;
// else it would call sound text malformed. For main: before any JSON is read.
void json_use_checked_memory(void);
// Parses exactly `bytes` bytes (no terminator needed). NULL unless they are one JSON object, with
// nothing but white space around it.
cJSON *json_parse_object(const char *text, size_t bytes);
// Is there a U+0000, as a byte or an escape? cJSON ends a string there, and so reads another one.
bool json_has_zero(const char *text, size_t bytes);
// Reads an integer in [min, max] (within +-JSON_INT_MAX). False for a missing item, another type, a
// fraction, another range.
bool json_int64(const cJSON *item, int64_t min, int64_t max, int64_t *value);
// Reads member `name` of an object, as json_int64.
bool json_member_int64(const cJSON *object, const char *name, int64_t min, int64_t max, int64_t *value);
// The text of string member `name`, owned by the object, or NULL.
const char *json_member_string(const cJSON *object, const char *name);
// Writes text as a JSON string with its quotes.
void json_write_string(FILE *out, const char *text);

// Escapes text as a JSON string with quotes into out (truncated safely: always terminated, quoted
// and whole characters). bytes >= 3.
void json_escape(char *out, size_t bytes, const char *text);

LLMC_END
