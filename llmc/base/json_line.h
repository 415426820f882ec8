// Text that grows, and the JSON lines of --log-jsonl built in it: one place for their commas,
// escapes and numbers. Used by log.c, which writes them, and by modules that have lines of their
// own: probe.c, memory.c, sentry.c, replicas.c, sample.c.
//
//     Text json = json_begin("spike");
//     json_integer(&json, "iteration", 5);
//     log_json(log, &json);
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// Begins as {0}; data is a C string, NULL before the first text_add, and belongs to the text.
typedef struct Text {
    char *data;
    size_t length, capacity;
} Text;

// printf to the end. Memory that runs out ends the process (xrealloc).
void text_add(Text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));
void text_free(Text *text);
// "nan", "inf" or "-inf" for a value that is not finite; printf would show a NaN's sign, which
// means nothing.
const char *non_finite(double value);

// A line {"kind":"<kind>" that the functions below add members to, and log_json (log.h) closes.
Text json_begin(const char *kind);
// ,"name": without the comma where an object or array begins. Its value is to follow: json_value,
// or text_add of what is JSON already.
void json_name(Text *json, const char *name);
// A bare value: the shortest decimal form that reads back as the same bits; null when it is not
// finite.
void json_value(Text *json, double value);
// Members. json_number: json_value, and the word of what is not finite in another member
// "<name>_text". json_text escapes (json_escape in json.h).
void json_number(Text *json, const char *name, double value);
void json_integer(Text *json, const char *name, int64_t value);
void json_truth(Text *json, const char *name, bool value);
void json_text(Text *json, const char *name, const char *value);
// A member that is an object: what is added between the two are its members.
void json_open(Text *json, const char *name);
void json_close(Text *json);

LLMC_END
