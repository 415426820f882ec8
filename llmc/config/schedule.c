// Learning rate and weight decay over the run: see config.h. Reimplements Megatron-LM's
// OptimizerParamScheduler in double precision.
#include "llmc/config/config.h"

#include <assert.h>
#include <math.h>

static const double PI = 3.14159265358979323846;

Schedule schedule_from_config(const Config *config) {
    Schedule schedule = {
        .style = config->lr_decay_style,
        .lr = config->lr,
        .min_lr = config->min_lr,
        .lr_init = config->lr_warmup_init,
        .warmup_samples = config->warmup_samples_wn,
        .decay_samples = (double)config->decay_samples_dn,
        .wsd_style = config->lr_wsd_decay_style,
        .wsd_samples = (double)config->wsd_samples,
        .start_weight_decay = config->start_weight_decay,
        .end_weight_decay = config->end_weight_decay,
        .weight_decay_style = config->weight_decay_incr_style,
        .weight_decay_samples = (double)config->weight_decay_samples,
    };
    return schedule;
}

// Returns the fraction of lr - min_lr that is left in the final decay of a WSD schedule. ratio:
// position in that decay, from 0 to 1.
static double wsd_weight(WsdStyle style, double ratio) {
    switch (style) {
        case WSD_LINEAR: return 1 - ratio;
        case WSD_COSINE: return 0.5 * (cos(PI * ratio) + 1);
        case WSD_MINUS_SQRT: return 1 - sqrt(ratio);
        case WSD_EXPONENTIAL: break;
    }
    return 2 * pow(0.5, ratio) - 1;
}

// Returns the fraction of lr - min_lr that is left between the warm-up and the end of the decay.
static double decay_weight(const Schedule *s, double samples) {
    if (s->style == LR_WSD) {
        double into = samples - (s->decay_samples - s->wsd_samples);  // as in Megatron, unaffected by warm-up
        return into <= 0 ? 1 : wsd_weight(s->wsd_style, into / s->wsd_samples);
    }
    double progress = (samples - s->warmup_samples) / (s->decay_samples - s->warmup_samples);
    return s->style == LR_LINEAR ? 1 - progress : 0.5 * (cos(PI * progress) + 1);
}

double schedule_lr(const Schedule *s, int64_t n) {
    assert(s && n >= 0);
    double samples = (double)n;
    // In Megatron's order: warm-up comes first, even for a constant rate.
    if (s->warmup_samples > 0 && samples <= s->warmup_samples) {
        return s->lr_init + (s->lr - s->lr_init) * samples / s->warmup_samples;
    }
    if (s->style == LR_CONSTANT) return s->lr;
    if (samples > s->decay_samples) return s->min_lr;
    if (s->style == LR_INVERSE_SQUARE_ROOT) {
        return fmax(s->min_lr, s->lr * sqrt(fmax(s->warmup_samples, 1)) / sqrt(fmax(samples, 1)));
    }
    return s->min_lr + decay_weight(s, samples) * (s->lr - s->min_lr);
}

double schedule_weight_decay(const Schedule *s, int64_t n) {
    assert(s && n >= 0);
    double samples = (double)n;
    if (s->weight_decay_style == WEIGHT_DECAY_CONSTANT || samples > s->weight_decay_samples) {
        return s->end_weight_decay;
    }
    double progress = samples / s->weight_decay_samples;
    double weight = s->weight_decay_style == WEIGHT_DECAY_LINEAR ? progress
                                                                 : 0.5 * (cos(PI * (1 - progress)) + 1);
    return s->start_weight_decay + weight * (s->end_weight_decay - s->start_weight_decay);
}
