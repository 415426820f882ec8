// What a Zero holds. Included by the files of this room that work on it: zero*.c, probe.c and
// replicas.c. Tests look inside too. Everybody else goes through zero.h.
#pragma once
#include "llmc/base/fault.h"
#include "llmc/state/probe.h"
#include "llmc/state/zero.h"
#include "sdp4bit/outer.h"
#include "sdp4bit/qwd.h"
#include "sdp4bit/tlq_hs.h"
LLMC_BEGIN

// A piece of a checkpoint on its way to the host.
typedef struct StagedCopy {
    void *pinned;
    const void *memory;
    size_t bytes;
    bool on_host;  // memory
} StagedCopy;

// Where gradients lie. Those of a bucket that stays are whole, for a step. Other buckets (ZeRO-2)
// use two slots in turn: there backward leaves a micro-batch's gradients, and they are reduced at
// once into the own windows, which add up a step's micro-batches.
enum { GRAD_SLOTS = 2 };
typedef struct Gradients {
    float *whole;             // (whole_elements) device: the buckets that stay
    float *slot[GRAD_SLOTS];  // (slot_elements) device: bucket b uses slot b % GRAD_SLOTS
    float *shard;             // (shard_elements) device: the own windows of the other buckets; with
                              // offload two windows, which they use in turn
    int64_t whole_elements, slot_elements, shard_elements;
    bool *stays;                   // (buckets)
    int64_t *start;                // (buckets) first element, in `whole` or in `shard`
    bool *begun;                   // (buckets) a backward writes it now
    bool rehearsal;                // zero_rehearse
    int *reductions;               // (buckets) of this step, so far
    Event *slot_read[GRAD_SLOTS];  // the slot's gradients have been quantized
} Gradients;

// A copy in host memory on its way.
typedef struct HostCopy {
    uint8_t *to;
    const uint8_t *from;
    size_t bytes;
    int threads;
    const Site *site;
} HostCopy;

// --optimizer-cpu-offload: zero_offload.c. All but `found` is in page-locked host memory.
typedef struct Offload {
    QwdHost host;                    // host.stream: NULL without offload
    float *grads;                    // (plan.shard_elements) the reduced gradients
    floatX *weights;                 // (plan.shard_elements) the matrices' before the update; NULL where no
                                     // differences are sent
    uint64_t *found;                 // device (1): host.fault, brought up
    Event *reduced;                  // a bucket's gradients are there to go down
    Event *window_free[GRAD_SLOTS];  // the own window that buckets use in turn may be written
    Event *judged;                   // the verdict too, and master weights and moments may be written
} Offload;

// A rank's parts of the buckets that are shared out, one after the other: (windows) of
// matrix_per_rank, then (windows) of tail_per_rank.
typedef struct WeightParts {
    int windows;
    floatX *memory;  // NULL: there are none
    int64_t *start;  // (buckets) a bucket's first element there
} WeightParts;

// Weights that ranks share out: zero_weights.c.
typedef struct SharedWeights {
    bool on;
    bool over_all;       // among all ranks; else among those of a node
    WeightParts kept;    // between steps: the windows of this rank's rail; over all, its own
    floatX *slot[2];     // a whole bucket; bucket b lies in slot b % 2
    int held[2];         // the bucket that is there or on its way, of the latest update; -1: none
    bool coming[2];      // compute has not waited for it yet
    Stream *stream;      // of the gathers
    Event *gathered[2];  // the slot is filled
    Event *used;         // what compute had been given when the latest gather was asked for
    CommRow *row;        // (2 * nodes) of the gather in progress
    // over all
    uint8_t *buffer;         // (dp) messages of the gather in progress
    StepControl *always;     // (1) a verdict that applies
    uint8_t *message;        // this rank's, as the latest update made them; NULL: plain weights travel
    int64_t *message_start;  // (buckets)
    bool messages_stand;     // an update has made them; else the kept weights are newer
    WeightParts second;      // --secondary-partition: the rail's windows
    bool *filled;            // (buckets) they are there since the latest update
} SharedWeights;

// --local-steps: zero_local.c. Outer weights, their momentum, and the exchange between replica
// groups.
enum { LOCAL_SLOTS = 2 };
typedef struct LocalSteps {
    OuterPlan plan;
    OuterStep step;  // its buffers alone
    // device memory
    float *outer, *momentum;       // (plan.shard_elements)
    floatX *narrow;                // (plan.shard_elements) the outer weights, rounded: made by local_settle
    float *gradient[LOCAL_SLOTS];  // (largest shard) exchanges use them in turn
    Segment *segments;
    uint64_t *fault;                // (buckets) the first that an exchange's checks have found
    WireChecks checks;              // of the exchange in progress
    Stream *stream;                 // of the exchanges; NULL before local_start, and without local steps
    Event *taken;                   // last -> stream: a pseudo-gradient is there
    Event *slot_free[LOCAL_SLOTS];  // stream -> last: the slot may be written
    Event **exchanged;              // (buckets) stream -> last: the bucket's outer weights are new
    Event *settled;                 // last -> compute: master weights and outer weights may be read
    // host
    int64_t *turn;        // (buckets) has its turn in steps that leave this rest, divided by H
    int64_t *meets;       // (buckets) master weights meet the outer weights at this step's end; 0: they have
    unsigned exchanges;   // so far
    int *lost;            // host memory: not 0 once a replica group is lost (comm_may_lose)
    bool outer_in_place;  // zero_use_outer
    bool stands;          // local_settle has been called since the latest update
    floatX *kept;         // host memory: the replica group's weights, while the outer weights stand in
                          // their place
} LocalSteps;

// --error-feedback: zero_feedback.c.
typedef struct Feedback {
    bool on;
    float *memory;   // device: bucket by bucket, (nodes, matrix_per_rank) of each
    int64_t *start;  // (buckets) a bucket's first element there
    Piece *pieces;   // (piece_count) state_at: in `memory`
    int piece_count;
} Feedback;

struct Zero {
    const Config *config;
    const Mesh *mesh;
    Plan plan;
    Tensor *tensors;           // (plan.tensors)
    GradWire plain_grad_wire;  // before --gradients-quantization-start-iteration, or without quantization
    GradWire grad_wire;        // as the flags say
    WeightWire weight_wire;
    Device *device;
    Timers *timers;
    Stream *compute;        // forward and backward
    Lanes *lanes;           // reductions and gathers. On `last` also what looks at the shard: final
                            // sums, the verdict, AdamW
    Stream *copies;         // of a checkpoint into staging (--async-save)
    Event **ready, **done;  // (buckets) gradients complete / gathered weights applied
    Event *computed;        // the compute stream's last word of a step: its loss
    Event *judged;          // the verdict stands, and the loss has been read
    // device memory, reserved in the memory plan
    floatX *weights;  // (plan.arena_elements); where weights are shared out: bucket 0 alone
    SharedWeights shared;
    Gradients gradients;
    float *master, *exp_avg, *exp_avg_sq;  // (plan.shard_elements); in host memory with offload
    Segment *segments;                     // (plan.segments_total)
    float *leaves;                         // norm leaves: matrix leaves then tail leaves, bucket by bucket
    float *piece_sums;                     // (2 * buckets)
    StepRecord *records;                   // (all ranks)
    StepControl *control;                  // (1)
    float *loss_sum;                       // (1) mean loss of this rank's micro-batches; the model adds to it
    uint64_t *hash;                        // of the replica: (buckets), or (tensors) where that is more and
                                           // ranks hold copies of tensors
    int64_t *zeros;                        // (1)
    TlqWorkspace tlq;
    uint8_t *gather[LANE_SLOTS];      // gather buffers, which the buckets use in turn
    size_t gather_bytes[LANE_SLOTS];  // that messages take in them; the first ends with the lengths
                                      // of lossless weights' messages
    size_t lengths_start;             // where they begin there
    QwdLossless lossless;             // coded NULL: weights have no codes of variable length
    void *node_flags;                 // (COMM_FLAG_BYTES) for comm_share; NULL where nobody is to reach in
    LocalSteps local;                 // replica groups
    Offload offload;                  // AdamW on the host
    Probe probe;                      // figures on quantization, off unless flags ask for them
    Feedback feedback;
    // host
    void *staging;           // --async-save: this rank's part of a checkpoint, page-locked; else NULL
    uint64_t staging_bytes;  // that it holds
    StagedCopy *to_copy;     // (to_copy_count of to_copy_room) asked for and not begun
    int to_copy_count, to_copy_room;
    Event *staged;        // their copies have arrived
    bool copying;         // since the latest update: the next one waits for them
    int64_t *leaf_start;  // (buckets) first leaf
    int *units_missing;   // (buckets) layers whose gradients are still to come in this backward
    bool *pending;        // (buckets) gathered weights not yet waited for
    Piece *pieces;        // (piece_count)
    int piece_count;
    int64_t step;            // iteration, 1-based, of the step in progress
    StepControl *landed;     // (2) host copies of the last two steps' verdicts; page-locked with
                             // offload
    Event *landing[2];       // those copies are complete
    Faults faults;           // for tests
    WireChecks wire_checks;  // --verify-wire
    Error not_shared;        // why the node's ranks do not fetch messages from each other; code 0: they
                             // do, or should not
};

// --- AdamW on the host: zero_offload.c -----------------------------------------------------------

static inline bool zero_offloads(const Zero *zero) { return zero->config->optimizer_cpu_offload; }
// With zero_plan, zero_start, and zero_free.
void offload_reserve(Zero *zero, MemoryPlan *memory_plan);
void offload_start(Zero *zero);
void offload_free(Zero *zero);
// In the step; they do nothing without offload. A reduction of bucket b follows on lanes->last. Own
// windows that serve several buckets are made free for it. add: they get the sum so far.
void offload_expect(Zero *zero, int b, bool add);
// The reduction is in the own windows, in the order of lanes->last, and goes down. last: it is the
// gradient of the whole step.
void offload_reduced(Zero *zero, int b, bool last);
// The verdict stands, and nobody reads master weights and moments any more, in the same order. The
// updates may follow.
void offload_judged(Zero *zero);
// Where bucket b's update finds everything.
BucketState offload_state(const Zero *zero, int b);
// All buckets have been updated: what the host found wrong goes up.
void offload_updated(Zero *zero);
// A copy in host memory, in the order of the stream.
void offload_copy(Zero *zero, Stream *stream, void *to, const void *from, size_t bytes);
// master weights on the host = float(weights) on the device, n elements. Waits.
void offload_widen(Zero *zero, float *masters, const floatX *weights, int64_t n);
// n master weights from state position `at` on, to the host, with offload or without. In the order
// of the stream; waits for it.
void zero_read_masters(Zero *zero, Stream *stream, int64_t at, int64_t n, float *to);

// --- replica groups: zero_local.c ----------------------------------------------------------------

// With zero_plan, zero_start and zero_free. All of these do nothing without local steps.
void local_reserve(Zero *zero, MemoryPlan *memory_plan);
void local_start(Zero *zero);
void local_free(Zero *zero);
// The outer weights are the master weights, which were just made, and stand still.
void local_from_masters(Zero *zero);
// Before bucket b's AdamW: its master weights meet the outer weights, if that is due with the end
// of `step` or was before.
void local_meet(Zero *zero, int b, int64_t step);
// Behind bucket b's AdamW of the step in progress: the exchange, if it is the bucket's turn.
void local_turn(Zero *zero, int b);
// Between steps: what is due with the latest step's end is done. Later work of compute and of
// lanes->last may read master weights and outer weights.
void local_settle(Zero *zero);
// *hash += that of the own outer weights and their momentum. On compute, behind local_settle.
void local_hash(Zero *zero, uint64_t *hash);

// --- error feedback: zero_feedback.c -------------------------------------------------------------

// With zero_plan and zero_free.
void feedback_reserve(Zero *zero, MemoryPlan *memory_plan);
void feedback_free(Zero *zero);
// What a reduction of bucket b is told. grad_wire and micro_batch are set.
void feedback_step(const Zero *zero, int b, TlqStep *step);

// --- where things lie: zero_grads.c, zero_weights.c ----------------------------------------------

// What rank `owner` owns of segment i of bucket b, matrices first: false where it owns nothing of
// it. *in_window: where it begins in the owner's piece of the part. piece->state_at is left alone.
bool zero_cut_segment(const Plan *plan, int b, int i, int owner, Piece *piece, int64_t *in_window);

// Reserves the gradients' memory. After the layout, before zero_grads_start's events.
void zero_grads_reserve(Zero *zero, MemoryPlan *memory_plan);
void zero_grads_start(Zero *zero);
void zero_grads_free(Zero *zero);
// What gradients travel as in this iteration.
const GradWire *zero_wire_at(const Zero *zero, int64_t iteration);
// No bucket of the step has been reduced.
void zero_grads_new_step(Zero *zero);
// Bucket b's gradients of this rank's backward: (matrix_elements + tail_elements).
float *zero_bucket_grads(const Zero *zero, int b);
// This rank's windows of bucket b: its reduced gradients, and its weights.
Windows zero_own_grads(const Zero *zero, int b);
WeightWindows zero_own_weights(const Zero *zero, int b);
// Every rank holds the bucket's weights whole, between the steps too.
static inline bool zero_weights_resident(const Zero *zero, int b) { return b == 0 || !zero->shared.on; }
// What this rank keeps of bucket b's weights between steps, (*elements): the whole bucket, or its
// windows of it.
floatX *zero_kept_weights(const Zero *zero, int b, int64_t *elements);
// The windows of data-parallel rank `owner` in what this rank keeps of the bucket. NULL where it
// keeps none of them.
WeightWindows zero_kept_windows(const Zero *zero, int b, int owner);
// Elements that this rank keeps of a tensor, in one run: [first, first + count) of its own part of
// the tensor. False where there are none in window w of zero->shared.kept.windows. A resident
// tensor is one run.
typedef struct KeptRun {
    floatX *memory;
    int64_t first, count;
} KeptRun;
bool zero_kept_run(const Zero *zero, int tensor, int w, KeptRun *run);
// For zero_plan, zero_start and zero_free.
void zero_plan_weights(Zero *zero, MemoryPlan *memory_plan);
void zero_start_weights(Zero *zero);
void zero_free_weights(Zero *zero);
// The kept weights are about to change, or have been changed: what was gathered is of no use.
void zero_weights_change(Zero *zero);
// Where the messages of bucket b's update come together.
GatherBuffer zero_gather_buffer(const Zero *zero, int b);
// The kept weights were drawn, loaded or repaired.
void zero_weights_given(Zero *zero);
// The end of zero_update. The first time after zero_weights_given it may wait for the verdict.
void zero_weights_updated(Zero *zero);
// Later work of lanes->last sees what the gathers' checks have found.
void zero_weights_checked(Zero *zero);
// A piece's first reduced gradient, and its first weight.
float *zero_piece_grads(const Zero *zero, const Piece *piece);
floatX *zero_piece_weights(const Zero *zero, const Piece *piece);

LLMC_END
