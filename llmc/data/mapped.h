// Handles SIGBUS from mapped files that are truncated, or whose disk fails, while they are read.
// Without it the process would die without a message; guarded ranges end the job with EXIT_DATA and
// one line that names the file. Called by shard.c (which maps) and loader.c (which sets the site).
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// Guards [start, start + bytes): a failing read ends the job through fatal() with a message that
// starts with `path` (copied). No-op for 0 bytes.
void mapped_guard(const void *start, size_t bytes, const char *path);
// Ends the job in the same way, for callers that detect that a guarded file has changed. at: any
// address in its range.
void mapped_lost(const void *at) __attribute__((noreturn));
// Removes the guard; call it before munmap, because the addresses may be reused.
void mapped_release(const void *start);
// Sets the rank to name in the message; NULL (the default): a program without ranks.
void mapped_set_site(const Site *site);

LLMC_END
