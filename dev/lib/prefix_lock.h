// Prevents two programs from writing the same shard at the same time and mixing their temporary
// files. Held by preprocess_data and merge_datasets while they use a ShardWriter.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// Creates the prefix's directory if needed and locks <prefix>.lock until prefix_unlock or process
// exit. *lock is -1 if the file system does not support locks or the directory is not writable (the
// writer reports the latter). Errors: EXIT_DATA if another program holds the lock or the file
// cannot be opened, EXIT_ENVIRONMENT if the directory cannot be created.
bool prefix_lock(const char *prefix, int *lock, Error *err);
// Removes the lock file.
void prefix_unlock(const char *prefix, int lock);

LLMC_END
