// Keeps two programs from writing the same shard at the same time, which would mix their temporary
// files. Taken by preprocess_data and merge_datasets around a ShardWriter.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// Makes the prefix's folder where there is none. Locks <prefix>.idx.tmp, the writer's temporary
// index, until prefix_unlock or the end of the process. *lock: to be unlocked; -1 where the file
// system has no locks or the file cannot be made, which the writer will explain. Errors: EXIT_DATA
// when another program holds it, EXIT_ENVIRONMENT for a folder that cannot be made.
bool prefix_lock(const char *prefix, int *lock, Error *err);
// Also removes the temporary index if the writer has not come as far as to rename or remove it.
void prefix_unlock(const char *prefix, int lock);

LLMC_END
