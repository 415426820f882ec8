// Locks a shard for writing, see prefix_lock.h. Uses flock, so a killed program leaves no lock.
#include "dev/lib/prefix_lock.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/base/append.h"

// Creates the directory of the shard.
static bool make_folder_of(const char *prefix, Error *err) {
    char *folder = xstrdup(prefix), *slash = strrchr(folder, '/');
    if (slash) *slash = 0;
    bool made = !slash || slash == folder || append_make_folders(folder, err);
    free(folder);
    return made;
}

static char *temporary_index(const char *prefix) { return text_format("%s.idx.tmp", prefix); }

bool prefix_lock(const char *prefix, int *lock, Error *err) {
    *lock = -1;
    if (!make_folder_of(prefix, err)) return false;
    char *path = temporary_index(prefix);
    *lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    free(path);
    if (*lock < 0 || flock(*lock, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return true;
    close(*lock);
    *lock = -1;
    return error_set(err, EXIT_DATA,
                     "another program is writing %s; wait for it or choose another --output-prefix", prefix);
}

void prefix_unlock(const char *prefix, int lock) {
    if (lock < 0) return;
    char *path = temporary_index(prefix);
    struct stat ours, there;
    bool left = fstat(lock, &ours) == 0 && stat(path, &there) == 0 && ours.st_dev == there.st_dev &&
                ours.st_ino == there.st_ino;
    if (left) unlink(path);
    close(lock);
    free(path);
}
