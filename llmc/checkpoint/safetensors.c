// Writes safetensors files. See safetensors.h.
//
//   0      u64   N, length of the header
//   8      N     {"__metadata__": {text: text},
//                 "<name>": {"dtype": "F32", "shape": [6], "data_offsets": [begin, end]}, ...}
//                 padded with spaces
//   8 + N        data of the tensors: little-endian, in order, without gaps, up to the end
#include "llmc/checkpoint/safetensors.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "llmc/base/durable.h"
#include "llmc/base/json_line.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "data is copied without byte swaps");

enum { LENGTH_BYTES = 8, HEADER_ALIGN = 8 };

int safe_dtype_bytes(const char *dtype) {
    return strcmp(dtype, "F32") == 0 ? 4 : strcmp(dtype, "BF16") == 0 ? 2 : 0;
}

#define SYNC_BYTES ((uint64_t)1 << 30)

struct SafeWriter {
    int fd;
    char *path;
    XXH3_state_t *hash;
    uint64_t written, total;  // bytes so far, total bytes, both including the header
    uint64_t synced;          // bytes known to be on disk
    bool failed;
};

// Formats the length field and the header, padded with spaces so that the data starts at a multiple
// of 8. *data_bytes: size of the data that will follow.
static Text header_text(const SafeTensor *tensors, int count, const char *metadata, uint64_t *data_bytes) {
    const uint64_t unknown = 0;
    Text text = {0};
    text_add_bytes(&text, &unknown, LENGTH_BYTES);
    text_add(&text, "{\"__metadata__\":%s", metadata);
    *data_bytes = 0;
    for (int i = 0; i < count; i++) {
        const SafeTensor *t = &tensors[i];
        uint64_t end = *data_bytes + (uint64_t)t->elements * (uint64_t)safe_dtype_bytes(t->dtype);
        text_add(&text, ",");
        text_add_quoted(&text, t->name);
        text_add(&text, ":{\"dtype\":\"%s\",\"shape\":[", t->dtype);
        if (t->columns) text_add(&text, "%" PRId64 ",", t->elements / t->columns);
        text_add(&text, "%" PRId64 "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}",
                 t->columns ? t->columns : t->elements, *data_bytes, end);
        *data_bytes = end;
    }
    text_add(&text, "}");
    while (text.length % HEADER_ALIGN != 0) text_add(&text, " ");
    uint64_t length = text.length - LENGTH_BYTES;
    memcpy(text.data, &length, LENGTH_BYTES);
    return text;
}

SafeWriter *safe_writer_open(const char *path, const SafeTensor *tensors, int count,
                             const char *metadata_json, Error *err) {
    assert(count >= 0);
    int fd = durable_create(path);
    if (fd < 0) {
        durable_error(err, "create", path);
        return NULL;
    }
    SafeWriter *writer = xcalloc(1, sizeof *writer, "a safetensors writer");
    *writer = (SafeWriter){.fd = fd, .path = xstrdup(path), .hash = XXH3_createState()};
    if (!writer->hash)
        fatal(NULL, EXIT_ENVIRONMENT, "out of memory for a hash state; use a machine with more memory");
    XXH3_64bits_reset(writer->hash);
    uint64_t data_bytes;
    Text header = header_text(tensors, count, metadata_json, &data_bytes);
    writer->total = header.length + data_bytes;
    bool ok = safe_writer_append(writer, header.data, header.length, err);
    text_free(&header);
    if (ok) return writer;
    safe_writer_discard(writer);
    return NULL;
}

bool safe_writer_append(SafeWriter *w, const void *data, uint64_t bytes, Error *err) {
    assert(data || bytes == 0);
    if (w->failed || bytes > w->total - w->written) {
        w->failed = true;
        return ckpt_error(err,
                          "cannot write %s: more data than declared, or append after an error; this is a "
                          "bug, please report it",
                          w->path);
    }
    w->failed = !write_all(w->fd, data, bytes);
    if (w->failed) return durable_error(err, "write", w->path);
    XXH3_64bits_update(w->hash, data, (size_t)bytes);
    w->written += bytes;
    // Syncs in steps. Otherwise the page cache takes the whole file at once, and a slow disk then
    // spends minutes in a single fsync without visible progress.
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
        ckpt_error(err,
                   "cannot finish %s: %" PRIu64 " of %" PRIu64 " bytes were written; see the previous error",
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
