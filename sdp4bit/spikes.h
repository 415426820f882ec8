// Outliers of the loss and the gradient norm, inline for host and device, part of the exact regime.
// Detected on the device along with the step status: the host learns a status one step late, so its
// decision would stall every step or come after the weights have changed. All ranks compute the
// same result from the same gathered records. Included by step_status.h.
#pragma once
#include "sdp4bit/codec.h"

enum { SPIKE_WARMUP = 32 };  // steps before detection starts
enum { SPIKE_WINDOW = 64 };  // approximate window of the running means in steps
enum { SPIKE_LOSS = 1, SPIKE_NORM = 2 };

// Running means of a value and of its absolute deviation.
typedef struct SpikeTrack {
    double mean, deviation;
} SpikeTrack;

// State that step_status keeps between steps; checkpoints save the fields up to skipped_in_a_row
// (guard_save). The others describe the last step.
typedef struct SpikeState {
    SpikeTrack loss, norm;
    int64_t seen;                  // finite steps in the means
    int64_t skipped_in_a_row;      // up to the last step, for any reason
    float loss_limit, norm_limit;  // limits of the last step; infinity: none
    int32_t found, unused;         // SPIKE_LOSS | SPIKE_NORM
} SpikeState;
static_assert(sizeof(SpikeState) == 64, "host and device share the layout");

// Returns the mean plus `factor` deviations. The deviation is at least 1 % of the mean, or a nearly
// constant loss would trigger on noise. factor 0: no limit.
HD_FN float spike_limit(const SpikeTrack *t, int64_t seen, float factor) {
    if (!(factor > 0.0f) || seen < SPIKE_WARMUP) return f32_from_bits(0x7F800000u);
    double least = f64_mul(0.01, t->mean < 0 ? -t->mean : t->mean);
    double deviation = t->deviation > least ? t->deviation : least;
    return (float)f64_add(t->mean, f64_mul((double)factor, deviation));
}

// Updates the means with a value, clamped to the limit: a single spike hardly moves them, but a
// lasting higher level becomes normal within tens of steps.
HD_FN void spike_follow(SpikeTrack *t, float value, float limit, int64_t seen) {
    double n = (double)(seen < SPIKE_WINDOW ? seen : (int64_t)SPIKE_WINDOW);
    double distance = f64_sub((double)(value > limit ? limit : value), t->mean);
    t->mean = f64_add(t->mean, f64_div(distance, n));
    if (seen == 1) return;  // the first value is the mean and has no deviation
    double size = distance < 0 ? -distance : distance;
    t->deviation = f64_add(t->deviation, f64_div(f64_sub(size, t->deviation), n));
}

// Returns true if the step has a spike. A non-finite step is not a spike and does not change the
// means.
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
