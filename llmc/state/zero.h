// The training state of a data-parallel rank, replicated or sharded as in ZeRO-1, 2 and 3
// (--data-parallel-sharding-strategy). A rank owns one shard of each bucket. Depending on the
// strategy, it holds optimizer state, gradients and weights of this shard only or of whole buckets.
// In a step, this module reduces chunks of each bucket's gradients as soon as they are complete,
// computes the step status, runs AdamW or Muon and updates all model weights, in bf16 or with
// SDP4Bit.
//
// Called by train_gpt.c, llmc/model, llmc/run and llmc/checkpoint. Files:
//   zero.c        runs a step by calling the parts: grads, optimizer, weights, local_steps, stats
//   zero_plan.c   plans memory, chooses the stores, starts and frees the parts
//   slices.c      copies state to and from checkpoints
//   replicas.c    compares and repairs replicas
//   zero_parts.h  struct Zero, only for the files of this directory
// Payloads and collectives are in sdp4bit/tlq_hs.h and sdp4bit/qwd.h.
#pragma once
#include "llmc/base/memory_plan.h"
#include "llmc/comm.h"
#include "llmc/config/config.h"
#include "llmc/log/timers.h"
#include "llmc/state/stats.h"
#include "llmc/state/tensor.h"
#include "sdp4bit/kernels.h"
#include "sdp4bit/lanes.h"
#include "sdp4bit/wire.h"
LLMC_BEGIN

typedef struct Zero Zero;

// --- start and end -------------------------------------------------------------------------------

// Builds the bucket layout and reserves all buffers in the memory plan. Needs no device. tensors:
// (count) parameters of the model in forward order; copied. Returns NULL with EXIT_USAGE for
// impossible sizes or an invalid SDP4BIT_FAULT.
Zero *zero_plan(const Config *config, const Mesh *mesh, const Tensor *tensors, int count,
                MemoryPlan *memory_plan, Error *err);
// For single-rank programs that only run forward: weights without gradients (zero_grad returns
// NULL) and without optimizer state. Only zero_start_weights_alone (instead of zero_start),
// zero_put_weights, zero_weight, zero_weights_wait and zero_free may then be called.
Zero *zero_plan_weights_alone(const Config *config, const Mesh *mesh, const Tensor *tensors, int count,
                              MemoryPlan *memory_plan, Error *err);
void zero_start_weights_alone(Zero *zero, Stream *compute);
// Creates the file of the optimizer state on disk. Call it after memory_plan_allocate and before
// zero_start. Logs a note if the file system or the system makes transfers slower. No-op without
// --optimizer-disk-offload. Error: EXIT_ENVIRONMENT, on the failing rank only. Collective.
bool zero_open_disk(Zero *zero, Peers world, Peers host, Log *log, Error *err);
// Uploads tables, creates events and connects the mesh. Call it after memory_plan_allocate. The
// caller must then set the model weights, and the master weights with zero_init_master_weights or
// from a checkpoint. lanes must outlive the Zero. Collective over the mesh.
void zero_start(Zero *zero, Device *device, Stream *compute, Lanes *lanes, Timers *timers);
// Waits for all work, and for other ranks to unmap this rank's memory. Call it after the last step
// and before the memory plan is freed. Collective over the mesh. No-op unless started.
void zero_stop(Zero *zero);
// zero may be NULL.
void zero_free(Zero *zero);
// Sets the fp32 master weights to the model weights. With --local-steps it also sets the outer
// weights and zeros their momentum. Runs on compute.
void zero_init_master_weights(Zero *zero);

// --- accessors -----------------------------------------------------------------------------------

const BucketLayout *zero_layout(const Zero *zero);
// Returns the layout of the optimizer state that a rank holds: zero_layout, or with no_shard the
// same buckets as a layout for one rank.
const BucketLayout *zero_state_layout(const Zero *zero);
// Return the payload format of gradients (quantized: after
// --gradients-quantization-start-iteration) and of weights.
const GradFormat *zero_grad_format(const Zero *zero, bool quantized);
const WeightFormat *zero_weight_format(const Zero *zero);
// Returns the parameters. count: receives their number; may be NULL.
const Tensor *zero_tensors(const Zero *zero, int *count);
// Returns the status of the latest step in device memory (1). On compute it is valid after
// zero_update.
const StepStatus *zero_status_on_device(const Zero *zero);
// Returns the state of message checksums and injected faults, for messages between pipeline stages.
WireChecks *zero_wire_checks(Zero *zero);
// Returns the loss accumulator in device memory (1), to which the model adds on compute.
float *zero_loss_sum(const Zero *zero);
// Returns true if the ranks of the node should map each other's memory. *why: code 0 if mapping
// succeeded, else why it failed. Call it after zero_start.
bool zero_node_shares(const Zero *zero, Error *why);
// Return the weights or gradients of a whole tensor. Weights are valid between zero_weights_wait
// calls for their unit and the next one. Gradients may be written after zero_grads_begin.
floatX *zero_weight(const Zero *zero, int tensor);
float *zero_grad(const Zero *zero, int tensor);

// --- the step ------------------------------------------------------------------------------------

// The functions of a step, in call order. Starts step `iteration` (from 1) and zeros the loss.
void zero_step_begins(Zero *zero, int64_t iteration);
// Returns true if the gradients of `unit` are accumulated over a step; false with ZeRO-2 and 3.
// This determines how backward must write them:
//   matrices     The first micro-batch overwrites. Later ones add (true) or overwrite (false).
//   1-D tensors  Every micro-batch adds. zero_update (true) or zero_grads_begin (false) zeros them.
bool zero_grads_accumulate(const Zero *zero, int unit);
// Returns how often a bucket is reduced in a step of `micro_batches`. Each reduction sends the
// gradient bytes of layout_bucket_wire_bytes.
int zero_reductions(const Zero *zero, int bucket, int micro_batches);
// Returns the bytes that this rank sends in an outer step of the bucket; 0 without --local-steps.
int64_t zero_exchange_bytes(const Zero *zero, int bucket, const GradFormat *format);
// Makes compute wait until backward may write the unit's gradients. Idempotent.
void zero_grads_begin(Zero *zero, int unit);
// Called when the unit's gradients are complete: in every micro-batch, or only in the last one if
// gradients are accumulated. Starts the reduction of the chunks that it completes. last: this is
// the last micro-batch of the step.
void zero_reduce_unit(Zero *zero, int unit, bool last);
// Turns warm-up on or off within a step. Warm-up passes run on synthetic data to launch every
// kernel once; their reductions do not change state, counters or logs. Collective over dp.
void zero_warm_up(Zero *zero, bool on);
// Returns true if reductions inside this step's micro-batch loop run quantization kernels for the
// first time: at --gradients-quantization-start-iteration, if gradients are not accumulated.
bool zero_first_quantized_step(const Zero *zero);
// Sets the factors by which the mean loss and the gradients of the current step are multiplied; 1
// by default. Call it before zero_update, with the same values on all ranks of mesh_status_group.
void zero_set_factors(Zero *zero, double loss, double gradient);
// Computes the step status; then runs AdamW and gathers the weights, bucket by bucket in forward
// order. The learning rate depends on whether the previous step was applied.
void zero_update(Zero *zero, double lr_if_applied, double lr_if_skipped, double weight_decay);
// Waits for and returns the status of a step. which: 0 for the latest step, 1 for the one before.
StepStatus zero_step_status(Zero *zero, int which);
// Sets the state carried from one step status to the next: Adam's counters and the state of spike
// detection. zero_start sets the values of a new run.
void zero_set_counters(Zero *zero, const StepStatus *start);

// Makes compute wait for the weights of `unit`; required before they are read. Gathers the bucket
// first if it is sharded and not already gathered.
// next: the unit needed next, whose bucket is prefetched; -1: none.
// backward: called by a backward pass, after a forward pass with the same weights.
// Idempotent. Collective over mesh->shards and mesh->shard_rail.
void zero_weights_wait(Zero *zero, int unit, int next, bool backward);
// Makes compute wait until the weights that this rank keeps are up to date. Gathers nothing.
void zero_weights_wait_all(Zero *zero);
// Waits for all work on all streams.
void zero_synchronize(Zero *zero);

// Replaces the model weights by the outer weights for an evaluation (on), or restores them. Outer
// weights are equal in all replica groups. Collective over the replica group. No-op without
// --local-steps.
void zero_use_outer(Zero *zero, bool on);

// --- statistics over all ranks -------------------------------------------------------------------

// Returns the norm of the bf16 model weights, as Megatron-LM logs it. Each element counts once.
// Collective over world; waits for the device.
double zero_params_norm(Zero *zero, Peers world);
// Returns the number of zeros in the latest reduced gradient (--log-num-zeros-in-grad). Collective
// over world; waits for the device.
int64_t zero_zeros(Zero *zero, Peers world);
// Returns false on all ranks if one of them has found a fault since the latest step status: a
// refused update, or a corrupted payload (--verify-wire). Then the state must not be saved.
// Collective over world; waits for the device. Error: see fault_error in wire.h.
bool zero_sound(Zero *zero, Peers world, Error *err);

// Quantization statistics: see stats_due, stats_report and stats_traffic in stats.h.
bool zero_stats_due(const Zero *zero);
void zero_stats_report(Zero *zero, Log *log, Peers world);
Traffic zero_traffic(const Zero *zero);

// --- copies to and from the host, for checkpoints ------------------------------------------------

// Returns true if this run has state of this kind. Valid after zero_plan, like the next two.
bool zero_keeps(const Zero *zero, SliceKind kind);
// Returns the (*count) ranges of this kind that this rank owns. Each element has one owner in dp.
const Range *zero_ranges(const Zero *zero, SliceKind kind, int *count);
// Returns the number of ranges of this kind that this rank holds. They are consecutive in
// zero_ranges, beginning with the ranges it owns.
int zero_held_ranges(const Zero *zero, SliceKind kind);
// Returns true if this rank saves the range. Each element is saved by exactly one rank.
bool zero_saves_range(const Zero *zero, SliceKind kind, const Range *range);
// Return this rank's node and the number of nodes, for kinds of state that differ between nodes.
int zero_node(const Zero *zero);
int zero_nodes(const Zero *zero);
// Copy the elements of a range that this rank holds to the host, or back. Block until done.
void zero_fetch(Zero *zero, int range, SliceKind kind, void *host);
void zero_put(Zero *zero, int range, SliceKind kind, const void *host);
// Stores this rank's part of a tensor that the caller has initialized at zero_weight. Call it for
// all tensors in order. Runs on compute.
void zero_keep_weights(Zero *zero, int tensor);
// Sets the model weights of a tensor. host: (tensor_elements) floatX. Blocks until done.
void zero_put_weights(Zero *zero, int tensor, const void *host);
// Call one of these with --local-steps, after outer weights and moments have been loaded.
// zero_begin_replica_group starts the replica group from the outer weights.
// zero_resume_replica_group continues it after `step`; the caller then loads its own state. Outer
// steps later than outer_applied_at (RunState) will still be applied to the master weights.
void zero_begin_replica_group(Zero *zero);
void zero_resume_replica_group(Zero *zero, int64_t step, int64_t outer_applied_at);
// Returns host memory for this rank's part of a checkpoint; NULL without --async-save.
void *zero_staging(const Zero *zero, uint64_t *bytes);
// Copy ranges to this memory during training. zero_stage queues a copy, zero_copy_staged starts the
// queued copies, and zero_staged waits for all copies. Copies should start when the device has
// enough other work, because timer events recorded after gigabytes of copies complete only after
// them (dev/bench/NOTES.md, "Checkpoint saves").
void zero_stage(Zero *zero, int range, SliceKind kind, void *pinned);
void zero_copy_staged(Zero *zero);
void zero_staged(Zero *zero);
// Return the bytes of this rank's part of a checkpoint, and of the whole checkpoint. whole: (count)
// parameters of the whole model. optimizer: include optimizer state. May be called after zero_plan.
uint64_t zero_own_checkpoint_bytes(const Zero *zero, bool optimizer);
uint64_t zero_checkpoint_bytes(const Zero *zero, const Tensor *whole, int count, bool optimizer);
// Returns true if a checkpoint contains this kind of state.
static inline bool zero_saves(const Zero *zero, SliceKind kind, bool optimizer) {
    return zero_keeps(zero, kind) && (optimizer || kind == SLICE_WEIGHT);
}

// --- replicas.c ----------------------------------------------------------------------------------

// Detects and repairs model weights that differ between ranks because of silent data corruption.
// With quantized weight differences every rank updates its own copy of the weights, so a corrupted
// copy would otherwise stay unnoticed. Hashes are compared for the buckets of data-parallel
// replicas, and for tensors replicated in a tensor-parallel group or at both ends of a pipeline.
// llmc/run/resume.c calls it every --verify-replicas-interval steps and before saves.

// Compares all replicas and repairs those that differ. Collective over world.
//   bucket, most replicas equal     the other replicas copy the weights of the majority
//   bucket without a majority       all replicas are set to the master weights, rounded to bf16
//   replicated tensor               all copies are set to the master weights, rounded to bf16
// Each repair logs iteration, bucket or tensor, and ranks, and adds 1 to *repairs on every rank.
// With --local-steps the replicas within a node are compared and repaired; outer weights are
// compared over all nodes, and a difference is an error.
// Error on all ranks (EXIT_COMMUNICATION): replicas still differ after the repair. For tensors this
// means that their master weights differ.
bool replicas_verify(Zero *zero, Peers world, Log *log, int64_t *repairs, Error *err);

LLMC_END
