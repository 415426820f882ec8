// Presets: named sets of quantization flags. --plan compares them over a network and recommends one
// (plan_time.c).
#pragma once
#include "llmc/config/config.h"
#include "sdp4bit/layout.h"
LLMC_BEGIN

// A preset and its differences from the baseline. 0: not quantized.
typedef struct Preset {
    const char *name;    // value of PRESET= in scripts/
    double gain;         // required speedup over a preset with less effect on training
    const char *flags;   // trainer flags
    const char *reason;  // short description, e.g. "gradients in 4 bits"
    bool bf16_gradients, eden, lossless, error_feedback;
    int gradient_bits, weight_bits;  // bits of inter-node gradients and of weights
    int local_steps;
} Preset;

// Ordered by increasing effect on training.
enum { PRESETS = 9 };
extern const Preset presets[PRESETS];

// Returns the run's config with this preset's quantization flags. It needs a separate mesh, because
// local steps form replica groups (plan_time.c).
Config preset_config(const Config *run, const Preset *preset);

// Returns the mean squared error of a codec for Gaussian values, relative to their mean square.
double codec_gaussian_error(Codec codec, int group, Rounding rounding);
// Returns the RMS error of the reduced gradient, relative to the gradient, for Gaussian values that
// are independent across nodes. inside, between: true if that level of the reduction is used; the
// squared errors of both add up.
double preset_gradient_error(const GradFormat *format, bool inside, bool between);

// Chooses a preset by step time in ms (0: cannot run). Walks down the table and replaces the
// current choice by a preset that is faster by its required gain. Returns -1 if none can run.
int preset_choose(const double ms[PRESETS]);

LLMC_END
