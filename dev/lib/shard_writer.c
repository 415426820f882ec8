// Writes token shards: see shard_writer.h.
#include "dev/lib/shard_writer.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/base/durable.h"

enum { WRITE_BUFFER_BYTES = 4 << 20 };

// A buffered file with a temporary name.
typedef struct OutFile {
    char *path, *temporary;
    int fd;
    uint8_t *buffer;  // (WRITE_BUFFER_BYTES)
    size_t used;
} OutFile;

struct ShardWriter {
    OutFile bin, idx;
    int dtype;
    int32_t *lengths;     // (sequences) number of tokens
    int64_t *boundaries;  // (boundary_count) number of sequences before each document; the first is 0
    int64_t sequences, sequence_capacity, boundary_count, boundary_capacity;
};

static bool out_failed(const OutFile *f, const char *doing, Error *err) {
    int cause = errno;
    bool full = cause == ENOSPC || cause == EDQUOT || cause == EFBIG;
    return system_error(err, "%s: cannot %s: %s; %s", f->temporary, doing, strerror(cause),
                        full ? "free disk space or choose another output directory" : "check the disk");
}

static bool out_open(OutFile *f, const char *prefix, const char *suffix, Error *err) {
    f->path = text_format("%s%s", prefix, suffix);
    f->temporary = text_format("%s%s.tmp", prefix, suffix);
    struct stat status;
    // Without this check only the final rename would fail, after everything has been written.
    if (stat(f->path, &status) == 0 && S_ISDIR(status.st_mode)) {
        return system_error(
            err, "cannot create %s: a directory has this name; remove it or choose another output name",
            f->path);
    }
    f->fd = durable_create(f->temporary);
    if (f->fd < 0) {
        int cause = errno;
        if (cause == ENOSPC || cause == EDQUOT) return out_failed(f, "create", err);
        return system_error(err, "cannot create %s: %s; check the output directory", f->temporary,
                            strerror(cause));
    }
    f->buffer = (uint8_t *)xmalloc(WRITE_BUFFER_BYTES, "a shard's write buffer");
    return true;
}

static bool out_write_through(OutFile *f, const uint8_t *data, size_t bytes, Error *err) {
    return write_all(f->fd, data, bytes) || out_failed(f, "write", err);
}

static bool out_flush(OutFile *f, Error *err) {
    size_t used = f->used;
    f->used = 0;
    return out_write_through(f, f->buffer, used, err);
}

static bool out_write(OutFile *f, const void *data, size_t bytes, Error *err) {
    if (bytes == 0) return true;  // data may be NULL
    if (f->used + bytes > WRITE_BUFFER_BYTES && !out_flush(f, err)) return false;
    if (bytes > WRITE_BUFFER_BYTES) return out_write_through(f, (const uint8_t *)data, bytes, err);
    memcpy(f->buffer + f->used, data, bytes);
    f->used += bytes;
    return true;
}

static bool out_sync(OutFile *f, Error *err) {
    if (!out_flush(f, err)) return false;
    if (fsync(f->fd) != 0 && errno != EINVAL && errno != ENOTSUP) return out_failed(f, "sync", err);
    int fd = f->fd;
    f->fd = -1;
    if (close(fd) != 0) return out_failed(f, "close", err);
    return true;
}

static void out_free(OutFile *f) {
    if (f->fd >= 0) close(f->fd);
    free(f->path);
    free(f->temporary);
    free(f->buffer);
}

static void add_boundary(ShardWriter *w, int64_t sequence) {
    if (w->boundary_count == w->boundary_capacity) {
        w->boundary_capacity = w->boundary_capacity ? 2 * w->boundary_capacity : 1024;
        w->boundaries = (int64_t *)xrealloc(w->boundaries, 8 * (size_t)w->boundary_capacity,
                                            "document boundaries");
    }
    w->boundaries[w->boundary_count++] = sequence;
}

static void add_length(ShardWriter *w, int32_t length) {
    if (w->sequences == w->sequence_capacity) {
        w->sequence_capacity = w->sequence_capacity ? 2 * w->sequence_capacity : 1024;
        w->lengths = (int32_t *)xrealloc(w->lengths, 4 * (size_t)w->sequence_capacity, "sequence lengths");
    }
    w->lengths[w->sequences++] = length;
}

ShardWriter *shard_writer_open(const char *prefix, int dtype, Error *err) {
    if (!shard_dtype_size(dtype)) {
        usage_error(err, "%s: dtype code %d does not hold token ids; use 8 (u16) or 4 (i32)", prefix, dtype);
        return NULL;
    }
    ShardWriter *w = (ShardWriter *)xcalloc(1, sizeof *w, "a shard writer");
    w->dtype = dtype;
    w->bin.fd = w->idx.fd = -1;
    add_boundary(w, 0);
    if (out_open(&w->bin, prefix, ".bin", err) && out_open(&w->idx, prefix, ".idx", err)) return w;
    shard_writer_discard(w);
    return NULL;
}

// Computes the range of ids that a dtype can represent, limited to int32.
static void dtype_range(int dtype, int32_t *low, int32_t *high) {
    *low = 0;
    switch (dtype) {
        case SHARD_U8: *high = UINT8_MAX; break;
        case SHARD_I8: *high = INT8_MAX; break;
        case SHARD_I16: *high = INT16_MAX; break;
        case SHARD_U16: *high = UINT16_MAX; break;
        default: *high = INT32_MAX;
    }
}

// Converts ids to a little-endian dtype. out may be unaligned.
static void narrow(int dtype, const int32_t *tokens, int64_t count, uint8_t *out) {
    switch (shard_dtype_size(dtype)) {
        case 1:
            for (int64_t i = 0; i < count; i++) out[i] = (uint8_t)tokens[i];
            break;
        case 2:
            for (int64_t i = 0; i < count; i++) {
                uint16_t id = (uint16_t)tokens[i];
                memcpy(out + 2 * i, &id, sizeof id);
            }
            break;
        case 4: memcpy(out, tokens, 4 * (size_t)count); break;
        default:
            for (int64_t i = 0; i < count; i++) {
                int64_t id = tokens[i];
                memcpy(out + 8 * i, &id, sizeof id);
            }
    }
}

bool shard_writer_add_sequence(ShardWriter *writer, const int32_t *tokens, int64_t count, Error *err) {
    if (count < 0 || count > INT32_MAX) {
        return data_error(err,
                          "%s: sequence %" PRId64 " has %" PRId64
                          " tokens, but the format allows at most %d; split the document",
                          writer->bin.path, writer->sequences, count, INT32_MAX);
    }
    int32_t low, high;
    dtype_range(writer->dtype, &low, &high);
    for (int64_t i = 0; i < count; i++) {
        if (tokens[i] < low || tokens[i] > high) {
            return data_error(err,
                              "%s: sequence %" PRId64 ", position %" PRId64
                              ": token id %d does not fit dtype code %d; use a wider dtype",
                              writer->bin.path, writer->sequences, i, tokens[i], writer->dtype);
        }
    }
    const int64_t size = shard_dtype_size(writer->dtype), chunk = WRITE_BUFFER_BYTES / size;
    OutFile *f = &writer->bin;
    for (int64_t done = 0; done < count;) {
        int64_t take = count - done < chunk ? count - done : chunk;
        if (f->used + (size_t)(take * size) > WRITE_BUFFER_BYTES && !out_flush(f, err)) return false;
        narrow(writer->dtype, tokens + done, take, f->buffer + f->used);
        f->used += (size_t)(take * size);
        done += take;
    }
    add_length(writer, (int32_t)count);
    return true;
}

void shard_writer_end_document(ShardWriter *writer) { add_boundary(writer, writer->sequences); }

// Ends the current document, if sequences were added after the last shard_writer_end_document.
static void end_open_document(ShardWriter *w) {
    if (w->boundaries[w->boundary_count - 1] != w->sequences) add_boundary(w, w->sequences);
}

bool shard_writer_append(ShardWriter *writer, const Shard *shard, Error *err) {
    if (shard->dtype != writer->dtype) {
        return data_error(
            err, "%s has dtype code %d, but the output has %d; preprocess all parts with the same vocabulary",
            shard->prefix, shard->dtype, writer->dtype);
    }
    end_open_document(writer);
    int64_t before = writer->sequences;
    if (!out_flush(&writer->bin, err) ||
        !out_write_through(&writer->bin, shard->data, shard->data_bytes, err))
        return false;
    for (int64_t i = 0; i < shard->sequences; i++) add_length(writer, (int32_t)shard_length(shard, i));
    for (int64_t d = 1; d <= shard->documents; d++) add_boundary(writer, before + shard_boundary(shard, d));
    return true;
}

static bool write_index(ShardWriter *w, Error *err) {
    OutFile *f = &w->idx;
    uint8_t header[SHARD_HEADER_BYTES];
    int64_t version = 1, position = 0, size = shard_dtype_size(w->dtype);
    memcpy(header, SHARD_MAGIC, SHARD_MAGIC_BYTES);
    memcpy(header + 9, &version, 8);
    header[17] = (uint8_t)w->dtype;
    memcpy(header + 18, &w->sequences, 8);
    memcpy(header + 26, &w->boundary_count, 8);
    bool ok = out_write(f, header, sizeof header, err) &&
              out_write(f, w->lengths, 4 * (size_t)w->sequences, err);
    for (int64_t i = 0; ok && i < w->sequences; i++) {
        ok = out_write(f, &position, 8, err);
        position += w->lengths[i] * size;
    }
    return ok && out_write(f, w->boundaries, 8 * (size_t)w->boundary_count, err);
}

// Makes the renames durable. Ignores errors, because the shard is already in place.
static void sync_folder_of(const char *path) {
    char *folder = xstrdup(path), *slash = strrchr(folder, '/');
    if (slash) slash[slash == folder] = 0;
    durable_sync_folder(slash ? folder : ".", NULL);
    free(folder);
}

// Renames both files. Removes the old index first, so that a crash never leaves an index that does
// not match its data.
static bool publish(ShardWriter *w, Error *err) {
    if (unlink(w->idx.path) != 0 && errno != ENOENT) {
        return system_error(err, "cannot replace %s: %s; check the output directory", w->idx.path,
                            strerror(errno));
    }
    if (rename(w->bin.temporary, w->bin.path) != 0) return out_failed(&w->bin, "rename", err);
    if (rename(w->idx.temporary, w->idx.path) != 0) return out_failed(&w->idx, "rename", err);
    sync_folder_of(w->idx.path);
    return true;
}

static void writer_free(ShardWriter *w) {
    out_free(&w->bin);
    out_free(&w->idx);
    free(w->lengths);
    free(w->boundaries);
    free(w);
}

bool shard_writer_close(ShardWriter *writer, Error *err) {
    end_open_document(writer);
    if (!out_sync(&writer->bin, err) || !write_index(writer, err) || !out_sync(&writer->idx, err) ||
        !publish(writer, err)) {
        shard_writer_discard(writer);
        return false;
    }
    writer_free(writer);
    return true;
}

void shard_writer_discard(ShardWriter *writer) {
    if (!writer) return;
    if (writer->bin.buffer) unlink(writer->bin.temporary);
    if (writer->idx.buffer) unlink(writer->idx.temporary);
    writer_free(writer);
}
