// Detects that the launcher has begun to end the job: Open MPI's mpirun sends SIGCONT to every rank
// before SIGTERM and SIGKILL. Called by stop.c and node_failure.c.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// Installs the SIGCONT handler.
void launcher_signal_watch(void);
// Removes the handler and forgets a signal.
void launcher_signal_ignore(void);
// Seconds since SIGCONT arrived, or -1 if it has not. Callable from any thread, at least once a
// second. A SIGCONT is ignored if there was no call in the two seconds before it, or calls have
// only just resumed: the process was then stopped (Ctrl-Z and fg).
double launcher_signal_age(void);
// Brackets a collective poll of all ranks: `arrived` is whether a signal was pending when the poll
// began. After two such polls the signal is forgotten, since all ranks are alive. One poll isn't
// enough: a rank that was already dead may still have contributed to the first.
bool launcher_signal_pending(void);
void launcher_signal_polled(bool arrived);

LLMC_END
