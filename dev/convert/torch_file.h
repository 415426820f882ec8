// Reads files written by torch.save and the tensors in them. The pickle is parsed as data
// (pickle.h) and never executed. All files are untrusted input. Called by megatron_dist.c and
// megatron_legacy.c.
#pragma once
#include "dev/convert/pickle.h"
#include "dev/convert/safe_reader.h"
#include "dev/convert/torch_zip.h"
LLMC_BEGIN

typedef struct TorchFile {
    const SafeFile *file;  // the file that contains it
    TorchZip zip;
    Pickle pickle;  // pickle.root: the saved object
    char *folder;   // common prefix of the entries' names
} TorchFile;

// Reads bytes [begin, begin + bytes) of a file as an archive of torch.save. Errors: EXIT_CHECKPOINT
// if the range exceeds the file or torch.save does not write such content. On failure nothing needs
// freeing.
bool torch_file_read(TorchFile *torch, const SafeFile *file, uint64_t file_bytes, uint64_t begin,
                     uint64_t bytes, Error *err);
void torch_file_free(TorchFile *torch);

// Returns true for a tensor, or a parameter that wraps one.
bool torch_is_tensor(const PickleValue *value);
// Locates a tensor's elements in the file, as an entry for safe_file_read with name NULL. dtype is
// "F32", "BF16", "F16", or "other" (unknown element size). name: for error messages. Errors
// (EXIT_CHECKPOINT): a tensor that is not contiguous in row-major order, or exceeds its storage.
bool torch_tensor(const TorchFile *torch, const PickleValue *value, const char *name, SafeEntry *entry,
                  Error *err);

LLMC_END
