// Append-only record files: see append.h.
#include "llmc/base/append.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/base/durable.h"

// Log files are not part of a checkpoint, so failures are EXIT_ENVIRONMENT.
static bool environment_error(Error *err) {
    if (err) err->code = EXIT_ENVIRONMENT;
    return false;
}

bool append_open(Append *file, const char *path, int flags, Error *err) {
    // O_RDWR because append_end_line reads the last byte. O_NONBLOCK because the reader of a pipe
    // or terminal may have stopped.
    int fd = open(path, O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC | O_NONBLOCK | flags, 0666);
    if (fd < 0) {
        int reason = errno;
        durable_error(err, "open", path);
        errno = reason;
        return environment_error(err);
    }
    *file = (Append){.fd = fd, .path = xstrdup(path)};
    return true;
}

void append_end_line(Append *file) {
    assert(file && file->fd >= 0);
    char last = '\n';
    struct stat info;
    // Pipes and terminals have no last byte.
    if (fstat(file->fd, &info) || !S_ISREG(info.st_mode) || info.st_size == 0) return;
    if (pread(file->fd, &last, 1, info.st_size - 1) == 1 && last != '\n') append_record(file, "\n", 1);
}

enum { QUIET_SECONDS = 60 };  // writes don't wait for a slow reader for this long

// Writes to a pipe or terminal, waiting up to half a second for its reader. Returns false with
// errno.
static bool write_in_time(Append *file, const char *record, size_t bytes) {
    double now = monotonic_seconds(), end = now + (now < file->quiet_until ? 0 : 0.5);
    for (size_t at = 0; at < bytes;) {
        ssize_t done = write(file->fd, record + at, bytes - at);
        if (done > 0) file->torn = (at += (size_t)done) < bytes;
        if (done > 0 || (done < 0 && errno == EINTR)) continue;
        if (done == 0) errno = ENOSPC;  // as in write_all
        if (errno != EAGAIN) return false;
        struct pollfd room = {file->fd, POLLOUT, 0};
        double left = end - monotonic_seconds();
        if (left <= 0 || poll(&room, 1, (int)(1e3 * left) + 1) <= 0) {
            errno = EAGAIN;
            return false;
        }
    }
    return true;
}

bool append_record(Append *file, const void *record, size_t bytes) {
    assert(file && file->fd >= 0 && record);
    struct stat before;
    bool regular = fstat(file->fd, &before) == 0 && S_ISREG(before.st_mode);
    errno = 0;
    bool ended = !file->torn || write_in_time(file, "\n", 1);
    if (ended && (regular ? write_all(file->fd, (const char *)record, bytes)
                          : write_in_time(file, (const char *)record, bytes))) {
        file->failing = false;
        return true;
    }
    int reason = errno;
    bool cut = regular && ftruncate(file->fd, before.st_size) == 0;
    if (!file->failing && (regular || monotonic_seconds() >= file->quiet_until)) {
        warning_print(NULL,
                      "cannot write %s: %s; training continues, but records are lost until the file can be "
                      "written again%s",
                      file->path, reason == EAGAIN ? "its reader is too slow" : strerror(reason),
                      cut || !regular ? "" : ", and its last record is incomplete");
    }
    file->failing = true;
    if (!regular) file->quiet_until = monotonic_seconds() + QUIET_SECONDS;
    return false;
}

void append_close(Append *file) {
    if (file->fd >= 0 && file->path) close(file->fd);
    free(file->path);
    *file = (Append){.fd = -1};
}

bool append_make_folders(const char *path, Error *err) {
    return durable_make_folders(path, err) || environment_error(err);
}
