// Reads zip archives written by torch.save. See torch_zip.h. The format is described in PKWARE's
// APPNOTE.TXT. All numbers are little-endian.
//
//   entries:      "PK\3\4" header (30), name, extra, data, perhaps a descriptor
//   directory:    per entry "PK\1\2" header (46), name, extra, comment
//   zip64 end:    "PK\6\6" (56) and its locator "PK\6\7" (20), if numbers need more than 32 bits
//   end:          "PK\5\6" (22), a comment
#include "dev/convert/torch_zip.h"

#include <stdlib.h>
#include <string.h>

#include "llmc/base/durable.h"

enum {
    LOCAL_BYTES = 30,
    CENTRAL_BYTES = 46,
    END_BYTES = 22,
    END64_BYTES = 56,
    LOCATOR_BYTES = 20,
    COMMENT_MAX_BYTES = 65535,
    DIRECTORY_MAX_BYTES = 64 << 20,
    HAS_DESCRIPTOR = 8,
    ENCRYPTED = 1
};

typedef struct Archive {
    const char *path;
    int fd;
    uint64_t begin, bytes;
    uint64_t directory, directory_bytes, entries;  // directory: offset from the start of the archive
    TorchZip *zip;
} Archive;

static bool damaged(const Archive *a, const char *fault, Error *err) {
    return ckpt_error(err, "%s cannot be read: %s; save or copy it again", a->path, fault);
}

static uint64_t number(const uint8_t *at, int bytes) {
    uint64_t value = 0;
    for (int i = bytes; i-- > 0;) value = value << 8 | at[i];
    return value;
}

static bool read_at(const Archive *a, uint64_t at, void *out, uint64_t bytes, Error *err) {
    return pread_all(a->fd, out, bytes, a->begin + at) || durable_error(err, "read", a->path);
}

static bool is(const uint8_t *at, const char *signature) { return memcmp(at, signature, 4) == 0; }

// Reads the zip64 end record if there is one before the end record at `end`.
static bool read_end64(Archive *a, uint64_t end, Error *err) {
    uint8_t locator[LOCATOR_BYTES], record[END64_BYTES];
    if (end < LOCATOR_BYTES + END64_BYTES) return true;
    if (!read_at(a, end - LOCATOR_BYTES, locator, LOCATOR_BYTES, err)) return false;
    if (!is(locator, "PK\6\7")) return true;
    uint64_t at = number(locator + 8, 8);
    if (at > end - LOCATOR_BYTES - END64_BYTES) return damaged(a, "its zip64 end is misplaced", err);
    if (!read_at(a, at, record, END64_BYTES, err)) return false;
    if (!is(record, "PK\6\6")) return damaged(a, "its zip64 end is not at the offset in its locator", err);
    a->entries = number(record + 32, 8);
    a->directory_bytes = number(record + 40, 8);
    a->directory = number(record + 48, 8);
    return true;
}

static bool read_end(Archive *a, Error *err) {
    uint64_t most = END_BYTES + COMMENT_MAX_BYTES, size = a->bytes < most ? a->bytes : most;
    uint8_t *tail = xmalloc((size_t)size + 1, "the end of an archive");
    bool ok = read_at(a, a->bytes - size, tail, size, err);
    int64_t at = (int64_t)size - END_BYTES;
    while (ok && at >= 0 &&
           (!is(tail + at, "PK\5\6") || number(tail + at + 20, 2) != size - (uint64_t)at - END_BYTES))
        at--;
    if (ok && at < 0)
        ok = damaged(a, "it is not a zip archive of the kind that torch.save has written since PyTorch 1.6",
                     err);
    if (ok) {
        a->entries = number(tail + at + 10, 2);
        a->directory_bytes = number(tail + at + 12, 4);
        a->directory = number(tail + at + 16, 4);
        ok = read_end64(a, a->bytes - size + (uint64_t)at, err);
    }
    free(tail);
    if (!ok) return false;
    if (a->directory > a->bytes || a->directory_bytes > a->bytes - a->directory)
        return damaged(a, "its directory is after its end", err);
    if (a->directory_bytes > DIRECTORY_MAX_BYTES || a->entries > a->directory_bytes / CENTRAL_BYTES)
        return damaged(a, "its directory does not match the size of its entries", err);
    return true;
}

typedef struct Central {
    uint64_t flags, method, packed, bytes, name, extra, comment, local;
} Central;

static Central central_of(const uint8_t *at) {
    return (Central){.flags = number(at + 8, 2),
                     .method = number(at + 10, 2),
                     .packed = number(at + 20, 4),
                     .bytes = number(at + 24, 4),
                     .name = number(at + 28, 2),
                     .extra = number(at + 30, 2),
                     .comment = number(at + 32, 2),
                     .local = number(at + 42, 4)};
}

// Numbers that need 64 bits are in the extra field with id 1, in this order.
static void widen(Central *c, const uint8_t *extra) {
    for (uint64_t at = 0; at + 4 <= c->extra;) {
        uint64_t id = number(extra + at, 2), end = at + 4 + number(extra + at + 2, 2);
        uint64_t *fields[] = {&c->bytes, &c->packed, &c->local};
        at += 4;
        for (int i = 0; id == 1 && end <= c->extra && i < 3; i++) {
            if (*fields[i] != UINT32_MAX || at + 8 > end) continue;
            *fields[i] = number(extra + at, 8);
            at += 8;
        }
        at = end;
    }
}

// Locates the entry's data, which follows its local header and precedes the directory.
static bool place_entry(const Archive *a, const Central *c, TorchEntry *entry, Error *err) {
    uint8_t local[LOCAL_BYTES];
    if (c->local > a->directory || a->directory - c->local < LOCAL_BYTES + c->name)
        return damaged(a, "an entry is after its directory", err);
    if (!read_at(a, c->local, local, LOCAL_BYTES, err)) return false;
    uint64_t header = LOCAL_BYTES + c->name + number(local + 28, 2);
    if (!is(local, "PK\3\4") || number(local + 26, 2) != c->name || number(local + 8, 2) != c->method)
        return damaged(a, "an entry is not at the offset in its directory", err);
    char *name = xmalloc((size_t)c->name + 1, "an entry's name");
    bool ok = read_at(a, c->local + LOCAL_BYTES, name, c->name, err);
    if (ok && memcmp(name, entry->name, (size_t)c->name) != 0)
        ok = damaged(a, "an entry's name does not match the directory", err);
    free(name);
    if (!ok) return false;
    uint64_t written = number(local + 22, 4);
    bool said = !(number(local + 6, 2) & HAS_DESCRIPTOR) && written != UINT32_MAX;
    if ((said && written != c->bytes) || c->packed != c->bytes)
        return damaged(a, "an entry has two different sizes", err);
    if (header > a->directory - c->local || c->bytes > a->directory - c->local - header)
        return damaged(a, "an entry is longer than the file", err);
    entry->at = a->begin + c->local + header;
    entry->bytes = c->bytes;
    return true;
}

// Reads a directory entry. *length: its size in the directory.
static bool read_entry(Archive *a, const uint8_t *at, uint64_t left, uint64_t *length, Error *err) {
    if (left < CENTRAL_BYTES || !is(at, "PK\1\2")) return damaged(a, "its directory is malformed", err);
    Central c = central_of(at);
    *length = CENTRAL_BYTES + c.name + c.extra + c.comment;
    if (*length > left || memchr(at + CENTRAL_BYTES, 0, (size_t)c.name))
        return damaged(a, "its directory is malformed", err);
    if (c.method != 0 || c.flags & ENCRYPTED)
        return damaged(a, "an entry is compressed or encrypted, but torch.save does neither", err);
    widen(&c, at + CENTRAL_BYTES + c.name);
    TorchEntry *entry = &a->zip->entries[a->zip->count++];
    entry->name = text_format("%.*s", (int)c.name, at + CENTRAL_BYTES);
    return place_entry(a, &c, entry, err);
}

static int by_name(const void *a, const void *b) {
    return strcmp(((const TorchEntry *)a)->name, ((const TorchEntry *)b)->name);
}

static bool read_directory(Archive *a, Error *err) {
    TorchZip *zip = a->zip;
    uint8_t *directory = xmalloc((size_t)a->directory_bytes + 1, "an archive's directory");
    zip->entries = xcalloc((size_t)a->entries + 1, sizeof *zip->entries, "an archive's directory");
    bool ok = read_at(a, a->directory, directory, a->directory_bytes, err);
    uint64_t at = 0, length = 0;
    for (uint64_t i = 0; ok && i < a->entries; i++, at += length)
        ok = read_entry(a, directory + at, a->directory_bytes - at, &length, err);
    free(directory);
    if (!ok) return false;
    qsort(zip->entries, (size_t)zip->count, sizeof *zip->entries, by_name);
    for (int i = 1; i < zip->count; i++) {
        if (by_name(&zip->entries[i - 1], &zip->entries[i]) == 0)
            return damaged(a, "two entries have the same name", err);
    }
    return true;
}

bool torch_zip_read(TorchZip *zip, const char *path, int fd, uint64_t begin, uint64_t bytes, Error *err) {
    Archive a = {.path = path, .fd = fd, .begin = begin, .bytes = bytes, .zip = zip};
    *zip = (TorchZip){0};
    bool ok = read_end(&a, err) && read_directory(&a, err);
    if (!ok) torch_zip_free(zip);
    return ok;
}

void torch_zip_free(TorchZip *zip) {
    for (int i = 0; i < zip->count; i++) free(zip->entries[i].name);
    free(zip->entries);
    *zip = (TorchZip){0};
}

const TorchEntry *torch_zip_find(const TorchZip *zip, const char *name) {
    TorchEntry key = {.name = (char *)name};
    return (const TorchEntry *)bsearch(&key, zip->entries, (size_t)zip->count, sizeof key, by_name);
}
