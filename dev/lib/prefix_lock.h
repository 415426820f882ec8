// Prevents two programs from writing the same shard at the same time, which would mix their
// temporary files. preprocess_data and merge_datasets hold the lock while they use a ShardWriter.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// Creates the directory of the prefix if needed, and locks <prefix>.lock until prefix_unlock or
// until the process exits. Returns true with *lock = -1 if the file system does not support locks
// or the directory is not writable, which the ShardWriter reports. Errors: EXIT_DATA if another
// program holds the lock or the file cannot be opened, EXIT_ENVIRONMENT if the directory cannot be
// created.
bool prefix_lock(const char *prefix, int *lock, Error *err);
// Releases the lock and removes the lock file.
void prefix_unlock(const char *prefix, int lock);

LLMC_END
