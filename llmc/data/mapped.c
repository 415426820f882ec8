// Reports mapped files that are truncated or become unreadable during a read. See shard.h.
//
// The handler interrupts a load instruction of this program, not a library function. No lock is
// held there, so it may call fatal(). All other SIGBUS signals go to the previous handler. The
// table and the site are file-scope statics because a signal handler gets no context argument.
#include "llmc/data/shard.h"

#include <assert.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "llmc/ranks/heartbeat.h"

typedef struct Mapped {
    const uint8_t *start;
    size_t bytes;
    char *path;
    struct Mapped *_Atomic next;
} Mapped;

static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;
static Mapped *_Atomic all_mapped;
static const Site *_Atomic reader_site;
static struct sigaction previous_action;  // the previous SIGBUS handler

static const Mapped *mapped_at(const void *address) {
    const uint8_t *at = (const uint8_t *)address;
    for (const Mapped *m = atomic_load(&all_mapped); m; m = m->next) {
        if (at >= m->start && at < m->start + m->bytes) return m;
    }
    return NULL;
}

void mapped_lost(const void *address) {
    const Mapped *m = mapped_at(address);
    const Site *site = atomic_load(&reader_site);
    Site here = {.rank = -1};
    if (site) here = *site;
    here.phase = "read data";
    heartbeat_claim_exit(&here);
    if (!m) fatal(&here, EXIT_DATA, "a mapped file was lost; this is a bug, please report it");
    struct stat status;
    long long now = stat(m->path, &status) == 0 ? (long long)status.st_size : -1;
    if (now >= 0 && (uint64_t)now < m->bytes) {
        fatal(&here, EXIT_DATA,
              "%s was truncated while it was read, from %zu bytes to %lld; restore it, and do not modify "
              "it while it is in use",
              m->path, m->bytes, now);
    }
    fatal(&here, EXIT_DATA,
          "%s was modified while it was read, or can no longer be read; check for programs that write to it, "
          "and for disk errors",
          m->path);
}

static void on_bus_error(int number, siginfo_t *info, void *context) {
    bool memory = info->si_code == BUS_ADRERR || info->si_code == BUS_OBJERR;
    if (memory && mapped_at(info->si_addr)) mapped_lost(info->si_addr);
    sigaction(SIGBUS, &previous_action, NULL);
    raise(number);  // delivered when this handler returns
}

void mapped_guard(const void *start, size_t bytes, const char *path) {
    assert(path && (start || !bytes));
    if (!bytes) return;
    Mapped *m = xcalloc(1, sizeof *m, "the table of mapped files");
    *m = (Mapped){(const uint8_t *)start, bytes, xstrdup(path), NULL};
    pthread_mutex_lock(&list_lock);
    m->next = atomic_load(&all_mapped);
    if (!m->next) {
        struct sigaction ours = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO};
        sigemptyset(&ours.sa_mask);
        sigaction(SIGBUS, &ours, &previous_action);
    }
    atomic_store(&all_mapped, m);
    pthread_mutex_unlock(&list_lock);
}

void mapped_release(const void *start) {
    pthread_mutex_lock(&list_lock);
    Mapped *_Atomic *link = &all_mapped;
    while (*link && (*link)->start != start) link = &(*link)->next;
    Mapped *gone = *link;
    if (gone) *link = gone->next;
    if (gone && !all_mapped) sigaction(SIGBUS, &previous_action, NULL);
    pthread_mutex_unlock(&list_lock);
    if (!gone) return;
    free(gone->path);
    free(gone);
}

void mapped_set_site(const Site *site) { atomic_store(&reader_site, site); }
