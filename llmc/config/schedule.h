// Learning rate and weight decay as functions of consumed samples, as in Megatron-LM's
// OptimizerParamScheduler. Pure functions, called by the training step.
#pragma once
#include "llmc/config/config.h"
LLMC_BEGIN

typedef struct Schedule {
    LrStyle style;
    double lr, min_lr, lr_init;
    double warmup_samples;  // Wn, may be fractional
    double decay_samples;   // Dn
    WsdStyle wsd_style;
    double wsd_samples;  // LR_WSD: length of the final decay, within decay_samples
    double start_weight_decay, end_weight_decay;
    WeightDecayStyle weight_decay_style;
    double weight_decay_samples;  // over which weight decay changes from start to end
} Schedule;

// config: completed by config_finish.
Schedule schedule_from_config(const Config *config);
// Returns the learning rate after n samples of successful steps. n = 0 gives lr_init, which the
// first step uses.
double schedule_lr(const Schedule *schedule, int64_t n);
// Returns the weight decay of the step after n samples.
double schedule_weight_decay(const Schedule *schedule, int64_t n);

LLMC_END
