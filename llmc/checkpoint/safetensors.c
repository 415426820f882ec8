// safetensors reader and writer: see safetensors.h. Used by checkpoint.c and checkpoint_load.c.
//
//   0      u64     N, length of the header
//   8      N       JSON: {"__metadata__": {text: text}, "<name>": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}, spaces
//   allowed behind 8 + N          the tensors' data, little-endian, in the order of their offsets, without holes, to the end of the file
#include "llmc/checkpoint/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "llmc/base/durable.h"
#include "llmc/base/json.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "safetensors data is copied as it lies in memory");

enum { LENGTH_BYTES = 8, HEADER_ALIGN = 8 };

int safe_dtype_bytes(const char *dtype) {
    static const struct {
        const char *name;
        int bytes;
    } table[] = {{"F64", 8},  {"I64", 8}, {"U64", 8}, {"F32", 4}, {"I32", 4}, {"U32", 4}, {"F16", 2},
                 {"BF16", 2}, {"I16", 2}, {"U16", 2}, {"I8", 1},  {"U8", 1},  {"BOOL", 1}};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        if (strcmp(table[i].name, dtype) == 0) return table[i].bytes;
    }
    return 0;
}

// Bytes of a tensor, from its dtype and shape, in *bytes; false when they are no dtype or shape, or
// too many to be true.
static bool tensor_bytes(const SafeTensor *t, uint64_t *bytes) {
    uint64_t product = (uint64_t)safe_dtype_bytes(t->dtype);
    if (product == 0 || t->dims < 0 || t->dims > SAFE_DIMS) return false;
    for (int i = 0; i < t->dims; i++) {
        if (t->shape[i] < 0 || __builtin_mul_overflow(product, (uint64_t)t->shape[i], &product)) return false;
    }
    *bytes = product;
    return product <= INT64_MAX;
}

static int compare_names(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

// A name that occurs twice, or NULL.
static const char *repeated_name(const SafeTensor *tensors, int count) {
    char **names = (char **)xcalloc((size_t)count + 1, sizeof *names, "tensor names");
    const char *repeated = NULL;
    for (int i = 0; i < count; i++) names[i] = tensors[i].name;
    qsort(names, (size_t)count, sizeof *names, compare_names);
    for (int i = 1; i < count && !repeated; i++) {
        if (strcmp(names[i - 1], names[i]) == 0) repeated = names[i];
    }
    free(names);
    return repeated;
}

// --- Reader --------------------------------------------------------------------------------------

static bool damaged(Error *err, const char *path, const char *name, const char *fault) {
    if (!name)
        return error_set(
            err, EXIT_CHECKPOINT,
            "%s is not a sound safetensors file: %s; restore it from a copy or load another checkpoint", path,
            fault);
    return error_set(err, EXIT_CHECKPOINT,
                     "%s is not a sound safetensors file: tensor '%.200s': %s; restore it from a copy or "
                     "load another checkpoint",
                     path, name, fault);
}

static const char *parse_shape(const cJSON *list, SafeTensor *t) {
    if (!cJSON_IsArray(list)) return "it has no shape";
    const cJSON *size;
    cJSON_ArrayForEach(size, list) {
        if (t->dims == SAFE_DIMS) return "it has more than four dimensions";
        if (!json_int64(size, 0, JSON_INT_MAX, &t->shape[t->dims++]))
            return "its shape is not a list of sizes";
    }
    return NULL;
}

// Fills one tensor from its header entry; returns what is wrong with it, or NULL.
static const char *parse_tensor(const cJSON *item, uint64_t data_bytes, SafeTensor *t) {
    const char *dtype = json_member_string(item, "dtype");
    const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(item, "data_offsets");
    int64_t begin, end;
    uint64_t bytes;
    t->name = xstrdup(item->string ? item->string : "");
    if (!dtype || safe_dtype_bytes(dtype) == 0) return "its dtype is unknown";
    strncpy(t->dtype, dtype, sizeof t->dtype - 1);
    const char *fault = parse_shape(cJSON_GetObjectItemCaseSensitive(item, "shape"), t);
    if (fault) return fault;
    if (!cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2) return "it has no data offsets";
    if (!json_int64(offsets->child, 0, JSON_INT_MAX, &begin) ||
        !json_int64(offsets->child->next, begin, JSON_INT_MAX, &end))
        return "its data offsets are not a range";
    if ((uint64_t)end > data_bytes) return "its data lies beyond the end of the file";
    if (!tensor_bytes(t, &bytes) || bytes != (uint64_t)(end - begin))
        return "its data offsets do not fit its shape";
    t->begin = (uint64_t)begin;
    t->end = (uint64_t)end;
    return NULL;
}

static bool parse_metadata(SafeFile *file, const cJSON *item, Error *err) {
    if (!cJSON_IsObject(item) || file->metadata)
        return damaged(err, file->path, NULL, "__metadata__ is not one object");
    const cJSON *value;
    cJSON_ArrayForEach(value, item) {
        if (!cJSON_IsString(value))
            return damaged(err, file->path, NULL, "__metadata__ holds something other than text");
    }
    char *text = cJSON_PrintUnformatted(item);
    if (!text)
        fatal(NULL, EXIT_ENVIRONMENT, "out of memory for the header of %s; use a larger machine", file->path);
    file->metadata = xstrdup(text);
    cJSON_free(text);
    return true;
}

static int compare_ranges(const void *a, const void *b) {
    const SafeTensor *x = (const SafeTensor *)a, *y = (const SafeTensor *)b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return (x->end > y->end) - (x->end < y->end);
}

// The format demands that the tensors' data follow one another without holes and overlaps up to the
// end of the file.
static bool check_layout(SafeFile *file, uint64_t data_bytes, Error *err) {
    uint64_t next = 0;
    qsort(file->tensors, (size_t)file->count, sizeof *file->tensors, compare_ranges);
    for (int i = 0; i < file->count; i++) {
        const SafeTensor *t = &file->tensors[i];
        if (t->begin != next)
            return damaged(err, file->path, t->name, "its data overlaps another's or leaves a hole");
        next = t->end;
    }
    if (next != data_bytes) return damaged(err, file->path, NULL, "its size is not what the header says");
    const char *repeated = repeated_name(file->tensors, file->count);
    return !repeated || damaged(err, file->path, repeated, "it is there twice");
}

static bool parse_header(SafeFile *file, const char *text, size_t bytes, Error *err) {
    uint64_t data_bytes = file->file_bytes - file->data_start;
    cJSON *header = json_parse_object(text, bytes);
    if (!header) return damaged(err, file->path, NULL, "its header is not JSON");
    bool ok = true;
    // The entries exist in memory already, so their number is bounded by the header's length.
    file->tensors = (SafeTensor *)xcalloc((size_t)cJSON_GetArraySize(header) + 1, sizeof *file->tensors,
                                          "a table of tensors");
    for (const cJSON *item = header->child; ok && item; item = item->next) {
        if (item->string && strcmp(item->string, "__metadata__") == 0) {
            ok = parse_metadata(file, item, err);
            continue;
        }
        SafeTensor *t = &file->tensors[file->count++];
        const char *fault = parse_tensor(item, data_bytes, t);
        if (fault) ok = damaged(err, file->path, t->name, fault);
    }
    cJSON_Delete(header);
    return ok && check_layout(file, data_bytes, err);
}

static bool read_header(SafeFile *file, Error *err) {
    uint64_t length;
    if (file->file_bytes < LENGTH_BYTES)
        return damaged(err, file->path, NULL, "it is too short for a header");
    if (!pread_all(file->fd, &length, LENGTH_BYTES, 0)) return durable_error(err, "read", file->path);
    if (length > SAFE_HEADER_MAX || length > file->file_bytes - LENGTH_BYTES)
        return damaged(err, file->path, NULL, "its header is longer than the file or than any header can be");
    char *text = (char *)xmalloc((size_t)length + 1, "a safetensors header");
    bool ok = pread_all(file->fd, text, length, LENGTH_BYTES);
    file->data_start = LENGTH_BYTES + length;
    ok = ok ? parse_header(file, text, (size_t)length, err) : durable_error(err, "read", file->path);
    free(text);
    return ok;
}

static bool open_descriptor(SafeFile *file, Error *err) {
    struct stat status;
    file->fd = open(file->path, O_RDONLY | O_CLOEXEC);
    if (file->fd < 0 || fstat(file->fd, &status) != 0) return durable_error(err, "open", file->path);
    if (!S_ISREG(status.st_mode)) return damaged(err, file->path, NULL, "it is not a plain file");
    file->file_bytes = (uint64_t)status.st_size;
    return true;
}

bool safe_open(SafeFile *file, const char *path, Error *err) {
    *file = (SafeFile){.path = xstrdup(path), .fd = -1};
    if (open_descriptor(file, err) && read_header(file, err)) return true;
    safe_close(file);
    return false;
}

void safe_drop_tensors(SafeFile *file) {
    for (int i = 0; i < file->count; i++) free(file->tensors[i].name);
    free(file->tensors);
    free(file->metadata);
    file->tensors = NULL;
    file->metadata = NULL;
    file->count = 0;
}

void safe_suspend(SafeFile *file) {
    if (file->fd >= 0) close(file->fd);
    file->fd = -1;
}

bool safe_resume(SafeFile *file, Error *err) {
    uint64_t before = file->file_bytes;
    if (open_descriptor(file, err)) {
        if (file->file_bytes == before) return true;
        damaged(err, file->path, NULL, "its size changed while it was being read");
    }
    safe_suspend(file);
    return false;
}

void safe_close(SafeFile *file) {
    safe_drop_tensors(file);
    safe_suspend(file);
    free(file->path);
    *file = (SafeFile){.fd = -1};
}

bool safe_read(const SafeFile *file, const SafeTensor *tensor, uint64_t offset, void *out, uint64_t bytes,
               Error *err) {
    uint64_t size = tensor->end - tensor->begin;
    if (offset > size || bytes > size - offset) {
        return error_set(err, EXIT_CHECKPOINT,
                         "%s: bytes %" PRIu64 "..%" PRIu64 " asked of a tensor of %" PRIu64
                         " bytes; this is a fault of the program",
                         file->path, offset, offset + bytes, size);
    }
    if (pread_all(file->fd, out, bytes, file->data_start + tensor->begin + offset)) return true;
    if (errno == 0) return damaged(err, file->path, tensor->name, "the file ends inside its data");
    return durable_error(err, "read", file->path);
}

// --- Writer --------------------------------------------------------------------------------------

#define SYNC_BYTES ((uint64_t)1 << 30)

struct SafeWriter {
    int fd;
    char *path;
    XXH3_state_t *hash;
    uint64_t written, total;  // bytes so far, bytes when complete, header included
    uint64_t synced;          // bytes that are known to be on the disk
    bool failed;
};

// The header with its length in front, padded with spaces so that the data begins at a multiple of
// 8. *data_bytes: what will follow.
static char *header_text(const SafeTensor *tensors, int count, const char *metadata, size_t *bytes,
                         uint64_t *data_bytes) {
    char *text = NULL;
    FILE *out = open_memstream(&text, bytes);
    if (!out) fatal(NULL, EXIT_ENVIRONMENT, "out of memory for a safetensors header; use a larger machine");
    fwrite("\0\0\0\0\0\0\0\0{", 1, LENGTH_BYTES + 1, out);
    if (metadata) fprintf(out, "\"__metadata__\":%s", metadata);
    *data_bytes = 0;
    for (int i = 0; i < count; i++) {
        const SafeTensor *t = &tensors[i];
        uint64_t size = 0;
        tensor_bytes(t, &size);
        if (i > 0 || metadata) fputc(',', out);
        json_write_string(out, t->name);
        fprintf(out, ":{\"dtype\":\"%s\",\"shape\":[", t->dtype);
        for (int d = 0; d < t->dims; d++) fprintf(out, "%s%" PRId64, d ? "," : "", t->shape[d]);
        fprintf(out, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", *data_bytes, *data_bytes + size);
        *data_bytes += size;
    }
    fputc('}', out);
    for (long used = ftell(out); used % HEADER_ALIGN != 0; used++) fputc(' ', out);
    if (fclose(out) != 0)
        fatal(NULL, EXIT_ENVIRONMENT, "out of memory for a safetensors header; use a larger machine");
    uint64_t length = *bytes - LENGTH_BYTES;
    memcpy(text, &length, LENGTH_BYTES);
    return text;
}

static bool check_declared(const char *path, const SafeTensor *tensors, int count, Error *err) {
    uint64_t total = 0, bytes;
    for (int i = 0; i < count; i++) {
        if (strcmp(tensors[i].name, "__metadata__") != 0 && tensor_bytes(&tensors[i], &bytes) &&
            !__builtin_add_overflow(total, bytes, &total))
            continue;
        return error_set(err, EXIT_CHECKPOINT,
                         "cannot write %s: tensor '%.200s' has an impossible name, dtype or shape; this is a "
                         "fault of the program",
                         path, tensors[i].name);
    }
    const char *repeated = repeated_name(tensors, count);
    if (!repeated) return true;
    return error_set(err, EXIT_CHECKPOINT,
                     "cannot write %s: tensor '%.200s' is declared twice; this is a fault of the program",
                     path, repeated);
}

SafeWriter *safe_writer_open(const char *path, const SafeTensor *tensors, int count,
                             const char *metadata_json, Error *err) {
    if (!check_declared(path, tensors, count, err)) return NULL;
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) {
        durable_error(err, "create", path);
        return NULL;
    }
    SafeWriter *writer = (SafeWriter *)xcalloc(1, sizeof *writer, "a safetensors writer");
    *writer = (SafeWriter){.fd = fd, .path = xstrdup(path), .hash = XXH3_createState()};
    if (!writer->hash) fatal(NULL, EXIT_ENVIRONMENT, "out of memory for a hash; use a larger machine");
    XXH3_64bits_reset(writer->hash);
    size_t header_bytes;
    uint64_t data_bytes;
    char *header = header_text(tensors, count, metadata_json, &header_bytes, &data_bytes);
    writer->total = header_bytes + data_bytes;
    bool ok = safe_writer_append(writer, header, header_bytes, err);
    free(header);
    if (ok) return writer;
    safe_writer_discard(writer);
    return NULL;
}

bool safe_writer_append(SafeWriter *w, const void *data, uint64_t bytes, Error *err) {
    if (w->failed || bytes > w->total - w->written) {
        w->failed = true;
        return error_set(
            err, EXIT_CHECKPOINT,
            "cannot write %s: more data than declared, or after an error; this is a fault of the program",
            w->path);
    }
    w->failed = !write_all(w->fd, data, bytes);
    if (w->failed) return durable_error(err, "write", w->path);
    XXH3_64bits_update(w->hash, data, (size_t)bytes);
    w->written += bytes;
    // Memory takes a file at once; a disk would then take minutes in a single fsync, during which
    // nobody sees progress.
    if (w->written - w->synced < SYNC_BYTES) return true;
    w->failed = fdatasync(w->fd) != 0;
    w->synced = w->written;
    return !w->failed || durable_error(err, "write", w->path);
}

static void free_writer(SafeWriter *w) {
    XXH3_freeState(w->hash);
    free(w->path);
    free(w);
}

void safe_writer_discard(SafeWriter *w) {
    close(w->fd);
    unlink(w->path);
    free_writer(w);
}

bool safe_writer_close(SafeWriter *w, uint64_t *bytes, uint64_t *xxh3, Error *err) {
    bool ok = !w->failed && w->written == w->total;
    if (!ok)
        error_set(err, EXIT_CHECKPOINT,
                  "cannot finish %s: %" PRIu64 " of %" PRIu64 " bytes were written; see the error before",
                  w->path, w->written, w->total);
    if (ok && fsync(w->fd) != 0) ok = durable_error(err, "write", w->path);
    if (close(w->fd) != 0 && ok)
        ok = durable_error(err, "write", w->path);  // network file systems report a full disk here
    *bytes = w->written;
    *xxh3 = XXH3_64bits_digest(w->hash);
    if (!ok) unlink(w->path);
    free_writer(w);
    return ok;
}
