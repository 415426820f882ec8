// A one-process simulator of everything after the ranks' local gradients: reduction, norm, step
// status, AdamW, weight differences, model weights. Written from sdp4bit/README.md and the
// primitives of codec.h, tensor by tensor and element by element, without messages, shards, chunks
// or kernels. It uses the owner of an element only where the norm's order of additions depends on
// it. The distributed program must match it bit for bit. Used by test/mpi/test_sdp4bit_mpi.c,
// test/mpi/model_gradients.c and test/unit/sdp4bit/test_simulator.c.
//
// With tensor and pipeline parallelism each data-parallel group has a simulator. The groups
// interact only in the step status: before it they exchange their ranks' records.
#pragma once
#include "llmc/base/dtype.h"
#include "sdp4bit/kernels.h"  // the types StepStatus and StepRecord
#include "sdp4bit/layout.h"
LLMC_BEGIN

typedef struct SimulatorOptions {
    const BucketLayout *layout;  // positions of tensors; nodes and ranks per node
    const LayoutTensor *tensors;
    GradFormat grad;
    WeightFormat weight;
    uint32_t seed;  // seed of the rounding bits
    float beta1, beta2, epsilon, weight_decay, clip_grad;
    bool skip_non_finite;
    float spike_factor;   // factor for the loss and the norm; spikes are reported only
    bool error_feedback;  // between nodes; needs that hop and a grouped codec there
} SimulatorOptions;

// All arrays but `records` have the shape of the arena (plan->arena_elements), with zero padding.
typedef struct Simulator {
    SimulatorOptions options;
    float *reduced;                        // mean gradient as in the ranks' shards
    float *master, *exp_avg, *exp_avg_sq;  // the union of all shards
    floatX *replica;                       // the weights, equal on every rank
    float *residual;                       // (nodes, arena_elements) error-feedback residual
    StepRecord *records;                   // (dp) this group's
    uint64_t *fault;                       // (dp) fault found by each rank
    StepStatus control;
} Simulator;

// Sets model weights to `weights` (plan->arena_elements), master weights to the same values,
// moments to 0.
void simulator_create(Simulator *sim, const SimulatorOptions *options, const floatX *weights);
void simulator_free(Simulator *sim);

// Runs only the reduction. grads[r]: local gradient of rank r, in the shape of the arena.
void simulator_reduce(Simulator *sim, float *const *grads, uint32_t step);
// ZeRO-2 reduces each micro-batch of a step: the first with simulator_reduce, micro-batch index
// `micro_batch` (from 1) with this function. Each mean over the ranks is quantized on every hop
// with its own random bits, then added to `reduced` in fp32, so the sum is rounded to fp32 after
// each micro-batch. tensors: (plan->tensors) the tensors reduced like this, NULL: all. Each rank
// adds up the gradients of the other tensors and reduces them once.
void simulator_add(Simulator *sim, float *const *grads, const bool *tensors, uint32_t step, int micro_batch);
// A whole step of a world with one data-parallel group. losses: (dp).
void simulator_step(Simulator *sim, float *const *grads, const float *losses, uint32_t step,
                    float lr_if_applied, float lr_if_skipped);

// The same step for several groups, in two parts. First each group reduces, then fills its ranks'
// records from `reduced`. losses: (dp).
void simulator_records(Simulator *sim, const float *losses);
// Inputs of the step status, the same for all groups: records of all ranks, in world order.
typedef struct SimulatedWorld {
    const StepRecord *records;  // (ranks)
    int ranks;
    int losses;  // number of records with a loss, for the mean
} SimulatedWorld;
// Second part: each group computes the step status and updates its part of the model.
void simulator_update(Simulator *sim, const SimulatedWorld *world, uint32_t step, float lr_if_applied,
                      float lr_if_skipped);

// For other simulators: applies the transform to n values with logical offset `logical`. n: whole
// groups and whole transform blocks. signs: of the rotation.
void simulator_transform(float *x, int64_t n, Transform kind, RoundingKey signs, int64_t logical);
void simulator_invert(float *x, int64_t n, Transform kind, RoundingKey signs, int64_t logical);
// Quantizes and decodes partial sums of them.
void simulator_send(float *x, int64_t n, Codec codec, int group, Rounding rounding, RoundingKey key,
                    int64_t logical);
uint64_t simulator_hash(const Simulator *sim);

LLMC_END
