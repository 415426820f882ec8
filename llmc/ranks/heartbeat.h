// The watchdog: one thread beside the main one that ends the job where it stands still, with a line
// that names who does not come.
//
// While ranks train, they show signs of life in memory that the ranks of one host share: their
// watchdogs that the process runs, their main threads whether they wait for others, and where they
// are. So whoever ends the job can name the rank that does not come, and not one that only waits
// for it. A watchdog sees stopped and dead ranks whatever the main thread is blocked in, and a main
// thread of its own in a call that never returns.
//
// While MPI starts and ends, no rank knows another. The watchdog then ends its own process after
// the limit, and the launcher ends the others.
//
// Opened by train_gpt.cu; told by peers.c and the backends, which wait, and by what takes long.
#pragma once
#include <mpi.h>

#include "llmc/base/base.h"
LLMC_BEGIN

// Before MPI starts: until heartbeat_open or heartbeat_close this process may take `limit` seconds,
// and a few more, which MPI takes on slow machines. Then it leaves with EXIT_COMMUNICATION. The
// lower rank (of the launcher's environment) speaks first. Time in which the whole process was
// stopped does not count. Nothing with a limit of 0. Without a thread the process ends
// (EXIT_ENVIRONMENT). Signals that the thread is not to take must be blocked. Sets site->heartbeat,
// as the next two.
void heartbeat_starting(Site *site, double limit);
// Collective over host (the ranks of one host, in world order); ranks: how many there are on all
// hosts. Where the ranks cannot share memory each watches itself alone. Without memory for that, or
// with a limit and without a thread, the job ends (EXIT_ENVIRONMENT).
//
// A rank that shows no sign of life for `limit` seconds (0: none is looked for) ends the job: the
// lowest rank of the host that is alive prints one line and leaves with EXIT_COMMUNICATION. So does
// a rank whose own main thread makes no progress for that long, or a little longer when it waits:
// waits that know their limit (peers.h) come first. In a run that outlives a lost node (salvage.h)
// it is twice the limit and a minute. site is read by the calling thread alone.
void heartbeat_open(Site *site, MPI_Comm host, int ranks, double limit);
// Before MPI ends, in the place of heartbeat_close. code: of the run so far, and it stays if it is
// an error's. Of the ranks of a host that have met, the first one speaks.
void heartbeat_ending(Site *site, double limit, int code);
// Ends whichever of the three it is. From here on this rank's silence means nothing.
void heartbeat_close(Site *site);

// --- what the main thread tells; nothing unless ranks are watched --------------------------------

// This rank begins (ends) to wait for others or its device, at the site's iteration and phase;
// either is progress.
void heartbeat_waits(const Site *site, bool waits);
// The phase of a rank that writes its log. A pipe stops it whose reader has stopped; its watchdog
// then says so.
#define PHASE_WRITE_LOG "write log"
// Progress alone, from any thread: in work that neither waits nor ends soon.
void heartbeat_moves(const Site *site);
// This rank issues a collective, such as "all-to-all", "between nodes". A watchdog that ends a job
// whose devices stand still tells how many its rank has issued, and those of the host that are
// furthest behind, and which was the last.
void heartbeat_issues(const Site *site, const char *what, const char *scope);
// From here on the watchdog asks look(context, what, bytes) once a beat, a second at most: for what
// has gone wrong behind the main thread's back, as in a library's own threads. True: the job ends
// with the line `what` (EXIT_COMMUNICATION), hosts in turn. look NULL: no longer; nothing where
// another context has been given since. There is one at a time.
//
// look runs on the watchdog's thread with the heartbeat's lock held: it must not wait for anything,
// nor call this header. Once this function has returned, the context that was there before may be
// freed.
typedef bool (*HeartbeatLook)(void *context, char *what, size_t bytes);
void heartbeat_watch(const Site *site, HeartbeatLook look, void *context);

// --- for who ends the job ------------------------------------------------------------------------

// Called when a wait has taken too long. Gives the watchdogs a moment to find a rank that is
// stopped or dead (they end the job), then looks for ranks of this host that are alive but do not
// wait. True: text names them, as in "rank 3 is still busy (last seen at iteration 12, read data)".
// False: there is none. Hosts without one come back later, one after the other, so that the host
// that has one speaks first.
bool heartbeat_blames(const Site *site, char *text, size_t bytes);
// Of the ranks of this host that are about to end the job at the same time one speaks: returns at
// once to the first, and to the others after 30 s, should they live so long. Without a heartbeat at
// once.
void heartbeat_take_floor(const Site *site);
// The same for what all ranks of all hosts meet at once, such as a collective that fails. Hosts
// speak in the order of their nodes, two seconds apart, so that the first one's line is the only
// one.
void heartbeat_take_turn(const Site *site);

LLMC_END
