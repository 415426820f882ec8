// Phase timers with Megatron-LM's names, levels and table. Start and stop record device events on a
// stream, so timing never synchronizes anything within a step; times are read at the log interval.
// Profilers see every phase under its name, at any level (profile_range_start). Megatron-LM
// synchronizes the device at every start and stop, and adds a barrier at level 1, so its
// measurement removes the overlap it should show.
#pragma once
#include "llmc/device.h"
#include "llmc/ranks/peers.h"
LLMC_BEGIN

// In Megatron's print order. Each has a level (timer_info in timers.c), compared with
// --timing-log-level.
typedef enum Timer {
    TIMER_FORWARD_BACKWARD,
    TIMER_FORWARD_COMPUTE,
    TIMER_BACKWARD_COMPUTE,
    TIMER_BATCH_GENERATOR,
    TIMER_ALL_GRADS_SYNC,
    TIMER_PARAMS_ALL_GATHER,
    TIMER_OPTIMIZER_CLIP_MAIN_GRAD,
    TIMER_OPTIMIZER_INNER_STEP,
    TIMER_OPTIMIZER,
    TIMER_EVALUATE,
    TIMER_SAVE_CHECKPOINT,
    TIMER_LOAD_CHECKPOINT,
    TIMER_SETUP,
    TIMER_DATA_SETUP,
    // Not in Megatron-LM's table: communication that the compute stream waited for, the "exposed
    // comm" of the iteration line.
    TIMER_EXPOSED_GRADIENTS,
    TIMER_EXPOSED_WEIGHTS,
    TIMERS
} Timer;

typedef struct Timers Timers;

// device may be NULL if all timers use the host's clock (stream NULL below). level:
// --timing-log-level.
Timers *timers_create(Device *device, int level);
void timers_destroy(Timers *timers);
const char *timer_name(Timer timer);  // "forward-compute", ...
// No-op for timers above the level. Nesting a timer in itself is fatal; different timers may nest.
// stream: stream of the timed work, or NULL for the host's clock.
void timer_start(Timers *timers, Timer timer, Stream *stream);
void timer_stop(Timers *timers, Timer timer, Stream *stream);
// Returns the seconds since the last reset (waiting for recorded events), and resets. A running
// timer is counted up to now and continues.
double timer_take_seconds(Timers *timers, Timer timer);
// Reads `count` timers starting at `first` and combines them over peers. Collective; one
// all-gather. stats: (count) on every rank, in ms divided by `divisor`. As in Megatron-LM, ranks
// without time are excluded from the minimum; recorded: some rank has time.
typedef struct TimerStats {
    double min_ms, max_ms;
    double *rank_ms;  // (world) row of the caller's rank_ms, or NULL
    bool recorded;
} TimerStats;
// rank_ms: (count, world) or NULL.
void timers_collect(Timers *timers, Timer first, int count, double divisor, Peers peers, TimerStats *stats,
                    double *rank_ms);

// Exposed communication in ms per step, on the rank that waited least: longer waits on other ranks
// come from slower GPUs or pipeline bubbles. most_ms: gradients and weights together, on the rank
// that waited most. On CPU ranks: the duration of the communication itself.
typedef struct Exposed {
    double gradients_ms, weights_ms, most_ms;
} Exposed;
// Returns averages over the `steps` since the last call. Collective over peers.
Exposed timers_take_exposed(Timers *timers, double steps, Peers peers);
// ms: (2, world), each rank's waits for reductions, then for gathers.
Exposed timers_exposed_of(const double *ms, int world);

LLMC_END
