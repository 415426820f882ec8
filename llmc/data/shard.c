// Maps and validates token shards. See shard.h. Arrays of the index are only 2-byte aligned, hence
// the memcpy loads.
#include "llmc/data/shard.h"

#include <assert.h>
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

static inline const uint8_t *lengths_of(const Shard *s) { return s->index + SHARD_HEADER_BYTES; }
static inline const uint8_t *pointers_of(const Shard *s) {
    return s->index + SHARD_HEADER_BYTES + 4 * s->sequences;
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
    return load_i64(shard->index + SHARD_HEADER_BYTES + 12 * shard->sequences + 8 * document);
}

// Sets the error for a file of a shard that cannot be opened. Uses errno. Always returns false.
static bool cannot_open(const char *prefix, const char *path, Error *err) {
    int cause = errno;
    struct stat status;
    const char *dot = strrchr(prefix, '.');
    bool part = dot && (!strcmp(dot, ".bin") || !strcmp(dot, ".idx"));
    if (cause == ENOENT && !part && stat(prefix, &status) == 0 && S_ISREG(status.st_mode)) {
        return data_error(err,
                          "%s is a file, not the prefix of a shard; tokenize it with preprocess_data, "
                          "conversations with --chat, and pass the prefix that it prints",
                          prefix);
    }
    return data_error(err,
                      "cannot open %s: %s; pass the shard's prefix, without .bin or .idx "
                      "(preprocess_data --output-prefix P makes P_text_document)",
                      path, strerror(cause));
}

// Maps <prefix><suffix> read-only, guarded against truncation (mapped.c). An empty file gives NULL
// and 0 bytes.
static bool map_file(const char *prefix, const char *suffix, const uint8_t **data, size_t *bytes,
                     Error *err) {
    char path[PATH_MAX];
    if (snprintf(path, sizeof path, "%s%s", prefix, suffix) >= (int)sizeof path) {
        return data_error(err, "the path %.200s... is too long; use a shorter one", prefix);
    }
    *data = NULL;
    *bytes = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return cannot_open(prefix, path, err);
    struct stat status;
    bool regular = fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
    void *map = NULL;
    if (regular && status.st_size > 0) map = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_SHARED, fd, 0);
    int cause = errno;
    close(fd);
    if (!regular) {
        return data_error(err, "%s is not a regular file; pass the shard's prefix, without .bin or .idx",
                          path);
    }
    if (map == MAP_FAILED) {
        return data_error(err, "cannot map %s: %s; check the file system", path, strerror(cause));
    }
    *data = (const uint8_t *)map;
    *bytes = (size_t)status.st_size;
    mapped_guard(map, *bytes, path);
    return true;
}

// Reports a fault in a file of the shard *s. Requires a local variable err.
#define DAMAGED(suffix, format, ...) \
    data_error(err, "%s" suffix ": " format "; preprocess the shard again", s->prefix, __VA_ARGS__)

// Checks header and file size. After this, every array is known to lie within the mapped index.
static bool check_header(Shard *s, Error *err) {
    if (s->index_bytes < SHARD_HEADER_BYTES) {
        return DAMAGED(".idx", "truncated: %zu bytes, but the header alone has %d", s->index_bytes,
                       SHARD_HEADER_BYTES);
    }
    if (memcmp(s->index, SHARD_MAGIC, SHARD_MAGIC_BYTES) != 0) {
        return data_error(err,
                          "%s.idx: not a Megatron index: it does not start with MMIDIDX; use a shard made by "
                          "preprocess_data",
                          s->prefix);
    }
    uint64_t version = (uint64_t)load_i64(s->index + 9);
    if (version != 1) return DAMAGED(".idx", "version %" PRIu64 " is not supported, only 1", version);
    s->dtype = s->index[17];
    if (!shard_dtype_size(s->dtype)) {
        return data_error(err,
                          "%s.idx: dtype code %d does not hold token ids; 1 (u8), 2 (i8), 3 (i16), 4 (i32), "
                          "5 (i64), 8 (u16) do",
                          s->prefix, s->dtype);
    }
    uint64_t n = (uint64_t)load_i64(s->index + 18), m = (uint64_t)load_i64(s->index + 26);
    uint64_t rest = s->index_bytes - SHARD_HEADER_BYTES;
    bool fits = n <= rest / 12 && m <= (rest - 12 * n) / 8;
    if (!fits || (rest != 12 * n + 8 * m && rest != 13 * n + 8 * m)) {
        return DAMAGED(".idx",
                       "%zu bytes do not fit the %" PRIu64 " sequences and %" PRIu64
                       " boundaries of its header (truncated or damaged)",
                       s->index_bytes, n, m);
    }
    if (m == 0) return DAMAGED(".idx", "%s document boundaries, but at least one (0) is needed", "no");
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
        if (i == 0 && at != 0)
            return DAMAGED(".idx", "document boundary 0 is %" PRId64 ", but must be 0", at);
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
                   "the last document boundary is %" PRId64
                   ", but must equal the number of sequences, %" PRId64,
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

// Converts count elements x of a little-endian integer type.
#define CONVERT(TYPE, VALUE) \
    for (int64_t i = 0; i < count; i++) { \
        TYPE x; \
        memcpy(&x, in + (size_t)i * sizeof x, sizeof x); \
        out[i] = (VALUE); \
    } \
    break

void shard_read(const Shard *shard, int64_t position, int64_t count, int32_t *out) {
    assert(count >= 0);
    if (count == 0) return;  // an empty .bin is not mapped
    const uint8_t *in = shard->data + position * shard_dtype_size(shard->dtype);
    switch (shard->dtype) {
        case SHARD_U8: CONVERT(uint8_t, x);
        case SHARD_I8: CONVERT(int8_t, x);
        case SHARD_I16: CONVERT(int16_t, x);
        case SHARD_U16: CONVERT(uint16_t, x);
        case SHARD_I32: CONVERT(int32_t, x);
        case SHARD_I64: CONVERT(int64_t, x < 0 || x > INT32_MAX ? -1 : (int32_t)x);
        default: break;  // rejected by shard_open
    }
}
