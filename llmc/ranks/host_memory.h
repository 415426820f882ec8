// Memory that the ranks of one host share: an anonymous file (memfd) of the first rank, which the
// others open through /proc. Not an MPI window: Open MPI puts those in /dev/shm, which a container
// often limits to 64 MB, and hangs when it is too small. Called by heartbeat.c and node_memory.c.
#pragma once
#include "llmc/ranks/peers.h"
LLMC_BEGIN

// Collective over host (ranks of one host): the same zeroed bytes in every rank's address space,
// for munmap. All may write, or the first rank alone. NULL on every rank where one cannot have it:
// separate PID namespaces, no /proc, no memory.
void *host_memory_map(Peers host, size_t bytes, bool all_write);

LLMC_END
