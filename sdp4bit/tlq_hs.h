// Gradients: the two-level reduce-scatter of the paper's sections 3.2 and 3.3 (TLq-HS), with every
// other preset as a choice of codecs:
//   scale 1/dp, Hadamard, quantize -> all-to-all inside the node -> sum, quantize
//   -> all-to-all between nodes -> sum, inverse Hadamard
// The baselines run the same two levels with CODEC_FP32 or CODEC_BF16. Called by zero_grads.c and
// probe.c of llmc/state, bucket by bucket; uses kernels.h and comm.h.
#pragma once
#include "llmc/base/memory_plan.h"
#include "llmc/comm.h"
#include "sdp4bit/kernels.h"
#include "sdp4bit/lanes.h"
#include "sdp4bit/wire.h"
LLMC_BEGIN

// Buffers shared by all buckets, of two slots each, so that a chunk is quantized while the one
// before travels. tlq_workspace sizes them for the largest chunk.
typedef struct TlqWorkspace {
    uint8_t *send1, *recv1;                                     // level 1: (LANE_SLOTS, D) messages
    uint8_t *send2, *recv2;                                     // level 2: (LANE_SLOTS, N) messages
    size_t send1_bytes, recv1_bytes, send2_bytes, recv2_bytes;  // of all slots
} TlqWorkspace;
// Fills the sizes for this plan and wire; the caller allocates.
void tlq_workspace(TlqWorkspace *workspace, const BucketLayout *layout, const GradFormat *format);
// Reserves buffers of these sizes in the memory plan, under `group`. send1, which the node's ranks
// may reach into (comm_share), takes a multiple of `grain` bytes.
void tlq_reserve(MemoryPlan *memory_plan, const char *group, TlqWorkspace *workspace, int64_t grain);

typedef struct TlqStep {
    const BucketLayout *layout;
    const Mesh *mesh;
    GradFormat grad_format;
    TlqWorkspace workspace;
    const Segment *segments;  // device copy of plan->segments
    uint32_t seed, step;      // of the rounding bits
    int micro_batch;          // of this step's reductions of a bucket: which one, for the rounding bits
    bool add;                 // the result to what the own windows hold
    bool error_feedback;      // of the hop between nodes, which then has a grouped codec
    Residual residual;        // with it: of this bucket's pieces that go to the other nodes, and the own
    WireChecks *checks;       // of the messages: whether they carry a checksum
} TlqStep;

// Reduces bucket b. grads: (bucket->matrix_elements + bucket->tail_elements), fp32, device. Their
// mean over the dp ranks goes to `own`, or is added to it: this rank's windows, in `grads` itself
// or elsewhere. All else is left as it was. Partial sums of the norm of what then stands in `own` go to
// matrix_partials (matrix_per_rank / 32) and tail_partials (ceil(tail_per_rank / 32)). With dp = 1 the
// gradient stays exact, and `own` is `grads`. `grads` must be complete for lanes->first and
// lanes->last. The result is in the order of lanes->last.
void tlq_reduce_bucket(const TlqStep *step, int b, const float *grads, GradShard own, float *matrix_partials,
                       float *tail_partials, Lanes *lanes);
// The signs of this reduction's rotation (TRANSFORM_ROTATION).
RoundingKey tlq_rotation(const TlqStep *step);
// What the norm takes from bucket b after that: sums[0] of the squares of this rank's matrix piece,
// and sums[1] of its tail piece, without what another rank counts. Destroys the partial sums. On
// lanes->last.
void tlq_sum_squares(const TlqStep *step, int b, GradShard own, float *matrix_partials, float *tail_partials,
                     float *sums, const Lanes *lanes);

LLMC_END
