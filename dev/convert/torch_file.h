// Files of torch.save, and tensors in them. The pickle is read as data (pickle.h) and nothing of it
// is executed. Called by megatron_dist.c and megatron_legacy.c. All of it is hostile input.
#pragma once
#include "dev/convert/pickle.h"
#include "dev/convert/safe_reader.h"
#include "dev/convert/torch_zip.h"
LLMC_BEGIN

typedef struct TorchFile {
    const SafeFile *file;  // the file that it lies in
    TorchZip zip;
    Pickle pickle;  // pickle.root: what was saved
    char *folder;   // the entries' names begin with it
} TorchFile;

// Opens a plain file to read from, of any format: entries of tensors are made by torch_tensor.
// *bytes: its size. safe_file_close closes it. Errors: EXIT_CHECKPOINT.
bool torch_open(SafeFile *file, const char *path, uint64_t *bytes, Error *err);

// What torch.save wrote as bytes [begin, begin + bytes) of a file. Errors: EXIT_CHECKPOINT; a range
// that the file does not have, or anything that torch.save does not write. On failure nothing is
// left to free.
bool torch_file_read(TorchFile *torch, const SafeFile *file, uint64_t file_bytes, uint64_t begin,
                     uint64_t bytes, Error *err);
void torch_file_free(TorchFile *torch);

// Whether the value is a tensor, or a parameter that holds one.
bool torch_is_tensor(const PickleValue *value);
// Where such a tensor's elements lie, for safe_file_read: row by row, within the file. Its name is
// NULL. dtype "F32", "BF16", "F16", else "other", of which no size is known. name: for messages.
// Errors (EXIT_CHECKPOINT): a tensor that lies otherwise, or beyond its storage.
bool torch_tensor(const TorchFile *torch, const PickleValue *value, const char *name, SafeEntry *entry,
                  Error *err);

LLMC_END
