// A one-process simulator of everything after the ranks' local gradients: reduction, norm, verdict,
// AdamW, weight differences, replicas. Written from sdp4bit/README.md and the primitives of
// codec.h, tensor by tensor and element by element, without messages, shards, chunks or kernels: it
// knows which rank owns an element only where the norm's order of additions needs it. The
// distributed program must equal it to the bit. Used by test/mpi/test_sdp4bit_mpi.c,
// test/mpi/model_gradients.c and test/unit/sdp4bit/test_simulator.c.
//
// With tensor and pipeline parallelism the ranks divide into data-parallel groups. A simulator is
// one group. The groups meet in the step status alone: they exchange their ranks' records before
// it.
#pragma once
#include "llmc/base/dtype.h"
#include "sdp4bit/kernels.h"  // the types StepStatus and StepRecord
#include "sdp4bit/layout.h"
LLMC_BEGIN

typedef struct SimulatorOptions {
    const BucketLayout *layout;  // where tensors lie; nodes and ranks per node
    const LayoutTensor *tensors;
    GradFormat grad;
    WeightFormat weight;
    uint32_t seed;  // of the rounding bits
    float beta1, beta2, epsilon, weight_decay, clip_grad;
    bool skip_non_finite;
    float spike_factor;   // of the loss and of the norm; spikes are reported only
    bool error_feedback;  // of the hop between nodes, which is there and has a grouped codec
} SimulatorOptions;

// All arrays but records have the arena's shape (plan->arena_elements), pads 0.
typedef struct Simulator {
    SimulatorOptions options;
    float *reduced;                        // mean gradient as the ranks' shards hold it
    float *master, *exp_avg, *exp_avg_sq;  // the union of all shards
    floatX *replica;                       // the weights, equal on every rank
    float *residual;                       // (nodes, arena_elements) of error feedback
    StepRecord *records;                   // (dp) this group's
    uint64_t *fault;                       // (dp) what each rank has found
    StepStatus control;
} Simulator;

// Replicas = weights (plan->arena_elements), master weights = the same widened, moments 0.
void simulator_create(Simulator *sim, const SimulatorOptions *options, const floatX *weights);
void simulator_free(Simulator *sim);

// Only the reduction: grads[r] is rank r's local gradient in the arena's shape.
void simulator_reduce(Simulator *sim, float *const *grads, uint32_t step);
// ZeRO-2 reduces each micro-batch of a step. simulator_reduce takes the first one, this takes
// number `micro_batch`, from 1 on. The mean over the ranks is rounded by itself, as the first one's
// was: quantized on every hop, with random bits of its own. Then it is added to `reduced` in fp32,
// so the sum over micro-batches is rounded to fp32 after each. tensors: (plan->tensors) those that
// are reduced so, NULL: all. The others' gradients are added up by each rank before it reduces them
// once.
void simulator_add(Simulator *sim, float *const *grads, const bool *tensors, uint32_t step, int micro_batch);
// A whole step of a world that is one data-parallel group. losses: (dp).
void simulator_step(Simulator *sim, float *const *grads, const float *losses, uint32_t step,
                    float lr_if_applied, float lr_if_skipped);

// The same step in a world of several groups, in two halves. First each group reduces, and makes
// its ranks' records of what is in `reduced`. losses: (dp).
void simulator_records(Simulator *sim, const float *losses);
// What all groups judge by: the records of all ranks, in the world's order.
typedef struct SimulatedWorld {
    const StepRecord *records;  // (ranks)
    int ranks;
    int losses;  // how many records hold a loss, which the mean divides by
} SimulatedWorld;
// Then each group judges, and updates its own parts of the model.
void simulator_update(Simulator *sim, const SimulatedWorld *world, uint32_t step, float lr_if_applied,
                      float lr_if_skipped);

// Parts of it, for who simulates more: what is done to n values, whose first has that logical
// offset. n: whole groups, and whole blocks of the transform. signs: of the rotation.
void simulator_transform(float *x, int64_t n, Transform kind, RoundingKey signs, int64_t logical);
void simulator_invert(float *x, int64_t n, Transform kind, RoundingKey signs, int64_t logical);
// What traveling partial sums of them.
void simulator_send(float *x, int64_t n, Codec codec, int group, Rounding rounding, RoundingKey key,
                    int64_t logical);
uint64_t simulator_hash(const Simulator *sim);

LLMC_END
