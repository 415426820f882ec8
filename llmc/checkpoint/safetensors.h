// Writes safetensors files: u64 header length, JSON header, raw little-endian data. Checkpoint
// shards are such files, so that any other tool can read them. Used by checkpoint.c and
// hf_export.c. checkpoint_load.c finds the data by the manifest and does not read the header.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// One tensor: a flat list of elements, or a matrix row by row.
typedef struct SafeTensor {
    char *name;
    const char *dtype;  // "F32" or "BF16"
    int64_t elements;
    int64_t columns;  // of a matrix; 0: a flat list
} SafeTensor;

// Bytes per element; 0 for another dtype.
int safe_dtype_bytes(const char *dtype);

// Streaming: the tensors are declared first, then their data appended in that order.
typedef struct SafeWriter SafeWriter;
// No name may occur twice. metadata_json: an object whose values are all strings. NULL with
// EXIT_CHECKPOINT where the file cannot be made.
SafeWriter *safe_writer_open(const char *path, const SafeTensor *tensors, int count,
                             const char *metadata_json, Error *err);
bool safe_writer_append(SafeWriter *writer, const void *data, uint64_t bytes, Error *err);
// Flushes, fsyncs, closes and frees the writer. *bytes and *xxh3: of the whole file, for the
// manifest. On failure the file is removed: also of an earlier append, or when fewer bytes were
// appended than declared.
bool safe_writer_close(SafeWriter *writer, uint64_t *bytes, uint64_t *xxh3, Error *err);
// Gives up: removes the file and frees the writer.
void safe_writer_discard(SafeWriter *writer);

LLMC_END
