// A folder of a test's own for its files: made by cmocka's setup functions, removed with all that
// is in it by their teardown.
#pragma once
#include <stdio.h>
#include <stdlib.h>

// Fills path, of `bytes` bytes, and makes the folder that it names: <temporary files>/NAME_XXXXXX.
// Returns what cmocka wants: 0, or -1.
static inline int folder_make(char *path, size_t bytes, const char *name) {
    int length = snprintf(path, bytes, "%s/%s_XXXXXX", P_tmpdir, name);
    return length > 0 && (size_t)length < bytes && mkdtemp(path) ? 0 : -1;
}

// rm -rf: 0 when it is gone. By another process: tests define system calls of their own.
static inline int folder_remove(const char *path) {
    char command[300];
    int length = snprintf(command, sizeof command, "rm -rf '%s'", path);
    return length > 0 && (size_t)length < sizeof command ? system(command) : -1;
}
