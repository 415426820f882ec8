// Computes how many bytes a rank sends. Called by plan_report.c, plan_time.c and
// dev/bench/sync_only.c. Data-parallel traffic depends on the sharding strategy:
//
//   optim               gradients are reduced and weights gathered once per step
//   optim_grads         most buckets are reduced with every micro-batch (zero_reductions)
//   optim_grads_params  like optim_grads; forward and backward also gather each bucket that is not
//                       in one of the two slots. The first bucket is never sharded
//   local steps         each bucket has an outer all-reduce every H steps, which adds 1/H of its
//                       bytes to the inter-node gradients of a step
#pragma once
#include "llmc/model/gpt.h"
LLMC_BEGIN

// Number of collectives of a bucket per step.
typedef struct Trips {
    int reductions;
    int forward, backward;  // gathers during forward and backward; 0 if weights are not sharded
} Trips;

// Traffic of a step with config->micro_batches micro-batches. Keeps pointers to config and zero.
typedef struct StepTraffic {
    const Config *config;
    const Zero *zero;
    const BucketLayout *plan;
    int replica_groups;
    Trips *trips;  // (plan->buckets)
} StepTraffic;

// Returns true if unit 0 of the rank's stage is the embeddings or the LM head. LoRA freezes both.
bool traffic_has_words(const Config *config, const Mesh *mesh);
// Computes the traffic of the rank that zero and mesh belong to. Free with traffic_free.
StepTraffic traffic_make(const Config *config, const Mesh *mesh, const Zero *zero);
void traffic_free(StepTraffic *traffic);
// Returns the bytes of one gradient reduction of bucket b and of its weight gather after an update.
WireBytes traffic_of_update(const StepTraffic *traffic, int b, const GradFormat *grad,
                            const WeightFormat *weight);
// Returns the bytes of one gather of bucket b during forward or backward; 0 if there is none.
WireBytes traffic_of_gather(const StepTraffic *traffic, int b, bool backward, const WeightFormat *weight);
// Return the bytes that the rank sends in a step, for bucket b and for all buckets.
WireBytes traffic_of_bucket(const StepTraffic *traffic, int b, const GradFormat *grad,
                            const WeightFormat *weight);
WireBytes traffic_of_step(const StepTraffic *traffic, const GradFormat *grad, const WeightFormat *weight);
// Returns the bytes of a step without tails and padding, by formula (WireFormula in layout.h).
WireFormula traffic_formula(const StepTraffic *traffic, const GradFormat *grad, const WeightFormat *weight);

// --- tensor, sequence and pipeline parallelism, for the rank that `mesh` describes ---------------

// Returns the bytes sent to the next stage (forward) or to the previous one (backward) per
// micro-batch and chunk of layers.
double parts_hidden_bytes(const Config *c, const Mesh *mesh, PassDirection direction);
// Reductions and gathers of a tensor-parallel rank in a micro-batch. An all-reduce counts as one of
// each.
typedef struct TensorMessages {
    int rows;    // in bf16, or in 8 bits with --quantized-tensor-parallel
    int codes;   // gathers of FP8 codes, by layers whose recipe gathers them
    int maxima;  // gathers of the largest value, a float, for the scale of a tensor of codes
} TensorMessages;
TensorMessages parts_tensor_messages(const Config *c, const Mesh *mesh);
// Returns the bytes sent to the tensor-parallel group per micro-batch.
double parts_tensor_bytes(const Config *c, const Mesh *mesh);
// Returns the bytes of norm gradients sent to the tensor-parallel group per step, including the
// bias gradients of FP8 layers that gather codes.
double parts_norms_bytes(const Config *c, const Mesh *mesh);
// Returns the bytes of momentum sent to the tensor-parallel group per step with --muon-tp-mode
// duplicated, by the data-parallel rank that owns most matrices.
double parts_momentum_bytes(const Mesh *mesh, const Zero *zero);
// Returns the bytes of tied word embedding gradients sent between the first and the last stage per
// step, in each direction.
double parts_words_bytes(const Config *c, const Mesh *mesh);

LLMC_END
