// Phase timers with Megatron-LM's names, levels and table. Start and stop record device events on a
// stream, which are read at the log interval, so timing does not synchronize within a step.
// (Megatron-LM synchronizes the device at every start and stop, which removes the overlap of
// compute and communication.) Profilers see every phase under its name, at any level
// (profile_range_start).
#pragma once
#include "llmc/device.h"
#include "llmc/ranks/peers.h"
LLMC_BEGIN

// In Megatron-LM's print order. Each timer has a level (timer_info in timers.c), which is compared
// with --timing-log-level.
typedef enum Timer {
    TIMER_FORWARD_BACKWARD,
    TIMER_FORWARD_COMPUTE,
    TIMER_BACKWARD_COMPUTE,
    TIMER_BATCH_GENERATOR,
    TIMER_FORWARD_RECV,   // part of forward-compute
    TIMER_BACKWARD_RECV,  // part of backward-compute
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
    // Not in Megatron-LM's table: time that the compute stream waited for communication, which is
    // the "exposed comm" of the iteration line.
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
// No-op for timers above the level. Different timers may nest, but nesting a timer in itself is
// fatal. stream: stream of the timed work, or NULL for the host's clock.
void timer_start(Timers *timers, Timer timer, Stream *stream);
void timer_stop(Timers *timers, Timer timer, Stream *stream);
// Returns the sum in seconds and resets it. Waits for recorded events. A running timer is counted
// up to now and continues.
double timer_take_seconds(Timers *timers, Timer timer);
// A timer combined over ranks, in ms. As in Megatron-LM, ranks on which the timer did not run are
// excluded. recorded: the timer ran on some rank.
typedef struct TimerStats {
    double min_ms, max_ms;
    double *rank_ms;  // (world) row of the caller's rank_ms, or NULL
    bool recorded;
} TimerStats;
// Reads `count` timers starting at `first`, divides their times by `divisor` and combines them over
// peers with one all-gather. stats: (count), set on every rank. rank_ms: (count, world) or NULL.
// Collective over peers.
void timers_collect(Timers *timers, Timer first, int count, double divisor, Peers peers, TimerStats *stats,
                    double *rank_ms);

// Exposed communication in ms per step. gradients_ms, weights_ms: on the rank that waited least,
// because longer waits on other ranks come from slower GPUs or pipeline bubbles. most_ms: sum of
// both on the rank that waited most. On CPU ranks: duration of the communication itself.
typedef struct Exposed {
    double gradients_ms, weights_ms, most_ms;
} Exposed;
// Returns averages over the `steps` since the last call. Collective over peers.
Exposed timers_take_exposed(Timers *timers, double steps, Peers peers);
// Computes the result from ms (2, world): each rank's waits for reductions, then for gathers.
Exposed timers_exposed_of(const double *ms, int world);

LLMC_END
