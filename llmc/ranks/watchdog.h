// The watchdog: a thread that ends the job when it hangs, with one line that names the late rank.
//
// While ranks train, the watchdogs of a host watch each other and their main threads through shared
// memory (heartbeat.h). A watchdog detects stopped and dead ranks whatever its main thread is
// blocked in, and its own main thread if that is stuck in a call.
//
// While MPI starts and shuts down, ranks cannot see each other. The watchdog then ends its own
// process after the limit, and the launcher ends the others.
//
// Called by train_gpt.c and by benchmarks and tests that are MPI programs.
#pragma once
#include <mpi.h>

#include "llmc/base/base.h"
LLMC_BEGIN

// Limits MPI's startup: unless watchdog_open or watchdog_close is called within `limit` seconds,
// plus some that MPI needs on slow machines, the process exits with EXIT_COMMUNICATION, lower ranks
// (by the launcher's environment) first. Time in which the whole process was stopped doesn't count.
// limit 0: no-op. If the thread cannot be created, the process exits (EXIT_ENVIRONMENT). Signals
// that the thread must not receive must be blocked. Sets site->heartbeat, as the next two do.
void watchdog_mpi_starting(Site *site, double limit);
// Starts watching. Collective over host (the ranks of one host, in world order); ranks: total on
// all hosts. Ranks that cannot share memory watch only themselves. Out of memory, or limit > 0 and
// no thread: the job ends (EXIT_ENVIRONMENT).
//
// If a rank shows no sign of life for `limit` seconds (0: no limit), the lowest live rank of its
// host prints one line and exits with EXIT_COMMUNICATION. So does a rank whose own main thread
// makes no progress for that long, or slightly longer if it waits: waits that have their own limit
// (peers.h) end first. With node-failure recovery (node_failure.h) it is twice the limit plus a
// minute. site is read by the calling thread only.
void watchdog_open(Site *site, MPI_Comm host, int ranks, double limit);
// Limits MPI's shutdown; replaces watchdog_close. code: exit code of the run so far, which is kept
// if it is an error. Only one rank per host prints.
void watchdog_mpi_ending(Site *site, double limit, int code);
// Stops any of the three. From here on, this rank's silence is ignored.
void watchdog_close(Site *site);

LLMC_END
