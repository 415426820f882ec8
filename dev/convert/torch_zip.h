// The zip archives that torch.save writes: where each entry's bytes lie in the file. Entries are
// stored, not compressed, so they are read in place. Read as hostile input. Called by torch_file.c.
//
// Zip libraries check the sums of entries, which torch leaves out on demand
// (torch.serialization.set_crc32_options), and read from the start of an entry on.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

typedef struct TorchEntry {
    char *name;
    uint64_t at, bytes;  // in the file
} TorchEntry;

typedef struct TorchZip {
    TorchEntry *entries;
    int count;  // sorted by name, each name once
} TorchZip;

// The archive that is bytes [begin, begin + bytes) of a file, which has them. path: for messages.
// Every entry lies within the archive, its local header says the same as the directory. Errors:
// EXIT_CHECKPOINT. On failure nothing is left to free.
bool torch_zip_read(TorchZip *zip, const char *path, int fd, uint64_t begin, uint64_t bytes, Error *err);
void torch_zip_free(TorchZip *zip);
// NULL: there is no such entry.
const TorchEntry *torch_zip_find(const TorchZip *zip, const char *name);

LLMC_END
