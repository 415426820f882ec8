// Names the build in --version, logs and checkpoints. Used by llmc/run, the log, the checkpoint
// and the tools.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN
const char *version_number(void);  // "0.1.0"
const char *version_commit(
    void);  // abbreviated commit, "+" appended for a modified tree, "unknown" outside a checkout
// "Open MPI v4.1.4, xxHash 801, cJSON 1.7.15, PCRE2 10.42, Unicode 14.0.0" of the libraries that
// the host code runs with, into text (bytes; cut where the room ends). The backend's are
// device_libraries.
void version_libraries(char *text, size_t bytes);
// PCRE2's version and that of its Unicode tables, as in "PCRE2 10.42, Unicode 14.0.0". What counts
// as a letter or a digit in text depends on them. text: at least 64 bytes.
void version_unicode(char *text, size_t bytes);
LLMC_END
