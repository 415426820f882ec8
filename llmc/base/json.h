// Strict helpers around cJSON for untrusted JSON: whole-text parsing, exact integers.
#pragma once
#include <cjson/cJSON.h>

#include "llmc/base/base.h"
LLMC_BEGIN

// JSON numbers are doubles: integers of larger magnitude are not exact.
#define JSON_INT_MAX ((int64_t)1 << 53)

// Makes cJSON end the process with one clear line if out of memory, as xmalloc does; otherwise it
// would report valid text as malformed. Call in main, before any JSON is read.
void json_use_checked_memory(void);
// Parses exactly `bytes` bytes (no terminator needed). Returns NULL unless they are one JSON
// object without U+0000, surrounded only by white space.
cJSON *json_parse_object(const char *text, size_t bytes);
// Reads a file that is a JSON object. Returns NULL with EXIT_CHECKPOINT otherwise.
cJSON *json_read_object(const char *path, uint64_t max_bytes, Error *err);
// Returns true if the text contains U+0000, as a byte or an escape: cJSON would truncate the string
// there.
bool json_has_zero(const char *text, size_t bytes);
// Reads an integer in [min, max] (within +-JSON_INT_MAX). Returns false if it is missing, of
// another type, fractional or out of range.
bool json_int64(const cJSON *item, int64_t min, int64_t max, int64_t *value);
// Reads member `name` of an object like json_int64.
bool json_member_int64(const cJSON *object, const char *name, int64_t min, int64_t max, int64_t *value);
// Returns string member `name`, owned by the object, or NULL.
const char *json_member_string(const cJSON *object, const char *name);
// Reads a member of 16 lowercase hexadecimal digits. Returns false if it is missing or malformed.
bool json_member_hash(const cJSON *object, const char *name, uint64_t *value);

LLMC_END
