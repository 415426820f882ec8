// The report of --plan: memory and traffic of a run, computed without a device. Called by
// train_gpt.c.
#pragma once
#include "sdp4bit/layout.h"
#include <stdio.h>

#include "llmc/config/config.h"
#include "llmc/ranks/mesh.h"
#include "llmc/state/chunks.h"
#include "llmc/state/zero.h"
LLMC_BEGIN

// Prints
//   - the model and its pipeline stages,
//   - buckets, memory by purpose and bytes sent per step of the rank that needs the most memory,
//   - a summary: which GPUs have enough memory, and inter-node traffic compared with the baselines
//     and SDP4Bit,
//   - plan_time_report, if --plan-network is given.
// mesh: of any rank. If gpt_plan or gpu_check_fp8 fails, returns its error without printing
// anything.
bool plan_report(const Config *config, const Mesh *mesh, FILE *out, Error *err);
// Returns the floating-point operations of Muon's Newton-Schulz iterations per step on the busiest
// rank. *all: of all ranks together.
double plan_newton_schulz(const Config *config, const Zero *zero, double *all);
// With --optimizer muon, prints how the work is divided over the ranks, and the memory of the rank
// that `mesh`, `zero` and `memory_plan` describe, compared with AdamW.
void plan_muon_report(const Config *config, const Mesh *mesh, const Zero *zero, const MemoryPlan *memory_plan,
                      FILE *out);
// Prints the time that the optimizer state on disk takes (--optimizer-disk-offload).
void plan_disk_report(const Config *config, const Mesh *mesh, const Zero *zero, FILE *out);
// --replica-group: lists the chunks of a rank, with their memory (chunks.h), and prints the bytes
// that a replica group exchanges with others.
Chunks *plan_chunks(const Config *config, const Mesh *mesh, Zero *zero, MemoryPlan *memory_plan, Error *err);
void plan_groups_report(const Config *config, const Chunks *chunks, FILE *out);
// Prints predicted step times over --plan-network, computed for the rank that `mesh` describes: a
// row for each preset and for the run itself, the recommended preset with its flags and reason, and
// the run with each sharding strategy.
void plan_time_report(const Config *config, const Mesh *mesh, FILE *out);

// --- gpus.c: GPUs of --plan-gpu ------------------------------------------------------------------

// Sustained rates: data-sheet figures times the efficiency that was measured on H200s (gpus.c).
typedef struct Rates {
    double matmul;           // floating-point operations per ms in bf16 GEMMs
    double fp8;              // in FP8 GEMMs; 0: no FP8 tensor cores
    double memory;           // memory bandwidth in bytes per ms
    double inside, between;  // bytes per ms that a rank sends inside its node and to other nodes
} Rates;

// Returns the rates of --plan-gpu; other --plan flags override some of them. per_node: number of
// ranks that share a node's network.
Rates rates_of(const Config *config, int per_node);
// Checks that --plan-gpu can run --fp8-format and --fp8-recipe. Error: EXIT_USAGE.
bool gpu_check_fp8(const Config *config, Error *err);
// Returns the GPU memory in bytes that the CUDA context and libraries leave for the memory plan.
double gpu_room(PlanGpu gpu, const Config *config, const Mesh *mesh);

// --- presets.c -----------------------------------------------------------------------------------

// A named set of quantization flags, with its differences from the baseline. --plan compares the
// presets over a network and recommends one (plan_time.c).
typedef struct Preset {
    const char *name;    // value of PRESET= in scripts/
    double gain;         // required speedup over presets that affect training less
    const char *flags;   // trainer flags
    const char *reason;  // short description, such as "gradients in 4 bits"
    bool bf16_gradients, eden, lossless, error_feedback;
    int gradient_bits, weight_bits;  // bits of inter-node gradients and weights; 0: not quantized
    int local_steps;
} Preset;

// Ordered by increasing effect on training.
enum { PRESETS = 9 };
extern const Preset presets[PRESETS];

// Returns the run's config with this preset's quantization flags. Build a new mesh for it, because
// presets with local steps form replica groups.
Config preset_config(const Config *run, const Preset *preset);

// Returns the mean squared error of a codec for Gaussian values, relative to their mean square.
double codec_gaussian_error(Codec codec, int group, Rounding rounding);
// Returns the RMS error of the reduced gradient, relative to the gradient, for Gaussian values that
// are independent across nodes. inside, between: the reduction has a hop inside the node, and one
// between nodes. The squared errors of both hops add up.
double preset_gradient_error(const GradFormat *format, bool inside, bool between);

// Returns the index of the best preset, or -1 if none can run. ms: step times; 0: cannot run. Goes
// through the table in order and replaces the choice by each preset that is faster by its required
// gain.
int preset_choose(const double ms[PRESETS]);

LLMC_END
