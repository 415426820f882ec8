// Crash-safe files: written whole, fsynced, and renamed into place. Errors are EXIT_CHECKPOINT,
// "cannot <verb> <path>: <reason>; <what to do>".
#pragma once
#include <stdio.h>

#include "llmc/base/base.h"
LLMC_BEGIN

// Fills err from errno (0: the file ended early): "cannot <verb> <path>: <strerror>; <advice for
// this errno>". Returns false and keeps errno.
bool durable_error(Error *err, const char *verb, const char *path);

// write(2) and pread(2) of all bytes, handling EINTR and short counts. pread_all returns false with
// errno 0 at the end of the file.
bool write_all(int fd, const void *data, uint64_t bytes);
bool pread_all(int fd, void *data, uint64_t bytes, uint64_t offset);

// Creates directories (mkdir -p), each fsynced into its parent. Sets errno on failure.
bool durable_make_folders(const char *path, Error *err);
// Creates the directory and checks that it is writable. Called before a run, so that it does not
// fail hours later.
bool durable_writable_folder(const char *path, Error *err);
// Fsyncs a directory's entries.
bool durable_sync_folder(const char *path, Error *err);
// Creates an empty file for writing. Replaces a file, link or pipe of that name without opening or
// following it. Returns its descriptor, or -1 with errno.
int durable_create(const char *path);
// Creates or replaces a file with these bytes and fsyncs it. Removes it on failure. Replaces a link
// or pipe of that name; a directory is an error.
bool durable_write_file(const char *path, const void *data, uint64_t bytes, Error *err);
// Reads a whole file: malloc'ed and NUL-terminated (not counted in *bytes). Returns NULL with err
// on failure, also if the file is larger than max_bytes or not a plain file.
char *durable_read_file(const char *path, uint64_t max_bytes, uint64_t *bytes, Error *err);
// Opens a plain file for reading. Returns NULL with errno, which is 0 if path is not a
// plain file. Never blocks on a pipe.
FILE *durable_open_plain(const char *path);
// Computes xxh3-64 of a whole file. keep_going(context) is called every few megabytes; if it
// returns false, hashing stops: returns false with err unchanged.
bool durable_hash_file(const char *path, uint64_t *xxh3, bool (*keep_going)(void *context), void *context,
                       Error *err);
// Removes a tree (rm -r) without following links. Returns true if nothing is left.
bool durable_remove_tree(const char *path, Error *err);
bool durable_exists(const char *path);
// Returns true for a plain file (or a link to one) of at most max_bytes. Does not open it, because
// a pipe could block.
bool durable_plain_file(const char *path, uint64_t max_bytes);

// Replacement of a file or directory by a new one, which can be undone.
typedef struct Replacement {
    const char *fresh, *final;  // path of the new file before and after the replacement
    const char *aside;          // where the old file is kept meanwhile
    bool replaced;              // an old file existed
    bool exchanged;             // the old file is now at `fresh`, otherwise at `aside`
} Replacement;
// Moves `fresh` to `final`. If the file system supports it (renameat2), atomically exchanges it
// with an existing `final`. Otherwise first moves the old file to `aside`, where readers find it
// after a crash between the two renames. On failure nothing has moved.
bool durable_replace(Replacement *replacement, Error *err);
// Undoes durable_replace as far as possible: moves the old file back to `final`, the new one to
// `fresh`.
void durable_replace_undo(const Replacement *replacement);

// --- lock files ----------------------------------------------------------------------------------

// Lock files that only their owner can open, so that other users who may read the folder cannot
// block a program by locking them. The kernel releases the lock when the process exits.

// Creates and locks a file, without following a link. folder: descriptor of the directory of
// `name`, or AT_FDCWD. Returns the descriptor, or -1 with errno: EWOULDBLOCK if another process
// holds the lock; EEXIST if another user's file or a link has this name; otherwise the folder is
// not writable or the file system does not support locks.
int lock_file(int folder, const char *name);
// Removes the file, which must be locked, and releases the lock. No-op if lock is -1.
void unlock_file(int folder, const char *name, int lock);

LLMC_END
