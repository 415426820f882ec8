// Simulates a training step over a network: see step_time.h.
#include "llmc/plan/step_time.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>

// A link that sends one message at a time, in order. After an idle period, the first `burst` ms of
// traffic take no time.
typedef struct Link {
    double free, burst;
} Link;
static Link idle_link(double burst) { return (Link){.free = -INFINITY, .burst = burst}; }

// Sends a message that is ready at `start` and takes `time` ms. Returns when it has arrived.
static double carry(Link *link, double start, double time) {
    link->free = fmax(start - link->burst, link->free) + time;
    return fmax(start, link->free);
}

// Simulation state, which carries over from step to step.
typedef struct Clock {
    double now;
    double *weights;       // (buckets) time at which the updated weights have arrived
    int held[2];           // bucket in each of the two slots for gathered weights; -1: none
    double slot_free[2];   // time at which compute has finished with the slot
    double gather_free;    // time at which the last gather has finished
    Link inside, between;  // links for gradients, inside and between nodes
    double reduced;        // time at which the last reduction has finished
} Clock;

// Advances the clock until bucket b has its weights. A gather starts as soon as its slot is free.
static void wait_for_weights(Clock *clock, const StepLoad *load, int b, bool backward) {
    const BucketLoad *bucket = &load->bucket[b];
    double ready = clock->weights[b];
    if (bucket->gathered && clock->held[b % 2] != b) {
        double start = fmax(ready, fmax(clock->gather_free, clock->slot_free[b % 2]));
        ready = start + (backward ? bucket->backward_gather : bucket->forward_gather);
        clock->gather_free = ready;
        clock->held[b % 2] = b;
    }
    clock->now = fmax(clock->now, ready);
}

static void forward(Clock *clock, const StepLoad *load, int b) {
    wait_for_weights(clock, load, b, false);
    clock->now += load->bucket[b].layers * load->forward;
    clock->slot_free[b % 2] = clock->now;
}

// Reduces a part of a bucket's gradients, which is complete now.
static void reduce(Clock *clock, const BucketLoad *bucket, double part) {
    double summed = carry(&clock->inside, clock->now, part * bucket->grad_inside);
    clock->reduced = carry(&clock->between, summed, part * bucket->grad_between);
}

static void backward(Clock *clock, const StepLoad *load, int b, bool reduces) {
    const BucketLoad *bucket = &load->bucket[b];
    double left = 1;
    wait_for_weights(clock, load, b, true);
    for (int i = 0; i < bucket->layers; i++) {
        clock->now += load->backward;
        if (!reduces || !bucket->sent || i == bucket->layers - 1 || bucket->sent[i] == 0) continue;
        reduce(clock, bucket, bucket->sent[i]);
        left -= bucket->sent[i];
    }
    clock->slot_free[b % 2] = clock->now;
    if (b == 0) clock->now += load->tail;
    if (reduces) reduce(clock, bucket, left);
}

static void micro_batch(Clock *clock, const StepLoad *load, bool last) {
    for (int b = 0; b < load->buckets; b++) forward(clock, load, b);
    clock->now += load->head + load->waits;
    for (int b = load->buckets - 1; b >= 0; b--)
        backward(clock, load, b, last || load->bucket[b].reductions != 1);
}

// Runs the optimizer, which waits for all gradients because clipping needs their norm. Each
// bucket's weights are sent as soon as they are updated. Matrix products delay the next forward.
static void update(Clock *clock, const StepLoad *load) {
    Link between = idle_link(load->burst), inside = idle_link(0);
    double updated = fmax(clock->now, clock->reduced) + load->memory;
    clock->now = updated;
    for (int b = 0; b < load->buckets; b++) {
        const BucketLoad *bucket = &load->bucket[b];
        updated += bucket->update;
        clock->now += bucket->products;
        double crossed = carry(&between, updated, bucket->weight_between);
        clock->weights[b] = carry(&inside, crossed, bucket->weight_inside);
    }
    if (load->waits_for_update) clock->now = fmax(clock->now, updated);
    clock->held[0] = clock->held[1] = -1;
}

static void step(Clock *clock, const StepLoad *load) {
    clock->inside = idle_link(0);
    clock->between = idle_link(load->burst);
    clock->reduced = clock->now;
    for (int k = 0; k < load->micro_batches; k++) micro_batch(clock, load, k == load->micro_batches - 1);
    update(clock, load);
}

enum { MOST_STEPS = 100 };  // the step time is usually periodic after a few steps
double step_time(const StepLoad *load) {
    assert(load && load->buckets > 0 && load->micro_batches > 0);
    Clock clock = {.held = {-1, -1}};
    double period = 0, last = -1;
    clock.weights = xcalloc((size_t)load->buckets, sizeof(double), "times of weights");
    for (int i = 0; i < MOST_STEPS && fabs(period - last) > 1e-9; i++) {
        double start = clock.now;
        step(&clock, load);
        last = period;
        period = clock.now - start;
    }
    free(clock.weights);
    return period;
}

double step_compute(const StepLoad *load) {
    double once = load->head + load->tail;
    for (int b = 0; b < load->buckets; b++) {
        once += load->bucket[b].layers * (load->forward + load->backward);
    }
    return load->micro_batches * once;
}

double step_time_alone(const StepLoad *load) {
    StepLoad alone = *load;
    alone.waits = 0;
    alone.bucket = xcalloc((size_t)load->buckets, sizeof(BucketLoad), "times of buckets");
    for (int b = 0; b < load->buckets; b++) {
        alone.bucket[b] = (BucketLoad){.layers = load->bucket[b].layers,
                                       .update = load->bucket[b].update,
                                       .products = load->bucket[b].products,
                                       .reductions = load->bucket[b].reductions};
    }
    double ms = step_time(&alone);
    free(alone.bucket);
    return ms;
}

// Returns the step within a period at which the outer sync of bucket b starts. The syncs are spread
// such that traffic is even over the period.
static int sync_slot(const StepLoad *load, int b, int steps) {
    double before = 0, all = 0;
    for (int i = 0; i < load->buckets; i++) {
        all += load->bucket[i].exchange;
        if (i < b) before += load->bucket[i].exchange;
    }
    return all > 0 ? (int)(before / all * steps) : 0;
}

// Number of periods to simulate before the measurement, for slow links to reach the steady state,
// and number of periods to measure.
enum { FILLING = 8, COUNTED = 8 };
double step_time_local(const StepLoad *load, double alone, int steps, int delay) {
    assert(load && steps >= 1 && delay >= 0);
    double now = 0, link_free = 0, counted = 0;
    double *answer = xcalloc((size_t)load->buckets, sizeof(double), "times of answers");
    for (int t = 0; t < (FILLING + COUNTED) * steps; t++) {
        if (t == FILLING * steps) counted = now;
        now += alone;
        for (int b = 0; b < load->buckets; b++) {
            int due = sync_slot(load, b, steps) + delay + 1;
            if ((t - due) % steps == 0) now = fmax(now, answer[b]);
        }
        for (int b = 0; b < load->buckets; b++) {
            if (t % steps != sync_slot(load, b, steps)) continue;
            link_free = fmax(link_free, now) + load->bucket[b].exchange;
            answer[b] = link_free;
        }
    }
    free(answer);
    return (now - counted) / (COUNTED * steps);
}
