// The step status, inline for host and device, part of the exact regime: each rank contributes a
// record, and all ranks compute the same status from the gathered records. Included by kernels.h.
#pragma once
#include "llmc/base/base.h"
#include "sdp4bit/codec.h"
LLMC_BEGIN

// --- faults -------------------------------------------------------------------------------------

// An error found by a rank's device, as 64 bits; 0: none. It stays in device memory and is sent
// with the next record, so all ranks agree without waiting for the host. A fault ends the run: the
// step is skipped and nothing is saved. The top two bits are its origin, the rest its place. Of
// several faults the lowest is kept, which is closest to the cause.
typedef enum FaultOrigin {
    FAULT_OF_UPDATE = 1,   // adamw.h refused a master weight; place: bucket
    FAULT_OF_MESSAGE = 2,  // a message was corrupted in transit (wire.h); place: hop, bucket, slot
    FAULT_OF_CODING = 3    // a lossless message cannot be decoded; place: hop, bucket, slot
} FaultOrigin;
HD_FN uint64_t fault_code(FaultOrigin kind, uint64_t place) { return (uint64_t)kind << 62 | place; }
HD_FN FaultOrigin fault_origin(uint64_t fault) { return (FaultOrigin)(fault >> 62); }

// --- spikes -------------------------------------------------------------------------------------

// Outliers of the loss and the gradient norm. Detected on the device along with the step status:
// the host learns a status one step late, so its decision would stall every step or come after the
// weights have changed. All ranks compute the same result from the same gathered records.
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

// --- a step -------------------------------------------------------------------------------------

// Decided once per step and kept in device memory, so that no step waits for the host.
typedef struct StepStatus {
    double beta1_power, beta2_power;  // beta^t as running products, t = adam_steps
    int64_t adam_steps;               // applied steps, this one included if applied
    float loss;                       // mean over the ranks that compute one
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

// One rank's contribution, gathered from all ranks in rank order.
typedef struct StepRecord {
    double sum_squares;  // sum over its shard of the reduced gradient
    double loss;         // mean loss of the step's micro-batches; 0 if this rank computes none
    uint64_t fault;      // first fault found, 0: none
} StepRecord;
static_assert(sizeof(StepRecord) == 24, "one record per rank and step");

typedef struct StatusInputs {
    const StepRecord *records;  // (ranks) in world order
    int ranks;
    int losses;       // ranks that compute a loss: the last pipeline stage
    float clip_grad;  // 0: no clipping
    float beta1, beta2;
    // For both outcomes of the previous step, because the host learns the status one step late.
    float lr_if_applied, lr_if_skipped;
    bool skip_non_finite;  // a non-finite loss or norm makes applied = 0
    bool skip_spikes;      // a spike of the loss or norm (spike_check) makes applied = 0
    float loss_spike_factor, norm_spike_factor;
    double loss_factor, gradient_factor;  // multiply the mean loss and the gradients; 1: unchanged
} StatusInputs;

// Sums the parts' squares in order in double.
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

// Keeps the lowest fault code, of the lowest rank if several have it. Returns true if there is one.
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

// Sums the records in rank order in double. Sets norm, clip coefficient, applied, and Adam's
// counters and bias corrections. control: in: the status of the previous step.
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
