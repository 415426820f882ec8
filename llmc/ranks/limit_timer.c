// A limit on starting and ending MPI: see limit_timer.h.
#include "llmc/ranks/limit_timer.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "llmc/ranks/launch.h"
#include "llmc/ranks/small_thread.h"

// Seconds beyond the limit. Where a host's own name is not found, MPI alone takes 10 s to start. At the end the ranks have just met.
enum { PATIENCE_AT_START = 20, PATIENCE_AT_END = 10 };

struct LimitTimer {
    double seconds, period;
    const char *phase, *wanted, *advice;
    int code;
    bool off;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;
};

static int rank_guess(void) {
    int rank = launch_rank_guess();
    return rank > 0 ? rank : 0;
}

// Seconds that the ranks before this one have to speak and end the job. Open MPI's launcher takes 2 s to end ranks that are in MPI_Init or MPI_Finalize.
static double turn(void) { return 2 * launch_rank_delay(rank_guess()); }

static void end_process(const LimitTimer *t) {
    char what[400];
    Site site = {-1, 0, 0, 0, t->phase, NULL};  // of nodes and GPUs nothing is known yet, or any more
    snprintf(what, sizeof what, "rank %d waited %.0f s for %s; %s (--distributed-timeout-minutes sets the limit)", rank_guess(), t->seconds, t->wanted, t->advice);
    error_print(&site, what);
    _exit(t->code);
}

// Counts its own rests, not the clock: a job that is stopped as a whole and goes on later is no fault.
static void *watch(void *context) {
    LimitTimer *t = (LimitTimer *)context;
    for (long long rests = 1; small_thread_rest(&t->lock, &t->wake, &t->off, t->period); rests++) {
        if ((double)rests * t->period >= t->seconds) end_process(t);
    }
    return NULL;
}

static void release(LimitTimer *t) {
    pthread_cond_destroy(&t->wake);
    pthread_mutex_destroy(&t->lock);
    free(t);
}

// NULL without a thread, for *reason.
static LimitTimer *start(LimitTimer like, int *reason) {
    LimitTimer *t = (LimitTimer *)xcalloc(1, sizeof *t, "a limit");
    *t = like;
    t->period = t->seconds < 200 ? t->seconds / 200 : 1;
    small_thread_clock(&t->wake);
    pthread_mutex_init(&t->lock, NULL);
    *reason = small_thread_start(&t->thread, watch, t);
    if (*reason == 0) return t;
    release(t);
    return NULL;
}

LimitTimer *limit_timer_starting(double limit) {
    int reason;
    if (limit <= 0) return NULL;
    LimitTimer like = {.seconds = limit + PATIENCE_AT_START + turn(), .phase = "start", .wanted = "all ranks to start", .code = EXIT_COMMUNICATION,
                       .advice = "see which of them or of their nodes is stopped, or reads a file that does not come"};
    LimitTimer *timer = start(like, &reason);
    if (timer) return timer;
    sleep((unsigned)turn());  // the first one speaks for all
    small_thread_missing(NULL, reason);
}

LimitTimer *limit_timer_ending(double limit, int code) {
    int reason;
    LimitTimer like = {.seconds = limit + PATIENCE_AT_END + turn(), .phase = "end", .wanted = "all ranks to end, after the run itself had ended",
                       .code = code ? code : EXIT_COMMUNICATION, .advice = "see what stopped one"};
    return limit > 0 ? start(like, &reason) : NULL;
}

void limit_timer_off(LimitTimer *timer) {
    if (!timer) return;
    pthread_mutex_lock(&timer->lock);
    timer->off = true;
    pthread_cond_signal(&timer->wake);
    pthread_mutex_unlock(&timer->lock);
    pthread_join(timer->thread, NULL);
    release(timer);
}
