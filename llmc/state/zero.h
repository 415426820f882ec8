// The training state of a data-parallel rank: ZeRO-1, 2 and 3, as --data-parallel-sharding-strategy
// says. A rank owns the optimizer state of its shard of each bucket, and some or all of the
// gradients and weights. This module reduces a bucket's gradients as soon as they are complete,
// computes the step status, runs AdamW on the shard and brings all model weights up to date, in
// bf16 or with SDP4Bit.
//
// Called by train_gpt.c, llmc/model, llmc/run and llmc/checkpoint. zero.c conducts the parts, each
// a file with one contract: grads.h, optimizer.h, weights.h, local_steps.h, feedback.h, stats.h,
// slices.h, replicas.h. zero_plan.c plans memory and chooses the stores. Payloads and collectives
// are in sdp4bit/tlq_hs.h and sdp4bit/qwd.h. The struct is in zero_parts.h, for the files of this
// directory.
#pragma once
#include "llmc/base/memory_plan.h"
#include "llmc/comm.h"
#include "llmc/config/config.h"
#include "llmc/log/timers.h"
#include "llmc/state/stats.h"
#include "llmc/state/tensor.h"
#include "sdp4bit/kernels.h"
#include "sdp4bit/lanes.h"
LLMC_BEGIN

typedef struct Zero Zero;

// --- start and end -------------------------------------------------------------------------------

// Builds the layout and reserves every buffer in the memory plan. Needs no device. tensors: (count)
// the model's, in forward order; copied. NULL with EXIT_USAGE for sizes that cannot be, or for a
// bad SDP4BIT_FAULT.
Zero *zero_plan(const Config *config, const Mesh *mesh, const Tensor *tensors, int count,
                MemoryPlan *memory_plan, Error *err);
// The same for a program of one rank that trains nothing: the weights alone, and no gradients, for
// which zero_grad gives NULL. Of what follows it may call zero_start_weights_alone instead of
// zero_start, zero_put_weights, zero_weight, zero_weights_wait and zero_free.
Zero *zero_plan_weights_alone(const Config *config, const Mesh *mesh, const Tensor *tensors, int count,
                              MemoryPlan *memory_plan, Error *err);
void zero_start_weights_alone(Zero *zero, Stream *compute);
// For who reserves memory that the ranks of a node may reach into (comm_share): the number of bytes
// that it comes in multiples of. COMM_ALIGNMENT, or 1 where nobody is to reach in.
int64_t zero_alignment(const Zero *zero);
// After memory_plan_allocate: uploads tables, creates events, makes the mesh's connections.
// Collective over the mesh. The weights must be filled next, then zero_masters_from_weights or a
// checkpoint's. lanes outlive the Zero.
void zero_start(Zero *zero, Device *device, Stream *compute, Lanes *lanes, Timers *timers);
// After the last step, before the memory plan is freed: all work has ended, and no other rank
// reaches into this one's memory. Collective over the mesh. Nothing without zero_start.
void zero_stop(Zero *zero);
// NULL is allowed.
void zero_free(Zero *zero);
// The master weights become the weights as this rank keeps them, in fp32. With --local-steps so do
// the outer weights, without momentum. In the order of compute.
void zero_masters_from_weights(Zero *zero);

// --- what it is made of --------------------------------------------------------------------------

// The layout in buckets, and what travels: gradients before and after they are quantized, and
// weights.
const BucketLayout *zero_layout(const Zero *zero);
const GradFormat *zero_grad_format(const Zero *zero, bool quantized);
const WeightFormat *zero_weight_format(const Zero *zero);
const Tensor *zero_tensors(const Zero *zero, int *count);
// The compute stream's loss: device memory (1), the mean over this rank's micro-batches. The model
// adds to it.
float *zero_loss_sum(const Zero *zero);
// How messages travel inside the node, once it is started. True where its ranks were to fetch them
// from each other's memory; then *why has code 0 where they do, else what is in the way.
bool zero_node_shares(const Zero *zero, Error *why);
// Where the whole tensor lies. Weights may be read after zero_weights_wait only, until another
// layer's are waited for; gradients are written after zero_grads_begin.
floatX *zero_weight(const Zero *zero, int tensor);
float *zero_grad(const Zero *zero, int tensor);

// --- the step ------------------------------------------------------------------------------------

// In this order. iteration is 1-based. zero_step_begins clears the loss.
void zero_step_begins(Zero *zero, int64_t iteration);
// Do the gradients of unit (layer) `unit` stay with this rank for the whole step? Then backward
// adds to the 1-D tensors', which zero_update leaves clear. The step's first micro-batch overwrites
// the matrices', and the others add. If not (ZeRO-2), every micro-batch begins anew: it overwrites
// the matrices' and finds the 1-D tensors' clear.
bool zero_grads_accumulate(const Zero *zero, int unit);
// How often a step of so many micro-batches reduces a bucket: what layout_bucket_wire_bytes counts
// of gradients travels so often.
int zero_reductions(const Zero *zero, int bucket, int micro_batches);
// Bytes that this rank sends to other replica groups at a bucket's turn; 0 without --local-steps.
int64_t zero_exchange_bytes(const Zero *zero, int bucket, const GradFormat *format);
// Before a backward writes gradients of that unit: the compute stream waits for memory to do so.
// Idempotent until the unit is complete.
void zero_grads_begin(Zero *zero, int unit);
// The gradients of that unit are complete in this backward. Starts the reduction of its bucket with
// the bucket's last unit. last: the step's last micro-batch. Called in that one only where the
// gradients stay, else in each.
void zero_reduce_unit(Zero *zero, int unit, bool last);
// Between on and off, within a step: passes over synthetic numbers, which launch every kernel once.
// What they reduce is kept, counted and shown nowhere. Collective over dp: all of its ranks do so.
void zero_warm_up(Zero *zero, bool on);
// Does a reduction in the midst of this step run kernels for the first time? It does where
// --gradients-quantization-start-iteration is reached and gradients do not stay.
bool zero_first_quantized_step(const Zero *zero);
// Norm, verdict, AdamW, and the gathers in forward order. Learning rates for the case that the
// previous step was applied or skipped.
void zero_update(Zero *zero, double lr_if_applied, double lr_if_skipped, double weight_decay);
// The step status of the step that zero_update finished, waited for. which: 0 the latest step, 1
// the one before.
StepStatus zero_step_status(Zero *zero, int which);
// What a step status hands to the next: Adam's counters and the anomaly guard's state. zero_start
// sets a fresh run's.
void zero_set_counters(Zero *zero, const StepStatus *start);

// The only way to a layer's weights: makes the compute stream wait for the bucket of this unit.
// Where weights are shared out it is gathered first, unless it is there. next: the unit that is
// wanted after this one, whose weights are then gathered beside it; -1: none. backward: for a
// backward pass, which follows a forward pass of the same unit since the latest update. Idempotent.
// Collective over mesh->shards and mesh->shard_rail.
void zero_weights_wait(Zero *zero, int unit, int next, bool backward);
// What every rank keeps of the weights is up to date. No layer is gathered.
void zero_weights_wait_all(Zero *zero);
// All work of all streams has ended; before memory and communicators go.
void zero_synchronize(Zero *zero);

// With --local-steps: the outer weights, which all replica groups share, stand in the place of the
// replica group's own, for passes that train nothing; and back. Collective over the replica group.
// Nothing without.
void zero_use_outer(Zero *zero, bool on);

// --- figures over all ranks ----------------------------------------------------------------------

// Exposed communication, ms per step, on the rank that waited least. The rest of other ranks'
// waiting is difference in GPU speed, and in a pipeline what stages wait for each other. On CPU
// ranks: the time that the work takes. most_ms: gradients and weights together, on the rank that
// waited most.
typedef struct Exposed {
    double gradients_ms, weights_ms, most_ms;
} Exposed;
// Of the `steps` since the last call. Collective over peers.
Exposed zero_take_exposed(Zero *zero, double steps, Peers peers);
// ms: (2, world), each rank's waits for reductions, then for gathers.
Exposed zero_exposed_of(const double *ms, int world);
// Norm of the model's weights (bf16), as Megatron-LM prints it. Each rank adds up the weights whose
// master weights it holds and that it counts, so each counts once. Collective over world,
// synchronizes.
double zero_params_norm(Zero *zero, Peers world);
// Zeros in the latest reduced gradient, counted with --log-num-zeros-in-grad. Collective over
// world, synchronizes.
int64_t zero_zeros(Zero *zero, Peers world);
// False on all ranks when one has found a fault since the latest verdict: a refused update, or a
// message that arrived wrong (--verify-wire). A save must not follow. Collective over world,
// synchronizes. Error: fault_error of wire.h.
bool zero_sound(Zero *zero, Peers world, Error *err);

// Quantization statistics (stats.h): true if the step in progress is reported on; the report,
// collective over world; bytes that training has sent.
bool zero_stats_due(const Zero *zero);
void zero_stats_report(Zero *zero, Log *log, Peers world);
Traffic zero_traffic(const Zero *zero);

// --- to and from the host, for checkpoints -------------------------------------------------------

// Whether this run has state of that kind. From zero_plan on, as the next two.
bool zero_keeps(const Zero *zero, SliceKind kind);
// The ranges of that kind that this rank holds, (*count).
const Range *zero_ranges(const Zero *zero, SliceKind kind, int *count);
// True if this rank saves the range: one of the ranks that hold the same elements does.
bool zero_saves_range(const Zero *zero, SliceKind kind, const Range *range);
// Which node's this rank's state is, of kinds that belong to nodes, and how many nodes there are.
int zero_node(const Zero *zero);
int zero_nodes(const Zero *zero);
// Copies a piece's (hi - lo) elements of one kind to the host, or back. Each waits.
void zero_fetch(Zero *zero, int piece, SliceKind kind, void *host);
void zero_put(Zero *zero, int piece, SliceKind kind, const void *host);
// The whole tensor has been written where zero_weight says: its first weights. This rank keeps its
// part. In the order of the tensors; in stream order.
void zero_keep_weights(Zero *zero, int tensor);
// Fills a whole tensor of the replica from the host, tensor_elements of floatX. Waits.
void zero_put_weights(Zero *zero, int tensor, const void *host);
// With --local-steps, where outer weights and moments have been loaded: a replica group begins with
// them; or it goes on behind this step, and what is its own is loaded next. Buckets whose turn came
// after met_at (RunState) still have to meet the outer weights: their meetings are set again.
void zero_begin_replica_group(Zero *zero);
void zero_resume_replica_group(Zero *zero, int64_t step, int64_t met_at);
// Page-locked host memory for this rank's part of a checkpoint, and its bytes. NULL without
// --async-save.
void *zero_staging(const Zero *zero, uint64_t *bytes);
// A piece into that memory, beside training. zero_stage only asks for the copy. zero_copy_staged
// begins what was asked for, when the device has work for a while: events that keep a time came
// only with the end of gigabytes of copies recorded before them (dev/bench/NOTES.md, Saves).
// zero_staged waits for all copies.
void zero_stage(Zero *zero, int piece, SliceKind kind, void *pinned);
void zero_copy_staged(Zero *zero);
void zero_staged(Zero *zero);
// Bytes that this rank saves of a checkpoint, and that all ranks save together. whole: (count) the
// parameters of the whole model. Without the optimizer weights alone are saved. From zero_plan on.
uint64_t zero_own_checkpoint_bytes(const Zero *zero, bool optimizer);
uint64_t zero_checkpoint_bytes(const Zero *zero, const Tensor *whole, int count, bool optimizer);
// Whether a save has that kind.
static inline bool zero_saves(const Zero *zero, SliceKind kind, bool optimizer) {
    return zero_keeps(zero, kind) && (optimizer || kind == SLICE_WEIGHT);
}

LLMC_END
