// A folder that an export creates: built under a temporary name next to its destination, and
// renamed once it is complete. Called by hf_export.c and hf_peft.c.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

typedef struct HfFolder {
    const char *output;
    char *parent, *fresh;  // fresh: the temporary folder, for the caller's files
} HfFolder;

// Checks that the output folder is missing or empty. Error: EXIT_USAGE.
bool hf_folder_check(const char *output, Error *err);
// Creates the temporary folder ".NAME.tmp", after deleting leftovers of a killed export. Also
// fails like hf_folder_check. Call hf_folder_close even after an error.
bool hf_folder_open(HfFolder *folder, const char *output, Error *err);
// Renames the folder to its destination.
bool hf_folder_publish(const HfFolder *folder, Error *err);
// failed: deletes the temporary folder.
void hf_folder_close(HfFolder *folder, bool failed);

LLMC_END
