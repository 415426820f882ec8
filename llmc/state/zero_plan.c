// Sets a Zero up before there is a device: what travels in which form, the layout, every buffer in
// the memory plan, this rank's pieces of the tensors. See zero.h; zero.c goes on from here.
#include <stdlib.h>
#include <string.h>

#include "llmc/state/zero_inside.h"

// The flags as choices of codecs (README, table of presets).
static void choose_wires(Zero *zero) {
    const Config *c = zero->config;
    GradWire plain = {0};
    plain.intra_codec = plain.inter_codec = plain.tail_codec = c->grad_reduce_in_bf16 ? CODEC_BF16
                                                                                      : CODEC_FP32;
    plain.intra_group = plain.inter_group = HADAMARD_ORDER;
    plain.chunks = c->gradient_alltoall_pipeline;
    plain.rounding = c->gq_rounding;
    zero->plain_grad_wire = zero->grad_wire = plain;
    if (c->quantized_gradients) {
        GradWire *w = &zero->grad_wire;
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
    WeightWire weight = plain_weight_wire();
    if (c->quantized_weights && c->weight_quantization_method == WEIGHT_LOSSLESS) {
        weight.difference = true;
    } else if (c->quantized_weights) {
        weight.codec = codec_of_bits(c->weight_quantization_bits);
        weight.group = c->wq_group_size;
        weight.difference = c->weight_quantization_method == WEIGHT_DIFFERENCE;
        weight.rounding = c->wq_rounding;
    }
    zero->weight_wire = weight;
}

static PlanOptions plan_options(const Zero *zero) {
    const Config *c = zero->config;
    PlanOptions o = {0};
    // One rank sends nothing. The quantization flags must not move a single number there: no
    // groups, and no padding for them.
    bool sends = zero->mesh->dp.size > 1, exchanges = zero->mesh->replica_groups.size > 1;
    bool gradients = (sends || exchanges) && c->quantized_gradients;
    bool weights = sends && codec_grouped(zero->weight_wire.codec);
    int intra = gradients ? c->gq_group_size_intra : 0, inter = gradients ? c->gq_group_size_inter : 0;
    o.nodes = zero->mesh->rail.size;
    o.per_node = zero->mesh->node.size;
    o.chunk_border = plan_border(intra, inter, 0);
    o.border = plan_border(intra, inter, weights ? c->wq_group_size : 0);
    o.bucket_elements = c->ddp_bucket_size;
    o.pieces = zero->mesh->replica_groups.size;
    return o;
}

static int64_t bucket_leaves(const Bucket *bucket) {
    return bucket->matrix_per_rank / HADAMARD_ORDER + ceil_div64(bucket->tail_per_rank, HADAMARD_ORDER);
}

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

int64_t zero_grain(const Zero *zero) {
    bool copies = zero->config->node_exchange != NODE_EXCHANGE_NCCL && zero->mesh->node.size > 1;
    return copies ? COMM_GRAIN : 1;
}

// Where lossless weights are coded. The lengths of messages lie behind those in the first gather
// buffer: the ranks of a node may fetch them there.
static void reserve_lossless(Zero *zero, MemoryPlan *memory_plan) {
    const Plan *plan = &zero->plan;
    QwdLossless *lossless = &zero->lossless;
    size_t plain = 0, coded = 0, lengths = (size_t)(plan->dp * plan->buckets);
    if (plan->dp == 1 || !wire_is_lossless(&zero->weight_wire)) return;
    lossless->coded_start = (int64_t *)xcalloc((size_t)plan->buckets, sizeof(int64_t), "the bucket table");
    lossless->slot = (int64_t *)xcalloc((size_t)plan->buckets, sizeof(int64_t), "the bucket table");
    lossless->landed = (uint32_t *)xcalloc(lengths, sizeof(uint32_t), "lengths of messages");
    for (int b = 0; b < plan->buckets; b++) {
        lossless->coded_start[b] = (int64_t)coded;
        coded += (size_t)round_up64(plan_lossless(&plan->bucket[b]).most, 256);
        plain = larger(plain, (size_t)qwd_plain_message(plan, b).bytes);
    }
    memory_plan_reserve(memory_plan, "communication", "weights, before they are coded", plain,
                        (void **)&lossless->plain);
    memory_plan_reserve(memory_plan, "communication", "weights, coded", coded, (void **)&lossless->coded);
    zero->lengths_start = (size_t)round_up64((int64_t)zero->gather_bytes[0], 256);
    zero->gather_bytes[0] = zero->lengths_start + lengths * sizeof(uint32_t);
}

static void reserve_communication(Zero *zero, MemoryPlan *memory_plan) {
    TlqWorkspace plain, *w = &zero->tlq;
    tlq_workspace(w, &zero->plan, &zero->grad_wire);
    tlq_workspace(&plain, &zero->plan, &zero->plain_grad_wire);
    bool late_start = zero->config->quantized_gradients &&
                      zero->config->gradients_quantization_start_iteration > 0;
    if (late_start) {
        w->send1_bytes = w->recv1_bytes = larger(w->send1_bytes, plain.send1_bytes);
        w->send2_bytes = w->recv2_bytes = larger(w->send2_bytes, plain.send2_bytes);
    }
    if (zero->plan.dp == 1) w->send1_bytes = w->recv1_bytes = w->send2_bytes = w->recv2_bytes = 0;
    const char *group = "communication";
    int64_t grain = zero_grain(zero);
    tlq_reserve(memory_plan, group, w, grain);
    // Two buffers for all buckets, which use them in turn: one is gathered while another shard is
    // updated.
    size_t *gather = zero->gather_bytes;
    for (int b = 0; b < zero->plan.buckets; b++) {
        GatherBuffer buffer = zero_gather_buffer(zero, b);
        size_t bytes = qwd_buffer_bytes(&zero->plan, b, &zero->weight_wire, zero_offloads(zero),
                                        buffer.nodes * buffer.per_node);
        gather[qwd_slot(b)] = larger(gather[qwd_slot(b)], bytes);
    }
    reserve_lossless(zero, memory_plan);
    for (int slot = 0; slot < LANE_SLOTS; slot++)
        memory_plan_reserve(memory_plan, group, "weights, gathered",
                            (size_t)round_up64((int64_t)gather[slot], grain), (void **)&zero->gather[slot]);
    if (grain > 1)
        memory_plan_reserve(memory_plan, group, "flags of the node's ranks", COMM_FLAG_BYTES,
                            &zero->node_flags);
}

static void reserve_optimizer(Zero *zero, MemoryPlan *memory_plan) {
    size_t bytes = (size_t)zero->plan.shard_elements * sizeof(float);
    const char *group = "optimizer state";
    memory_plan_reserve(memory_plan, group, "fp32 master weights, own shard", bytes, (void **)&zero->master);
    memory_plan_reserve(memory_plan, group, "first moments, own shard", bytes, (void **)&zero->exp_avg);
    memory_plan_reserve(memory_plan, group, "second moments, own shard", bytes, (void **)&zero->exp_avg_sq);
}

static void reserve_memory(Zero *zero, MemoryPlan *memory_plan) {
    const Plan *plan = &zero->plan;
    size_t leaves = 0;
    for (int b = 0; b < plan->buckets; b++) {
        zero->leaf_start[b] = (int64_t)leaves;
        leaves += (size_t)bucket_leaves(&plan->bucket[b]);
    }
    zero_plan_weights(zero, memory_plan);
    zero_grads_reserve(zero, memory_plan);
    feedback_reserve(zero, memory_plan);
    if (zero_offloads(zero)) offload_reserve(zero, memory_plan);
    else reserve_optimizer(zero, memory_plan);
    local_reserve(zero, memory_plan);
    memory_plan_reserve(memory_plan, "norm and verdict", "segment table",
                        (size_t)plan->segments_total * sizeof(Segment), (void **)&zero->segments);
    memory_plan_reserve(memory_plan, "norm and verdict", "leaves of the norm", leaves * sizeof(float),
                        (void **)&zero->leaves);
    memory_plan_reserve(memory_plan, "norm and verdict", "sums per bucket",
                        2 * (size_t)plan->buckets * sizeof(float), (void **)&zero->piece_sums);
    memory_plan_reserve(memory_plan, "norm and verdict", "records of all ranks",
                        (size_t)zero->mesh->world.size * sizeof(StepRecord), (void **)&zero->records);
    memory_plan_reserve(memory_plan, "norm and verdict", "step control", sizeof(StepControl),
                        (void **)&zero->control);
    memory_plan_reserve(memory_plan, "norm and verdict", "loss", sizeof(float), (void **)&zero->loss_sum);
    bool copies = zero->mesh->tp.size > 1 || zero->mesh->pp.size > 1;
    int hashes = copies && plan->tensors > plan->buckets ? plan->tensors : plan->buckets;
    memory_plan_reserve(memory_plan, "norm and verdict", "replica hashes", (size_t)hashes * sizeof(uint64_t),
                        (void **)&zero->hash);
    if (zero->wire_checks.sealed) {
        memory_plan_reserve(memory_plan, "norm and verdict", "checksums of messages",
                            WIRE_HOPS * (size_t)wire_most_peers(zero->mesh) * sizeof(uint64_t),
                            (void **)&zero->wire_checks.sums);
    }
    if (zero->wire_checks.sealed && zero->shared.on) {
        memory_plan_reserve(memory_plan, "norm and verdict", "checksums of layers' weights",
                            (size_t)zero->mesh->node.size * WIRE_PART_BYTES,
                            (void **)&zero->wire_checks.parts);
    }
    memory_plan_reserve(memory_plan, "norm and verdict", "first fault", sizeof(uint64_t),
                        (void **)&zero->wire_checks.fault);
    memory_plan_reserve(memory_plan, "norm and verdict", "zero count", sizeof(int64_t),
                        (void **)&zero->zeros);
    reserve_communication(zero, memory_plan);
}

bool zero_cut_segment(const Plan *plan, int b, int i, int owner, Piece *piece, int64_t *in_window) {
    const Bucket *bucket = &plan->bucket[b];
    const Segment *segment = &plan->segments[bucket->first_segment + i];
    bool matrix = i < bucket->segments;
    int64_t shard = matrix ? bucket->matrix_per_rank : bucket->tail_per_rank, window = owner * shard;
    int64_t from = segment->start, to = segment->start + segment->numel;
    if (from < window) from = window;
    if (to > window + shard) to = window + shard;
    if (from >= to) return false;
    piece->tensor = (int)segment->tensor;
    piece->bucket = b;
    piece->lo = from - segment->start;
    piece->hi = to - segment->start;
    piece->arena_at = bucket->arena_start + (matrix ? 0 : bucket->matrix_elements) + from;
    *in_window = from - window;
    return true;
}

// Cuts each tensor against this rank's window of its bucket's part.
static void list_pieces(Zero *zero) {
    const Plan *plan = &zero->plan;
    zero->pieces = (Piece *)xcalloc((size_t)plan->segments_total, sizeof(Piece), "the shard's pieces");
    for (int b = 0; b < plan->buckets; b++) {
        const Bucket *bucket = &plan->bucket[b];
        for (int i = 0; i < bucket->segments + bucket->tails; i++) {
            Piece piece;
            int64_t in_window, part = i < bucket->segments ? 0 : bucket->matrix_per_rank;
            if (!zero_cut_segment(plan, b, i, zero->mesh->dp.rank, &piece, &in_window)) continue;
            piece.state_at = bucket->state_start + part + in_window;
            zero->pieces[zero->piece_count++] = piece;
        }
    }
}

// Messages of lossless weights tell their lengths in 32 bits.
static bool lengths_fit(const Zero *zero, Error *err) {
    const Plan *plan = &zero->plan;
    bool coded = plan->dp > 1 && wire_is_lossless(&zero->weight_wire);
    for (int b = 0; coded && b < plan->buckets; b++) {
        int64_t most = plan_lossless(&plan->bucket[b]).most;
        if (most <= UINT32_MAX) continue;
        return error_set(err, EXIT_USAGE,
                         "lossless weights of bucket %d may take %lld bytes in a message, which has 2^32 at "
                         "most; lower --ddp-bucket-size, or train with more data-parallel ranks",
                         b, (long long)most);
    }
    return true;
}

static bool plan_layout(Zero *zero, const Tensor *tensors, int count, Error *err) {
    PlanOptions options = plan_options(zero);
    PlanTensor *rows = tensors_for_plan(tensors, count);
    bool ok = plan_build(&zero->plan, rows, count, &options, err);
    free(rows);
    if (!ok) return false;
    ok = lengths_fit(zero, err);
    if (!ok) plan_free(&zero->plan);
    return ok;
}

Zero *zero_plan_weights_alone(const Config *config, const Mesh *mesh, const Tensor *tensors, int count,
                              MemoryPlan *memory_plan, Error *err) {
    Zero *zero = (Zero *)xcalloc(1, sizeof *zero, "the weights");
    zero->config = config;
    zero->mesh = zero->wire_checks.mesh = mesh;
    choose_wires(zero);
    if (!plan_layout(zero, tensors, count, err)) {
        free(zero);
        return NULL;
    }
    zero->tensors = (Tensor *)xcalloc((size_t)count, sizeof(Tensor), "the parameter table");
    memcpy(zero->tensors, tensors, (size_t)count * sizeof(Tensor));
    zero->pending = (bool *)xcalloc((size_t)zero->plan.buckets, sizeof(bool), "the bucket table");
    zero->done = (Event **)xcalloc((size_t)zero->plan.buckets, sizeof(Event *), "the bucket table");
    zero_plan_weights(zero, memory_plan);
    return zero;
}

void zero_start_weights_alone(Zero *zero, Stream *compute) { zero->compute = compute; }

Zero *zero_plan(const Config *config, const Mesh *mesh, const Tensor *tensors, int count,
                MemoryPlan *memory_plan, Error *err) {
    Zero *zero = (Zero *)xcalloc(1, sizeof *zero, "the state of training");
    zero->config = config;
    zero->mesh = zero->wire_checks.mesh = mesh;
    choose_wires(zero);
    if (!faults_from_environment(&zero->faults, mesh->world.rank, err) ||
        !plan_layout(zero, tensors, count, err)) {
        free(zero);
        return NULL;
    }
    zero->tensors = (Tensor *)xcalloc((size_t)count, sizeof(Tensor), "the parameter table");
    memcpy(zero->tensors, tensors, (size_t)count * sizeof(Tensor));
    zero->wire_checks.sealed = config->verify_wire && (zero->plan.dp > 1 || mesh->replica_groups.size > 1);
    zero->wire_checks.faults = &zero->faults;
    if (zero->wire_checks.sealed) plan_seal(&zero->plan);
    size_t buckets = (size_t)zero->plan.buckets;
    zero->leaf_start = (int64_t *)xcalloc(buckets, sizeof(int64_t), "the bucket table");
    zero->units_missing = (int *)xcalloc(buckets, sizeof(int), "the bucket table");
    zero->pending = (bool *)xcalloc(buckets, sizeof(bool), "the bucket table");
    zero->ready = (Event **)xcalloc(buckets, sizeof(Event *), "the bucket table");
    zero->done = (Event **)xcalloc(buckets, sizeof(Event *), "the bucket table");
    if (!zero_offloads(zero)) zero->landed = (StepControl *)xcalloc(2, sizeof(StepControl), "the verdicts");
    reserve_memory(zero, memory_plan);
    probe_reserve(zero, memory_plan);
    list_pieces(zero);
    // At least a byte: it must be there on every rank, also on one that owns nothing.
    if (config->save && config->async_save) {
        zero->staging_bytes = zero_own_checkpoint_bytes(zero, !config->no_save_optim);
        memory_plan_reserve_host(memory_plan, "host memory", "copy of a checkpoint (--async-save)",
                                 larger((size_t)zero->staging_bytes, 1), &zero->staging);
    }
    return zero;
}
