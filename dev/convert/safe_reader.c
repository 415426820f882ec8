// Reads safetensors files written by other programs. See safe_reader.h. The format is described in
// llmc/checkpoint/safetensors.c.
#include "dev/convert/safe_reader.h"

#include <assert.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/base/durable.h"
#include "llmc/base/json.h"
#include "llmc/base/numerics.h"

enum { LENGTH_BYTES = 8 };

static bool damaged(Error *err, const char *path, const char *fault) {
    return ckpt_error(err, "%s cannot be read: %s; save or download it again", path, fault);
}

int safe_float_bytes(const char *dtype) {
    if (strcmp(dtype, "F32") == 0) return 4;
    return strcmp(dtype, "BF16") == 0 || strcmp(dtype, "F16") == 0 ? 2 : 0;
}

// --- Header --------------------------------------------------------------------------------------

static const char *parse_shape(const cJSON *shape, SafeEntry *entry) {
    if (!cJSON_IsArray(shape)) return "a tensor has no shape";
    for (const cJSON *size = shape->child; size; size = size->next) {
        if (entry->dims == SAFE_MOST_DIMS || !json_int64(size, 0, JSON_INT_MAX, &entry->shape[entry->dims]))
            return "a tensor's shape is malformed";
        entry->dims++;
    }
    return NULL;
}

static const char *parse_entry(const cJSON *item, uint64_t data_bytes, SafeEntry *entry) {
    const char *dtype = json_member_string(item, "dtype");
    const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(item, "data_offsets");
    int64_t begin, end;
    entry->name = xstrdup(item->string);
    if (!dtype || strlen(dtype) >= sizeof entry->dtype) return "a tensor's dtype is malformed";
    strcpy(entry->dtype, dtype);
    const char *fault = parse_shape(cJSON_GetObjectItemCaseSensitive(item, "shape"), entry);
    if (fault) return fault;
    if (!cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2 ||
        !json_int64(offsets->child, 0, JSON_INT_MAX, &begin) ||
        !json_int64(offsets->child->next, begin, JSON_INT_MAX, &end))
        return "a tensor's offsets are malformed";
    if ((uint64_t)end > data_bytes) return "it is shorter than its tensors";
    entry->begin = (uint64_t)begin;
    entry->bytes = (uint64_t)(end - begin);
    return NULL;
}

static int by_name(const void *a, const void *b) {
    return strcmp(((const SafeEntry *)a)->name, ((const SafeEntry *)b)->name);
}

static int by_offset(const void *a, const void *b) {
    const SafeEntry *x = (const SafeEntry *)a, *y = (const SafeEntry *)b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

// Sorts the entries by offset. The tensors must fill the data without overlaps and holes.
static const char *check_offsets(SafeFile *file, uint64_t data_bytes) {
    uint64_t end = 0;
    qsort(file->entries, (size_t)file->count, sizeof *file->entries, by_offset);
    for (int i = 0; i < file->count; i++) {
        if (file->entries[i].begin < end) return "tensors overlap";
        if (file->entries[i].begin > end) return "it has bytes that belong to no tensor";
        end += file->entries[i].bytes;
    }
    return end == data_bytes ? NULL : "it has bytes that belong to no tensor";
}

static const char *parse_header(SafeFile *file, const cJSON *header, uint64_t data_bytes) {
    file->entries = xcalloc((size_t)cJSON_GetArraySize(header) + 1, sizeof *file->entries,
                            "a safetensors header");
    for (const cJSON *item = header->child; item; item = item->next) {
        if (strcmp(item->string, "__metadata__") == 0) continue;
        const char *fault = parse_entry(item, data_bytes, &file->entries[file->count++]);
        if (fault) return fault;
    }
    const char *fault = check_offsets(file, data_bytes);
    if (fault) return fault;
    qsort(file->entries, (size_t)file->count, sizeof *file->entries, by_name);
    for (int i = 1; i < file->count; i++) {
        if (by_name(&file->entries[i - 1], &file->entries[i]) == 0) return "two tensors have the same name";
    }
    return NULL;
}

static bool read_header(SafeFile *file, uint64_t file_bytes, Error *err) {
    uint64_t length;
    if (file_bytes < LENGTH_BYTES) return damaged(err, file->path, "it is too short for a safetensors file");
    if (!pread_all(file->fd, &length, LENGTH_BYTES, 0)) return durable_error(err, "read", file->path);
    if (length > SAFE_HEADER_MAX_BYTES)
        return damaged(err, file->path, "it has no safetensors header, or one of more than 16 MiB");
    if (length > file_bytes - LENGTH_BYTES) return damaged(err, file->path, "it is shorter than its header");
    char *text = xmalloc((size_t)length + 1, "a safetensors header");
    bool ok = pread_all(file->fd, text, length, LENGTH_BYTES) || durable_error(err, "read", file->path);
    cJSON *header = ok ? json_parse_object(text, (size_t)length) : NULL;
    file->data = LENGTH_BYTES + length;
    if (ok && !header) ok = damaged(err, file->path, "its header is not a JSON object");
    const char *fault = ok ? parse_header(file, header, file_bytes - file->data) : NULL;
    if (fault) ok = damaged(err, file->path, fault);
    cJSON_Delete(header);
    free(text);
    return ok;
}

// --- File ----------------------------------------------------------------------------------------

bool safe_open_plain(SafeFile *file, const char *path, uint64_t *bytes, Error *err) {
    struct stat status;
    // O_NONBLOCK avoids waiting if the path is a pipe.
    *file = (SafeFile){.path = xstrdup(path), .fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
    bool ok = file->fd >= 0 || durable_error(err, "open", path);
    if (ok && fstat(file->fd, &status) != 0) ok = durable_error(err, "open", path);
    if (ok && !S_ISREG(status.st_mode)) ok = damaged(err, path, "it is not a regular file");
    if (ok) *bytes = (uint64_t)status.st_size;
    else safe_file_close(file);
    return ok;
}

bool safe_file_open(SafeFile *file, const char *path, Error *err) {
    uint64_t bytes;
    if (!safe_open_plain(file, path, &bytes, err)) return false;
    if (read_header(file, bytes, err)) return true;
    safe_file_close(file);
    return false;
}

void safe_file_close(SafeFile *file) {
    for (int i = 0; i < file->count; i++) free(file->entries[i].name);
    free(file->entries);
    if (file->fd >= 0) close(file->fd);
    free(file->path);
    *file = (SafeFile){.fd = -1};
}

const SafeEntry *safe_file_find(const SafeFile *file, const char *name) {
    SafeEntry key = {.name = (char *)name};
    return (const SafeEntry *)bsearch(&key, file->entries, (size_t)file->count, sizeof key, by_name);
}

bool safe_entry_fits(const SafeEntry *entry, int64_t rows, int64_t columns) {
    assert(rows >= 0 && columns >= 0);
    int64_t elements = rows * (columns ? columns : 1);
    bool shaped = entry->dims == (columns ? 2 : 1) && entry->shape[0] == rows &&
                  (!columns || entry->shape[1] == columns);
    int width = safe_float_bytes(entry->dtype);
    return shaped && width && entry->bytes == (uint64_t)elements * (uint64_t)width;
}

// --- Elements ------------------------------------------------------------------------------------

// Converts IEEE half precision. Every half value is representable in fp32.
static float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = h >> 10 & 31u, fraction = h & 1023u;
    if (exponent == 31) return f32_from_bits(sign | 0x7F800000u | fraction << 13);
    if (exponent) return f32_from_bits(sign | (exponent + 112u) << 23 | fraction << 13);
    float small = (float)fraction * 0x1p-24f;
    return sign ? -small : small;
}

bool safe_file_read(const SafeFile *file, const SafeEntry *entry, int64_t first, int64_t count, void *buffer,
                    float *out, Error *err) {
    assert(first >= 0 && count >= 0 && safe_float_bytes(entry->dtype));
    uint64_t width = (uint64_t)safe_float_bytes(entry->dtype);
    uint64_t at = file->data + entry->begin + (uint64_t)first * width;
    if (!pread_all(file->fd, width == 4 ? (void *)out : buffer, (uint64_t)count * width, at))
        return durable_error(err, "read", file->path);
    if (width == 4) return true;
    const uint16_t *narrow = (const uint16_t *)buffer;
    bool half = strcmp(entry->dtype, "F16") == 0;
    for (int64_t i = 0; i < count; i++) out[i] = half ? half_to_float(narrow[i]) : bf16_to_float(narrow[i]);
    return true;
}
