// A file of torch.save. If the first byte is T, the rest is the file. Otherwise the input is only
// the pickle, and the target builds an archive with it and one 64-byte storage, data/0. Accepted
// tensors must be inside the file and are read completely.
#include "dev/convert/torch_file.h"
#include "test/fuzz/fuzz.h"

enum { MOST_SEEN = 2000, MOST_ELEMENTS = 1 << 16 };

static void put(uint8_t **at, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++) *(*at)++ = i < 8 ? (uint8_t)(value >> 8 * i) : 0;
}

static void put_text(uint8_t **at, const void *text, size_t bytes) {
    if (bytes) memcpy(*at, text, bytes);
    *at += bytes;
}

typedef struct Entry {
    const char *name;
    const void *data;
    size_t bytes;
    uint64_t local;
} Entry;

static void put_header(uint8_t **at, const Entry *e, bool central) {
    put_text(at, central ? "PK\1\2" : "PK\3\4", 4);
    if (central) put(at, 0, 2);
    put(at, 0, 12);  // version, flags, method, time, date
    put(at, 0, 4);   // checksum
    put(at, e->bytes, 4);
    put(at, e->bytes, 4);
    put(at, strlen(e->name), 2);
    put(at, 0, central ? 14 : 2);  // extra, comment, disk, attributes
    if (central) put(at, e->local, 4);
    put_text(at, e->name, strlen(e->name));
}

// Builds an archive with the pickle and sets *size to its bytes.
static uint8_t *archive(const uint8_t *pickle, size_t bytes, size_t *size) {
    static const uint8_t storage[64] = {1, 2, 3};
    Entry entries[] = {{"a/data.pkl", pickle, bytes, 0}, {"a/data/0", storage, sizeof storage, 0}};
    uint8_t *file = (uint8_t *)xcalloc(1, bytes + 1024, "an input"), *at = file;
    for (int i = 0; i < 2; i++) {
        entries[i].local = (uint64_t)(at - file);
        put_header(&at, &entries[i], false);
        put_text(&at, entries[i].data, entries[i].bytes);
    }
    uint64_t directory = (uint64_t)(at - file);
    for (int i = 0; i < 2; i++) put_header(&at, &entries[i], true);
    uint64_t length = (uint64_t)(at - file) - directory;
    put_text(&at, "PK\5\6", 4);
    put(&at, 0, 4);
    put(&at, 2, 2);
    put(&at, 2, 2);
    put(&at, length, 4);
    put(&at, directory, 4);
    put(&at, 0, 2);
    *size = (size_t)(at - file);
    return file;
}

static void read_tensor(const TorchFile *torch, const PickleValue *value, uint64_t file_bytes) {
    SafeEntry entry;
    Error err = {0};
    if (!torch_tensor(torch, value, "x", &entry, &err)) {
        fuzz_check_error(&err);
        return;
    }
    uint64_t width = (uint64_t)safe_float_bytes(entry.dtype);
    if (!width) return;
    PROMISE(entry.begin <= file_bytes && entry.bytes <= file_bytes - entry.begin);
    int64_t count = (int64_t)(entry.bytes / width);
    if (count > MOST_ELEMENTS) return;
    void *narrow = xmalloc((size_t)count * 4 + 1, "an input");
    float *wide = (float *)xmalloc((size_t)count * 4 + 1, "an input");
    PROMISE(safe_file_read(torch->file, &entry, 0, count, narrow, wide, &err));
    free(narrow);
    free(wide);
}

static void look(const TorchFile *torch, const PickleValue *value, uint64_t bytes, int depth, int *seen) {
    if (!value || depth > 4 || ++*seen > MOST_SEEN) return;
    if (torch_is_tensor(value)) read_tensor(torch, value, bytes);
    for (size_t i = 0; i < value->count; i++) look(torch, value->items[i], bytes, depth + 1, seen);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    SafeFile file;
    TorchFile torch;
    Error err = {0};
    uint64_t bytes;
    int seen = 0;
    bool whole = size && *data == 'T';
    size_t length = size - whole;
    uint8_t *built = whole ? NULL : archive(data, size, &length);
    const char *path = fuzz_file("x.pt", whole ? data + 1 : built, length);
    free(built);
    PROMISE(safe_open_plain(&file, path, &bytes, &err));
    if (torch_file_read(&torch, &file, bytes, 0, bytes, &err)) {
        look(&torch, torch.pickle.root, bytes, 0, &seen);
        torch_file_free(&torch);
    } else {
        fuzz_check_error(&err);
    }
    safe_file_close(&file);
    return 0;
}
