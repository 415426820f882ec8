// Crash-safe files: see durable.h.
#include "llmc/base/durable.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

enum { CHUNK_BYTES = 1 << 30, HASH_BUFFER_BYTES = 4 << 20, TREE_DESCRIPTORS = 16 };

static const char *advice(int number) {
    switch (number) {
        case ENOSPC:
        case EDQUOT: return "free some space or choose another folder";
        case EFBIG: return "raise the file size limit (ulimit -f) or choose another file system";
        case EACCES:
        case EPERM:
        case EROFS: return "check the permissions or choose another folder";
        case ENOENT: return "check the path; every rank must see the same file system";
        case ENOTDIR:
        case EEXIST: return "a file is in the way: move it or choose another folder";
        case ELOOP: return "this name is a link: remove it";
        case EISDIR: return "a folder is in the way: remove it";
        case EMFILE:
        case ENFILE: return "raise the limit on open files (ulimit -n)";
        default: return "check the disk and the system log";
    }
}

bool durable_error(Error *err, const char *verb, const char *path) {
    int number = errno;
    ckpt_error(err, "cannot %s %s: %s; %s", verb, path, number ? strerror(number) : "the file ended early",
               advice(number));
    errno = number;
    return false;
}

bool write_all(int fd, const void *data, uint64_t bytes) {
    assert(fd >= 0 && (data || bytes == 0));
    const char *p = (const char *)data;
    while (bytes > 0) {
        ssize_t done = write(fd, p, bytes < CHUNK_BYTES ? (size_t)bytes : CHUNK_BYTES);
        if (done < 0 && errno == EINTR) continue;
        if (done == 0) errno = ENOSPC;  // not an error by the standard, but it would loop forever
        if (done <= 0) return false;
        p += done;
        bytes -= (uint64_t)done;
    }
    return true;
}

bool pread_all(int fd, void *data, uint64_t bytes, uint64_t offset) {
    assert(fd >= 0 && (data || bytes == 0));
    char *p = (char *)data;
    while (bytes > 0) {
        errno = 0;
        ssize_t done = pread(fd, p, bytes < CHUNK_BYTES ? (size_t)bytes : CHUNK_BYTES, (off_t)offset);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return false;
        p += done;
        bytes -= (uint64_t)done;
        offset += (uint64_t)done;
    }
    return true;
}

// --- Folders -------------------------------------------------------------------------------------

bool durable_sync_folder(const char *path, Error *err) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return durable_error(err, "open folder", path);
    // Some network file systems refuse fsync on a directory (EINVAL); their renames are durable
    // anyway.
    bool ok = fsync(fd) == 0 || errno == EINVAL;
    if (!ok) durable_error(err, "sync folder", path);
    close(fd);
    return ok;
}

// Syncs the parent directory. Temporarily truncates path at its last '/'.
static bool sync_parent(char *path, Error *err) {
    char *slash = strrchr(path, '/');
    if (!slash) return durable_sync_folder(".", err);
    if (slash == path) return durable_sync_folder("/", err);
    *slash = 0;
    bool ok = durable_sync_folder(path, err);
    *slash = '/';
    return ok;
}

static bool make_folder(char *path, Error *err) {
    struct stat status;
    if (mkdir(path, 0777) == 0) return sync_parent(path, err);
    int number = errno;
    if (stat(path, &status) == 0 && S_ISDIR(status.st_mode)) return true;
    errno = number;
    return durable_error(err, "make folder", path);
}

bool durable_make_folders(const char *path, Error *err) {
    char *copy = xstrdup(path);
    size_t length = strlen(copy);
    while (length > 1 && copy[length - 1] == '/') copy[--length] = 0;
    bool ok = true;
    for (size_t i = 1; ok && i < length; i++) {
        if (copy[i] != '/' || copy[i - 1] == '/') continue;
        copy[i] = 0;
        ok = make_folder(copy, err);
        copy[i] = '/';
    }
    ok = ok && make_folder(copy, err);
    int number = errno;
    free(copy);
    errno = number;
    return ok;
}

static int remove_entry(const char *path, const struct stat *status, int type, struct FTW *place) {
    return remove(path);
}

bool durable_remove_tree(const char *path, Error *err) {
    if (nftw(path, remove_entry, TREE_DESCRIPTORS, FTW_DEPTH | FTW_PHYS) == 0 || errno == ENOENT) return true;
    return durable_error(err, "remove", path);
}

bool durable_writable_folder(const char *path, Error *err) {
    if (!durable_make_folders(path, err)) return false;
    return access(path, W_OK | X_OK) == 0 || durable_error(err, "write to", path);
}

bool durable_exists(const char *path) {
    struct stat status;
    return lstat(path, &status) == 0;
}

bool durable_plain_file(const char *path, uint64_t max_bytes) {
    struct stat status;
    return stat(path, &status) == 0 && S_ISREG(status.st_mode) && (uint64_t)status.st_size <= max_bytes;
}

// --- Files ---------------------------------------------------------------------------------------

int durable_create(const char *path) {
    if (unlink(path) != 0 && errno != ENOENT) return -1;
    return open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
}

bool durable_write_file(const char *path, const void *data, uint64_t bytes, Error *err) {
    int fd = durable_create(path);
    if (fd < 0) return durable_error(err, "create", path);
    bool ok = write_all(fd, data, bytes) && fsync(fd) == 0;
    if (!ok) durable_error(err, "write", path);
    if (close(fd) != 0 && ok)
        ok = durable_error(err, "write", path);  // network file systems report a full disk here
    if (!ok) unlink(path);
    return ok;
}

char *durable_read_file(const char *path, uint64_t max_bytes, uint64_t *bytes, Error *err) {
    assert(path && bytes);
    struct stat status;
    char *text = NULL;
    // O_NONBLOCK because opening a pipe, which is refused below, would block. No effect on plain
    // files.
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &status) != 0) {
        durable_error(err, "open", path);
    } else if (!S_ISREG(status.st_mode)) {
        ckpt_error(err, "%s is not a plain file; check the path", path);
    } else if ((uint64_t)status.st_size > max_bytes) {
        ckpt_error(
            err, "%s has %lld bytes, but can have at most %llu; the file is damaged: restore it from a copy",
            path, (long long)status.st_size, (unsigned long long)max_bytes);
    } else {
        *bytes = (uint64_t)status.st_size;
        text = xmalloc((size_t)*bytes + 1, "a file");
        text[*bytes] = 0;
        if (!pread_all(fd, text, *bytes, 0)) {
            durable_error(err, "read", path);
            free(text);
            text = NULL;
        }
    }
    if (fd >= 0) close(fd);
    return text;
}

FILE *durable_open_plain(const char *path) {
    struct stat status;
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);  // as above
    bool known = fd >= 0 && fstat(fd, &status) == 0, plain = known && S_ISREG(status.st_mode);
    FILE *file = plain ? fdopen(fd, "rb") : NULL;
    int reason = known && !plain ? (S_ISDIR(status.st_mode) ? EISDIR : 0) : errno;
    if (!file && fd >= 0) close(fd);
    errno = reason;
    return file;
}

// Hashes a whole file. Stops, and sets *stopped, if keep_going returns false.
static bool hash_all(int fd, uint64_t *xxh3, bool (*keep_going)(void *context), void *context,
                     bool *stopped) {
    XXH3_state_t *state = XXH3_createState();
    char *buffer = xmalloc(HASH_BUFFER_BYTES, "a hash buffer");
    ssize_t done = -1;
    if (!state)
        fatal(NULL, EXIT_ENVIRONMENT, "out of memory for a hash state; use a machine with more memory");
    XXH3_64bits_reset(state);
    *stopped = false;
    while (!*stopped && (done = read(fd, buffer, HASH_BUFFER_BYTES)) != 0) {
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) break;
        XXH3_64bits_update(state, buffer, (size_t)done);
        *stopped = !keep_going(context);
    }
    *xxh3 = XXH3_64bits_digest(state);
    XXH3_freeState(state);
    free(buffer);
    return !*stopped && done == 0;
}

bool durable_hash_file(const char *path, uint64_t *xxh3, bool (*keep_going)(void *context), void *context,
                       Error *err) {
    bool stopped;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return durable_error(err, "open", path);
    bool ok = hash_all(fd, xxh3, keep_going, context, &stopped);
    if (!ok && !stopped) durable_error(err, "read", path);
    close(fd);
    return ok;
}

// --- Replacing -----------------------------------------------------------------------------------

bool durable_replace(Replacement *r, Error *err) {
    assert(r && r->fresh && r->final && r->aside);
    r->replaced = durable_exists(r->final);
    r->exchanged = false;
    if (!r->replaced) return rename(r->fresh, r->final) == 0 || durable_error(err, "rename to", r->final);
    r->exchanged = renameat2(AT_FDCWD, r->fresh, AT_FDCWD, r->final, RENAME_EXCHANGE) == 0;
    if (r->exchanged) return true;
    if (errno != EINVAL && errno != ENOSYS && errno != ENOTSUP)
        return durable_error(err, "replace", r->final);
    if (rename(r->final, r->aside) != 0) return durable_error(err, "move aside", r->final);
    if (rename(r->fresh, r->final) == 0) return true;
    durable_error(err, "rename to", r->final);
    if (rename(r->aside, r->final) != 0) durable_error(err, "move back", r->final);
    return false;
}

void durable_replace_undo(const Replacement *r) {
    Error ignored;  // the caller already has an error to report
    bool back = r->exchanged ? renameat2(AT_FDCWD, r->fresh, AT_FDCWD, r->final, RENAME_EXCHANGE) == 0
                             : rename(r->final, r->fresh) == 0;
    if (back && r->replaced && !r->exchanged && rename(r->aside, r->final) != 0)
        durable_error(&ignored, "move back", r->final);
}

// --- lock files ----------------------------------------------------------------------------------

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
