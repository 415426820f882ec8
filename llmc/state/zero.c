// Runs a training step (see zero.h) by calling the parts in order: reduce the gradients of each
// bucket when they are complete, compute the step status, run AdamW, all-gather the weights.
// README.md in this directory lists streams, events, and the accesses to each buffer.
#include "llmc/state/zero.h"
#include "llmc/state/zero_parts.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>

#include "llmc/ranks/peers.h"

// --- gradients and weights of a layer ------------------------------------------------------------

float *zero_grad(const Zero *zero, int tensor) { return grads_tensor(&zero->base, &zero->grads, tensor); }
floatX *zero_weight(const Zero *zero, int tensor) {
    return weights_tensor(&zero->base, &zero->weights, tensor);
}
void zero_keep_weights(Zero *zero, int tensor) { weights_keep_tensor(&zero->base, &zero->weights, tensor); }
void zero_weights_wait(Zero *zero, int unit, int next, bool backward) {
    assert(unit >= 0 && unit < zero->base.layout.units && next >= -1 && next < zero->base.layout.units);
    weights_wait(&zero->base, &zero->weights, unit, next, backward);
}
void zero_weights_wait_all(Zero *zero) { weights_wait_all(&zero->base, &zero->weights); }
void zero_grads_begin(Zero *zero, int unit) {
    assert(unit >= 0 && unit < zero->base.layout.units);
    grads_begin(&zero->base, &zero->grads, unit);
}

bool zero_grads_accumulate(const Zero *zero, int unit) {
    assert(unit >= 0 && unit < zero->base.layout.units);
    return zero->grads.bucket[zero->base.layout.unit_bucket[unit]].store->accumulates;
}

int zero_reductions(const Zero *zero, int bucket, int micro_batches) {
    assert(bucket >= 0 && bucket < zero->base.layout.buckets && micro_batches >= 0);
    return zero->grads.bucket[bucket].store->accumulates ? 1 : micro_batches;
}

bool zero_first_quantized_step(const Zero *zero) {
    const Base *base = &zero->base;
    return grads_use_slots(base, &zero->grads) &&
           base_grad_format(base, base->step) != base_grad_format(base, base->step - 1);
}

void zero_warm_up(Zero *zero, bool on) {
    zero->grads.warming_up = on;
    grads_new_step(&zero->base, &zero->grads);
    zero->wire_checks.exchange = 0;
}

static TlqStep tlq_step(Zero *zero, int b) {
    const Base *base = &zero->base;
    TlqStep step = {0};
    step.layout = &base->layout;
    step.mesh = base->mesh;
    step.grad_format = *base_grad_format(base, base->step);
    step.workspace = zero->tlq;
    step.checks = base->checks;
    step.segments = base->segments;
    step.seed = (uint32_t)base->config->seed;
    step.step = (uint32_t)base->step;
    step.micro_batch = zero->grads.bucket[b].reductions;
    step.add = step.micro_batch > 0;
    feedback_step(base, &zero->feedback, b, zero->grads.warming_up, &step);
    return step;
}

static void count_zeros(Zero *zero, int b) {
    const Base *base = &zero->base;
    for (int i = 0; i < base->range_count; i++) {
        const Range *range = &base->ranges[i];
        if (range->bucket != b || !base->tensors[range->tensor].counted) continue;
        kernel_count_zeros(base->lanes->last, zero->zeros,
                           zero->grads.bucket[b].store->of_range(base, &zero->grads, range),
                           range->hi - range->lo);
    }
}

// Reduces chunks of bucket b. The bucket's first call begins with the last chunk, and its last call
// ends with chunk 0. last: the last reduction of the step, which completes its gradient.
static void reduce_chunks(Zero *zero, int b, ChunkRange chunks, bool last) {
    const Base *base = &zero->base;
    Grads *grads = &zero->grads;
    const OptimizerStore *store = zero->optimizer.store;
    TlqStep step = tlq_step(zero, b);
    float *matrix_sums = base->partial_sums + base->partial_start[b];
    float *tail_sums = matrix_sums + base->layout.bucket[b].matrix_per_rank / HADAMARD_ORDER;
    float *full = grads_full(base, grads, b);
    GradShard own = grads_shard(base, grads, b);
    const GradStore *buffers = grads->bucket[b].store;
    bool slots = !buffers->accumulates, begins = chunks.end == grads_chunks(base, b);
    if (begins && !grads->warming_up) stats_before_reduction(base, &zero->stats, &step, b, full);
    if (begins && store->before_reduction)
        store->before_reduction(base, &zero->optimizer, b, own, slots, step.add);
    tlq_reduce_bucket(&step, b, chunks, full, own, matrix_sums, tail_sums, base->lanes);
    if (chunks.first > 0) return;
    grads->bucket[b].reductions++;
    if (last) {
        stats_after_reduction(base, &zero->stats, b, own);
        tlq_sum_squares(&step, b, own, matrix_sums, tail_sums, zero->piece_sums + 2 * b, base->lanes);
        if (base->config->log_num_zeros_in_grad) count_zeros(zero, b);
    }
    if (buffers->gather) buffers->gather(base, grads, &step, b, zero->weights.gather[0]);
    if (!store->after_reduction) return;
    const floatX *weights = weights_own(base, &zero->weights, b).matrix;
    store->after_reduction(base, &zero->optimizer, b, grads_held(base, grads, b), slots, weights, last);
}

void zero_reduce_unit(Zero *zero, int unit, bool last) {
    const Base *base = &zero->base;
    assert(unit >= 0 && unit < base->layout.units);
    int b = base->layout.unit_bucket[unit];
    // Statistics read the gradients of the whole bucket, part of which the reduction overwrites.
    ChunkRange chunks = grads_complete(base, &zero->grads, unit, stats_due(base));
    if (chunks.first == chunks.end) return;
    // The interval starts when the chunks are ready, or when the previous reduction ends.
    // Intervals on a stream do not overlap, so no time is counted twice.
    timer_start(base->timers, TIMER_ALL_GRADS_SYNC, base->lanes->last);
    reduce_chunks(zero, b, chunks, last);
    timer_stop(base->timers, TIMER_ALL_GRADS_SYNC, base->lanes->last);
    grads_reduced(base, &zero->grads, b, chunks);
}

// --- the step ------------------------------------------------------------------------------------

void zero_set_counters(Zero *zero, const StepStatus *start) {
    StepStatus control = *start;
    control.applied = 1;
    copy_to_device(zero->base.compute, zero->base.control, &control, sizeof control);
}

void zero_step_begins(Zero *zero, int64_t iteration) {
    assert(iteration >= 1);
    zero->base.step = zero->wire_checks.step = iteration;
    zero->wire_checks.exchange = 0;
    grads_new_step(&zero->base, &zero->grads);
    if (zero->base.config->log_num_zeros_in_grad)
        set_zero(zero->base.lanes->last, zero->zeros, sizeof(int64_t));
    // Discard weights gathered by an evaluation, so that every step issues the same gathers.
    weights_invalidate(&zero->base, &zero->weights);
    set_zero(zero->base.compute, zero->loss_sum, sizeof(float));  // compute has waited for the status
    zero_set_factors(zero, 1.0, 1.0);
}

void zero_set_factors(Zero *zero, double loss, double gradient) {
    zero->loss_factor = loss;
    zero->gradient_factor = gradient;
}

// Computes the step status. All ranks of the replica group add the same records in the same order,
// so they get the same status.
static void compute_norm_and_status(Zero *zero, double lr_if_applied, double lr_if_skipped) {
    const Base *base = &zero->base;
    const Config *config = base->config;
    Stream *last = base->lanes->last;
    const Group *group = mesh_status_group(base->mesh);
    int rank = group->rank;
    kernel_step_record(last, zero->records + rank, zero->piece_sums, 2 * base->layout.buckets, zero->loss_sum,
                       zero->wire_checks.fault);
    comm_all_gather(group, zero->records, sizeof(StepRecord), last);
    StatusInputs j = {0};
    j.records = zero->records;
    j.ranks = group->size;
    j.losses = group->size / base->mesh->pp.size;
    j.clip_grad = (float)config->clip_grad;
    j.beta1 = (float)config->adam_beta1;
    j.beta2 = (float)config->adam_beta2;
    j.lr_if_applied = (float)lr_if_applied;
    j.lr_if_skipped = (float)lr_if_skipped;
    j.skip_non_finite = config->check_for_nan_in_loss_and_grad;
    j.skip_spikes = config->on_spike == ON_SPIKE_SKIP;
    j.loss_spike_factor = (float)config->loss_spike_factor;
    j.norm_spike_factor = (float)config->norm_spike_factor;
    j.loss_factor = zero->loss_factor;
    j.gradient_factor = zero->gradient_factor;
    kernel_step_status(last, base->control, &j);
}

static QwdStep qwd_step(Zero *zero, double weight_decay) {
    const Base *base = &zero->base;
    QwdStep step = {0};
    step.layout = base->state;
    step.mesh = base->mesh;
    step.weight_format = base->weight_format;
    step.checks = &zero->wire_checks;
    step.segments = base->segments;
    step.control = base->control;
    step.beta1 = (float)base->config->adam_beta1;
    step.beta2 = (float)base->config->adam_beta2;
    step.epsilon = (float)base->config->adam_eps;
    step.weight_decay = (float)weight_decay;
    step.seed = (uint32_t)base->config->seed;
    step.step = (uint32_t)base->step;
    step.host = zero->optimizer.store->on_host ? &zero->optimizer.host : NULL;
    step.lossless = zero->lossless.coded ? &zero->lossless : NULL;
    return step;
}

// Runs AdamW or Muon on this rank's shard of bucket b, and codes its weights.
static void update_bucket(Zero *zero, const QwdStep *step, int b) {
    const Base *base = &zero->base;
    Stream *last = base->lanes->last;
    timer_start(base->timers, TIMER_OPTIMIZER_INNER_STEP, last);
    BucketState state = zero->optimizer.store->state(base, &zero->optimizer, b,
                                                     grads_held(base, &zero->grads, b),
                                                     weights_own(base, &zero->weights, b));
    GatherBuffer buffer = weights_buffer(base, &zero->weights, b);
    if (!step->host) muon_update(base, &zero->muon, b, &state, step->weight_decay);
    qwd_update_bucket(step, b, &state, &buffer, base->lanes);
    grads_consumed(base, &zero->grads, b);
    timer_stop(base->timers, TIMER_OPTIMIZER_INNER_STEP, last);
}

// All-gathers the payloads of bucket b, applies them to the model weights that this rank holds, and
// starts the bucket's outer step.
static void gather_bucket(Zero *zero, const QwdStep *step, int b) {
    const Base *base = &zero->base;
    Stream *middle = base->lanes->middle;
    int64_t elements;
    floatX *weights = weights_kept(base, &zero->weights, b, &elements);
    GatherBuffer buffer = weights_buffer(base, &zero->weights, b);
    timer_start(base->timers, TIMER_EXPOSED_WEIGHTS, base->compute);
    // Only for the timer, which should start when the shard is ready; events order the hops.
    lanes_after(base->lanes, middle, base->lanes->last);
    timer_start(base->timers, TIMER_PARAMS_ALL_GATHER, middle);
    qwd_gather_bucket(step, b, &buffer, base->lanes);
    qwd_apply_bucket(step, b, weights, &buffer, base->lanes);
    timer_stop(base->timers, TIMER_PARAMS_ALL_GATHER, middle);
    fault_flip(fault_due(&base->faults, FAULT_REPLICA, base->step, b), middle, weights,
               elements * (int64_t)sizeof(floatX));
    weights_updated(&zero->weights, b, middle);
    if (base->config->no_overlap) lanes_synchronize(base->lanes);
    timer_stop(base->timers, TIMER_EXPOSED_WEIGHTS, base->compute);
    outer_sync(base, &zero->outer, &zero->optimizer, b);
}

// Makes compute wait for the step status and copy it to the host. The wait counts as exposed
// communication of gradients. The copy is on compute, so that it does not delay AdamW on `last`.
static void send_status(Zero *zero, int slot) {
    const Base *base = &zero->base;
    timer_start(base->timers, TIMER_EXPOSED_GRADIENTS, base->compute);
    stream_wait(base->compute, zero->status_known);
    timer_stop(base->timers, TIMER_EXPOSED_GRADIENTS, base->compute);
    zero->optimizer.store->copy_status(base, &zero->optimizer.landed[slot]);
    event_record(zero->landing[slot], base->compute);
}

// Computes the step status on `last`, after all work of the step on compute.
static void compute_status(Zero *zero, double lr_if_applied, double lr_if_skipped) {
    const Base *base = &zero->base;
    Stream *last = base->lanes->last;
    event_record(zero->computed, base->compute);
    stream_wait(last, zero->computed);
    timer_start(base->timers, TIMER_OPTIMIZER_CLIP_MAIN_GRAD, last);
    compute_norm_and_status(zero, lr_if_applied, lr_if_skipped);
    timer_stop(base->timers, TIMER_OPTIMIZER_CLIP_MAIN_GRAD, last);
    event_record(zero->status_known, last);
    send_status(zero, (int)(base->step % 2));
}

// Makes the update wait for the copies of an asynchronous save, because they read the same memory.
static void wait_for_copies(Zero *zero) {
    Slices *s = &zero->slices;
    Stream *last = zero->base.lanes->last;
    zero_copy_staged(zero);
    if (s->copying && s->stream != last) stream_wait(last, s->staged);
    s->copying = false;
}

void zero_update(Zero *zero, double lr_if_applied, double lr_if_skipped, double weight_decay) {
    const Base *base = &zero->base;
    Weights *weights = &zero->weights;
    Stream *last = base->lanes->last;
    int buckets = base->layout.buckets;
    weights_invalidate(base, weights);
    timer_start(base->timers, TIMER_OPTIMIZER, last);
    compute_status(zero, lr_if_applied, lr_if_skipped);
    wait_for_copies(zero);
    if (zero->optimizer.store->status_known) zero->optimizer.store->status_known(base, &zero->optimizer);
    QwdStep step = qwd_step(zero, weight_decay);
    // In forward order, because the next forward pass begins with the first layers.
    for (int b = 0; b < buckets; b++) {
        outer_apply(base, &zero->outer, &zero->optimizer, b, base->step - 1);
        update_bucket(zero, &step, b);
        stats_after_update(base, &zero->stats, &zero->optimizer, weights, b);
        if (!step.lossless) gather_bucket(zero, &step, b);
    }
    muon_updated(base, &zero->muon);
    qwd_agree_lengths(&step, base->lanes);
    for (int b = 0; step.lossless && b < buckets; b++) gather_bucket(zero, &step, b);
    if (zero->optimizer.store->updated) zero->optimizer.store->updated(base, &zero->optimizer);
    // Later work on `last` must see the new weights. The wait costs no time, because the next work
    // on `last` is the last stage of the next step's first reduction.
    if (base->lanes->apart) stream_wait(last, weights->bucket[buckets - 1].done);
    timer_stop(base->timers, TIMER_OPTIMIZER, last);
    if (weights->message && !weights->messages_valid)
        weights->messages_valid = zero_step_status(zero, 0).applied;
}

StepStatus zero_step_status(Zero *zero, int which) {
    assert(which == 0 || which == 1);
    int slot = (int)((zero->base.step - which) % 2);
    event_synchronize(zero->landing[slot]);
    return zero->optimizer.landed[slot];
}

void zero_synchronize(Zero *zero) {
    Base *base = &zero->base;
    if (!base->device) return;  // never started
    zero_weights_wait_all(zero);
    lanes_synchronize(base->lanes);
    if (zero->optimizer.host.stream) stream_synchronize(zero->optimizer.host.stream);
    if (zero->weights.stream) stream_synchronize(zero->weights.stream);
    if (zero->outer.stream) stream_synchronize(zero->outer.stream);
    stream_synchronize(zero->slices.stream);
    stream_synchronize(base->compute);
}

// --- local steps ---------------------------------------------------------------------------------

void zero_use_outer(Zero *zero, bool on) {
    if (zero->base.config->local_steps == 1 || on == zero->outer.in_place) return;
    zero_synchronize(zero);
    outer_use(&zero->base, &zero->outer, &zero->optimizer, &zero->weights, on);
}

void zero_begin_replica_group(Zero *zero) { outer_begin_group(&zero->base, &zero->outer, &zero->optimizer); }

void zero_resume_replica_group(Zero *zero, int64_t step, int64_t outer_applied_at) {
    assert(step >= 0);
    zero->base.step = step;
    outer_resume_group(&zero->base, &zero->outer, step, outer_applied_at);
}

int64_t zero_exchange_bytes(const Zero *zero, int bucket, const GradFormat *format) {
    assert(bucket >= 0 && bucket < zero->base.layout.buckets);
    return zero->base.config->local_steps > 1 ? outer_wire_bytes(&zero->outer.layout, bucket, format) : 0;
}

// --- quantization statistics ---------------------------------------------------------------------

bool zero_stats_due(const Zero *zero) { return stats_due(&zero->base); }
Traffic zero_traffic(const Zero *zero) { return stats_traffic(&zero->base, &zero->stats); }
void zero_stats_report(Zero *zero, Log *log, Peers world) {
    stats_report(&zero->base, &zero->stats, &zero->optimizer, &zero->weights, log, world);
}

// --- statistics over all ranks -------------------------------------------------------------------

double zero_params_norm(Zero *zero, Peers world) {
    const Base *base = &zero->base;
    double squares = 0.0;
    zero_weights_wait_all(zero);
    for (int i = 0; i < base->range_count; i++) {
        const Range *range = &base->ranges[i];
        int64_t n = range->hi - range->lo;
        float sum = 0.0f;
        if (!base->tensors[range->tensor].counted) continue;
        const floatX *weights = weights_of_range(base, &zero->weights, range);
        kernel_square_weights(base->compute, base->partial_sums, weights, n);
        kernel_tree_sum(base->compute, zero->piece_sums, base->partial_sums, ceil_div64(n, HADAMARD_ORDER));
        copy_to_host(base->compute, &sum, zero->piece_sums, sizeof sum);
        stream_synchronize(base->compute);
        squares += sum;
    }
    peers_all_reduce(world, &squares, 1, MPI_DOUBLE, MPI_SUM);
    return sqrt(squares);
}

int64_t zero_zeros(Zero *zero, Peers world) {
    int64_t zeros = 0;
    zero_weights_wait_all(zero);
    copy_to_host(zero->base.compute, &zeros, zero->zeros, sizeof zeros);
    stream_synchronize(zero->base.compute);
    peers_all_reduce(world, &zeros, 1, MPI_INT64_T, MPI_SUM);
    return zeros;
}

bool zero_sound(Zero *zero, Peers world, Error *err) {
    StepStatus found;
    int ranks = zero->base.mesh->world.size;
    StepRecord own = {0};
    StepRecord *records = xcalloc((size_t)ranks, sizeof *records, "the faults of all ranks");
    weights_checked(&zero->base, &zero->weights);
    outer_finish(&zero->base, &zero->outer, &zero->optimizer);
    copy_to_host(zero->base.lanes->last, &own.fault, zero->wire_checks.fault, sizeof(uint64_t));
    stream_synchronize(zero->base.lanes->last);
    peers_all_gather(world, &own, records, (int)sizeof own, MPI_BYTE);
    bool sound = !status_first_fault(&found, records, ranks);
    free(records);
    return sound || fault_error(found.fault, found.fault_rank, zero->base.mesh, err);
}
