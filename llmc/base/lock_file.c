// Lock files: see lock_file.h.
#include "llmc/base/lock_file.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

// Returns true if `name` is still this file. Another process may have removed it in the meantime.
static bool is_named(int folder, const char *name, int lock) {
    struct stat ours, named;
    return fstat(lock, &ours) == 0 && fstatat(folder, name, &named, AT_SYMLINK_NOFOLLOW) == 0 &&
           ours.st_dev == named.st_dev && ours.st_ino == named.st_ino;
}

int lock_file(int folder, const char *name) {
    const int flags = O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
    for (;;) {
        struct stat status;
        int lock = openat(folder, name, flags, 0600);
        if (lock < 0) {
            int reason = errno;
            errno = fstatat(folder, name, &status, AT_SYMLINK_NOFOLLOW) == 0 ? EEXIST : reason;
            return -1;
        }
        bool locked = flock(lock, LOCK_EX | LOCK_NB) == 0;
        if (locked && is_named(folder, name, lock)) return lock;
        int reason = errno;
        close(lock);
        errno = reason;
        if (!locked) return -1;
    }
}

void unlock_file(int folder, const char *name, int lock) {
    if (lock < 0) return;
    if (is_named(folder, name, lock)) unlinkat(folder, name, 0);
    close(lock);
}
