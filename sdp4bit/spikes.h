// Outliers of the loss and of the gradient norm, inline for host and device, part of the exact
// regime. They are decided where the step status is, on the device. The host reads a step status a
// step late: a skip that it decided would stall every step, or come after the weights have changed.
// Every rank computes the same few numbers from the same gathered records, so all reach the same
// answer. Included by step_status.h.
#pragma once
#include "sdp4bit/codec.h"

enum { SPIKE_WARMUP = 32 };  // steps before anything is called a spike
enum { SPIKE_WINDOW = 64 };  // steps that the running means look back, about
enum { SPIKE_LOSS = 1, SPIKE_NORM = 2 };

// Running means of a value and of its distance from the mean.
typedef struct SpikeTrack {
    double mean, deviation;
} SpikeTrack;

// What step_status remembers from step to step, up to skipped_in_a_row, which checkpoints keep
// (guard_save). Then what it measured and found in the last step.
typedef struct SpikeState {
    SpikeTrack loss, norm;
    int64_t seen;                  // finite steps in them
    int64_t skipped_in_a_row;      // up to the last step, for whatever reason
    float loss_limit, norm_limit;  // what the last step was measured by; infinity: it was not
    int32_t found, unused;         // SPIKE_LOSS | SPIKE_NORM
} SpikeState;
static_assert(sizeof(SpikeState) == 64, "host and device hold the same");

// `factor` deviations above the mean. The deviation counts as at least 1 % of the mean, or a loss
// that hardly moves would be a trap. factor 0: no limit.
HD_FN float spike_limit(const SpikeTrack *t, int64_t seen, float factor) {
    if (!(factor > 0.0f) || seen < SPIKE_WARMUP) return f32_from_bits(0x7F800000u);
    double least = f64_mul(0.01, t->mean < 0 ? -t->mean : t->mean);
    double deviation = t->deviation > least ? t->deviation : least;
    return (float)f64_add(t->mean, f64_mul((double)factor, deviation));
}

// A value above the limit counts as the limit. One spike hardly moves the means, but a level that
// stays high becomes the new normal within tens of steps.
HD_FN void spike_follow(SpikeTrack *t, float value, float limit, int64_t seen) {
    double n = (double)(seen < SPIKE_WINDOW ? seen : (int64_t)SPIKE_WINDOW);
    double distance = f64_sub((double)(value > limit ? limit : value), t->mean);
    t->mean = f64_add(t->mean, f64_div(distance, n));
    if (seen == 1) return;  // the first value defines the mean and has no distance from it
    double size = distance < 0 ? -distance : distance;
    t->deviation = f64_add(t->deviation, f64_div(f64_sub(size, t->deviation), n));
}

// Measures a step. One that is not finite is judged elsewhere and leaves the means alone. True for
// a spike.
HD_FN bool spike_check(SpikeState *s, float loss, float norm, float loss_factor, float norm_factor,
                       bool finite) {
    s->loss_limit = spike_limit(&s->loss, s->seen, loss_factor);
    s->norm_limit = spike_limit(&s->norm, s->seen, norm_factor);
    s->found = 0;
    if (!finite) return false;
    if (loss > s->loss_limit) s->found |= SPIKE_LOSS;
    if (norm > s->norm_limit) s->found |= SPIKE_NORM;
    s->seen += 1;
    spike_follow(&s->loss, loss, s->loss_limit, s->seen);
    spike_follow(&s->norm, norm, s->norm_limit, s->seen);
    return s->found != 0;
}
