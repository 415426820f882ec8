// Context shared by all parts of the training state: configuration, ranks, bucket layout, streams,
// and the step in progress. zero.c and zero_plan.c fill it; every part receives a const Base and
// its own struct. Included by the files of llmc/state.
#pragma once
#include "llmc/base/fault.h"
#include "llmc/comm.h"
#include "llmc/config/config.h"
#include "llmc/log/timers.h"
#include "llmc/state/tensor.h"
#include "sdp4bit/kernels.h"
#include "sdp4bit/lanes.h"
#include "sdp4bit/wire.h"
LLMC_BEGIN

// Elements [lo, hi) of a tensor, counted in this rank's tensor-parallel part of it.
typedef struct Range {
    int tensor, bucket;
    int64_t lo, hi;
    int64_t arena_at, state_at;  // position of the first element in the arenas and in the optimizer state
    int64_t squares_at;          // position in the second moments, if the tensor has them
} Range;

typedef struct Base {
    const Config *config;
    const Mesh *mesh;
    BucketLayout layout;        // buckets with one shard per rank
    BucketLayout unsharded;     // with no_shard: the same buckets with a single shard; else empty
    const BucketLayout *state;  // layout of the optimizer state that a rank holds: &layout or &unsharded
    Tensor *tensors;            // (layout.tensors)
    // (held_count) ranges of the optimizer state that this rank holds. The first range_count ranges
    // are the shards that it owns
    Range *ranges;
    int range_count, held_count;
    GradFormat grad_format, plain_grad_format;  // after and before gradient quantization starts
    WeightFormat weight_format;
    // set by zero_start
    Device *device;
    Timers *timers;
    Stream *compute;  // forward and backward
    Lanes *lanes;     // communication; lanes->last also runs norm and AdamW
    // device memory
    Segment *segments;       // (layout.segments_total)
    StepStatus *control;     // (1) status of the latest step
    float *partial_sums;     // partial sums of the squared gradient norm, bucket by bucket
    int64_t *partial_start;  // host (buckets): index of a bucket's first partial sum
    // the step in progress
    int64_t step;        // 1-based iteration
    WireChecks *checks;  // checksums of messages (--verify-wire), and this rank's first fault
    Faults faults;       // faults injected by tests
} Base;

static inline int64_t base_state_start(const Base *base, int b) { return base->state->bucket[b].state_start; }
// Returns the index of a bucket's first second moment: layout_squares_start.
int64_t base_squares_start(const Base *base, int b);
// Returns the index of this rank's shard among the shards of the optimizer state.
static inline int base_state_shard(const Base *base) { return base->state->dp > 1 ? base->mesh->dp.rank : 0; }
// Returns the payload format of gradients in an iteration.
const GradFormat *base_grad_format(const Base *base, int64_t iteration);
// Sets *range, except range->state_at, to the elements of segment i of bucket b (matrices first)
// that rank `owner` owns. *in_shard: position of the first one in the owner's matrix or tail shard.
// Returns false if the rank owns no element of the segment.
bool base_cut_segment(const BucketLayout *layout, int b, int i, int owner, Range *range, int64_t *in_shard);
// Fills base->ranges.
void base_list_ranges(Base *base);
// Returns the allocation granularity in bytes of buffers that the ranks of the node may map
// (comm_share): COMM_ALIGNMENT, or 1 if no buffers are mapped.
int64_t base_alignment(const Base *base);

LLMC_END
