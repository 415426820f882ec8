// The step status: each rank contributes a record, and all ranks compute the same status from the
// gathered records. Inline for host and device, part of the exact regime. Included by kernels.h.
#pragma once
#include "llmc/base/base.h"
#include "sdp4bit/codec.h"
LLMC_BEGIN

// --- faults -------------------------------------------------------------------------------------

// A fault is an error found by a rank's device, coded in 64 bits; 0: none. It stays in device
// memory and is sent with the next record, so all ranks learn of it without waiting for the host. A
// fault ends the run: the step is skipped and nothing is saved. The top two bits of the code are
// the origin, the other bits the place. The lowest of several faults is kept: it is closest to the
// cause.
typedef enum FaultOrigin {
    FAULT_OF_UPDATE = 1,   // adamw.h refused a master weight; place: bucket
    FAULT_OF_MESSAGE = 2,  // a message was corrupted in transit (wire.h); place: hop, bucket, slot
    FAULT_OF_CODING = 3    // a lossless message cannot be decoded; place: hop, bucket, slot
} FaultOrigin;
HD_FN uint64_t fault_code(FaultOrigin kind, uint64_t place) { return (uint64_t)kind << 62 | place; }
HD_FN FaultOrigin fault_origin(uint64_t fault) { return (FaultOrigin)(fault >> 62); }

// --- spikes -------------------------------------------------------------------------------------

// Spikes are outliers of the loss or the gradient norm. They are detected on the device as part of
// the step status, because the host reads a status one step late, after the weights have changed.
// All ranks compute the same result from the same gathered records.
enum { SPIKE_WARMUP = 32 };  // steps before detection starts
enum { SPIKE_WINDOW = 64 };  // approximate window of the running means in steps
enum { SPIKE_LOSS = 1, SPIKE_NORM = 2 };

// Running means of a value and of its absolute deviation.
typedef struct SpikeTrack {
    double mean, deviation;
} SpikeTrack;

// State that step_status keeps between steps. Checkpoints save the fields up to skipped_in_a_row
// (guard_save); the others describe the last step.
typedef struct SpikeState {
    SpikeTrack loss, norm;
    int64_t seen;                  // number of finite steps so far
    int64_t skipped_in_a_row;      // consecutive skipped steps up to the last one, for any reason
    float loss_limit, norm_limit;  // limits of the last step; infinity: none
    int32_t found, unused;         // SPIKE_LOSS | SPIKE_NORM
} SpikeState;
static_assert(sizeof(SpikeState) == 64, "host and device share the layout");

// Returns the mean plus `factor` deviations. A deviation below 1 % of the mean counts as 1 %, so
// that noise in a nearly constant loss is not a spike. factor 0: no limit.
HD_FN float spike_limit(const SpikeTrack *t, int64_t seen, float factor) {
    if (!(factor > 0.0f) || seen < SPIKE_WARMUP) return f32_from_bits(0x7F800000u);
    double least = f64_mul(0.01, t->mean < 0 ? -t->mean : t->mean);
    double deviation = t->deviation > least ? t->deviation : least;
    return (float)f64_add(t->mean, f64_mul((double)factor, deviation));
}

// Updates the means with a value, clamped to the limit. So a single spike hardly moves them, but a
// level that stays higher becomes normal within tens of steps.
HD_FN void spike_follow(SpikeTrack *t, float value, float limit, int64_t seen) {
    double n = (double)(seen < SPIKE_WINDOW ? seen : (int64_t)SPIKE_WINDOW);
    double distance = f64_sub((double)(value > limit ? limit : value), t->mean);
    t->mean = f64_add(t->mean, f64_div(distance, n));
    if (seen == 1) return;  // the first value is the mean and has no deviation
    double size = distance < 0 ? -distance : distance;
    t->deviation = f64_add(t->deviation, f64_div(f64_sub(size, t->deviation), n));
}

// Returns true if the step has a spike. Non-finite steps are no spikes and do not change the means.
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

// --- a step -------------------------------------------------------------------------------------

// Computed once per step and kept in device memory, so that no step waits for the host.
typedef struct StepStatus {
    double beta1_power, beta2_power;  // beta^t as running products, t = adam_steps
    int64_t adam_steps;               // applied steps, this one included if applied
    float loss;                       // mean over the ranks that compute a loss
    float grad_norm;                  // before clipping
    float clip_coefficient;           // multiplies every gradient
    float learning_rate;
    float bias_correction1, bias_correction2;  // 1 - beta^t
    int32_t applied;                           // 0: this step is skipped on every rank
    int32_t fault_rank;                        // rank that found `fault`
    SpikeState spikes;
    uint64_t fault;  // 0: none; else the step is skipped and the run ends
} StepStatus;
static_assert(sizeof(StepStatus) == 128, "host and device share the layout");

// Contribution of one rank. All ranks gather the records of all ranks.
typedef struct StepRecord {
    double sum_squares;  // sum of squares of its shard of the reduced gradient
    double loss;         // mean loss of the step's micro-batches; 0 if this rank computes no loss
    uint64_t fault;      // first fault found, 0: none
} StepRecord;
static_assert(sizeof(StepRecord) == 24, "one record per rank and step");

typedef struct StatusInputs {
    const StepRecord *records;  // (ranks) in world order
    int ranks;
    int losses;       // number of ranks that compute a loss (the last pipeline stage)
    float clip_grad;  // 0: no clipping
    float beta1, beta2;
    // Learning rates for both outcomes of the previous step; the host does not know its status yet.
    float lr_if_applied, lr_if_skipped;
    bool skip_non_finite;  // a non-finite loss or norm makes applied = 0
    bool skip_spikes;      // a spike of the loss or norm (spike_check) makes applied = 0
    float loss_spike_factor, norm_spike_factor;
    double loss_factor, gradient_factor;  // multiply the mean loss and the gradients; 1: unchanged
} StatusInputs;

// Returns a rank's record. Adds the sums of squares in order, in double.
HD_FN StepRecord step_record(const float *piece_sums, int pieces, float loss, uint64_t fault) {
    StepRecord record = {0.0, (double)loss, fault};
    for (int i = 0; i < pieces; i++) record.sum_squares = f64_add(record.sum_squares, (double)piece_sums[i]);
    return record;
}

// Megatron-LM's clip coefficient: min(1, clip / (norm + 1e-6)); clip = 0 disables clipping.
HD_FN float clip_coefficient(float clip, float norm) {
    if (!(clip > 0.0f)) return 1.0f;
    float coefficient = f32_div(clip, f32_add(norm, 1e-6f));
    return coefficient < 1.0f ? coefficient : 1.0f;
}

// Stores the lowest fault code and its lowest rank. Returns true if there is a fault.
HD_FN bool status_first_fault(StepStatus *control, const StepRecord *records, int ranks) {
    control->fault = 0;
    control->fault_rank = 0;
    for (int r = 0; r < ranks; r++) {
        uint64_t fault = records[r].fault;
        if (!fault || (control->fault && control->fault <= fault)) continue;
        control->fault = fault;
        control->fault_rank = r;
    }
    return control->fault != 0;
}

// Computes the status of a step from the records, which it sums in rank order in double. control:
// holds the status of the previous step on entry.
HD_FN void step_status(StepStatus *control, const StatusInputs *a) {
    double squares = 0.0, loss = 0.0;
    for (int r = 0; r < a->ranks; r++) {
        squares = f64_add(squares, a->records[r].sum_squares);
        loss = f64_add(loss, a->records[r].loss);
    }
    control->learning_rate = control->applied ? a->lr_if_applied : a->lr_if_skipped;
    control->loss = (float)f64_mul(f64_div(loss, (double)a->losses), a->loss_factor);
    control->grad_norm = (float)f64_mul(f64_sqrt(squares), a->gradient_factor);
    control->clip_coefficient = f32_mul(clip_coefficient(a->clip_grad, control->grad_norm),
                                        (float)a->gradient_factor);
    bool finite = isfinite(squares) && isfinite(loss);
    bool spike = spike_check(&control->spikes, control->loss, control->grad_norm, a->loss_spike_factor,
                             a->norm_spike_factor, finite);
    // Evaluated on every step: a non-finite loss may come from a corrupted message.
    bool fault = status_first_fault(control, a->records, a->ranks);
    control->applied = (finite || !a->skip_non_finite) && !(spike && a->skip_spikes) && !fault;
    control->spikes.skipped_in_a_row = control->applied ? 0 : control->spikes.skipped_in_a_row + 1;
    if (!control->applied) return;
    control->adam_steps += 1;
    control->beta1_power = f64_mul(control->beta1_power, (double)a->beta1);
    control->beta2_power = f64_mul(control->beta2_power, (double)a->beta2);
    control->bias_correction1 = (float)f64_sub(1.0, control->beta1_power);
    control->bias_correction2 = (float)f64_sub(1.0, control->beta2_power);
}

LLMC_END
