// Extracts one string from a line of JSON: see jsonl.h. A recursive-descent parser that skips all
// other values.
#include "dev/lib/jsonl.h"

#include <stdlib.h>
#include <string.h>

#include "llmc/base/utf8.h"

enum { MAX_NESTING = 1000 };

typedef struct Cursor {
    const char *at, *end;
    const char *why;  // set by the first failing function
    int nesting;
} Cursor;

// A string as it appears in the line, without quotes.
typedef struct RawString {
    const char *begin;
    size_t bytes;
    bool escaped;  // contains a backslash
} RawString;

static bool invalid(Cursor *c, const char *why) {
    c->why = why;
    return false;
}

static void skip_space(Cursor *c) {
    while (c->at < c->end && (*c->at == ' ' || *c->at == '\t' || *c->at == '\n' || *c->at == '\r')) c->at++;
}

// Skips white space and then the given character. Fails with `why` if another one follows.
static bool expect(Cursor *c, char character, const char *why) {
    skip_space(c);
    if (c->at == c->end || *c->at != character) return invalid(c, why);
    c->at++;
    return true;
}

// Returns the next character after white space, or 0 at the end.
static char peek(Cursor *c) {
    skip_space(c);
    return c->at < c->end ? *c->at : 0;
}

// ---- strings ----

static int hex_digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

// Parses the four digits of a \u escape; returns -1 if invalid.
static int32_t hex4(const char *at, const char *end) {
    int32_t value = 0;
    if (end - at < 4) return -1;
    for (int i = 0; i < 4; i++) {
        int digit = hex_digit(at[i]);
        if (digit < 0) return -1;
        value = value << 4 | digit;
    }
    return value;
}

static bool read_escape(Cursor *c) {
    c->at++;
    if (c->at < c->end && *c->at == 'u') {
        if (hex4(c->at + 1, c->end) < 0) return invalid(c, "\\u without four hexadecimal digits");
        c->at += 5;
        return true;
    }
    if (c->at == c->end || !*c->at || !strchr("\"\\/bfnrt", *c->at)) return invalid(c, "unknown escape");
    c->at++;
    return true;
}

static bool read_string(Cursor *c, RawString *string) {
    if (!expect(c, '"', "expected a string in double quotes")) return false;
    string->begin = c->at;
    string->escaped = false;
    for (;;) {
        const char *at = c->at;
        while (at < c->end && *at != '"' && *at != '\\' && (uint8_t)*at >= 0x20) at++;
        c->at = at;
        if (at == c->end) return invalid(c, "unterminated string");
        if (*at == '"') break;
        if (*at != '\\') return invalid(c, "control character in a string");
        string->escaped = true;
        if (!read_escape(c)) return false;
    }
    string->bytes = (size_t)(c->at++ - string->begin);
    return true;
}

static char simple_escape(char c) {
    switch (c) {
        case 'b': return '\b';
        case 'f': return '\f';
        case 'n': return '\n';
        case 'r': return '\r';
        case 't': return '\t';
        default: return c;
    }
}

static bool is_high_surrogate(int32_t unit) { return unit >= 0xD800 && unit < 0xDC00; }
static bool is_low_surrogate(int32_t unit) { return unit >= 0xDC00 && unit < 0xE000; }

// Decodes the \u escape whose 'u' is at `at`, including the second half of a surrogate pair.
// Returns the position after the escape.
static const char *unescape_unicode(const char *at, const char *end, char **out, int64_t *replaced) {
    int32_t unit = hex4(++at, end), low;
    uint32_t code_point = (uint32_t)unit;
    at += 4;
    bool pair = is_high_surrogate(unit) && end - at >= 6 && at[0] == '\\' && at[1] == 'u' &&
                is_low_surrogate(low = hex4(at + 2, end));
    if (pair) {
        code_point = 0x10000u + ((uint32_t)(unit - 0xD800) << 10) + (uint32_t)(low - 0xDC00);
        at += 6;
    } else if (is_high_surrogate(unit) || is_low_surrogate(unit)) {
        code_point = UTF8_REPLACEMENT;
        ++*replaced;
    }
    *out += utf8_write(code_point, *out);
    return at;
}

// Unescapes a validated string into json->buffer. Returns the length, which is at most the raw
// length.
static size_t unescape(JsonText *json, RawString string, int64_t *replaced) {
    if (json->capacity < string.bytes) {
        json->capacity = string.bytes + string.bytes / 2;
        free(json->buffer);
        json->buffer = xmalloc(json->capacity, "a document's text");
    }
    const char *at = string.begin, *end = at + string.bytes;
    char *out = json->buffer;
    while (at < end) {
        const char *escape = memchr(at, '\\', (size_t)(end - at));
        size_t plain = (size_t)((escape ? escape : end) - at);
        memcpy(out, at, plain);
        out += plain;
        at += plain;
        if (!escape) break;
        if (*++at == 'u') {
            at = unescape_unicode(at, end, &out, replaced);
        } else {
            *out++ = simple_escape(*at++);
        }
    }
    return (size_t)(out - json->buffer);
}

// ---- skipped values ----

static bool skip_digits(Cursor *c) {
    const char *begin = c->at;
    while (c->at < c->end && *c->at >= '0' && *c->at <= '9') c->at++;
    return c->at > begin;
}

static bool skip_number(Cursor *c) {
    const char *wrong = "not a JSON value";
    if (*c->at == '-') c->at++;
    bool zero = c->at < c->end && *c->at == '0';
    if (zero) c->at++;
    else if (!skip_digits(c)) return invalid(c, wrong);
    if (c->at < c->end && *c->at == '.') {
        c->at++;
        if (!skip_digits(c)) return invalid(c, wrong);
    }
    if (c->at < c->end && (*c->at == 'e' || *c->at == 'E')) {
        c->at++;
        if (c->at < c->end && (*c->at == '+' || *c->at == '-')) c->at++;
        if (!skip_digits(c)) return invalid(c, wrong);
    }
    return true;
}

// Skips a literal name. The last three are not JSON, but Python's json module reads and writes
// them.
static bool skip_name(Cursor *c) {
    static const char *const names[] = {"true", "false", "null", "NaN", "Infinity", "-Infinity"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        size_t length = strlen(names[i]);
        if ((size_t)(c->end - c->at) < length || memcmp(c->at, names[i], length)) continue;
        c->at += length;
        return true;
    }
    return false;
}

static bool skip_value(Cursor *c);

// Skips the members of an object or array, including the closing bracket.
static bool skip_members(Cursor *c, char close) {
    c->at++;
    if (c->nesting++ == MAX_NESTING) return invalid(c, "nested deeper than 1000 levels");
    for (bool first = true; first ? peek(c) != close : peek(c) == ','; first = false) {
        RawString key;
        if (!first) c->at++;
        if (close == '}' && (!read_string(c, &key) || !expect(c, ':', "expected ':'"))) return false;
        if (!skip_value(c)) return false;
    }
    c->nesting--;
    return expect(c, close, "expected ',' or a closing bracket");
}

static bool skip_value(Cursor *c) {
    RawString string;
    switch (peek(c)) {
        case '"': return read_string(c, &string);
        case '{': return skip_members(c, '}');
        case '[': return skip_members(c, ']');
        case 0: return invalid(c, "missing value");
        default: return skip_name(c) || skip_number(c);
    }
}

// ---- the object ----

static bool is_key(JsonText *json, RawString raw, const char *key) {
    size_t length = strlen(key);
    if (!raw.escaped) return raw.bytes == length && !memcmp(raw.begin, key, length);
    int64_t ignored = 0;
    return unescape(json, raw, &ignored) == length && !memcmp(json->buffer, key, length);
}

// Parses the whole object. *result: whether the key was found. *value: its string.
static bool read_object(JsonText *json, Cursor *c, const char *key, RawString *value, JsonlResult *result) {
    *result = JSONL_NO_KEY;
    if (!expect(c, '{', "expected a JSON object")) return false;
    for (bool first = true; first ? peek(c) != '}' : peek(c) == ','; first = false) {
        RawString name;
        if (!first) c->at++;
        if (!read_string(c, &name) || !expect(c, ':', "expected ':'")) return false;
        bool wanted = is_key(json, name, key);
        if (wanted && peek(c) == '"') {
            if (!read_string(c, value)) return false;
            *result = JSONL_FOUND;
        } else {
            if (!skip_value(c)) return false;
            if (wanted) *result = JSONL_NOT_STRING;
        }
    }
    if (!expect(c, '}', "expected ',' or '}'")) return false;
    skip_space(c);
    return c->at == c->end || invalid(c, "more text after the object");
}

JsonlResult jsonl_find(JsonText *json, const char *line, size_t bytes, const char *key, JsonlText *found) {
    Cursor cursor = {line, line + bytes, "", 0};
    RawString value = {0};
    JsonlResult result;
    *found = (JsonlText){0};
    if (!read_object(json, &cursor, key, &value, &result)) {
        found->column = (size_t)(cursor.at - line) + 1;
        found->why = cursor.why;
        return JSONL_INVALID;
    }
    if (result != JSONL_FOUND) return result;
    found->text = value.begin;
    found->bytes = value.bytes;
    if (value.escaped) {
        found->bytes = unescape(json, value, &found->replaced);
        found->text = json->buffer;
    }
    return JSONL_FOUND;
}

void json_text_free(JsonText *json) {
    free(json->buffer);
    *json = (JsonText){NULL, 0};
}
