// Phase timers: see timers.h. A span is one run of a timer from start to stop, recorded by two
// device events or two readings of the host's clock. Spans are queued until the sum is read; then
// their events are reused.
#include "llmc/log/timers.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

// When this many spans are queued, the older half is read, so that long log intervals do not need
// too many events. Those spans are hundreds of micro-batches old, so reading them does not wait.
enum { MAX_QUEUED = 1024 };

typedef struct Span {
    Event *start, *stop;  // created at the span's first use on a stream
    bool on_host;
    double start_s, stop_s;  // host clock, if on_host
} Span;

typedef struct Recorder {
    Span *spans;      // (MAX_QUEUED) ring; unused spans keep their events for reuse
    int first, used;  // range of recorded spans in the ring
    bool running;     // the span after the recorded ones is open
    uint64_t range;   // profiler range of the open span; also set for timers above the level
    Stream *stream;   // stream of the open span
    double seconds;   // sum of the spans that have been read
} Recorder;

struct Timers {
    Device *device;
    int level;
    Recorder recorders[TIMERS];
};

static const struct {
    const char *name;
    int level;
} timer_info[TIMERS] = {
    [TIMER_FORWARD_BACKWARD] = {"forward-backward", 1},
    [TIMER_FORWARD_COMPUTE] = {"forward-compute", 2},
    [TIMER_BACKWARD_COMPUTE] = {"backward-compute", 2},
    [TIMER_BATCH_GENERATOR] = {"batch-generator", 2},
    [TIMER_FORWARD_RECV] = {"forward-recv", 2},
    [TIMER_BACKWARD_RECV] = {"backward-recv", 2},
    [TIMER_ALL_GRADS_SYNC] = {"all-grads-sync", 1},
    [TIMER_PARAMS_ALL_GATHER] = {"params-all-gather", 1},
    [TIMER_OPTIMIZER_CLIP_MAIN_GRAD] = {"optimizer-clip-main-grad", 1},
    [TIMER_OPTIMIZER_INNER_STEP] = {"optimizer-inner-step", 1},
    [TIMER_OPTIMIZER] = {"optimizer", 1},
    [TIMER_EVALUATE] = {"evaluate", 0},
    [TIMER_SAVE_CHECKPOINT] = {"save-checkpoint", 0},
    [TIMER_LOAD_CHECKPOINT] = {"load-checkpoint", 0},
    [TIMER_SETUP] = {"model-and-optimizer-setup", 0},
    [TIMER_DATA_SETUP] = {"train/valid/test-data-iterators-setup", 0},
    [TIMER_EXPOSED_GRADIENTS] = {"exposed-gradients", 0},
    [TIMER_EXPOSED_WEIGHTS] = {"exposed-weights", 0},
};

const char *timer_name(Timer timer) { return timer_info[timer].name; }

Timers *timers_create(Device *device, int level) {
    assert(level >= 0 && level <= 2);
    Timers *timers = xcalloc(1, sizeof *timers, "timers");
    timers->device = device;
    timers->level = level;
    return timers;
}

void timers_destroy(Timers *timers) {
    if (!timers) return;
    for (int t = 0; t < TIMERS; t++) {
        Recorder *r = &timers->recorders[t];
        for (int i = 0; r->spans && i < MAX_QUEUED; i++) {
            if (r->spans[i].start) event_destroy(r->spans[i].start);
            if (r->spans[i].stop) event_destroy(r->spans[i].stop);
        }
        free(r->spans);
    }
    free(timers);
}

static Span *span_at(Recorder *r, int i) { return &r->spans[(r->first + i) % MAX_QUEUED]; }

// Adds the oldest n recorded spans to the sum and removes them.
static void read_spans(Recorder *r, int n) {
    for (int i = 0; i < n; i++) {
        Span *span = span_at(r, i);
        if (span->on_host) {
            r->seconds += span->stop_s - span->start_s;
        } else {
            event_synchronize(span->stop);
            r->seconds += 1e-3 * event_elapsed_ms(span->start, span->stop);
        }
    }
    r->used -= n;
    r->first = r->used ? (r->first + n) % MAX_QUEUED : 0;  // an empty ring starts over with its first events
}

static const Site *site_of(const Timers *timers) {
    return timers->device ? device_site(timers->device) : NULL;
}

void timer_start(Timers *timers, Timer timer, Stream *stream) {
    assert(timers && timer >= 0 && timer < TIMERS);
    Recorder *r = &timers->recorders[timer];
    if (!r->running) r->range = profile_range_start(timer_name(timer));
    if (timer_info[timer].level > timers->level) return;
    if (r->running) {
        fatal(site_of(timers), EXIT_ENVIRONMENT, "timer %s started twice; this is a bug, please report it",
              timer_name(timer));
    }
    if (r->used == MAX_QUEUED) read_spans(r, MAX_QUEUED / 2);
    if (!r->spans) r->spans = xcalloc(MAX_QUEUED, sizeof *r->spans, "timer spans");
    Span *span = span_at(r, r->used);
    r->running = true;
    r->stream = stream;
    span->on_host = !stream;
    if (span->on_host) {
        span->start_s = monotonic_seconds();
        return;
    }
    if (!span->start) span->start = event_create_timed(timers->device);
    if (!span->stop) span->stop = event_create_timed(timers->device);
    event_record(span->start, stream);
}

void timer_stop(Timers *timers, Timer timer, Stream *stream) {
    assert(timers && timer >= 0 && timer < TIMERS);
    Recorder *r = &timers->recorders[timer];
    profile_range_end(r->range);
    if (timer_info[timer].level > timers->level) return;
    if (!r->running || r->stream != stream) {
        fatal(site_of(timers), EXIT_ENVIRONMENT, "timer %s stopped %s; this is a bug, please report it",
              timer_name(timer), r->running ? "on a different stream" : "without a start");
    }
    Span *span = span_at(r, r->used++);
    r->running = false;
    if (span->on_host) {
        span->stop_s = monotonic_seconds();
    } else {
        event_record(span->stop, stream);
    }
}

double timer_take_seconds(Timers *timers, Timer timer) {
    assert(timers && timer >= 0 && timer < TIMERS);
    Recorder *r = &timers->recorders[timer];
    Stream *stream = r->stream;
    bool running = r->running;
    if (running) timer_stop(timers, timer, stream);
    read_spans(r, r->used);
    double seconds = r->seconds;
    r->seconds = 0;
    if (running) timer_start(timers, timer, stream);
    return seconds;
}

// Returns minimum and maximum over ranks on which the timer ran. ms[rank * stride]: time of a rank.
static TimerStats combine(const double *ms, int stride, int world) {
    TimerStats stats = {0};
    for (int64_t at = 0; at < (int64_t)world * stride; at += stride) {
        if (!(ms[at] > 0)) continue;
        if (!stats.recorded || ms[at] < stats.min_ms) stats.min_ms = ms[at];
        if (!stats.recorded || ms[at] > stats.max_ms) stats.max_ms = ms[at];
        stats.recorded = true;
    }
    return stats;
}

void timers_collect(Timers *timers, Timer first, int count, double divisor, Peers peers, TimerStats *stats,
                    double *rank_ms) {
    assert(timers && stats && count > 0 && (int)first + count <= TIMERS && divisor > 0);
    int world = peers_size(peers);
    size_t row = (size_t)count * sizeof(double);
    double *mine = xmalloc(row, "timer values");
    double *gathered = xmalloc((size_t)world * row, "timer values");  // (world, count)
    for (int i = 0; i < count; i++) mine[i] = 1e3 * timer_take_seconds(timers, (Timer)(first + i)) / divisor;
    peers_all_gather(peers, mine, gathered, count, MPI_DOUBLE);
    for (int i = 0; i < count; i++) {
        stats[i] = combine(gathered + i, count, world);
        if (!rank_ms) continue;
        stats[i].rank_ms = rank_ms + (size_t)i * (size_t)world;
        for (int rank = 0; rank < world; rank++)
            stats[i].rank_ms[rank] = gathered[(size_t)rank * (size_t)count + (size_t)i];
    }
    free(mine);
    free(gathered);
}

Exposed timers_exposed_of(const double *ms, int world) {
    assert(world >= 1);
    const double *gradients = ms, *weights = ms + world;
    int least = 0, most = 0;
    for (int rank = 1; rank < world; rank++) {
        double both = gradients[rank] + weights[rank];
        if (both < gradients[least] + weights[least]) least = rank;
        if (both > gradients[most] + weights[most]) most = rank;
    }
    return (Exposed){gradients[least], weights[least], gradients[most] + weights[most]};
}

Exposed timers_take_exposed(Timers *timers, double steps, Peers peers) {
    assert(steps > 0);
    TimerStats stats[2];
    int world = peers_size(peers);
    double *ms = xmalloc(2 * (size_t)world * sizeof *ms, "times that ranks waited");  // (2, world)
    timers_collect(timers, TIMER_EXPOSED_GRADIENTS, 2, steps, peers, stats, ms);
    Exposed e = timers_exposed_of(ms, world);
    free(ms);
    return e;
}
