// Reads safetensors files written by other programs as untrusted input: all sizes, offsets and
// names in the header are validated. Called by hf_files.c. The trainer's checkpoints are read
// through their manifest instead (checkpoint_load.c).
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

enum { SAFE_MOST_DIMS = 8, SAFE_HEADER_MAX_BYTES = 16 << 20 };

// One tensor in the header.
typedef struct SafeEntry {
    char *name;
    char dtype[12];  // "F32", "BF16", "F16" and others
    int dims;
    int64_t shape[SAFE_MOST_DIMS];
    uint64_t begin, bytes;  // range within the file's data section
} SafeEntry;

typedef struct SafeFile {
    char *path;
    int fd;
    uint64_t data;  // offset of the data section
    SafeEntry *entries;
    int count;  // sorted by name, names are unique
} SafeFile;

// Opens a regular file of any format, without entries. *bytes: its size. Errors: EXIT_CHECKPOINT.
// On failure nothing needs closing.
bool safe_open_plain(SafeFile *file, const char *path, uint64_t *bytes, Error *err);
// Opens a safetensors file. Errors (EXIT_CHECKPOINT): not a regular file, truncated data, a header
// that is malformed or larger than SAFE_HEADER_MAX_BYTES. On failure nothing needs closing.
bool safe_file_open(SafeFile *file, const char *path, Error *err);
void safe_file_close(SafeFile *file);
// Returns NULL if there is no such tensor.
const SafeEntry *safe_file_find(const SafeFile *file, const char *name);

// Bytes per element of the supported weight dtypes F32, BF16 and F16; 0 for any other.
int safe_float_bytes(const char *dtype);
// Returns true if the tensor has a supported dtype, shape (rows, columns), or (rows) if columns is
// 0, and the matching size in bytes.
bool safe_entry_fits(const SafeEntry *entry, int64_t rows, int64_t columns);
// Reads elements [first, first + count) of such a tensor as fp32, which is exact for all three
// dtypes. buffer must hold count elements of the file's dtype.
bool safe_file_read(const SafeFile *file, const SafeEntry *entry, int64_t first, int64_t count, void *buffer,
                    float *out, Error *err);

LLMC_END
