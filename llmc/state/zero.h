// ZeRO-1: every rank holds all weights and gradients but the optimiser state of 1/dp of each bucket. This module owns the arenas, reduces a bucket's
// gradients as soon as they are complete, judges the step, runs AdamW on the own shard and brings every replica up to date, baseline or SDP4Bit.
// Called by train_gpt.cu, saver.c, replicas.c and probe.c; uses sdp4bit/tlq_hs.h and qwd.h for what travels. zero_plan.c sets it up, zero.c makes the steps, zero_slices.c saves and restores.
#pragma once
#include "llmc/checkpoint/checkpoint.h"
#include "llmc/comm.h"
#include "llmc/config/config.h"
#include "llmc/base/fault.h"
#include "llmc/base/memory_plan.h"
#include "llmc/state/probe.h"
#include "llmc/log/timers.h"
#include "sdp4bit/qwd.h"
#include "sdp4bit/tlq_hs.h"
LLMC_BEGIN

// A run of elements of one tensor in this rank's shard: tensor elements [lo, hi) lie at arena position arena_at and at state position state_at.
typedef struct Piece {
    int tensor;
    int64_t lo, hi, arena_at, state_at;
} Piece;

// A slice of a checkpoint on its way to the host.
typedef struct StagedCopy {
    void *pinned;
    const void *memory;
    size_t bytes;
} StagedCopy;

typedef struct Zero {
    const Config *config;
    const Topology *topology;
    Plan plan;
    GradWire plain_grad_wire;  // before --gradients-quantization-start-iteration, and when gradients are not quantised
    GradWire grad_wire;        // as the flags say
    WeightWire weight_wire;
    Device *device;
    Comm *comm;
    Timers *timers;
    Stream *compute;                // forward and backward
    Lanes *lanes;                   // reductions and gathers; on `last` also final sums, verdict, AdamW, whatever looks at the shard
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
    StepRecord *records;            // (dp)
    StepControl *control;           // (1)
    float *loss_sum;                // (1) mean loss of this rank's micro-batches, accumulated by the model
    uint64_t *hash;                 // (buckets) of the replica
    int64_t *zeros;                 // (1)
    TlqWorkspace tlq;
    uint8_t *gather[LANE_SLOTS];    // gather buffers, which the buckets use in turn
    size_t gather_bytes[LANE_SLOTS];  // that messages take in them
    void *node_flags;               // (COMM_FLAG_BYTES) for comm_share; NULL: --node-exchange nccl, or one rank in the node
    Probe probe;                    // figures on quantisation, off unless flags ask for them
    // host
    void *staging;                  // --async-save: this rank's slices of a checkpoint, page-locked; NULL otherwise
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
    Error not_shared;               // why the node's ranks do not fetch messages from each other; code 0: they do, or should not
} Zero;

// Builds the layout and reserves every buffer in the memory plan; needs no device. tensors: the model's, in forward order.
bool zero_plan(Zero *zero, const Config *config, const Topology *topology, const PlanTensor *tensors, int count, MemoryPlan *memory_plan, Error *err);
// For who reserves memory that the ranks of a node may reach into (comm_share): bytes that it comes in multiples of, COMM_GRAIN, or 1 where nobody is to.
int64_t zero_grain(const Zero *zero);
// After memory_plan_allocate: uploads tables, creates events. weights must be filled next, then zero_masters_from_weights or zero_restore.
// lanes outlive the Zero. Collective over comm, whose connections are made here.
void zero_start(Zero *zero, Device *device, Comm *comm, Stream *compute, Lanes *lanes, Timers *timers);
// After the last step, before the memory plan is freed: all work has ended, and no other rank reaches into this one's memory. Collective over comm. Nothing without zero_start.
void zero_stop(Zero *zero);
void zero_free(Zero *zero);
void zero_masters_from_weights(Zero *zero);

// A step, in this order. zero_begin clears the loss. zero_update leaves the 1-D tensors' gradients clear; the matrices' hold the old ones, which the step's
// first micro-batch overwrites. iteration is 1-based.
void zero_begin(Zero *zero, int64_t iteration);
// The gradients of unit (layer) `unit` are complete in this backward: when its bucket is, the reduction starts. Called in the last micro-batch only.
void zero_grads_ready(Zero *zero, int unit);
// Norm, verdict, AdamW, and the gathers in forward order. Learning rates for the case that the previous step was applied or skipped.
void zero_update(Zero *zero, double lr_if_applied, double lr_if_skipped, double weight_decay);
// The verdict of the step that zero_update finished, waited for: which is 0 for the latest step, 1 for the one before.
StepControl zero_verdict(Zero *zero, int which);

// The only way to the weights: makes the compute stream wait for the bucket of this unit if a gather is still on its way. Idempotent.
void zero_weights_wait(Zero *zero, int unit);
void zero_weights_wait_all(Zero *zero);
// All work of all streams has ended; before memory and communicators go.
void zero_synchronize(Zero *zero);
// Pointers into the arenas. Weights may be read after zero_weights_wait only.
floatX *zero_weight(const Zero *zero, int tensor);
float *zero_grad(const Zero *zero, int tensor);

// Milliseconds per step, in the `steps` since the last call, that compute waited for reductions and for gathers (on CPU ranks: that they took), on the rank that
// waited least: GPUs differ in speed, and what a faster one waits beyond that, it waits for the slowest's own work. most_ms: both, on the rank that waited most.
// Collective over peers.
typedef struct Exposed {
    double gradients_ms, weights_ms, most_ms;
} Exposed;
Exposed zero_take_exposed(Zero *zero, double steps, Peers peers);
Exposed zero_exposed_of(const double *ms, int world);  // ms: (2, world), waits of each rank for reductions, then for gathers
// Norm of the masters, and number of zeros in the latest reduced gradient (counted with --log-num-zeros-in-grad), over all ranks. Collective, synchronises.
double zero_params_norm(Zero *zero, Peers group);
int64_t zero_zeros(Zero *zero, Peers group);
// False on all ranks when one has received a message wrong since the latest verdict (--verify-wire): a save must not follow. Collective, synchronises. Error:
// EXIT_COMMUNICATION.
bool zero_wire_sound(Zero *zero, Peers group, Error *err);

// What this rank saves, as slices of the named tensors: masters, moments (optimizer) and its 1/dp of the replica. fetch copies one to the host.
typedef struct ZeroSlices {
    Slice *slices;   // (count)
    int count;
} ZeroSlices;
ZeroSlices zero_slices(const Zero *zero, const CheckpointTensor *tensors, bool optimizer);
void zero_fetch_slice(void *zero, int i, void *host);  // context for CheckpointSave.fetch: the Zero
// The same into zero->staging, behind the training's back. For CheckpointSave.fetch and fetched: the first only asks for a copy, the second waits for all copies.
// zero_copy_staged begins what was asked for, when the device has work for a while: events that keep a time, recorded right behind gigabytes of copies, came only
// with their end (dev/bench/NOTES.md, Saves).
void zero_stage_slice(void *zero, int i, void *pinned);
void zero_copy_staged(Zero *zero);
void zero_staged(void *zero);
// Bytes of a checkpoint's slices: over all ranks, and of this rank alone (zero_slices). From zero_plan on.
uint64_t zero_checkpoint_bytes(const Zero *zero, bool optimizer);
uint64_t zero_own_checkpoint_bytes(const Zero *zero, bool optimizer);
// Loads replicas, and masters and moments when `optimizer`; otherwise masters become float(replica) and moments 0.
bool zero_restore(Zero *zero, const Checkpoint *checkpoint, const CheckpointTensor *tensors, bool optimizer, Error *err);
// What a verdict hands to the next: Adam's counters and the sentry's state. zero_start sets those of a fresh run.
void zero_set_counters(Zero *zero, const StepControl *start);

LLMC_END
