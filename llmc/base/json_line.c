// Building JSON lines: see json_line.h.
#include "llmc/base/json_line.h"

#include <assert.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/utf8.h"

// Makes space for `more` bytes and a terminating zero.
static void reserve(Text *text, size_t more) {
    if (text->length + more < text->capacity) return;
    text->capacity = 2 * (text->length + more + 64);
    text->data = xrealloc(text->data, text->capacity, "a log line");
}

void text_add(Text *text, const char *format, ...) {
    va_list args;
    va_start(args, format);
    int n = vsnprintf(NULL, 0, format, args);
    va_end(args);
    assert(n >= 0);
    reserve(text, (size_t)n);
    va_start(args, format);
    text->length += (size_t)vsnprintf(text->data + text->length, (size_t)n + 1, format, args);
    va_end(args);
}

void text_add_bytes(Text *text, const void *bytes, size_t count) {
    assert(text && (bytes || count == 0));
    reserve(text, count);
    if (count) memcpy(text->data + text->length, bytes, count);
    text->length += count;
    text->data[text->length] = 0;
}

void text_add_figure(Text *text, const char *label, const char *format, double value) {
    text_add(text, " %s: ", label);
    if (isfinite(value)) text_add(text, format, value);
    else text_add(text, "%s", non_finite(value));
    text_add(text, " |");
}

void text_add_quoted(Text *out, const char *text) {
    assert(out && text);
    static const char special[] = "\"\\\b\f\n\r\t", letters[] = "\"\\bfnrt";
    size_t bytes = strlen(text);
    int64_t replaced = 0;
    char *valid = xmalloc(3 * bytes + 1, "a JSON string");
    valid[utf8_repair(text, bytes, valid, &replaced)] = 0;
    text_add(out, "\"");
    for (const char *c = valid; *c; c++) {
        const char *found = strchr(special, *c);
        if (found) text_add(out, "\\%c", letters[found - special]);
        else text_add(out, (unsigned char)*c < 0x20 ? "\\u%04x" : "%c", *c);
    }
    text_add(out, "\"");
    free(valid);
}

void text_free(Text *text) {
    free(text->data);
    *text = (Text){0};
}

const char *non_finite(double value) { return isnan(value) ? "nan" : value > 0 ? "inf" : "-inf"; }

Text json_begin(const char *kind) {
    Text json = {0};
    text_add(&json, "{");
    json_text(&json, "kind", kind);
    return json;
}

void json_name(Text *json, const char *name) {
    assert(json && name);
    char last = json->length ? json->data[json->length - 1] : '{';
    text_add(json, "%s\"%s\":", last == '{' || last == '[' ? "" : ",", name);
}

void json_value(Text *json, double value) {
    char form[40] = "null";
    for (int digits = 6; isfinite(value) && digits <= 17; digits++) {
        snprintf(form, sizeof form, "%.*g", digits, value);
        if (strtod(form, NULL) == value) break;
    }
    text_add(json, "%s", form);
}

void json_number(Text *json, const char *name, double value) {
    json_name(json, name);
    json_value(json, value);
    if (!isfinite(value)) text_add(json, ",\"%s_text\":\"%s\"", name, non_finite(value));
}

void json_integer(Text *json, const char *name, int64_t value) {
    json_name(json, name);
    text_add(json, "%lld", (long long)value);
}

void json_bool(Text *json, const char *name, bool value) {
    json_name(json, name);
    text_add(json, "%s", value ? "true" : "false");
}

void json_text(Text *json, const char *name, const char *value) {
    assert(json && name && value);
    json_name(json, name);
    text_add_quoted(json, value);
}

void json_open(Text *json, const char *name) {
    json_name(json, name);
    text_add(json, "{");
}

void json_close(Text *json) { text_add(json, "}"); }
