// Strict helpers around cJSON: see json.h.
#include "llmc/base/json.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static void *checked_malloc(size_t bytes) { return xmalloc(bytes, "JSON"); }

void json_use_checked_memory(void) {
    cJSON_Hooks hooks = {checked_malloc, free};
    cJSON_InitHooks(&hooks);
}

static bool only_space(const char *p, const char *end) {
    while (p < end && (*p == ' ' || *p == '\n' || *p == '\r' || *p == '\t')) p++;
    return p == end;
}

cJSON *json_parse_object(const char *text, size_t bytes) {
    const char *rest = NULL;
    cJSON *object = cJSON_ParseWithLengthOpts(text, bytes, &rest, 0);
    if (!object) return NULL;
    if (cJSON_IsObject(object) && rest && only_space(rest, text + bytes)) return object;
    cJSON_Delete(object);
    return NULL;
}

bool json_has_zero(const char *text, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        if (!text[i]) return true;
        if (text[i] != '\\') continue;
        if (bytes - i >= 6 && memcmp(text + i, "\\u0000", 6) == 0) return true;
        i++;
    }
    return false;
}

bool json_int64(const cJSON *item, int64_t min, int64_t max, int64_t *value) {
    if (!cJSON_IsNumber(item)) return false;
    double number = item->valuedouble;
    // The first test keeps the conversion defined, and fails for NaN.
    if (!(number >= -(double)JSON_INT_MAX && number <= (double)JSON_INT_MAX)) return false;
    int64_t integer = (int64_t)number;
    if ((double)integer != number || integer < min || integer > max) return false;
    *value = integer;
    return true;
}

bool json_member_int64(const cJSON *object, const char *name, int64_t min, int64_t max, int64_t *value) {
    return json_int64(cJSON_GetObjectItemCaseSensitive(object, name), min, max, value);
}

const char *json_member_string(const cJSON *object, const char *name) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
    return cJSON_IsString(item) ? item->valuestring : NULL;
}

void json_write_string(FILE *out, const char *text) {
    fputc('"', out);
    for (const unsigned char *p = (const unsigned char *)text; *p; p++) {
        if (*p == '"' || *p == '\\') {
            fprintf(out, "\\%c", *p);
        } else if (*p < 0x20) {
            fprintf(out, "\\u%04x", *p);
        } else {
            fputc(*p, out);
        }
    }
    fputc('"', out);
}

// Returns the length of the UTF-8 character at c (truncation must not split it), or 0 if invalid.
static int utf8_length(const unsigned char *c) {
    int n = c[0] < 0x80             ? 1
            : (c[0] & 0xe0) == 0xc0 ? 2
            : (c[0] & 0xf0) == 0xe0 ? 3
            : (c[0] & 0xf8) == 0xf0 ? 4
                                    : 0;
    for (int i = 1; i < n; i++) {
        if ((c[i] & 0xc0) != 0x80) return 0;
    }
    return n;
}

void json_escape(char *out, size_t bytes, const char *text) {
    assert(out && bytes >= 3 && text);
    char *end = out + bytes - 2;  // room for the closing quote and the terminator
    *out++ = '"';
    for (const unsigned char *c = (const unsigned char *)text; *c; c++) {
        char one[8];
        const char *name = strchr("\"\\\b\f\n\r\t", *c);
        if (name) {
            snprintf(one, sizeof one, "\\%c", "\"\\bfnrt"[name - "\"\\\b\f\n\r\t"]);
        } else if (*c < 0x20 || *c == 0x7f) {
            snprintf(one, sizeof one, "\\u%04x", *c);
        } else {
            int n = utf8_length(c);
            snprintf(one, sizeof one, "%.*s", n, (const char *)c);
            if (!n) snprintf(one, sizeof one, "\\ufffd");
            if (n) c += n - 1;
        }
        size_t length = strlen(one);
        if (length > (size_t)(end - out)) break;
        memcpy(out, one, length);
        out += length;
    }
    *out++ = '"';
    *out = 0;
}
