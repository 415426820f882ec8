// Mapped files that somebody cuts short, or whose disk fails, while they are read: touching such a
// page is a SIGBUS, which by itself ends the process without a word. What is guarded here ends it
// with one line that names the file, and EXIT_DATA. Told by shard.c (what is mapped) and loader.c
// (who reads).
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// From here on a read of [start, start + bytes) that fails ends the job: fatal() with "<path>:
// ...". path is copied. Nothing for 0 bytes.
void mapped_guard(const void *start, size_t bytes, const char *path);
// The same end for whoever finds by itself that what it reads in a guarded range is no longer what
// it was. at: any address in it.
void mapped_lost(const void *at) __attribute__((noreturn));
// Before the mapping ends: its addresses may be given to others.
void mapped_release(const void *start);
// Who reads, for the line; NULL (the default): a program without ranks.
void mapped_set_site(const Site *site);

LLMC_END
