// --local-steps: every node is a replica group, which trains on master weights of its own. Now and
// then the replica groups meet, bucket by bucket. Called by the files of this room; the exchange
// itself is sdp4bit/outer.h.
//
// Beside master weights and moments each rank holds outer weights and their momentum, of its shard.
// They are the same on all replica groups. A bucket's turn comes every H steps, and turns are
// spread over these steps. With step t, whose turn it is, the bucket's outer weights step along the
// mean of what the replica groups have moved since they last met. `delay` steps later, with the end
// of step t + delay, the master weights meet the outer weights: they become them, or a mix of both.
// The weights that layers compute with follow with the next update's message.
//
// The run's last step is every bucket's turn. The outer weights then become the mean of the replica
// groups' master weights, without rate and momentum, and the master weights meet them at once. So
// what is evaluated and saved at the end has all steps of all replica groups.
//
// An exchange runs on a stream of its own, beside the layers. What has been sent at the end of step
// t is waited for before the update of step t + delay + 1, or by whoever reads master weights or
// outer weights before.
#include <stdlib.h>

#include "llmc/state/zero_inside.h"

static bool is_on(const Zero *zero) { return zero->config->local_steps > 1; }

// --- memory --------------------------------------------------------------------------------------

// A bucket's turn: the steps that leave this rest when divided by H. A bucket that follows much
// else has a late turn, so that the bytes are spread evenly.
static void deal_turns(Zero *zero) {
    LocalSteps *l = &zero->local;
    int64_t before = 0, all = 0;
    for (int b = 0; b < zero->plan.buckets; b++) all += bucket_elements(&zero->plan.bucket[b]);
    for (int b = 0; b < zero->plan.buckets; b++) {
        l->turn[b] = zero->config->local_steps * before / all;
        before += bucket_elements(&zero->plan.bucket[b]);
    }
}

static void reserve_exchange(Zero *zero, MemoryPlan *plan) {
    LocalSteps *l = &zero->local;
    const char *group = "local steps";
    size_t shard = (size_t)outer_largest_shard(&l->plan), replica_groups = (size_t)l->plan.replica_groups;
    for (int slot = 0; slot < LOCAL_SLOTS; slot++)
        memory_plan_reserve(plan, group, "pseudo-gradient of a bucket", shard * sizeof(float),
                            (void **)&l->gradient[slot]);
    if (replica_groups == 1) return;
    int64_t quantized = outer_largest_message(&l->plan, &zero->grad_wire);
    int64_t plain = outer_largest_message(&l->plan, &zero->plain_grad_wire);
    bool late = zero->config->gradients_quantization_start_iteration > 0 && plain > quantized;
    size_t bytes = replica_groups * (size_t)(late ? plain : quantized);
    OuterStep *step = &l->step;
    memory_plan_reserve(plan, group, "pseudo-gradients, sent", bytes, (void **)&step->send);
    memory_plan_reserve(plan, group, "pseudo-gradients, received", bytes, (void **)&step->recv);
    memory_plan_reserve(plan, group, "mean of the replica groups, gathered", bytes, (void **)&step->gathered);
    memory_plan_reserve(plan, group, "mean of the replica groups, own piece",
                        shard / replica_groups * sizeof(float), (void **)&step->mean);
    memory_plan_reserve(plan, group, "leaves of its norm", (shard / HADAMARD_ORDER + 2) * sizeof(float),
                        (void **)&step->leaves);
    memory_plan_reserve(plan, group, "first faults", (size_t)zero->plan.buckets * sizeof(uint64_t),
                        (void **)&l->fault);
    memory_plan_reserve(plan, group, "segment table", (size_t)l->plan.segments_total * sizeof(Segment),
                        (void **)&l->segments);
    memory_plan_reserve_host(plan, "host memory", "whether a replica group is lost", sizeof(int),
                             (void **)&l->lost);
}

// Where the replica group's own weights lie while the outer ones stand in their place
// (zero_use_outer). Runs that neither evaluate nor write text never want it.
static void reserve_kept(Zero *zero, MemoryPlan *plan) {
    const Config *c = zero->config;
    int64_t all = 0, elements;
    if (!c->eval_iters && !c->full_validation && !c->eval_tasks.count && !c->sample_prompt) return;
    for (int b = 0; b < zero->plan.buckets; b++) {
        zero_kept_weights(zero, b, &elements);
        all += elements;
    }
    memory_plan_reserve_host(plan, "host memory", "own weights, during evaluations",
                             (size_t)all * sizeof(floatX), (void **)&zero->local.kept);
}

void local_reserve(Zero *zero, MemoryPlan *plan) {
    LocalSteps *l = &zero->local;
    size_t shard = (size_t)zero->plan.shard_elements, buckets = (size_t)zero->plan.buckets;
    const char *group = "local steps";
    if (!is_on(zero)) return;
    const Mesh *mesh = zero->mesh;
    outer_plan(&l->plan, &zero->plan, mesh->dp.rank, mesh->replica_groups.size, mesh->replica_groups.rank);
    l->turn = (int64_t *)xcalloc(buckets, sizeof(int64_t), "the bucket table");
    l->meets = (int64_t *)xcalloc(buckets, sizeof(int64_t), "the bucket table");
    l->exchanged = (Event **)xcalloc(buckets, sizeof(Event *), "the bucket table");
    deal_turns(zero);
    memory_plan_reserve(plan, group, "fp32 outer weights, own shard", shard * sizeof(float),
                        (void **)&l->outer);
    memory_plan_reserve(plan, group, "outer momentum, own shard", shard * sizeof(float),
                        (void **)&l->momentum);
    memory_plan_reserve(plan, group, FLOATX_NAME " outer weights, own shard", shard * sizeof(floatX),
                        (void **)&l->narrow);
    reserve_exchange(zero, plan);
    reserve_kept(zero, plan);
}

int64_t zero_exchange_bytes(const Zero *zero, int bucket, const GradWire *wire) {
    return is_on(zero) ? outer_wire_bytes(&zero->local.plan, bucket, wire) : 0;
}

void local_start(Zero *zero) {
    LocalSteps *l = &zero->local;
    if (!is_on(zero)) return;
    l->stream = zero->config->no_overlap ? zero->lanes->last : stream_create(zero->device, "replica groups");
    l->taken = event_create(zero->device);
    l->settled = event_create(zero->device);
    for (int slot = 0; slot < LOCAL_SLOTS; slot++) l->slot_free[slot] = event_create(zero->device);
    for (int b = 0; b < zero->plan.buckets; b++) l->exchanged[b] = event_create(zero->device);
    if (l->lost) comm_may_lose(&zero->mesh->replica_groups, l->lost);
    if (l->segments)
        copy_to_device(zero->compute, l->segments, l->plan.segments,
                       (size_t)l->plan.segments_total * sizeof(Segment));
}

void local_free(Zero *zero) {
    LocalSteps *l = &zero->local;
    if (l->stream) {
        event_destroy(l->taken);
        event_destroy(l->settled);
        for (int slot = 0; slot < LOCAL_SLOTS; slot++) event_destroy(l->slot_free[slot]);
        for (int b = 0; b < zero->plan.buckets; b++) event_destroy(l->exchanged[b]);
        if (l->stream != zero->lanes->last) stream_destroy(l->stream);
    }
    outer_plan_free(&l->plan);
    free(l->turn);
    free(l->meets);
    free(l->exchanged);
}

void local_from_masters(Zero *zero) {
    if (!is_on(zero)) return;
    size_t bytes = (size_t)zero->plan.shard_elements * sizeof(float);
    copy_on_device(zero->compute, zero->local.outer, zero->master, bytes);
    set_zero(zero->compute, zero->local.momentum, bytes);
    zero->local.stands = false;
}

// --- a bucket's turn -----------------------------------------------------------------------------

static OuterStep outer_step(Zero *zero, int b) {
    LocalSteps *l = &zero->local;
    l->checks = zero->wire_checks;
    l->checks.fault = l->fault + b;
    OuterStep step = l->step;
    step.plan = &l->plan;
    step.wire = *zero_wire_at(zero, zero->step);
    step.segments = l->segments;
    step.seed = (uint32_t)zero->config->seed;
    step.step = (uint32_t)zero->step;
    step.checks = &l->checks;
    step.stream = l->stream;
    return step;
}

static bool is_last(const Zero *zero, int64_t step) { return step == zero->config->train_iters; }

// `last` goes on behind bucket b's exchange, and knows what its checks have found.
static void await_exchange(Zero *zero, int b) {
    LocalSteps *l = &zero->local;
    stream_wait(zero->lanes->last, l->exchanged[b]);
    if (l->fault) kernel_mark_fault(zero->lanes->last, zero->wire_checks.fault, l->fault + b, l->lost);
}

// The pseudo-gradient is taken on `last`, behind AdamW. All else is beside it. In the last step an
// exchange of the same bucket may be under way: nobody meets that one's outer weights.
static void exchange(Zero *zero, int b) {
    LocalSteps *l = &zero->local;
    const Config *c = zero->config;
    Stream *last = zero->lanes->last;
    bool ends = is_last(zero, zero->step);
    float rate = ends ? 1.0f : (float)c->outer_lr, momentum = ends ? 0.0f : (float)c->outer_momentum;
    int64_t at = zero->plan.bucket[b].state_start, n = bucket_shard(&zero->plan.bucket[b]);
    int slot = (int)(l->exchanges++ % LOCAL_SLOTS);
    float *gradient = l->gradient[slot];
    OuterStep step = outer_step(zero, b);
    if (l->meets[b]) await_exchange(zero, b);
    stream_wait(last, l->slot_free[slot]);
    kernel_pseudo_gradient(last, gradient, l->outer + at, zero->master + at, n);
    event_record(l->taken, last);
    stream_wait(l->stream, l->taken);
    if (!l->lost || !*l->lost) outer_exchange(&step, b, gradient);  // else buffers may be on their way
    zero->wire_checks.exchange = l->checks.exchange;
    kernel_outer_step(l->stream, l->outer + at, l->momentum + at, gradient, rate, momentum, n, l->lost);
    event_record(l->slot_free[slot], l->stream);
    event_record(l->exchanged[b], l->stream);
    if (c->no_overlap) lanes_synchronize(zero->lanes);
}

static bool has_turn(const Zero *zero, int b, int64_t step) {
    return step % zero->config->local_steps == zero->local.turn[b] || is_last(zero, step);
}

void local_turn(Zero *zero, int b) {
    if (!is_on(zero)) return;
    zero->local.stands = false;
    if (!has_turn(zero, b, zero->step)) return;
    exchange(zero, b);
    zero->local.meets[b] = zero->step + (is_last(zero, zero->step) ? 0 : zero->config->local_steps_delay);
}

void local_meet(Zero *zero, int b, int64_t step) {
    LocalSteps *l = &zero->local;
    Stream *last = zero->lanes->last;
    if (!is_on(zero) || !l->meets[b] || l->meets[b] > step) return;
    int64_t at = zero->plan.bucket[b].state_start;
    await_exchange(zero, b);
    kernel_meet(last, zero->master + at, l->outer + at, (float)zero->config->local_steps_mix,
                bucket_shard(&zero->plan.bucket[b]), l->lost);
    l->meets[b] = 0;
}

// --- beside the step -----------------------------------------------------------------------------

void local_settle(Zero *zero) {
    LocalSteps *l = &zero->local;
    Stream *last = zero->lanes->last;
    if (!is_on(zero) || l->stands) return;
    l->stands = true;
    for (int b = 0; b < zero->plan.buckets; b++) {
        local_meet(zero, b, zero->step);
        await_exchange(zero, b);
    }
    kernel_narrow(last, l->narrow, l->outer, zero->plan.shard_elements);
    event_record(l->settled, last);
    stream_wait(zero->compute, l->settled);
}

void local_hash(Zero *zero, uint64_t *hash) {
    LocalSteps *l = &zero->local;
    // As weights: their halves.
    int64_t n = zero->plan.shard_elements * (int64_t)(sizeof(float) / sizeof(floatX));
    kernel_replica_hash(zero->compute, hash, (const floatX *)(const void *)l->outer, 0, n);
    kernel_replica_hash(zero->compute, hash, (const floatX *)(const void *)l->momentum, n, n);
}

void zero_begin_replica_group(Zero *zero) {
    size_t bytes = (size_t)zero->plan.shard_elements * sizeof(float);
    copy_on_device(zero->compute, zero->master, zero->local.outer, bytes);
    stream_synchronize(zero->compute);
}

void zero_resume_replica_group(Zero *zero, int64_t step, int64_t met_at) {
    const Config *c = zero->config;
    zero->step = step;
    for (int b = 0; is_on(zero) && b < zero->plan.buckets; b++) {
        for (int64_t turn = step; turn > met_at && turn + c->local_steps_delay > step; turn--) {
            if (has_turn(zero, b, turn)) zero->local.meets[b] = turn + c->local_steps_delay;
        }
    }
}

// n weights of each rank of the replica group come together at `all`. They go through a gather
// buffer in parts: messages inside the node leave from there.
static void gather_windows(Zero *zero, const floatX *own, floatX *all, int64_t n) {
    const Group *node = &zero->mesh->node;
    const Lanes *lanes = zero->lanes;
    uint8_t *buffer = zero->gather[0];
    int64_t most = (int64_t)(zero->gather_bytes[0] / (size_t)node->size / MESSAGE_ALIGN) *
                   (MESSAGE_ALIGN / (int64_t)sizeof(floatX));
    for (int64_t at = 0; at < n; at += most) {
        size_t bytes = (size_t)(n - at < most ? n - at : most) * sizeof(floatX);
        copy_on_device(lanes->last, buffer + (size_t)node->rank * bytes, own + at, bytes);
        lanes_after(lanes, lanes->node, lanes->last);
        comm_all_gather(node, buffer, bytes, lanes->node);
        lanes_after(lanes, lanes->last, lanes->node);
        for (int rank = 0; rank < node->size; rank++)
            copy_on_device(lanes->last, all + rank * n + at, buffer + (size_t)rank * bytes, bytes);
    }
}

// Bucket b's outer weights go to where this rank keeps weights.
static void gather_outer(Zero *zero, int b) {
    const Bucket *bucket = &zero->plan.bucket[b];
    const floatX *own = zero->local.narrow + bucket->state_start;
    int64_t elements;
    floatX *all = zero_kept_weights(zero, b, &elements);
    if (!zero_weights_resident(zero, b) || zero->mesh->node.size == 1) {
        copy_on_device(zero->lanes->last, all, own, (size_t)elements * sizeof(floatX));
        return;
    }
    gather_windows(zero, own, all, bucket->matrix_per_rank);
    gather_windows(zero, own + bucket->matrix_per_rank, all + bucket->matrix_elements, bucket->tail_per_rank);
}

// The weights of this replica group, to the host or back.
static void keep_own(Zero *zero, bool back) {
    floatX *host = zero->local.kept;
    for (int b = 0; b < zero->plan.buckets; b++) {
        int64_t elements;
        floatX *weights = zero_kept_weights(zero, b, &elements);
        size_t bytes = (size_t)elements * sizeof(floatX);
        if (back) copy_to_device(zero->compute, weights, host, bytes);
        else copy_to_host(zero->compute, host, weights, bytes);
        host += elements;
    }
    stream_synchronize(zero->compute);
}

void zero_use_outer(Zero *zero, bool on) {
    if (!is_on(zero) || on == zero->local.outer_in_place) return;
    zero_synchronize(zero);
    zero_weights_given(zero);
    if (on) {
        zero->local.outer_in_place = true;
        keep_own(zero, false);
        local_settle(zero);
        for (int b = 0; b < zero->plan.buckets; b++) gather_outer(zero, b);
        stream_synchronize(zero->lanes->last);
    } else {
        keep_own(zero, true);
        zero->local.outer_in_place = false;
    }
}
