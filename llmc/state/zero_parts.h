// The struct of the training state: a Base and the parts. Included by zero.c, zero_plan.c,
// slices.c, replicas.c and tests; all other files use zero.h.
#pragma once
#include "llmc/state/grads.h"
#include "llmc/state/local_steps.h"
#include "llmc/state/optimizer.h"
#include "llmc/state/stats.h"
#include "llmc/state/weights.h"
#include "sdp4bit/qwd.h"
#include "sdp4bit/tlq_hs.h"
LLMC_BEGIN

// A copy to page-locked memory that has been requested.
typedef struct StagedCopy {
    void *pinned;
    const void *memory;
    size_t bytes;
    bool on_host;  // memory
} StagedCopy;

// --async-save: this rank's part of a checkpoint in host memory.
typedef struct Slices {
    void *staging;           // page-locked; NULL without --async-save
    uint64_t staging_bytes;  // size of this rank's part
    StagedCopy *copy;        // (room) the first `count` are requested and not started
    int count, room;
    Stream *stream;  // stream of the copies
    Event *staged;   // the copies are complete
    bool copying;    // copies were started since the latest update; the next update waits for them
} Slices;

typedef struct Zero Zero;
struct Zero {
    Base base;
    Grads grads;
    Feedback feedback;
    Optimizer optimizer;
    Weights weights;
    Outer outer;
    Slices slices;
    Stats stats;
    WireChecks wire_checks;  // base.checks
    // communication
    TlqWorkspace tlq;      // buffers of the gradient reduction
    QwdLossless lossless;  // payloads of variable length; coded NULL: not used
    size_t lengths_start;  // where the payload lengths begin in the first gather buffer
    void *node_flags;      // (COMM_FLAG_BYTES) for comm_share; NULL if no memory is mapped
    Error not_shared;      // why the node's ranks don't map each other's memory; code 0 if they do, or
                           // if mapping is off
    // the step status
    float *piece_sums;    // device (2 * buckets): sums of squares per bucket part
    StepRecord *records;  // device (all ranks)
    float *loss_sum;      // device (1): mean loss of this rank's micro-batches, accumulated by the model
    double loss_factor, gradient_factor;  // factors of the current step: zero_set_factors
    int64_t *zeros;                       // device (1): --log-num-zeros-in-grad
    uint64_t *hash;       // device: replica hashes, (buckets), or (tensors) if more and tensors have copies
    Event *computed;      // compute's work of the step is complete, including the loss
    Event *status_known;  // the status has been computed and the loss read
    Event *landing[2];    // optimizer.landed has been written
};

LLMC_END
