// Version of the build and its libraries, for --version, logs and checkpoints.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN
const char *version_number(void);  // "0.1.0"
const char *version_commit(
    void);  // abbreviated commit, with "+" for a modified tree; "unknown" outside a checkout
// Writes the libraries of the host code, such as "Open MPI v4.1.4, xxHash 801, cJSON 1.7.15, PCRE2
// 10.42, Unicode 14.0.0" (truncated to bytes). device_libraries writes the backend's.
void version_libraries(char *text, size_t bytes);
// Writes the versions of PCRE2 and its Unicode tables, such as "PCRE2 10.42, Unicode 14.0.0", which
// determine the classes of characters. text: at least 64 bytes.
void version_unicode(char *text, size_t bytes);
LLMC_END
