// Named phase timers with Megatron-LM's names, levels and table. Start and stop record device
// events on a stream, so timing never synchronizes anything inside a step. Times are read at the
// log interval. Profilers see every phase under its name, whatever the level (profile_range_start).
// Megatron-LM synchronizes the device at every start and stop, and adds a barrier at level 1: its
// own measurement then removes the overlap that it should show. Called by train_gpt.c and zero.c,
// printed by log.c.
#pragma once
#include "llmc/device.h"
#include "llmc/ranks/peers.h"
LLMC_BEGIN

// In Megatron's print order. Level 0..2 of --timing-log-level decides which exist (see timer_info
// in timers.c).
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

// device may be NULL when every timer runs on the host's clock (stream NULL below). level:
// --timing-log-level.
Timers *timers_create(Device *device, int level);
void timers_destroy(Timers *timers);
const char *timer_name(Timer timer);  // "forward-compute", ...
// A timer above the level does nothing. Nested use of one timer is fatal; different timers may
// nest. stream: where the timed work is queued. NULL: the host's clock, for phases without a
// stream.
void timer_start(Timers *timers, Timer timer, Stream *stream);
void timer_stop(Timers *timers, Timer timer, Stream *stream);
// Seconds since the last reset (waits for the recorded events), and resets. A running timer is
// counted up to now and goes on.
double timer_take_seconds(Timers *timers, Timer timer);
// Takes `count` timers and combines them over peers. Collective; one all-gather. stats: (count) on
// every rank, in ms divided by `divisor`. As in Megatron-LM, ranks where a timer shows no time do
// not count toward its minimum; recorded: some rank has time.
typedef struct TimerStats {
    double min_ms, max_ms;
    double *rank_ms;  // (world) one row of the caller's rank_ms, NULL unless wanted
    bool recorded;
} TimerStats;
// rank_ms: (count, world) or NULL.
void timers_collect(Timers *timers, const Timer *which, int count, double divisor, Peers peers,
                    TimerStats *stats, double *rank_ms);

LLMC_END
