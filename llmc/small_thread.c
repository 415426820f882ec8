// Threads that only watch a clock: see small_thread.h.
#include "llmc/small_thread.h"

#include <errno.h>
#include <string.h>

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

void small_thread_missing(const Site *site, int reason) {
    fatal(site, EXIT_ENVIRONMENT, "cannot start the watchdog's thread: %s; raise ulimit -u, ulimit -v or the container's limit of processes", strerror(reason));
}
