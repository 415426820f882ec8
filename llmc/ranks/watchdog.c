// The watchdog thread: see watchdog.h.
#include "llmc/ranks/watchdog.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "llmc/ranks/heartbeat.h"
#include "llmc/ranks/heartbeat_state.h"
#include "llmc/ranks/peers.h"
#include "llmc/ranks/launch.h"
#include "llmc/ranks/node_failure.h"

// Stack size of the thread; thread-local memory of the libraries takes about 70 KiB of it.
enum { STACK_BYTES = 512 << 10 };
// Seconds added to the limit. At the start, MPI takes 10 s if the host's own name cannot be
// resolved. At the end, ranks have just synchronized.
enum { EXTRA_AT_START = 20, EXTRA_AT_END = 10 };
// Seconds added to waits if there are other hosts, because hosts report one after another.
enum { EXTRA_WITH_HOSTS = 35 };

// --- ending the job ------------------------------------------------------------------------------

// Releases kernels that wait for other ranks. Must be followed by _exit, because their results are
// undefined.
static void abort_kernels(Heartbeat *h) {
    pthread_mutex_lock(&h->lock);
    if (h->abort) *h->abort = 1;
    pthread_mutex_unlock(&h->lock);
}

// Called after claiming the exit. Exits without calling MPI, which only the main thread may use;
// the exit code makes the launcher end the other ranks.
static void print_and_exit(Heartbeat *h, const char *what) {
    char phase[PHASE_BYTES];
    heartbeat_where(&h->slots[h->own], &h->site.iteration, phase);
    h->site.phase = *phase ? phase : "start";
    error_print(&h->site, what);
    abort_kernels(h);
    _exit(EXIT_COMMUNICATION);
}

static void end_job(Heartbeat *h, const char *what) {
    heartbeat_claim_exit(&h->site);
    print_and_exit(h, what);
}

static void end_silence(Heartbeat *h, const Slot *silent, double seconds) {
    char last[96], what[256];
    heartbeat_describe(silent, last, sizeof last);
    snprintf(what, sizeof what,
             "rank %d has shown no sign of life for %.0f s (last seen at %s); check what stopped it "
             "(--distributed-timeout-minutes sets the limit)",
             atomic_load(&silent->rank), seconds, last);
    end_job(h, what);
}

static bool writes_log(const Slot *slot) {
    int64_t iteration;
    char phase[PHASE_BYTES];
    heartbeat_where(slot, &iteration, phase);
    return !strcmp(phase, PHASE_WRITE_LOG);
}

// Explains why the main thread has made no progress for `idle` seconds.
static void explain_idle(const Heartbeat *h, bool waits, double idle, char *text, size_t bytes) {
    char busy[448];
    if (!waits && writes_log(&h->slots[h->own])) {
        snprintf(text, bytes,
                 "no progress for %.0f s: nothing is reading this rank's log (its standard output); check "
                 "what stopped the reader",
                 idle);
    } else if (!waits) {
        snprintf(text, bytes,
                 "no progress for %.0f s: this rank is stuck, or its device waits for another; check what "
                 "it is doing",
                 idle);
    } else if (heartbeat_list_busy(h, busy, sizeof busy)) {
        snprintf(text, bytes, "waited %.0f s: %.440s; check what stopped it", idle, busy);
    } else {
        snprintf(text, bytes,
                 "waited %.0f s for the device or another host, but no rank on this host is busy; check "
                 "whether a GPU hangs (nvidia-smi, dmesg)",
                 idle);
    }
}

// --- one beat ------------------------------------------------------------------------------------

// Checks that this rank's main thread makes progress. now: current time in beats.
static void watch_own(Heartbeat *h, long long now) {
    char who[512], what[1000], calls[400];  // `what` must fit into error_print's buffer
    long long progress = atomic_load(&h->progress);
    if (progress != h->progress_seen) h->progress_since = now;
    h->progress_seen = progress;
    bool waits = atomic_load(&h->slots[h->own].waits);
    double idle = (double)(now - h->progress_since) * h->period;
    bool suspected = node_failure_suspected(&h->site, idle);  // must be called on every beat
    // A main thread that waits for the device cannot detect a lost node.
    if (waits && (suspected || (h->limit > 0 && idle > h->limit))) node_failure_report(&h->site);
    double extra = (waits ? h->patience : 0) + node_failure_extra_wait(&h->site, h->limit);
    if (h->limit <= 0 || idle <= h->limit + extra) return;
    explain_idle(h, waits, idle, who, sizeof who);
    heartbeat_list_calls(h, calls, sizeof calls);
    snprintf(what, sizeof what, "%s%s (--distributed-timeout-minutes sets the limit)", who, calls);
    end_job(h, what);
}

// Checks that the other ranks of this host are alive. The lowest live rank reports a dead rank.
static void watch_others(Heartbeat *h, long long now) {
    long long *seen = h->seen, *since = h->seen + h->size;
    bool lowest = true;
    const Slot *silent = NULL;
    double seconds = 0;
    for (int i = 0; i < h->size; i++) {
        if (i == h->own) continue;
        long long beats = atomic_load(&h->slots[i].beats);
        if (beats != seen[i]) since[i] = now;
        seen[i] = beats;
        double silence = (double)(now - since[i]) * h->period;
        if (node_failure_tolerates(&h->site, atomic_load(&h->slots[i].rank))) {
            if (h->limit > 0 && beats >= 0 && silence > h->limit) node_failure_report(&h->site);
            continue;
        }
        bool dead = beats >= 0 && silence > h->limit + node_failure_extra_wait(&h->site, h->limit);
        if (dead && !silent) silent = &h->slots[i], seconds = silence;
        if (!dead && beats >= 0 && i < h->own) lowest = false;
    }
    if (silent && lowest && h->limit > 0) end_silence(h, silent, seconds);
}

// Runs the check of heartbeat_set_check. Releases the lock before this host waits for its turn.
static void run_check(Heartbeat *h) {
    char what[1000];
    pthread_mutex_lock(&h->lock);
    bool wrong = h->check && h->check(h->check_context, what, sizeof what);
    pthread_mutex_unlock(&h->lock);
    if (!wrong) return;
    heartbeat_claim_exit_in_turn(&h->site);  // several hosts fail at once
    print_and_exit(h, what);
}

static void beat(Heartbeat *h, long long now) {
    watch_others(h, now);
    run_check(h);
    watch_own(h, now);
    atomic_fetch_add(&h->slots[h->own].beats, 1);
}

// --- the thread ----------------------------------------------------------------------------------

// Waits until the next beat. Returns false if the thread must end.
static bool wait_for_beat(Heartbeat *h) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    int64_t nanoseconds = until.tv_nsec + (int64_t)(1e9 * h->period);
    until.tv_sec += nanoseconds / 1000000000;
    until.tv_nsec = nanoseconds % 1000000000;
    pthread_mutex_lock(&h->lock);
    while (!h->closing && pthread_cond_timedwait(&h->wake, &h->lock, &until) == 0) continue;
    bool running = !h->closing;
    pthread_mutex_unlock(&h->lock);
    return running;
}

static int environment_rank(void) {
    int rank = launch_rank_from_environment();
    return rank > 0 ? rank : 0;
}

static void end_process(const MpiLimit *l) {
    char what[400];
    Site site = {.rank = -1, .phase = l->phase};  // node and GPU are not known
    snprintf(what, sizeof what,
             "rank %d waited %.0f s for %s; %s (--distributed-timeout-minutes sets the limit)",
             environment_rank(), l->seconds, l->wanted, l->advice);
    error_print(&site, what);
    _exit(l->code);
}

// Measures time in beats, so that stopping and continuing the whole job is not a failure.
static void *watch(void *context) {
    Heartbeat *h = (Heartbeat *)context;
    for (long long now = 1; wait_for_beat(h); now++) {
        if (h->mpi_limit.seconds <= 0) beat(h, now);
        else if ((double)now * h->period >= h->mpi_limit.seconds) {
            if (h->slots)
                heartbeat_claim_exit(&h->site);  // one message per host, even if the launcher is slow
            end_process(&h->mpi_limit);
        }
    }
    return NULL;
}

// Returns the result of pthread_create. Uses a small stack, unless the thread-local memory of the
// libraries does not fit into it.
static int start_thread(Heartbeat *h) {
    pthread_attr_t small;
    h->closing = false;
    int reason = pthread_attr_init(&small);
    if (reason == 0) {
        pthread_attr_setstacksize(&small, STACK_BYTES);
        reason = pthread_create(&h->thread, &small, watch, h);
        pthread_attr_destroy(&small);
    }
    if (reason == EINVAL) reason = pthread_create(&h->thread, NULL, watch, h);
    h->has_thread = reason == 0;
    return reason;
}

static void stop_thread(Heartbeat *h) {
    if (!h->has_thread) return;
    pthread_mutex_lock(&h->lock);
    h->closing = true;
    pthread_cond_signal(&h->wake);
    pthread_mutex_unlock(&h->lock);
    pthread_join(h->thread, NULL);
    h->has_thread = false;
}

static void stop_watching(Heartbeat *h) {
    stop_thread(h);
    if (h->slots) atomic_store(&h->slots[h->own].beats, -1);
}

static void thread_missing(const Site *site, int reason) {
    fatal(site, EXIT_ENVIRONMENT,
          "cannot start the watchdog thread: %s; raise ulimit -u, ulimit -v or the container's process limit",
          strerror(reason));
}

static Heartbeat *create(double limit) {
    pthread_condattr_t clock;
    Heartbeat *h = xcalloc(1, sizeof *h, "the watchdog");
    h->limit = limit;
    h->period = limit > 0 && limit < 20 ? limit / 20 : 1;
    h->fault_iteration = -1;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&h->wake, &clock);
    pthread_condattr_destroy(&clock);
    pthread_mutex_init(&h->lock, NULL);
    return h;
}

// --- opening and closing -------------------------------------------------------------------------

// Returns the seconds in which lower ranks print an error and end the job. Open MPI's launcher
// needs 2 s to end ranks that are in MPI_Init or MPI_Finalize.
static double process_delay(void) { return 2 * launch_rank_delay(environment_rank()); }

void watchdog_mpi_starting(Site *site, double limit) {
    assert(site && !site->heartbeat);
    if (limit <= 0) return;
    Heartbeat *h = create(limit);
    h->mpi_limit = (MpiLimit){
        .seconds = limit + EXTRA_AT_START + process_delay(),
        .phase = "start",
        .wanted = "all ranks to start",
        .advice = "check which rank or node is stopped, or blocked reading a file",
        .code = EXIT_COMMUNICATION,
    };
    site->heartbeat = h;
    int reason = start_thread(h);
    if (reason == 0) return;
    heartbeat_sleep(process_delay());
    thread_missing(NULL, reason);
}

void watchdog_mpi_ending(Site *site, double limit, int code) {
    assert(site);
    Heartbeat *h = site->heartbeat;
    if (limit <= 0) {
        watchdog_close(site);
        return;
    }
    if (h) stop_watching(h);
    else h = site->heartbeat = create(limit);
    h->mpi_limit = (MpiLimit){
        .seconds = limit + EXTRA_AT_END + process_delay(),
        .phase = "end",
        .wanted = "all ranks to shut down after the run",
        .advice = "check what stopped them",
        .code = code ? code : EXIT_COMMUNICATION,
    };
    start_thread(h);  // if it fails, shutdown has no limit
}

// Maps the slots of all ranks of the host, or only this rank's slot if they cannot share memory.
// Sets this rank's index and the number of slots.
static Slot *map_slots(Peers host, int *rank, int *size) {
    MPI_Comm_rank(host.comm, rank);
    MPI_Comm_size(host.comm, size);
    void *map = *size > 1 ? host_memory_map(host, (size_t)(*size + 1) * sizeof(Slot), true) : NULL;
    if (map) return (Slot *)map + 1;
    *rank = 0;
    *size = 1;
    size_t bytes = 2 * sizeof(Slot);
    map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) {
        fatal(host.site, EXIT_ENVIRONMENT,
              "out of memory: %zu bytes for the heartbeat; use a machine with more memory", bytes);
    }
    return (Slot *)map + 1;
}

void watchdog_open(Site *site, MPI_Comm host, int ranks, double limit) {
    int rank, size, on_host;
    Error ignored;  // zero_plan reports an invalid SDP4BIT_FAULT
    assert(site && ranks > 0);
    bool starting = site->heartbeat && !site->heartbeat->slots;
    Heartbeat *h = starting ? site->heartbeat : create(limit);
    site->heartbeat = NULL;
    Site unwatched = *site;  // without heartbeat, because the slots are not mapped yet
    Peers peers = {host, limit > 0 ? limit + launch_rank_delay(site->rank) : 0, &unwatched};
    MPI_Comm_size(host, &on_host);
    Slot *slots = map_slots(peers, &rank, &size);
    stop_thread(h);
    h->mpi_limit.seconds = 0;
    h->slots = slots;
    h->own = rank;
    h->size = size;
    h->seen = xcalloc(2 * (size_t)size, sizeof *h->seen, "the watchdog");
    h->calls = xcalloc((size_t)size, sizeof *h->calls, "the watchdog");
    h->other_hosts = ranks > on_host;
    double hosts = h->other_hosts ? EXTRA_WITH_HOSTS : 0;
    h->patience = 5 + 4 * h->period + hosts + launch_rank_delay(site->rank);
    faults_from_environment(&h->faults, site->rank, &ignored);
    h->site = *site;
    h->site.heartbeat = h;
    atomic_store(&slots[rank].rank, site->rank);
    site->heartbeat = h;
    heartbeat_waiting(site, false);
    peers_barrier(peers);  // all slots now have their rank
    int reason = start_thread(h);
    if (reason == 0) return;
    // Without a thread, this rank neither watches nor is watched.
    atomic_store(&slots[rank].beats, -1);
    if (limit <= 0) return;
    heartbeat_claim_exit_in_turn(site);
    thread_missing(site, reason);
}

void watchdog_close(Site *site) {
    assert(site);
    Heartbeat *h = site->heartbeat;
    if (!h) return;
    site->heartbeat = NULL;
    stop_watching(h);
    if (h->slots) munmap(h->slots - 1, (size_t)(h->size + 1) * sizeof(Slot));
    pthread_cond_destroy(&h->wake);
    pthread_mutex_destroy(&h->lock);
    free(h->calls);
    free(h->seen);
    free(h);
}
