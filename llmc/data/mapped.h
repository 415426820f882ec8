// Mapped files that somebody cuts short, or whose disk fails, while they are read. Touching a page
// that is gone is a SIGBUS, which by itself ends the process without a word. What is guarded here
// ends it with one line that names the file, and EXIT_DATA. Called by shard.c (what is mapped) and
// loader.c (who reads).
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// From here on a read of [start, start + bytes) that fails ends the job: fatal() with "<path>:
// ...". path is copied. Does nothing for 0 bytes.
void mapped_guard(const void *start, size_t bytes, const char *path);
// Ends the job in the same way. For a caller that finds that a guarded range is no longer what it
// was. at: any address in it.
void mapped_lost(const void *at) __attribute__((noreturn));
// Before the mapping ends: its addresses may be given to others.
void mapped_release(const void *start);
// Who reads, for the line; NULL (the default): a program without ranks.
void mapped_set_site(const Site *site);

LLMC_END
