// Learning rate, measured in samples as Megatron-LM's OptimizerParamScheduler does. Pure; called by
// the training step and by tests.
#pragma once
#include "llmc/config/config.h"
LLMC_BEGIN

typedef struct Schedule {
    LrStyle style;
    double lr, min_lr, lr_init;
    double warmup_samples;  // Wn, may be fractional
    double decay_samples;   // Dn
    WsdStyle wsd_style;
    double wsd_samples;  // of LR_WSD: the last of decay_samples, over which the rate goes down
    double start_weight_decay, end_weight_decay;
    WeightDecayStyle weight_decay_style;
    double weight_decay_samples;  // over which weight decay goes from start to end
} Schedule;

// From a config that config_finish completed.
Schedule schedule_from_config(const Config *config);
// Learning rate when n samples have been consumed by successful steps. n = 0 gives lr_init: the
// first step runs with it.
double schedule_lr(const Schedule *schedule, int64_t n);
// Weight decay for the step taken after n samples.
double schedule_weight_decay(const Schedule *schedule, int64_t n);

LLMC_END
