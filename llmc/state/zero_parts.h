// struct Zero, the training state: a Base and the parts. Included by zero.c, zero_plan.c, slices.c,
// replicas.c and tests; other files use zero.h.
#pragma once
#include "llmc/state/grads.h"
#include "llmc/state/local_steps.h"
#include "llmc/state/muon.h"
#include "llmc/state/optimizer.h"
#include "llmc/state/stats.h"
#include "llmc/state/weights.h"
#include "sdp4bit/qwd.h"
#include "sdp4bit/tlq_hs.h"
LLMC_BEGIN

// A queued copy to page-locked memory.
typedef struct StagedCopy {
    void *pinned;
    const Range *range;
    SliceKind kind;
} StagedCopy;

// --async-save: this rank's part of a checkpoint in host memory.
typedef struct Slices {
    void *staging;           // page-locked; NULL without --async-save
    uint64_t staging_bytes;  // size of this rank's part
    StagedCopy *copy;        // (room) the first `count` are queued and not started
    int count, room;
    Stream *stream;  // stream of the copies
    Event *staged;   // all started copies are complete
    bool copying;    // copies were started since the latest update; the next update waits for them
} Slices;

typedef struct Zero Zero;
struct Zero {
    Base base;
    Grads grads;
    Feedback feedback;
    Optimizer optimizer;
    Muon muon;
    Weights weights;
    Outer outer;
    Slices slices;
    Stats stats;
    WireChecks wire_checks;  // base.checks
    // communication
    TlqWorkspace tlq;      // buffers of the gradient reduction
    QwdLossless lossless;  // lossless weights; unused if lossless.coded is NULL
    size_t lengths_start;  // offset of the payload lengths in the first gather buffer
    void *node_flags;      // (COMM_FLAG_BYTES) for comm_share; NULL if no memory is mapped
    Error not_shared;      // why mapping the memory of the node's ranks failed; code 0: it did not fail
    // the step status
    float *piece_sums;    // device (buckets, 2): sums of squares of this rank's matrix and tail shards
    StepRecord *records;  // device (world size)
    float *loss_sum;      // device (1): mean loss of this rank's micro-batches, accumulated by the model
    double loss_factor, gradient_factor;  // of the current step: zero_set_factors
    int64_t *zeros;                       // device (1): --log-num-zeros-in-grad
    uint64_t *hash;                       // device: replica hashes of buckets or tensors
    Event *computed;                      // compute -> last: forward and backward of the step are complete
    Event *status_known;  // last -> compute: the status is computed, and the loss may be zeroed
    Event *landing[2];    // optimizer.landed[i] has been written
};

LLMC_END
