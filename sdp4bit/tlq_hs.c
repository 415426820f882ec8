// TLq-HS and its siblings: see tlq_hs.h. This file is the order of the hops; the numbers are in kernels.h.
#include "sdp4bit/tlq_hs.h"

void tlq_workspace(TlqWorkspace *w, const Plan *plan, const GradWire *wire) {
    int64_t largest1 = 0, largest2 = 0;
    for (int b = 0; b < plan->buckets; b++) {
        for (int k = 0; k < wire->chunks; k++) {
            MessageLayout level1, level2;
            plan_grad_messages(plan, &plan->bucket[b], wire, k, &level1, &level2);
            if (level1.bytes > largest1) largest1 = level1.bytes;
            if (level2.bytes > largest2) largest2 = level2.bytes;
        }
    }
    w->send1_bytes = w->recv1_bytes = (size_t)(largest1 * plan->options.per_node);
    w->send2_bytes = w->recv2_bytes = (size_t)(largest2 * plan->options.nodes);
}

static RoundingKey rounding_key(const TlqStep *step, uint32_t purpose, int source) {
    RoundingKey key = {step->seed, step->step, purpose, (uint32_t)source};
    return key;
}

// The first hop: level 1, or level 2 alone where every node has one rank.
static void quantize_and_send(const TlqStep *step, int b, int k, const float *grads, CommScope scope, const MessageLayout *message, uint8_t *send,
                              uint8_t *recv, Comm *comm, Stream *stream) {
    bool node_hop = scope == COMM_NODE;
    const Bucket *bucket = &step->plan->bucket[b];
    QuantizePartitions q = {0};
    q.grads = grads;
    q.bucket = *bucket;
    q.table.segment = step->segments + bucket->first_segment;
    q.table.count = bucket->segments;
    plan_chunk(step->plan, bucket, step->wire.chunks, k, &q.lo, &q.hi);
    q.scale = 1.0f / (float)step->plan->dp;
    q.hadamard = step->wire.hadamard;
    q.codec = node_hop ? step->wire.intra_codec : step->wire.inter_codec;
    q.group = node_hop ? step->wire.intra_group : step->wire.inter_group;
    q.tail_codec = step->wire.tail_codec;
    q.rounding = step->wire.rounding;
    q.key = node_hop ? rounding_key(step, PURPOSE_GRAD_LEVEL1, step->topology->dp_rank) : rounding_key(step, PURPOSE_GRAD_LEVEL2, step->topology->node);
    q.slots = comm_size(comm, scope);
    q.self = comm_rank(comm, scope);
    q.send = send;
    q.self_slot = recv + q.self * message->bytes;
    q.message = *message;
    kernel_quantize_partitions(stream, &q);
    wire_all_to_all(step->check, node_hop ? HOP_GRAD_NODE : HOP_GRAD_RAIL, b, k, message, send, recv, comm, stream);
}

// The second hop of two.
static void requantize_and_send(const TlqStep *step, int b, int k, const MessageLayout *level1, const MessageLayout *level2, Comm *comm, Stream *stream) {
    const Bucket *bucket = &step->plan->bucket[b];
    SumRequantize r = {0};
    r.received = step->workspace.recv1;
    r.sources = step->topology->per_node;
    r.in = *level1;
    r.in_codec = step->wire.intra_codec;
    r.in_group = step->wire.intra_group;
    r.local = step->topology->local;
    r.per_node = step->topology->per_node;
    r.bucket = *bucket;
    r.table.segment = step->segments + bucket->first_segment;
    r.table.count = bucket->segments;
    plan_chunk(step->plan, bucket, step->wire.chunks, k, &r.lo, &r.hi);
    r.codec = step->wire.inter_codec;
    r.group = step->wire.inter_group;
    r.tail_codec = step->wire.tail_codec;
    r.rounding = step->wire.rounding;
    // Level 2's source is the node: its D ranks hold disjoint shards, so their logical offsets keep the bits apart.
    r.key = rounding_key(step, PURPOSE_GRAD_LEVEL2, step->topology->node);
    r.self = step->topology->node;
    r.send = step->workspace.send2;
    r.self_slot = step->workspace.recv2 + r.self * level2->bytes;
    r.out = *level2;
    kernel_sum_requantize(stream, &r);
    wire_all_to_all(step->check, HOP_GRAD_RAIL, b, k, level2, step->workspace.send2, step->workspace.recv2, comm, stream);
}

static void sum_shard(const TlqStep *step, int b, int k, float *grads, CommScope scope, const MessageLayout *message, const uint8_t *received,
                      float *matrix_leaves, float *tail_leaves, Comm *comm, Stream *stream) {
    const Bucket *bucket = &step->plan->bucket[b];
    SumFinal f = {0};
    f.received = received;
    f.sources = comm_size(comm, scope);
    f.in = *message;
    f.codec = scope == COMM_NODE ? step->wire.intra_codec : step->wire.inter_codec;
    f.group = scope == COMM_NODE ? step->wire.intra_group : step->wire.inter_group;
    f.tail_codec = step->wire.tail_codec;
    f.hadamard = step->wire.hadamard;
    f.rank = step->topology->dp_rank;
    f.bucket = *bucket;
    f.table.segment = step->segments + bucket->first_segment;
    f.table.count = bucket->segments;
    plan_chunk(step->plan, bucket, step->wire.chunks, k, &f.lo, &f.hi);
    f.grads = grads;
    f.matrix_leaves = matrix_leaves;
    f.tail_leaves = tail_leaves;
    kernel_sum_final(stream, &f);
}

void tlq_reduce_bucket(const TlqStep *step, int b, float *grads, float *matrix_leaves, float *tail_leaves, Comm *comm, Stream *stream) {
    const Bucket *bucket = &step->plan->bucket[b];
    const TlqWorkspace *w = &step->workspace;
    int nodes = step->plan->options.nodes, per_node = step->plan->options.per_node;
    if (step->plan->dp == 1) {
        kernel_square_leaves(stream, matrix_leaves, grads, bucket->matrix_shard);
        kernel_square_leaves(stream, tail_leaves, grads + bucket->matrix, bucket->tail_shard);
        return;
    }
    for (int k = 0; k < step->wire.chunks; k++) {
        MessageLayout level1, level2;
        plan_grad_messages(step->plan, bucket, &step->wire, k, &level1, &level2);
        if (level1.bytes + level2.bytes == 0) continue;  // more chunks than borders: this one is empty
        if (per_node > 1) quantize_and_send(step, b, k, grads, COMM_NODE, &level1, w->send1, w->recv1, comm, stream);
        else quantize_and_send(step, b, k, grads, COMM_RAIL, &level2, w->send2, w->recv2, comm, stream);
        if (per_node > 1 && nodes > 1) requantize_and_send(step, b, k, &level1, &level2, comm, stream);
        if (nodes > 1) sum_shard(step, b, k, grads, COMM_RAIL, &level2, w->recv2, matrix_leaves, tail_leaves, comm, stream);
        else sum_shard(step, b, k, grads, COMM_NODE, &level1, w->recv1, matrix_leaves, tail_leaves, comm, stream);
    }
}
