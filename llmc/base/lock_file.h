// Lock files that only their owner can open, so that other users who may read the folder cannot
// block a program by locking them. The kernel releases the lock when the process exits.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// Creates and locks a file, without following a link. folder: descriptor of the directory of
// `name`, or AT_FDCWD. Returns the descriptor, or -1 with errno: EWOULDBLOCK if another process
// holds the lock; EEXIST if another user's file or a link has this name; otherwise the folder is
// not writable or the file system does not support locks.
int lock_file(int folder, const char *name);
// Removes the file, which must be locked, and releases the lock. No-op if lock is -1.
void unlock_file(int folder, const char *name, int lock);

LLMC_END
