// Gradients: the two-level reduce-scatter of the paper's sections 3.2 and 3.3 (TLq-HS), with every
// other preset as a choice of codecs:
//   scale 1/dp, Hadamard, quantize -> all-to-all inside the node -> sum, quantize
//   -> all-to-all between nodes -> sum, inverse Hadamard
// The baselines run the same two levels with CODEC_FP32 or CODEC_BF16. Called by zero.c, grads.c
// and stats.c of llmc/state, bucket by bucket; uses kernels.h and comm.h.
#pragma once
#include "llmc/base/memory_plan.h"
#include "llmc/comm.h"
#include "sdp4bit/kernels.h"
#include "sdp4bit/lanes.h"
#include "sdp4bit/wire.h"
LLMC_BEGIN

// Buffers shared by all buckets, with two slots each, so that one chunk is quantized while the
// previous one is sent. tlq_workspace sizes them for the largest chunk.
typedef struct TlqWorkspace {
    uint8_t *send1, *recv1;                                     // level 1: (LANE_SLOTS, D) messages
    uint8_t *send2, *recv2;                                     // level 2: (LANE_SLOTS, N) messages
    size_t send1_bytes, recv1_bytes, send2_bytes, recv2_bytes;  // sizes of all slots together
} TlqWorkspace;
// Computes the buffer sizes for a bucket layout and gradient format; the caller allocates.
void tlq_workspace(TlqWorkspace *workspace, const BucketLayout *layout, const GradFormat *format);
// Reserves the buffers in the memory plan, under `group`. The size of send1, which other ranks of
// the node may map (comm_share), is rounded up to `alignment` bytes.
void tlq_reserve(MemoryPlan *memory_plan, const char *group, TlqWorkspace *workspace, int64_t alignment);

typedef struct TlqStep {
    const BucketLayout *layout;
    const Mesh *mesh;
    GradFormat grad_format;
    TlqWorkspace workspace;
    const Segment *segments;  // device copy of layout->segments
    uint32_t seed, step;      // keys of the rounding bits
    int micro_batch;          // index of the bucket's reduction in this step, for the rounding bits
    bool add;                 // adds the result to `own` instead of overwriting it
    bool error_feedback;      // on the hop between nodes, which needs a grouped codec
    Residual residual;        // used with error_feedback: residual of this bucket's partitions for all nodes
    WireChecks *checks;       // checks of the messages
} TlqStep;

// Reduce-scatters bucket b. grads: (bucket->matrix_elements + bucket->tail_elements), fp32, device.
// Writes the mean over the dp ranks to this rank's shard `own`, or adds it; `own` may point into
// `grads`, whose other elements are unchanged. matrix_partials (matrix_per_rank / 32) and
// tail_partials (ceil(tail_per_rank / 32)) receive partial sums of the squared norm of the result.
// With dp = 1 the gradient stays exact, and `own` is `grads`. `grads` must be complete for
// lanes->first and lanes->last. The result is in the order of lanes->last.
void tlq_reduce_bucket(const TlqStep *step, int b, const float *grads, GradShard own, float *matrix_partials,
                       float *tail_partials, Lanes *lanes);
// All-gathers the reduced gradients of bucket b, for ranks that update all weights themselves:
// copies every rank's shard to its position in `grads`, which already holds this rank's. Exact, in
// fp32, between nodes first, then inside the node. buffer: (dp) messages of layout_reduced_message.
// In the order of lanes->last.
void tlq_gather_bucket(const TlqStep *step, int b, float *grads, uint8_t *buffer, const Lanes *lanes);
// Returns the key of the rotation's signs (TRANSFORM_ROTATION) of this reduction.
RoundingKey tlq_rotation(const TlqStep *step);
// Computes bucket b's contribution to the gradient norm: sums[0] and sums[1] are the sums of
// squares of this rank's matrix and tail shards, without elements that another rank counts.
// Destroys the partial sums. On lanes->last.
void tlq_sum_squares(const TlqStep *step, int b, GradShard own, float *matrix_partials, float *tail_partials,
                     float *sums, const Lanes *lanes);

LLMC_END
