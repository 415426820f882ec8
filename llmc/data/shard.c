// Megatron's token shards (its IndexedDataset), see shard.h. The reader maps and validates them on
// open. The writer buffers its output and renames the files at the end. Read by dataset.c, check.c
// and loader.c, written by preprocess_data and merge_datasets.
//
// The .idx file, little-endian and packed, N sequences, M boundaries:
//     at 0          9 bytes  "MMIDIDX\0\0"
//     at 9          u64      version, 1
//     at 17         u8       dtype code
//     at 18, 26     u64      N, M
//     at 34         i32[N]   sequence lengths in tokens
//     at 34 + 4N    i64[N]   byte offset of each sequence in the .bin
//     at 34 + 12N   i64[M]   first sequence of each document; first 0, last N
//     then          i8[N]    "modes", only in multimodal shards; ignored
// Arrays are only 2-byte aligned, hence the memcpy loads.
#include "llmc/data/shard.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "llmc/base/durable.h"
#include "llmc/data/mapped.h"

enum { MAGIC_BYTES = 9, HEADER_BYTES = 34, WRITE_BUFFER_BYTES = 4 << 20 };
static const char MAGIC[MAGIC_BYTES] = {'M', 'M', 'I', 'D', 'I', 'D', 'X', 0, 0};

int shard_dtype_size(int dtype) {
    switch (dtype) {
        case SHARD_U8:
        case SHARD_I8: return 1;
        case SHARD_I16:
        case SHARD_U16: return 2;
        case SHARD_I32: return 4;
        case SHARD_I64: return 8;
        default: return 0;
    }
}

int shard_dtype_for_vocab(int64_t vocab_size) { return vocab_size < 65500 ? SHARD_U16 : SHARD_I32; }

// -------------------------------------------------------------------------------------------------
// Reader

static inline int32_t load_i32(const uint8_t *p) {
    int32_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

static inline int64_t load_i64(const uint8_t *p) {
    int64_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

static inline const uint8_t *lengths_of(const Shard *s) { return s->index + HEADER_BYTES; }
static inline const uint8_t *pointers_of(const Shard *s) {
    return s->index + HEADER_BYTES + 4 * s->sequences;
}
static inline const uint8_t *boundaries_of(const Shard *s) {
    return s->index + HEADER_BYTES + 12 * s->sequences;
}

int64_t shard_length(const Shard *shard, int64_t sequence) {
    return load_i32(lengths_of(shard) + 4 * sequence);
}

void shard_prefetch_length(const Shard *shard, int64_t sequence) {
    __builtin_prefetch(lengths_of(shard) + 4 * sequence);
}

int64_t shard_position(const Shard *shard, int64_t sequence) {
    return load_i64(pointers_of(shard) + 8 * sequence) / shard_dtype_size(shard->dtype);
}

int64_t shard_boundary(const Shard *shard, int64_t document) {
    return load_i64(boundaries_of(shard) + 8 * document);
}

// Maps <prefix><suffix> read-only, guarded against truncation (mapped.h). An empty file gives NULL
// and 0 bytes.
static bool map_file(const char *prefix, const char *suffix, const uint8_t **data, size_t *bytes,
                     Error *err) {
    char path[PATH_MAX];
    if (snprintf(path, sizeof path, "%s%s", prefix, suffix) >= (int)sizeof path) {
        return error_set(err, EXIT_DATA, "%.200s...: path too long; use a shorter one", prefix);
    }
    *data = NULL;
    *bytes = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return error_set(err, EXIT_DATA,
                         "%s: cannot open: %s; give the shard's prefix, without .bin or .idx "
                         "(preprocess_data --output-prefix P makes P_text_document)",
                         path, strerror(errno));
    }
    struct stat status;
    bool regular = fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
    void *map = NULL;
    if (regular && status.st_size > 0) map = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_SHARED, fd, 0);
    int cause = errno;
    close(fd);
    if (!regular) {
        return error_set(err, EXIT_DATA,
                         "%s: not a regular file; give the shard's prefix, without .bin or .idx", path);
    }
    if (map == MAP_FAILED) {
        return error_set(err, EXIT_DATA, "%s: cannot map: %s; check the file system", path, strerror(cause));
    }
    *data = (const uint8_t *)map;
    *bytes = (size_t)status.st_size;
    mapped_guard(map, *bytes, path);
    return true;
}

// Reports a fault in a file of the shard *s. Requires a local variable err.
#define DAMAGED(suffix, format, ...) \
    error_set(err, EXIT_DATA, "%s" suffix ": " format "; preprocess the shard again", s->prefix, __VA_ARGS__)

// Checks header and file size. After this, every array is known to lie within the mapped index.
static bool check_header(Shard *s, Error *err) {
    if (s->index_bytes < HEADER_BYTES) {
        return DAMAGED(".idx", "truncated: %zu bytes, but the header alone has %d", s->index_bytes,
                       HEADER_BYTES);
    }
    if (memcmp(s->index, MAGIC, MAGIC_BYTES) != 0) {
        return error_set(err, EXIT_DATA,
                         "%s.idx: not a Megatron index: it does not start with MMIDIDX; use a shard made by "
                         "preprocess_data",
                         s->prefix);
    }
    uint64_t version = (uint64_t)load_i64(s->index + 9);
    if (version != 1) return DAMAGED(".idx", "version %" PRIu64 " is not supported, only 1", version);
    s->dtype = s->index[17];
    if (!shard_dtype_size(s->dtype)) {
        return error_set(err, EXIT_DATA,
                         "%s.idx: dtype code %d does not hold token ids; 1 (u8), 2 (i8), 3 (i16), 4 (i32), "
                         "5 (i64), 8 (u16) do",
                         s->prefix, s->dtype);
    }
    uint64_t n = (uint64_t)load_i64(s->index + 18), m = (uint64_t)load_i64(s->index + 26);
    uint64_t rest = s->index_bytes - HEADER_BYTES;
    bool fits = n <= rest / 12 && m <= (rest - 12 * n) / 8;
    if (!fits || (rest != 12 * n + 8 * m && rest != 13 * n + 8 * m)) {
        return DAMAGED(".idx",
                       "%zu bytes do not fit the %" PRIu64 " sequences and %" PRIu64
                       " boundaries of its header (truncated or damaged)",
                       s->index_bytes, n, m);
    }
    if (m == 0) return DAMAGED(".idx", "%s document boundaries, at least one (0) is needed", "no");
    s->sequences = (int64_t)n;
    s->documents = (int64_t)m - 1;
    return true;
}

// Reports the fault of sequence i found by check_sequences.
static bool bad_sequence(const Shard *s, int64_t i, int64_t expected, Error *err) {
    int64_t length = shard_length(s, i), pointer = load_i64(pointers_of(s) + 8 * i);
    int64_t end = expected + length * shard_dtype_size(s->dtype);
    if (length < 0) return DAMAGED(".idx", "sequence %" PRId64 " has negative length %" PRId64, i, length);
    if (pointer != expected) {
        return DAMAGED(".idx",
                       "sequence %" PRId64 " points to byte %" PRId64
                       ", but the preceding lengths add up to %" PRId64,
                       i, pointer, expected);
    }
    return DAMAGED(".bin", "truncated: sequence %" PRId64 " ends at byte %" PRId64 ", but the file has %zu",
                   i, end, s->data_bytes);
}

// Checks lengths and pointers in one pass. The .bin must hold exactly the sequences; a longer one
// belongs to another index.
static bool check_sequences(Shard *s, Error *err) {
    const uint8_t *lengths = lengths_of(s), *pointers = pointers_of(s);
    const int64_t n = s->sequences, size = shard_dtype_size(s->dtype), bytes = (int64_t)s->data_bytes;
    int64_t end = 0;  // bytes; stays <= bytes + 2^34, so it cannot overflow
    for (int64_t i = 0; i < n; i++) {
        int64_t begin = end, length = load_i32(lengths + 4 * i);
        end += length * size;
        bool bad = (length < 0) | (load_i64(pointers + 8 * i) != begin) | (end > bytes);
        if (bad) return bad_sequence(s, i, begin, err);
    }
    if (end != bytes) {
        return DAMAGED(".bin", "%zu bytes, but the index describes %" PRId64 ": the two files do not match",
                       s->data_bytes, end);
    }
    s->tokens = end / size;
    return true;
}

static bool check_boundaries(const Shard *s, Error *err) {
    int64_t before = 0;
    for (int64_t i = 0; i <= s->documents; i++) {
        int64_t at = shard_boundary(s, i);
        if (i == 0 && at != 0) return DAMAGED(".idx", "document boundary 0 is %" PRId64 ", it must be 0", at);
        if (at < before) {
            return DAMAGED(".idx",
                           "document boundary %" PRId64 " is %" PRId64
                           ", less than the preceding one, %" PRId64,
                           i, at, before);
        }
        before = at;
    }
    if (before == s->sequences) return true;
    return DAMAGED(".idx",
                   "the last document boundary is %" PRId64 ", it must equal the %" PRId64 " sequences",
                   before, s->sequences);
}

static size_t last_bytes(const Shard *s) {
    return s->data_bytes < sizeof s->last ? s->data_bytes : sizeof s->last;
}

bool shard_open(Shard *shard, const char *prefix, Error *err) {
    memset(shard, 0, sizeof *shard);
    shard->prefix = xstrdup(prefix);
    bool ok = map_file(prefix, ".idx", &shard->index, &shard->index_bytes, err);
    if (ok && shard->index_bytes) madvise((void *)shard->index, shard->index_bytes, MADV_WILLNEED);
    ok = ok && check_header(shard, err) && map_file(prefix, ".bin", &shard->data, &shard->data_bytes, err) &&
         check_sequences(shard, err) && check_boundaries(shard, err);
    if (!ok) {
        shard_close(shard);
        return false;
    }
    size_t n = last_bytes(shard);
    if (n) memcpy(shard->last, shard->data + shard->data_bytes - n, n);
    return true;
}

uint64_t shard_fingerprint(const Shard *s) {
    enum { END = 64 << 10 };
    const uint8_t *files[2] = {s->index, s->data};
    size_t bytes[2] = {s->index_bytes, s->data_bytes};
    uint64_t parts[5] = {bytes[0], bytes[1]};  // the header of the .idx contains the other sizes
    for (int i = 0; i < 2; i++) {
        size_t end = bytes[i] < END ? bytes[i] : END;
        parts[2 + i] = end ? XXH3_64bits(files[i], end) : 0;
        parts[4] ^= end ? XXH3_64bits_withSeed(files[i] + bytes[i] - end, end, (uint64_t)i) : 0;
    }
    return XXH3_64bits(parts, sizeof parts);
}

void shard_check_whole(const Shard *s) {
    if (shard_boundary(s, s->documents) != s->sequences) mapped_lost(s->index);
    size_t n = last_bytes(s);
    if (n && memcmp(s->data + s->data_bytes - n, s->last, n) != 0) mapped_lost(s->data);
}

static void unmap_file(const uint8_t *data, size_t bytes) {
    if (!data) return;
    mapped_release(data);
    munmap((void *)data, bytes);
}

void shard_close(Shard *shard) {
    unmap_file(shard->index, shard->index_bytes);
    unmap_file(shard->data, shard->data_bytes);
    free(shard->prefix);
    memset(shard, 0, sizeof *shard);
}

void shard_read(const Shard *shard, int64_t position, int64_t count, int32_t *out) {
    if (count <= 0) return;
    const uint8_t *in = shard->data + position * shard_dtype_size(shard->dtype);
    switch (shard->dtype) {
        case SHARD_U8:
            for (int64_t i = 0; i < count; i++) out[i] = in[i];
            break;
        case SHARD_I8:
            for (int64_t i = 0; i < count; i++) out[i] = (int8_t)in[i];
            break;
        case SHARD_I16:
            for (int64_t i = 0; i < count; i++) {
                int16_t x;
                memcpy(&x, in + 2 * i, sizeof x);
                out[i] = x;
            }
            break;
        case SHARD_U16:
            for (int64_t i = 0; i < count; i++) {
                uint16_t x;
                memcpy(&x, in + 2 * i, sizeof x);
                out[i] = x;
            }
            break;
        case SHARD_I32: memcpy(out, in, 4 * (size_t)count); break;
        case SHARD_I64:
            for (int64_t i = 0; i < count; i++) {
                int64_t x = load_i64(in + 8 * i);
                out[i] = x < 0 || x > INT32_MAX ? -1 : (int32_t)x;
            }
            break;
        default: break;  // rejected by shard_open
    }
}

// -------------------------------------------------------------------------------------------------
// Writer

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
    int32_t *lengths;     // (sequences)
    int64_t *boundaries;  // (boundary_count), first 0
    int64_t sequences, sequence_capacity, boundary_count, boundary_capacity;
};

static bool out_failed(const OutFile *f, const char *doing, Error *err) {
    int cause = errno;
    bool full = cause == ENOSPC || cause == EDQUOT || cause == EFBIG;
    return error_set(err, EXIT_ENVIRONMENT, "%s: cannot %s: %s; %s", f->temporary, doing, strerror(cause),
                     full ? "free disk space or choose another output directory" : "check the disk");
}

static bool out_open(OutFile *f, const char *prefix, const char *suffix, Error *err) {
    f->path = text_format("%s%s", prefix, suffix);
    f->temporary = text_format("%s%s.tmp", prefix, suffix);
    struct stat status;
    // Otherwise only the final rename would fail, after everything has been written.
    if (stat(f->path, &status) == 0 && S_ISDIR(status.st_mode)) {
        return error_set(
            err, EXIT_ENVIRONMENT,
            "%s: cannot create: a directory has this name; remove it or choose another output name", f->path);
    }
    f->fd = open(f->temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (f->fd < 0) {
        int cause = errno;
        if (cause == ENOSPC || cause == EDQUOT) return out_failed(f, "create", err);
        return error_set(err, EXIT_ENVIRONMENT, "%s: cannot create: %s; check the output directory",
                         f->temporary, strerror(cause));
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
        error_set(err, EXIT_USAGE, "%s: dtype code %d does not hold token ids; use 8 (u16) or 4 (i32)",
                  prefix, dtype);
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

// Range of ids that a dtype can hold, limited to int32.
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

// Converts ids to the dtype, little-endian. out may be unaligned.
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
        return error_set(err, EXIT_DATA,
                         "%s: sequence %" PRId64 " has %" PRId64
                         " tokens, but the format allows at most %d; split the document",
                         writer->bin.path, writer->sequences, count, INT32_MAX);
    }
    int32_t low, high;
    dtype_range(writer->dtype, &low, &high);
    for (int64_t i = 0; i < count; i++) {
        if (tokens[i] < low || tokens[i] > high) {
            return error_set(err, EXIT_DATA,
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

// Ends the document of sequences added after the last end_document, if any.
static void end_open_document(ShardWriter *w) {
    if (w->boundaries[w->boundary_count - 1] != w->sequences) add_boundary(w, w->sequences);
}

bool shard_writer_append(ShardWriter *writer, const Shard *shard, Error *err) {
    if (shard->dtype != writer->dtype) {
        return error_set(
            err, EXIT_DATA,
            "%s: dtype code %d, but the output has %d; preprocess all parts with the same vocabulary",
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
    uint8_t header[HEADER_BYTES];
    int64_t version = 1, position = 0, size = shard_dtype_size(w->dtype);
    memcpy(header, MAGIC, MAGIC_BYTES);
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

// Makes the renames durable. Errors are ignored, because the shard is already in place.
static void sync_folder_of(const char *path) {
    char *folder = xstrdup(path), *slash = strrchr(folder, '/');
    if (slash) slash[slash == folder] = 0;
    durable_sync_folder(slash ? folder : ".", NULL);
    free(folder);
}

// Removes the old index first, so that after a crash at any point there is either a matching index
// or none.
static bool publish(ShardWriter *w, Error *err) {
    if (unlink(w->idx.path) != 0 && errno != ENOENT) {
        return error_set(err, EXIT_ENVIRONMENT, "%s: cannot replace: %s; check the output directory",
                         w->idx.path, strerror(errno));
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
