// Reads files written by torch.save. See torch_file.h. The archive contains, in a folder of any
// name:
//
//   FOLDER/data.pkl     the saved object. A tensor is a call to torch._utils._rebuild_tensor_v2(
//                       storage, first element, sizes, strides, ...), and its storage a reference
//                       ("storage", class, key, device, elements)
//   FOLDER/data/KEY     the bytes of a storage
//   FOLDER/byteorder    "little"; optional
#include "dev/convert/torch_file.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/durable.h"

#define DATA "/data.pkl"

static bool damaged(const char *path, const char *fault, Error *err) {
    return ckpt_error(err, "%s cannot be read: %s; save or copy it again", path, fault);
}

static const TorchEntry *entry_of(const TorchFile *torch, const char *name) {
    char *path = text_format("%s/%s", torch->folder, name);
    const TorchEntry *entry = torch_zip_find(&torch->zip, path);
    free(path);
    return entry;
}

static bool find_folder(TorchFile *torch, Error *err) {
    for (int i = 0; i < torch->zip.count; i++) {
        const char *name = torch->zip.entries[i].name;
        size_t length = strlen(name), ending = strlen(DATA);
        if (length <= ending || strcmp(name + length - ending, DATA) != 0) continue;
        torch->folder = xstrdup(name);
        torch->folder[length - ending] = 0;
        return true;
    }
    return damaged(torch->file->path, "its archive has no data.pkl", err);
}

static bool check_order(const TorchFile *torch, Error *err) {
    char order[6];
    const TorchEntry *entry = entry_of(torch, "byteorder");
    if (!entry) return true;
    if (entry->bytes != sizeof order)
        return damaged(torch->file->path, "its bytes are not little-endian", err);
    if (!pread_all(torch->file->fd, order, sizeof order, entry->at))
        return durable_error(err, "read", torch->file->path);
    return memcmp(order, "little", sizeof order) == 0 ||
           damaged(torch->file->path, "its bytes are not little-endian", err);
}

static bool read_pickle(TorchFile *torch, Error *err) {
    const TorchEntry *entry = entry_of(torch, "data.pkl");
    const char *path = torch->file->path;
    if (entry->bytes > PICKLE_MAX_BYTES) return damaged(path, "its pickle is larger than 256 MiB", err);
    void *data = xmalloc((size_t)entry->bytes + 1, "a pickle");
    bool ok = pread_all(torch->file->fd, data, entry->bytes, entry->at) || durable_error(err, "read", path);
    const char *fault = ok ? pickle_read(&torch->pickle, data, (size_t)entry->bytes) : NULL;
    free(data);
    return ok && (!fault || damaged(path, fault, err));
}

bool torch_file_read(TorchFile *torch, const SafeFile *file, uint64_t file_bytes, uint64_t begin,
                     uint64_t bytes, Error *err) {
    *torch = (TorchFile){.file = file};
    if (begin > file_bytes || bytes > file_bytes - begin)
        return damaged(file->path, "it is shorter than its tensors", err);
    bool ok = torch_zip_read(&torch->zip, file->path, file->fd, begin, bytes, err) &&
              find_folder(torch, err) && check_order(torch, err) && read_pickle(torch, err);
    if (!ok) torch_file_free(torch);
    return ok;
}

void torch_file_free(TorchFile *torch) {
    torch_zip_free(&torch->zip);
    pickle_free(&torch->pickle);
    free(torch->folder);
    torch->folder = NULL;
}

typedef struct Storage {
    const char *class, *dtype;
    int bytes;  // per element
} Storage;
static const Storage STORAGES[] = {
    {"torch FloatStorage", "F32", 4},
    {"torch BFloat16Storage", "BF16", 2},
    {"torch HalfStorage", "F16", 2},
};

// Returns the call that creates the tensor, or NULL.
static const PickleValue *call_of(const PickleValue *value) {
    const PickleValue *inner = pickle_argument(value, "torch._utils _rebuild_parameter", 0);
    if (inner) value = inner;
    bool known = pickle_made_by(value, "torch._utils _rebuild_tensor_v2") ||
                 pickle_made_by(value, "torch._utils _rebuild_tensor") ||
                 pickle_made_by(value, "torch._utils _rebuild_tensor_v3");
    return known ? value : NULL;
}

bool torch_is_tensor(const PickleValue *value) { return call_of(value) != NULL; }

// Sets *elements to the product of the sizes and returns true if the strides are row-major.
static bool lies_row_by_row(const SafeEntry *entry, const int64_t *strides, int64_t *elements) {
    int64_t stride = 1;
    bool empty = false;
    for (int i = 0; i < entry->dims; i++) empty = empty || entry->shape[i] == 0;
    *elements = empty ? 0 : 1;
    for (int i = entry->dims; !empty && i-- > 0;) {
        if (entry->shape[i] != 1 && strides[i] != stride) return false;
        if (__builtin_mul_overflow(stride, entry->shape[i], &stride)) return false;
        *elements = stride;
    }
    return true;
}

// Returns NULL or an error text.
static const char *place(const TorchFile *torch, const PickleValue *call, SafeEntry *entry) {
    const PickleValue *arguments = call->arguments, *stored = pickle_item(arguments, 0);
    const PickleValue *reference = stored && stored->kind == PICKLE_STORED ? stored->arguments : NULL;
    const PickleValue *class = pickle_item(reference, 1);
    const char *key = pickle_text(pickle_item(reference, 2));
    int64_t first, elements, in_storage, strides[SAFE_MOST_DIMS], end;
    entry->dims = pickle_sizes(pickle_item(arguments, 2), entry->shape, SAFE_MOST_DIMS);
    if (entry->dims < 0 || pickle_sizes(pickle_item(arguments, 3), strides, SAFE_MOST_DIMS) != entry->dims)
        return "has malformed sizes";
    strcpy(entry->dtype, "other");
    const Storage *known = NULL;
    for (size_t i = 0; i < sizeof STORAGES / sizeof *STORAGES && class && class->kind == PICKLE_GLOBAL; i++) {
        if (strcmp(class->text, STORAGES[i].class) == 0) known = &STORAGES[i];
    }
    if (!known) return NULL;
    strcpy(entry->dtype, known->dtype);
    if (!key || !pickle_int(pickle_item(arguments, 1), 0, INT64_MAX, &first) ||
        !pickle_int(pickle_item(reference, 4), 0, INT64_MAX / 4, &in_storage))
        return "has a malformed storage";
    if (!lies_row_by_row(entry, strides, &elements)) return "is not stored in row-major order";
    char *path = text_format("data/%s", key);
    const TorchEntry *data = entry_of(torch, path);
    free(path);
    if (!data || data->bytes < (uint64_t)in_storage * (uint64_t)known->bytes) return "has no storage";
    if (__builtin_add_overflow(first, elements, &end) || end > in_storage)
        return "is longer than its storage";
    entry->begin = data->at + (uint64_t)first * (uint64_t)known->bytes;
    entry->bytes = (uint64_t)elements * (uint64_t)known->bytes;
    return NULL;
}

bool torch_tensor(const TorchFile *torch, const PickleValue *value, const char *name, SafeEntry *entry,
                  Error *err) {
    const PickleValue *call = call_of(value);
    *entry = (SafeEntry){0};
    const char *fault = call ? place(torch, call, entry) : "is not a tensor";
    if (!fault) return true;
    return ckpt_error(err, "%s: '%.200s' %s; save or copy it again", torch->file->path, name, fault);
}
