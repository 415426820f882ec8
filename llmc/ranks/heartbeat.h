// Reports of a rank's main thread to the watchdogs of its host (watchdog.h): its iteration and
// phase, whether it waits for others, and that it makes progress. With them, error messages name
// the late rank instead of one that only waits for it. All functions are no-ops unless ranks are
// watched.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// Marks the beginning (end) of a wait for other ranks or the device, at the site's iteration and
// phase. Either counts as progress.
void heartbeat_waiting(const Site *site, bool waits);
// Phase of a rank that writes its log. A pipe whose reader has stopped blocks it; the watchdog's
// message then says so.
#define PHASE_WRITE_LOG "write log"
// Reports progress of work that neither waits nor ends soon. Callable from any thread.
void heartbeat_progress(const Site *site);
// Counts a collective, such as "all-to-all", "between nodes". When devices hang, the watchdog
// prints the counts of the slowest ranks, and their last collectives.
void heartbeat_collective(const Site *site, const char *what, const char *scope);
// Makes the watchdog call check(context, what, bytes) at least once a second, for errors that the
// main thread cannot see, as in a library's own threads. If it returns true, the job ends with the
// line `what` (EXIT_COMMUNICATION), hosts in turn. Only one check is active; check NULL removes it,
// unless another context has replaced it since.
//
// check runs on the watchdog's thread with the heartbeat's lock held: it must neither block nor
// call functions of this header. The previous context may be freed once this returns.
typedef bool (*HeartbeatCheck)(void *context, char *what, size_t bytes);
void heartbeat_set_check(const Site *site, HeartbeatCheck check, void *context);

// --- before ending the job -----------------------------------------------------------------------

// Finds the ranks of this host that are alive but don't wait, after a wait has taken too long.
// First gives the watchdogs time to find a stopped or dead rank, in which case they end the job.
// Returns true with text such as "rank 3 is still busy (last seen at iteration 12, read data)". If
// there are none, returns false after a delay that grows with the node, so that the host that has
// the late rank reports it first.
bool heartbeat_find_busy(const Site *site, char *text, size_t bytes);
// Claims the right to print the error and end the job: returns at once to the first rank of this
// host, to others after 30 s.
void heartbeat_claim_exit(const Site *site);
// The same for errors that all hosts detect at once, such as a failed collective: hosts return in
// node order, two seconds apart, so that only the first one's line is printed.
void heartbeat_claim_exit_in_turn(const Site *site);

LLMC_END
