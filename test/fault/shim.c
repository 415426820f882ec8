// LD_PRELOAD library that makes the n-th file operation of a program fail, or kills the program
// there. Counts opens, writes, syncs, renames, mkdirs and removals in one directory, which excludes
// logs and libraries. Built as $(BUILD)/test/fault/shim.so; used by test/fault/every_call.sh and
// others. Environment:
//   SHIM_FOLDER   count operations on paths with this prefix
//   SHIM_RANK     affect only this rank (OMPI_COMM_WORLD_RANK; 0 without mpirun)
//   SHIM_AT       index of the operation that fails, from 1; 0: none
//   SHIM_ERRNO    errno of the failure; 0: kill the process instead
//   SHIM_MARK     file that receives the name of the failed operation, so that a test knows that it
//                 was reached
//   SHIM_SLOW_MS  extra time of every sync, to imitate a slow disk
//   SHIM_SLOW_READ_MS  extra time of every read(); pread() is not affected
//
// Positioned reads and writes are counted separately (test/e2e/disk_offload.sh):
//   SHIM_IO_AT     index of the pread() or pwrite() that fails or kills, from 1; 0: none
//   SHIM_COUNT     file that receives their number when the process exits
//   SHIM_IO_SHORT  1: they transfer only the first page of longer requests
//   SHIM_IO_MS     extra time of each
//   SHIM_NO_URING  1: io_uring is not permitted
//   SHIM_NO_DIRECT 1: O_DIRECT is not supported
//   SHIM_NO_FALLOCATE  errno of fallocate() in SHIM_FOLDER; NCCL's shared memory needs it too
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static atomic_int operations;

static long setting(const char *name) {
    const char *text = getenv(name);
    return text ? atol(text) : 0;
}

static bool counts(const char *path) {
    const char *folder = getenv("SHIM_FOLDER"), *rank = getenv("OMPI_COMM_WORLD_RANK");
    return folder && path && atol(rank ? rank : "0") == setting("SHIM_RANK") &&
           strncmp(path, folder, strlen(folder)) == 0;
}

static void mark(const char *what, const char *path) {
    char line[PATH_MAX + 64];
    const char *name = getenv("SHIM_MARK");
    int fd = name ? (int)syscall(SYS_openat, AT_FDCWD, name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)
                  : -1;
    int length = snprintf(line, sizeof line, "%s %s\n", what, path);
    if (fd >= 0) syscall(SYS_write, fd, line, length);
    if (fd >= 0) syscall(SYS_close, fd);
}

// Returns true, with errno set, if this operation must fail.
static bool spoiled(const char *what, const char *path) {
    if (!counts(path) || atomic_fetch_add(&operations, 1) + 1 != setting("SHIM_AT")) return false;
    mark(what, path);
    if (setting("SHIM_ERRNO") == 0) raise(SIGKILL);
    errno = (int)setting("SHIM_ERRNO");
    return true;
}

static void path_of(int fd, char path[PATH_MAX]) {
    char link[64];
    int number = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    errno = number;
    path[length > 0 ? length : 0] = 0;
}

static bool spoiled_fd(const char *what, int fd) {
    char path[PATH_MAX];
    path_of(fd, path);
    return spoiled(what, path);
}

static void be_slow(int fd, long milliseconds) {
    struct timespec delay = {milliseconds / 1000, milliseconds % 1000 * 1000000};
    if (milliseconds == 0) return;
    char path[PATH_MAX];
    path_of(fd, path);
    if (counts(path)) nanosleep(&delay, NULL);
}

int open(const char *path, int flags, ...) {
    va_list args;
    va_start(args, flags);
    mode_t mode = flags & O_CREAT ? va_arg(args, mode_t) : 0;
    va_end(args);
    return spoiled(flags & O_CREAT ? "create" : "open", path)
               ? -1
               : (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

ssize_t write(int fd, const void *data, size_t bytes) {
    return spoiled_fd("write", fd) ? -1 : syscall(SYS_write, fd, data, bytes);
}

static atomic_int transfers;

// Returns true, with errno set, if this positioned read or write must fail. Otherwise shortens it.
static bool spoiled_transfer(const char *what, int fd, size_t *bytes) {
    enum { PAGE = 4096 };
    char path[PATH_MAX];
    path_of(fd, path);
    if (!counts(path)) return false;
    be_slow(fd, setting("SHIM_IO_MS"));
    if (setting("SHIM_IO_SHORT") && *bytes > PAGE) *bytes = PAGE;
    if (atomic_fetch_add(&transfers, 1) + 1 != setting("SHIM_IO_AT")) return false;
    mark(what, path);
    if (setting("SHIM_ERRNO") == 0) raise(SIGKILL);
    errno = (int)setting("SHIM_ERRNO");
    return true;
}

__attribute__((destructor)) static void write_count(void) {
    char text[32];
    const char *name = getenv("SHIM_COUNT");
    int length = snprintf(text, sizeof text, "%d\n", atomic_load(&transfers));
    if (!name || atomic_load(&transfers) == 0) return;
    int fd = (int)syscall(SYS_openat, AT_FDCWD, name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd >= 0) syscall(SYS_write, fd, text, length);
    if (fd >= 0) syscall(SYS_close, fd);
}

ssize_t pread(int fd, void *data, size_t bytes, off_t at) {
    return spoiled_transfer("pread", fd, &bytes) ? -1 : syscall(SYS_pread64, fd, data, bytes, at);
}

ssize_t pwrite(int fd, const void *data, size_t bytes, off_t at) {
    return spoiled_transfer("pwrite", fd, &bytes) ? -1 : syscall(SYS_pwrite64, fd, data, bytes, at);
}

int io_uring_queue_init(unsigned entries, void *ring, unsigned flags) {
    if (setting("SHIM_NO_URING")) return -EPERM;
    int (*real)(unsigned, void *,
                unsigned) = (int (*)(unsigned, void *, unsigned))dlsym(RTLD_NEXT, "io_uring_queue_init");
    return real ? real(entries, ring, flags) : -ENOSYS;
}

int fcntl(int fd, int command, ...) {
    va_list args;
    va_start(args, command);
    long argument = va_arg(args, long);
    va_end(args);
    if (command == F_SETFL && (argument & O_DIRECT) && setting("SHIM_NO_DIRECT")) {
        errno = EINVAL;
        return -1;
    }
    return (int)syscall(SYS_fcntl, fd, command, argument);
}

int fallocate(int fd, int mode, off_t at, off_t bytes) {
    char path[PATH_MAX];
    long refused = setting("SHIM_NO_FALLOCATE");
    path_of(fd, path);
    if (refused == 0 || !counts(path)) return (int)syscall(SYS_fallocate, fd, mode, at, bytes);
    mark("fallocate", path);
    errno = (int)refused;
    return -1;
}

ssize_t read(int fd, void *data, size_t bytes) {
    be_slow(fd, setting("SHIM_SLOW_READ_MS"));
    return syscall(SYS_read, fd, data, bytes);
}

int fsync(int fd) {
    be_slow(fd, setting("SHIM_SLOW_MS"));
    return spoiled_fd("fsync", fd) ? -1 : (int)syscall(SYS_fsync, fd);
}

int rename(const char *from, const char *to) {
    return spoiled("rename", from) ? -1 : (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}

int renameat2(int from_folder, const char *from, int to_folder, const char *to, unsigned flags) {
    return spoiled("exchange", from) ? -1
                                     : (int)syscall(SYS_renameat2, from_folder, from, to_folder, to, flags);
}

int mkdir(const char *path, mode_t mode) {
    return spoiled("mkdir", path) ? -1 : (int)syscall(SYS_mkdirat, AT_FDCWD, path, mode);
}

int unlink(const char *path) {
    return spoiled("unlink", path) ? -1 : (int)syscall(SYS_unlinkat, AT_FDCWD, path, 0);
}

int remove(const char *path) {
    if (spoiled("remove", path)) return -1;
    int (*real)(const char *) = (int (*)(const char *))dlsym(RTLD_NEXT, "remove");
    return real(path);
}
