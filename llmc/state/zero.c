// ZeRO over buckets: see zero.h. Start and end, then the step in its order: begin, judge, update,
// gather, wait. zero_plan.c comes before; zero_grads.c makes the reductions.
#include "llmc/state/zero_inside.h"

#include <math.h>
#include <stdlib.h>

#include "llmc/ranks/peers.h"

// --- start and end -------------------------------------------------------------------------------

void zero_set_counters(Zero *zero, const StepControl *start) {
    StepControl control = *start;
    control.applied = 1;
    copy_to_device(zero->compute, zero->control, &control, sizeof control);
}

// What leaves this rank inside its node may be fetched by the others.
static void share_messages(Zero *zero) {
    const TlqWorkspace *probe = &zero->probe.workspace;
    CommPiece piece[2 + LANE_SLOTS] = {{zero->tlq.send1, zero->tlq.send1_bytes},
                                       {probe->send1, probe->send1_bytes}};
    for (int slot = 0; slot < LANE_SLOTS; slot++)
        piece[2 + slot] = (CommPiece){zero->gather[slot], zero->gather_bytes[slot]};
    comm_share(&zero->mesh->node, zero->node_flags, piece, 2 + LANE_SLOTS, &zero->not_shared);
}

void zero_start(Zero *zero, Device *device, Stream *compute, Lanes *lanes, Timers *timers) {
    zero->device = device;
    zero->compute = compute;
    zero->lanes = lanes;
    bool copies_apart = lanes->apart && zero->staging;
    zero->copies = copies_apart ? stream_create(device, "checkpoint copies") : lanes->last;
    zero->timers = timers;
    for (int b = 0; b < zero->plan.buckets; b++) {
        zero->ready[b] = event_create(device);
        zero->done[b] = event_create(device);
    }
    zero->computed = event_create(device);
    zero->judged = event_create(device);
    zero->staged = event_create(device);
    zero_grads_start(zero);
    for (int i = 0; i < 2; i++) zero->landing[i] = event_create(device);
    offload_start(zero);
    local_start(zero);
    copy_to_device(compute, zero->segments, zero->plan.segments,
                   (size_t)zero->plan.segments_total * sizeof(Segment));
    StepControl start = {0};
    start.beta1_power = start.beta2_power = 1.0;
    zero_set_counters(zero, &start);
    zero_start_weights(zero);
    stream_synchronize(compute);
    if (zero->node_flags) share_messages(zero);
    _Static_assert(sizeof(StepRecord) >= COMM_TRIAL_BYTES, "records serve as memory for the first messages");
    comm_connect(zero->mesh, zero->records);
    zero->lossless.bytes = (uint32_t *)(void *)(zero->gather[0] + zero->lengths_start);
}

void zero_stop(Zero *zero) {
    if (!zero || !zero->device) return;
    zero_synchronize(zero);
    comm_unshare(&zero->mesh->node);
}

void zero_free(Zero *zero) {
    if (!zero) return;
    for (int b = 0; zero->device && b < zero->plan.buckets; b++) {
        event_destroy(zero->ready[b]);
        event_destroy(zero->done[b]);
    }
    if (zero->device) {
        event_destroy(zero->computed);
        event_destroy(zero->judged);
        event_destroy(zero->staged);
        for (int i = 0; i < 2; i++) event_destroy(zero->landing[i]);
        offload_free(zero);
        if (zero->copies != zero->lanes->last) stream_destroy(zero->copies);
    }
    local_free(zero);
    zero_free_weights(zero);
    zero_grads_free(zero);
    free(zero->lossless.coded_start);
    free(zero->lossless.landed);
    free(zero->lossless.slot);
    feedback_free(zero);
    free(zero->leaf_start);
    free(zero->units_missing);
    free(zero->pending);
    free(zero->ready);
    free(zero->done);
    if (!zero_offloads(zero)) free(zero->landed);
    free(zero->pieces);
    free(zero->to_copy);
    probe_free(&zero->probe);
    plan_free(&zero->plan);
    free(zero->tensors);
    free(zero);
}

const Plan *zero_layout(const Zero *zero) { return &zero->plan; }
const GradWire *zero_grad_wire(const Zero *zero, bool quantized) {
    return quantized ? &zero->grad_wire : &zero->plain_grad_wire;
}
const WeightWire *zero_weight_wire(const Zero *zero) { return &zero->weight_wire; }
float *zero_loss_sum(const Zero *zero) { return zero->loss_sum; }

const Tensor *zero_tensors(const Zero *zero, int *count) {
    if (count) *count = zero->plan.tensors;
    return zero->tensors;
}

bool zero_node_shares(const Zero *zero, Error *why) {
    *why = zero->not_shared;
    return zero->node_flags != NULL;
}

void zero_masters_from_weights(Zero *zero) {
    for (int i = 0; i < zero->piece_count; i++) {
        const Piece *piece = &zero->pieces[i];
        float *masters = zero->master + piece->state_at;
        const floatX *weights = zero_piece_weights(zero, piece);
        if (zero_offloads(zero)) offload_widen(zero, masters, weights, piece->hi - piece->lo);
        else kernel_widen(zero->compute, masters, weights, piece->hi - piece->lo);
    }
    local_from_masters(zero);
}

// --- the step ------------------------------------------------------------------------------------
//
// The streams, and what orders them. test/unit/state/test_overlap.c checks this list on a recording
// of several steps.
//
// Compute runs forward and backward. The lanes (sdp4bit/lanes.h) run what travels. `last` also runs
// the verdict, AdamW, and whatever looks at the shard: probes, counts, a checkpoint's copies. With
// one rank, or under --no-overlap, all lanes and copies are `last`. After its first message each
// communicator is used on one stream: the node's on node, the rail's on rail, the world's on
// `last`, tensor parallelism's beside compute (tensor_parallel.h), a link's on its own (comm.h).
// Where weights are shared out `layers` gathers them for the passes (zero_weights.c).
// With --optimizer-cpu-offload `host` runs AdamW in the place of `last` (zero_offload.c).
//
// Events, from who records them to who waits:
// ready[b]    compute -> first, last      Bucket b's gradients are complete.
// chunks      first -> node -> middle -> rail -> last, and back once a slot of the buffers has
//             served: tlq_hs.c.
// computed    compute -> last             The loss is complete. Each layer has run, so compute has
//                                         waited for every done[b] of the step before.
// judged      last -> compute             The step is over: the verdict may go to the host, and
//                                         the loss may be cleared.
// shards      last -> rail -> node -> middle, and back once a gather buffer has served: qwd.c.
// done[b]     middle -> compute, layers   A bucket's weights are new and its gradients have
//                                         served. Its layers may run, or be gathered.
// used        compute -> layers           Shared weights alone, as the next one: the layers that
//                                         used the slot before have run. What loads and repairs
//                                         have written on compute is there.
//             layers -> last              zero_sound sees what the gathers' checks have found.
// gathered[s] layers -> compute           The slot holds its bucket, whose layers may run.
// final done  middle -> last              The end of zero_update. What follows on `last` sees the
//                                         new replica and every finding of the wire's checks.
// slot read   first -> compute            A micro-batch's gradients of a bucket that does not stay
//                                         (zero_grads.c) have been quantized: backward may write
//                                         the slot.
// joint       last -> copies, middle      lanes_after. Behind it begin: a checkpoint's copies;
//                                         middle's timer of a gather.
// reduced     last -> host                Offload alone, as the next four: a bucket's windows may
//                                         go down to the host.
// window_free host -> last                A bucket's own window has gone down, or holds the sum of
//                                         earlier micro-batches: the next sum may write it.
// judged for the host   last -> host      The verdict too, and AdamW may begin.
// made        host -> last                A bucket's message is there, and may go up.
// sent        last -> host                It has gone up: the slot's next may be made.
// staged      copies -> last              The shard and the replica have been read: AdamW of the
//                                         next step may write.
//
// Every memory, with who writes it and who reads it:
// gradients   Compute's backward writes them after done[b]. Before ready[b], streams that compute
//             waits for add up LayerNorms' (sequence parallelism) and hand over the words' (links).
//             First reads them after ready[b]: for chunk k the windows of chunk k of all ranks.
//             So does a probe's exact reduction before, and histograms read them on `last`.
//             `last` writes the own window of chunk k (the final sum) once that chunk has passed
//             first, and no other chunk reads it. The tail is chunk 0's. AdamW, the zero count and
//             the clearing of the tail follow on `last`, before the shard is handed on, so before
//             done[b].
// residual    Of error feedback. Middle alone adds to it and takes from it, before a chunk crosses
//             between nodes; first where every node has one rank. So compute may read it after the
//             verdict. It is copied for a checkpoint at once: the next reduction writes it.
// slots       Of buckets that do not stay. Compute writes one after its slot was read, first reads
//             it after ready[b], likewise. The own windows of these buckets are elsewhere: `last`
//             alone writes and reads them.
// weights     Compute reads them after done[b], AdamW on `last` after computed, probes on `last`
//             after the final done, copies before staged. Middle alone writes them, once `last` has
//             handed on the shard: after computed, the probes and staged. With one rank `last`
//             writes them. Where they are shared out this is so of what a rank keeps. Layers reads
//             that after done[b]. Compute waits for every gather, so the next write comes after.
// layers      The slots and messages of gathers. Layers writes them after used. Compute reads the
//             slots after gathered[s].
// gather[s]   `last` writes it after the slot's latest apply, then rail and node. Middle reads it.
// messages    First (middle) fills slot s, after the slot's latest sum on middle (`last`). The own
//             message goes straight into the receive buffer.
// master weights, moments, leaves, piece_sums, records: `last`. Norms, repairs and saves use them
// on
//             compute, after every done[b] and before the next computed or ready.
//             With offload host writes master weights and moments, and copies read them. Host also writes
//             what it needs of a bucket in host memory, and reads it; last reads its messages.
// control     The verdict writes it, on `last` after computed. AdamW reads it on `last`, the
//             applies on middle before done[b], compute after judged. With error feedback the next
//             step's first reductions read it on middle (first), after ready[b].
// loss_sum    Compute. The verdict reads it between computed and judged.
// fault       Checks on middle and `last`, and AdamW on `last`, write it, atomically. The record
//             reads it on `last`: after the gradients' checks, which come before the chunks' final
//             sums, and after the final done of the step before. The checks' sums have one row per
//             hop, whose checks are on one stream.
// staging     Copies write it. The host reads it after `staged`.
//
// The exposed time is what compute waits for judged and done[b]. On CPU ranks all streams are the
// calling thread, so the work itself is what it waits for.

Exposed zero_exposed_of(const double *ms, int world) {
    const double *gradients = ms, *weights = ms + world;
    int least = 0, most = 0;
    for (int rank = 1; rank < world; rank++) {
        double both = gradients[rank] + weights[rank];
        if (both < gradients[least] + weights[least]) least = rank;
        if (both > gradients[most] + weights[most]) most = rank;
    }
    return (Exposed){gradients[least], weights[least], gradients[most] + weights[most]};
}

Exposed zero_take_exposed(Zero *zero, double steps, Peers peers) {
    static const Timer parts[] = {TIMER_EXPOSED_GRADIENTS, TIMER_EXPOSED_WEIGHTS};
    TimerStats stats[2];
    int world = 1;
    MPI_Comm_size(peers.comm, &world);
    double *ms = (double *)xmalloc(2 * (size_t)world * sizeof *ms, "times that ranks waited");  // (2, world)
    timers_collect(zero->timers, parts, 2, steps, peers, stats, ms);
    Exposed e = zero_exposed_of(ms, world);
    free(ms);
    return e;
}

void zero_step_begins(Zero *zero, int64_t iteration) {
    zero->step = zero->wire_checks.step = iteration;
    zero->wire_checks.exchange = 0;
    zero_grads_new_step(zero);
    if (zero->config->log_num_zeros_in_grad) set_zero(zero->lanes->last, zero->zeros, sizeof(int64_t));
    zero_weights_change(zero);  // an evaluation may have left some: every step gathers alike
    set_zero(zero->compute, zero->loss_sum, sizeof(float));  // behind the verdict, which has read it
}

// Every rank adds the same records in the same order, so all reach the same verdict. A replica
// group judges by itself.
static void judge(Zero *zero, double lr_if_applied, double lr_if_skipped) {
    const Group *judges = mesh_status_group(zero->mesh);
    int rank = judges->rank;
    kernel_step_record(zero->lanes->last, zero->records + rank, zero->piece_sums, 2 * zero->plan.buckets,
                       zero->loss_sum, zero->wire_checks.fault);
    comm_all_gather(judges, zero->records, sizeof(StepRecord), zero->lanes->last);
    Judge j = {0};
    j.records = zero->records;
    j.ranks = judges->size;
    j.losses = judges->size / zero->mesh->pp.size;
    j.clip_grad = (float)zero->config->clip_grad;
    j.beta1 = (float)zero->config->adam_beta1;
    j.beta2 = (float)zero->config->adam_beta2;
    j.lr_if_applied = (float)lr_if_applied;
    j.lr_if_skipped = (float)lr_if_skipped;
    j.skip_non_finite = zero->config->check_for_nan_in_loss_and_grad;
    j.skip_spikes = zero->config->on_spike == ON_SPIKE_SKIP;
    j.loss_spike_factor = (float)zero->config->loss_spike_factor;
    j.norm_spike_factor = (float)zero->config->norm_spike_factor;
    kernel_judge(zero->lanes->last, zero->control, &j);
}

static QwdStep qwd_step(Zero *zero, double weight_decay) {
    QwdStep step = {0};
    step.plan = &zero->plan;
    step.mesh = zero->mesh;
    step.weight_wire = zero->weight_wire;
    step.checks = &zero->wire_checks;
    step.segments = zero->segments;
    step.control = zero->control;
    step.beta1 = (float)zero->config->adam_beta1;
    step.beta2 = (float)zero->config->adam_beta2;
    step.epsilon = (float)zero->config->adam_eps;
    step.weight_decay = (float)weight_decay;
    step.seed = (uint32_t)zero->config->seed;
    step.step = (uint32_t)zero->step;
    step.host = zero_offloads(zero) ? &zero->offload.host : NULL;
    step.lossless = zero->lossless.coded ? &zero->lossless : NULL;
    return step;
}

static BucketState device_state(const Zero *zero, int b) {
    int64_t at = zero->plan.bucket[b].state_start;
    BucketState state = {zero_own_grads(zero, b), zero_own_weights(zero, b),
                         zero->master + at,       zero->exp_avg + at,
                         zero->exp_avg_sq + at,   zero_own_weights(zero, b).matrix};
    return state;
}

// AdamW on the own shard. The bucket's gradients have then served. Of a bucket that stays the
// tail's are cleared for the next step; the matrices' are overwritten by it.
static void update_bucket(Zero *zero, const QwdStep *step, int b) {
    const Bucket *bucket = &zero->plan.bucket[b];
    timer_start(zero->timers, TIMER_OPTIMIZER_INNER_STEP, zero->lanes->last);
    BucketState state = zero_offloads(zero) ? offload_state(zero, b) : device_state(zero, b);
    GatherBuffer buffer = zero_gather_buffer(zero, b);
    qwd_update_bucket(step, b, &state, &buffer, zero->lanes);
    if (zero->gradients.stays[b])
        set_zero(zero->lanes->last, zero_bucket_grads(zero, b) + bucket->matrix_elements,
                 (size_t)bucket->tail_elements * sizeof(float));
    timer_stop(zero->timers, TIMER_OPTIMIZER_INNER_STEP, zero->lanes->last);
}

static void gather_bucket(Zero *zero, const QwdStep *step, int b) {
    Stream *middle = zero->lanes->middle;
    int64_t elements;
    floatX *weights = zero_kept_weights(zero, b, &elements);
    GatherBuffer buffer = zero_gather_buffer(zero, b);
    timer_start(zero->timers, TIMER_EXPOSED_WEIGHTS, zero->compute);
    // For the timer alone, whose spans are to begin with the shard. The data wait by the hops'
    // events.
    lanes_after(zero->lanes, middle, zero->lanes->last);
    timer_start(zero->timers, TIMER_PARAMS_ALL_GATHER, middle);
    qwd_gather_bucket(step, b, &buffer, zero->lanes);
    qwd_apply_bucket(step, b, weights, &buffer, zero->lanes);
    timer_stop(zero->timers, TIMER_PARAMS_ALL_GATHER, middle);
    fault_flip(fault_due(&zero->faults, FAULT_REPLICA, zero->step, b), middle, weights,
               elements * (int64_t)sizeof(floatX));
    event_record(zero->done[b], middle);
    zero->pending[b] = true;
    if (zero->config->no_overlap) lanes_synchronize(zero->lanes);
    timer_stop(zero->timers, TIMER_EXPOSED_WEIGHTS, zero->compute);
}

// Once its message is as long as the ranks agreed.
static void finish_bucket(Zero *zero, const QwdStep *step, int b) {
    gather_bucket(zero, step, b);
    local_turn(zero, b);
}

// Compute waits for the verdict. That wait is the gradients' exposed time, and belongs to this
// step's interval. Compute also takes the verdict to the host, which costs the host time: `last`
// goes straight on to AdamW meanwhile, and compute waits for weights then anyway.
static void send_verdict(Zero *zero, int slot) {
    timer_start(zero->timers, TIMER_EXPOSED_GRADIENTS, zero->compute);
    stream_wait(zero->compute, zero->judged);
    timer_stop(zero->timers, TIMER_EXPOSED_GRADIENTS, zero->compute);
    // With offload not behind AdamW, which runs on the driver's thread that ends downloads.
    if (zero_offloads(zero))
        copy_to_pinned(zero->compute, &zero->landed[slot], zero->control, sizeof(StepControl));
    else copy_to_host(zero->compute, &zero->landed[slot], zero->control, sizeof(StepControl));
    event_record(zero->landing[slot], zero->compute);
}

void zero_update(Zero *zero, double lr_if_applied, double lr_if_skipped, double weight_decay) {
    int slot = (int)(zero->step % 2);
    zero_weights_change(zero);
    timer_start(zero->timers, TIMER_OPTIMIZER, zero->lanes->last);
    event_record(zero->computed, zero->compute);
    stream_wait(zero->lanes->last, zero->computed);
    timer_start(zero->timers, TIMER_OPTIMIZER_CLIP_MAIN_GRAD, zero->lanes->last);
    judge(zero, lr_if_applied, lr_if_skipped);
    timer_stop(zero->timers, TIMER_OPTIMIZER_CLIP_MAIN_GRAD, zero->lanes->last);
    event_record(zero->judged, zero->lanes->last);
    send_verdict(zero, slot);
    zero_copy_staged(zero);
    if (zero->copying && zero->copies != zero->lanes->last) stream_wait(zero->lanes->last, zero->staged);
    zero->copying = false;
    offload_judged(zero);
    QwdStep step = qwd_step(zero, weight_decay);
    // Forward order: the first layers' weights are needed first.
    for (int b = 0; b < zero->plan.buckets; b++) {
        local_meet(zero, b, zero->step - 1);
        update_bucket(zero, &step, b);
        probe_updated(zero, b);
        if (!step.lossless) finish_bucket(zero, &step, b);
    }
    qwd_agree_lengths(&step, zero->lanes);
    for (int b = 0; step.lossless && b < zero->plan.buckets; b++) finish_bucket(zero, &step, b);
    offload_updated(zero);
    // What follows on `last` must see the new replica. That costs nothing: the next there is the
    // end of the next step's first reduction.
    if (zero->lanes->apart) stream_wait(zero->lanes->last, zero->done[zero->plan.buckets - 1]);
    timer_stop(zero->timers, TIMER_OPTIMIZER, zero->lanes->last);
    zero_weights_updated(zero);
}

StepControl zero_verdict(Zero *zero, int which) {
    int slot = (int)((zero->step - which) % 2);
    event_synchronize(zero->landing[slot]);
    return zero->landed[slot];
}

void zero_synchronize(Zero *zero) {
    if (!zero->device) return;  // never started
    zero_weights_wait_all(zero);
    lanes_synchronize(zero->lanes);
    if (zero->offload.host.stream) stream_synchronize(zero->offload.host.stream);
    if (zero->shared.on) stream_synchronize(zero->shared.stream);
    if (zero->local.stream) stream_synchronize(zero->local.stream);
    stream_synchronize(zero->copies);
    stream_synchronize(zero->compute);
}

// --- figures over all ranks ----------------------------------------------------------------------

double zero_params_norm(Zero *zero, Peers world) {
    double squares = 0.0;
    zero_weights_wait_all(zero);
    for (int i = 0; i < zero->piece_count; i++) {
        const Piece *piece = &zero->pieces[i];
        int64_t leaves = ceil_div64(piece->hi - piece->lo, HADAMARD_ORDER);
        float sum = 0.0f;
        if (!zero->tensors[piece->tensor].counted) continue;
        kernel_square_weights(zero->compute, zero->leaves, zero_piece_weights(zero, piece),
                              piece->hi - piece->lo);
        kernel_tree_sum(zero->compute, zero->piece_sums, zero->leaves, leaves);
        copy_to_host(zero->compute, &sum, zero->piece_sums, sizeof sum);
        stream_synchronize(zero->compute);
        squares += sum;
    }
    peers_all_reduce(world, &squares, 1, MPI_DOUBLE, MPI_SUM);
    return sqrt(squares);
}

int64_t zero_zeros(Zero *zero, Peers world) {
    int64_t zeros = 0;
    zero_weights_wait_all(zero);
    copy_to_host(zero->compute, &zeros, zero->zeros, sizeof zeros);
    stream_synchronize(zero->compute);
    peers_all_reduce(world, &zeros, 1, MPI_INT64_T, MPI_SUM);
    return zeros;
}

bool zero_sound(Zero *zero, Peers world, Error *err) {
    StepControl found;
    int ranks = zero->mesh->world.size;
    StepRecord own = {0};
    StepRecord *records = (StepRecord *)xcalloc((size_t)ranks, sizeof *records, "the ranks' findings");
    zero_weights_checked(zero);
    local_settle(zero);
    copy_to_host(zero->lanes->last, &own.fault, zero->wire_checks.fault, sizeof(uint64_t));
    stream_synchronize(zero->lanes->last);
    peers_all_gather(world, &own, records, (int)sizeof own, MPI_BYTE);
    bool sound = !judge_faults(&found, records, ranks);
    free(records);
    return sound || fault_error(found.fault, found.fault_rank, zero->mesh, err);
}
