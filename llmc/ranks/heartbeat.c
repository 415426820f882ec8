// Signs of life: see heartbeat.h.
#include "llmc/ranks/heartbeat.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "llmc/base/fault.h"
#include "llmc/ranks/host_memory.h"
#include "llmc/ranks/launch.h"
#include "llmc/ranks/peers.h"
#include "llmc/ranks/salvage.h"

enum { PHASE_WORDS = 4, CALL_WORDS = 5 };
enum { MOST_CALLERS = 4 };  // ranks whose last collective is told
enum { MOST_TURNS = 10 };   // of hosts that speak one after the other
enum {
    STACK_BYTES = 512 << 10
};  // of the thread; the thread-local memory of the libraries takes some 70 KiB
// Seconds beyond the limit. Where a host's own name is not found, MPI alone takes 10 s to start. At
// the end the ranks have just met.
enum { PATIENCE_AT_START = 20, PATIENCE_AT_END = 10 };

// One rank's, written by it alone. Its size keeps ranks off each other's cache lines.
typedef struct Slot {
    _Alignas(128) atomic_llong beats;  // of the watchdog thread; negative: closed
    atomic_llong iteration;
    atomic_int waits, rank;
    atomic_ullong phase[PHASE_WORDS];  // text, cut; words may be of two phases for a moment
    atomic_llong calls;                // collectives issued
    atomic_ullong call[CALL_WORDS];    // text: the last one
} Slot;

// A limit on MPI's start or end, where the main thread is blocked in a library and knows no other
// rank.
typedef struct Limit {
    double seconds;  // 0: none
    const char *phase, *wanted, *advice;
    int code;
} Limit;

struct Heartbeat {
    double limit, period;
    Limit start_or_end;
    pthread_t thread;
    bool has_thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;  // closing must not wait for the next beat
    bool closing;         // the lock's, as the next two
    HeartbeatLook look;   // NULL: nothing
    void *look_context;
    // of ranks that are watched; the thread is started after these are set
    Slot *slots;  // (size) shared; NULL: MPI starts, or ends what never started. The slot before the first
                  // belongs to all: its `waits` is taken by the rank that ends the job
    int own, size;
    bool other_hosts;
    double patience;     // what a wait may take beyond the limit before the watchdog ends it: those who know
                         // their limit were first
    atomic_llong moves;  // signs of progress of the main thread
    long long moves_seen, moves_since;  // the thread's
    long long *seen;   // (2, size) the thread's: the others' beats, and since when they are the same. Made by
                       // the main thread: an allocation by the other takes an arena of its own
    long long *calls;  // (size) the thread's, while it tells them; as above
    Faults faults;     // for tests
    int64_t fault_iteration, fault_number;
    Site site;  // the thread's own copy of what does not change
};

// The heartbeat of a rank that is watched, or NULL.
static Heartbeat *beating(const Site *site) {
    Heartbeat *h = site ? site->heartbeat : NULL;
    return h && h->slots ? h : NULL;
}

static void nap(double seconds) {
    struct timespec t = {(time_t)seconds, (long)(1e9 * (seconds - (double)(time_t)seconds))};
    while (nanosleep(&t, &t) != 0 && errno == EINTR) continue;
}

// text: 8 bytes per word, the last of them the end.
static void load_text(char *text, const atomic_ullong *words, int count) {
    for (int i = 0; i < count; i++) {
        unsigned long long word = atomic_load(&words[i]);
        memcpy(text + 8 * i, &word, 8);
    }
    text[8 * count - 1] = '\0';
}
static void store_text(atomic_ullong *words, int count, const char *text) {
    for (int i = 0; i < count; i++) {
        unsigned long long word;
        memcpy(&word, text + 8 * i, 8);
        atomic_store_explicit(&words[i], word, memory_order_relaxed);
    }
}

static void where(const Slot *slot, int64_t *iteration, char phase[8 * PHASE_WORDS]) {
    *iteration = atomic_load(&slot->iteration);
    load_text(phase, slot->phase, PHASE_WORDS);
}

// "iteration 12, read data", or the phase alone before training.
static void describe(const Slot *slot, char *text, size_t bytes) {
    int64_t iteration;
    char phase[8 * PHASE_WORDS];
    where(slot, &iteration, phase);
    if (iteration > 0)
        snprintf(text, bytes, "iteration %lld, %s", (long long)iteration, *phase ? phase : "start");
    else snprintf(text, bytes, "%s", *phase ? phase : "start");
}

// "rank 3 is still busy (last seen at ...)" for each other rank of the host that lives and does not
// wait. False: there is none.
static bool list_busy(const Heartbeat *h, char *text, size_t bytes) {
    int found = 0;
    size_t used = 0;
    for (int i = 0; i < h->size && used < bytes; i++) {
        const Slot *slot = &h->slots[i];
        if (i == h->own || atomic_load(&slot->waits) || atomic_load(&slot->beats) < 0) continue;
        char last[96];
        describe(slot, last, sizeof last);
        used += (size_t)snprintf(text + used, bytes - used, "%srank %d is still busy (last seen at %s)",
                                 found++ ? ", " : "", atomic_load(&slot->rank), last);
    }
    return found > 0;
}

// The rank of the host that has issued the fewest of those in h->calls; -1: there is none.
static int furthest_behind(const Heartbeat *h) {
    int found = -1;
    for (int i = 0; i < h->size; i++) {
        if (h->calls[i] >= 0 && (found < 0 || h->calls[i] < h->calls[found])) found = i;
    }
    return found;
}

// "; 4 others 52 to 53" of those in h->calls, empty when there are none.
static void list_rest(const Heartbeat *h, char *text, size_t bytes) {
    int count = 0;
    long long least = 0, most = 0;
    *text = '\0';
    for (int i = 0; i < h->size; i++) {
        if (h->calls[i] < 0) continue;
        if (!count || h->calls[i] < least) least = h->calls[i];
        if (!count++ || h->calls[i] > most) most = h->calls[i];
    }
    if (!count) return;
    int used = snprintf(text, bytes, "; %d other%s %lld", count, count > 1 ? "s" : "", least);
    if (most > least && (size_t)used < bytes) snprintf(text + used, bytes - (size_t)used, " to %lld", most);
}

// "; issued: rank 0 52 collectives, the last all-gather between nodes; rank 6 51 ...; 4 others 52".
// This rank comes first, then those of this host with the fewest. Who has issued fewer is late.
// Where all have issued the same, the devices stand still. Empty when there were none.
static void list_calls(const Heartbeat *h, char *text, size_t bytes) {
    long long most = 0;
    size_t used = 0;
    *text = '\0';
    for (int i = 0; i < h->size; i++) {
        h->calls[i] = atomic_load(&h->slots[i].beats) < 0 ? -1 : atomic_load(&h->slots[i].calls);
        if (h->calls[i] > most) most = h->calls[i];
    }
    if (most == 0) return;
    for (int told = 0, i = h->own; told < MOST_CALLERS && i >= 0 && used < bytes;
         told++, i = furthest_behind(h)) {
        char last[8 * CALL_WORDS];
        load_text(last, h->slots[i].call, CALL_WORDS);
        used += (size_t)snprintf(text + used, bytes - used, "%srank %d %lld collectives%s%s",
                                 told ? "; " : "; issued: ", atomic_load(&h->slots[i].rank), h->calls[i],
                                 *last ? ", the last " : "", last);
        h->calls[i] = -1;
    }
    if (used < bytes) list_rest(h, text + used, bytes - used);
}

// --- the watchdog --------------------------------------------------------------------------------

static void take_floor(Heartbeat *h) {
    int nobody = 0;
    if (!atomic_compare_exchange_strong(&h->slots[-1].waits, &nobody, 1)) nap(30);
}

// Seconds that this host leaves to those before it, to say what it would say too and to end the
// job.
static double turn(const Heartbeat *h) {
    int before = h->site.node < MOST_TURNS ? h->site.node : MOST_TURNS;
    return h->other_hosts ? 2.0 * before : 0;
}

static void take_turn(Heartbeat *h) {
    take_floor(h);
    nap(turn(h));
}

void heartbeat_take_floor(const Site *site) {
    Heartbeat *h = beating(site);
    if (h) take_floor(h);
}

void heartbeat_take_turn(const Site *site) {
    Heartbeat *h = beating(site);
    if (h) take_turn(h);
}

// Of who has the floor. MPI belongs to the main thread, which is blocked anyway. Leaving with a
// code of its own makes the launcher end the other ranks.
static void speak_and_leave(Heartbeat *h, const char *what) {
    char phase[8 * PHASE_WORDS];
    where(&h->slots[h->own], &h->site.iteration, phase);
    h->site.phase = *phase ? phase : "start";
    error_print(&h->site, what);
    _exit(EXIT_COMMUNICATION);
}

static void end_job(Heartbeat *h, const char *what) {
    take_floor(h);
    speak_and_leave(h, what);
}

static void end_silence(Heartbeat *h, const Slot *silent, double seconds) {
    char last[96], what[256];
    describe(silent, last, sizeof last);
    snprintf(what, sizeof what,
             "rank %d has shown no sign of life for %.0f s (last seen at %s); see what stopped it "
             "(--distributed-timeout-minutes sets the limit)",
             atomic_load(&silent->rank), seconds, last);
    end_job(h, what);
}

static bool writes_log(const Slot *slot) {
    int64_t iteration;
    char phase[8 * PHASE_WORDS];
    where(slot, &iteration, phase);
    return !strcmp(phase, PHASE_WRITE_LOG);
}

// Why the main thread has made no progress for so long.
static void explain_idle(const Heartbeat *h, bool waits, double idle, char *text, size_t bytes) {
    char busy[448];
    if (!waits && writes_log(&h->slots[h->own])) {
        snprintf(text, bytes,
                 "no progress for %.0f s: nobody reads this rank's log (its standard output); see what "
                 "stopped its reader",
                 idle);
    } else if (!waits) {
        snprintf(text, bytes,
                 "no progress for %.0f s: this rank is stuck, or its device waits for another; see what "
                 "it does there",
                 idle);
    } else if (list_busy(h, busy, sizeof busy)) {
        snprintf(text, bytes, "waited %.0f s: %.440s; see what stopped it", idle, busy);
    } else {
        snprintf(text, bytes,
                 "waited %.0f s for the device or another host, no rank of this host is busy; see "
                 "whether a GPU hangs (nvidia-smi, dmesg)",
                 idle);
    }
}

// A main thread that waits on the device looks for no lost node itself.
static void notice_loss(const Heartbeat *h, bool waits, double idle) {
    bool due = salvage_due(&h->site, idle);  // asked every beat: stop.h
    if (waits && (due || (h->limit > 0 && idle > h->limit))) salvage_notice(&h->site);
}

// The main thread of this rank is stuck, or waits for what does not come.
static void watch_own(Heartbeat *h, long long now) {
    char who[512], what[1000], calls[400];  // together within what error_print prints
    long long moves = atomic_load(&h->moves);
    if (moves != h->moves_seen) h->moves_since = now;
    h->moves_seen = moves;
    bool waits = atomic_load(&h->slots[h->own].waits);
    double idle = (double)(now - h->moves_since) * h->period;
    notice_loss(h, waits, idle);
    double patience = (waits ? h->patience : 0) + salvage_patience(&h->site, h->limit);
    if (h->limit <= 0 || idle <= h->limit + patience) return;
    explain_idle(h, waits, idle, who, sizeof who);
    list_calls(h, calls, sizeof calls);
    snprintf(what, sizeof what, "%s%s (--distributed-timeout-minutes sets the limit)", who, calls);
    end_job(h, what);
}

// The other ranks of this host. Of the living the lowest speaks.
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
        if (salvage_spares(&h->site, atomic_load(&h->slots[i].rank))) {
            if (h->limit > 0 && beats >= 0 && silence > h->limit) salvage_notice(&h->site);
            continue;
        }
        bool dead = beats >= 0 && silence > h->limit + salvage_patience(&h->site, h->limit);
        if (dead && !silent) silent = &h->slots[i], seconds = silence;
        if (!dead && beats >= 0 && i < h->own) lowest = false;
    }
    if (silent && lowest && h->limit > 0) end_silence(h, silent, seconds);
}

static int rank_guess(void) {
    int rank = launch_rank_guess();
    return rank > 0 ? rank : 0;
}

static void end_process(const Limit *l) {
    char what[400];
    Site site = {-1, 0, 0, 0, l->phase, NULL, NULL};  // of nodes and GPUs nothing is known yet, or any more
    snprintf(what, sizeof what,
             "rank %d waited %.0f s for %s; %s (--distributed-timeout-minutes sets the limit)", rank_guess(),
             l->seconds, l->wanted, l->advice);
    error_print(&site, what);
    _exit(l->code);
}

// What went wrong behind the main thread's back. The lock is for the asking alone: nobody waits for
// it while the hosts before this one speak.
static void look_behind(Heartbeat *h) {
    char what[1000];
    pthread_mutex_lock(&h->lock);
    bool wrong = h->look && h->look(h->look_context, what, sizeof what);
    pthread_mutex_unlock(&h->lock);
    if (!wrong) return;
    take_turn(h);  // it goes wrong on several hosts at once
    speak_and_leave(h, what);
}

static void beat(Heartbeat *h, long long now) {
    watch_others(h, now);
    look_behind(h);
    watch_own(h, now);
    atomic_fetch_add(&h->slots[h->own].beats, 1);
}

// --- the thread ----------------------------------------------------------------------------------

// Until the next beat. False once the thread is to end.
static bool rest(Heartbeat *h) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    int64_t nanoseconds = until.tv_nsec + (int64_t)(1e9 * h->period);
    until.tv_sec += nanoseconds / 1000000000;
    until.tv_nsec = nanoseconds % 1000000000;
    pthread_mutex_lock(&h->lock);
    while (!h->closing && pthread_cond_timedwait(&h->wake, &h->lock, &until) == 0) continue;
    bool goes_on = !h->closing;
    pthread_mutex_unlock(&h->lock);
    return goes_on;
}

// Counts its own beats, and not the clock: a whole job that is stopped and goes on later is no
// fault.
static void *watch(void *context) {
    Heartbeat *h = (Heartbeat *)context;
    for (long long now = 1; rest(h); now++) {
        if (h->start_or_end.seconds <= 0) beat(h, now);
        else if ((double)now * h->period >= h->start_or_end.seconds) {
            if (h->slots) take_floor(h);  // they have met: one line, however slow the launcher is
            end_process(&h->start_or_end);
        }
    }
    return NULL;
}

// What pthread_create returns. A small stack, for a machine that is short of memory; the usual one
// where the libraries' thread-local memory is larger than that.
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

// From here on this rank watches nobody, and its silence means nothing.
static void leave_others(Heartbeat *h) {
    stop_thread(h);
    if (h->slots) atomic_store(&h->slots[h->own].beats, -1);
}

static void thread_missing(const Site *site, int reason) {
    fatal(site, EXIT_ENVIRONMENT,
          "cannot start the watchdog's thread: %s; raise ulimit -u, ulimit -v or the "
          "container's limit of processes",
          strerror(reason));
}

static Heartbeat *create(double limit) {
    pthread_condattr_t clock;
    Heartbeat *h = (Heartbeat *)xcalloc(1, sizeof *h, "the heartbeat");
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

// Seconds that the ranks before this one have to speak and end the job. Open MPI's launcher takes 2
// s to end ranks that are in MPI_Init or MPI_Finalize.
static double turn_of_process(void) { return 2 * launch_rank_delay(rank_guess()); }

void heartbeat_starting(Site *site, double limit) {
    if (limit <= 0) return;
    Heartbeat *h = create(limit);
    h->start_or_end = (Limit){
        .seconds = limit + PATIENCE_AT_START + turn_of_process(),
        .phase = "start",
        .wanted = "all ranks to start",
        .advice = "see which of them or of their nodes is stopped, or reads a file that does not come",
        .code = EXIT_COMMUNICATION,
    };
    site->heartbeat = h;
    int reason = start_thread(h);
    if (reason == 0) return;
    nap(turn_of_process());  // the first one speaks for all
    thread_missing(NULL, reason);
}

void heartbeat_ending(Site *site, double limit, int code) {
    Heartbeat *h = site->heartbeat;
    if (limit <= 0) {
        heartbeat_close(site);
        return;
    }
    if (h) leave_others(h);
    else h = site->heartbeat = create(limit);
    h->start_or_end = (Limit){
        .seconds = limit + PATIENCE_AT_END + turn_of_process(),
        .phase = "end",
        .wanted = "all ranks to end, after the run itself had ended",
        .advice = "see what stopped one",
        .code = code ? code : EXIT_COMMUNICATION,
    };
    start_thread(h);  // without one there is nothing left to lose
}

// Slots for the ranks of a host, how many of them and which is this rank's: all, or where they
// cannot share memory this rank's alone.
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
        fatal(host.site, EXIT_ENVIRONMENT, "out of memory: %zu bytes for the heartbeat; use a larger machine",
              bytes);
    }
    return (Slot *)map + 1;
}

void heartbeat_open(Site *site, MPI_Comm host, int ranks, double limit) {
    int rank, size, on_host;
    Error ignored;  // zero_plan.c reports faults that are not understood
    bool starting = site->heartbeat && !site->heartbeat->slots;
    Heartbeat *h = starting ? site->heartbeat : create(limit);
    site->heartbeat = NULL;
    Site unwatched = *site;  // of ranks that are yet to come nothing is known
    Peers peers = {host, limit > 0 ? limit + launch_rank_delay(site->rank) : 0, &unwatched};
    MPI_Comm_size(host, &on_host);
    Slot *slots = map_slots(peers, &rank, &size);
    stop_thread(h);
    h->start_or_end.seconds = 0;
    h->slots = slots;
    h->own = rank;
    h->size = size;
    h->seen = (long long *)xcalloc(2 * (size_t)size, sizeof *h->seen, "the heartbeat");
    h->calls = (long long *)xcalloc((size_t)size, sizeof *h->calls, "the heartbeat");
    h->other_hosts = ranks > on_host;
    double hosts = h->other_hosts ? 15 + 2 * MOST_TURNS : 0;
    h->patience = 5 + 4 * h->period + hosts + launch_rank_delay(site->rank);
    faults_from_environment(&h->faults, site->rank, &ignored);
    h->site = *site;
    h->site.heartbeat = h;
    atomic_store(&slots[rank].rank, site->rank);
    site->heartbeat = h;
    heartbeat_waits(site, false);
    peers_meet(peers);  // every slot says who it is
    int reason = start_thread(h);
    if (reason == 0) return;
    // Without a thread this rank is watched by nobody, and watches nobody.
    atomic_store(&slots[rank].beats, -1);
    if (limit <= 0) return;
    take_turn(h);
    thread_missing(site, reason);
}

void heartbeat_close(Site *site) {
    Heartbeat *h = site->heartbeat;
    if (!h) return;
    site->heartbeat = NULL;
    leave_others(h);
    if (h->slots) munmap(h->slots - 1, (size_t)(h->size + 1) * sizeof(Slot));
    pthread_cond_destroy(&h->wake);
    pthread_mutex_destroy(&h->lock);
    free(h->calls);
    free(h->seen);
    free(h);
}

// --- what the main thread tells and asks ---------------------------------------------------------

static void stand_still(void) {
    for (;;) pause();
}

static bool fault_here(Heartbeat *h, FaultKind kind, int64_t iteration) {
    return fault_due(&h->faults, kind, iteration, h->fault_number);
}

// Counts the waits of an iteration.
static void count_wait(Heartbeat *h, int64_t iteration) {
    h->fault_number = iteration == h->fault_iteration ? h->fault_number + 1 : 0;
    h->fault_iteration = iteration;
    if (fault_here(h, FAULT_STALL, iteration)) stand_still();
}

void heartbeat_moves(const Site *site) {
    Heartbeat *h = beating(site);
    if (h) atomic_fetch_add_explicit(&h->moves, 1, memory_order_relaxed);
}

void heartbeat_waits(const Site *site, bool waits) {
    Heartbeat *h = beating(site);
    if (!h) return;
    heartbeat_moves(site);
    if (waits && h->faults.count) count_wait(h, site->iteration);
    Slot *slot = &h->slots[h->own];
    char phase[8 * PHASE_WORDS] = "";
    snprintf(phase, sizeof phase, "%s", site->phase ? site->phase : "");
    store_text(slot->phase, PHASE_WORDS, phase);
    atomic_store_explicit(&slot->iteration, site->iteration, memory_order_relaxed);
    atomic_store_explicit(&slot->waits, waits, memory_order_release);
    if (waits && h->faults.count && fault_here(h, FAULT_HANG, site->iteration)) stand_still();
}

void heartbeat_issues(const Site *site, const char *what, const char *scope) {
    Heartbeat *h = beating(site);
    if (!h) return;
    Slot *slot = &h->slots[h->own];
    char call[8 * CALL_WORDS] = "";
    snprintf(call, sizeof call, "%s %s", what, scope);
    store_text(slot->call, CALL_WORDS, call);
    atomic_fetch_add_explicit(&slot->calls, 1, memory_order_relaxed);
}

void heartbeat_watch(const Site *site, HeartbeatLook look, void *context) {
    Heartbeat *h = beating(site);
    if (!h) return;
    pthread_mutex_lock(&h->lock);
    if (look || h->look_context == context) {
        h->look = look;
        h->look_context = look ? context : NULL;
    }
    pthread_mutex_unlock(&h->lock);
}

bool heartbeat_blames(const Site *site, char *text, size_t bytes) {
    Heartbeat *h = beating(site);
    *text = '\0';
    if (!h) return false;
    nap(1 + 2 * h->period);
    bool busy = list_busy(h, text, bytes);
    // Else the one that is late is on another host, and its neighbors there know its name.
    if (!busy && h->other_hosts) nap(10 + turn(h));
    return busy;
}
