// Threads that only watch a clock: they need little memory, and a limit without them is no limit. Used by heartbeat.c and limit_timer.c.
#pragma once
#include <pthread.h>

#include "llmc/base/base.h"
LLMC_BEGIN

// pthread_create with a stack of 512 KiB, of which the thread-local memory of the libraries takes its part (some 70 KiB with OpenBLAS and MPI); with the usual one
// where that part is larger than all. Returns what pthread_create returns.
int small_thread_start(pthread_t *thread, void *(*run)(void *), void *context);
// A condition of the monotonic clock, and one thread's rest on it: false once *stop, which the lock guards, is true; who sets it signals wake.
void small_thread_clock(pthread_cond_t *wake);
bool small_thread_rest(pthread_mutex_t *lock, pthread_cond_t *wake, const bool *stop, double seconds);
// Ends the job (EXIT_ENVIRONMENT) because there is no thread to watch it. reason: what small_thread_start has returned. site may be NULL.
void small_thread_missing(const Site *site, int reason) __attribute__((noreturn));

LLMC_END
