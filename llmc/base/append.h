// Append-only record files for logs. A record is written in full or not at all. Neither a full disk
// nor an unread pipe stops training.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

typedef struct Append {
    int fd;              // -1: closed
    char *path;          // for messages
    bool failing;        // the last record could not be written, and a warning was printed
    double quiet_until;  // time before which writes don't wait for a slow reader (monotonic_seconds)
    bool torn;           // a pipe received only part of the last record
} Append;

// Opens path for appending, creating it if necessary. flags: O_EXCL (it must not exist), O_NOFOLLOW
// (it must not be a link) or 0. Error (EXIT_ENVIRONMENT) names path and reason; errno is kept.
bool append_open(Append *file, const char *path, int flags, Error *err);
// Adds the missing newline of a last line that an earlier process left incomplete.
void append_end_line(Append *file);
// Writes one record; returns true on success. If the disk is full, removes the written part, prints
// one warning, and continues with the next record. Records may be missing, but none is incomplete.
// Waits up to half a second for the reader of a pipe, but only once a minute while it is slow.
// After an incomplete record in a pipe, the next record starts on a new line.
bool append_record(Append *file, const void *record, size_t bytes);
void append_close(Append *file);
// Creates the directories (mkdir -p). Error: EXIT_ENVIRONMENT.
bool append_make_folders(const char *path, Error *err);

LLMC_END
