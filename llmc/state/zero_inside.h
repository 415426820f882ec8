// What a Zero holds. Included by the files of this room that work on it: zero*.c, probe.c and
// replicas.c. Tests look inside too. Everybody else goes through zero.h.
#pragma once
#include "llmc/base/fault.h"
#include "llmc/state/probe.h"
#include "llmc/state/zero.h"
#include "sdp4bit/qwd.h"
#include "sdp4bit/tlq_hs.h"
LLMC_BEGIN

// A piece of a checkpoint on its way to the host.
typedef struct StagedCopy {
    void *pinned;
    const void *memory;
    size_t bytes;
} StagedCopy;

struct Zero {
    const Config *config;
    const Mesh *mesh;
    Plan plan;
    Tensor *tensors;                // (plan.tensors)
    GradWire plain_grad_wire;  // before --gradients-quantization-start-iteration, or without quantisation
    GradWire grad_wire;             // as the flags say
    WeightWire weight_wire;
    Device *device;
    Timers *timers;
    Stream *compute;                // forward and backward
    Lanes *lanes;                   // reductions and gathers. On `last` also what looks at the shard: final
                                    // sums, the verdict, AdamW
    Stream *copies;                 // of a checkpoint into staging (--async-save)
    Event **ready, **done;          // (buckets) gradients complete / gathered weights applied
    Event *computed;                // the compute stream's last word of a step: its loss
    Event *judged;                  // the verdict stands, and the loss has been read
    // device memory, reserved in the memory plan
    floatX *weights;                // (plan.arena_elements)
    float *grads;                   // (plan.arena_elements)
    float *master, *exp_avg, *exp_avg_sq;  // (plan.shard_elements)
    Segment *segments;              // (plan.segments_total)
    float *leaves;                  // norm leaves: matrix leaves then tail leaves, bucket by bucket
    float *piece_sums;              // (2 * buckets)
    StepRecord *records;            // (all ranks)
    StepControl *control;           // (1)
    float *loss_sum;                // (1) mean loss of this rank's micro-batches; the model adds to it
    uint64_t *hash;                 // of the replica: (buckets), or (tensors) where that is more and
                                    // ranks hold copies of tensors
    int64_t *zeros;                 // (1)
    TlqWorkspace tlq;
    uint8_t *gather[LANE_SLOTS];    // gather buffers, which the buckets use in turn
    size_t gather_bytes[LANE_SLOTS];  // that messages take in them
    void *node_flags;               // (COMM_FLAG_BYTES) for comm_share; NULL where nobody is to reach in
    Probe probe;                    // figures on quantisation, off unless flags ask for them
    // host
    void *staging;                  // --async-save: this rank's part of a checkpoint, page-locked; else NULL
    uint64_t staging_bytes;         // that it holds
    StagedCopy *to_copy;            // (to_copy_count of to_copy_room) asked for and not begun
    int to_copy_count, to_copy_room;
    Event *staged;                  // their copies have arrived
    bool copying;                   // since the latest update: the next one waits for them
    int64_t *leaf_start;            // (buckets) first leaf
    int *units_missing;             // (buckets) layers whose gradients are still to come in this backward
    bool *pending;                  // (buckets) gathered weights not yet waited for
    Piece *pieces;                  // (piece_count)
    int piece_count;
    int64_t step;                   // iteration, 1-based, of the step in progress
    StepControl *landed;            // (2) host copies of the last two steps' verdicts
    Event *landing[2];              // those copies are complete
    Faults faults;                  // for tests
    WireChecks wire_checks;         // --verify-wire
    Error not_shared;  // why the node's ranks do not fetch messages from each other; code 0: they
                       // do, or should not
};

// --- where things lie: zero_grads.c, zero_weights.c ----------------------------------------------

// This rank's windows of bucket b: its reduced gradients, and its weights.
Windows zero_own_grads(const Zero *zero, int b);
WeightWindows zero_own_weights(const Zero *zero, int b);
// A piece's first reduced gradient, and its first weight.
float *zero_piece_grads(const Zero *zero, const Piece *piece);
floatX *zero_piece_weights(const Zero *zero, const Piece *piece);

LLMC_END
