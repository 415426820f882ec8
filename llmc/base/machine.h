// Memory of this machine, from the kernel.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// Returns a field of /proc/meminfo in bytes, such as "MemAvailable", or 0 if it cannot be read.
size_t machine_memory(const char *field);

LLMC_END
