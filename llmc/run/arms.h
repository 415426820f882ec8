// The table of arms: what may travel in how many bits. --plan compares them over a network
// (plan_time.c), and says which one to take.
#pragma once
#include "llmc/config/config.h"
#include "sdp4bit/plan.h"
LLMC_BEGIN

// An arm, and how its configuration differs from the baseline's. 0: not quantised.
typedef struct Arm {
    const char *name;    // as ARM= of scripts/ knows it
    const char *flags;   // what the trainer wants for it
    const char *reason;  // why one takes it: "gradients in 4 bits"
    bool bf16_gradients, eden;
    int gradient_bits, weight_bits;  // of gradients between nodes, and of weights
} Arm;

// From the least change of training to the largest.
enum { ARMS = 5 };
extern const Arm arms[ARMS];

// The same run with this arm instead of its own.
Config arm_config(const Config *run, const Arm *arm);

// Mean squared error of a codec, relative to the values' mean square, where those are Gaussian.
double codec_gaussian_error(Codec codec, int group, Rounding rounding);
// Root mean square error of the reduced gradient, relative to the gradient. Values are Gaussian,
// and nodes have them independently. inside, between: does that level run? Its errors add up.
double arm_gradient_error(const GradWire *wire, bool inside, bool between);

// The arm to take: the first one in the table's order whose step is at most ARM_NEAR times the
// shortest. ms: (count), 0 where an arm cannot run. -1 where none can.
#define ARM_NEAR 1.1
int arm_choose(const double *ms, int count);

LLMC_END
