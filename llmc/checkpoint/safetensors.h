// Writes safetensors files: u64 header length, JSON header, raw little-endian data. Checkpoint
// shards use this format so that other tools can read them. Used by checkpoint.c and hf_export.c.
// checkpoint_load.c locates the data through the manifest instead of the header.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// A flat list of elements, or a row-major matrix.
typedef struct SafeTensor {
    char *name;
    const char *dtype;  // "F32" or "BF16"
    int64_t elements;
    int64_t columns;  // columns of a matrix; 0: flat list
} SafeTensor;

// Bytes per element; 0 for any other dtype.
int safe_dtype_bytes(const char *dtype);

// Streaming writer: declare all tensors first, then append their data in the same order.
typedef struct SafeWriter SafeWriter;
// Opens a writer. Names must be unique. metadata_json: an object whose values are all strings.
// Returns NULL with EXIT_CHECKPOINT if the file cannot be created.
SafeWriter *safe_writer_open(const char *path, const SafeTensor *tensors, int count,
                             const char *metadata_json, Error *err);
bool safe_writer_append(SafeWriter *writer, const void *data, uint64_t bytes, Error *err);
// Flushes, fsyncs, closes and frees the writer. *bytes and *xxh3 describe the whole file, for the
// manifest. Fails and removes the file if an append failed or fewer bytes than declared were
// appended.
bool safe_writer_close(SafeWriter *writer, uint64_t *bytes, uint64_t *xxh3, Error *err);
// Removes the file and frees the writer.
void safe_writer_discard(SafeWriter *writer);

LLMC_END
