// Local steps: see local_steps.h.
#include "llmc/state/local_steps.h"

#include <assert.h>
#include <stdlib.h>

#include "llmc/ranks/peers.h"

static bool is_on(const Base *base) { return base->config->local_steps > 1; }

// --- memory --------------------------------------------------------------------------------------

// Spreads the sync slots over H steps, so that all steps send about the same number of bytes.
static void choose_slots(const Base *base, Outer *l) {
    int64_t before = 0, all = 0;
    for (int b = 0; b < base->layout.buckets; b++) all += bucket_elements(&base->layout.bucket[b]);
    for (int b = 0; b < base->layout.buckets; b++) {
        l->bucket[b].slot = base->config->local_steps * before / all;
        before += bucket_elements(&base->layout.bucket[b]);
    }
}

// Returns the elements of a range in this replica group's piece of its bucket.
static OuterRange range_of_piece(const Base *base, const Outer *l, const Range *range) {
    const Bucket *shard = &l->layout.shard[range->bucket];
    int64_t at = range->state_at - base->layout.bucket[range->bucket].state_start;
    bool matrix = at < shard->matrix_elements;
    int64_t size = matrix ? shard->matrix_per_rank : shard->tail_per_rank;
    int64_t lo = (matrix ? 0 : shard->matrix_elements) + l->layout.replica_group * size, hi = lo + size;
    int64_t end = at + range->hi - range->lo;
    if (lo < at) lo = at;
    if (hi > end) hi = end;
    return (OuterRange){lo, hi - lo};
}

// Tensors that are not split over the tensor-parallel ranks are left out. Other groups may own the
// means of these ranks, so residuals with the mean's error would let their copies drift apart.
static void list_kept_means(const Base *base, Outer *l) {
    int count = 0;
    l->kept_means = xcalloc((size_t)base->range_count, sizeof(OuterRange), "the bucket table");
    for (int i = 0; i < base->range_count; i++) {
        const Range *range = &base->ranges[i];
        OuterBucket *bucket = &l->bucket[range->bucket];
        OuterRange own = range_of_piece(base, l, range);
        if (own.n <= 0 || (base->mesh->tp.size > 1 && base->tensors[range->tensor].split < 0)) continue;
        if (bucket->kept == 0) bucket->first_kept = count;
        OuterRange *last = bucket->kept ? &l->kept_means[count - 1] : NULL;
        if (last && last->at + last->n == own.at &&
            own.at != l->layout.shard[range->bucket].matrix_elements) {
            last->n += own.n;
            continue;
        }
        l->kept_means[count++] = own;
        bucket->kept++;
    }
}

static void reserve_feedback(const Base *base, Outer *l, MemoryPlan *plan) {
    const char *group = "local steps";
    l->feeds = base->config->error_feedback && base->config->quantized_gradients;
    if (!l->feeds) return;
    memory_plan_reserve(plan, group, "residual of error feedback, own shard",
                        (size_t)base->layout.shard_elements * sizeof(float), (void **)&l->residual);
    memory_plan_reserve(plan, group, "new residual of a bucket",
                        (size_t)outer_largest_shard(&l->layout) * sizeof(float), (void **)&l->step.next);
}

static void reserve_exchange(const Base *base, Outer *l, MemoryPlan *plan) {
    const char *group = "local steps";
    size_t shard = (size_t)outer_largest_shard(&l->layout), replica_groups = (size_t)l->layout.replica_groups;
    for (int slot = 0; slot < OUTER_SLOTS; slot++)
        memory_plan_reserve(plan, group, "pseudo-gradient of a bucket", shard * sizeof(float),
                            (void **)&l->gradient[slot]);
    if (replica_groups == 1) return;
    int64_t quantized = outer_largest_message(&l->layout, &base->grad_format);
    int64_t plain = outer_largest_message(&l->layout, &base->plain_grad_format);
    bool late = base->config->gradients_quantization_start_iteration > 0 && plain > quantized;
    size_t bytes = replica_groups * (size_t)(late ? plain : quantized);
    OuterStep *step = &l->step;
    memory_plan_reserve(plan, group, "pseudo-gradients, sent", bytes, (void **)&step->send);
    memory_plan_reserve(plan, group, "pseudo-gradients, received", bytes, (void **)&step->recv);
    memory_plan_reserve(plan, group, "mean of the replica groups, gathered", bytes, (void **)&step->gathered);
    memory_plan_reserve(plan, group, "mean of the replica groups, this rank's part",
                        shard / replica_groups * sizeof(float), (void **)&step->mean);
    memory_plan_reserve(plan, group, "partial sums of the norm", (shard / HADAMARD_ORDER + 2) * sizeof(float),
                        (void **)&step->partials);
    memory_plan_reserve(plan, group, "first faults", (size_t)base->layout.buckets * sizeof(uint64_t),
                        (void **)&l->fault);
    memory_plan_reserve(plan, group, "segment table", (size_t)l->layout.segments_total * sizeof(Segment),
                        (void **)&l->segments);
    memory_plan_reserve_host(plan, "host memory", "flag of a lost replica group", sizeof(int),
                             (void **)&l->lost);
    reserve_feedback(base, l, plan);
}

// Reserves host memory that keeps the model weights while outer weights replace them (outer_use).
// Not needed by runs that neither evaluate nor generate text.
static void reserve_kept(const Base *base, Outer *l, const Weights *weights, MemoryPlan *plan) {
    const Config *c = base->config;
    int64_t all = 0, elements;
    if (!c->eval_iters && !c->full_validation && !config_scores(c) && !c->sample_prompt) return;
    for (int b = 0; b < base->layout.buckets; b++) {
        weights_kept(base, weights, b, &elements);
        all += elements;
    }
    memory_plan_reserve_host(plan, "host memory", "model weights, saved during evaluations",
                             (size_t)all * sizeof(floatX), (void **)&l->kept);
}

void outer_reserve(const Base *base, Outer *l, const Weights *weights, MemoryPlan *plan) {
    size_t shard = (size_t)base->layout.shard_elements, buckets = (size_t)base->layout.buckets;
    const char *group = "local steps";
    if (!is_on(base)) return;
    const Mesh *mesh = base->mesh;
    outer_layout(&l->layout, &base->layout, mesh->dp.rank, mesh->replica_groups.size,
                 mesh->replica_groups.rank);
    l->bucket = xcalloc(buckets, sizeof *l->bucket, "the bucket table");
    choose_slots(base, l);
    memory_plan_reserve(plan, group, "fp32 outer weights, own shard", shard * sizeof(float),
                        (void **)&l->outer);
    memory_plan_reserve(plan, group, "outer momentum, own shard", shard * sizeof(float),
                        (void **)&l->momentum);
    memory_plan_reserve(plan, group, FLOATX_NAME " outer weights, own shard", shard * sizeof(floatX),
                        (void **)&l->rounded);
    if (!base->config->replica_group) reserve_exchange(base, l, plan);
    reserve_kept(base, l, weights, plan);
}

void outer_start(const Base *base, Outer *l) {
    if (!is_on(base)) return;
    l->stream = base->config->no_overlap ? base->lanes->last : stream_create(base->device, "replica groups");
    l->taken = event_create(base->device);
    l->finished = event_create(base->device);
    for (int slot = 0; slot < OUTER_SLOTS; slot++) l->slot_free[slot] = event_create(base->device);
    for (int b = 0; b < base->layout.buckets; b++) l->bucket[b].exchanged = event_create(base->device);
    if (l->feeds) list_kept_means(base, l);
    if (l->lost) comm_may_lose(&base->mesh->replica_groups, l->lost);
    if (l->segments)
        copy_to_device(base->compute, l->segments, l->layout.segments,
                       (size_t)l->layout.segments_total * sizeof(Segment));
}

void outer_free(const Base *base, Outer *l) {
    if (l->stream) {
        event_destroy(l->taken);
        event_destroy(l->finished);
        for (int slot = 0; slot < OUTER_SLOTS; slot++) event_destroy(l->slot_free[slot]);
        for (int b = 0; b < base->layout.buckets; b++) event_destroy(l->bucket[b].exchanged);
        if (l->stream != base->lanes->last) stream_destroy(l->stream);
    }
    outer_layout_free(&l->layout);
    free(l->kept_means);
    free(l->bucket);
}

void outer_from_master(const Base *base, Outer *l, const Optimizer *optimizer) {
    if (!is_on(base)) return;
    size_t bytes = (size_t)base->layout.shard_elements * sizeof(float);
    copy_on_device(base->compute, l->outer, optimizer->master, bytes);
    set_zero(base->compute, l->momentum, bytes);
    if (l->feeds) set_zero(base->compute, l->residual, bytes);
    l->finished_since = false;
}

// --- the exchange of a bucket --------------------------------------------------------------------

static OuterStep outer_step(const Base *base, Outer *l, int b) {
    l->checks = *base->checks;
    l->checks.fault = l->fault + b;
    OuterStep step = l->step;
    step.layout = &l->layout;
    step.format = *base_grad_format(base, base->step);
    step.segments = l->segments;
    step.residual = l->feeds ? l->residual + base->layout.bucket[b].state_start : NULL;
    step.kept = l->feeds ? l->kept_means + l->bucket[b].first_kept : NULL;
    step.kept_count = l->bucket[b].kept;
    step.lost = l->lost;
    step.seed = (uint32_t)base->config->seed;
    step.step = (uint32_t)base->step;
    step.checks = &l->checks;
    step.stream = l->stream;
    return step;
}

static bool is_last(const Base *base, int64_t step) { return step == base->config->train_iters; }

// Makes `last` wait for the exchange of bucket b and record its first fault.
static void await_exchange(const Base *base, const Outer *l, int b) {
    stream_wait(base->lanes->last, l->bucket[b].exchanged);
    if (l->fault) kernel_mark_fault(base->lanes->last, base->checks->fault, l->fault + b, l->lost);
}

// Starts the exchange of bucket b. The pseudo-gradient is computed on `last`, after AdamW;
// everything else overlaps with later work. In the last step of a run, an earlier exchange of the
// same bucket may be pending; the new exchange replaces it.
static void exchange(const Base *base, Outer *l, const Optimizer *optimizer, int b) {
    const Config *c = base->config;
    Stream *last = base->lanes->last;
    bool ends = is_last(base, base->step);
    float rate = ends ? 1.0f : (float)c->outer_lr, momentum = ends ? 0.0f : (float)c->outer_momentum;
    int64_t at = base->layout.bucket[b].state_start, n = bucket_shard(&base->layout.bucket[b]);
    int slot = (int)(l->exchanges++ % OUTER_SLOTS);
    float *gradient = l->gradient[slot];
    OuterStep step = outer_step(base, l, b);
    if (l->bucket[b].applies) await_exchange(base, l, b);
    stream_wait(last, l->slot_free[slot]);
    kernel_pseudo_gradient(last, gradient, l->outer + at, optimizer->master + at, n);
    event_record(l->taken, last);
    stream_wait(l->stream, l->taken);
    // After a loss, pending exchanges may still use the buffers, so no other exchange is started.
    if (!l->lost || !*l->lost) outer_exchange(&step, b, gradient);
    base->checks->exchange = l->checks.exchange;
    kernel_outer_step(l->stream, l->outer + at, l->momentum + at, gradient, rate, momentum, n, l->lost);
    event_record(l->slot_free[slot], l->stream);
    event_record(l->bucket[b].exchanged, l->stream);
    if (c->no_overlap) lanes_synchronize(base->lanes);
}

static bool is_slot(const Base *base, const Outer *l, int b, int64_t step) {
    return step % base->config->local_steps == l->bucket[b].slot || is_last(base, step);
}

void outer_sync(const Base *base, Outer *l, const Optimizer *optimizer, int b) {
    assert(b >= 0 && b < base->layout.buckets);
    if (!is_on(base)) return;
    l->finished_since = false;
    // Elastic replica groups exchange chunks between the steps (llmc/run/elastic.c).
    if (base->config->replica_group || !is_slot(base, l, b, base->step)) return;
    exchange(base, l, optimizer, b);
    l->bucket[b].applies = base->step + (is_last(base, base->step) ? 0 : base->config->local_steps_delay);
}

void outer_apply(const Base *base, Outer *l, const Optimizer *optimizer, int b, int64_t step) {
    assert(b >= 0 && b < base->layout.buckets);
    Stream *last = base->lanes->last;
    if (!is_on(base) || !l->bucket[b].applies || l->bucket[b].applies > step) return;
    int64_t at = base->layout.bucket[b].state_start;
    await_exchange(base, l, b);
    kernel_mix_outer(last, optimizer->master + at, l->outer + at, (float)base->config->local_steps_mix,
                     bucket_shard(&base->layout.bucket[b]), l->lost);
    l->bucket[b].applies = 0;
}

// --- between steps -------------------------------------------------------------------------------

void outer_finish(const Base *base, Outer *l, const Optimizer *optimizer) {
    Stream *last = base->lanes->last;
    if (!is_on(base) || l->finished_since) return;
    l->finished_since = true;
    for (int b = 0; b < base->layout.buckets; b++) {
        outer_apply(base, l, optimizer, b, base->step);
        await_exchange(base, l, b);
    }
    kernel_narrow(last, l->rounded, l->outer, base->layout.shard_elements);
    event_record(l->finished, last);
    stream_wait(base->compute, l->finished);
}

void outer_hash(const Base *base, const Outer *l, uint64_t *hash) {
    assert(is_on(base) && l->finished_since);
    // kernel_replica_hash reads floatX, so an fp32 value counts as two.
    int64_t n = base->layout.shard_elements * (int64_t)(sizeof(float) / sizeof(floatX));
    kernel_replica_hash(base->compute, hash, (const floatX *)(const void *)l->outer, 0, n);
    kernel_replica_hash(base->compute, hash, (const floatX *)(const void *)l->momentum, n, n);
}

void outer_begin_group(const Base *base, const Outer *l, const Optimizer *optimizer) {
    assert(is_on(base));
    size_t bytes = (size_t)base->layout.shard_elements * sizeof(float);
    copy_on_device(base->compute, optimizer->master, l->outer, bytes);
    stream_synchronize(base->compute);
}

void outer_resume_group(const Base *base, Outer *l, int64_t step, int64_t applied_at) {
    assert(step >= 0 && applied_at >= 0);
    const Config *c = base->config;
    for (int b = 0; is_on(base) && !c->replica_group && b < base->layout.buckets; b++) {
        for (int64_t slot = step; slot > applied_at && slot + c->local_steps_delay > step; slot--) {
            if (is_slot(base, l, b, slot)) l->bucket[b].applies = slot + c->local_steps_delay;
        }
    }
}

// All-gathers n weights per rank within the replica group into `all`. Goes through the gather
// buffer in parts, because the ranks of the node may map that buffer.
static void gather_shards(const Base *base, Weights *weights, const floatX *own, floatX *all, int64_t n) {
    const Group *node = &base->mesh->node;
    const Lanes *lanes = base->lanes;
    uint8_t *buffer = weights->gather[0];
    int64_t most = (int64_t)(weights->gather_bytes[0] / (size_t)node->size / MESSAGE_ALIGN) *
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

// The same for an elastic replica group of several nodes, through the host: a rank may hold the
// shards of several others.
static void gather_over_nodes(const Base *base, const floatX *own, Weights *weights, int b) {
    const Bucket *bucket = &base->layout.bucket[b];
    const Group *dp = &base->mesh->dp;
    Peers peers = {dp->mpi, 60.0 * base->config->distributed_timeout_minutes, device_site(base->device)};
    size_t bytes = (size_t)bucket_shard(bucket) * sizeof(floatX);
    floatX *host = xmalloc(bytes * (size_t)dp->size, "outer weights of a bucket"),
           *sent = xmalloc(bytes, "outer weights of a bucket");
    Stream *last = base->lanes->last;
    copy_to_host(last, sent, own, bytes);
    stream_synchronize(last);
    peers_all_gather(peers, sent, host, (int)bytes, MPI_BYTE);
    for (int owner = 0; owner < dp->size; owner++) {
        const floatX *from = host + owner * bucket_shard(bucket);
        WeightShard to = weights_shard(base, weights, b, owner);
        if (!to.matrix) continue;
        copy_to_device(last, to.matrix, from, (size_t)bucket->matrix_per_rank * sizeof(floatX));
        copy_to_device(last, to.tail, from + bucket->matrix_per_rank,
                       (size_t)bucket->tail_per_rank * sizeof(floatX));
    }
    stream_synchronize(last);
    free(sent);
    free(host);
}

// Copies the outer weights of bucket b to the model weights that this rank holds.
static void gather_outer(const Base *base, const Outer *l, Weights *weights, int b) {
    const Bucket *bucket = &base->layout.bucket[b];
    const floatX *own = l->rounded + bucket->state_start;
    int64_t elements;
    floatX *all = weights_kept(base, weights, b, &elements);
    if (base->mesh->rail.size > 1) {
        gather_over_nodes(base, own, weights, b);
        return;
    }
    if (weights_store(weights, b)->gathers || base->mesh->node.size == 1) {
        copy_on_device(base->lanes->last, all, own, (size_t)elements * sizeof(floatX));
        return;
    }
    gather_shards(base, weights, own, all, bucket->matrix_per_rank);
    gather_shards(base, weights, own + bucket->matrix_per_rank, all + bucket->matrix_elements,
                  bucket->tail_per_rank);
}

// Copies this replica group's model weights to the host or back.
static void keep_own(const Base *base, const Outer *l, Weights *weights, bool back) {
    floatX *host = l->kept;
    for (int b = 0; b < base->layout.buckets; b++) {
        int64_t elements;
        floatX *kept = weights_kept(base, weights, b, &elements);
        size_t bytes = (size_t)elements * sizeof(floatX);
        if (back) copy_to_device(base->compute, kept, host, bytes);
        else copy_to_host(base->compute, host, kept, bytes);
        host += elements;
    }
    stream_synchronize(base->compute);
}

void outer_use(const Base *base, Outer *l, const Optimizer *optimizer, Weights *weights, bool on) {
    if (!is_on(base) || on == l->in_place) return;
    weights_replaced(base, weights);
    if (on) {
        l->in_place = true;
        keep_own(base, l, weights, false);
        outer_finish(base, l, optimizer);
        for (int b = 0; b < base->layout.buckets; b++) gather_outer(base, l, weights, b);
        stream_synchronize(base->lanes->last);
    } else {
        keep_own(base, l, weights, true);
        l->in_place = false;
    }
}
