// A single-process simulator of a training step after the ranks' local gradients: reduction, norm,
// step status, AdamW, weight differences, model weights. Follows sdp4bit/README.md with the
// primitives of codec.h, tensor by tensor and element by element, without messages, shards, chunks
// or kernels. Element owners matter only for the norm's order of additions. The distributed program
// must match it bit for bit. Used by test/mpi/test_sdp4bit_mpi.c, test/mpi/model_gradients.c and
// test/unit/sdp4bit/test_simulator.c.
//
// With tensor and pipeline parallelism each data-parallel group has a simulator. The groups
// exchange only their ranks' records, before the step status is computed.
#pragma once
#include "llmc/base/dtype.h"
#include "llmc/state/tensor.h"
#include "sdp4bit/kernels.h"  // the types StepStatus and StepRecord
#include "sdp4bit/layout.h"
LLMC_BEGIN

// Muon, as in sdp4bit/README.md section 7. Newton-Schulz is not part of the exact regime, so the
// caller computes it with the op of the tested backend.
typedef struct SimulatedMuon {
    const MuonShape *shape;  // (layout->tensors)
    float momentum, extra_scale;
    bool nesterov;  // the scale mode is spectral
    void (*orthogonalize)(void *context, floatX *x, int64_t rows, int64_t columns);  // in place
    void *context;
} SimulatedMuon;

typedef struct SimulatorOptions {
    const BucketLayout *layout;  // positions of tensors; nodes and ranks per node
    const LayoutTensor *tensors;
    GradFormat grad;
    WeightFormat weight;
    uint32_t seed;  // seed of the rounding bits
    float beta1, beta2, epsilon, weight_decay, clip_grad;
    bool skip_non_finite;
    float spike_factor;   // factor for loss and norm; spikes are only reported
    bool error_feedback;  // between nodes; requires several nodes and a grouped codec between them
} SimulatorOptions;

// Arrays without a shape have layout->arena_elements elements, with zero padding.
typedef struct Simulator {
    SimulatorOptions options;
    float *reduced;                        // reduced mean gradient
    float *master, *exp_avg, *exp_avg_sq;  // the union of all shards
    floatX *replica;                       // model weights, equal on every rank
    float *residual;                       // (nodes, arena_elements) error-feedback residual
    StepRecord *records;                   // (dp) records of the group's ranks
    uint64_t *fault;                       // (dp) fault found by each rank
    StepStatus control;
    const SimulatedMuon *muon;  // set after simulator_create; NULL: AdamW for all tensors
} Simulator;

// Sets model weights and master weights to `weights` (layout->arena_elements), moments to 0.
void simulator_create(Simulator *sim, const SimulatorOptions *options, const floatX *weights);
void simulator_free(Simulator *sim);

// Runs only the reduction. grads[r]: local gradient of rank r (layout->arena_elements).
void simulator_reduce(Simulator *sim, float *const *grads, uint32_t step);
// ZeRO-2 reduces each micro-batch of a step: micro-batch 0 with simulator_reduce, later ones with
// this function. The mean over the ranks is quantized on every hop with the micro-batch's random
// bits, then added to `reduced` in fp32. tensors: (layout->tensors) tensors that are reduced like
// this, NULL: all. The other tensors' local gradients are summed over micro-batches and reduced
// once.
void simulator_add(Simulator *sim, float *const *grads, const bool *tensors, uint32_t step, int micro_batch);
// Simulates a step of a world with one data-parallel group. losses: (dp).
void simulator_step(Simulator *sim, float *const *grads, const float *losses, uint32_t step,
                    float lr_if_applied, float lr_if_skipped);

// First part of a step with several groups, after simulator_reduce: fills the records of the
// group's ranks from `reduced`. losses: (dp).
void simulator_records(Simulator *sim, const float *losses);
// Inputs of the step status, which are the same for all groups.
typedef struct SimulatedWorld {
    const StepRecord *records;  // (ranks) in world order
    int ranks;
    int losses;  // number of records with a loss
} SimulatedWorld;
// Second part of a step: computes the step status and updates the group's part of the model.
void simulator_update(Simulator *sim, const SimulatedWorld *world, uint32_t step, float lr_if_applied,
                      float lr_if_skipped);

// For other simulators: applies the transform to n values with logical offset `logical`. n is a
// multiple of the group size and of the transform's block size. signs: key of the rotation's signs.
void simulator_transform(float *x, int64_t n, Transform kind, RoundingKey signs, int64_t logical);
void simulator_invert(float *x, int64_t n, Transform kind, RoundingKey signs, int64_t logical);
// For other simulators: quantizes and decodes n values.
void simulator_send(float *x, int64_t n, Codec codec, int group, Rounding rounding, RoundingKey key,
                    int64_t logical);
uint64_t simulator_hash(const Simulator *sim);

LLMC_END
