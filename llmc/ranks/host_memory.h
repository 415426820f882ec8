// Memory shared by the ranks of a host: an anonymous file (memfd) of the first rank, which the
// others open through /proc. Not an MPI window, because Open MPI puts those in /dev/shm, which
// containers often limit to 64 MB, and hangs when it is too small.
#pragma once
#include "llmc/ranks/peers.h"
LLMC_BEGIN

// Maps zeroed memory shared by host (ranks of one host), for munmap. Collective. All ranks may
// write to it, or only the first. Returns NULL on every rank if any rank cannot map it: separate
// PID namespaces, no /proc, or no memory.
void *host_memory_map(Peers host, size_t bytes, bool all_write);

LLMC_END
