// State shared by heartbeat.c (main thread) and watchdog.c (watchdog thread). C only: uses atomics.
#pragma once
#include <pthread.h>
#include <stdatomic.h>

#include "llmc/base/base.h"
#include "llmc/base/fault.h"

enum { PHASE_WORDS = 4, CALL_WORDS = 5, PHASE_BYTES = 8 * PHASE_WORDS };

// State of one rank in memory shared by the ranks of a host. Only this rank writes it.
typedef struct Slot {
    _Alignas(128) atomic_llong beats;  // beats of the watchdog thread; negative: closed
    atomic_llong iteration;
    atomic_int waits, rank;
    atomic_ullong phase[PHASE_WORDS];  // text, truncated; may briefly mix two phases
    atomic_llong calls;                // number of collectives issued
    atomic_ullong call[CALL_WORDS];    // text of the last collective
} Slot;

// Time limit of MPI's startup or shutdown, when ranks cannot see each other.
typedef struct MpiLimit {
    double seconds;  // 0: none
    const char *phase, *wanted, *advice;
    int code;
} MpiLimit;

struct Heartbeat {
    double limit, period;
    MpiLimit mpi_limit;
    pthread_t thread;
    bool has_thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;  // wakes the thread when `closing` is set
    // Protected by lock:
    bool closing;
    bool (*check)(void *context, char *what, size_t bytes);  // NULL: none
    void *check_context;
    volatile int *abort;  // flag of heartbeat_set_abort; NULL: none
    // Set by watchdog_open before it starts the thread; unset if ranks are not watched:
    Slot *slots;  // (size) shared; NULL until watchdog_open. The rank that ends the job claims
                  // slots[-1].waits
    int own, size;
    bool other_hosts;
    double patience;  // seconds added to the limit during a wait, so that waits with their own time limit
                      // fail before the watchdog acts
    atomic_llong progress;  // number of progress reports from the main thread
    // Used only by the thread, but allocated by the main thread to avoid another malloc arena:
    long long progress_seen, progress_since;  // last value of progress, and the beat when it changed
    long long *seen;   // (2, size) beats of the other ranks, and the beat when each last changed
    long long *calls;  // (size) scratch of heartbeat_list_calls
    Site site;         // the thread's copy
    // For tests:
    Faults faults;
    int64_t fault_iteration, fault_number;
};

// Returns the heartbeat if ranks are watched, else NULL.
Heartbeat *heartbeat_watched(const Site *site);
// Sleeps, even if signals arrive.
void heartbeat_sleep(double seconds);

void heartbeat_where(const Slot *slot, int64_t *iteration, char phase[PHASE_BYTES]);
// Writes "iteration 12, read data"; before training only the phase.
void heartbeat_describe(const Slot *slot, char *text, size_t bytes);
// Writes "rank 3 is still busy (last seen at ...)" for each live rank of the host that doesn't
// wait. Returns false if there is none.
bool heartbeat_list_busy(const Heartbeat *h, char *text, size_t bytes);
// Writes "; collectives issued: rank 0: 52 (last: all-gather between nodes); rank 6: 51 (...); 4
// others: 52". Lists this rank, then the ranks of this host with the fewest collectives, which are
// late. If all numbers are equal, the devices hang. Empty if no collective was issued.
void heartbeat_list_calls(const Heartbeat *h, char *text, size_t bytes);
