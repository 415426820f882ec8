// A limit on what may never return where no heartbeat watches: ranks that start MPI, up to the heartbeat (heartbeat.h), and ranks that end it. A thread beside the
// main one, which is blocked in a library there, prints one line and ends the process; the launcher then ends the others. Used by train_gpt.cu.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

typedef struct LimitTimer LimitTimer;

// Until limit_timer_off this process may take `limit` seconds and a few more, which MPI takes on slow machines; then it leaves with EXIT_COMMUNICATION. The lower
// rank (of the launcher's environment) speaks first. Time in which the whole process was stopped does not count. NULL with a limit of 0: there is none.
// Without a thread for it the process ends (EXIT_ENVIRONMENT). Signals that the thread is not to take must be blocked before.
LimitTimer *limit_timer_starting(double limit);
// The same for the end of a run that has come to `code`, the exit code that stays if it is an error's. Without a thread: NULL, there is nothing left to lose.
LimitTimer *limit_timer_ending(double limit, int code);
// timer may be NULL.
void limit_timer_off(LimitTimer *timer);

LLMC_END
