// The step status of a step, inline for host and device, part of the exact regime: what a rank
// contributes, and what all ranks decide from the gathered records, with the same bits on every
// rank. Included by kernels.h. Called by the kernels of both backends; status_first_fault by
// llmc/state/zero.c too.
#pragma once
#include "llmc/base/base.h"
#include "sdp4bit/spikes.h"
LLMC_BEGIN

// --- faults -------------------------------------------------------------------------------------

// What a rank's device has found wrong, as 64 bits; 0: nothing. It stays in device memory and
// travels with the next record, so all ranks reach one verdict, and nothing waits for the host. A
// fault ends the run: the step is skipped, and nothing is saved. The highest two bits are its
// origin, the rest its place. Where several are found, the lowest is kept: the one nearest to the
// cause.
typedef enum FaultOrigin {
    FAULT_OF_UPDATE = 1,   // adamw.h refused a master; the bucket
    FAULT_OF_MESSAGE = 2,  // a message did not arrive as it was sent (wire.h); hop, bucket, slot
    FAULT_OF_CODING = 3    // a message of lossless weights cannot be decoded; hop, bucket, slot
} FaultOrigin;
HD_FN uint64_t fault_code(FaultOrigin kind, uint64_t place) { return (uint64_t)kind << 62 | place; }
HD_FN FaultOrigin fault_origin(uint64_t fault) { return (FaultOrigin)(fault >> 62); }

// --- a step -------------------------------------------------------------------------------------

// What the judge decides once per step, kept in device memory so that nothing in a step waits for
// the host.
typedef struct StepStatus {
    double beta1_power, beta2_power;  // beta^t as running products, t = adam_steps
    int64_t adam_steps;               // successful steps, this one included when applied
    float loss;                       // mean over the ranks that have one
    float grad_norm;                  // before clipping
    float clip_coefficient;           // multiplies every gradient
    float learning_rate;
    float bias_correction1, bias_correction2;  // 1 - beta^t
    int32_t applied;                           // 0: this step is skipped on every rank
    int32_t fault_rank;                        // the rank that found `fault`
    SpikeState spikes;
    uint64_t fault;  // 0: none; else the step is skipped and the run ends
} StepStatus;
static_assert(sizeof(StepStatus) == 128, "host and device hold the same");

// What one rank contributes to the judgement; gathered from all ranks in rank order.
typedef struct StepRecord {
    double sum_squares;  // of its shard of the reduced gradient
    double loss;         // its mean loss over the step's micro-batches; 0 where it computes none
    uint64_t fault;      // the first that it has found, 0: none
} StepRecord;
static_assert(sizeof(StepRecord) == 24, "what every rank sends to every other once per step");

// What a step is judged by.
typedef struct StatusInputs {
    const StepRecord *records;  // (ranks) of the world, in its order
    int ranks;
    int losses;       // how many of them hold a loss: those of a pipeline's last stage
    float clip_grad;  // 0: no clipping
    float beta1, beta2;
    // The host knows a step's verdict one step late, so it offers both learning rates: after an
    // applied or after a skipped last step.
    float lr_if_applied, lr_if_skipped;
    bool skip_non_finite;  // a non-finite loss or norm makes applied = 0
    bool skip_spikes;      // and so does a loss or norm that spikes.h calls a spike
    float loss_spike_factor, norm_spike_factor;
} StatusInputs;

// The pieces' sums of squares added in order in double, the loss, and what was found.
HD_FN StepRecord step_record(const float *piece_sums, int pieces, float loss, uint64_t fault) {
    StepRecord record = {0.0, (double)loss, fault};
    for (int i = 0; i < pieces; i++) record.sum_squares = f64_add(record.sum_squares, (double)piece_sums[i]);
    return record;
}

// Megatron's clip coefficient: clip / (norm + 1e-6) where that is below 1, else 1; clip = 0
// switches clipping off.
HD_FN float clip_coefficient(float clip, float norm) {
    if (!(clip > 0.0f)) return 1.0f;
    float coefficient = f32_div(clip, f32_add(norm, 1e-6f));
    return coefficient < 1.0f ? coefficient : 1.0f;
}

// Keeps the fault nearest to its cause: the lowest code of the lowest rank. True when there is one.
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

// Adds the records in rank order in double. Sets norm, clip coefficient, the step status, Adam's
// counters and corrections. control: the last step's, which says whether it was applied.
HD_FN void step_status(StepStatus *control, const StatusInputs *a) {
    double squares = 0.0, loss = 0.0;
    for (int r = 0; r < a->ranks; r++) {
        squares = f64_add(squares, a->records[r].sum_squares);
        loss = f64_add(loss, a->records[r].loss);
    }
    control->learning_rate = control->applied ? a->lr_if_applied : a->lr_if_skipped;
    control->loss = (float)f64_div(loss, (double)a->losses);
    control->grad_norm = (float)f64_sqrt(squares);
    control->clip_coefficient = clip_coefficient(a->clip_grad, control->grad_norm);
    bool finite = isfinite(squares) && isfinite(loss);
    bool spike = spike_check(&control->spikes, control->loss, control->grad_norm, a->loss_spike_factor,
                             a->norm_spike_factor, finite);
    // Asked of every step: a loss that is not finite may come from a message that arrived wrong.
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
