// Reports of the main thread: see heartbeat.h.
#include "llmc/ranks/heartbeat.h"

#include <assert.h>
#include <stdio.h>
#include <unistd.h>

#include "llmc/ranks/heartbeat_state.h"

static void hang(void) {
    for (;;) pause();
}

static bool fault_here(Heartbeat *h, FaultKind kind, int64_t iteration) {
    return fault_due(&h->faults, kind, iteration, h->fault_number);
}

// Counts the waits of an iteration.
static void count_wait(Heartbeat *h, int64_t iteration) {
    h->fault_number = iteration == h->fault_iteration ? h->fault_number + 1 : 0;
    h->fault_iteration = iteration;
    if (fault_here(h, FAULT_STALL, iteration)) hang();
}

void heartbeat_progress(const Site *site) {
    Heartbeat *h = heartbeat_watched(site);
    if (h) atomic_fetch_add_explicit(&h->progress, 1, memory_order_relaxed);
}

void heartbeat_waiting(const Site *site, bool waits) {
    Heartbeat *h = heartbeat_watched(site);
    if (!h) return;
    heartbeat_progress(site);
    if (waits && h->faults.count) count_wait(h, site->iteration);
    Slot *slot = &h->slots[h->own];
    char phase[PHASE_BYTES] = "";
    snprintf(phase, sizeof phase, "%s", site->phase ? site->phase : "");
    heartbeat_store_text(slot->phase, PHASE_WORDS, phase);
    atomic_store_explicit(&slot->iteration, site->iteration, memory_order_relaxed);
    atomic_store_explicit(&slot->waits, waits, memory_order_release);
    if (waits && h->faults.count && fault_here(h, FAULT_HANG, site->iteration)) hang();
}

void heartbeat_collective(const Site *site, const char *what, const char *scope) {
    Heartbeat *h = heartbeat_watched(site);
    if (!h) return;
    Slot *slot = &h->slots[h->own];
    char call[8 * CALL_WORDS] = "";
    snprintf(call, sizeof call, "%s %s", what, scope);
    heartbeat_store_text(slot->call, CALL_WORDS, call);
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

bool heartbeat_find_busy(const Site *site, char *text, size_t bytes) {
    assert(text && bytes > 0);
    Heartbeat *h = heartbeat_watched(site);
    *text = '\0';
    if (!h) return false;
    heartbeat_sleep(1 + 2 * h->period);
    bool busy = heartbeat_list_busy(h, text, bytes);
    // Otherwise the late rank is on another host, and the ranks there can name it.
    if (!busy && h->other_hosts) heartbeat_sleep(10 + heartbeat_host_delay(h));
    return busy;
}

void heartbeat_claim_exit(const Site *site) {
    Heartbeat *h = heartbeat_watched(site);
    if (h) heartbeat_claim(h);
}

void heartbeat_claim_exit_in_turn(const Site *site) {
    Heartbeat *h = heartbeat_watched(site);
    if (!h) return;
    heartbeat_claim(h);
    heartbeat_sleep(heartbeat_host_delay(h));
}
