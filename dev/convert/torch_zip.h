// Reads the directory of zip archives written by torch.save. Entries are stored uncompressed, so
// their data can be read in place. Archives are untrusted input. Called by torch_file.c.
//
// A zip library is not suitable: it verifies checksums, which torch can omit
// (torch.serialization.set_crc32_options), and cannot seek within an entry.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

typedef struct TorchEntry {
    char *name;
    uint64_t at, bytes;  // offset and size in the file
} TorchEntry;

typedef struct TorchZip {
    TorchEntry *entries;
    int count;  // sorted by name, names are unique
} TorchZip;

// Reads the archive in bytes [begin, begin + bytes) of a file, which must be at least that long.
// path: for error messages. Every entry must be within the archive, and its local header must match
// the directory. Errors: EXIT_CHECKPOINT. On failure nothing needs freeing.
bool torch_zip_read(TorchZip *zip, const char *path, int fd, uint64_t begin, uint64_t bytes, Error *err);
void torch_zip_free(TorchZip *zip);
// Returns NULL if there is no such entry.
const TorchEntry *torch_zip_find(const TorchZip *zip, const char *name);

LLMC_END
