// Optimizer state of this rank: fp32 master weights and AdamW's two moments.
//
// The store is chosen when the run is planned:
//   device  state and update on the device
//   host    --optimizer-cpu-offload: state in page-locked host memory, AdamW on the host's cores
//           (sdp4bit/update_host.c); bitwise identical results
// Stages of a bucket with the host store. `host` is the store's stream, the others are zero.c's:
//
//   last   reduces the bucket
//   host   copies this rank's shard to the host: gradients, and weights if differences are sent.
//          Overlaps with backward and the next reductions. With the slots of grads.h all buckets
//          share two windows, and later micro-batches first copy the sum so far back to the device
//   last   computes the step status
//   host   copies it, then computes AdamW and the payload of each bucket
//   last   copies the payload to the gather buffer
//   ...    all-gather and apply as with the device store (qwd.c)
//
// Called by the files of llmc/state.
#pragma once
#include "llmc/base/memory_plan.h"
#include "llmc/state/state_base.h"
#include "llmc/state/grads.h"
#include "sdp4bit/qwd.h"
LLMC_BEGIN

typedef struct Optimizer Optimizer;

// A copy within host memory that a stream runs.
typedef struct HostCopy {
    uint8_t *to;
    const uint8_t *from;
    size_t bytes;
    int threads;
    const Site *site;
} HostCopy;

// The device store has NULL for start, before_reduction, after_reduction, status_known and updated.
typedef struct OptimizerStore {
    bool on_host;  // state is in host memory; reduced gradients are copied there at once
    void (*reserve)(const Base *base, Optimizer *optimizer, MemoryPlan *memory_plan);
    void (*start)(const Base *base, Optimizer *optimizer);
    void (*free)(const Base *base, Optimizer *optimizer);
    // Called before and after a reduction of bucket b into `own`, in the order of lanes->last.
    // slots: several buckets share the shard's memory. add: the reduction adds to the sum so far.
    // last: last reduction of the step.
    void (*before_reduction)(const Base *base, Optimizer *optimizer, int b, GradShard own, bool slots,
                             bool add);
    void (*after_reduction)(const Base *base, Optimizer *optimizer, int b, GradShard own, bool slots,
                            const floatX *weights, bool last);
    // Called when the step status has been computed, in the order of lanes->last.
    void (*status_known)(const Base *base, Optimizer *optimizer);
    // Memory that the update of bucket b reads and writes.
    BucketState (*state)(const Base *base, const Optimizer *optimizer, int b, GradShard grads,
                         WeightShard weights);
    // Called after the updates of all buckets.
    void (*updated)(const Base *base, Optimizer *optimizer);
    // master[0..n) = float(weights[0..n)).
    void (*widen)(const Base *base, const Optimizer *optimizer, float *master, const floatX *weights,
                  int64_t n);
    // Copy state to or from the host. read and write block until done; queue runs in the order of
    // `stream`.
    void (*read)(const Optimizer *optimizer, Stream *stream, void *host, const void *state, size_t bytes);
    void (*write)(const Optimizer *optimizer, Stream *stream, void *state, const void *host, size_t bytes);
    void (*queue)(const Base *base, const Optimizer *optimizer, Stream *stream, void *pinned,
                  const void *state, size_t bytes);
    // Copies the step status to `landed`, in the order of compute.
    void (*copy_status)(const Base *base, StepStatus *landed);
} OptimizerStore;
extern const OptimizerStore optimizer_device, optimizer_host;

struct Optimizer {
    const OptimizerStore *store;
    float *master, *exp_avg, *exp_avg_sq;  // (state->shard_elements)
    StepStatus *landed;                    // host (2): status of the latest two steps
    // the host store: page-locked memory except `found`
    QwdHost host;                    // host.stream: of the copies and the update
    float *grads;                    // (state->shard_elements) reduced gradients
    floatX *weights;                 // (state->shard_elements) matrix weights before the update; NULL unless
                                     // differences are sent
    uint64_t *found;                 // device (1): copy of host.fault
    Event *reduced;                  // a bucket's gradients may be copied to the host
    Event *window_free[GRAD_SLOTS];  // the shard window may be written
    Event *status;                   // the step status may be copied, and optimizer state written
};

LLMC_END
