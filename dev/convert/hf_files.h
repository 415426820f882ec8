// Weight files of a Hugging Face directory: model.safetensors, or several files listed in an index.
// Treated as untrusted input. Called by hf_import.c.
#pragma once
#include "dev/convert/safe_reader.h"
LLMC_BEGIN

// A tensor and the file that contains it.
typedef struct HfTensorPlace {
    const char *name;  // points into entry
    const SafeFile *file;
    const SafeEntry *entry;
} HfTensorPlace;

typedef struct HfFiles {
    SafeFile *files;
    int file_count;
    HfTensorPlace *tensors;
    int count;  // sorted by name, names are unique
} HfFiles;

// Opens the weight files. File names in the index must be plain names that end in .safetensors, so
// that none leads out of the directory. Errors: EXIT_CHECKPOINT. On failure nothing needs closing.
bool hf_files_open(HfFiles *files, const char *folder, Error *err);
void hf_files_close(HfFiles *files);
// Returns NULL if there is no such tensor.
const HfTensorPlace *hf_files_find(const HfFiles *files, const char *name);

LLMC_END
