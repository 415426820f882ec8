// The table of presets: what may travel in how many bits. --plan compares them over a network
// (plan_time.c), and says which one to take.
#pragma once
#include "llmc/config/config.h"
#include "sdp4bit/layout.h"
LLMC_BEGIN

// A preset, and how its configuration differs from the baseline's. 0: not quantized.
typedef struct Preset {
    const char *name;    // as PRESET= of scripts/ knows it
    const char *flags;   // what the trainer wants for it
    const char *reason;  // why one takes it: "gradients in 4 bits"
    bool bf16_gradients, eden, lossless, error_feedback;
    int gradient_bits, weight_bits;  // of gradients between nodes, and of weights
    int local_steps;
    double gain;  // it must be so many times as fast as what changes training less
} Preset;

// From the least change of training to the largest.
enum { PRESETS = 9 };
extern const Preset presets[PRESETS];

// The same run with this preset instead of its own. It wants a mesh of its own: see plan_time.c.
Config preset_config(const Config *run, const Preset *preset);

// Mean squared error of a codec, relative to the values' mean square, where those are Gaussian.
double codec_gaussian_error(Codec codec, int group, Rounding rounding);
// Root mean square error of the reduced gradient, relative to the gradient. Values are Gaussian,
// and nodes have them independently. inside, between: does that level run? Its errors add up.
double preset_gradient_error(const GradFormat *format, bool inside, bool between);

// The preset to take, for steps of so many ms; 0 where a preset cannot run. Down the table, a
// preset takes the place of the last choice if it is faster by what it has to gain. -1 where none
// can run.
int preset_choose(const double ms[PRESETS]);

LLMC_END
