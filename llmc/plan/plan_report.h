// --plan: memory and traffic of a run, computed without a device. Called by train_gpt.c.
#pragma once
#include "sdp4bit/layout.h"
#include <stdio.h>

#include "llmc/config/config.h"
#include "llmc/ranks/mesh.h"
LLMC_BEGIN

// Prints the model and its pipeline stages; for the rank that needs the most memory its buckets,
// memory by purpose and bytes per step and level; and a summary: which GPUs have enough memory, and
// the inter-node traffic compared with the baselines and SDP4Bit. If --plan-network is set, adds
// the predicted step time of each preset. mesh: any rank's. Returns the error of gpt_plan before
// printing anything.
bool plan_report(const Config *config, const Mesh *mesh, FILE *out, Error *err);
// Prints the last part of the report, the predicted step time over --plan-network: a row for each
// preset and one for the run itself, computed for the rank that `mesh` describes. Then
// the recommended preset with its flags and reason, and the run under each sharding strategy.
void plan_time_report(const Config *config, const Mesh *mesh, FILE *out);

// --- gpus.c: GPUs of --plan-gpu ------------------------------------------------------------------

// Sustained rates: data-sheet figures times the efficiency measured on H200s (gpus.c).
typedef struct Rates {
    double matmul;           // floating-point operations per ms in GEMMs
    double memory;           // bytes per ms
    double inside, between;  // bytes per ms that a rank sends inside its node, and to other nodes
} Rates;

// Returns the rates of --plan-gpu, or of the --plan flags that override them. per_node: number of
// ranks that share a node's network.
Rates rates_of(const Config *config, int per_node);
// Returns the bytes of GPU memory available to the memory plan, excluding the CUDA context and
// libraries.
double gpu_room(PlanGpu gpu, const Config *config, const Mesh *mesh);

// --- presets.c -----------------------------------------------------------------------------------

// Presets: named sets of quantization flags. --plan compares them over a network and recommends one
// (plan_time.c).

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
