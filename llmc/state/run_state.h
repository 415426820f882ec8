// What a run is, beside its weights and moments: counters and small state, equal on every rank. A
// checkpoint holds it; resume.c and guard.c fill it and take it back.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

typedef struct RunState {
    int64_t iteration;
    int64_t consumed_train_samples, consumed_valid_samples;
    int64_t scheduler_samples;        // what the learning rate's schedule counts
    int64_t adam_steps;               // t
    double beta1_power, beta2_power;  // running products of the betas, to the bit
    int64_t skipped_iterations, nan_iterations;
    double flops_so_far;
    int64_t spikes, spikes_seen, skipped_in_a_row;  // the anomaly guard's: sdp4bit/spikes.h
    int64_t repairs;                                // of replicas: llmc/state/replicas.h
    int64_t
        met_at;  // local steps: exchanges that began up to this iteration meet no master weights any more. It
                 // was the last of --train-iters, where all met, or a node did not come
                 // (llmc/run/surviving_groups.c). 0: there was none
    // Samples of the training and validation splits as built. How often their data are read follows
    // from them, and so does the order. 0: not known.
    int64_t train_split_samples, valid_split_samples;
    double loss_mean, loss_deviation, norm_mean, norm_deviation;
} RunState;

LLMC_END
