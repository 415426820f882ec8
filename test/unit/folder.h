// A temporary folder for a test's files, for use in cmocka's setup and teardown functions.
#pragma once
#include <stdio.h>
#include <stdlib.h>

// Creates a folder NAME_XXXXXX in P_tmpdir and writes its path to `path` (`bytes` long). Returns 0,
// or -1 on failure, as cmocka expects.
static inline int folder_make(char *path, size_t bytes, const char *name) {
    int length = snprintf(path, bytes, "%s/%s_XXXXXX", P_tmpdir, name);
    return length > 0 && (size_t)length < bytes && mkdtemp(path) ? 0 : -1;
}

// Runs rm -rf and returns 0 if it succeeded. Uses another process, because some tests replace
// system calls.
static inline int folder_remove(const char *path) {
    char command[300];
    int length = snprintf(command, sizeof command, "rm -rf '%s'", path);
    return length > 0 && (size_t)length < sizeof command ? system(command) : -1;
}
