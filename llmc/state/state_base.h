// Context shared by all parts of the training state: configuration, ranks, bucket layout, streams,
// and the step in progress. Filled by zero.c and zero_plan.c; a part receives a const Base and its
// own struct. Included by the files of llmc/state.
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

// Elements [lo, hi) of this rank's part of one tensor.
typedef struct Range {
    int tensor, bucket;
    int64_t lo, hi;
    int64_t arena_at, state_at;  // first element in the bucket layout, and in this rank's optimizer state
} Range;

typedef struct Base {
    const Config *config;
    const Mesh *mesh;
    BucketLayout layout;        // the bucket layout: gradients are reduced to one shard per rank
    BucketLayout unsharded;     // the same buckets, each a single shard; without buckets if unused
    const BucketLayout *state;  // layout of the optimizer state that a rank holds: &layout or &unsharded
    Tensor *tensors;            // (layout.tensors)
    // (held_count) ranges of the optimizer state that this rank holds. The first range_count are
    // its own shard of every tensor, which it counts and saves
    Range *ranges;
    int range_count, held_count;
    GradFormat grad_format, plain_grad_format;  // in use after and before quantization starts
    WeightFormat weight_format;
    // set by zero_start
    Device *device;
    Timers *timers;
    Stream *compute;  // forward and backward
    Lanes *lanes;     // communication; lanes->last also computes on the shard: norm, AdamW
    // device memory
    Segment *segments;       // (layout.segments_total)
    StepStatus *control;     // (1) status of the latest step
    float *partial_sums;     // squares of the gradient norm, bucket by bucket
    int64_t *partial_start;  // host, (buckets) a bucket's first partial sum
    // the step in progress
    int64_t step;        // 1-based iteration
    WireChecks *checks;  // --verify-wire, and this rank's first fault
    Faults faults;       // injected for tests
} Base;

static inline int64_t base_state_start(const Base *base, int b) { return base->state->bucket[b].state_start; }
// Index of this rank's shard among the shards of the optimizer state.
static inline int base_state_shard(const Base *base) { return base->state->dp > 1 ? base->mesh->dp.rank : 0; }
// Payload format of gradients in an iteration.
const GradFormat *base_grad_format(const Base *base, int64_t iteration);
// Sets *range to the part of segment i of bucket b (matrices first) that rank `owner` owns, except
// for range->state_at. *in_shard: its first element in the owner's matrix or tail shard. Returns
// false if the owner has no element of the segment.
bool base_cut_segment(const BucketLayout *layout, int b, int i, int owner, Range *range, int64_t *in_shard);
// Fills ranges.
void base_list_ranges(Base *base);
// Allocation granularity in bytes of buffers that the node's ranks may map (comm_share):
// COMM_ALIGNMENT, or 1 if none are mapped.
int64_t base_alignment(const Base *base);

LLMC_END
