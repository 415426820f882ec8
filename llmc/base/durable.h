// Files that survive a crash: written whole, fsynced, renamed into place. Used by all who write or
// read files that must be whole: logs, data, options and checkpoints. All errors are
// EXIT_CHECKPOINT and read "cannot <verb> <path>: <reason>; <what to do>".
#pragma once
#include <stdio.h>

#include "llmc/base/base.h"
LLMC_BEGIN

// Fills err from errno (0: the file ended early): "cannot <verb> <path>: <strerror>; <advice for
// this errno>". Returns false.
bool durable_error(Error *err, const char *verb, const char *path);

// write(2) and pread(2) until all bytes are through. EINTR and short counts are handled. pread_all:
// false with errno 0 at the end of the file.
bool write_all(int fd, const void *data, uint64_t bytes);
bool pread_all(int fd, void *data, uint64_t bytes, uint64_t offset);

// mkdir -p. Every folder made is fsynced into its parent.
bool durable_make_folders(const char *path, Error *err);
// mkdir -p, and that this process may make files in it. Asked before a run, not hours later.
bool durable_writable_folder(const char *path, Error *err);
// Makes a folder's entries durable.
bool durable_sync_folder(const char *path, Error *err);
// Creates or replaces a file with these bytes and fsyncs it. On failure it is removed. A link or
// pipe of that name is replaced too, a folder is an error.
bool durable_write_file(const char *path, const void *data, uint64_t bytes, Error *err);
// The whole file, malloc'ed and terminated with a 0 that *bytes does not count. NULL with err: also
// when it holds more than max_bytes or is not a plain file.
char *durable_read_file(const char *path, uint64_t max_bytes, uint64_t *bytes, Error *err);
// A plain file for reading, as fopen gives it. NULL with errno; 0 means that it is no plain file.
// Nothing else is waited for: a pipe's other end may never come.
FILE *durable_open_plain(const char *path);
// xxh3-64 of a whole file. goes_on(context) is asked after every piece of some megabytes. Where it
// says no, the rest is left unread: false, err as it was.
bool durable_hash_file(const char *path, uint64_t *xxh3, bool (*goes_on)(void *context), void *context,
                       Error *err);
// rm -r. Links are removed, not followed. True when nothing is left under the path.
bool durable_remove_tree(const char *path, Error *err);
bool durable_exists(const char *path);
// A plain file, or a link to one, of no more than max_bytes. Other kinds are not opened: a pipe's
// other end may never come.
bool durable_plain_file(const char *path, uint64_t max_bytes);

// A new file or folder put in the place of an old one, so that it can be undone.
typedef struct Replacement {
    const char *fresh, *final;  // paths: where the new one waits, and its place
    const char *aside;          // where the old one may be put meanwhile
    bool replaced;              // there was an old one
    bool exchanged;             // it lies under `fresh` now, else under `aside`
} Replacement;
// Puts `fresh` at `final`. Where the file system can (renameat2), an old `final` is exchanged with
// it atomically. Elsewhere it is first moved to `aside`, where a reader finds it after a crash
// between the two renames. On failure nothing has moved.
bool durable_replace(Replacement *replacement, Error *err);
// Undoes durable_replace as far as the file system allows: the old one is back at `final`, the new
// one at `fresh`.
void durable_replace_undo(const Replacement *replacement);

LLMC_END
