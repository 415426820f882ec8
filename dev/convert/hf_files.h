// The weights of a Hugging Face folder: model.safetensors, or parts of it that an index names. Read
// as hostile input. Called by hf_import.c.
#pragma once
#include "dev/convert/safe_reader.h"
LLMC_BEGIN

// A tensor, and the file that holds it.
typedef struct HfTensorPlace {
    const char *name;  // the entry's
    const SafeFile *file;
    const SafeEntry *entry;
} HfTensorPlace;

typedef struct HfFiles {
    SafeFile *files;
    int file_count;
    HfTensorPlace *tensors;
    int count;  // sorted by name, each name once
} HfFiles;

// The index's file names are plain names with the ending .safetensors: none leads out of the
// folder. Errors: EXIT_CHECKPOINT. On failure nothing is left to close.
bool hf_files_open(HfFiles *files, const char *folder, Error *err);
void hf_files_close(HfFiles *files);
// NULL: there is no such tensor.
const HfTensorPlace *hf_files_find(const HfFiles *files, const char *name);

LLMC_END
