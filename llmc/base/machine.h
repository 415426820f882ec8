// Memory of this machine as its kernel tells. Called by the CPU backend, memory.c and
// plan_report.c.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// A field of /proc/meminfo in bytes, "MemAvailable" for instance. 0 where it cannot be read.
size_t machine_memory(const char *field);

LLMC_END
