// Reports from a rank's main thread to the watchdogs of its host (watchdog.h): iteration, phase,
// progress, and whether it waits for others. So error messages can name the late rank instead of a
// rank that waits for it. The functions are no-ops unless ranks are watched.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// Polls of a wait between two looks at the clock. On a busy machine every poll yields the core, and
// 1024 of them took longer than a second.
enum { POLLS_PER_CHECK = 64 };

// Marks the beginning (waits) or end of a wait for other ranks or the device, at the site's
// iteration and phase. Both count as progress.
void heartbeat_waiting(const Site *site, bool waits);
// Phase of a rank that writes its log. The watchdog explains a hang in it: nothing reads the log.
#define PHASE_WRITE_LOG "write log"
// Reports progress during long work that does not wait. Callable from any thread.
void heartbeat_progress(const Site *site);
// Counts a collective, such as what = "all-to-all", scope = "between nodes". If devices hang, the
// watchdog prints the counts and the last collectives of the slowest ranks.
void heartbeat_collective(const Site *site, const char *what, const char *scope);
// Makes the watchdog call check(context, what, bytes) at least once a second, for errors that the
// main thread cannot see, such as errors in a library's threads. If check returns true, the job
// ends with the message `what` (EXIT_COMMUNICATION). Only one check is active; check NULL removes
// the check of this context. The previous context may be freed when this function returns.
// check runs on the watchdog's thread with a lock held: it must not block or call these functions.
typedef bool (*HeartbeatCheck)(void *context, char *what, size_t bytes);
void heartbeat_set_check(const Site *site, HeartbeatCheck check, void *context);
// Makes the watchdog set *flag to 1 immediately before it ends this process. GPU kernels that wait
// for other ranks poll this flag, so that they cannot delay the end. NULL removes it; the previous
// flag may then be freed. Only one flag is active.
void heartbeat_set_abort(const Site *site, int *flag);

// --- before ending the job -----------------------------------------------------------------------

// Called when a wait has taken too long: finds ranks of this host that are alive but not waiting.
// First gives the watchdogs time to end the job because of a stopped or dead rank. Returns true
// with a text such as "rank 3 is still busy (last seen at iteration 12, read data)". If there is no
// such rank, returns false after a delay that grows with the node index, so that the host of the
// late rank reports it first.
bool heartbeat_find_busy(const Site *site, char *text, size_t bytes);
// Claims the right to print the error and end the job. Returns at once for the first rank of this
// host that calls it, after 30 s for others.
void heartbeat_claim_exit(const Site *site);
// The same for errors that all hosts detect at once, such as a failed collective. Returns on one
// host after the other, two seconds apart, so that only the first one prints the error.
void heartbeat_claim_exit_in_turn(const Site *site);

LLMC_END
