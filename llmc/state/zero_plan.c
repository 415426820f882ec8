// Plans, starts and frees the training state: see zero.h. Planning chooses payload formats and
// stores, builds the bucket layout, reserves all buffers in the memory plan and lists this rank's
// ranges. It needs no device.
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/ranks/parallel.h"
#include "llmc/state/zero.h"
#include "llmc/state/zero_parts.h"

// Translates the flags into payload formats (docs/how_it_works.md, table of presets).
static void choose_wires(Zero *zero) {
    const Config *c = zero->base.config;
    GradFormat plain = {0};
    plain.intra_codec = plain.inter_codec = plain.tail_codec = c->grad_reduce_in_bf16 ? CODEC_BF16
                                                                                      : CODEC_FP32;
    plain.intra_group = plain.inter_group = HADAMARD_ORDER;
    plain.chunks = c->gradient_alltoall_pipeline;
    plain.rounding = c->gq_rounding;
    zero->base.plain_grad_format = zero->base.grad_format = plain;
    if (c->quantized_gradients) {
        GradFormat *w = &zero->base.grad_format;
        w->intra_codec = codec_of_bits(c->gradient_quantization_bits_intra);
        bool eden = c->gradient_quantization_method == GRADIENT_EDEN;
        w->inter_codec = eden ? eden_of_bits(c->gradient_quantization_bits_inter)
                              : codec_of_bits(c->gradient_quantization_bits_inter);
        w->intra_group = c->gq_group_size_intra;
        w->inter_group = c->gq_group_size_inter;
        w->tail_codec = CODEC_BF16;
        w->transform = eden                    ? TRANSFORM_ROTATION
                       : c->hadamard_transform ? TRANSFORM_HADAMARD
                                               : TRANSFORM_NONE;
    }
    WeightFormat weight = plain_weight_format();
    if (c->quantized_weights && c->weight_quantization_method == WEIGHT_LOSSLESS) {
        weight.difference = true;
    } else if (c->quantized_weights) {
        weight.codec = codec_of_bits(c->weight_quantization_bits);
        weight.group = c->wq_group_size;
        weight.difference = c->weight_quantization_method == WEIGHT_DIFFERENCE;
        weight.rounding = c->wq_rounding;
    }
    zero->base.weight_format = weight;
}

static LayoutOptions plan_options(const Zero *zero) {
    const Config *c = zero->base.config;
    LayoutOptions o = {0};
    // A single rank sends nothing. Quantization flags must not change its results, so its layout
    // has neither groups nor padding for groups.
    bool sends = zero->base.mesh->dp.size > 1, exchanges = zero->base.mesh->replica_groups.size > 1;
    bool gradients = (sends || exchanges) && c->quantized_gradients;
    bool weights = sends && codec_grouped(zero->base.weight_format.codec);
    int intra = gradients ? c->gq_group_size_intra : 0, inter = gradients ? c->gq_group_size_inter : 0;
    o.nodes = zero->base.mesh->rail.size;
    o.per_node = zero->base.mesh->node.size;
    o.chunk_alignment = layout_alignment(intra, inter, 0);
    o.alignment = layout_alignment(intra, inter, weights ? c->wq_group_size : 0);
    o.bucket_elements = c->ddp_bucket_size;
    o.pieces = zero->base.mesh->replica_groups.size;
    return o;
}

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

// Reserves the buffers for lossless weights. The table of payload lengths is at the end of the
// first gather buffer, because the ranks of a node may map that buffer.
static void reserve_lossless(Zero *zero, MemoryPlan *memory_plan) {
    const BucketLayout *layout = &zero->base.layout;
    QwdLossless *lossless = &zero->lossless;
    size_t plain = 0, coded = 0, lengths = (size_t)(layout->dp * layout->buckets);
    if (layout->dp == 1 || !format_is_lossless(&zero->base.weight_format)) return;
    lossless->coded_start = xcalloc((size_t)layout->buckets, sizeof(int64_t), "the bucket table");
    lossless->slot = xcalloc((size_t)layout->buckets, sizeof(int64_t), "the bucket table");
    lossless->landed = xcalloc(lengths, sizeof(uint32_t), "lengths of messages");
    for (int b = 0; b < layout->buckets; b++) {
        lossless->coded_start[b] = (int64_t)coded;
        coded += (size_t)round_up64(layout_lossless(&layout->bucket[b]).most, 256);
        plain = larger(plain, (size_t)qwd_plain_message(layout, b).bytes);
    }
    memory_plan_reserve(memory_plan, "communication", "weights, before they are coded", plain,
                        (void **)&lossless->plain);
    memory_plan_reserve(memory_plan, "communication", "weights, coded", coded, (void **)&lossless->coded);
    zero->lengths_start = (size_t)round_up64((int64_t)zero->weights.gather_bytes[0], 256);
    zero->weights.gather_bytes[0] = zero->lengths_start + lengths * sizeof(uint32_t);
}

static void reserve_communication(Zero *zero, MemoryPlan *memory_plan) {
    TlqWorkspace plain, *w = &zero->tlq;
    tlq_workspace(w, &zero->base.layout, &zero->base.grad_format);
    tlq_workspace(&plain, &zero->base.layout, &zero->base.plain_grad_format);
    bool late_start = zero->base.config->quantized_gradients &&
                      zero->base.config->gradients_quantization_start_iteration > 0;
    if (late_start) {
        w->send1_bytes = w->recv1_bytes = larger(w->send1_bytes, plain.send1_bytes);
        w->send2_bytes = w->recv2_bytes = larger(w->send2_bytes, plain.send2_bytes);
    }
    if (zero->base.layout.dp == 1) w->send1_bytes = w->recv1_bytes = w->send2_bytes = w->recv2_bytes = 0;
    const char *group = "communication";
    int64_t alignment = base_alignment(&zero->base);
    tlq_reserve(memory_plan, group, w, alignment);
    // Two buffers, so that one bucket is gathered while the next is updated.
    size_t *gather = zero->weights.gather_bytes;
    for (int b = 0; b < zero->base.layout.buckets; b++) {
        GatherBuffer buffer = weights_buffer(&zero->base, &zero->weights, b);
        size_t bytes = qwd_buffer_bytes(zero->base.state, b, &zero->base.weight_format,
                                        zero->optimizer.store->on_host, buffer.nodes * buffer.per_node);
        gather[qwd_slot(b)] = larger(gather[qwd_slot(b)], bytes);
    }
    gather[0] = larger(gather[0], grads_gather_bytes(&zero->base, &zero->grads));
    reserve_lossless(zero, memory_plan);
    for (int slot = 0; slot < LANE_SLOTS; slot++)
        memory_plan_reserve(memory_plan, group, "weights, gathered",
                            (size_t)round_up64((int64_t)gather[slot], alignment),
                            (void **)&zero->weights.gather[slot]);
    if (alignment > 1)
        memory_plan_reserve(memory_plan, group, "flags of the node's ranks", COMM_FLAG_BYTES,
                            &zero->node_flags);
}

static void reserve_memory(Zero *zero, MemoryPlan *memory_plan) {
    Base *base = &zero->base;
    const BucketLayout *layout = &base->layout;
    const char *group = "norm and step status";
    int64_t sums = 0;  // number of partial sums of the gradient norm, one per 32 elements of the shard
    for (int b = 0; b < layout->buckets; b++) {
        base->partial_start[b] = sums;
        sums += layout->bucket[b].matrix_per_rank / HADAMARD_ORDER;
        sums += ceil_div64(layout->bucket[b].tail_per_rank, HADAMARD_ORDER);
    }
    weights_reserve(base, &zero->weights, memory_plan);
    grads_reserve(base, &zero->grads, zero->optimizer.store->on_host, memory_plan);
    feedback_reserve(base, &zero->feedback, memory_plan);
    zero->optimizer.store->reserve(base, &zero->optimizer, memory_plan);
    muon_reserve(base, &zero->muon, zero->optimizer.store->on_host, memory_plan);
    outer_reserve(base, &zero->outer, &zero->weights, memory_plan);
    memory_plan_reserve(memory_plan, group, "segment table", (size_t)layout->segments_total * sizeof(Segment),
                        (void **)&base->segments);
    memory_plan_reserve(memory_plan, group, "partial sums of the norm", (size_t)sums * sizeof(float),
                        (void **)&base->partial_sums);
    memory_plan_reserve(memory_plan, group, "sums per bucket", 2 * (size_t)layout->buckets * sizeof(float),
                        (void **)&zero->piece_sums);
    memory_plan_reserve(memory_plan, group, "records of all ranks",
                        (size_t)base->mesh->world.size * sizeof(StepRecord), (void **)&zero->records);
    memory_plan_reserve(memory_plan, group, "step status", sizeof(StepStatus), (void **)&base->control);
    memory_plan_reserve(memory_plan, group, "loss", sizeof(float), (void **)&zero->loss_sum);
    bool copies = base->mesh->tp.size > 1 || base->mesh->pp.size > 1;
    int hashes = copies && layout->tensors > layout->buckets ? layout->tensors : layout->buckets;
    memory_plan_reserve(memory_plan, group, "replica hashes", (size_t)hashes * sizeof(uint64_t),
                        (void **)&zero->hash);
    if (zero->wire_checks.sealed) {
        memory_plan_reserve(memory_plan, group, "checksums of messages",
                            WIRE_HOPS * (size_t)wire_most_peers(base->mesh) * sizeof(uint64_t),
                            (void **)&zero->wire_checks.sums);
    }
    if (zero->wire_checks.sealed && zero->weights.layers->gathers) {
        memory_plan_reserve(memory_plan, group, "checksums of layers' weights",
                            (size_t)base->mesh->node.size * WIRE_PART_BYTES,
                            (void **)&zero->wire_checks.parts);
    }
    memory_plan_reserve(memory_plan, group, "first fault", sizeof(uint64_t),
                        (void **)&zero->wire_checks.fault);
    memory_plan_reserve(memory_plan, group, "zero count", sizeof(int64_t), (void **)&zero->zeros);
    reserve_communication(zero, memory_plan);
}

// Checks that payload lengths of lossless weights fit into 32 bits.
static bool lengths_fit(const Zero *zero, Error *err) {
    const BucketLayout *layout = &zero->base.layout;
    bool coded = layout->dp > 1 && format_is_lossless(&zero->base.weight_format);
    for (int b = 0; coded && b < layout->buckets; b++) {
        int64_t most = layout_lossless(&layout->bucket[b]).most;
        if (most <= UINT32_MAX) continue;
        return usage_error(err,
                           "lossless weights of bucket %d may take %lld bytes, but payloads are limited to "
                           "2^32 bytes; lower --ddp-bucket-size, or train with more data-parallel ranks",
                           b, (long long)most);
    }
    return true;
}

static bool plan_layout(Zero *zero, const Tensor *tensors, int count, Error *err) {
    LayoutOptions options = plan_options(zero);
    LayoutTensor *rows = tensors_for_plan(tensors, count);
    bool ok = layout_build(&zero->base.layout, rows, count, &options, err);
    free(rows);
    if (!ok) return false;
    ok = lengths_fit(zero, err);
    if (!ok) layout_free(&zero->base.layout);
    Base *base = &zero->base;
    bool sharded = base->config->sharding != SHARD_NOTHING || base->layout.dp == 1;
    base->state = sharded ? &base->layout : &base->unsharded;
    if (ok && !sharded) layout_unshard(&base->unsharded, &base->layout);
    return ok;
}

// Chooses the payload formats and stores, and builds the bucket layout.
static Zero *plan_base(const Config *config, const Mesh *mesh, const Tensor *tensors, int count, Error *err) {
    Zero *zero = xcalloc(1, sizeof *zero, "the training state");
    Base *base = &zero->base;
    base->config = config;
    base->mesh = zero->wire_checks.mesh = mesh;
    base->checks = &zero->wire_checks;
    zero->optimizer.store = config->optimizer_disk_offload  ? &optimizer_disk
                            : config->optimizer_cpu_offload ? &optimizer_host
                                                            : &optimizer_device;
    choose_wires(zero);
    if (!faults_from_environment(&base->faults, mesh->world.rank, err) ||
        !plan_layout(zero, tensors, count, err)) {
        free(zero);
        return NULL;
    }
    base->tensors = xcalloc((size_t)count, sizeof(Tensor), "the parameter table");
    memcpy(base->tensors, tensors, (size_t)count * sizeof(Tensor));
    return zero;
}

Zero *zero_plan_weights_alone(const Config *config, const Mesh *mesh, const Tensor *tensors, int count,
                              MemoryPlan *memory_plan, Error *err) {
    Zero *zero = plan_base(config, mesh, tensors, count, err);
    if (zero) weights_reserve(&zero->base, &zero->weights, memory_plan);
    return zero;
}

void zero_start_weights_alone(Zero *zero, Stream *compute) { zero->base.compute = compute; }

Zero *zero_plan(const Config *config, const Mesh *mesh, const Tensor *tensors, int count,
                MemoryPlan *memory_plan, Error *err) {
    Zero *zero = plan_base(config, mesh, tensors, count, err);
    if (!zero) return NULL;
    Base *base = &zero->base;
    bool exchanges = base->layout.dp > 1 || mesh->replica_groups.size > 1;
    zero->wire_checks.sealed = config->verify_wire && (exchanges || config->quantized_activations);
    zero->wire_checks.faults = &base->faults;
    if (config->verify_wire && exchanges) layout_seal(&base->layout);
    base->partial_start = xcalloc((size_t)base->layout.buckets, sizeof(int64_t), "the bucket table");
    reserve_memory(zero, memory_plan);
    stats_reserve(base, &zero->stats, memory_plan);
    base_list_ranges(base);
    // At least one byte, because zero_staging must not be NULL on a rank that owns nothing.
    if (config->save && config->async_save) {
        zero->slices.staging_bytes = zero_own_checkpoint_bytes(zero, !config->no_save_optim);
        memory_plan_reserve_host(memory_plan, "host memory", "copy of a checkpoint (--async-save)",
                                 larger((size_t)zero->slices.staging_bytes, 1), &zero->slices.staging);
    }
    return zero;
}

// --- start and end -------------------------------------------------------------------------------

// Lets the other ranks of the node map this rank's send buffers.
static void share_buffers(Zero *zero) {
    const TlqWorkspace *exact = &zero->stats.workspace;
    CommPiece piece[2 + LANE_SLOTS] = {{zero->tlq.send1, zero->tlq.send1_bytes},
                                       {exact->send1, exact->send1_bytes}};
    for (int slot = 0; slot < LANE_SLOTS; slot++)
        piece[2 + slot] = (CommPiece){zero->weights.gather[slot], zero->weights.gather_bytes[slot]};
    comm_share(&zero->base.mesh->node, zero->node_flags, piece, 2 + LANE_SLOTS, &zero->not_shared);
}

// Logs once for all ranks what makes the disk slower.
static void log_slow_disk(const ScratchFile *file, Peers world, Log *log) {
    int slow[2] = {file && !file->direct, file ? file->refused : 0};
    peers_all_reduce(world, slow, 2, MPI_INT, MPI_MAX);
    if (slow[0])
        log_line(log,
                 "--optimizer-disk-offload: the file system does not support O_DIRECT, so transfers use "
                 "the page cache and are slower");
    if (slow[1])
        log_line(
            log,
            "--optimizer-disk-offload: the system refuses io_uring (%s), so transfers use threads and do "
            "not overlap with other work",
            strerror(slow[1]));
}

bool zero_open_disk(Zero *zero, Peers world, Peers host, Log *log, Error *err) {
    DiskState *disk = zero->optimizer.disk;
    if (!disk) return true;
    bool ok = scratch_claim(&disk->folder, zero->base.config->optimizer_disk_offload, peers_patience(world),
                            host, err);
    // Files may be created when all leftovers have been removed.
    int threads = parallel_share(host);
    ok = ok && disk_start(disk, zero->optimizer.disk_memory, threads, world.site, NULL, err);
    log_slow_disk(ok ? disk->file : NULL, world, log);
    return ok;
}

void zero_start(Zero *zero, Device *device, Stream *compute, Lanes *lanes, Timers *timers) {
    assert(zero && device && compute && lanes && timers);
    Base *base = &zero->base;
    base->device = device;
    base->compute = compute;
    base->lanes = lanes;
    base->timers = timers;
    bool own_stream = lanes->apart && zero->slices.staging;
    zero->slices.stream = own_stream ? stream_create(device, "checkpoint copies") : lanes->last;
    zero->slices.staged = event_create(device);
    zero->computed = event_create(device);
    zero->status_known = event_create(device);
    for (int i = 0; i < 2; i++) zero->landing[i] = event_create(device);
    grads_start(base, &zero->grads);
    if (zero->optimizer.store->start) zero->optimizer.store->start(base, &zero->optimizer);
    muon_start(base, &zero->muon);
    if (zero->optimizer.store->on_host)
        muon_start_on_host(base, &zero->muon, &zero->optimizer.host, zero->optimizer.disk);
    outer_start(base, &zero->outer);
    copy_to_device(compute, base->segments, base->layout.segments,
                   (size_t)base->layout.segments_total * sizeof(Segment));
    StepStatus start = {0};
    start.beta1_power = start.beta2_power = 1.0;
    zero_set_counters(zero, &start);
    weights_start(base, &zero->weights);
    stream_synchronize(compute);
    if (zero->node_flags) share_buffers(zero);
    _Static_assert(sizeof(StepRecord) >= COMM_TRIAL_BYTES, "records serve as memory for the first messages");
    comm_connect(base->mesh, zero->records);
    zero->lossless.bytes = (uint32_t *)(void *)(zero->weights.gather[0] + zero->lengths_start);
}

void zero_stop(Zero *zero) {
    if (!zero || !zero->base.device) return;
    zero_synchronize(zero);
    if (zero->optimizer.disk) disk_stop(zero->optimizer.disk);
    comm_unshare(&zero->base.mesh->node);
}

void zero_free(Zero *zero) {
    if (!zero) return;
    Base *base = &zero->base;
    if (base->device) {
        muon_free(&zero->muon);
        event_destroy(zero->computed);
        event_destroy(zero->status_known);
        event_destroy(zero->slices.staged);
        for (int i = 0; i < 2; i++) event_destroy(zero->landing[i]);
        if (zero->slices.stream != base->lanes->last) stream_destroy(zero->slices.stream);
    }
    if (zero->optimizer.store) zero->optimizer.store->free(base, &zero->optimizer);
    outer_free(base, &zero->outer);
    weights_free(base, &zero->weights);
    grads_free(base, &zero->grads);
    free(zero->feedback.start);
    free(zero->feedback.ranges);
    stats_free(&zero->stats);
    free(zero->lossless.coded_start);
    free(zero->lossless.landed);
    free(zero->lossless.slot);
    free(zero->slices.copy);
    free(base->partial_start);
    free(base->ranges);
    free(base->unsharded.bucket);
    layout_free(&base->layout);
    free(base->tensors);
    free(zero);
}

const BucketLayout *zero_layout(const Zero *zero) { return &zero->base.layout; }
const BucketLayout *zero_state_layout(const Zero *zero) { return zero->base.state; }
const GradFormat *zero_grad_format(const Zero *zero, bool quantized) {
    return quantized ? &zero->base.grad_format : &zero->base.plain_grad_format;
}
const WeightFormat *zero_weight_format(const Zero *zero) { return &zero->base.weight_format; }
const StepStatus *zero_status_on_device(const Zero *zero) { return zero->base.control; }
float *zero_loss_sum(const Zero *zero) { return zero->loss_sum; }
WireChecks *zero_wire_checks(Zero *zero) { return &zero->wire_checks; }

const Tensor *zero_tensors(const Zero *zero, int *count) {
    if (count) *count = zero->base.layout.tensors;
    return zero->base.tensors;
}

bool zero_node_shares(const Zero *zero, Error *why) {
    *why = zero->not_shared;
    return zero->node_flags != NULL;
}

void zero_init_master_weights(Zero *zero) {
    const Base *base = &zero->base;
    for (int i = 0; i < base->held_count; i++) {
        const Range *range = &base->ranges[i];
        const floatX *weights = weights_of_range(base, &zero->weights, range);
        zero->optimizer.store->widen(base, &zero->optimizer, range->state_at, weights, range->hi - range->lo);
    }
    outer_from_master(base, &zero->outer, &zero->optimizer);
}
