// Temporary directory and files of fuzz.h, linked into every target.
#include <fcntl.h>
#include <ftw.h>
#include <sys/stat.h>
#include <unistd.h>

#include "test/fuzz/fuzz.h"

static char folder[256];

static int remove_entry(const char *path, const struct stat *status, int type, struct FTW *place) {
    return remove(path);
}

static void remove_folder(void) { nftw(folder, remove_entry, 8, FTW_DEPTH | FTW_PHYS); }

const char *fuzz_folder(void) {
    if (*folder) return folder;
    const char *parent = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/fuzz-XXXXXX", parent && *parent ? parent : "/tmp");
    if (!mkdtemp(folder)) abort();
    atexit(remove_folder);
    return folder;
}

const char *fuzz_file(const char *name, const void *data, size_t bytes) {
    static char path[512];
    snprintf(path, sizeof path, "%s/%s", fuzz_folder(), name);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0 || write(fd, data, bytes) != (ssize_t)bytes || close(fd)) abort();
    return path;
}
