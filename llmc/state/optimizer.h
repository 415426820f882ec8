// Optimizer state of this rank: fp32 master weights and AdamW's two moments.
//
// The store is chosen when the run is planned:
//   device  state and update on the device
//   host    --optimizer-cpu-offload: state in page-locked host memory, AdamW on host cores
//           (sdp4bit/update_host.c)
//   disk    --optimizer-disk-offload: state in a file (disk_state.h), AdamW on host cores
// The results are bitwise identical. Stages of a bucket with the host and disk stores. `host` is
// the store's stream, `last` is lanes->last:
//
//   last   reduces the bucket
//   host   copies this rank's shard of the gradients to the host, and its weights if differences
//          are sent. Overlaps with backward and with the next reductions. With ZeRO-2 and 3 all
//          buckets share two windows (grads.h), so later micro-batches first copy their sum back
//   last   computes the step status
//   host   copies the status, then computes AdamW and the payload of each bucket. The disk store
//          reads and writes the state meanwhile
//   last   copies the payload to the gather buffer
//   ...    all-gather and apply, as with the device store (qwd.c)
//
// Called by the files of llmc/state.
#pragma once
#include "llmc/base/memory_plan.h"
#include "llmc/state/disk_state.h"
#include "llmc/state/grads.h"
#include "llmc/state/state_base.h"
#include "sdp4bit/qwd.h"
LLMC_BEGIN

typedef struct Optimizer Optimizer;

// A copy within host memory in stream order.
typedef struct HostCopy {
    uint8_t *to;
    const uint8_t *from;
    size_t bytes;
    int threads;
    const Site *site;
} HostCopy;

// The device store leaves start, before_reduction, after_reduction, status_known and updated NULL.
typedef struct OptimizerStore {
    bool on_host;  // AdamW runs on the host; reduced gradients are copied there at once
    void (*reserve)(const Base *base, Optimizer *optimizer, MemoryPlan *memory_plan);
    void (*start)(const Base *base, Optimizer *optimizer);
    void (*free)(const Base *base, Optimizer *optimizer);
    // Called before and after a reduction of bucket b into `own` is queued on lanes->last. slots:
    // several buckets share the memory of `own`. add: the reduction adds to the sum so far. last:
    // last reduction of the step.
    void (*before_reduction)(const Base *base, Optimizer *optimizer, int b, GradShard own, bool slots,
                             bool add);
    void (*after_reduction)(const Base *base, Optimizer *optimizer, int b, GradShard own, bool slots,
                            const floatX *weights, bool last);
    // Called when the computation of the step status has been queued on lanes->last.
    void (*status_known)(const Base *base, Optimizer *optimizer);
    // Returns the memory that the update of bucket b reads and writes.
    BucketState (*state)(const Base *base, const Optimizer *optimizer, int b, GradShard grads,
                         WeightShard weights);
    // Called when the updates of all buckets have been queued.
    void (*updated)(const Base *base, Optimizer *optimizer);
    // Functions of n elements of the state from element `at` on, which are in one bucket.
    // Sets master weights to the model weights.
    void (*widen)(const Base *base, const Optimizer *optimizer, int64_t at, const floatX *weights, int64_t n);
    // Copy a part of the state to or from the host, in fp32. read and write block; queue is
    // asynchronous.
    void (*read)(const Optimizer *optimizer, Stream *stream, float *host, StatePart part, int64_t at,
                 int64_t n);
    void (*write)(const Optimizer *optimizer, Stream *stream, StatePart part, int64_t at, const float *host,
                  int64_t n);
    void (*queue)(const Base *base, const Optimizer *optimizer, Stream *stream, void *pinned, StatePart part,
                  int64_t at, int64_t n);
    // Copies the step status to `landed`. Runs on compute.
    void (*copy_status)(const Base *base, StepStatus *landed);
} OptimizerStore;
extern const OptimizerStore optimizer_device, optimizer_host, optimizer_disk;

struct Optimizer {
    const OptimizerStore *store;
    // NULL if they are on disk
    float *master, *exp_avg;     // (state->shard_elements); with momentum_bf16 exp_avg is like exp_avg_sq
    float *exp_avg_sq;           // second moments: base_squares_start
    uint16_t *momentum_bf16;     // of whole matrices: layout_whole_start; NULL unless --exp-avg-dtype bf16
    const BucketLayout *layout;  // base->state
    StepStatus *landed;          // host (2): status of the latest two steps
    // the host and disk stores; all memory except `found` is page-locked
    QwdHost host;                    // host.stream runs the copies and the update
    float *grads;                    // (state->shard_elements) reduced gradients
    floatX *weights;                 // (state->shard_elements) matrix weights before the update; NULL unless
                                     // weight differences are sent
    uint64_t *found;                 // device (1): copy of host.fault
    Event *reduced;                  // last -> host: the reduced gradients may be copied to the host
    Event *window_free[GRAD_SLOTS];  // host -> last: the shard window may be written
    Event *status;                   // last -> host: the step status is known, AdamW may begin
    DiskState *disk;                 // the disk store; else NULL
    void *disk_memory;               // (disk_memory_bytes)
};

LLMC_END
