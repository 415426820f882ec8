// Strict helpers around cJSON: see json.h.
#include "llmc/base/json.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/durable.h"

static void *checked_malloc(size_t bytes) { return xmalloc(bytes, "JSON"); }

void json_use_checked_memory(void) {
    cJSON_Hooks hooks = {checked_malloc, free};
    cJSON_InitHooks(&hooks);
}

cJSON *json_parse_object(const char *text, size_t bytes) {
    const char *rest = NULL;
    if (json_has_zero(text, bytes)) return NULL;
    cJSON *object = cJSON_ParseWithLengthOpts(text, bytes, &rest, 0);
    if (!object) return NULL;
    while (rest && rest < text + bytes && *rest && strchr(" \n\r\t", *rest)) rest++;
    if (cJSON_IsObject(object) && rest == text + bytes) return object;
    cJSON_Delete(object);
    return NULL;
}

cJSON *json_read_object(const char *path, uint64_t max_bytes, Error *err) {
    uint64_t bytes;
    char *text = durable_read_file(path, max_bytes, &bytes, err);
    if (!text) return NULL;
    cJSON *object = json_parse_object(text, (size_t)bytes);
    free(text);
    if (!object) ckpt_error(err, "%s is not a JSON object; save or download it again", path);
    return object;
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
    assert(min <= max && value);
    if (!cJSON_IsNumber(item)) return false;
    double number = item->valuedouble;
    // Converting a double outside the range of int64_t is undefined. NaN fails the first test.
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

bool json_member_hash(const cJSON *object, const char *name, uint64_t *value) {
    const char *text = json_member_string(object, name);
    if (!text || strlen(text) != 16 || strspn(text, "0123456789abcdef") != 16) return false;
    *value = strtoull(text, NULL, 16);
    return true;
}
