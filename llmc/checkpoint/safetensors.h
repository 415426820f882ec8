// safetensors files: u64 header length, JSON header, raw little-endian data. Checkpoint shards are
// safetensors files, so any other tool can read them. Used by checkpoint.c and checkpoint_load.c.
// The reader trusts nothing: lengths, offsets, overlaps, dtypes and shapes are checked.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

enum { SAFE_DIMS = 4, SAFE_HEADER_MAX = 256 << 20 };  // largest rank of a tensor, largest header in bytes

typedef struct SafeTensor {
    char *name;
    char dtype[8];      // "F32", "BF16", ...
    int dims;
    int64_t shape[SAFE_DIMS];
    uint64_t begin, end; // byte range in the data section; computed by the writer
} SafeTensor;

typedef struct SafeFile {
    char *path;
    int count;
    SafeTensor *tensors; // in the order of their data
    char *metadata;      // __metadata__ object as JSON text, or NULL
    int fd;
    uint64_t data_start, file_bytes;
} SafeFile;

// Bytes per element of a dtype name, 0 for an unknown one.
int safe_dtype_bytes(const char *dtype);

// Error (EXIT_CHECKPOINT) names the file and the fault. On failure nothing stays open.
bool safe_open(SafeFile *file, const char *path, Error *err);
void safe_close(SafeFile *file);
// Reads bytes [offset, offset + bytes) of a tensor's data.
bool safe_read(const SafeFile *file, const SafeTensor *tensor, uint64_t offset, void *out, uint64_t bytes, Error *err);

// For a reader of many files: drop the table of tensors once it has been checked; close the
// descriptor for a while (safe_read is then not allowed); open it again. safe_resume fails when the
// file is gone or has another size.
void safe_drop_tensors(SafeFile *file);
void safe_suspend(SafeFile *file);
bool safe_resume(SafeFile *file, Error *err);

// Streaming writer: the tensors' names, dtypes and shapes are declared first, then their data
// appended in that order.
typedef struct SafeWriter SafeWriter;
// metadata_json: an object whose values are all strings, or NULL. A name used twice, an unknown
// dtype: EXIT_CHECKPOINT, nothing written.
SafeWriter *safe_writer_open(const char *path, const SafeTensor *tensors, int count, const char *metadata_json, Error *err);
bool safe_writer_append(SafeWriter *writer, const void *data, uint64_t bytes, Error *err);
// Flushes, fsyncs, closes; *bytes and *xxh3 of the whole file for the manifest. Frees the writer
// whatever the result; on failure (also of an earlier append, or when fewer bytes were appended
// than declared) the file is removed.
bool safe_writer_close(SafeWriter *writer, uint64_t *bytes, uint64_t *xxh3, Error *err);
// Gives up: removes the file and frees the writer.
void safe_writer_discard(SafeWriter *writer);

LLMC_END
