// Gradients: two-level reduce-scatter of a bucket (TLq-HS, the paper's sections 3.2 and 3.3):
//   scale by 1/dp, Hadamard, quantize -> all-to-all inside the node -> sum, quantize
//   -> all-to-all between nodes -> sum, inverse Hadamard
// All presets run the same two levels with different codecs; the baselines use CODEC_FP32 or
// CODEC_BF16. Called by zero.c, grads.c and stats.c of llmc/state. Uses kernels.h and wire.h.
#pragma once
#include "llmc/base/memory_plan.h"
#include "llmc/comm.h"
#include "sdp4bit/kernels.h"
#include "sdp4bit/lanes.h"
#include "sdp4bit/wire.h"
LLMC_BEGIN

// Message buffers shared by all buckets. Each has two slots, so that one chunk is quantized while
// the previous one is sent. tlq_workspace sizes them for the largest chunk.
typedef struct TlqWorkspace {
    uint8_t *send1, *recv1;                                     // level 1: (LANE_SLOTS, D) messages
    uint8_t *send2, *recv2;                                     // level 2: (LANE_SLOTS, N) messages
    size_t send1_bytes, recv1_bytes, send2_bytes, recv2_bytes;  // size of all slots together
} TlqWorkspace;
// Computes the buffer sizes for a bucket layout and gradient format; the caller allocates.
void tlq_workspace(TlqWorkspace *workspace, const BucketLayout *layout, const GradFormat *format);
// Reserves the buffers in the memory plan, under `group`. Other ranks of the node may map send1
// (comm_share), so its size is rounded up to a multiple of `alignment` bytes.
void tlq_reserve(MemoryPlan *memory_plan, const char *group, TlqWorkspace *workspace, int64_t alignment);

typedef struct TlqStep {
    const BucketLayout *layout;
    const Mesh *mesh;
    GradFormat grad_format;
    TlqWorkspace workspace;
    const Segment *segments;  // device copy of layout->segments
    uint32_t seed, step;      // keys of the rounding bits
    int micro_batch;          // index of the bucket's reduction in this step, for the rounding bits
    bool add;                 // add the result to `own` instead of overwriting it
    bool error_feedback;      // requires a grouped codec on the hop between nodes
    Residual residual;        // with error_feedback: residual of this bucket's messages to all nodes
    WireChecks *checks;       // checksums of the messages
} TlqStep;

// Reduce-scatters chunks of bucket b, the last one first. Writes the mean over the dp ranks to this
// rank's shard, or adds it. With dp = 1 there are no chunks, and the whole bucket is processed.
// grads: (matrix_elements + tail_elements) fp32. Elements of these chunks must be complete on
// lanes->first and on lanes->last.
// own: may point into `grads`, whose other elements do not change. With dp = 1 it must point to
// `grads`, which is not quantized.
// matrix_partials (matrix_per_rank / 32), tail_partials (ceil(tail_per_rank / 32)): receive partial
// sums of the squared norm of the result. The result is complete on lanes->last.
void tlq_reduce_bucket(const TlqStep *step, int b, ChunkRange chunks, const float *grads, GradShard own,
                       float *matrix_partials, float *tail_partials, Lanes *lanes);
// All-gathers the reduced gradients of bucket b in fp32, for strategies in which every rank updates
// all weights. `grads` holds this rank's shard on entry and all shards on completion. Gathers
// between nodes first, then inside the node. buffer: (dp) messages of layout_reduced_message. The
// result is complete on lanes->last.
void tlq_gather_bucket(const TlqStep *step, int b, float *grads, uint8_t *buffer, const Lanes *lanes);
// Returns the key of the rotation's signs (TRANSFORM_ROTATION) of this reduction.
RoundingKey tlq_rotation(const TlqStep *step);
// Computes bucket b's contribution to the gradient norm: sums[0] and sums[1] are the sums of
// squares of this rank's matrix and tail shards, without elements that another rank counts.
// Destroys the partial sums. Runs on lanes->last.
void tlq_sum_squares(const TlqStep *step, int b, GradShard own, float *matrix_partials, float *tail_partials,
                     float *sums, const Lanes *lanes);

LLMC_END
