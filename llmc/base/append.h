// Append-only record files, for logs. A record goes in whole or not at all. Neither a full disk nor
// a pipe that nobody reads stops training. Used by log.c (JSON lines), probe.c (histograms),
// progress.c and tensorboard.c (event files). prefix_lock.c has it make a folder.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

typedef struct Append {
    int fd;              // -1: closed
    char *path;          // for messages
    bool failing;        // the last record did not fit; said once
    double quiet_until;  // monotonic seconds: until then a pipe's slow reader is not waited for
    bool torn;           // a pipe got a part of it: nothing can be cut off there
} Append;

// Opens path for appending, made when absent. exclusive: it must not exist. Error
// (EXIT_ENVIRONMENT) names the path and the reason; errno is kept.
bool append_open(Append *file, const char *path, bool exclusive, Error *err);
// Ends a last line that an earlier process left without its newline, so that the next record starts
// on a line of its own.
void append_end_line(Append *file);
// Writes one record; returns whether it was written. When it does not fit, the written part is cut
// off again, one warning is printed (warning_print), and the next record is tried afresh. The file
// then lacks records but holds no torn one. A pipe's reader has half a second to make room, and
// only once a minute while it falls behind. What a pipe has of a torn record becomes a line of its
// own.
bool append_record(Append *file, const void *record, size_t bytes);
void append_close(Append *file);
// mkdir -p, for the files' folders. Error: EXIT_ENVIRONMENT.
bool append_make_folders(const char *path, Error *err);

LLMC_END
