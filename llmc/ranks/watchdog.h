// The watchdog: a thread that ends the job if it hangs, with an error that names the late rank.
//
// While ranks train, the watchdogs of a host watch each other and their main threads through shared
// memory (heartbeat.h). A watchdog detects stopped and dead ranks even while its main thread is
// blocked, and it detects that its main thread is stuck.
//
// While MPI starts and shuts down, ranks cannot see each other. The watchdog then ends its own
// process after the limit, and the launcher ends the others.
//
// Called by train_gpt.c, and by benchmarks and tests that use MPI.
#pragma once
#include <mpi.h>

#include "llmc/base/base.h"
LLMC_BEGIN

// Limits MPI's startup. The process exits with EXIT_COMMUNICATION unless watchdog_open or
// watchdog_close is called within `limit` seconds, plus some seconds for slow machines. Lower ranks
// (by the launcher's environment) exit first. Time in which the process is stopped does not count.
// limit 0: no-op. Exits with EXIT_ENVIRONMENT if the thread cannot be created. First block signals
// that the thread must not receive. Sets site->heartbeat, like the next two functions.
void watchdog_mpi_starting(Site *site, double limit);
// Starts watching. host: the ranks of this host in world order. ranks: number of ranks on all
// hosts. Ranks that cannot share memory watch only themselves. Ends the job (EXIT_ENVIRONMENT) if
// memory runs out, or if limit > 0 and the thread cannot be created. Collective over host.
//
// The job ends with EXIT_COMMUNICATION in two cases (limit 0: never):
//   a rank shows no sign of life for `limit` seconds; the lowest live rank of its host reports it
//   a main thread makes no progress for `limit` seconds, or slightly longer if it waits, because
//   waits with their own limit (peers.h) should end first
// With node-failure recovery (node_failure.h) the limit is twice as long plus a minute. Only the
// calling thread reads site.
void watchdog_open(Site *site, MPI_Comm host, int ranks, double limit);
// Limits the time of MPI's shutdown. code: exit code of the run so far; if it is an error, the
// process exits with this code. Only one rank per host prints an error.
void watchdog_mpi_ending(Site *site, double limit, int code);
// Ends what the functions above have started. Other ranks then ignore this rank's silence.
void watchdog_close(Site *site);

LLMC_END
