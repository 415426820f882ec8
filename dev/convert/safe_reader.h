// Reads safetensors files that other programs wrote, as hostile input: no size, offset or name of
// the header is believed before it is checked. Called by hf_files.c. Checkpoints of this program do
// not come here: their manifest says where everything lies (checkpoint_load.c).
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

enum { SAFE_MOST_DIMS = 8, SAFE_HEADER_MAX_BYTES = 16 << 20 };

// One tensor of the header.
typedef struct SafeEntry {
    char *name;
    char dtype[12];  // "F32", "BF16", "F16" and others
    int dims;
    int64_t shape[SAFE_MOST_DIMS];
    uint64_t begin, bytes;  // in the file's data section, within it
} SafeEntry;

typedef struct SafeFile {
    char *path;
    int fd;
    uint64_t data;  // where the data section begins
    SafeEntry *entries;
    int count;  // sorted by name, each name once
} SafeFile;

// Errors (EXIT_CHECKPOINT): no plain file, one that ends before its data do, a header that is
// longer than SAFE_HEADER_MAX_BYTES or no header. On failure nothing is left to close.
bool safe_file_open(SafeFile *file, const char *path, Error *err);
void safe_file_close(SafeFile *file);
// NULL: there is no such tensor.
const SafeEntry *safe_file_find(const SafeFile *file, const char *name);

// Bytes per element of the dtypes that weights may have, F32, BF16 and F16. 0: another one.
int safe_float_bytes(const char *dtype);
// Whether the tensor is (rows, columns), or with columns 0 (rows), of floats, and has as many
// bytes.
bool safe_entry_fits(const SafeEntry *entry, int64_t rows, int64_t columns);
// Elements [first, first + count) of such a tensor as fp32, which holds all three dtypes exactly.
// buffer: room for count elements of the file's.
bool safe_file_read(const SafeFile *file, const SafeEntry *entry, int64_t first, int64_t count, void *buffer,
                    float *out, Error *err);

LLMC_END
