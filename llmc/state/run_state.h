// Counters and other small state of a run that checkpoints save. Equal on all ranks. resume.c and
// guard.c fill and restore it.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

typedef struct RunState {
    int64_t iteration;
    int64_t consumed_train_samples, consumed_valid_samples;
    int64_t scheduler_samples;        // position in the learning-rate schedule
    int64_t adam_steps;               // t
    double beta1_power, beta2_power;  // beta^t as running products, restored bit-exact
    int64_t skipped_iterations, nan_iterations;
    double flops_so_far;
    int64_t spikes, spikes_seen, skipped_in_a_row;  // see guard.h and sdp4bit/step_status.h
    int64_t repairs;                                // repaired replicas (llmc/state/replicas.c)
    // --local-steps: after a resume, outer steps that began up to this iteration are not applied to
    // the master weights. Either they were all applied at the end of --train-iters, or a replica
    // group was lost (llmc/run/surviving_groups.c). 0: neither happened.
    int64_t outer_applied_at;
    // Number of samples for which the training and validation splits were built. It determines the
    // number of epochs and so the order of the samples. 0: unknown.
    int64_t train_split_samples, valid_split_samples;
    // Elastic replica groups: training samples [next, end) that are dealt to this group, the first
    // sample of the next block plus 1 (0: none), and all samples dealt to any group. left: the
    // group saved this state when it left the run in order.
    int64_t samples_next, samples_end, samples_spare, samples_dealt, left;
    double loss_mean, loss_deviation, norm_mean, norm_deviation;
} RunState;

// Returns true if the last of train_iters iterations has synchronized all outer weights.
static inline bool outer_weights_synced(const RunState *state, int64_t train_iters) {
    return state->iteration >= train_iters && state->outer_applied_at == state->iteration;
}
// Oldest iteration whose outer weights the state may contain with --local-steps H. Each bucket is
// synchronized every H steps; if a node was lost, the latest synchronization may be missing.
static inline int64_t oldest_outer_weights(const RunState *state, int64_t local_steps) {
    int64_t oldest = state->iteration - local_steps + (state->outer_applied_at < state->iteration);
    return oldest > 0 ? oldest : 0;
}

LLMC_END
