// Locks a shard for writing: see prefix_lock.h.
#include "dev/lib/prefix_lock.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/append.h"
#include "llmc/base/durable.h"

// Creates the directory of the shard.
static bool make_folder_of(const char *prefix, Error *err) {
    char *folder = xstrdup(prefix), *slash = strrchr(folder, '/');
    if (slash) *slash = 0;
    bool made = !slash || slash == folder || append_make_folders(folder, err);
    free(folder);
    return made;
}

bool prefix_lock(const char *prefix, int *lock, Error *err) {
    *lock = -1;
    if (!make_folder_of(prefix, err)) return false;
    char *path = text_format("%s.lock", prefix);
    *lock = lock_file(AT_FDCWD, path);
    int reason = *lock < 0 ? errno : 0;
    free(path);
    if (reason == EEXIST)
        return data_error(err,
                          "%s.lock belongs to another user or is a link; remove it if no program is writing "
                          "the shard, or choose another --output-prefix",
                          prefix);
    return reason != EWOULDBLOCK ||
           data_error(err, "another program is writing %s; wait for it or choose another --output-prefix",
                      prefix);
}

void prefix_unlock(const char *prefix, int lock) {
    char *path = text_format("%s.lock", prefix);
    unlock_file(AT_FDCWD, path, lock);
    free(path);
}
