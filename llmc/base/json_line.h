// Growing text, and the JSON lines of --log-jsonl built in it.
//
//     Text json = json_begin("spike");
//     json_integer(&json, "iteration", 5);
//     log_json(log, &json);
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// Initialize with {0}. data is a C string owned by the text, NULL before the first text_add.
typedef struct Text {
    char *data;
    size_t length, capacity;
} Text;

// Appends with printf. Ends the process if out of memory (xrealloc).
void text_add(Text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));
// Appends `count` bytes, which may contain zeros, and a terminating zero that is not counted.
void text_add_bytes(Text *text, const void *bytes, size_t count);
// Appends " <label>: <value> |". format: for one double, such as "%.3f". Values that are not finite
// are printed by non_finite instead.
void text_add_figure(Text *text, const char *label, const char *format, double value);
// Appends a quoted JSON string. Invalid UTF-8 is replaced by U+FFFD.
void text_add_quoted(Text *out, const char *text);
void text_free(Text *text);
// Returns "nan", "inf" or "-inf" for a value that is not finite. (printf would print a meaningless
// sign of NaN.)
const char *non_finite(double value);

// Begins a line {"kind":"<kind>". The functions below add members, and log_json (log.h) closes it.
Text json_begin(const char *kind);
// Adds ,"name": (no comma at the start of an object or array). The value must follow: json_value,
// or text_add of JSON text.
void json_name(Text *json, const char *name);
// Adds a value: the shortest decimal form that reads back bit-exactly; null if not finite.
void json_value(Text *json, double value);
// Add members. For a value that is not finite, json_number writes null, and adds a member
// "<name>_text" with "nan", "inf" or "-inf". json_text quotes its value.
void json_number(Text *json, const char *name, double value);
void json_integer(Text *json, const char *name, int64_t value);
void json_bool(Text *json, const char *name, bool value);
void json_text(Text *json, const char *name, const char *value);
// Begin and end an object member.
void json_open(Text *json, const char *name);
void json_close(Text *json);

LLMC_END
