// Threads that only watch a clock: see small_thread.h.
#include "llmc/ranks/small_thread.h"

#include <errno.h>
#include <string.h>
#include <time.h>

enum { STACK_BYTES = 512 << 10 };  // a library may be asked from it

int small_thread_start(pthread_t *thread, void *(*run)(void *), void *context) {
    pthread_attr_t small;
    int reason = pthread_attr_init(&small);
    if (reason == 0) {
        pthread_attr_setstacksize(&small, STACK_BYTES);
        reason = pthread_create(thread, &small, run, context);
        pthread_attr_destroy(&small);
    }
    return reason == EINVAL ? pthread_create(thread, NULL, run, context) : reason;
}

void small_thread_clock(pthread_cond_t *wake) {
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(wake, &clock);
    pthread_condattr_destroy(&clock);
}

bool small_thread_rest(pthread_mutex_t *lock, pthread_cond_t *wake, const bool *stop, double seconds) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    int64_t nanoseconds = until.tv_nsec + (int64_t)(1e9 * seconds);
    until.tv_sec += nanoseconds / 1000000000;
    until.tv_nsec = nanoseconds % 1000000000;
    pthread_mutex_lock(lock);
    while (!*stop && pthread_cond_timedwait(wake, lock, &until) == 0) continue;
    bool goes_on = !*stop;
    pthread_mutex_unlock(lock);
    return goes_on;
}

void small_thread_missing(const Site *site, int reason) {
    fatal(site, EXIT_ENVIRONMENT, "cannot start the watchdog's thread: %s; raise ulimit -u, ulimit -v or the container's limit of processes", strerror(reason));
}
