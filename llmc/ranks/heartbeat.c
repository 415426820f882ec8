// Reports from the main thread, and descriptions of the state of all ranks of the host: see
// heartbeat.h and heartbeat_state.h.
#include "llmc/ranks/heartbeat.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "llmc/ranks/heartbeat_state.h"

enum { MAX_CALLERS = 4 };  // number of ranks whose last collective is listed
enum { MAX_HOST_TURNS = 10 };

Heartbeat *heartbeat_watched(const Site *site) {
    Heartbeat *h = site ? site->heartbeat : NULL;
    return h && h->slots ? h : NULL;
}

void heartbeat_sleep(double seconds) {
    struct timespec t = {(time_t)seconds, (long)(1e9 * (seconds - (double)(time_t)seconds))};
    while (nanosleep(&t, &t) != 0 && errno == EINTR) continue;
}

// Returns the seconds that this host waits to let hosts with a lower index report first.
static double host_delay(const Heartbeat *h) {
    int before = h->site.node < MAX_HOST_TURNS ? h->site.node : MAX_HOST_TURNS;
    return h->other_hosts ? 2.0 * before : 0;
}

// text: (8 * count)
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

void heartbeat_where(const Slot *slot, int64_t *iteration, char phase[PHASE_BYTES]) {
    *iteration = atomic_load(&slot->iteration);
    load_text(phase, slot->phase, PHASE_WORDS);
}

void heartbeat_describe(const Slot *slot, char *text, size_t bytes) {
    int64_t iteration;
    char phase[PHASE_BYTES];
    heartbeat_where(slot, &iteration, phase);
    if (iteration > 0)
        snprintf(text, bytes, "iteration %lld, %s", (long long)iteration, *phase ? phase : "start");
    else snprintf(text, bytes, "%s", *phase ? phase : "start");
}

bool heartbeat_list_busy(const Heartbeat *h, char *text, size_t bytes) {
    int found = 0;
    size_t used = 0;
    for (int i = 0; i < h->size && used < bytes; i++) {
        const Slot *slot = &h->slots[i];
        if (i == h->own || atomic_load(&slot->waits) || atomic_load(&slot->beats) < 0) continue;
        char last[96];
        heartbeat_describe(slot, last, sizeof last);
        used += (size_t)snprintf(text + used, bytes - used, "%srank %d is still busy (last seen at %s)",
                                 found++ ? ", " : "", atomic_load(&slot->rank), last);
    }
    return found > 0;
}

// Returns the slot with the fewest calls in h->calls, or -1.
static int slowest_rank(const Heartbeat *h) {
    int found = -1;
    for (int i = 0; i < h->size; i++) {
        if (h->calls[i] >= 0 && (found < 0 || h->calls[i] < h->calls[found])) found = i;
    }
    return found;
}

// Writes "; 4 others: 52 to 53" for the rest of h->calls, empty if there are none.
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
    int used = snprintf(text, bytes, "; %d other%s: %lld", count, count > 1 ? "s" : "", least);
    if (most > least && (size_t)used < bytes) snprintf(text + used, bytes - (size_t)used, " to %lld", most);
}

void heartbeat_list_calls(const Heartbeat *h, char *text, size_t bytes) {
    long long most = 0;
    size_t used = 0;
    *text = '\0';
    for (int i = 0; i < h->size; i++) {
        h->calls[i] = atomic_load(&h->slots[i].beats) < 0 ? -1 : atomic_load(&h->slots[i].calls);
        if (h->calls[i] > most) most = h->calls[i];
    }
    if (most == 0) return;
    for (int listed = 0, i = h->own; listed < MAX_CALLERS && i >= 0 && used < bytes;
         listed++, i = slowest_rank(h)) {
        char last[8 * CALL_WORDS];
        load_text(last, h->slots[i].call, CALL_WORDS);
        used += (size_t)snprintf(text + used, bytes - used, "%srank %d: %lld%s%s%s",
                                 listed ? "; " : "; collectives issued: ", atomic_load(&h->slots[i].rank),
                                 h->calls[i], *last ? " (last: " : "", last, *last ? ")" : "");
        h->calls[i] = -1;
    }
    if (used < bytes) list_rest(h, text + used, bytes - used);
}

// --- reports of the main thread ------------------------------------------------------------------

static void hang(void) {
    for (;;) pause();
}

static bool fault_here(Heartbeat *h, FaultKind kind, int64_t iteration) {
    return fault_due(&h->faults, kind, iteration, h->fault_number);
}

void heartbeat_progress(const Site *site) {
    Heartbeat *h = heartbeat_watched(site);
    if (h) atomic_fetch_add_explicit(&h->progress, 1, memory_order_relaxed);
}

void heartbeat_waiting(const Site *site, bool waits) {
    Heartbeat *h = heartbeat_watched(site);
    if (!h) return;
    heartbeat_progress(site);
    if (waits && h->faults.count) {  // count the waits of an iteration
        h->fault_number = site->iteration == h->fault_iteration ? h->fault_number + 1 : 0;
        h->fault_iteration = site->iteration;
        if (fault_here(h, FAULT_STALL, site->iteration)) hang();
    }
    Slot *slot = &h->slots[h->own];
    char phase[PHASE_BYTES] = "";
    snprintf(phase, sizeof phase, "%s", site->phase ? site->phase : "");
    store_text(slot->phase, PHASE_WORDS, phase);
    atomic_store_explicit(&slot->iteration, site->iteration, memory_order_relaxed);
    atomic_store_explicit(&slot->waits, waits, memory_order_release);
    if (waits && h->faults.count && fault_here(h, FAULT_HANG, site->iteration)) hang();
}

void heartbeat_collective(const Site *site, const char *what, const char *scope) {
    assert(what && scope);
    Heartbeat *h = heartbeat_watched(site);
    if (!h) return;
    Slot *slot = &h->slots[h->own];
    char call[8 * CALL_WORDS] = "";
    snprintf(call, sizeof call, "%s %s", what, scope);
    store_text(slot->call, CALL_WORDS, call);
    atomic_fetch_add_explicit(&slot->calls, 1, memory_order_relaxed);
}

void heartbeat_set_check(const Site *site, HeartbeatCheck check, void *context) {
    Heartbeat *h = heartbeat_watched(site);
    if (!h) return;
    pthread_mutex_lock(&h->lock);
    if (check || h->check_context == context) {
        h->check = check;
        h->check_context = check ? context : NULL;
    }
    pthread_mutex_unlock(&h->lock);
}

void heartbeat_set_abort(const Site *site, int *flag) {
    Heartbeat *h = heartbeat_watched(site);
    if (!h) return;
    pthread_mutex_lock(&h->lock);
    h->abort = flag;
    pthread_mutex_unlock(&h->lock);
}

bool heartbeat_find_busy(const Site *site, char *text, size_t bytes) {
    assert(text && bytes > 0);
    Heartbeat *h = heartbeat_watched(site);
    *text = '\0';
    if (!h) return false;
    heartbeat_sleep(1 + 2 * h->period);
    bool busy = heartbeat_list_busy(h, text, bytes);
    // If no rank here is busy, the late rank is on another host, whose ranks can name it.
    if (!busy && h->other_hosts) heartbeat_sleep(10 + host_delay(h));
    return busy;
}

void heartbeat_claim_exit(const Site *site) {
    Heartbeat *h = heartbeat_watched(site);
    int nobody = 0;
    if (h && !atomic_compare_exchange_strong(&h->slots[-1].waits, &nobody, 1)) heartbeat_sleep(30);
}

void heartbeat_claim_exit_in_turn(const Site *site) {
    Heartbeat *h = heartbeat_watched(site);
    heartbeat_claim_exit(site);
    if (h) heartbeat_sleep(host_delay(h));
}
