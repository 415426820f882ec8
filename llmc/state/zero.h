// The training state of a data-parallel rank: replicated, or sharded as in ZeRO-1, 2 and 3
// (--data-parallel-sharding-strategy). A rank owns a shard of each bucket, and holds the optimizer
// state of that shard or of whole buckets, and all or part of the gradients and weights. This
// module reduces a bucket's gradients as soon as they are complete, computes the step status, runs
// AdamW and updates all model weights, in bf16 or with SDP4Bit.
//
// Called by train_gpt.c, llmc/model, llmc/run and llmc/checkpoint. zero.c calls the parts: grads.h,
// optimizer.h, weights.h, local_steps.h, stats.h. zero_plan.c plans memory, chooses the stores, and
// starts and frees the parts. slices.c copies state for checkpoints, replicas.c compares replicas.
// Payloads and collectives are in sdp4bit/tlq_hs.h and sdp4bit/qwd.h. The struct is in
// zero_parts.h, for the files of this directory.
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

// Builds the bucket layout and reserves every buffer in the memory plan. Needs no device. tensors:
// (count) of the model, in forward order; copied. Returns NULL with EXIT_USAGE for impossible sizes
// or an invalid SDP4BIT_FAULT.
Zero *zero_plan(const Config *config, const Mesh *mesh, const Tensor *tensors, int count,
                MemoryPlan *memory_plan, Error *err);
// For single-rank programs that only run forward: weights without gradients (zero_grad returns
// NULL) and without optimizer state. Only zero_start_weights_alone (instead of zero_start),
// zero_put_weights, zero_weight, zero_weights_wait and zero_free may follow.
Zero *zero_plan_weights_alone(const Config *config, const Mesh *mesh, const Tensor *tensors, int count,
                              MemoryPlan *memory_plan, Error *err);
void zero_start_weights_alone(Zero *zero, Stream *compute);
// After memory_plan_allocate: uploads tables, creates events, connects the mesh. Collective over
// the mesh. The caller must then fill the weights, and set the master weights with
// zero_init_master_weights or from a checkpoint. lanes must outlive the Zero.
void zero_start(Zero *zero, Device *device, Stream *compute, Lanes *lanes, Timers *timers);
// After the last step, before the memory plan is freed: waits for all work, and for other ranks to
// unmap this rank's memory. Collective over the mesh. No-op unless started.
void zero_stop(Zero *zero);
// zero may be NULL.
void zero_free(Zero *zero);
// Sets the fp32 master weights from the model weights. With --local-steps it also sets the outer
// weights and clears their momentum. In the order of compute.
void zero_init_master_weights(Zero *zero);

// --- accessors -----------------------------------------------------------------------------------

const BucketLayout *zero_layout(const Zero *zero);
// Layout of the optimizer state that a rank holds: zero_layout, or the same buckets unsharded.
const BucketLayout *zero_state_layout(const Zero *zero);
// Payload format of gradients, before or after quantization starts, and of weights.
const GradFormat *zero_grad_format(const Zero *zero, bool quantized);
const WeightFormat *zero_weight_format(const Zero *zero);
// count may be NULL.
const Tensor *zero_tensors(const Zero *zero, int *count);
// Device memory (1): mean loss of this rank's micro-batches. The model adds to it on compute.
float *zero_loss_sum(const Zero *zero);
// Returns true if the ranks of the node should map each other's memory. *why has code 0 if they do,
// else the reason why they don't. After zero_start.
bool zero_node_shares(const Zero *zero, Error *why);
// The whole tensor. Weights may be read after zero_weights_wait, until another layer is waited for;
// gradients may be written after zero_grads_begin.
floatX *zero_weight(const Zero *zero, int tensor);
float *zero_grad(const Zero *zero, int tensor);

// --- the step ------------------------------------------------------------------------------------

// The functions of a step, in call order. Starts step `iteration`, 1-based, and clears the loss.
void zero_step_begins(Zero *zero, int64_t iteration);
// Returns true if the gradients of `unit` are accumulated over the step: the first micro-batch
// overwrites the gradients of matrices and the others add to them; gradients of 1-D tensors are
// always added to, and zero_update clears them. If false (ZeRO-2 and 3), every micro-batch
// overwrites the gradients of matrices, and zero_grads_begin clears the 1-D ones.
bool zero_grads_accumulate(const Zero *zero, int unit);
// Number of reductions of a bucket in a step of `micro_batches`. Each sends the gradient bytes of
// layout_bucket_wire_bytes.
int zero_reductions(const Zero *zero, int bucket, int micro_batches);
// Bytes that this rank sends to other replica groups when the bucket is synchronized; 0 without
// --local-steps.
int64_t zero_exchange_bytes(const Zero *zero, int bucket, const GradFormat *format);
// Makes compute wait until backward may write the unit's gradients. Idempotent until
// zero_reduce_unit.
void zero_grads_begin(Zero *zero, int unit);
// Called when the unit's gradients are complete: in every micro-batch, or only in the last one if
// gradients are accumulated. Starts the bucket's reduction after its last unit. last: the step's
// last micro-batch.
void zero_reduce_unit(Zero *zero, int unit, bool last);
// Turns warm-up on or off within a step: forward and backward passes on synthetic data that launch
// every kernel once. Their reductions do not affect state, counters or logs. Collective over dp.
void zero_warm_up(Zero *zero, bool on);
// Returns true if reductions inside this step's micro-batch loop run quantization kernels for the
// first time: at --gradients-quantization-start-iteration, if gradients are not accumulated.
bool zero_first_quantized_step(const Zero *zero);
// Sets factors for the mean loss and the gradients of the current step; 1 by default. Called before
// zero_update, with the same values on all ranks of mesh_status_group.
void zero_set_factors(Zero *zero, double loss, double gradient);
// Computes the step status, runs AdamW and gathers the weights, bucket by bucket in forward order.
// The learning rate depends on the status of the previous step.
void zero_update(Zero *zero, double lr_if_applied, double lr_if_skipped, double weight_decay);
// Waits for and returns a step status. which: 0 the latest step, 1 the one before.
StepStatus zero_step_status(Zero *zero, int which);
// Sets the state carried from one step status to the next: Adam's counters and the anomaly guard's
// state. zero_start sets the values of a new run.
void zero_set_counters(Zero *zero, const StepStatus *start);

// Makes compute wait for the weights of `unit`; required before they are read. Gathers the bucket
// first if it is sharded and not held already. next: the following unit, whose bucket is
// prefetched; -1: none. backward: for a backward pass; forward of the same unit has run since the
// latest update. Idempotent. Collective over mesh->shards and mesh->shard_rail.
void zero_weights_wait(Zero *zero, int unit, int next, bool backward);
// Waits until the weights that this rank keeps are up to date. Gathers nothing.
void zero_weights_wait_all(Zero *zero);
// Waits for all work of all streams.
void zero_synchronize(Zero *zero);

// Replaces the model weights by the outer weights, which are equal in all replica groups, for
// evaluation; `on` false restores them. Collective over the replica group. No-op without
// --local-steps.
void zero_use_outer(Zero *zero, bool on);

// --- statistics over all ranks -------------------------------------------------------------------

// Returns the norm of the bf16 model weights, as Megatron-LM prints it. Each element counts once.
// Collective over world, synchronizes.
double zero_params_norm(Zero *zero, Peers world);
// Returns the number of zeros in the latest reduced gradient (--log-num-zeros-in-grad). Collective
// over world, synchronizes.
int64_t zero_zeros(Zero *zero, Peers world);
// Returns false on all ranks if one has found a fault since the latest step status: a refused
// update, or a corrupted payload (--verify-wire). The state must not be saved then. Collective over
// world, synchronizes. Error: fault_error of wire.h.
bool zero_sound(Zero *zero, Peers world, Error *err);

// Quantization statistics: see stats_due, stats_report and stats_traffic in stats.h.
bool zero_stats_due(const Zero *zero);
void zero_stats_report(Zero *zero, Log *log, Peers world);
Traffic zero_traffic(const Zero *zero);

// --- copies to and from the host, for checkpoints ------------------------------------------------

// Returns true if this run has state of that kind. Like the next two, valid after zero_plan.
bool zero_keeps(const Zero *zero, SliceKind kind);
// The ranges of that kind that this rank owns, (*count): each element has one owner in the
// data-parallel group.
const Range *zero_ranges(const Zero *zero, SliceKind kind, int *count);
// The number of ranges of that kind that this rank holds; its own come first in zero_ranges.
int zero_held_ranges(const Zero *zero, SliceKind kind);
// Returns true if this rank saves the range. Exactly one of the ranks with the same elements does.
bool zero_saves_range(const Zero *zero, SliceKind kind, const Range *range);
// For kinds that are kept per node: this rank's node, and the number of nodes.
int zero_node(const Zero *zero);
int zero_nodes(const Zero *zero);
// Copies the (hi - lo) elements of a range that this rank holds to the host, or back. Both block
// until done.
void zero_fetch(Zero *zero, int range, SliceKind kind, void *host);
void zero_put(Zero *zero, int range, SliceKind kind, const void *host);
// Keeps this rank's part of a tensor that has been initialized at zero_weight. Called for the
// tensors in order. In the order of compute.
void zero_keep_weights(Zero *zero, int tensor);
// Fills a whole tensor of the model weights from the host: tensor_elements of floatX. Blocks until
// done.
void zero_put_weights(Zero *zero, int tensor, const void *host);
// With --local-steps, called after outer weights and moments have been loaded. begin: the replica
// group starts from the outer weights. resume: it continues after `step`, and its own state is
// loaded next; outer steps after outer_applied_at (RunState) are still applied to the master
// weights.
void zero_begin_replica_group(Zero *zero);
void zero_resume_replica_group(Zero *zero, int64_t step, int64_t outer_applied_at);
// Page-locked host memory for this rank's part of a checkpoint, and its bytes. NULL without
// --async-save.
void *zero_staging(const Zero *zero, uint64_t *bytes);
// Copies a range to that memory during training. zero_stage queues the copy; zero_copy_staged
// starts the queued copies, once the device has enough work, because timer events complete only
// after gigabytes of copies recorded before them (dev/bench/NOTES.md, "Checkpoint saves").
// zero_staged waits for all copies.
void zero_stage(Zero *zero, int range, SliceKind kind, void *pinned);
void zero_copy_staged(Zero *zero);
void zero_staged(Zero *zero);
// Bytes of a checkpoint: this rank's part, and the whole. whole: (count) the parameters of the
// whole model. optimizer false: weights only. Valid after zero_plan.
uint64_t zero_own_checkpoint_bytes(const Zero *zero, bool optimizer);
uint64_t zero_checkpoint_bytes(const Zero *zero, const Tensor *whole, int count, bool optimizer);
// Returns true if a checkpoint contains that kind.
static inline bool zero_saves(const Zero *zero, SliceKind kind, bool optimizer) {
    return zero_keeps(zero, kind) && (optimizer || kind == SLICE_WEIGHT);
}

// --- replicas.c ----------------------------------------------------------------------------------

// Detects and repairs model weights that differ between ranks (silent data corruption). With
// quantized weight differences every rank updates its own copy of the weights, so a copy that
// drifted would otherwise go unnoticed. Position-keyed hashes compare the buckets of data-parallel
// replicas, and tensors replicated in a tensor-parallel group or at both ends of a pipeline. Called
// every --verify-replicas-interval steps and before saves, through llmc/run/resume.c.

// Compares all replicas and repairs those that differ. Collective over world.
//   bucket with a majority             the other replicas copy the majority's version
//   bucket without one, or a tensor    all replicas are set to the master weights, rounded to bf16
// Each repair logs iteration, bucket or tensor, and ranks, and adds 1 to *repairs on every rank.
// Error (EXIT_COMMUNICATION), the same on every rank: differences remain; for tensors this means
// that their master weights differ. With --local-steps the replicas of a node are compared. Outer
// weights are compared over all nodes, and a difference is an error without repair.
bool replicas_verify(Zero *zero, Peers world, Log *log, int64_t *repairs, Error *err);

LLMC_END
