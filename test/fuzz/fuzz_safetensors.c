// safetensors files. The whole input is tried as a file; and, because a mutated length in front hardly ever fits, so is a file whose header is the text
// before the first 0xFF and whose data is what stands behind it.
#include <string.h>
#include <unistd.h>

#include "llmc/checkpoint/safetensors.h"
#include "test/fuzz/fuzz.h"

// Of the first tensor of that name: no name is there twice.
static int place_of(const SafeFile *file, const char *name) {
    int i = 0;
    while (strcmp(file->tensors[i].name, name) != 0) i++;
    return i;
}

static void read_tensors(const SafeFile *file) {
    Error err = {0};
    uint64_t next = 0;
    for (int i = 0; i < file->count; i++) {
        const SafeTensor *t = &file->tensors[i];
        uint64_t bytes = t->end - t->begin;
        PROMISE(t->begin == next && t->end >= t->begin && file->data_start + t->end <= file->file_bytes);
        PROMISE(place_of(file, t->name) == i && safe_dtype_bytes(t->dtype) > 0 && t->dims <= SAFE_DIMS);
        void *out = fuzz_copy(NULL, 0);
        out = xrealloc(out, bytes + 1, "a tensor");
        PROMISE(safe_read(file, t, 0, out, bytes, &err));
        PROMISE(!safe_read(file, t, 1, out, bytes, &err) && !safe_read(file, t, UINT64_MAX, out, 1, &err));
        free(out);
        next = t->end;
    }
    PROMISE(file->data_start + next == file->file_bytes);
}

static void try_file(const char *path) {
    SafeFile file;
    Error err = {0};
    if (!safe_open(&file, path, &err)) {
        fuzz_check_error(&err);
        return;
    }
    read_tensors(&file);
    safe_drop_tensors(&file);
    safe_suspend(&file);
    PROMISE(safe_resume(&file, &err));
    safe_suspend(&file);
    PROMISE(truncate(path, (off_t)file.file_bytes - 1) == 0 && !safe_resume(&file, &err));
    safe_close(&file);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    try_file(fuzz_file("raw.safetensors", data, size));
    FuzzParts parts = fuzz_parts(data, size);
    uint64_t length = parts.first_bytes;
    uint8_t *file = (uint8_t *)xmalloc(8 + size, "a file");
    memcpy(file, &length, 8);
    memcpy(file + 8, parts.first, parts.first_bytes);
    memcpy(file + 8 + parts.first_bytes, parts.second, parts.second_bytes);
    try_file(fuzz_file("made.safetensors", file, 8 + parts.first_bytes + parts.second_bytes));
    free(file);
    return 0;
}
