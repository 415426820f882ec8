// An ordered parallel map: see pipeline.h. The slots form a ring with three counters. A slot holds
// a large block of text, so a single lock is fast enough.
#include "dev/lib/pipeline.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

struct Pipeline {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int slots;
    bool *done;  // (slots) true if the slot has been processed but not written yet
    int64_t filled, started,
        written;  // written <= started <= filled <= written + slots; count i uses slot i % slots
    bool no_more_input;
};

Pipeline *pipeline_create(int slots) {
    Pipeline *p = xcalloc(1, sizeof *p, "the pipeline");
    p->slots = slots;
    p->done = xcalloc((size_t)slots, sizeof *p->done, "the pipeline");
    pthread_mutex_init(&p->lock, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&p->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    return p;
}

void pipeline_free(Pipeline *p) {
    if (!p) return;
    pthread_cond_destroy(&p->changed);
    pthread_mutex_destroy(&p->lock);
    free(p->done);
    free(p);
}

static void unlock_changed(Pipeline *p) {
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
}

int pipeline_read_begin(Pipeline *p) {
    pthread_mutex_lock(&p->lock);
    while (p->filled == p->written + p->slots) pthread_cond_wait(&p->changed, &p->lock);
    int slot = (int)(p->filled % p->slots);
    pthread_mutex_unlock(&p->lock);
    return slot;
}

void pipeline_read_end(Pipeline *p) {
    pthread_mutex_lock(&p->lock);
    p->filled++;
    unlock_changed(p);
}

void pipeline_no_more_input(Pipeline *p) {
    pthread_mutex_lock(&p->lock);
    p->no_more_input = true;
    unlock_changed(p);
}

int pipeline_work_begin(Pipeline *p) {
    pthread_mutex_lock(&p->lock);
    while (p->started == p->filled && !p->no_more_input) pthread_cond_wait(&p->changed, &p->lock);
    int slot = p->started == p->filled ? -1 : (int)(p->started++ % p->slots);
    pthread_mutex_unlock(&p->lock);
    return slot;
}

void pipeline_work_end(Pipeline *p, int slot) {
    pthread_mutex_lock(&p->lock);
    p->done[slot] = true;
    unlock_changed(p);
}

static struct timespec in_milliseconds(int milliseconds) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_sec += milliseconds / 1000;
    t.tv_nsec += milliseconds % 1000 * 1000000L;
    if (t.tv_nsec >= 1000000000L) {
        t.tv_nsec -= 1000000000L;
        t.tv_sec++;
    }
    return t;
}

int pipeline_write_begin(Pipeline *p, int milliseconds) {
    struct timespec deadline = in_milliseconds(milliseconds);
    int slot = (int)(p->written % p->slots);  // only the writer changes it
    int waited = 0;
    pthread_mutex_lock(&p->lock);
    while (!p->done[slot] && !(p->no_more_input && p->written == p->filled) && waited != ETIMEDOUT) {
        waited = pthread_cond_timedwait(&p->changed, &p->lock, &deadline);
    }
    if (!p->done[slot]) slot = p->no_more_input && p->written == p->filled ? PIPELINE_END : PIPELINE_TIMEOUT;
    pthread_mutex_unlock(&p->lock);
    return slot;
}

void pipeline_write_end(Pipeline *p) {
    pthread_mutex_lock(&p->lock);
    p->done[p->written++ % p->slots] = false;
    unlock_changed(p);
}
